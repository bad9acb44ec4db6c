"""``unalike privacy``: what a run will cost, what it has cost, and whether an attack agrees."""

from __future__ import annotations

import json
import math
import statistics
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich import box
from rich.table import Table

from unalike.commands.console import explain_data_errors, progress_console, say
from unalike.commands.options import (
    Dealing,
    Run,
    Training,
    command,
    examples,
    flag,
    json_flag,
    plan_from_flags,
    settings_from,
)
from unalike.runs.errors import UserError
from unalike.runs.words import counted, large_delta, size, stated

if TYPE_CHECKING:
    from unalike.audit.training import Audit
    from unalike.privacy.ledger import Ledger
    from unalike.runs.privacy import Forecast
    from unalike.runs.result import Privacy

app = typer.Typer(name="privacy", no_args_is_help=True)
Target = Annotated[str, typer.Argument(metavar="RECIPE", hidden=True)]


@app.callback(epilog=examples("unalike privacy plan fedavg --clients 1000 --cohort 100 --epsilon 4"))
def privacy() -> None:
    """What a run will cost, what it has cost, and whether an attack agrees."""


@command(
    app,
    "unalike privacy plan fedavg --clients 1000 --cohort 100 --epsilon 4",
    "unalike privacy plan fedavg --clients 1000 --cohort 100 --noise-multiplier 1 --clip 0.5",
)
def plan(target: Target, dealing: Dealing, training: Training, as_json: bool = json_flag()) -> None:
    """Tell ε before a run; with --epsilon, find the least noise that keeps to it.

    RECIPE is a recipe (its name or a .toml file), or a method.
    """
    from unalike.runs.cost import cost

    rows = [(label, *cost(recipe)) for label, recipe in plan_from_flags([target], dealing, training).runs]
    if as_json:
        plain = [{"run": label, "data": data, **asdict(one)} for label, one, data, _ in rows]
        plain = [{**one, "private": math.isfinite(one["epsilon"]) and one["source"] != "simulated"} for one in plain]
        plain = [{name: _finite(value) for name, value in one.items()} for one in plain]
        typer.echo(json.dumps(plain[0] if len(plain) == 1 else plain, indent=2))
        return
    say(_plan_table([(label, one) for label, one, *_ in rows]))
    say(*dict.fromkeys(line for _, one, *_ in rows for line in _promised(one)))
    say(*dict.fromkeys(f"planned for {whom}" for *_, whom in rows))
    say(*dict.fromkeys(filter(None, (large_delta(one.delta) for _, one, *_ in rows if math.isfinite(one.epsilon)))))


def _finite(value: Any) -> Any:
    """JSON has no infinity: an infinite ε is null."""
    return None if isinstance(value, float) and math.isinf(value) else value


def _promised(one: Forecast) -> list[str]:
    """What stands beside a planned ε."""
    from unalike.learn.scaling import PrivateScaling

    if math.isinf(one.epsilon):
        return []
    lines = one.words()
    if one.scaling is not None:
        lines.append(
            f"of it, ε = {one.scaling:.3g} (by itself) scales the inputs: {PrivateScaling.RELEASES} noisy sums over "
            f"everybody before training, noise {one.scaling_noise:.4g}"
        )
    if one.drawn is not None:
        lines.append(f"that is for a client that is drawn {one.drawn} times; hardly anybody is drawn so often")
    if one.trust == "nobody" and one.unit == "client":
        lines.append("every shard adds the whole noise to its part: √s times as much on the sum of s shards")
    return lines


def _plan_table(rows: list[tuple[str, Forecast]]) -> Table:
    from unalike.runs.words import stated as shown

    caption = "noise: its standard deviation over the clip; rate: of Poisson cohorts, or of batches for points"
    columns = ("run", "protects", "clip", "noise", "rounds", "rate", "ε", "δ", "accounting")
    table = Table(*columns, box=box.SIMPLE_HEAD, caption=caption, caption_justify="left")
    for label, one in rows:
        unit = f"one {one.unit}" if math.isfinite(one.epsilon) else "nobody"
        clip = "–" if one.clip is None else f"{one.clip:g}"
        noise, rate = _spread(one.noise, one.most_noise), _spread(one.rate, one.most_rate)
        cells = [noise, str(one.rounds), rate, shown(_finite(one.epsilon), one.source), f"{one.delta:.3g}"]
        table.add_row(label, unit, clip, *cells, one.accounting)
    return table


