"""``unalike mdm``: fit a mixture of Dirichlet-multinomials to clients' histograms, by sums alone."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from unalike import simulate
from unalike.analytics.mdm.algorithm import MDM, Choice, Fitted
from unalike.analytics.mdm.counts import histogram_clients, population_histograms, read_counts, true_mixture
from unalike.analytics.mdm.distance import compare
from unalike.analytics.mdm.plot import figure
from unalike.analytics.mdm.privacy import noise_for_budget
from unalike.commands import options
from unalike.commands.options import examples, printed, progress_console
from unalike.core.client import Clients
from unalike.data import DataError, load
from unalike.data.partition.mixture import Mixture, relative_error
from unalike.privacy.ledger import Ledger
from unalike.studio.errors import UserError
from unalike.studio.runs.folder import disk_errors_told, write_whole

_BLOCK_NUMBERS = 1 << 24  # numbers that one block of clients may send


def mdm(
    data: Annotated[
        str | None,
        typer.Option(help="A name of `unalike datasets`, or your own file or folder.", rich_help_panel="Data"),
    ] = None,
    counts: Annotated[
        Path | None, typer.Option(help="Or ready histograms: a CSV, NPZ or NPY file, one row for each client.")
    ] = None,
    components: Annotated[str, typer.Option(help="How many; a range (1-6) or list (1,2,4) chooses one.")] = "2",
    rounds: Annotated[int, typer.Option(help="EM steps.", min=1)] = 100,
    cohort: Annotated[int, typer.Option(help="Clients asked in a round.", min=1)] = 1000,
    start: Annotated[
        str, typer.Option(help="How clients choose their first component: concentration or random.")
    ] = "concentration",
    validation: Annotated[
        float | None, typer.Option(help="Clients kept apart to choose by: a number or share.  [default: 0.2]")
    ] = None,
    partition: options.Partition = None,
    clients: options.ClientCount = None,
    client_column: options.ClientColumn = None,
    label_column: options.LabelColumn = None,
    epsilon: options.Epsilon = None,
    delta: options.Delta = None,
    clip: Annotated[float, typer.Option(help="Of a client's share in the sums for A, with --epsilon.")] = 20.0,
    largest: Annotated[
        int | None, typer.Option(help="The most samples a client may have; needed with --epsilon.", min=1)
    ] = None,
    seed: Annotated[int, typer.Option(help="Of data, cohorts and noise.")] = 0,
    compared: Annotated[
        bool, typer.Option("--compare", help="Measure how near simulated clients are to the true ones.")
    ] = False,
    plot: Annotated[Path | None, typer.Option(help="Write the figures to this new HTML file.")] = None,
    out: Annotated[Path | None, typer.Option(help="Write the mixture to this new file (--partition mdm:FILE).")] = None,
    as_json: options.Json = False,
) -> None:
    """Learn how clients' label histograms differ, and simulate clients like them (T1 ch. 3)."""
    _check_free(plot, out)
    try:
        candidates = _candidates(components)
        columns = {"client_column": client_column, "label_column": label_column}
        everybody, truth, names = _load(data, counts, partition, clients, seed, columns)
        fitting, unseen = _held_out(everybody, validation, len(candidates) > 1, seed)
        bound = _bound(everybody, truth, largest, private=epsilon is not None)
        settings = MDM(
            categories=everybody.x.shape[1],
            largest=bound,
            components=candidates[0],
            rounds=rounds,
            cohort=min(cohort, len(fitting)),
            start=start,  # type: ignore[arg-type]  # checked by MDM itself
            clip=clip,
        )
        for each in candidates:
            replace(settings, components=each).check(fitting)
        if epsilon is not None:
            delta = len(fitting) ** -1.1 if delta is None else delta
            noise = noise_for_budget(settings, len(fitting), candidates, epsilon, delta, validated=len(candidates) > 1)
            settings = replace(settings, noise=noise)
        ledger = Ledger()
        block = _block(settings, max(candidates))
        federation = simulate(fitting, seed=seed, block=block, threads=1, ledger=ledger)
        begin = time.perf_counter()
        choice: Choice | None = None
        with _progress(rounds * len(candidates), silent=as_json) as advance:
            if unseen is not None and len(candidates) > 1:
                validating = simulate(unseen, seed=seed + 1, block=block, threads=1, ledger=ledger)
                choice = settings.choose(federation, validating, candidates, advance)
                fitted = choice.fitted
            else:
                fitted = settings.fit(federation, advance)
        seconds = time.perf_counter() - begin
        mixture = fitted.mixture
        aside = federation.aside(fitting if unseen is None else unseen)  # a simulation's measurement, charged to nobody
        measured = replace(settings, noise=None).score(aside, [mixture]).log_likelihood
        result: dict[str, Any] = {
            "data": str(data or counts),
            "clients": len(fitting),
            "validation_clients": 0 if unseen is None else len(unseen),
            "categories": settings.categories,
            "components": mixture.components,
            "rounds": rounds,
            "cohort": settings.cohort,
            "seed": seed,
            "relative_error": _errors(mixture, truth),
            "log_likelihood": None if measured is None else measured[0],
            "seconds": round(seconds, 3),
            "tau": mixture.tau.tolist(),
            "alpha": mixture.alpha.tolist(),
            "selection": _selection(choice),
            "privacy": _privacy(ledger, settings, delta),
            "bytes": {"up": federation.traffic.total_up, "down": federation.traffic.total_down},
            "notes": fitted.notes,
        }
        groups = None
        if compared or plot is not None:
            result["distance"], groups = compare(everybody.x.numpy(), mixture, seed)
    except DataError as error:
        raise UserError(str(error)) from error
    _write(out, plot, fitted, groups, names, str(result["data"]), seed)
    if as_json:
        typer.echo(json.dumps(result))
    else:
        _print(result, names)
        for what, file in (("mixture", out), ("figures", plot)):
            if file is not None:
                printed().print(f"{what}: {file}", soft_wrap=True, markup=False)


