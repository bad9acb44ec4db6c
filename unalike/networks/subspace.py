"""Random subspaces of a model's parameters: θ = θ0 + P·v with a fixed P of d rows and k columns (T1 eq. 5.2).

A dense P for d = 150,000 and k = 10,000 would be 6 GB. These are structured: a few hundred kilobytes, made anew from a
seed by whoever needs them, and never sent. Their columns are orthonormal (nearly so where rows of a Kronecker product
are cut off to fit d), so P keeps lengths: ‖P·v‖ = ‖v‖.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor

from unalike.core.draws import Draws, key
from unalike.core.torch_internals import to_device_of

Kind = Literal["kronecker", "signs", "identity"]
KINDS: tuple[Kind, ...] = get_args(Kind)
_DOMAIN = 5_2  # so that a seed's P has nothing to do with its other draws


@dataclass(frozen=True, eq=False)
class Kronecker:
    """P = A ⊗ B with A [√d, √k] and B [√d, √k]: Gaussian, then orthonormalised. P·v is A·V·Bᵀ, V being v as a square.

    Where d or k is no product of the sizes, the last rows or columns are left out.
    """

    rows: int
    columns: int
    left: Tensor
    right: Tensor

    def __call__(self, v: Tensor) -> Tensor:
        across, along = self.left.shape[1], self.right.shape[1]
        square = F.pad(v, (0, across * along - self.columns)).reshape(across, along)
        return (to_device_of(self.left, v) @ square @ to_device_of(self.right, v).T).reshape(-1)[: self.rows]


@dataclass(frozen=True, eq=False)
class Signs:
    """P with one entry ±c in every row: parameters share coordinates of v at random.

    Every run of k rows takes all k columns once, beginning with a random one, so a column has ⌊d/k⌋ or ⌈d/k⌉ entries
    (c makes its norm 1), and P·v is a few shifted copies of v: no gather, no scatter.
    """

    rows: int
    columns: int
    shifts: tuple[int, ...]
    signs: Tensor  # [d], ±c

    def __call__(self, v: Tensor) -> Tensor:
        return _copies(v, self.shifts)[: self.rows] * to_device_of(self.signs, v)


def _copies(v: Tensor, shifts: tuple[int, ...]) -> Tensor:
    return torch.cat([part for shift in shifts for part in (v[shift:], v[:shift])])


@dataclass(frozen=True)
class Identity:
    """P = I: the whole space, for comparison."""

    rows: int

    @property
    def columns(self) -> int:
        return self.rows

    def __call__(self, v: Tensor) -> Tensor:
        return v


Subspace = Kronecker | Signs | Identity
"""A matrix P of d ``rows`` and k ``columns``, known by what it does to a vector: ``P(v)`` is P·v, [k] to [d].

It works inside ``vmap`` and can be differentiated.
"""


def subspace(kind: Kind, rows: int, columns: int | None, seed: int) -> Subspace:
    """P of a kind for d = ``rows``; the same seed gives the same P everywhere.

    ``columns``: k; None: 10,000 as in the thesis, or half of d where that is less.
    """
    if kind not in KINDS:
        raise ValueError(f"subspace {kind!r}; expected one of {', '.join(KINDS)}")
    if kind == "identity":
        if columns not in (None, rows):
            raise ValueError(f"the identity has as many columns as rows, {rows}, not {columns}; leave the number out")
        return Identity(rows)
    k = columns if columns is not None else max(1, min(10_000, rows // 2))
    if not 1 <= k <= rows:
        raise ValueError(f"a subspace of {rows} parameters has 1 to {rows} dimensions, not {k}")
    return _kronecker(rows, k, seed) if kind == "kronecker" else _signs(rows, k, seed)


def _kronecker(rows: int, columns: int, seed: int) -> Kronecker:
    across = math.isqrt(columns - 1) + 1
    along = math.ceil(columns / across)
    left = max(across, math.isqrt(rows - 1) + 1)
    right = max(along, math.ceil(rows / left))
    draws = Draws(key(seed, _DOMAIN, 1))
    return Kronecker(rows, columns, _orthonormal(draws, left, across), _orthonormal(draws, right, along))


def _orthonormal(draws: Draws, rows: int, columns: int) -> Tensor:
    """A Gaussian matrix made orthonormal; of the possible ones that whose R has a positive diagonal: it is unique."""
    q, r = torch.linalg.qr(draws.normal(rows, columns).to(torch.float64))
    factor: Tensor = q * torch.sign(torch.diagonal(r))
    return factor.to(torch.float32)


def _signs(rows: int, columns: int, seed: int) -> Signs:
    draws = Draws(key(seed, _DOMAIN, 2))
    runs = math.ceil(rows / columns)
    shifts = tuple(draws.integers(columns, runs).tolist())
    column = _copies(torch.arange(columns), shifts)[:rows]  # of each row
    entries = torch.bincount(column, minlength=columns)
    signs = draws.integers(2, rows).to(torch.float32) * 2 - 1
    return Signs(rows, columns, shifts, signs / entries[column].sqrt())
