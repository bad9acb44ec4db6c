"""NoisyEM of the clients' estimates by noisy sums: mixture priors with client-level privacy (P3 §2.3.3, §3.3).

In each step the server sends centres μ_l, weights p_l and one variance v (one for each component would drown in the
noise), and gets Σ_i r_il·(θ_i, s_i, 1) with noise, where r_i says how likely client i is of each component, and s_i =
‖θ_i‖² plus its own uncertainty: from these sums follow the next p_l, μ_l and v, as in EM. A client's share has a norm
of at most 1. The first step has one component, the mean of all; then the one with the largest variance in total is
split in two, a step follows, and so on until there are k.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from unalike.core.release import Release, Sum
from unalike.core.vocabulary import Federation, Task
from unalike.privacy.checks import check_delta, check_epsilon
from unalike.privacy.mechanisms import Gaussian

_SPLIT = 1.0  # deviations between the two halves of a component
_AFTER_SPLIT = 2  # steps after each
_ROW = math.sqrt(3.0)  # norm of (θ, s, 1) at most
_LEAST = 1e-6  # of the squared bound: no variance is smaller


@dataclass(frozen=True)
class Central:
    """(ε, δ) for a client, by noise on sums that the server sees; ``secure``: under masks."""

    epsilon: float
    delta: float
    secure: bool = False

    def __post_init__(self) -> None:
        check_epsilon(self.epsilon)
        check_delta(self.delta)

    def noise(self, uses: int) -> Gaussian:
        """That of each of ``uses`` releases: together they are as one with √uses less noise."""
        return Gaussian(math.sqrt(uses) * Gaussian.for_budget(self.epsilon, self.delta).noise_multiplier)

    def release(self, uses: int) -> Release:
        return Sum("share", clip=1.0, noise=self.noise(uses), secure=self.secure)

    def learn(
        self,
        federation: Federation,
        question: Callable[[int], Task],
        components: int,
        dim: int,
        bound: float,
        last: int,
        after_step: Callable[[int], object],
    ) -> Components:
        """The components in units of ``bound``. ``question(number)`` is the task of a step: from 1 on of the ``last``
        ones, after which ``after_step`` is called, and below of those before."""
        number, unit = -count_releases(components, 0), torch.tensor(bound, dtype=torch.float64)

        def ask(now: Components) -> Tensor:
            nonlocal number
            number += 1
            found = federation.everyone().ask(question(number), **now.inputs, unit=unit)["share"]
            if number > 0:
                after_step(number)
            return found

        level = self.noise(count_releases(components, last)).noise_multiplier
        random = torch.Generator().manual_seed(federation.seed % (1 << 32))
        return NoisyEM(ask, components, dim, level, random).run(last)


@dataclass(frozen=True)
class Components:
    """p_l, μ_l and v of a coordinate, in units of the bound; and how much of v each component has, for splits."""

    weights: Tensor  # [k]
    centers: Tensor  # [k, d]
    variance: Tensor
    spread: Tensor  # [k]

    @property
    def inputs(self) -> dict[str, Any]:
        return {"weights": self.weights, "centers": self.centers, "variance": self.variance}


def client_share(theta: Tensor, belongs: Tensor, risk: Tensor | float = 0.0) -> Tensor:
    """[k, d + 2] of one client, whose estimate and risk are in units of the bound; its norm is at most 1."""
    theta = theta / theta.norm().clamp(min=1.0)
    square = (theta.square().sum() + risk).clamp(0, 1)
    row = torch.cat([theta, square[None], torch.ones(1, dtype=theta.dtype)])
    return belongs[:, None] * row / _ROW


def next_components(total: Tensor, now: Components, noise_std: float) -> Components:
    """The next components from the noisy sums; one whose count is not clear of the noise stays as it is.

    A noisy centre is too long: the part of ‖μ_l‖² that is noise is put back into the variance.
    """
    total = total.to(torch.float64) * _ROW
    sums, squares, counts = total[:, :-2], total[:, -2], total[:, -1]
    dim, noise = sums.shape[1], noise_std * _ROW
    sure = counts > 4 * noise
    size = counts.clamp(min=max(1.0, noise))
    centers = torch.where(sure[:, None], sums / size[:, None], now.centers)
    centers = centers / centers.norm(dim=1, keepdim=True).clamp(min=1.0)
    lengths = centers.square().sum(1) - torch.where(sure, dim * (noise / size) ** 2, 0.0)
    spread = (squares - size * lengths.clamp(min=0)) / dim
    everybody = float(size.sum())
    least = max(_LEAST, noise * math.sqrt(len(counts)) / (everybody * dim))
    variance = (spread[sure].sum() / everybody).clamp(min=least) if bool(sure.any()) else now.variance
    return Components(size / size.sum(), centers, variance, spread.clamp(min=least))


@dataclass
class NoisyEM:
    """k components from noisy sums; ``ask(components)`` gives the sum of the clients' shares."""

    ask: Callable[[Components], Tensor]
    components: int
    dim: int
    noise_std: float
    generator: torch.Generator = field(default_factory=lambda: torch.Generator().manual_seed(0))

    def run(self, last: int) -> Components:
        """All steps: those of the splits, and ``last`` of them with all components."""
        one = torch.ones(1, dtype=torch.float64)
        now = self.step(Components(one, torch.zeros(1, self.dim, dtype=torch.float64), one[0], one))
        while len(now.weights) < self.components:
            now = self.split(now)
            for _ in range(_AFTER_SPLIT):
                now = self.step(now)
        for _ in range(last):
            now = self.step(now)
        return now

    def step(self, now: Components) -> Components:
        return next_components(self.ask(now), now, self.noise_std)

    def split(self, now: Components) -> Components:
        """The component with the largest spread in total becomes two, on both sides of its centre."""
        widest = int(now.spread.argmax())
        way = torch.randn(self.dim, dtype=torch.float64, generator=self.generator)
        aside = _SPLIT * math.sqrt(float(now.variance)) * way / way.norm()
        centers = torch.cat([now.centers, (now.centers[widest] - aside)[None]])
        centers[widest] = now.centers[widest] + aside
        weights, spread = (torch.cat([one, one[widest : widest + 1] / 2]) for one in (now.weights, now.spread))
        weights[widest], spread[widest] = weights[-1], spread[-1]
        return Components(weights, centers, now.variance, spread)


def count_releases(components: int, last: int) -> int:
    """How many releases ``NoisyEM.run`` makes."""
    return 1 + _AFTER_SPLIT * (components - 1) + last
