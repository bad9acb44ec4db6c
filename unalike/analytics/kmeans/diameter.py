"""A smaller diameter for private clustering, by one histogram (T1 Lemma 28).

All noise grows with Δ. Server points that no client point is near to make it large for nothing, and so do clusters that
lie far apart in groups. The lemma drops the first, and moves the second together.

Symbols: D = 4·log(m)·√d·σ_max, the reach of a Gaussian component of m points in all; w_min the share of the smallest;
ŵ_q the noisy number of client points that have server point q nearest; D' the largest diameter of a group.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from scipy.sparse import csr_array
from scipy.sparse.csgraph import connected_components
from torch import Tensor

from unalike.privacy.checks import SettingError, check_positive

_CROWDED = 6.0  # see ``reduce``
_APART = 100.0  # D' between the representatives of two groups


@dataclass(frozen=True)
class Reduction:
    """The server points that are left, and where each of them, with all client points nearest to it, moves."""

    anchors: Tensor  # [points, d]
    moves: Tensor  # [points, d]: the same for all points of a group
    groups: int

    @property
    def inputs(self) -> dict[str, Tensor]:
        """What clients need in order to move their points; nothing where all stay."""
        return {"moves": torch.stack([self.anchors, self.moves])} if bool(self.moves.any()) else {}

    def move_back(self, centers: Tensor) -> Tensor:
        """Centres [k, d] moved back, each with the nearest group."""
        there = self.anchors + self.moves
        middle = there.mean(0)
        return centers - self.moves[torch.cdist(centers - middle, there - middle).argmin(1)]


@dataclass(frozen=True)
class Diameter:
    """What Lemma 28 assumes: ``smallest``, w_min, and ``deviation``, σ_max. Both are public guesses."""

    smallest: float
    deviation: float

    def __post_init__(self) -> None:
        check_positive(self.smallest, "smallest", "it is w_min, the share of the smallest cluster")
        check_positive(self.deviation, "deviation", "it is σ_max, a cluster's largest deviation along any direction")
        if self.smallest > 1:
            raise SettingError(f"smallest={self.smallest}; expected a share of at most 1")

    def reach(self, total: float, dimension: int) -> float:
        """D for ``total`` points."""
        return 4.0 * math.log(total) * math.sqrt(dimension) * self.deviation

    def reduce(self, points: Tensor, weights: Tensor, total: float, epsilon: float, least: int) -> Reduction:
        """From server points [q, d] and their noisy weights ŵ [q], made with ``epsilon`` (∞: without noise).

        A point is kept if its ball of radius D holds enough client points (m·w_min/3, noisy), or enough server points
        for their noise to hide half of those (it is *frozen*). Kept points within D of each other are a group.
        Groups are moved so that their representatives lie 100·D' apart on one axis, if that makes the whole smaller.

        The lemma freezes from ε·m·w_min/(200·log|Q|) server points on: a constant of its proof, which with fewer than
        200·log|Q|/(ε·w_min) client points freezes everything. Here it is 6, which is what half of m·w_min/3 asks for.
        """
        reach = self.reach(total, points.shape[1])
        near = torch.cdist(points, points, compute_mode="donot_use_mm_for_euclid_dist") < reach
        crowded = epsilon * total * self.smallest / (_CROWDED * math.log(max(2, len(points))))
        frozen = near.sum(1) >= crowded
        held = near.to(weights.dtype) @ weights
        kept = (frozen | (held >= total * self.smallest / 3.0)).nonzero().flatten()
        if len(kept) < least:  # the guesses do not fit: better no reduction than no centres
            kept = torch.arange(len(points))
        anchors = points[kept]
        count, group = connected_components(csr_array(near[kept][:, kept].numpy()), directed=False)
        group = torch.from_numpy(group).long()
        moves = self._gather_groups(anchors, group, count)
        moved = anchors + moves
        smaller = _radius(moved) < _radius(anchors)
        return Reduction(anchors, moves if smaller else torch.zeros_like(moves), count)

    def _gather_groups(self, anchors: Tensor, group: Tensor, count: int) -> Tensor:
        """[points, d] by which each point moves, with its group."""
        members = [(group == one).nonzero().flatten() for one in range(count)]
        widest = max(float(torch.cdist(anchors[one], anchors[one]).max()) for one in members)
        moves = torch.zeros_like(anchors)
        for number, one in enumerate(members):
            target = torch.zeros(anchors.shape[1])
            target[0] = _APART * widest * number
            moves[one] = target - anchors[one[0]]
        return moves


def _radius(points: Tensor) -> float:
    return float(torch.linalg.vector_norm(points - points.mean(0), dim=1).max())