def _spread(least: float | None, most: float | None) -> str:
    ends = dict.fromkeys(f"{end:.4g}" for end in (least, most) if end is not None)
    return " to ".join(ends) or "–"


@command(
    app,
    "unalike run fedavg --clients 200 --cohort 40 --rounds 10 --epsilon 4 --out runs/private",
    "unalike privacy show runs/private",
)
def show(run_folder: Run, as_json: bool = json_flag()) -> None:
    """List everything that left a client in a run, and what it has cost.

    RUN is the folder of a finished run.
    """
    from unalike.privacy.ledger import Ledger
    from unalike.runs import folder
    from unalike.runs.result import Result

    spent = Result.load(run_folder).privacy
    rows = folder.read_json(run_folder / folder.TRANSCRIPT)
    ledger = Ledger.from_state(folder.read_json(run_folder / folder.LEDGER))
    own = [] if spent.delta is None else sorted(ledger.epsilons(spent.delta).values())
    if as_json:
        content = {"released": rows, **spent.model_dump(), "accounting": ledger.method, "notes": ledger.notes}
        typer.echo(json.dumps({**content, "clients": own}, indent=2))
        return
    say(_released_table(rows, spent))
    say(*_spent_lines(ledger, spent, own))


def _released_table(rows: list[dict[str, Any]], spent: Privacy) -> Table:
    from unalike.report.page.transcript import describe

    columns = ("array", "seen as", "protection", "rounds", "bytes", "ε")
    table = Table(*columns, title="What left the clients", title_justify="left", box=box.SIMPLE_HEAD)
    total = "noisy" if spent.epsilon is None else f"in {stated(spent.epsilon, spent.noise)}"
    for row in rows:
        array = f"{row['array']} [{'×'.join(map(str, row['shape'])) or '1'}] of {row['task']}"
        given = [
            *([f"one {row['unit']}"] if row["unit"] else []),
            *([f"clip {row['clip']:g}"] if row["clip"] is not None else []),
            *([describe(row[name]) for name in ("noise", "sampling") if row[name]]),
        ]
        rounds = f"{row['first']}–{row['last']}, {counted(row['times'], 'time')}"
        cost = "∞" if row["noise"] is None else total
        table.add_row(array, row["seen_as"], ", ".join(given) or "none", rounds, size(row["bytes"]), cost)
    return table


def _spent_lines(ledger: Ledger, spent: Privacy, own: list[float]) -> list[str]:
    if spent.epsilon is None:
        return ["ε = ∞: something was released without noise, so no privacy is promised."]
    lines = [
        f"ε = {spent.epsilon:.4f} at δ = {spent.delta:.3g} for one {spent.unit}, all releases together "
        f"({'PLD' if own else ledger.method})."
    ]
    if own:
        middle = statistics.median(own)
        lines.append(f"By client: ε from {own[0]:.4f} over {middle:.4f} (median) to {own[-1]:.4f}; {len(own)} clients.")
    lines += [f"Note: {note}." for note in ledger.notes]
    lines += [f"{line[:1].upper()}{line[1:]}." if not line.startswith("ε") else f"{line}." for line in spent.words()]
    lines.append("The scores of the run were measured aside, in the simulation: none left a client.")
    return lines


