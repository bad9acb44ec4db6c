"""Plan a run before it starts: ε for given noise, or the least noise for a given (ε, δ)."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

from unalike.privacy.account import Account, account
from unalike.privacy.checks import SettingError, check_at_least, check_delta, check_epsilon, check_positive
from unalike.privacy.ledger import Ledger
from unalike.privacy.mechanisms import Gaussian
from unalike.privacy.sampling import Everyone, Sampling

if TYPE_CHECKING:
    from dp_accounting import DpEvent

_COARSE = 16  # the search starts on a loss grid this many times coarser
_TOLERANCE = 1e-4  # relative, in the noise multiplier; the answer errs on the private side


@dataclass(frozen=True)
class RunCost:
    """What a run of Gaussian releases will cost: ``rounds`` rounds, each of a fresh cohort drawn by ``sampling``."""

    noise_multiplier: float
    rounds: int
    sampling: Sampling
    epsilon: float
    delta: float
    method: str


def predict_cost(
    noise_multiplier: float,
    rounds: int,
    sampling: Sampling = Everyone(),
    *,
    delta: float,
    also: Sequence[DpEvent] = (),
    once: Sequence[float] = (),
) -> RunCost:
    """ε of a run that releases one Gaussian sum a round (and the events ``also``, of the same cohort) to the end.

    once: noise multipliers of Gaussian sums over everybody that come once in the run, besides.
    """
    check_positive(noise_multiplier, "noise_multiplier", "it is standard deviation / sensitivity")
    check_at_least(rounds, 1, "rounds", "give how many rounds the run will have")
    check_delta(delta)
    from unalike.privacy import accountant

    released = _run(noise_multiplier, rounds, sampling, tuple(also), tuple(once))
    epsilon = accountant.epsilon(released, delta)
    return RunCost(noise_multiplier, rounds, sampling, epsilon, delta, accountant.method(released))


@lru_cache(maxsize=256)
def noise_multiplier(
    epsilon: float,
    delta: float,
    rounds: int,
    sampling: Sampling = Everyone(),
    also: tuple[DpEvent, ...] = (),
    once: tuple[float, ...] = (),
) -> float:
    """The least noise multiplier with which the run of ``predict_cost`` stays within (ε, δ)."""
    check_at_least(rounds, 1, "rounds", "give how many rounds the run will have")
    return least_noise(lambda z: _run(z, rounds, sampling, also, once), epsilon, delta)


def least_noise(released: Callable[[float], Account], epsilon: float, delta: float) -> float:
    """The least z for which ``released(z)`` is within (ε, δ), to a relative 1e-4 and never above ε.

    ``released`` says what will have been released with noise multiplier z; its ε must fall as z grows.
    """
    from dp_accounting import get_sigma_gaussian
    from scipy.optimize import brentq

    from unalike.privacy import accountant

    check_epsilon(epsilon)
    check_delta(delta)

    def cost(log_z: float, coarseness: int = _COARSE) -> float:
        return accountant.epsilon(released(math.exp(log_z)), delta, coarseness)

    least = cost(math.log(1e6), 1)
    if least > epsilon:
        raise SettingError(
            f"even with unlimited noise the run costs epsilon {least:.4g} at delta {delta:g}, more than the target "
            f"{epsilon:g}: other releases of the run use it up; give them more noise, drop them, or raise the target"
        )
    # Downwards from much noise: little noise makes wide, slow loss distributions, so stop at the first too little.
    high = math.log(get_sigma_gaussian(epsilon, delta))
    while cost(high) > epsilon:
        high += 1.0
    low = high - 0.5
    while cost(low) <= epsilon:
        high, low = low, low - 0.5
        if low < math.log(1e-3):
            raise SettingError(
                f"epsilon {epsilon:g} is reached with hardly any noise; expected a target below about 1e4"
            )
    rough = brentq(lambda x: math.log(max(cost(x), 1e-12) / epsilon), low, high, xtol=0.01)

    # The fine grid is slow, and the coarse one knows the slope: Newton's steps, aimed a hair to the private side.
    log_z = rough
    for _ in range(6):
        gap = math.log(max(cost(log_z, 1), 1e-12) / epsilon)
        if -_TOLERANCE <= gap <= 0:
            return math.exp(log_z)
        slope = math.log(cost(log_z + 0.02) / cost(log_z)) / 0.02 if cost(log_z) > 0 else 0.0
        if not slope < -0.1:
            break
        log_z -= (gap + _TOLERANCE / 2) / slope

    # Where that does not settle: the fine grid costs a little less than the coarse one, so the answer lies just below.
    low = high = rough
    while cost(high, 1) > epsilon:
        low, high = high, high + 0.01
    while cost(low, 1) <= epsilon:
        high, low = low, low - 0.01
    log_z = brentq(lambda x: math.log(max(cost(x, 1), 1e-12) / epsilon), low, high, xtol=_TOLERANCE / 2)
    while cost(log_z, 1) > epsilon:
        log_z += _TOLERANCE / 2
    return math.exp(log_z)


def _run(z: float, rounds: int, sampling: Sampling, also: tuple[DpEvent, ...], once: tuple[float, ...]) -> Account:
    """What the ledger would hold at the end of the run: one round's, ``rounds`` times, and what comes once."""
    one_round = Ledger()
    for event in (Gaussian(z).event(), *also):
        one_round.record(event, sampling=sampling, cohort=0)
    return account([(one_round.event(), rounds), *((Gaussian(other).event(), 1) for other in once)])
