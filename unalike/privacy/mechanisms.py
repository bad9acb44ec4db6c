"""Privacy mechanisms: values that say how much noise, make it, and name the event that the ledger accounts.

A mechanism is scale-free. Whoever uses it gives the sensitivity, measured in the mechanism's ``norm``: how far the
value moves when one protected unit changes (see ``unalike.privacy.sampling`` for how this follows from a clip). The
same mechanism serves on a sum at the server (central noise) and on one client's value at the client (local noise).

Two kinds of draws: seeded ones (``unalike.core.draws.Draws``), for simulations that must repeat, in floating point; and
the operating system's (``SystemDraws``), with which every mechanism is exact: values are rounded to a grid, noise is a
whole number of its steps, and all that is random is decided by comparing integers (``unalike.privacy.discrete``).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal, Protocol, runtime_checkable

import torch
from torch import Tensor

from unalike.privacy import discrete
from unalike.privacy.checks import SettingError, check_at_least, check_delta, check_epsilon, check_positive

if TYPE_CHECKING:
    from dp_accounting import DpEvent

Norm = Literal["l1", "l2"]
_UNIT = 1 << 30  # ε in integers: at most this fraction of it is not used
_CLIP_ADVICE = "give the clip that bounds one unit's share, e.g. clip=1.0"


class DrawsLike(Protocol):
    """What a mechanism needs of a generator: ``unalike.core.draws.Draws`` (seeded) and ``SystemDraws`` both have it."""

    def bits(self, count: int) -> Tensor:
        """Uniform 64-bit integers as int64 [count]."""

    def normal(self, *shape: int) -> Tensor:
        """Standard normal floats."""


@runtime_checkable
class AdditiveNoise(Protocol):
    """A mechanism that adds zero-mean noise to a tensor whose sensitivity is bounded: Gaussian and Laplace."""

    @property
    def norm(self) -> Norm:
        """The norm in which the sensitivity is measured."""

    def std(self, sensitivity: float) -> float:
        """Standard deviation of the noise on each coordinate."""

    def add(self, value: Tensor, sensitivity: float, draws: DrawsLike, step: float | None = None) -> Tensor:
        """The value with noise, in the value's own type.

        ``step``: the value is known to lie on the grid of this step, so that rounding it there changes nothing. Without
        it, exact noise takes the grid that fits, and is larger by what rounding adds to the sensitivity.
        """

    def event(self) -> DpEvent:
        """What one use costs."""


@runtime_checkable
class Randomizer(Protocol):
    """A mechanism that bounds its input by itself and needs no sensitivity: randomized response, k-bit rounding."""

    def randomize(self, value: Tensor, draws: DrawsLike) -> Tensor:
        """What a client sends in place of the value, in the value's own type."""

    def event(self) -> DpEvent:
        """What one use costs."""


def uniform(draws: DrawsLike, *shape: int) -> Tensor:
    """Uniform float64 inside (0, 1), never 0 or 1, 52 random bits each: what logarithms need."""
    high = (draws.bits(math.prod(shape)) >> 12) & ((1 << 52) - 1)
    return ((high.to(torch.float64) + 0.5) * 2.0**-52).reshape(shape)


def clip(value: Tensor, bound: float, norm: Norm = "l2") -> Tensor:
    """Scale the tensor down to ``norm(value) <= bound``; a value that is not finite everywhere becomes zero.

    NaN and infinity have no norm to scale by, and letting them through would publish them: NaN plus noise is NaN.
    """
    check_positive(bound, "the clip bound", _CLIP_ADVICE)
    finite = torch.isfinite(value).all()
    safe = torch.where(finite, value, torch.zeros_like(value))
    order = 1 if norm == "l1" else 2
    length = torch.linalg.vector_norm(safe.to(torch.float64), ord=order)
    # The factor stays a hair below bound / length, so that rounding to the value's type cannot end above the bound.
    shrink = (1.0 - 4.0 * torch.finfo(value.dtype).eps) * bound / length.clamp(min=torch.finfo(torch.float64).tiny)
    return torch.where(length > bound, safe * shrink, safe).to(value.dtype)


