"""``unalike score``: a finished run tried on the clients of another source."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from unalike.commands import options
from unalike.commands.console import errors_told, say
from unalike.commands.options import columns_from, command, flag

app = typer.Typer()


@command(
    app,
    "unalike mdm --data femnist --components 3 --out writers.json",
    "unalike run pefll --data femnist --partition mdm:writers.json --clients 100 --out runs/simulated",
    "unalike score runs/simulated --data femnist",
)
def score(
    run: Annotated[Path, typer.Argument(metavar="RUN", hidden=True)],
    data: Annotated[str, flag("A name of `unalike datasets`, or a file or folder, with the run's kind of rows.")],
    partition: options.Partition = None,
    clients: options.ClientCount = None,
    client_column: options.ClientColumn = None,
    label_column: options.LabelColumn = None,
    seed: Annotated[int, flag("Of the division into training and test rows.")] = 0,
    as_json: options.Json = False,
) -> None:
    """Score a finished run on the clients of another source, all of them newcomers to it.

    RUN is the folder of the run. This is how a model that was trained on simulated
    clients, dealt out by a fitted mixture (--partition mdm:FILE), is tried on real ones.
    Each client gets its model from its training rows, with and without their labels
    where the method can, and the model is scored on its test rows. It is measured in
    simulation and charged to no ledger.
    """
    from unalike.studio.newcomer.elsewhere import score_elsewhere

    with errors_told():
        columns = columns_from(client_column, label_column)
        how: dict[str, Any] = {"partition": partition, "clients": clients, "seed": seed, **columns}
        result = score_elsewhere(run, data, **how)
    if as_json:
        typer.echo(json.dumps(result))
        return
    table = Table("newcomers", "clients", result["metric"], "10th percentile", "worst")
    for name, one in result["scores"].items():
        table.add_row(name, str(one["clients"]), f"{one['mean']:.3f}", f"{one['p10']:.3f}", f"{one['worst']:.3f}")
    say(f"{result['run']}, trained on {result['trained_on']}, scored on {result['data']}", table)
    say(*(f"note: {note}" for note in result["notes"]))
