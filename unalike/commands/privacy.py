"""``unalike privacy``: what a run will cost, what it has cost, and whether an attack agrees."""

from __future__ import annotations

import json
import math
import re
import statistics
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich import box
from rich.table import Table

from unalike.commands import options
from unalike.commands.console import errors_told, printed, progress_console
from unalike.commands.options import examples, settings_from

if TYPE_CHECKING:
    from unalike.privacy.ledger import Ledger
    from unalike.studio.audit.training import Audit
    from unalike.studio.recipe.recipe import Recipe
    from unalike.studio.runs.prepare import Prepared
    from unalike.studio.runs.privacy import Forecast

app = typer.Typer(rich_markup_mode="rich", no_args_is_help=True)
Target = Annotated[str, typer.Argument(metavar="RECIPE", hidden=True)]


@app.callback(epilog=examples("unalike privacy plan fedavg --clients 1000 --cohort 100 --epsilon 4"))
def privacy() -> None:
    """What a run will cost, what it has cost, and whether an attack agrees."""


@app.command(
    epilog=examples(
        "unalike privacy plan fedavg --clients 1000 --cohort 100 --epsilon 4",
        "unalike privacy plan fedavg --clients 1000 --cohort 100 --noise-multiplier 1 --clip 0.5",
    )
)
def plan(
    target: Target,
    data: options.Data = None,
    partition: options.Partition = None,
    clients: options.ClientCount = None,
    unseen: options.Unseen = None,
    model: options.ModelName = None,
    rounds: options.Rounds = None,
    cohort: options.CohortSize = None,
    local_epochs: options.LocalEpochs = None,
    local_steps: options.LocalSteps = None,
    batch: options.BatchSize = None,
    epsilon: options.Epsilon = None,
    delta: options.Delta = None,
    noise_multiplier: options.NoiseMultiplier = None,
    clip: options.Clip = None,
    unit: options.Unit = None,
    set_: options.Set = None,
    as_json: options.Json = False,
) -> None:
    """Tell ε before a run; with --epsilon, find the least noise that keeps to it.

    RECIPE is a recipe (its name or a .toml file), or a method.
    """
    settings = settings_from(locals())
    from unalike.studio.runs.prepare import prepare
    from unalike.studio.runs.privacy import forecast

    rows = []
    for label, recipe in _recipes(target, settings, set_):
        prepared = prepare(recipe)
        rows.append((label, forecast(prepared.recipe, prepared.method, prepared.roster, prepared.delta)))
    if as_json:
        plain = [{"run": label, **asdict(one), "epsilon": _number(one.epsilon)} for label, one in rows]
        typer.echo(json.dumps(plain[0] if len(plain) == 1 else plain, indent=2))
        return
    printed().print(_plan_table(rows))


def _plan_table(rows: list[tuple[str, Forecast]]) -> Table:
    from unalike.studio.words import epsilon as shown

    table = Table(box=box.SIMPLE_HEAD, caption="noise is the standard deviation over the clip", caption_justify="left")
    for column in ("run", "protects one", "clip", "noise", "rounds", "sampling", "ε", "δ", "accounting"):
        table.add_column(column, overflow="fold")
    for label, one in rows:
        unit = one.unit if math.isfinite(one.epsilon) else "–"
        clip = "–" if one.clip is None else f"{one.clip:g}"
        cells = [unit, clip, one.noise, str(one.rounds), one.sampling, shown(one.epsilon), f"{one.delta:.3g}"]
        table.add_row(label, *cells, one.method)
    return table


@app.command(
    epilog=examples(
        "unalike run fedavg --clients 200 --cohort 40 --rounds 10 --epsilon 4 --out runs/private",
        "unalike privacy show runs/private",
    )
)
def show(
    run_folder: Annotated[Path, typer.Argument(metavar="RUN", hidden=True)],
    as_json: options.Json = False,
) -> None:
    """List everything that left a client in a run, and what it has cost.

    RUN is the folder of a finished run.
    """
    from unalike.privacy.ledger import Ledger
    from unalike.studio.errors import UserError
    from unalike.studio.runs import folder

    if not run_folder.is_dir():
        raise UserError(f"there is no run folder {run_folder}")
    folder.check_format(run_folder)
    rows = folder.read_json(run_folder / folder.TRANSCRIPT)
    ledger = Ledger.from_state(folder.read_json(run_folder / folder.LEDGER))
    spent = folder.read_json(run_folder / folder.RESULT)["privacy"]
    own = sorted(ledger.epsilons(spent["delta"]).values()) if spent["private"] else []
    if as_json:
        content = {"released": rows, **spent, "accounting": ledger.method, "notes": ledger.notes, "clients": own}
        typer.echo(json.dumps(content, indent=2))
        return
    console = printed()
    console.print(_released_table(rows, spent))
    for line in _spent_lines(ledger, spent, own):
        console.print(line, markup=False, soft_wrap=True)


