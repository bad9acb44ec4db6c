"""``unalike mdm``: fit a mixture of Dirichlet-multinomials to clients' histograms, by sums alone."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer
from rich.table import Table

from unalike.commands import options
from unalike.commands.console import bar, check_free, guarantee, print_files, say, worker_lines, write_figure
from unalike.commands.options import command, expect, flag
from unalike.runs.errors import UserError, explain_disk_errors

if TYPE_CHECKING:
    from unalike.analytics.mdm.study import MixturePrivacy

_data, _method, _privacy = (partial(flag, panel=one) for one in ("Data", "Method", "Privacy"))


@dataclass(frozen=True)
class Reading(options.TableFlags):
    """Whose histograms, and of what."""

    data: str | None = _data("A name of `unalike datasets`, or your own file or folder.")
    counts: Path | None = _data("Or ready histograms: a CSV, NPZ or NPY file, one row for each client.")
    feature: str | None = _data("Columns to model in place of the label, jointly: race,label (label is the label).")
    bins: list[str] | None = _data("Of a number: NAME=FIRST:LAST:WIDTH, or NAME=A/B/C, where each begins.")
    partition: str | None = options.partition_flag()
    clients: int | None = options.client_count_flag()

    def settings(self) -> dict[str, Any]:
        """What to read, as plain values."""
        if (self.data is None) == (self.counts is None):
            raise UserError("give the clients' data with --data, or ready histograms with --counts (one of the two)")
        if self.counts is not None and self.feature is not None:
            raise UserError("--feature is of --data; ready histograms are of one feature already")
        given = {name: getattr(self, name) for name in ("data", "partition", "clients")} | self.options()
        given["counts"] = None if self.counts is None else str(self.counts)
        given["feature"] = [] if self.feature is None else [name.strip() for name in self.feature.split(",")]
        return given | {"bins": dict(_bins(text) for text in self.bins or [])}


@dataclass(frozen=True)
class Fitting:
    """How to fit the mixture."""

    components: str = _method("How many; a range (1-6) or list (1,2,4) chooses one.", default="2")
    rounds: int = _method("EM steps.", default=100, min=1)
    cohort: int = _method("Clients asked in a round.", default=1000, min=1)
    start: str = _method("How clients choose their first component: concentration or random.", default="concentration")
    validation: float | None = _method("Clients kept apart to choose by: a number or share. (default: 0.2)")
    secure: bool = _privacy("Sum under masks: the server sees no client's own.", default=False)
    clip: float = _privacy("Of a client's share in the sums for A, with --epsilon.", default=20.0)
    largest: int | None = _privacy("The most samples a client may have; needed with --epsilon.", min=1)

    def settings(self) -> dict[str, Any]:
        """The arguments of ``fit_mixture``."""
        return {**vars(self), "components": _candidates(self.components)}


@dataclass(frozen=True)
class Budget:
    """What the fit may cost."""

    epsilon: float | None = options.epsilon_flag()
    delta: float | None = options.delta_flag()
    unit: str = _privacy("Who is protected: client, or point (one of its rows).", default="client")
    local: bool = _privacy("Clients add the noise themselves and trust nobody.", default=False)
    simulate_noise: bool = options.simulate_noise_flag()

    def privacy(self) -> MixturePrivacy | None:
        from unalike.analytics.mdm.study import MixturePrivacy

        if self.epsilon is None and (self.unit != "client" or self.local):
            raise UserError("--unit and --local are about privacy: give an ε (--epsilon)")
        if self.epsilon is None:
            return None
        return MixturePrivacy(self.epsilon, self.delta, self.unit, self.local)  # type: ignore[arg-type]  # it checks


app = typer.Typer()


@command(
    app,
    "unalike mdm --data mdm:medium-2 --components 2 --rounds 100 --cohort 1000 --seed 0 --json",
    "unalike mdm --data digits --partition dirichlet:0.3 --clients 60 --components 1-4 --out digits.json",
    "unalike run fedavg --data digits --partition mdm:digits.json --clients 40",
    "unalike mdm --data acs:income --feature race,age --bins age=18/30/45/65 --components 3 --out race-age.json",
    "unalike mdm --data mdm:medium-2 --components 2 --runtime ray --workers 2",
)
def mdm(
    reading: Reading,
    fitting: Fitting,
    budget: Budget,
    where: options.Where,
    seed: int = flag("Of data, cohorts and noise.", default=0),
    compare: bool = flag("Measure how near simulated clients are to the true ones.", default=False),
    plot: Path | None = options.plot_flag(),
    out: Path | None = flag("Write the mixture to this new file (--partition mdm:FILE)."),
    as_json: bool = options.json_flag(),
) -> None:
    """Learn how clients' histograms differ, of labels or of other features, and simulate clients like them.

    The method is that of Scott (2026, chapter 3): a mixture of Dirichlet-multinomials, fitted by sums alone.
    """
    check_free(plot=plot, out=out)
    from unalike.analytics.mdm.study import fit_mixture

    settings = fitting.settings()
    where.refuse(compare=compare, plot=plot is not None)
    with where.place(budget.epsilon, budget.simulate_noise) as place:
        privacy = budget.privacy()
        histograms = place.read("histograms", **reading.settings(), seed=seed)
        with bar(fitting.rounds, as_json, place) as progress:
            how: dict[str, Any] = {"compare": compare or plot is not None, "seed": seed, "progress": progress}
            found = fit_mixture(histograms, place.federate, privacy=privacy, **settings, **how)
    result = {"data": str(reading.data or reading.counts), **found.values(), **place.summary()}
    if result["privacy"] is not None:
        result["privacy"] |= options.noise_source(budget.epsilon, budget.simulate_noise)
    title = f"{result['data']}: {result['components']} component{'' if result['components'] == 1 else 's'}"
    if out is not None:
        with explain_disk_errors(out.parent):
            found.mixture.save(out, histograms.names)
    if plot is not None:
        from unalike.report.figures.mdm import mixture

        write_figure(plot, mixture(found, title))
    if as_json:
        typer.echo(json.dumps(result))
    else:
        _print(result, histograms.names, title)
        print_files(mixture=out, figures=plot)


def _candidates(text: str) -> list[int]:
    """``3``, ``1-6`` or ``1,2,4``."""
    with expect("--components", text, "a number from 1 on, a range like 1-6, or a list like 1,2,4"):
        if "-" in text:
            low, high = (int(part) for part in text.split("-"))
            found = list(range(low, high + 1))
        else:
            found = sorted({int(part) for part in text.split(",")})
        if not found or found[0] < 1:
            raise ValueError(text)
    return found


def _bins(text: str) -> tuple[str, list[float]]:
    """``income=0:200000:5000`` or ``age=18/30/65``."""
    name, _, edges = text.partition("=")
    with expect("--bins", text, "NAME=FIRST:LAST:WIDTH or NAME=A/B/C, for example income=0:200000:5000"):
        if ":" not in edges:
            return name, [float(part) for part in edges.split("/")]
        first, last, width = (float(part) for part in edges.split(":"))
        return name, [first + width * i for i in range(int((last - first) / width + 1e-9) + 1)]


def _print(result: dict[str, Any], names: list[str] | None, title: str) -> None:
    table = Table("weight", "precision α₀", "largest mean shares", title=title, title_justify="left")
    for weight, alpha in zip(result["tau"], result["alpha"], strict=True):
        total = sum(alpha)
        order = sorted(range(len(alpha)), key=lambda j: -alpha[j])[:4]
        shares = ", ".join(f"{names[j] if names else j}: {alpha[j] / total:.2f}" for j in order)
        table.add_row(f"{weight:.3f}", f"{total:.4g}", shares)
    say(table)
    lines = [f"log-likelihood per client {result['log_likelihood']:.4f}, {result['seconds']:.2f} s"]
    if result["relative_error"] is not None:
        errors = result["relative_error"]
        lines.append(f"relative error of α {errors['alpha']:.4f}, of τ {errors['tau']:.4f}")
    for row in result["selection"] or []:
        lines.append(f"K={row['components']}: {row['below_best']:.4f} ± {row['standard_error']:.4f} below the best")
    if "distance" in result:
        d = result["distance"]
        lines.append(
            f"distance from the true clients: MDM {d['mdm']:.4f}, fully IID {d['iid']:.4f} "
            f"(halves of the true ones: {d['halves_of_true']:.4f})"
        )
    if result["privacy"] is not None:
        row = "each row of a client" if result["privacy"]["unit"] == "point" else "each client"
        lines.append(guarantee(result["privacy"]).replace("each client", row))
    say(*lines, *worker_lines(result), *(f"note: {note}" for note in result["notes"]))