def _candidates(text: str) -> list[int]:
    """``3``, ``1-6`` or ``1,2,4``."""
    try:
        if "-" in text:
            low, high = (int(part) for part in text.split("-"))
            found = list(range(low, high + 1))
        else:
            found = sorted({int(part) for part in text.split(",")})
    except ValueError:
        found = []
    if not found or found[0] < 1:
        raise UserError(f"--components {text}: expected a number from 1 on, a range like 1-6, or a list like 1,2,4")
    return found


def _load(
    data: str | None,
    counts: Path | None,
    partition: str | None,
    clients: int | None,
    seed: int,
    columns: dict[str, str | None],
) -> tuple[Clients, Mixture | None, list[str] | None]:
    if (data is None) == (counts is None):
        raise UserError("give the clients' data with --data, or ready histograms with --counts (one of the two)")
    if counts is not None:
        return histogram_clients(read_counts(counts)), None, None
    assert data is not None
    given: dict[str, Any] = {name: value for name, value in columns.items() if value is not None}
    plan: dict[str, Any] = {"partition": partition, "clients": clients, "min_samples": 1, "test": 0.0, "unseen": 0.0}
    population = load(data, normalize=False, seed=seed, **plan, **given)
    names = None if population.class_names is None else [str(name) for name in population.class_names]
    return population_histograms(population), true_mixture(population), names


def _held_out(clients: Clients, validation: float | None, choosing: bool, seed: int) -> tuple[Clients, Clients | None]:
    """Clients to fit on, and clients to choose by (None: nothing is to be chosen)."""
    share = (0.2 if choosing else 0.0) if validation is None else validation
    number = int(share) if share >= 1 else round(share * len(clients))
    if share < 0 or number >= len(clients) or (choosing and number == 0):
        raise UserError(
            f"--validation {share:g} of {len(clients)} clients: some must be left to fit on, and some kept apart to "
            "choose the number of components by; give a share below 1 or another number"
        )
    if number == 0:
        return clients, None
    order = torch.from_numpy(np.random.default_rng([seed, 5]).permutation(len(clients)))
    return clients.select(order[number:].sort().values), clients.select(order[:number].sort().values)


