"""What a run of a recipe would take on a cluster with many clients, and what would break first.

    python -m benchmarks.plan fedavg --data digits --cohort 10000 --clients 1e7 --workers 64

A few rounds of a few clients are run in this process, to know what a client of this recipe computes and sends. The rest
is a cost model, whose constants are measured (``benchmarks/cluster.py``).

A round of C clients on W workers, with A asks, takes

    A·W·exchange + most(C, W)·client·slower + W·bytes/bandwidth

- ``client``: seconds of one client in a round on one processor, measured with the recipe itself;
- most(C, W): clients of the worker that has most of a random cohort, C/W + √(2·C/W·(1 − 1/W)·ln W);
- ``exchange``: to send a request to one worker and to hear it, whatever is in it;
- ``slower``: a client on a worker beside one of the few that were measured in a process of their own;
- ``bandwidth``: of the messages between this process and the workers, each of which has ``bytes`` of them in a round.
"""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Annotated, Any

import torch
import typer
from rich import box
from rich.table import Table

from unalike.commands.console import say, with_flags
from unalike.commands.options import Dealing, Training, command, flag, json_flag, plan_from_flags
from unalike.core import wire
from unalike.core.federation import Federation
from unalike.core.method import first_state, next_state
from unalike.core.request import Program, Reply, Request, Runtime
from unalike.core.schema import Schema
from unalike.data import DataError
from unalike.runs.errors import UserError
from unalike.runs.load import data_in_pieces
from unalike.runs.prepare import prepare
from unalike.runs.recipe.hyperparameters import Hyperparameters
from unalike.runs.recipe.recipe import Privacy, Recipe
from unalike.runs.words import duration, size

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode="rich")

PROBE = 128  # clients of a round that is tried; one of fewer says little about blocks
ROUNDS = 4  # of which the first is not counted
BASE = 5e8  # bytes of a worker that has no client: Python, PyTorch, Ray
ORDER = 24  # bytes of a row's label and place, which a worker has of all rows while it loads
FACTS = 260  # bytes of a client's place in the tables of this process, and in those of a worker


@dataclass(frozen=True)
class Costs:
    """The constants, of workers on one machine with two cores; bandwidth is a network's where there is one."""

    exchange: float = 0.0163  # seconds
    slower: float = 0.80  # below 1: the few clients that are measured are not played back yet
    bandwidth: float = 3.0e8  # bytes per second

    def seconds(
        self,
        clients: float,
        workers: int,
        client: float,
        asks: float,
        bytes_per_worker: float,
        bandwidth: float | None = None,
    ) -> dict[str, float]:
        """Of a round: its parts and its total."""
        parts = {
            "exchanges": asks * workers * self.exchange,
            "computing": most(clients, workers) * client * self.slower,
            "sending": workers * bytes_per_worker / (bandwidth or self.bandwidth),
        }
        return {**parts, "total": sum(parts.values())}


def most(clients: float, workers: int) -> float:
    """Clients of a random cohort that the worker with most of them has, about."""
    if workers == 1:
        return clients
    share = clients / workers
    return min(clients, share + math.sqrt(2 * share * (1 - 1 / workers) * math.log(workers)))


@dataclass(frozen=True)
class ClientCost:
    """What a client of a recipe computes and sends in a round."""

    client: float  # seconds on one processor
    asks: float
    shared: float  # bytes that all have in common, and that a worker sends once: inputs, and partial sums
    own: float  # bytes that each has for itself
    row: float  # bytes of a row
    rows: float  # of a client
    cohort: float  # share of the training clients, or their number where it is above 1
    mapped: bool  # inputs are in a file of which a worker reads its own; else it holds all of them for a while
    name: str


class _Counter:
    """A runtime that counts what crosses."""

    def __init__(self, inner: Runtime) -> None:
        self._inner, self.program, self.roster = inner, inner.program, inner.roster
        self.asks = self.shared = self.own = self.clients = 0.0

    program: Program
    shard_count = 1

    def deliver(self, request: Request) -> Iterator[Reply]:
        self.asks += 1
        self.clients += len(request.ids)
        self.shared += len(wire.encode(request.shared)) if request.shared else 0
        own = len(replace(request, shared={}).encode())
        for reply in self._inner.deliver(request):
            size = sum(one.total.nbytes for one in reply.partials.values())
            self.shared += size
            own += len(replace(reply, partials={}).encode())
            yield reply
        self.own += own

    def use(self, schema: Schema) -> None:
        self._inner.use(schema)
        self.roster = replace(self.roster, schema=schema)

    def forget(self, run: str, prefix: str = "") -> None:
        self._inner.forget(run, prefix)


