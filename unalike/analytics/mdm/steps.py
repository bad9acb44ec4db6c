"""The server's steps of MDM: moment matching (Algorithm 5), the M-step (Algorithm 6), and mixtures side by side."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from unalike.data.partition.mixture import Mixture

SMOOTHING = 0.01  # clients added to every component, so that no weight and no size has probability 0
EMPTY = 1e-3  # a component with a smaller share of the cohort is empty
LEAST_ALPHA, LEAST_PRECISION, MOST_PRECISION = 1e-4, 1e-2, 1e4


def start_mixture(sums: Tensor, edges: Tensor, notes: list[str], category: int | None) -> Mixture:
    """Moment matching, line 8: from a component's moments to its first parameters.

    ``category``: whose second moment gives the precision; None: that of the largest mean.
    """
    bins, everybody = len(edges) - 1, sums.sum(0)
    rows = []
    for k, row in enumerate(sums):
        if row[0] < max(1.0, EMPTY * float(everybody[0])):  # nobody is here
            notes.append(f"component {k} had no client to start from; it started from the moments of all of them")
            rows.append((everybody, 2.0 ** (k + 1)))  # and not quite as another one did
        else:
            rows.append((row, 1.0))
    alpha = torch.stack(
        [_match_moments(row[1 + bins :] / row[0].clamp(min=1), stretch, category) for row, stretch in rows]
    )
    pi = torch.stack([_smooth(row[1 : 1 + bins]) for row, _ in rows])
    tau = torch.full((len(sums),), 1 / len(sums), dtype=torch.float64)
    return Mixture(tau, alpha, pi, edges)


def maximize(now: Mixture, membership: Tensor, growth: Tensor, notes: list[str], may_restart: bool) -> Mixture:
    """Algorithm 6, lines 13 to 15."""
    weight = membership[:, 0].clamp(min=0)
    tau = _smooth(weight)
    pi = torch.stack([_smooth(row) for row in membership[:, 1:]])
    precision = now.alpha.sum(1, keepdim=True)
    alpha = precision * growth[:, :-1].clamp(min=0) / growth[:, -1:].clamp(min=1e-12)
    filled = (weight > EMPTY * weight.sum()) & (growth[:, -1] > 0)
    alpha = _clamp(torch.where(filled[:, None], alpha, now.alpha))
    if may_restart and not bool(filled.all()) and bool(filled.any()):
        heaviest = int(weight.argmax())
        for k in (~filled).nonzero().flatten().tolist():
            alpha[k], pi[k] = alpha[heaviest] / 2, pi[heaviest]
            tau[k] = tau[heaviest] = (tau[k] + tau[heaviest]) / 2
            note = f"component {k} became empty and restarted beside component {heaviest}"
            if note not in notes:
                notes.append(note)
    return Mixture(tau, alpha, pi, now.edges)


def quantiles(histogram: Tensor, components: int) -> Tensor:
    """[K − 1] places that divide a histogram over [0, 1] into K equal parts."""
    mass = histogram.clamp(min=0) + 1e-9  # a noisy bin may be negative
    below = [0.0, *(mass.cumsum(0) / mass.sum()).tolist()]
    wanted = np.arange(1, components) / components
    return torch.from_numpy(np.interp(wanted, below, np.linspace(0, 1, len(below))))


def _match_moments(moments: Tensor, stretch: float, category: int | None) -> Tensor:
    """Equation (3.9); ``stretch`` multiplies the precision."""
    first, second = moments.chunk(2)
    first = first.clamp(0, 1)
    first = (first + 1e-6) / (first + 1e-6).sum()
    j = int(first.argmax()) if category is None else category
    variance = (second[j] - first[j] ** 2).clamp(min=1e-9)
    precision = ((first[j] - second[j]) / variance).clamp(LEAST_PRECISION, MOST_PRECISION)
    return _clamp((stretch * precision * first)[None])[0]


def _clamp(alpha: Tensor) -> Tensor:
    """α within its bounds: every entry above a floor, and the precision below a ceiling."""
    return alpha.clamp(min=LEAST_ALPHA) * (MOST_PRECISION / alpha.sum(1, keepdim=True)).clamp(max=1.0)


def _smooth(mass: Tensor) -> Tensor:
    """Probabilities from masses that may be zero or, with noise, negative."""
    mass = mass.clamp(min=0) + SMOOTHING / len(mass)
    return mass / mass.sum()


def drop_empty(mixture: Mixture, notes: list[str]) -> Mixture:
    """The mixture without its empty components."""
    kept = mixture.tau > EMPTY
    if bool(kept.all()):
        return mixture
    notes.append(f"{int((~kept).sum())} of {len(kept)} components ended empty and were merged into the others")
    tau = mixture.tau[kept]
    return Mixture(tau / tau.sum(), mixture.alpha[kept], mixture.pi[kept], mixture.edges)


def stack(mixtures: Sequence[Mixture]) -> dict[str, Tensor]:
    """Several mixtures as the inputs of one ask, filled up to equally many components."""
    most = max(mixture.components for mixture in mixtures)
    padded = [_pad(mixture, most) for mixture in mixtures]
    return {name: torch.stack([getattr(one, name) for one in padded]) for name in ("tau", "alpha", "pi")}


def _pad(mixture: Mixture, components: int) -> Mixture:
    """The same mixture with further components of weight 0."""
    missing = components - mixture.components
    if missing == 0:
        return mixture
    alpha, pi = (torch.cat([value, value[:1].expand(missing, -1)]) for value in (mixture.alpha, mixture.pi))
    return Mixture(torch.cat([mixture.tau, torch.zeros(missing, dtype=torch.float64)]), alpha, pi, mixture.edges)