def is_exact(draws: DrawsLike) -> bool:
    """Do these draws come from the operating system, so that noise must be exact?"""
    return bool(getattr(draws, "system", False))


def add_gaussian(
    value: Tensor,
    sensitivity: float,
    noise_multiplier: float | Tensor,
    draws: DrawsLike,
    step: float | None = None,
) -> Tensor:
    """The value with Gaussian noise of deviation noise_multiplier · sensitivity; a tensor gives each client its own.

    Discrete, if the draws are the operating system's. σ is then rounded up to a whole number of grid steps. Rounding
    two values to the grid can take them √d steps further apart; this counts as sensitivity unless they were on it.
    """
    _check_floating(value)
    if not is_exact(draws):
        noise = noise_multiplier * sensitivity * draws.normal(*value.shape).to(torch.float64)
        return (value.to(torch.float64) + noise).to(value.dtype)  # rounded once to the value's type
    d, z = value.numel(), torch.as_tensor(noise_multiplier, dtype=torch.float64)
    largest = noise_multiplier * sensitivity if isinstance(noise_multiplier, float | int) else sensitivity
    made = discrete.grid(sensitivity, largest, d) if step is None else step
    moved = sensitivity / made + (math.sqrt(d) if step is None else 0.0)
    sigma = torch.ceil(z * moved * _UP).to(torch.int64)
    return _add_steps(value, discrete.gaussian_noise(sigma, value.shape, _like(draws)), made)


_UP = 1.0 + 1e-12  # before a product is rounded up: what floating point may have taken off


def _like(draws: DrawsLike) -> Tensor | None:
    return getattr(draws, "like", None)


def _add_steps(value: Tensor, noise: Tensor, step: float) -> Tensor:
    """The nearest whole number of steps plus the noise, as integers; only the result is a floating-point number again.

    A value that is not finite everywhere counts as zero.
    """
    safe = torch.where(torch.isfinite(value).all(), value, torch.zeros_like(value)).to(torch.float64)
    steps = torch.round(safe / step).clamp(-(2.0**61), 2.0**61).to(torch.int64)
    return ((steps + noise).to(torch.float64) * step).to(value.dtype)


def _check_floating(value: Tensor) -> None:
    if not value.is_floating_point():
        raise TypeError(f"noise needs a floating-point tensor, got {value.dtype}; convert counts with .double()")


@dataclass(frozen=True)
class Gaussian:
    """Gaussian mechanism: noise N(0, (noise_multiplier · sensitivity)²) on each coordinate; L2 sensitivity."""

    noise_multiplier: float
    norm: ClassVar[Norm] = "l2"

    def __post_init__(self) -> None:
        check_positive(
            self.noise_multiplier,
            "noise_multiplier",
            "it is standard deviation / sensitivity; Gaussian.for_budget(epsilon, delta) finds it",
        )

    @classmethod
    def for_budget(cls, epsilon: float, delta: float) -> Gaussian:
        """The least noise whose single use is (ε, δ)-DP: the analytic calibration (Balle and Wang 2018, Alg. 1)."""
        check_epsilon(epsilon)
        check_delta(delta)
        from dp_accounting import get_sigma_gaussian

        return cls(float(get_sigma_gaussian(epsilon, delta)))

    @classmethod
    def classical(cls, epsilon: float, delta: float) -> Gaussian:
        """√(2 ln(1.25/δ)) / ε (Dwork and Roth 2014, Thm A.1): more noise than needed, and proven for ε ≤ 1 only."""
        check_epsilon(epsilon)
        check_delta(delta)
        if epsilon > 1:
            raise ValueError(
                f"the classical formula holds for epsilon at most 1, got {epsilon}; use Gaussian.for_budget instead"
            )
        return cls(math.sqrt(2.0 * math.log(1.25 / delta)) / epsilon)

    def share(self, parties: int) -> Gaussian:
        """The noise that each of ``parties`` adds so that their sum carries the whole of it.

        Where clients may drop out, give the fewest that can be left: more noise than planned is safe, less is not.
        """
        check_at_least(parties, 1, "parties", "give the fewest clients whose noise is sure to be in the sum")
        return Gaussian(self.noise_multiplier / math.sqrt(parties))

    def std(self, sensitivity: float) -> float:
        """Standard deviation on each coordinate."""
        check_positive(sensitivity, "sensitivity", _CLIP_ADVICE)
        return self.noise_multiplier * sensitivity

    def add(self, value: Tensor, sensitivity: float, draws: DrawsLike, step: float | None = None) -> Tensor:
        """The value with noise."""
        check_positive(sensitivity, "sensitivity", _CLIP_ADVICE)
        return add_gaussian(value, sensitivity, self.noise_multiplier, draws, step)

    def event(self) -> DpEvent:
        """What one use costs."""
        from dp_accounting import GaussianDpEvent

        return GaussianDpEvent(self.noise_multiplier)