@command(
    app,
    "unalike run fedavg --clients 200 --cohort 40 --rounds 10 --epsilon 4 --out runs/private",
    "unalike privacy explain runs/private",
)
def explain(run_folder: Run, as_json: bool = json_flag()) -> None:
    """Say what a run protects from whom, under which assumptions, and what it does not.

    RUN is the folder of a finished run.
    """
    from unalike.runs import folder
    from unalike.runs.explanation import explain as explanation
    from unalike.runs.recipe.recipe import read_recipe
    from unalike.runs.result import Result

    spent = Result.load(run_folder).privacy
    scaled = read_recipe(run_folder / folder.RECIPE).data.normalize is True
    found = explanation(spent, folder.read_json(run_folder / folder.TRANSCRIPT), scaled)
    if as_json:
        typer.echo(json.dumps(found, indent=2))
        return
    for heading, sentences in found.items():
        say(heading, *(f"- {sentence}" for sentence in sentences), "")


@command(
    app,
    "unalike run fedavg --data shops.csv --client-column shop --label-column returned --epsilon 2 --total-epsilon 4",
    "unalike privacy total shops.csv",
)
def total(data: Annotated[Path, typer.Argument(metavar="DATA", hidden=True)], as_json: bool = json_flag()) -> None:
    """Tell what all runs on the same data have cost together, from the ledger beside its file.

    DATA is the file or folder that the runs were trained on.
    Runs with an ε enter there what they cost; --total-epsilon of `unalike run` says how much that may be.
    """
    from unalike.runs import data_ledger

    file = data_ledger.file_of(str(data))
    if file is None or not file.exists():
        raise UserError(f"{data} has no ledger beside it: no run with an ε was trained on this file where it is")
    content = data_ledger.read(file)
    if as_json:
        totals = [{"unit": one.unit, "epsilon": _finite(one.worst(content.delta))} for one in content.together()]
        typer.echo(json.dumps({"runs": len(content.runs), "total_epsilon": content.total_epsilon, "spent": totals}))
        return
    table = Table("began", "method", "protects", "ε", "δ", box=box.SIMPLE_HEAD)
    for one in content.runs:
        spent = one.spent()
        table.add_row(one.began, one.method, f"one {spent.unit}", f"{spent.worst(one.delta):.4g}", f"{one.delta:.3g}")
    say(table, *(f"{line}." for line in content.words()))
    if content.total_epsilon is not None:
        say(f"All runs together may cost ε = {content.total_epsilon:g}.")


@command(
    app,
    "unalike privacy audit fedavg --clients 200 --cohort 20 --rounds 10 --epsilon 2",
    "unalike privacy audit fedavg --clients 200 --cohort 20 --rounds 10 --epsilon 2 --cut-noise 0.1",
    "unalike privacy audit kmeans --epsilon 2 --delta 1e-4 --unit point",
    "unalike privacy audit mdm --epsilon 4 --delta 1e-4",
)
def audit(
    target: Target,
    dealing: Dealing,
    training: Training,
    canaries: int | None = flag("How many. (default: by ε)", min=100),
    cut_noise: float = flag("Scale the real noise down on purpose: 0.5 must be found out.", default=1.0),
    seed: int = flag("Of the attack.", default=0, min=0),
    as_json: bool = json_flag(),
) -> None:
    """Attack a recipe's private training and compare the ε that this proves with the ledger's.

    RECIPE is a recipe (its name or a .toml file), a method, or an analysis:
    `kmeans` (--rounds counts its Lloyd steps, none by default), `mdm`, or the messages of `gaussian` or `bernoulli`
    estimates. A long run is shortened; ε is then that of the shortened run.
    Ends with an error if the attack proves more than the ledger promises.
    """
    from unalike.audit.training import audit as attack
    from unalike.runs.prepare import prepare

    done: list[tuple[str, Audit]] = []
    if target in _ANALYSES:
        done.append((target, _attack_analysis(target, settings_from(dealing, training), canaries, cut_noise, seed)))
    for label, recipe in plan_from_flags([target], dealing, training).runs if target not in _ANALYSES else ():
        prepared = prepare(recipe)
        promised = prepared.recipe.privacy
        if promised.epsilon is None and promised.noise_multiplier is None and target.endswith(".toml"):
            continue  # the run without privacy that a recipe compares with
        done.append((label, attack(prepared, canaries=canaries, cut_noise=cut_noise, seed=seed)))
    if not done:
        raise UserError(f"no run of {target} promises privacy, so there is nothing to audit")
    if as_json:
        plain = [{"run": label, **asdict(one), "holds": one.holds} for label, one in done]
        typer.echo(json.dumps(plain[0] if len(plain) == 1 else plain, indent=2))
    else:
        say(_audit_table(done))
    broken = [label for label, one in done if not one.holds]
    if broken:
        raise UserError(
            f"{', '.join(broken)}: the attack proves more than the ledger promises, so the noise is not what the "
            "ledger was told" + (f" (it was cut to {cut_noise:g} on purpose)" if cut_noise != 1 else "")
        )


