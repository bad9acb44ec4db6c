"""Random draws from the operating system, for noise that protects people in a deployed run."""

from __future__ import annotations

import math
import os

import torch
from torch import Tensor


class SystemDraws:
    """The interface of ``unalike.core.draws.Draws`` on ``os.urandom``: unpredictable, not repeatable, float64.

    What it does not do: real noise has infinitely many values and a float64 has not, so an attacker who reads the
    lowest bits of a noisy result can sometimes exclude an input (Mironov 2012). The sum is therefore made in float64
    and rounded once to the (usually float32) type of the value, which hides most of those bits but proves nothing.
    Where this matters, release integers: ``unalike.privacy.masks.protocol`` works on a grid.
    """

    def bits(self, count: int) -> Tensor:
        """``count`` uniform 64-bit integers (as signed int64)."""
        if count == 0:
            return torch.zeros(0, dtype=torch.int64)
        return torch.frombuffer(bytearray(os.urandom(8 * count)), dtype=torch.int64)

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
