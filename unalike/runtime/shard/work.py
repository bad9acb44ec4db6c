"""A request as the simulator works on it: names have become tasks, releases and rows of data."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from unalike.core.client import Clients
from unalike.core.release import Release, Terms
from unalike.core.task import Task, is_frozen
from unalike.runtime.shard.kept import KeptStore

MAX_BLOCK_BYTES = 1 << 28  # of inputs in one block: a larger cohort streams through
TOGETHER = 8  # clients that are read together where they are computed one by one


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
    serial: int = 0  # arrays for a later ask are kept under it
    terms: Terms = Terms()
    private: bool = False  # all that leaves its clients is protected, so nothing else may show

    @property
    def pure(self) -> bool:
        """Is all that happens at a client a function of what it is given? Then it may run in any thread."""
        return self.task.pure and all(one.noise is None or is_frozen(one.noise) for one in self.releases)


def cut_blocks(work: Work, rows: Tensor, most: int, overhead: float) -> Iterator[Tensor]:
    """Rows (largest clients first) in the blocks that take the least time.

    A block takes as long as its largest client's samples, times its clients plus what it costs besides them
    (``overhead``); so it ends where its padding would cost more than one more block. Blocks begin and end where
    the size changes, unless one is full.
    """
    sizes = work.clients.size[work.positions[rows]].numpy()
    row_bytes = _row_bytes(work)
    if len(sizes) and sizes[0] == sizes[-1]:  # all are alike
        limit = min(most, max(1, MAX_BLOCK_BYTES // (max(1, int(sizes[0])) * row_bytes)))
        yield from torch.split(rows, limit)
        return
    first = np.flatnonzero(np.diff(sizes, prepend=-1))  # where each distinct size begins
    edges = [*first.tolist(), len(rows)]
    least = np.zeros(len(edges))  # [g]: time of all rows before the g-th distinct size
    begins = [0] * len(edges)  # and where the last block of those begins
    limits = np.minimum(most, np.maximum(1, MAX_BLOCK_BYTES // (np.maximum(1, sizes[first]) * row_bytes)))
    for end in range(1, len(edges)):
        count = edges[end] - first[:end]
        taken = least[:end] + np.maximum(1, sizes[first[:end]]) * (count + overhead * -(-count // limits[:end]))
        begins[end] = int(taken.argmin())
        least[end] = taken[begins[end]]
    cuts, end = [], len(edges) - 1
    while end:
        cuts.append((begins[end], end))
        end = begins[end]
    for group, end in reversed(cuts):
        for begin in range(edges[group], edges[end], int(limits[group])):
            yield rows[begin : min(begin + int(limits[group]), edges[end])]


def cut_singles(work: Work, rows: Tensor, workers: int) -> Iterator[Tensor]:
    """Rows (largest clients first) that are computed one by one: a few alike together, because reading costs too."""
    few = min(TOGETHER, len(rows) // (16 * workers)) if work.pure else 1
    where = work.positions[rows]
    sizes, labeled = work.clients.size[where].numpy(), work.clients.labeled[where].numpy()
    changes = np.flatnonzero((np.diff(sizes) != 0) | (np.diff(labeled) != 0)) + 1
    for begin, end in itertools.pairwise([0, *changes.tolist(), len(rows)]):
        fit = max(1, min(few, MAX_BLOCK_BYTES // (max(1, int(sizes[begin])) * _row_bytes(work))))
        yield from (rows[i : min(i + fit, end)] for i in range(begin, end, fit))


def _row_bytes(work: Work) -> int:
    return max(1, work.clients.x[0].numel() * 4)


def input_bytes(work: Work, rows: Tensor) -> int:
    return len(rows) * int(work.clients.size[work.positions[rows]].max()) * _row_bytes(work)
