"""Local DP-SGD (Abadi et al. 2016): what its steps cost a data point, the noise for a target, and the private gradient.

A client takes Poisson batches of its own N points at rate q, clips every point's gradient to C, adds N(0, (z·C)²) to
their sum and divides by the expected batch size q·N. One point, added or removed, is protected. Points of different
clients do not meet, so every client has an ε of its own: ``ledger.record(event, unit="point", clients=[client])``.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import dp_accounting
import torch
from dp_accounting import DpEvent
from torch import Tensor

from motley.privacy import accountant
from motley.privacy.calibrate import least_noise
from motley.privacy.checks import check_at_least, check_positive
from motley.privacy.mechanisms import DrawsLike, Gaussian


@dataclass(frozen=True)
class Steps:
    """``count`` steps of DP-SGD with Poisson batches at this rate; rate 1 is the full batch."""

    rate: float
    count: int

    def __post_init__(self) -> None:
        if not 0 < self.rate <= 1:
            raise ValueError(
                f"the batch rate must be above 0 and at most 1, got {self.rate}; give batch size / data size"
            )
        check_at_least(self.count, 1, "count", "give how many steps are taken")

    @classmethod
    def of(cls, batch: int, size: int, count: int) -> Steps:
        """Steps of an expected batch size on a client of ``size`` points (a larger batch is the full batch)."""
        check_at_least(batch, 1, "batch", "give the expected batch size")
        check_at_least(size, 1, "size", "a client without data takes no steps")
        return cls(min(1.0, batch / size), count)


def event(noise_multiplier: float, *steps: Steps) -> DpEvent:
    """The event of all steps with one noise multiplier, for example full batches first and small ones afterwards."""
    check_positive(noise_multiplier, "noise_multiplier", "it is standard deviation / clip; noise_for(...) finds it")
    gaussian = dp_accounting.GaussianDpEvent(noise_multiplier)
    parts = tuple(
        dp_accounting.SelfComposedDpEvent(dp_accounting.PoissonSampledDpEvent(phase.rate, gaussian), phase.count)
        for phase in steps
    )
    return dp_accounting.ComposedDpEvent(parts)


def epsilon(noise_multiplier: float, *steps: Steps, delta: float) -> float:
    """ε of one point of a client that takes these steps."""
    return accountant.epsilon(accountant.account([(event(noise_multiplier, *steps), 1)]), delta)


@lru_cache(maxsize=4096)  # clients alike in size and target share the solution
def noise_for(epsilon: float, delta: float, *steps: Steps, also: tuple[DpEvent, ...] = ()) -> float:
    """The least noise multiplier with which a client's steps (and the events ``also``) stay within its (ε, δ)."""
    others = tuple((other, 1) for other in also)
    return least_noise(lambda z: accountant.account([(event(z, *steps), 1), *others]), epsilon, delta)


def clip_per_sample(gradients: Tensor, bound: float) -> Tensor:
    """Scale every row of [batch, d] down to L2 norm at most ``bound``; a row that is not finite becomes zero."""
    check_positive(bound, "the clip bound", "give the largest norm that one point's gradient may have, e.g. 1.0")
    finite = torch.isfinite(gradients).all(dim=-1, keepdim=True)
    safe = torch.where(finite, gradients, torch.zeros_like(gradients))
    norms = torch.linalg.vector_norm(safe, dim=-1, keepdim=True)
    limit = (1.0 - 2.0**-16) * bound  # a hair below, more than the error of a norm in the gradient's own precision
    factor: Tensor = limit / norms.clamp(min=limit)
    return safe * factor


def private_gradient(
    gradients: Tensor, taken: Tensor, bound: float, noise_multiplier: float, expected: float | Tensor, draws: DrawsLike
) -> Tensor:
    """The step's gradient [d] from per-point gradients [capacity, d]: clip, sum over the batch, add noise, divide.

    ``taken`` [capacity] marks the points that the Poisson draw put into the batch. The divisor is the expected batch
    size q·N, not the actual one, which would be a second release.
    """
    clipped = clip_per_sample(gradients, bound)
    total = (clipped * taken.to(clipped.dtype).unsqueeze(-1)).sum(dim=0)
    return Gaussian(noise_multiplier).add(total, bound, draws) / expected
