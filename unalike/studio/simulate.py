"""``unalike.simulate``: a federation whose clients live in this process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from unalike.core.client import Clients
from unalike.core.draws import Draws
from unalike.core.federation import Federation
from unalike.core.request import Runtime
from unalike.runtime.shard.simulator import Simulator


def simulate(
    clients: Clients,
    seed: int = 0,
    *,
    block: int | None = None,
    threads: int | None = None,
    strict: bool = False,
    drop: float | Callable[[int, Draws], bool] = 0.0,
    runtime: Runtime | None = None,
    **fields: Any,
) -> Federation:
    """A federation over these clients, simulated here: ``train(method, simulate(clients), rounds=20)``.

    - ``block``, ``threads``, ``strict``, ``drop``: those of ``Simulator``, unless a ``runtime`` is given.
    - ``fields``: those of ``Federation``, such as ``budget`` and ``quorum``.
    """
    return Federation(clients, runtime or Simulator(block, threads, strict, drop), seed, **fields)
