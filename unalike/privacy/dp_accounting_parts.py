"""Private parts of dp_accounting that make accounting fast, each with the public way to the same numbers beside it.

dp_accounting goes through the points of a grid of losses one by one. The functions here treat all points at once, and
read attributes for that which dp_accounting does not promise to keep. They do so only with a version in ``CHECKED``;
with any other version they take the public way, which is slower.
"""

from __future__ import annotations

import math
from functools import cache
from importlib import metadata
from typing import Any

import numpy as np
from dp_accounting.pld import pld_pmf, privacy_loss_distribution
from dp_accounting.pld.privacy_loss_distribution import PrivacyLossDistribution
from dp_accounting.pld.privacy_loss_mechanism import AdjacencyType, GaussianPrivacyLoss

CHECKED = ("0.6.0",)  # by tests/privacy/test_dp_accounting_parts.py


@cache
def is_checked() -> bool:
    """Is the installed dp_accounting a version whose private parts are known to be what is expected here?"""
    return metadata.version("dp-accounting") in CHECKED


def gaussian_pld(z: float, q: float, grid: float) -> Any:
    """The loss distribution of Gaussian noise with multiplier z on a Poisson sample at rate q."""
    if not is_checked():
        return privacy_loss_distribution.from_gaussian_mechanism(z, value_discretization_interval=grid, sampling_prob=q)

    def connect(adjacency: AdjacencyType) -> Any:
        losses = _GaussianLosses(z, sampling_prob=q, adjacency_type=adjacency)
        bounds = losses.connect_dots_bounds()
        first, last = math.floor(bounds.epsilon_lower / grid), math.ceil(bounds.epsilon_upper / grid)
        deltas = losses.get_delta_for_epsilon(np.arange(first, last + 1) * grid)
        return pld_pmf.create_pmf_pessimistic_connect_dots_fixed_gap(grid, first, last, deltas)

    removed = connect(AdjacencyType.REMOVE)
    if q == 1.0:  # the same both ways
        return PrivacyLossDistribution(removed)
    return PrivacyLossDistribution(removed, connect(AdjacencyType.ADD))


def self_compose(pld: Any, count: int) -> Any:
    """The loss distribution of ``count`` uses."""
    if not is_checked():
        return pld.self_compose(count)
    parts = [pld._pmf_remove] if pld._symmetric else [pld._pmf_remove, pld._pmf_add]
    return PrivacyLossDistribution(*(_repeated_pmf(pmf, count) for pmf in parts))


def hockey_stick(pld: Any, epsilons: Any) -> Any:
    """δ at each of these ε (an array)."""
    if not is_checked():
        return np.array(pld.get_delta_for_epsilon(list(epsilons)))
    pmf = pld._pmf_remove.to_dense_pmf()
    losses = (np.arange(len(pmf._probs)) + pmf._lower_loss) * pmf._discretization
    upper = pmf._infinity_mass + np.append(np.cumsum(pmf._probs[::-1])[::-1], 0.0)
    lower = np.append(np.cumsum((pmf._probs * np.exp(-losses))[::-1])[::-1], 0.0)
    first = np.searchsorted(losses, epsilons, side="right")
    return upper[first] - np.exp(epsilons) * lower[first]


_CUT = 1e-15  # mass in the tails of a composition that may be counted as infinite loss: dp_accounting's own


def _repeated_pmf(pmf: Any, count: int) -> Any:
    if not isinstance(pmf, pld_pmf.DensePLDPmf):
        return pmf.self_compose(count)
    from scipy import fft

    low, high = _bounds(pmf._probs, count)
    size = high - low + 1
    spectrum = fft.fft(pmf._probs, fft.next_fast_len(max(size, len(pmf._probs))))
    probs = np.roll(np.real(fft.ifft(spectrum**count)), -low)[:size]
    infinite = _CUT - math.expm1(count * math.log1p(-pmf._infinity_mass))
    return pld_pmf.DensePLDPmf(pmf._discretization, pmf._lower_loss * count + low, probs, infinite, True)


def _bounds(probs: Any, count: int) -> tuple[int, int]:
    """Places beyond which the sum of ``count`` draws lies with a probability of at most ``_CUT``, by Chernoff's bound.

    The orders are ±1 to ±20, over the length of the array.
    """
    low, high = 0, (len(probs) - 1) * count
    for sign in (-1, 1):
        weighted, step = probs, np.exp(sign * np.arange(len(probs)) / len(probs))
        for order in range(1, 21):
            weighted = weighted * step
            if not weighted.sum() > 0:  # all losses are infinite
                return low, high
            bound = len(probs) * (count * math.log(weighted.sum()) + math.log(2 / _CUT)) / (sign * order)
            low, high = (low, min(high, math.ceil(bound))) if sign > 0 else (max(low, math.floor(bound)), high)
    return low, high


class _GaussianLosses(GaussianPrivacyLoss):  # type: ignore[misc]
    """dp_accounting's, with all places of a grid at once: its loop over them took most of the time of accounting."""

    def get_delta_for_epsilon(self, epsilon: Any) -> Any:
        q, added = self.sampling_prob, self.adjacency_type == AdjacencyType.ADD
        losses = -epsilon if added else epsilon
        inside = np.full(len(losses), True) if q == 1.0 else losses > math.log1p(-q)
        deltas = np.zeros(len(losses)) if added else -np.expm1(epsilon)
        x = self._places(losses[inside], added)
        deltas[inside] = self.mu_upper_cdf(x) - np.exp(epsilon[inside] + self.mu_lower_log_cdf(x))
        return np.clip(deltas, 0, 1)

    def _places(self, losses: Any, added: bool) -> Any:
        """Where a sampled loss is reached: where the loss without sampling is log(1 + (e^loss − 1) / q)."""
        q, least = self.sampling_prob, -math.inf
        if q < 1.0:
            least, most = math.log(1 - q), losses + np.log(1 / q)
            with np.errstate(divide="ignore", invalid="ignore"):  # at the least loss, which is put right
                whole = most + np.log1p(-np.exp(np.log(1 / q - 1) - most))
            whole = np.where(losses == 0, np.log(1 / q + (1 - 1 / q)), whole)
            least_one = np.abs(losses - least) <= 1e-9 * np.maximum(np.abs(losses), abs(least))
            losses = np.where(least_one, -math.inf, whole)
        removed = self._inverse_privacy_loss_without_subsampling_remove(-losses if added else losses)
        return self.sensitivity + removed if added else removed
