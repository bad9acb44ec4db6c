"""``unalike plan``: what a run would take on a cluster, and what would break first."""

from __future__ import annotations

import json
from typing import Annotated

import typer
from rich import box
from rich.table import Table

from unalike.commands.console import say
from unalike.commands.options import Dealing, Json, Training, command, flag, planned

app = typer.Typer()


@command(
    app,
    "unalike plan fedavg --clients 1e7 --workers 64",
    "unalike plan fedavg --data digits --model mlp --clients 1e6 --cohort 10000 --workers 16 --bandwidth 1.25e9",
)
def plan(
    target: Annotated[str, typer.Argument(metavar="TARGET", hidden=True)],
    dealing: Dealing,
    training: Training,
    clients: Annotated[float, flag("How many clients there would be, e.g. 1e7.", panel="Cluster")] = 1e6,
    workers: Annotated[int, flag("How many workers, each with one processor.", panel="Cluster", min=1)] = 16,
    bandwidth: Annotated[
        float | None, flag("Of the network, bytes per second. (default: as measured on one machine)", panel="Cluster")
    ] = None,
    memory: Annotated[float, flag("Of a worker, bytes.", panel="Cluster")] = 16e9,
    as_json: Json = False,
) -> None:
    """Say what a round of TARGET would take on a cluster: seconds, bytes, memory, and what breaks first.

    TARGET is a method, a recipe (its name or a .toml file), or a method of your own: file.py:Class.

    A few clients of its data are trained in this process to know what one costs; the rest is a cost model.
    """
    from unalike.deploy.plan import estimate_round, probe
    from unalike.runs.errors import UserError
    from unalike.runs.words import duration, size

    if clients < workers or clients != int(clients):
        raise UserError(f"--clients {clients:g}: expected a whole number, and at least the {workers} workers")
    made = planned([target], dealing, training, clients=None, cohort=None)
    if len(made.runs) != 1:
        raise UserError(
            f"{target} makes {len(made.runs)} runs; plan one of them: name a method, or a recipe of one run"
        )
    cohort = None if training.cohort is None else round(training.cohort * (clients if training.cohort < 1 else 1))
    found = estimate_round(
        probe(made.runs[0][1]), int(clients), workers, cohort=cohort, bandwidth=bandwidth, memory=memory
    )
    if as_json:
        typer.echo(json.dumps(found, indent=2))
        return
    seconds, cost = found["round"], found["probed"]
    asks = f"{cost['asks']:.3g} ask{'' if cost['asks'] == 1 else 's'}"
    say(
        f"{cost['name']}: {found['clients']:,} clients, {found['cohort']:,} of them in a round, on {workers} workers",
        f"a client takes {1e3 * cost['client']:.3g} ms in a round of {asks}, measured here",
    )
    table = Table("of a round", "", "on", box=box.SIMPLE_HEAD)
    table.add_row("computing", duration(seconds["computing"]), "the worker that has most of the cohort")
    table.add_row("exchanges", duration(seconds["exchanges"]), "all")
    table.add_row("messages", duration(seconds["sending"]), f"{size(found['sent'])} at {size(found['bandwidth'])}/s")
    table.add_row("in all", duration(seconds["total"]), f"{3600 / seconds['total']:,.0f} rounds an hour")
    table.add_row(
        "memory of a worker", size(found["worker_memory"]), f"while it loads the data: {size(found['loading'])}"
    )
    table.add_row("memory of this process", size(found["driver_memory"]), "")
    say(table)
    say("what breaks first, as clients grow:")
    for what, count in (one.values() for one in found["limits"]):
        here = "already" if count < found["clients"] else f"at {count:,.0f} clients"
        say(f"  {here}: {what}")