def probe(recipe: Recipe) -> ClientCost:
    """A few rounds of the recipe, with fewer clients and one thread."""
    torch.set_num_threads(1)
    here = recipe.runtime.model_copy(update={"name": "simulate", "threads": 1, "workers": None, "address": None})
    lazy = data_in_pieces(recipe)
    mapped = lazy.mapped
    prepared = prepare(recipe.model_copy(update={"runtime": here}), lazy.population(overwrite=True))
    known = getattr(prepared.method, "cohort", len(prepared.roster))
    chosen = dict(prepared.recipe.hyperparameters)
    if "cohort" in Hyperparameters.of(recipe.method).keys:
        chosen["cohort"] = min(PROBE, int(prepared.roster.labeled.sum()) or len(prepared.roster))
    small = prepared.recipe.model_copy(update={"hyperparameters": chosen, "privacy": Privacy()})
    prepared = prepare(small, prepared.population)
    made = prepared.federation()
    watched = _Counter(made.runtime)
    federation = Federation(watched, made.seed, made.roster)
    state, seconds = first_state(prepared.method, federation.seed), 0.0
    for number in range(1, ROUNDS + 1):
        if number == 2:
            watched.asks = watched.shared = watched.own = watched.clients = 0.0
            begin = time.process_time()
        state = next_state(prepared.method, state, federation, number)
    seconds = time.process_time() - begin
    train, rounds = prepared.population.train, ROUNDS - 1
    asked = watched.clients / max(1.0, watched.asks)  # clients in an ask
    return ClientCost(
        client=seconds / rounds / max(1.0, asked),
        asks=watched.asks / rounds,
        shared=watched.shared / rounds,
        own=watched.own / rounds / max(1.0, asked),
        row=train.x[0].nbytes + (0 if train.y is None else train.y[0].nbytes),
        rows=float(prepared.population.sizes.double().mean()),
        cohort=float(known) if isinstance(known, int | float) else 1.0,
        mapped=mapped,
        name=f"{recipe.method} on {prepared.population.name}",
    )


def estimate_round(
    cost: ClientCost,
    clients: int,
    workers: int,
    *,
    cohort: int | None = None,
    bandwidth: float | None = None,
    memory: float = 16e9,
    costs: Costs = Costs(),
) -> dict[str, Any]:
    """What a round takes with this many clients and workers, each with this memory (bytes) and one processor.

    ``sent`` are bytes of all workers; ``loading`` is a worker's memory while it loads the data; ``limits`` says what
    breaks as clients grow, and at how many, the first first.
    """
    share = cost.cohort if cost.cohort <= 1 else min(1.0, cost.cohort / clients)
    asked = cohort or max(1, round(share * clients))
    own = cost.own * asked / clients  # bytes of a round, for each client there is
    per_worker = cost.shared + cost.own * asked / workers
    data = cost.rows * cost.row  # bytes of a client
    held = cost.rows * ORDER + FACTS + (0.0 if cost.mapped else data)  # of every client, while a worker loads
    worker_memory = BASE + clients / workers * (data + FACTS) + clients * FACTS + 2 * per_worker
    loads, free = "the order of all rows" if cost.mapped else "all of it", memory - BASE
    first = f"a worker that loads the data has {loads} in memory ({held / 1e3:.3g} GB for a million clients)"
    limits = {
        first: free / (held + (data + FACTS) / workers + FACTS),
        "a worker's own clients fill its memory": free / ((data + FACTS) / workers + FACTS),
        "the clients' places and rows fill this process's memory": free / (FACTS + 2 * own),
        "a request to one worker exceeds 2 GB, the most of a message": wire.MAX_BYTES / own * workers,
    }
    return {
        "clients": clients,
        "cohort": asked,
        "workers": workers,
        "bandwidth": bandwidth or costs.bandwidth,
        "memory": memory,
        "round": costs.seconds(asked, workers, cost.client, cost.asks, per_worker, bandwidth),
        "sent": workers * per_worker,
        "worker_memory": worker_memory,
        "loading": worker_memory + clients * held,
        "driver_memory": BASE + clients * FACTS + 2 * (workers * cost.shared + cost.own * asked),
        "probed": vars(cost),
        "limits": [{"what": what, "clients": limits[what]} for what in sorted(limits, key=lambda one: limits[one])],
    }


@command(
    app,
    "python -m benchmarks.plan fedavg --clients 1e7 --workers 64",
    "python -m benchmarks.plan fedavg --data digits --model mlp --cohort 10000 --workers 16 --bandwidth 1.25e9",
)
def plan(
    target: Annotated[str, typer.Argument(metavar="TARGET", hidden=True)],
    dealing: Dealing,
    training: Training,
    clients: float = flag("How many clients there would be, e.g. 1e7.", default=1e6, panel="Cluster"),
    workers: int = flag("How many workers, each with one processor.", default=16, panel="Cluster", min=1),
    bandwidth: float | None = flag(
        "Of the network, bytes per second. (default: as measured on one machine)", panel="Cluster"
    ),
    memory: float = flag("Of a worker, bytes.", default=16e9, panel="Cluster"),
    as_json: bool = json_flag(),
) -> None:
    """Say what a round of TARGET would take on a cluster: seconds, bytes, memory, and what breaks first.

    TARGET is a method, a recipe (its name or a .toml file), or a method of your own: file.py:Class.

    A few clients of its data are trained in this process to know what one costs; the rest is a cost model.
    """
    if clients < workers or clients != int(clients):
        raise UserError(f"--clients {clients:g}: expected a whole number, and at least the {workers} workers")
    made = plan_from_flags([target], dealing, training, clients=None, cohort=None)
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


if __name__ == "__main__":
    try:
        app(prog_name="python -m benchmarks.plan")
    except (UserError, DataError) as error:
        sys.exit(with_flags(error))