_ANALYSES = {  # what may be set for each, beside the attack's own flags
    "kmeans": ("epsilon", "delta", "unit", "rounds", "trust"),
    "mdm": ("epsilon", "delta", "rounds", "trust"),
    "gaussian": ("epsilon", "delta"),
    "bernoulli": ("epsilon",),
}


def _attack_analysis(target: str, settings: dict[str, Any], canaries: int | None, cut_noise: float, seed: int) -> Audit:
    from unalike.analytics.kmeans.budget import KMeansPrivacy
    from unalike.audit.analytics import audit_estimate, audit_mdm
    from unalike.audit.kmeans import audit_kmeans

    given = {name: value for name, value in settings.items() if value is not None}
    asked = {name: given.pop(name) for name in _ANALYSES[target] if name in given}
    if given:
        flags = [f"--{name.rstrip('_').replace('_', '-')}" for name in given]
        raise UserError(
            f"{', '.join(flags)}: {target} is audited on clients of the attack's own, so this means nothing here; give "
            + ", ".join(f"--{name}" for name in _ANALYSES[target])
        )
    if "epsilon" not in asked:
        raise UserError(f"{target} without --epsilon promises no privacy: give one, for example --epsilon 2")
    attack: dict[str, Any] = {"canaries": canaries, "cut_noise": cut_noise, "seed": seed}
    with explain_data_errors(), progress_console().status("attacking") as status:
        if target == "mdm":
            return audit_mdm(**{"delta": 1e-5, **asked}, **attack)
        if target != "kmeans":
            return audit_estimate(target, **{"delta": 1e-5, **asked}, **attack)
        steps, trust = asked.pop("rounds", 0), asked.pop("trust", "server")
        attack["progress"] = lambda number: status.update(f"attacking: run {number}")
        return audit_kmeans(KMeansPrivacy(**asked), steps=steps, trust=trust, **attack)


def _audit_table(done: list[tuple[str, Audit]]) -> Table:
    proof = done[0][1].proof
    caption = (
        f"proven with {proof.confidence:.0%} confidence: ε and the noise if the releases are of the ledger's kinds and "
        "only their noise may differ; `whatever it is` assumes nothing"
    )
    columns = ("run", "canaries", "rounds", "noise, of promised", "ε proven", "whatever it is", "ε promised", "holds")
    table = Table(*columns, box=box.SIMPLE_HEAD, caption=caption, caption_justify="left")
    for label, one in done:
        table.add_row(
            label,
            f"{one.canaries:,} {one.unit}s",
            str(one.rounds) if one.of_rounds is None else f"{one.rounds} of {one.of_rounds}",
            f"at most {one.proof.noise:.0%}",
            f"{one.proof.best:.2f}",
            f"{one.proof.epsilon:.2f}",
            f"{one.promised:.2f}",
            "yes" if one.holds else "NO",
        )
        for name, own in one.apart.items():
            holds = "yes" if own.noise >= 1.0 else "NO"
            told = f"at most {own.noise:.0%}", f"{own.epsilon:.2f}", "", f"{own.promised:.2f}", holds
            table.add_row(f"  {name} alone", "", "", *told)
    return table
