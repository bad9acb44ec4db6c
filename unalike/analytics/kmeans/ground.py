"""Points that stand in for server data where there is none: a lattice or a packing in the private subspace (T1 §7.3).

T1 leaves it open, and warns that a lattice of k dimensions grows exponentially. Here it grows only where the data do:
the noisy eigenvalues of Step 1, which are paid for, say how far points lie along each axis, and an axis gets as many
levels as its length asks for, as long as all levels together are no more places than asked for.
"""

from __future__ import annotations

from typing import Literal

import numpy as np
import torch
from torch import Tensor

Ground = Literal["lattice", "packing"]
_FAR = 2.0  # root mean squares that the ground reaches along an axis
_LEAST = 1e-3  # of the radius: an axis on which nothing but noise was found
_CANDIDATES = 4  # for each place of a packing


def reaches(mean_square: Tensor, radius: float) -> Tensor:
    """[k] how far to go along each axis, from the points' mean squares there, noisy as they are."""
    return (_FAR * mean_square.clamp(min=0).sqrt()).clamp(_LEAST * radius, radius)


def ground(kind: Ground, reach: Tensor, places: int, seed: int) -> Tensor:
    """At most ``places`` points in the box of these half-widths."""
    return lattice(reach, places) if kind == "lattice" else packing(reach, places, seed)


def lattice(reach: Tensor, places: int) -> Tensor:
    """A lattice whose axes get levels one by one, always the one whose levels lie farthest apart."""
    levels = [1] * len(reach)
    gaps = [2.0 * one for one in reach.tolist()]
    while True:
        widest = max(range(len(levels)), key=lambda axis: gaps[axis] / levels[axis])
        levels[widest] += 1
        if int(np.prod(levels)) > places:
            levels[widest] -= 1
            break
    # level i of n lies in the middle of the i-th of n equal parts
    axes = [one * ((2 * torch.arange(n) + 1) / n - 1) for one, n in zip(reach.tolist(), levels, strict=True)]
    return torch.cartesian_prod(*axes).reshape(-1, len(reach))


def packing(reach: Tensor, places: int, seed: int) -> Tensor:
    """Points spread out over the box: of random candidates, always the one farthest from those taken."""
    random = np.random.default_rng([seed, 6002])
    candidates = torch.from_numpy(random.uniform(-1, 1, (_CANDIDATES * places, len(reach))).astype(np.float32)) * reach
    taken = [0]
    apart = (candidates - candidates[0]).square().sum(1)
    for _ in range(places - 1):
        taken.append(int(apart.argmax()))
        apart = torch.minimum(apart, (candidates - candidates[taken[-1]]).square().sum(1))
    return candidates[taken]