@dataclass(frozen=True)
class Laplace:
    """Laplace mechanism: noise of density exp(−|x|/b)/(2b), b = sensitivity/ε; L1 sensitivity; ε-DP with δ = 0."""

    epsilon: float
    norm: ClassVar[Norm] = "l1"

    def __post_init__(self) -> None:
        check_epsilon(self.epsilon)

    def scale(self, sensitivity: float) -> float:
        """The distribution's b."""
        check_positive(sensitivity, "sensitivity", _CLIP_ADVICE)
        return sensitivity / self.epsilon

    def std(self, sensitivity: float) -> float:
        """Standard deviation on each coordinate, √2 · b."""
        return math.sqrt(2.0) * self.scale(sensitivity)

    def add(self, value: Tensor, sensitivity: float, draws: DrawsLike, step: float | None = None) -> Tensor:
        """The value with noise.

        Exact noise is discrete Laplace of scale t. One coordinate that moves by a steps then loses no more than a
        continuous one that moves by a + 2: at the losses (a − 2m)/t, m = 0, 1, …, both have δ = 1 − e^{−m/t}, and
        between two of them (2/t apart) δ falls. So 2 steps are added to the sensitivity for each coordinate, besides
        what rounding adds; then the event of the continuous mechanism is a bound, also for samples and compositions.
        """
        _check_floating(value)
        if is_exact(draws):
            d, scale = value.numel(), self.scale(sensitivity)
            made = discrete.grid(sensitivity, scale, d, "l1") if step is None else step
            moved = sensitivity / made + (3.0 if step is None else 2.0) * d
            noise = discrete.laplace_noise(math.ceil(moved * _UP / self.epsilon), value.shape, _like(draws))
            return _add_steps(value, noise, made)
        centred = 2.0 * uniform(draws, *value.shape) - 1.0
        noise = -torch.sign(centred) * torch.log1p(-centred.abs())
        return (value.to(torch.float64) + self.scale(sensitivity) * noise).to(value.dtype)

    def event(self) -> DpEvent:
        """What one use costs."""
        from dp_accounting import LaplaceDpEvent

        return LaplaceDpEvent(1.0 / self.epsilon)


