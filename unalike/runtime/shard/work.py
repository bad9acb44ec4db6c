"""A request as the simulator works on it: names have become tasks, releases and rows of data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from unalike.core.client import Clients
from unalike.core.release import Release, protects
from unalike.core.task import Task, frozen
from unalike.core.terms import Terms
from unalike.runtime.shard.kept import KeptStore


@dataclass(frozen=True)
class Work:
    """One task for the clients at ``positions`` of ``clients``."""

    task: Task
    clients: Clients
    positions: Tensor  # [C] positions in `clients`
    bounds: Tensor  # [C] declared sizes N̄
    shared: Mapping[str, Tensor]  # inputs that are the same for every client
    each: Mapping[str, Tensor]  # inputs [C, ...] that differ
    releases: Sequence[Release]  # their client halves run at the client
    key: Tensor  # of this ask; a client's draws come from key(this, its id)
    kept: KeptStore
    serial: int = 0  # arrays that stay at hand are kept under it
    terms: Terms = Terms()

    @property
    def private(self) -> bool:
        """Is all that leaves its clients protected?"""
        return protects(self.releases)

    @property
    def pure(self) -> bool:
        """Is all that happens at a client a function of what it is given? Then it may run in any thread."""
        return self.task.pure and all(one.noise is None or frozen(one.noise) for one in self.releases)
