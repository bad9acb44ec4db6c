"""How much noise every step of FedDP-KMeans gets, so that all of them together cost one (ε, δ) (T1 D.8.1)."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

from unalike.core.release import Unit
from unalike.privacy.account import Account, account
from unalike.privacy.calibrate import least_noise
from unalike.privacy.checks import SettingError, check_delta, check_epsilon, check_positive
from unalike.privacy.ledger import Ledger
from unalike.privacy.mechanisms import AdditiveNoise, Gaussian, Laplace
from unalike.privacy.sampling import Everyone, Poisson, Sampling


@dataclass(frozen=True)
class BudgetSplit:
    """How ε is shared out: Step 1 (Gram matrix), Step 2 (server weights), Step 3 (sums, counts), and FedDP-Lloyds.

    Only the proportions matter. ``lloyd_sums`` and ``lloyd_counts`` are ε₄ of Algorithm 12, for all its steps
    together; without them every step of FedDP-Lloyds gets what Step 3 gets.
    """

    gram: float
    weights: float
    sums: float
    counts: float
    lloyd_sums: float | None = None
    lloyd_counts: float | None = None

    def __post_init__(self) -> None:
        if (self.lloyd_sums is None) != (self.lloyd_counts is None):
            raise SettingError("lloyd_sums and lloyd_counts are the shares of FedDP-Lloyds; give both or neither")
        for name, share in self.given.items():
            check_positive(share, f"the share {name!r} of the budget", "each step needs some of it")

    @property
    def given(self) -> dict[str, float]:
        """The shares that are given, by name."""
        return {name: share for name, share in vars(self).items() if share is not None}

    def lloyd_step(self, steps: int) -> tuple[float, float]:
        """The shares of one step of FedDP-Lloyds, for sums and for counts."""
        if self.lloyd_sums is None or self.lloyd_counts is None:
            return self.sums, self.counts
        return self.lloyd_sums / steps, self.lloyd_counts / steps


POINT_SPLIT = BudgetSplit(0.2, 0.2, 0.45, 0.15)
CLIENT_SPLIT = BudgetSplit(0.35, 0.1, 0.45, 0.1)
"""The proportions that T1 D.8.1 recommends for each unit of privacy."""


@dataclass(frozen=True)
class KMeansPrivacy:
    """What a clustering may cost in all: (ε, δ) for one data point, or for one client with all its points."""

    epsilon: float
    delta: float = 1e-6
    unit: Unit = "point"
    split: BudgetSplit | None = None  # None: the thesis's proportions for the unit

    def __post_init__(self) -> None:
        check_epsilon(self.epsilon)
        check_delta(self.delta)
        if self.unit not in ("point", "client"):
            raise SettingError(f"unit must be 'point' or 'client', got {self.unit!r}; say whom the noise protects")

    @property
    def proportions(self) -> BudgetSplit:
        """The split in force."""
        return self.split or (POINT_SPLIT if self.unit == "point" else CLIENT_SPLIT)


@dataclass(frozen=True)
class StepNoise:
    """One mechanism for each kind of query; None: that query is made without noise (or not at all)."""

    gram: AdditiveNoise | None = None
    weights: AdditiveNoise | None = None
    sums: AdditiveNoise | None = None
    counts: AdditiveNoise | None = None
    lloyd_sums: AdditiveNoise | None = None  # of a Lloyd step; None: as ``sums``
    lloyd_counts: AdditiveNoise | None = None  # None: as ``counts``


@dataclass(frozen=True)
class Clips:
    """For client-level privacy, the norms to which a client's share of each query is clipped: B of T1 D.7.4.

    None: that of a typical client, by its number of points and the server data. Step 3 asks for ``means`` and
    ``presence``, a Lloyd step for ``sums`` and ``counts``. Counts and weights are measured in L1, the others in L2.
    """

    gram: float | None = None
    weights: float | None = None
    means: float | None = None
    presence: float | None = None
    sums: float | None = None
    counts: float | None = None

    def __post_init__(self) -> None:
        for name, bound in vars(self).items():
            if bound is not None:
                check_positive(bound, f"the clip of {name!r}", "it is the most that a client's share may be long")


def mechanisms(privacy: KMeansPrivacy, s: float, *, initialize: bool, histograms: int, steps: int) -> StepNoise:
    """The noise with which the queries cost (share·s, δ) each, by themselves."""
    split, delta = privacy.proportions, privacy.delta
    made: dict[str, AdditiveNoise] = {}
    if initialize:
        made = {"gram": Gaussian.for_budget(s * split.gram, delta), "weights": Laplace(s * split.weights / histograms)}
    own = split.lloyd_sums is not None
    if initialize or (steps and not own):
        made |= {"sums": Gaussian.for_budget(s * split.sums, delta), "counts": Laplace(s * split.counts)}
    if steps and own:
        sums, counts = split.lloyd_step(steps)
        made |= {"lloyd_sums": Gaussian.for_budget(s * sums, delta), "lloyd_counts": Laplace(s * counts)}
    return StepNoise(**made)


@functools.cache  # the noise depends on settings alone, and a sweep asks for the same again
def calibrate(privacy: KMeansPrivacy, *, initialize: bool, histograms: int, steps: int, rate: float = 1.0) -> StepNoise:
    """The noise with which all queries of a run, composed by the ledger, cost just under ``privacy.epsilon``.

    - ``histograms``: how often the server's weights are asked for (they share Step 2's part).
    - ``steps``: of FedDP-Lloyds.
    - ``initialize``: False for a baseline that leaves FedDP-Init out.
    - ``rate``: of the clients that a query is put to, a Poisson sample for each; where points are protected it
      amplifies nothing.

    T1 gives each query an ε of its own and adds them up; Algorithm 12 and its text then disagree about δ and T. Here
    the single ε's are only proportions of an unknown s: every Gaussian is calibrated to (share·s, δ), every
    Laplace to share·s, and s is the largest for which the loss distribution of them all meets (ε, δ).
    """
    if not initialize and not steps:
        return StepNoise()
    asked: dict[str, Any] = {"initialize": initialize, "histograms": histograms, "steps": steps}
    sampling: Sampling = Everyone() if rate == 1.0 else Poisson(rate)

    def released(inverse: float) -> Account:
        ledger, made = Ledger(privacy.unit), mechanisms(privacy, 1.0 / inverse, **asked)
        queries = [[made.gram], *[[made.weights]] * histograms, [made.sums, made.counts]] if initialize else []
        queries += [[made.lloyd_sums or made.sums, made.lloyd_counts or made.counts]] * steps
        for number, asked_together in enumerate(queries):
            for mechanism in asked_together:  # of the same sample
                assert mechanism is not None
                ledger.record(mechanism.event(), unit=privacy.unit, sampling=sampling, cohort=number)
        return account([(ledger.event(), 1)])

    return mechanisms(privacy, 1.0 / least_noise(released, privacy.epsilon, privacy.delta), **asked)