def _bound(clients: Clients, truth: Mixture | None, largest: int | None, private: bool) -> int:
    if largest is not None:
        return largest
    if truth is not None:
        return truth.largest
    if private:
        raise UserError(
            "with --epsilon the most samples that a client may have must not be read from the data; give --largest"
        )
    return int(clients.x.sum(1).max())


def _block(settings: MDM, components: int) -> int:
    """A block of all clients where memory allows: nothing is padded, and the tables are made once for a block."""
    numbers = components * (len(settings.edges) + settings.categories + 1)
    return max(64, min(8192, _BLOCK_NUMBERS // numbers))


def _errors(found: Mixture, truth: Mixture | None) -> dict[str, float] | None:
    if truth is None or truth.alpha.shape != found.alpha.shape:
        return None
    return relative_error(found, truth)


def _selection(choice: Choice | None) -> list[dict[str, float]] | None:
    if choice is None:
        return None
    rows = []
    for j, components in enumerate(choice.components):
        row = {"components": components, "below_best": choice.below_best[j], "standard_error": choice.error[j]}
        if choice.log_likelihood is not None:
            row["log_likelihood"] = choice.log_likelihood[j]
        rows.append(row)
    return rows


def _privacy(ledger: Ledger, settings: MDM, delta: float | None) -> dict[str, Any] | None:
    if settings.noise is None or delta is None:
        return None
    noise = getattr(settings.noise, "noise_multiplier", None)
    spent = {"epsilon": ledger.epsilon(delta), "delta": delta, "unit": "client"}
    return {**spent, "noise_multiplier": noise, "clip": settings.clip}


def _check_free(*files: Path | None) -> None:
    for file in files:
        if file is not None and file.exists():
            raise UserError(f"{file} exists already, and nothing is overwritten: choose another file")


def _write(
    out: Path | None, plot: Path | None, fitted: Fitted, groups: Any, names: list[str] | None, data: str, seed: int
) -> None:
    if out is not None:
        with disk_errors_told(out.parent):
            fitted.mixture.save(out, names)
    if plot is not None:
        title = f"{data}: {_components(fitted.mixture.components)}"
        with disk_errors_told(plot.parent):
            write_whole(plot, figure(fitted, groups, names, title, seed).encode())


@contextmanager
def _progress(total: int, silent: bool) -> Iterator[Callable[[int], None]]:
    with Progress(console=progress_console(), transient=True, disable=silent) as bar:
        work = bar.add_task("rounds", total=total)
        yield lambda _: bar.advance(work)


def _components(count: int) -> str:
    return f"{count} component{'' if count == 1 else 's'}"


def _print(result: dict[str, Any], names: list[str] | None) -> None:
    stdout = Console(highlight=False)
    table = Table(title=f"{result['data']}: {_components(result['components'])}", title_justify="left")
    table.add_column("weight", justify="right")
    table.add_column("precision α₀", justify="right")
    table.add_column("largest mean shares")
    for weight, alpha in zip(result["tau"], result["alpha"], strict=True):
        total = sum(alpha)
        order = sorted(range(len(alpha)), key=lambda j: -alpha[j])[:4]
        shares = ", ".join(f"{names[j] if names else j}: {alpha[j] / total:.2f}" for j in order)
        table.add_row(f"{weight:.3f}", f"{total:.4g}", shares)
    stdout.print(table)
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
        lines.append(f"ε = {result['privacy']['epsilon']:.4g} at δ = {result['privacy']['delta']:.3g} for each client")
    for line in [*lines, *(f"note: {note}" for note in result["notes"])]:
        stdout.print(line, markup=False, soft_wrap=True)


def register(app: typer.Typer) -> None:
    app.command(
        epilog=examples(
            "unalike mdm --data mdm:medium-2 --components 2 --rounds 100 --cohort 1000 --seed 0 --json",
            "unalike mdm --data digits --partition dirichlet:0.3 --clients 60 --components 1-4 --out digits.json",
            "unalike run fedavg --data digits --partition mdm:digits.json --clients 40",
        )
    )(mdm)
