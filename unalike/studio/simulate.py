"""``unalike.simulate``: a federation whose clients live in this process."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from unalike.core.client import Clients
from unalike.core.federation import Cohort, Federation, Models
from unalike.core.request import Part, Program, Runtime
from unalike.core.roster import Roster
from unalike.data.population import Population
from unalike.runtime.shard.shard import Shard
from unalike.runtime.shard.simulator import Simulator
from unalike.runtime.simulate import Drop, Simulation


def simulate(
    clients: Clients | Population,
    seed: int = 0,
    *,
    shards: int = 1,
    block: int | None = None,
    threads: int | None = None,
    strict: bool = False,
    drop: Drop = 0.0,
    runtime: Runtime | None = None,
    **fields: Any,
) -> Federation:
    """A federation over these clients, simulated here: ``train(method, simulate(clients), rounds=20)``.

    - ``clients``: a store of clients, or a population, whose seen clients are asked.
    - ``shards``: the clients are dealt out to so many; results do not depend on it but for the order of sums.
    - ``block``, ``threads``: see ``Simulator``. ``strict``, ``drop``: see ``Simulation``.
    - ``fields``: those of ``Federation``, such as ``budget`` and ``quorum``.
    """
    made = runtime or simulation(clients, shards=shards, block=block, threads=threads, strict=strict, drop=drop)
    if isinstance(clients, Population):
        fields.setdefault("roster", made.roster.select(clients.seen))
    return Federation(made, seed, **fields)


def simulation(
    clients: Clients | Population,
    *,
    shards: int = 1,
    block: int | None = None,
    threads: int | None = None,
    strict: bool = False,
    drop: Drop = 0.0,
) -> Simulation:
    """The runtime of ``simulate``."""
    parts: dict[Part, Clients] = {"train": clients} if isinstance(clients, Clients) else clients.parts
    roster = clients.roster()
    if not 1 <= shards <= len(roster):
        raise ValueError(f"shards={shards}; expected 1 to {len(roster)}, the number of clients")
    program = Program(open=True)
    made = []
    for number in range(shards):
        mine = torch.arange(number, len(roster), shards)
        own = parts if shards == 1 else {name: part.select(mine) for name, part in parts.items()}
        listed: Roster = roster if shards == 1 else roster.select(mine)
        made.append(Shard(own, listed, program, Simulator(block, threads)))
    return Simulation(made, program, strict=strict, drop=drop)


def opened(cohort: Cohort, models: Models) -> Tensor:
    """The cohort's models [C, d], also those that lie at the clients: a view that only a simulation has."""
    if isinstance(models, Tensor):
        return models
    runtime = cohort.federation.runtime
    if not isinstance(runtime, Simulation):
        raise TypeError("models that lie at their clients cannot be looked at from here")
    return runtime.look(cohort.federation.run, models.handle, cohort.ids)
