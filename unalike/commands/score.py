"""``unalike score``: a finished run tried on the clients of another source; ``unalike metrics``: all of its metrics."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer
from rich.table import Table

from unalike.commands import options
from unalike.commands.console import explain_data_errors, say
from unalike.commands.options import Run, command, flag

if TYPE_CHECKING:
    from unalike.learn.metrics import MetricSummary

app = typer.Typer()


@command(
    app,
    "unalike mdm --data femnist --components 3 --out writers.json",
    "unalike run pefll --data femnist --partition mdm:writers.json --clients 100 --out runs/simulated",
    "unalike score runs/simulated --data femnist",
)
def score(
    run: Run,
    table: options.TableFlags,
    data: str = flag("A name of `unalike datasets`, or a file or folder, with the run's kind of rows.", default=...),
    partition: str | None = options.partition_flag(),
    clients: int | None = options.client_count_flag(),
    seed: int = flag("Of the division into training and test rows.", default=0),
    as_json: bool = options.json_flag(),
) -> None:
    """Score a finished run on the clients of another source, all of them newcomers to it.

    RUN is the folder of the run. This is how a model that was trained on simulated
    clients, dealt out by a fitted mixture (--partition mdm:FILE), is tried on real ones.
    Each client gets its model from its training rows, with and without their labels
    where the method can, and the model is scored on its test rows. It is measured in
    simulation and charged to no ledger.
    """
    from unalike.newcomers.predict import score_elsewhere

    with explain_data_errors():
        how: dict[str, Any] = {"partition": partition, "clients": clients, "seed": seed, **table.options()}
        result = score_elsewhere(run, data, **how)
    if as_json:
        typer.echo(json.dumps(result))
        return
    scores = Table("newcomers", "clients", result["metric"], "10th percentile", "worst")
    for name, one in result["scores"].items():
        scores.add_row(name, str(one["clients"]), f"{one['mean']:.3f}", f"{one['p10']:.3f}", f"{one['worst']:.3f}")
    say(f"{result['run']}, trained on {result['trained_on']}, scored on {result['data']}", scores)
    say(*(f"note: {note}" for note in result["notes"]))


@command(app, "unalike run fedavg --rounds 10 --out runs/first", "unalike metrics runs/first")
def metrics(
    run: Run,
    against: Path | None = flag("The folder of another run over the same clients: who gains by RUN, and who loses?"),
    calibrate: bool = flag(
        "Scale probabilities, and choose the threshold of two classes, on validation rows.", default=False
    ),
    as_json: bool = options.json_flag(),
) -> None:
    """Show how good the predictions of a run are, by all metrics, beside a baseline.

    RUN is the folder of a finished run. Its models were tried on test rows, which are
    in simulation/predictions.csv. The baseline knows a client's training labels and
    nothing else: it predicts the largest class, or the mean. An interval holds 95 % of
    the means over clients that a bootstrap gives. Nothing of it is in an ε.
    """
    from unalike.runs import predictions

    found, chosen = predictions.metrics(predictions.read(run), calibrate)
    compared = None if against is None else predictions.gains(run, against)
    if as_json:
        groups = {group: {name: asdict(one) for name, one in all_.items()} for group, all_ in found.items()}
        typer.echo(json.dumps({"metrics": groups, "against": compared, **chosen}))
        return
    for group, all_ in found.items():
        say(_metrics_table(group, all_))
    say(*(f"{name} {value:.4g}, chosen on validation rows" for name, value in chosen.items()))
    for group, one in (compared or {}).items():
        say(f"{group}: {one['gain']} clients gain against {against}, {one['lose']} lose, {one['level']} are level")


def _metrics_table(group: str, found: Mapping[str, MetricSummary]) -> Table:
    columns = ("mean over clients", "95 % interval", "10th percentile", "worst client", "all rows", "baseline")
    table = Table(group, *columns, "clients", title_justify="left")
    for name, one in found.items():
        if one.clients:
            ends = "–" if one.low is None else f"{_number(one.low)} to {_number(one.high)}"
            rest = map(_number, (one.p10, one.worst, one.pooled, one.baseline))
            table.add_row(name, _number(one.mean), ends, *rest, str(one.clients))
    return table


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.3g}"
