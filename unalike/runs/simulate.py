"""``unalike.simulate``: a federation whose clients live in this process."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from unalike.core.client import Clients
from unalike.core.federation import Cohort, Federation, Models
from unalike.core.request import Part, Program, Runtime
from unalike.core.schema import Schema
from unalike.data.population import Population
from unalike.learn.scaling import PrivateScaling, scale_inputs, scale_privately
from unalike.runtime.shard.shard import Shard
from unalike.runtime.shard.simulator import Simulator
from unalike.runtime.simulate import Drop, Simulation

Data = Clients | Population | Mapping[Part, Clients]  # a mapping: parts of the data of the same clients


def simulate(
    data: Data,
    seed: int = 0,
    *,
    schema: Schema | None = None,
    scaling: PrivateScaling | None = None,
    shards: int = 1,
    block: int | None = None,
    threads: int | None = None,
    device: str = "cpu",
    strict: bool = False,
    drop: Drop = 0.0,
    **fields: Any,
) -> Federation:
    """A federation over these clients, simulated here: ``train(method, simulate(clients), rounds=20)``.

    - ``data``: a store of clients, or a population, whose seen clients are asked. Where nothing public says how its
      inputs are scaled (``population.scaling``), the seen clients are asked for that first, in sums: with noise, if
      ``scaling`` says with which.
    - ``schema``: how inputs are scaled, as an earlier federation of the same data found out; then nobody is asked.
    - ``shards``: the clients are dealt out to so many; results do not depend on it but for the order of sums.
    - ``block``, ``threads``, ``device``: see ``Simulator``. ``strict``, ``drop``: see ``Simulation``.
    - ``fields``: those of ``Federation``, such as ``budget``, ``quorum`` and ``round``, the number of the last round.
    """
    how: dict[str, Any] = {"block": block, "threads": threads, "device": device, "strict": strict, "drop": drop}
    return federate(simulation(data, shards, **how), data, seed, schema=schema, scaling=scaling, **fields)


def federate(
    runtime: Runtime,
    data: Data,
    seed: int = 0,
    *,
    schema: Schema | None = None,
    scaling: PrivateScaling | None = None,
    **fields: Any,
) -> Federation:
    """A federation over clients that a runtime reaches already; the arguments are those of ``simulate``."""
    if isinstance(data, Population):
        fields.setdefault("roster", runtime.roster.select(data.seen))
    federation = Federation(runtime, seed, **fields)
    if schema is not None:
        federation.use(schema)
    elif scaling is not None:
        scale_privately(federation, scaling)
    elif isinstance(data, Population) and data.scaling == "asked":
        scale_inputs(federation)
    elif isinstance(data, Population) and data.scaling == "private":
        raise ValueError('normalize="private" needs to know the noise: simulate(..., scaling=PrivateScaling(...))')
    return federation


def simulation(data: Data, shards: int = 1, *, strict: bool = False, drop: Drop = 0.0, **simulator: Any) -> Simulation:
    """The runtime of ``simulate``; ``simulator``: the arguments of ``Simulator``."""
    parts: Mapping[Part, Clients]
    if isinstance(data, Population):
        parts, roster = data.parts, data.roster()
    else:
        parts = {"train": data} if isinstance(data, Clients) else data
        roster = parts["train"].roster()
    if not 1 <= shards <= len(roster):
        raise ValueError(f"shards={shards}; expected 1 to {len(roster)}, the number of clients")
    program, computes = Program(open=True), Simulator(**simulator)
    made = []
    for number in range(shards):
        mine = torch.arange(number, len(roster), shards)
        own = parts if shards == 1 else {name: part.select(mine) for name, part in parts.items()}
        made.append(Shard(own, roster if shards == 1 else roster.select(mine), program, computes))
    return Simulation(made, program, strict=strict, drop=drop)


def gather_models(cohort: Cohort, models: Models) -> Tensor:
    """The cohort's models [C, d], also those that lie at the clients: a view that only a simulation has."""
    if isinstance(models, Tensor):
        return models
    runtime = cohort.federation.runtime
    if not isinstance(runtime, Simulation):
        raise TypeError("models that lie at their clients cannot be looked at from here")
    return runtime.look(cohort.federation.run, models.handle, cohort.ids)
