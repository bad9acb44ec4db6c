"""Random draws from the operating system, for all that protects people: noise, cohorts, batches."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

RANDOM = (torch.Tag.nondeterministic_seeded,)  # of operations that draw: no two calls are the same one


@torch.library.custom_op("unalike::system_bits", mutates_args=(), tags=RANDOM)
def _system_bits(like: Tensor, shape: Sequence[int]) -> Tensor:
    """Uniform 64-bit integers of this shape. An operation of PyTorch's, so that ``vmap`` and a recording see it.

    A Python function that is called inside ``vmap`` is called once for the whole block: its draws would be the same for
    all clients, and a recording would keep them as a constant. ``like`` differs from client to client, so ``vmap``
    comes to the rule below, which draws for each; and as it is an input of the recording, nothing is kept.
    """
    count = math.prod(shape)
    if count == 0:
        return torch.zeros(tuple(shape), dtype=torch.int64)
    return torch.frombuffer(bytearray(os.urandom(8 * count)), dtype=torch.int64).reshape(tuple(shape))


@_system_bits.register_fake
def _(like: Tensor, shape: Sequence[int]) -> Tensor:
    return torch.empty(tuple(shape), dtype=torch.int64)


@_system_bits.register_vmap
def _(info: Any, in_dims: Any, like: Tensor, shape: Sequence[int]) -> tuple[Tensor, int]:
    return _system_bits(like, [info.batch_size, *shape]), 0


class SystemDraws:
    """The interface of ``unalike.core.draws.Draws`` on ``os.urandom``: unpredictable, never the same twice, float64.

    like: a tensor that differs from client to client of a block, such as the client's key; only its being there counts.
    Real noise has infinitely many values and a float64 has not (Mironov 2012), so mechanisms that are given these draws
    (``system``) do not use ``normal`` for what is released: they make discrete noise on a grid.
    """

    system: ClassVar[bool] = True

    def __init__(self, like: Tensor | None = None) -> None:
        self.like = torch.zeros(0) if like is None else like

    def bits(self, count: int) -> Tensor:
        """``count`` uniform 64-bit integers (as signed int64)."""
        drawn: Tensor = _system_bits(self.like, [count])
        return drawn

    def uniform(self, *shape: int) -> Tensor:
        """Uniform float64 in [0, 1), 53 random bits each."""
        high = (self.bits(math.prod(shape)) >> 11) & ((1 << 53) - 1)
        return (high.to(torch.float64) * 2.0**-53).reshape(shape)

    def integers(self, bound: int, *shape: int) -> Tensor:
        """Uniform integers in [0, bound), by rejection, so without bias."""
        if not 0 < bound <= 1 << 62:
            raise ValueError(f"bound must be between 1 and 2^62, got {bound}; an integer draw needs a range")
        count = math.prod(shape)
        limit = (1 << 63) - (1 << 63) % bound
        kept = torch.zeros(0, dtype=torch.int64)
        while len(kept) < count:
            candidates = self.bits(count - len(kept) + 16) & ((1 << 63) - 1)
            kept = torch.cat([kept, candidates[candidates <= limit - 1]])
        return (kept[:count] % bound).reshape(shape)

    def normal(self, *shape: int) -> Tensor:
        """Standard normal float64 by Box and Muller's transform, two from two words (52 and 53 random bits)."""
        count = math.prod(shape)
        half = (count + 1) // 2
        radius = torch.sqrt(-2.0 * torch.log1p(-self.uniform(half)))
        angle = 2.0 * math.pi * self.uniform(half)
        pairs = torch.stack([radius * torch.cos(angle), radius * torch.sin(angle)], dim=-1)
        return pairs.reshape(-1)[:count].reshape(shape)

    def permutation(self, n: Tensor | int, capacity: int) -> Tensor:
        """Indices [capacity] whose first ``n`` are a random permutation of 0..n-1 and the rest n..capacity-1."""
        order = (self.bits(capacity) >> 2) & ((1 << 62) - 1)
        index = torch.arange(capacity)
        last = torch.iinfo(torch.int64).max - capacity + index
        return torch.argsort(torch.where(index >= n, last, order), stable=True)

    def choose(self, total: int, how: int | float) -> Tensor:
        """Some of 0..total−1: each with this probability on its own (a float), or so many of them (an int)."""
        if isinstance(how, int):
            return self.permutation(total, total)[:how]
        return (self.uniform(total) < how).nonzero().flatten()