@dataclass(frozen=True)
class RandomizedResponse:
    """Randomized response over ``categories`` answers: the truth with probability e^ε/(e^ε+k−1), else another answer.

    ``respond`` + ``estimate`` serve categories; ``report`` is the binary mechanism for a number in [0, 1] (its outputs
    are −1/(e^ε−1) and e^ε/(e^ε−1), unbiased, as in private Bernoulli estimation). The answer is protected: replace one.
    """

    epsilon: float
    categories: int = 2

    def __post_init__(self) -> None:
        check_epsilon(self.epsilon)
        check_at_least(self.categories, 2, "categories", "an answer needs at least two possible values")

    @property
    def truth(self) -> float:
        """Probability of the true answer."""
        return 1.0 / (1.0 + (self.categories - 1) * math.exp(-self.epsilon))

    @property
    def lie(self) -> float:
        """Probability of each answer that is not true."""
        return (1.0 - self.truth) / (self.categories - 1)

    def respond(self, answer: Tensor, draws: DrawsLike) -> Tensor:
        """Randomise integer answers in 0..k−1, each on its own (an answer out of range is taken as the nearest)."""
        answer = answer.to(torch.int64).clamp(0, self.categories - 1)
        if is_exact(draws):  # the exponential mechanism on "is it the truth?": exp(ε) to 1, as integers
            truth = torch.nn.functional.one_hot(answer, self.categories) * math.floor(self.epsilon * _UNIT)
            return discrete.exponential_choice(truth, _UNIT, _like(draws))
        u = uniform(draws, *answer.shape)
        # What of u lies beyond the probability of the truth picks one of the k−1 other answers.
        step = torch.floor((u - self.truth) / self.lie).to(torch.int64).clamp(0, self.categories - 2)
        other = (answer + 1 + step) % self.categories
        return torch.where(u < self.truth, answer, other)

    def estimate(self, answer: Tensor) -> Tensor:
        """Unbiased one-hot estimates [..., k] (float64) of the true answers, from the randomised ones."""
        one_hot = torch.nn.functional.one_hot(answer.to(torch.int64), self.categories).to(torch.float64)
        return (one_hot - self.lie) / (self.truth - self.lie)

    def report(self, value: Tensor, draws: DrawsLike) -> Tensor:
        """An unbiased two-valued report of each number in [0, 1] (clamped; NaN counts as 0), in the value's type."""
        self._only_binary()
        value = value.nan_to_num(0.0).clamp(0.0, 1.0)
        if is_exact(draws):  # a coin that comes up with probability `value`, and an answer about the coin
            high = self.respond(uniform(draws, *value.shape) < value.to(torch.float64), draws) == 1
        else:
            high = uniform(draws, *value.shape) < self._high(value)
        low_value, high_value = (torch.tensor(sent, dtype=torch.float64) for sent in self.reports)
        return torch.where(high, high_value, low_value).to(value.dtype)

    def randomize(self, value: Tensor, draws: DrawsLike) -> Tensor:
        """``report`` of one number: the event of a release is that of one answer."""
        if value.numel() != 1:
            raise ValueError(f"one number is reported by one answer, got {value.numel()}; send one number per release")
        return self.report(value, draws)

    @property
    def reports(self) -> tuple[float, float]:
        """The two values that ``report`` sends."""
        return -1.0 / math.expm1(self.epsilon), -1.0 / math.expm1(-self.epsilon)

    def variance(self, value: Tensor) -> Tensor:
        """Exact variance of ``report`` at each value."""
        self._only_binary()
        high = self._high(value)
        low_value, high_value = self.reports
        return high * (1.0 - high) * (high_value - low_value) ** 2

    def _high(self, value: Tensor) -> Tensor:
        return self.lie + value.to(torch.float64) * (self.truth - self.lie)

    def _only_binary(self) -> None:
        if self.categories != 2:
            raise ValueError(
                f"a number in [0, 1] is reported with 2 categories, got {self.categories}; use respond and estimate"
            )

    def event(self, answers: int = 1) -> DpEvent:
        """What ``answers`` answers of one unit cost; every coordinate of a vector is one."""
        check_at_least(answers, 1, "answers", "count every coordinate that one unit answers")
        from dp_accounting import RandomizedResponseDpEvent, SelfComposedDpEvent

        one = RandomizedResponseDpEvent(self.categories * self.lie, self.categories)
        return one if answers == 1 else SelfComposedDpEvent(one, answers)


