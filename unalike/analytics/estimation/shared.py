"""Personalized estimation (P3 §2–3): what its estimators share.

Every client has a parameter of its own, drawn from a population (the prior) that nobody knows. A client sends one
statistic; the server learns the prior from all of them and sends it back; the client combines it with its own data.
The estimate stays with the client. How the statistic travels, bare, in k bits or with local noise, is a ``Channel``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

from unalike.analytics.reading import bad_rows
from unalike.core.checks import one_of
from unalike.core.release import Each
from unalike.core.roster import Roster
from unalike.core.vocabulary import Client, Federation, Sent, send, task
from unalike.data.source import DataError
from unalike.privacy.checks import check_delta, check_epsilon
from unalike.privacy.mechanisms import Gaussian, Quantizer

Calibration = Literal["analytic", "paper"]
AfterRound = Callable[[int], object]
ABSURD = 1e12  # no coefficient or variance is so large: gradient descent has diverged
_ADVICE = (
    "its rows hold NaN or infinite values, or, where only 0 and 1 are allowed, something else: correct or remove them "
    "(check_rows in analytics/estimation/samples.py says which)"
)


def ignore_round(number: int) -> None:
    """What is called after each round where nobody watches."""


class EstimationError(DataError):
    """Data or settings are not what an estimator needs; the message says what came and what to do."""


@dataclass(frozen=True)
class Channel:
    """How a client's statistic reaches the server: as it is, rounded to ``bits``, or with local (ε0, δ) noise.

    ``calibration`` of the noise: "analytic" is the least Gaussian noise for (ε0, δ); "paper" is P3's Theorem 2,
    σ_q = (b/ε0)·√(8·log(2/δ)), proven for ε0 below 1 only. ``bits`` rounds each coordinate by itself; of the schemes
    for whole vectors that P3 §2.3.3 mentions it chooses none.
    """

    bits: int | None = None
    epsilon: float | None = None
    delta: float = 1e-5
    calibration: Calibration = "analytic"

    def __post_init__(self) -> None:
        if self.bits is not None and self.epsilon is not None:
            raise EstimationError("choose bits or epsilon: rounding is not private, and noise needs no rounding")
        if self.bits is not None:
            Quantizer(self.bits, bound=1.0)  # says what is wrong with the number of bits
        if self.epsilon is not None:
            check_epsilon(self.epsilon)
            check_delta(self.delta)
        one_of(self, "calibration")
        if self.epsilon is not None and self.calibration == "paper" and self.epsilon >= 1:
            raise EstimationError(
                f"the paper's noise is proven for epsilon below 1, got {self.epsilon:g}; use the analytic one"
            )

    @property
    def is_bare(self) -> bool:
        """Does the server see the statistic as it is?"""
        return self.bits is None and self.epsilon is None

    def noise(self, uses: int = 1) -> Gaussian:
        """The Gaussian mechanism whose ``uses`` together cost (ε0, δ): their variances add up."""
        assert self.epsilon is not None
        if self.calibration == "paper":
            one = Gaussian(math.sqrt(2.0 * math.log(2.0 / self.delta)) / self.epsilon)
        else:
            one = Gaussian.for_budget(self.epsilon, self.delta)
        return Gaussian(one.noise_multiplier * math.sqrt(uses))

    def release(self, name: str, uses: int = 1) -> Each:
        """The release of a vector that its task measures in a ``unit``: it follows from the settings alone."""
        if self.is_bare:
            return Each(name)
        if self.bits is not None:
            return Each(name, noise=Quantizer(self.bits, 1.0))
        return Each(name, clip=1.0, noise=self.noise(uses))

    def unit(self, bound: float | None, dim: int) -> float:
        """What a vector of ``dim`` coordinates in [−bound, bound] is divided by before it is sent.

        Then every coordinate is within 1, for k bits, or the norm is, for noise.
        """
        if self.is_bare:
            return 1.0
        assert bound is not None
        return bound if self.bits is not None else bound * math.sqrt(dim)

    def variance(self, bound: float | None, dim: int, uses: int = 1) -> float:
        """σ_q²: the most that the channel adds to the variance of one coordinate."""
        if self.is_bare:
            return 0.0
        assert bound is not None
        if self.bits is not None:
            return Quantizer(self.bits, bound).largest_std ** 2
        return self.noise(uses).std(2.0 * bound * math.sqrt(dim)) ** 2


@dataclass(frozen=True)
class PriorFit:
    """What the server learned; the estimates stayed with the clients, as kept arrays "estimate" and "local"."""

    prior: Mapping[str, Any]
    trace: Sequence[float] = ()  # log-likelihood or objective by round, where there is one
    notes: Sequence[str] = ()


@dataclass(frozen=True)
class Estimates(PriorFit):
    """The clients' estimates, as only a simulation sees them, and what the server learned.

    ``local`` is what a client finds alone.
    """

    estimate: Tensor = field(kw_only=True)  # [clients, d]
    deviation: Tensor = field(kw_only=True)  # [clients, d] standard error of each, by the posterior
    local: Tensor = field(kw_only=True)  # [clients, d]
    positions: Tensor = field(kw_only=True)  # [clients] in the federation: those that have an estimate

    def interval(self) -> tuple[Tensor, Tensor]:
        """[clients, d] both ends of each estimate's interval of 95 %."""
        return self.estimate - 1.96 * self.deviation, self.estimate + 1.96 * self.deviation


