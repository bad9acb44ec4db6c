"""The moments accountant as it was published, for tables whose authors used it.

Rényi DP at orders up to 64 with the first conversion to (ε, δ), ε = min_α T·RDP(α) + log(1/δ)/(α − 1) (Abadi et al.
2016, Mironov et al. 2019), and with a number of steps T that need not be whole. Both the few orders and the conversion
make it ask for more noise than today's accounting does, several times more where ε is small.
"""

from __future__ import annotations

import math
from functools import lru_cache

from unalike.privacy.account import leaves
from unalike.privacy.checks import check_delta, check_epsilon

ORDERS = (*(x / 10 for x in range(20, 110)), *range(11, 65))  # no ε below 10 has its best order below 2
_TOLERANCE = 1e-5  # relative, in the noise


@lru_cache(maxsize=4096)
def noise_by_moments(epsilon: float, delta: float, rate: float, steps: float) -> float:
    """The noise multiplier for this number of DP-SGD steps with Poisson batches at this rate."""
    check_epsilon(epsilon)
    check_delta(delta)
    low, high = 0.3, 1.0
    while _epsilon(high, delta, rate, steps) > epsilon:
        low, high = high, 2 * high
    while high - low > _TOLERANCE * high:
        middle = (low + high) / 2
        low, high = (middle, high) if _epsilon(middle, delta, rate, steps) > epsilon else (low, middle)
    return high


def _epsilon(noise: float, delta: float, rate: float, steps: float) -> float:
    from unalike.privacy.accountant import rdp_of
    from unalike.privacy.dpsgd import Steps, event

    ((one_step, _),) = leaves(event(noise, Steps(rate, 1)))
    rdp = rdp_of(one_step, ORDERS)
    found = (steps * float(one) - math.log(delta) / (order - 1) for order, one in zip(ORDERS, rdp, strict=True))
    return float(min(found))