def _released_table(rows: list[dict[str, Any]], spent: dict[str, Any]) -> Table:
    from unalike.studio.report.words import spoken
    from unalike.studio.words import epsilon as shown
    from unalike.studio.words import size

    table = Table(title="What left the clients", title_justify="left", box=box.SIMPLE_HEAD)
    columns = (
        "array",
        "task",
        "shape",
        "seen as",
        "unit",
        "clip",
        "noise",
        "sampling",
        "rounds",
        "times",
        "bytes",
        "ε",
    )
    for column in columns:
        table.add_column(column, overflow="fold")
    for row in rows:
        noisy = row["noise"] is not None
        total = f"in {shown(spent['epsilon'])}" if spent["private"] else "noisy"
        table.add_row(
            row["array"],
            row["task"],
            "×".join(map(str, row["shape"])) or "1",
            row["seen_as"],
            row["unit"] or "–",
            "–" if row["clip"] is None else f"{row['clip']:g}",
            _short(spoken(row["noise"])) if noisy else "none",
            _short(spoken(row["sampling"])) if row["sampling"] else "–",
            f"{row['first']}–{row['last']}",
            str(row["times"]),
            size(row["bytes"]),
            total if noisy else "∞",
        )
    return table


def _short(text: str) -> str:
    """The text with its numbers cut to four digits."""
    return re.sub(r"\d+\.\d{4,}", lambda found: f"{float(found[0]):.4g}", text)


def _spent_lines(ledger: Ledger, spent: dict[str, Any], own: list[float]) -> list[str]:
    if not spent["private"]:
        return ["ε = ∞: something was released without noise, so no privacy is promised."]
    accounting = ledger.method if not own else "PLD"
    lines = [
        f"ε = {spent['epsilon']:.4f} at δ = {spent['delta']:.3g} for one {spent['unit']}, all releases together "
        f"({accounting})."
    ]
    if own:
        middle = statistics.median(own)
        lines.append(f"By client: ε from {own[0]:.4f} over {middle:.4f} (median) to {own[-1]:.4f}; {len(own)} clients.")
    lines += [f"Note: {note}." for note in ledger.notes]
    lines.append(
        "The noise was seeded (a simulation), and the scores of the run were measured aside: none left a client."
    )
    return lines