@task
def read_estimate(client: Client, missing: Tensor) -> Sent:
    """For measuring in simulation: what the client kept."""
    estimate, local, deviation = (client.kept.get(name, missing) for name in ("estimate", "local", "deviation"))
    return send(estimate=estimate, local=local, deviation=deviation)


class Estimator(Protocol):
    """What all estimators have: ``fit``, and for simulations ``estimate``."""

    @property
    def kind(self) -> str:
        """Its name: gaussian, bernoulli, mixture, linear or logistic."""
        ...

    @property
    def loss(self) -> str:
        """By which of ``samples.LOSSES`` its estimates are measured."""
        return self.kind

    def theory(self, federation: Federation, found: Estimates) -> dict[str, float]:
        """Errors that a theorem states for the prior that was used, by name."""
        return {}

    def fit(self, federation: Federation, after_round: AfterRound = ignore_round) -> PriorFit:
        """Learn the prior, and have every client make its estimate. ``after_round(number)`` may watch."""
        ...

    def estimate(self, federation: Federation, after_round: AfterRound = ignore_round) -> Estimates:
        """``fit``, and what all clients keep from it: a simulation's own view, charged to nobody."""
        learned = self.fit(federation, after_round)
        missing = torch.full(federation.roster.schema.shape, torch.nan, dtype=torch.float64)  # then it does not answer
        with federation.aside() as own:
            replies = own.everyone().ask(read_estimate, missing=missing)
        notes = [*learned.notes, *bad_rows(federation.failures, _ADVICE)]
        return Estimates(**{**vars(learned), **replies, "positions": replies.answered, "notes": notes})


def mse(estimate: Tensor, truth: Tensor) -> float:
    """Mean over clients of the squared error."""
    truth = truth.to(torch.float64).reshape(estimate.shape)
    return float((estimate - truth).square().sum(1).mean())


def gain(error: float, baseline: float) -> float | None:
    """By what share the error is below the baseline's; None where the baseline has no error."""
    return None if baseline == 0 else 1.0 - error / baseline


def check_roster(
    roster: Roster, family: str | None = None, *, width: int | None = None, clients: int = 1, components: int = 1
) -> int:
    """The number of features, before anything is asked; rows are checked where they are read (``samples.py``).

    Refuses images and tokens, another number than ``width``, and fewer than ``clients``.

    ``family``: of a regression, which needs targets. ``components``: of a mixture, each of which needs a client.
    """
    shape, count = roster.schema.shape, len(roster)
    if len(shape) != 1 or (width is not None and shape[0] != width):
        expected = "one column" if width == 1 else "columns of numbers"
        raise EstimationError(f"expected {expected} as features, but a sample has shape {shape}")
    if count < clients:
        raise EstimationError(f"learning a prior needs at least {clients} clients, got {count}; give more clients")
    if components > count:
        raise EstimationError(
            f"{components} mixture components for {count} clients; expected at most one for each client: lower the "
            "number of components"
        )
    if family is not None and (roster.schema.target == "none" or not bool(roster.labeled.all())):
        raise EstimationError("regression needs a target for every row; name its column (label_column), or y in an NPZ")
    if family == "linear" and roster.schema.target == "class":
        raise EstimationError(
            "a linear regression needs numbers as targets, but these are the numbers of classes; name a column of "
            "numbers without task='classification', and read it by read_samples(data, 'linear'), or use logistic for "
            "two classes"
        )
    return shape[0]
