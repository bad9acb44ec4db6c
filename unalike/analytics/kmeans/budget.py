"""How much noise every step of FedDP-KMeans gets, so that all of them together cost one (ε, δ) (T1 D.8.1)."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass

from unalike.core.release import Unit
from unalike.privacy.checks import check_delta, check_epsilon, check_positive
from unalike.privacy.ledger import Ledger
from unalike.privacy.mechanisms import AdditiveNoise, Gaussian, Laplace

_CLOSE = 1e-3  # the composed ε ends at most this share below the target, and never above it


@dataclass(frozen=True)
class Split:
    """How ε is shared out: Step 1 (Gram matrix), Step 2 (server weights), Step 3 (sums, counts).

    Only the proportions matter. Every step of FedDP-Lloyds asks what Step 3 asks, and gets what Step 3 gets.
    """

    gram: float
    weights: float
    sums: float
    counts: float

    def __post_init__(self) -> None:
        for name, share in vars(self).items():
            check_positive(share, f"the share {name!r} of the budget", "each of the four steps needs some of it")


POINT_SPLIT = Split(0.2, 0.2, 0.45, 0.15)
CLIENT_SPLIT = Split(0.35, 0.1, 0.45, 0.1)
"""The proportions that T1 D.8.1 recommends for each unit of privacy."""


@dataclass(frozen=True)
class Privacy:
    """What a clustering may cost in all: (ε, δ) for one data point, or for one client with all its points."""

    epsilon: float
    delta: float = 1e-6
    unit: Unit = "point"
    split: Split | None = None  # None: the thesis's proportions for the unit

    def __post_init__(self) -> None:
        check_epsilon(self.epsilon)
        check_delta(self.delta)
        if self.unit not in ("point", "client"):
            raise ValueError(f"unit must be 'point' or 'client', got {self.unit!r}; say whom the noise protects")

    @property
    def proportions(self) -> Split:
        """The split in force."""
        return self.split or (POINT_SPLIT if self.unit == "point" else CLIENT_SPLIT)


@dataclass(frozen=True)
class Noise:
    """One mechanism for each kind of query; None: that query is made without noise (or not at all)."""

    gram: AdditiveNoise | None = None
    weights: AdditiveNoise | None = None
    sums: AdditiveNoise | None = None
    counts: AdditiveNoise | None = None


@functools.cache  # the noise depends on settings alone, and a sweep asks for the same again
def calibrate(privacy: Privacy, *, initialize: bool, histograms: int, refinements: int) -> Noise:
    """The noise with which all queries of a run, composed by the ledger, cost just under ``privacy.epsilon``.

    - ``histograms``: how often the server's weights are asked for (they share Step 2's part).
    - ``refinements``: how often sums and counts are asked for (Step 3 and each Lloyd step).
    - ``initialize``: False for a baseline that leaves Steps 1 and 2 out.

    T1 gives each query an ε of its own and adds them up; Algorithm 12 and its text then disagree about δ and T. Here
    the single ε's are only proportions of an unknown s: every Gaussian is calibrated to (share·s, δ), every
    Laplace to share·s, and s is the largest for which the loss distribution of them all meets (ε, δ).
    """
    split = privacy.proportions
    if not initialize and not refinements:
        return Noise()  # nothing is asked of the clients
    whole = refinements * (split.sums + split.counts) + (split.gram + split.weights if initialize else 0.0)

    def noise(s: float) -> Noise:
        part = s / whole
        first = Gaussian.for_budget(part * split.gram, privacy.delta) if initialize else None
        second = Laplace(part * split.weights / histograms) if initialize else None
        if not refinements:
            return Noise(first, second)
        sums = Gaussian.for_budget(part * split.sums, privacy.delta)
        return Noise(first, second, sums, Laplace(part * split.counts))

    def cost(s: float) -> float:
        made = noise(s)
        queries: list[tuple[AdditiveNoise | None, int]] = [
            (made.gram, 1),
            (made.weights, histograms),
            (made.sums, refinements),
            (made.counts, refinements),
        ]
        ledger = Ledger(privacy.unit)
        for mechanism, times in queries:
            for _ in range(times if mechanism is not None else 0):
                assert mechanism is not None
                ledger.record(mechanism.event(), unit=privacy.unit)
        return ledger.epsilon(privacy.delta)

    return noise(_largest(cost, privacy.epsilon))


def _largest(cost: Callable[[float], float], target: float) -> float:
    """The s with cost(s) just below ``target``, for a rising function that is nearly proportional to s."""
    low, high = 0.0, math.inf
    s = target
    for _ in range(60):
        spent = cost(s)
        if spent <= target:
            low = s
            if spent >= (1.0 - _CLOSE) * target:
                break
        else:
            high = s
        s *= (1.0 - _CLOSE / 2) * target / spent  # aim inside the tolerance
        if not low < s < high:
            s = 2.0 * low if math.isinf(high) else 0.5 * (low + high)
    return low
