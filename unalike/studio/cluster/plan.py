"""A plan: what a run of a recipe would take on a cluster with many clients, and what would break first.

A few rounds of a few clients are run in this process, to know what a client of this recipe computes and sends. The rest
is the cost model (``costs.py``).
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch

from unalike.core import wire
from unalike.core.federation import Federation
from unalike.core.method import next_state, started
from unalike.core.request import Program, Reply, Request, Runtime
from unalike.core.schema import Schema
from unalike.studio.cluster.costs import Costs, Seconds
from unalike.studio.recipe.hyperparameters import Hyperparameters
from unalike.studio.recipe.recipe import Privacy, Recipe
from unalike.studio.runs.prepare import data_in_pieces, prepare

PROBE = 128  # clients of a round that is tried; one of fewer says little about blocks
ROUNDS = 4  # of which the first is not counted
BASE = 5e8  # bytes of a worker that has no client: Python, PyTorch, Ray
ORDER = 24  # bytes of a row's label and place, which a worker has of all rows while it loads
FACTS = 260  # bytes of a client's place in the tables of this process, and in those of a worker


@dataclass(frozen=True)
class Probed:
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


@dataclass(frozen=True)
class Outlook:
    """A round and the memory of a run on a cluster; ``limits`` says what breaks, the first first."""

    clients: int
    cohort: int
    workers: int
    bandwidth: float
    memory: float
    probed: Probed
    seconds: Seconds
    sent: float  # bytes in a round, all workers
    worker_memory: float  # bytes, while it trains
    loading: float  # bytes, while it loads
    driver_memory: float
    limits: list[tuple[str, float]]  # what breaks, and at how many clients

    def values(self) -> dict[str, Any]:
        own = {name: value for name, value in vars(self).items() if name not in ("probed", "seconds", "limits")}
        return {
            **own,
            "round": {**vars(self.seconds), "total": self.seconds.total},
            "probed": vars(self.probed),
            "limits": [{"what": what, "clients": count} for what, count in self.limits],
        }


class _Watched:
    """A runtime that counts what crosses."""

    def __init__(self, inner: Runtime) -> None:
        self._inner, self.program, self.roster = inner, inner.program, inner.roster
        self.asks = self.shared = self.own = self.clients = 0.0

    program: Program

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


def probe(recipe: Recipe) -> Probed:
    """A few rounds of the recipe, with fewer clients and one thread."""
    torch.set_num_threads(1)
    here = recipe.runtime.model_copy(update={"name": "simulate", "threads": 1, "workers": None, "address": None})
    laid_out = data_in_pieces(recipe)
    mapped = laid_out.mapped
    prepared = prepare(recipe.model_copy(update={"runtime": here}), laid_out.population(overwrite=True))
    known = getattr(prepared.method, "cohort", len(prepared.roster))
    chosen = dict(prepared.recipe.hyperparameters)
    if "cohort" in Hyperparameters.of(recipe.method).keys:
        chosen["cohort"] = min(PROBE, int(prepared.roster.labeled.sum()) or len(prepared.roster))
    small = prepared.recipe.model_copy(update={"hyperparameters": chosen, "privacy": Privacy()})
    prepared = prepare(small, prepared.population)
    made = prepared.federation()
    watched = _Watched(made.runtime)
    federation = Federation(watched, made.seed, made.roster)
    state, seconds = started(prepared.method, federation.seed), 0.0
    for number in range(1, ROUNDS + 1):
        if number == 2:
            watched.asks = watched.shared = watched.own = watched.clients = 0.0
            begin = time.process_time()
        state = next_state(prepared.method, state, federation.begin_round(number))
    seconds = time.process_time() - begin
    train, rounds = prepared.population.train, ROUNDS - 1
    asked = watched.clients / max(1.0, watched.asks)  # clients in an ask
    return Probed(
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


def outlook(
    probed: Probed,
    clients: int,
    workers: int,
    *,
    cohort: int | None = None,
    bandwidth: float | None = None,
    memory: float = 16e9,
    costs: Costs = Costs(),
) -> Outlook:
    """What a round takes with so many clients and workers, each with this memory and one processor."""
    share = probed.cohort if probed.cohort <= 1 else min(1.0, probed.cohort / clients)
    asked = cohort or max(1, round(share * clients))
    per_worker = probed.shared + probed.own * asked / workers
    seconds = costs.seconds(
        clients=asked,
        workers=workers,
        client=probed.client,
        asks=probed.asks,
        bytes_per_worker=per_worker,
        bandwidth=bandwidth,
    )
    data, part = probed.rows * probed.row, asked / clients
    own_memory = BASE + clients / workers * (data + FACTS) + clients * FACTS + 2 * per_worker
    held = probed.rows * ORDER + FACTS + (0.0 if probed.mapped else data)  # of every client, while a worker loads
    loading = own_memory + clients * held
    driver = BASE + clients * FACTS + 2 * (workers * probed.shared + probed.own * asked)
    limits = [
        (
            f"a worker that loads the data has {'the order of all rows' if probed.mapped else 'all of it'} in memory "
            f"({_gb(held)} GB for a million clients)",
            (memory - BASE) / (held + (data + FACTS) / workers + FACTS),
        ),
        ("a worker's own clients fill its memory", (memory - BASE) / ((data + FACTS) / workers + FACTS)),
        ("the clients' places and rows fill this process's memory", (memory - BASE) / (FACTS + 2 * probed.own * part)),
        ("a request to one worker exceeds 2 GB, the most of a message", wire.MAX_BYTES / (probed.own * part) * workers),
    ]
    limits.sort(key=lambda one: one[1])
    return Outlook(
        clients,
        asked,
        workers,
        bandwidth or costs.bandwidth,
        memory,
        probed,
        seconds,
        workers * per_worker,
        own_memory,
        loading,
        driver,
        limits,
    )


def _gb(data: float) -> str:
    return f"{data * 1e6 / 1e9:.3g}"