@dataclass(frozen=True)
class Exponential:
    """Exponential mechanism (McSherry and Talwar 2007): choose i with probability ∝ exp(ε·score_i / (2·sensitivity)).

    Drawn as the arg max of scores plus Gumbel noise of scale 2·sensitivity/ε; or, exactly, by proposing a candidate and
    accepting it with probability exp(−what its score lacks of the largest / scale). The sensitivity is the most by
    which one score moves when one unit changes. ε-DP, and ε²/8-zCDP by its bounded range (Cesar and Rogers 2021).
    """

    epsilon: float

    def __post_init__(self) -> None:
        check_epsilon(self.epsilon)

    def scale(self, sensitivity: float) -> float:
        """Scale of the Gumbel noise."""
        check_positive(sensitivity, "sensitivity", "give the most by which one score moves when one unit changes")
        return 2.0 * sensitivity / self.epsilon

    def std(self, sensitivity: float) -> float:
        """Standard deviation of the noise on each score, π/√6 · scale."""
        return math.pi / math.sqrt(6.0) * self.scale(sensitivity)

    def select(
        self, scores: Tensor, sensitivity: float, draws: DrawsLike, epsilon: float | Tensor | None = None
    ) -> Tensor:
        """The chosen index along the last dimension; the higher a score the likelier, NaN the least.

        ``epsilon``: another ε than the mechanism's own, such as that of the client that chooses.
        The exact choice rounds scores down to 2^20 or more steps in the sensitivity; the step that rounding can add to
        a change counts as sensitivity, and the temperature is rounded up to whole steps.
        """
        scores = scores.to(torch.float64)
        if is_exact(draws):
            step = 2.0 ** (math.floor(math.log2(sensitivity)) - 20)
            steps = torch.floor(scores / step).nan_to_num(nan=-(2.0**60), posinf=2.0**60, neginf=-(2.0**60))
            own = torch.as_tensor(self.epsilon if epsilon is None else epsilon, dtype=torch.float64)
            scale = torch.ceil(2.0 * (sensitivity / step + 1.0) / own * _UP).to(torch.int64)
            whole = steps.clamp(-(2.0**60), 2.0**60).to(torch.int64)
            return discrete.exponential_choice(whole, scale, _like(draws))
        width = self.scale(sensitivity) if epsilon is None else 2.0 * sensitivity / epsilon
        gumbel = -torch.log(-torch.log(uniform(draws, *scores.shape)))
        scores = scores.nan_to_num(nan=-1e300, posinf=1e300, neginf=-1e300)
        return torch.argmax(scores + width * gumbel, dim=-1)

    def probabilities(self, scores: Tensor, sensitivity: float) -> Tensor:
        """The exact distribution of ``select``."""
        return torch.softmax(scores.to(torch.float64) / self.scale(sensitivity), dim=-1)

    def event(self) -> DpEvent:
        """What one selection costs."""
        from unalike.privacy.events import ExponentialDpEvent

        return ExponentialDpEvent(self.epsilon)


@dataclass(frozen=True)
class Quantizer:
    """k-bit stochastic rounding of each coordinate to 2^k levels of [−bound, bound]: unbiased, and not private.

    It saves bytes. Its event is non-private, so a ledger that sees it alone says ε = ∞.
    """

    bits: int
    bound: float

    def __post_init__(self) -> None:
        check_at_least(self.bits, 1, "bits", "1 bit sends two levels, 8 bits 256")
        if self.bits > 32:
            raise SettingError(f"bits must be at most 32, got {self.bits}; a float32 has no more to send")
        check_positive(self.bound, "bound", "give the largest magnitude that a coordinate may have")

    @property
    def step(self) -> float:
        """Distance between two levels."""
        return 2.0 * self.bound / ((1 << self.bits) - 1)

    @property
    def largest_std(self) -> float:
        """σ_q = bound/(2^k − 1): the standard deviation halfway between two levels, the most there is."""
        return 0.5 * self.step

    def randomize(self, value: Tensor, draws: DrawsLike) -> Tensor:
        """Clamp to the bound and round up or down at random, so that the mean is the clamped value."""
        level = self._level(value)
        below = torch.floor(level)
        up = uniform(draws, *value.shape) < level - below
        return ((below + up) * self.step - self.bound).to(value.dtype)

    def variance(self, value: Tensor) -> Tensor:
        """Exact variance of ``randomize`` at each value."""
        fraction = torch.frac(self._level(value))
        return fraction * (1.0 - fraction) * self.step**2

    def _level(self, value: Tensor) -> Tensor:
        return (value.to(torch.float64).nan_to_num(0.0).clamp(-self.bound, self.bound) + self.bound) / self.step

    def event(self) -> DpEvent:
        """Rounding protects nobody."""
        from dp_accounting import NonPrivateDpEvent

        return NonPrivateDpEvent()