@app.command(
    epilog=examples(
        "unalike privacy audit fedavg --clients 200 --cohort 20 --rounds 10 --epsilon 2",
        "unalike privacy audit fedavg --clients 200 --cohort 20 --rounds 10 --epsilon 2 --cut-noise 0.1",
        "unalike privacy audit kmeans --epsilon 2 --delta 1e-4 --unit point",
    )
)
def audit(
    target: Target,
    data: options.Data = None,
    partition: options.Partition = None,
    clients: options.ClientCount = None,
    model: options.ModelName = None,
    rounds: options.Rounds = None,
    cohort: options.CohortSize = None,
    local_epochs: options.LocalEpochs = None,
    local_steps: options.LocalSteps = None,
    batch: options.BatchSize = None,
    epsilon: options.Epsilon = None,
    delta: options.Delta = None,
    noise_multiplier: options.NoiseMultiplier = None,
    clip: options.Clip = None,
    unit: options.Unit = None,
    set_: options.Set = None,
    canaries: Annotated[int | None, typer.Option(help="How many.  [default: by ε]", min=100)] = None,
    cut_noise: Annotated[
        float, typer.Option(help="Scale the real noise down on purpose: 0.1 must be found out.")
    ] = 1.0,
    seed: Annotated[int, typer.Option(help="Of the attack.", min=0)] = 0,
    as_json: options.Json = False,
) -> None:
    """Attack a recipe's private training and compare the ε that this proves with the ledger's.

    RECIPE is a recipe (its name or a .toml file), a method, or
    `kmeans`, which attacks private clustering; --rounds then counts its Lloyd steps (none by default).
    Ends with an error if the attack proves more than the ledger promises.
    """
    settings = settings_from({name: value for name, value in locals().items() if name != "seed"})
    from unalike.studio.audit.training import audit as attack
    from unalike.studio.errors import UserError
    from unalike.studio.runs.prepare import prepare

    done: list[tuple[str, Audit]] = []
    if target == "kmeans":
        done.append((target, _attack_kmeans(settings, set_, canaries, cut_noise, seed)))
    for label, recipe in _recipes(target, settings, set_) if target != "kmeans" else ():
        prepared = prepare(recipe)
        if not _is_private(prepared) and target.endswith(".toml"):
            continue  # the run without privacy that a recipe compares with
        done.append((label, attack(prepared, canaries=canaries, cut_noise=cut_noise, seed=seed)))
    if not done:
        raise UserError(f"no run of {target} promises privacy, so there is nothing to audit")
    if as_json:
        plain = [{"run": label, **asdict(one), "holds": one.holds} for label, one in done]
        typer.echo(json.dumps(plain[0] if len(plain) == 1 else plain, indent=2))
    else:
        printed().print(_audit_table(done))
    broken = [label for label, one in done if not one.holds]
    if broken:
        raise UserError(
            f"{', '.join(broken)}: the attack proves more than the ledger promises, so the noise is not what the "
            "ledger was told" + (f" (it was cut to {cut_noise:g} on purpose)" if cut_noise != 1 else "")
        )


def _attack_kmeans(
    settings: dict[str, Any], overrides: list[str] | None, canaries: int | None, cut_noise: float, seed: int
) -> Audit:
    from unalike.analytics.kmeans.budget import Privacy
    from unalike.studio.audit.kmeans import audit_kmeans
    from unalike.studio.errors import UserError

    given = {name: value for name, value in settings.items() if value is not None}
    asked = {name: given.pop(name) for name in ("epsilon", "delta", "unit", "rounds") if name in given}
    if given or overrides:
        flags = [f"--{name.replace('_', '-')}" for name in given] + ["--set"] * bool(overrides)
        raise UserError(
            f"{', '.join(flags)}: kmeans is audited on points of the attack's own, so this has no meaning here; give "
            "--epsilon, --delta, --unit and --rounds (Lloyd steps)"
        )
    if "epsilon" not in asked:
        raise UserError("a clustering without --epsilon promises no privacy: give one, for example --epsilon 2")
    steps = asked.pop("rounds", 0)
    with errors_told(), progress_console().status("attacking") as status:
        return audit_kmeans(
            Privacy(**asked),
            steps=steps,
            canaries=canaries,
            cut_noise=cut_noise,
            seed=seed,
            progress=lambda number, runs: status.update(f"attacking: run {number + 1} of {runs}"),
        )


def _audit_table(done: list[tuple[str, Audit]]) -> Table:
    proof = done[0][1].proof
    caption = f"proven with {proof.confidence:.0%} confidence; `at most` is all that so many canaries could prove"
    table = Table(box=box.SIMPLE_HEAD, caption=caption, caption_justify="left")
    for column in ("run", "canaries", "rounds", "false alarms", "missed", "ε proven", "at most", "ε promised", "holds"):
        table.add_column(column, overflow="fold")
    for label, one in done:
        table.add_row(
            label,
            f"{one.canaries:,} {one.unit}s",
            str(one.rounds),
            f"{one.proof.false_positives:.2%}",
            f"{one.proof.false_negatives:.2%}",
            f"{one.proof.epsilon:.2f}",
            f"{one.proof.limit:.2f}",
            f"{one.promised:.2f}",
            "yes" if one.holds else "NO",
        )
    return table


def _recipes(target: str, settings: dict[str, Any], overrides: list[str] | None) -> list[tuple[str, Recipe]]:
    from unalike.studio.recipe.settings import plan_for

    return plan_for([target], settings, overrides or []).runs


def _is_private(prepared: Prepared) -> bool:
    wanted = prepared.recipe.privacy
    return wanted.epsilon is not None or wanted.noise_multiplier is not None


def _number(value: float) -> float | None:
    return value if math.isfinite(value) else None


def register(parent: typer.Typer) -> None:
    parent.add_typer(app, name="privacy")
