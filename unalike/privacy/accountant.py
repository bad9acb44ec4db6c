"""From a composition of DP events to ε or δ, with dp_accounting's privacy loss distributions, else its Rényi DP.

Convention: every noise multiplier is standard deviation / sensitivity, and the sensitivity already belongs to the
neighbouring relation (clip, or 2·clip for replace-one; see ``unalike.privacy.sampling``). dp_accounting's accountants
disagree on this for replace-one: the one for loss distributions doubles the distance once more, the one for Rényi DP
does not. Therefore the distributions are built here, from its parts, and composed with exact counts (its accountant
also composes randomized response only once, whatever the count).

The noise that protects people is discrete. Its Gaussian costs what the continuous one costs plus a slack, proven in
``unalike.privacy.discrete.slack``; it is part of every ε and δ here. Its Laplace and its choices cost what their events
say (``unalike.privacy.mechanisms``).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from functools import lru_cache
from typing import Any

import dp_accounting
import numpy as np
from dp_accounting import DpEvent, NeighboringRelation
from dp_accounting.pld import common, pld_pmf, privacy_loss_distribution
from dp_accounting.pld.privacy_loss_mechanism import AdjacencyType, GaussianPrivacyLoss
from dp_accounting.rdp import rdp_privacy_accountant

from unalike.privacy.account import Account, Event, Unaccountable, account, is_bare
from unalike.privacy.checks import check_delta
from unalike.privacy.discrete import slack
from unalike.privacy.events import ExponentialDpEvent, leaves, merge_gaussians, poisson_sampled

_GRID = 1e-4  # dp_accounting's own discretization of the privacy loss
_WIDEST = 400.0  # beyond this range of losses (ε in the hundreds) a coarser grid keeps it fast, still an upper bound
_POISSON = dp_accounting.PoissonSampledDpEvent
_FIXED_SIZE = dp_accounting.SampledWithoutReplacementDpEvent


@lru_cache(maxsize=4096)
def epsilon(released: Account, delta: float, coarseness: int = 1) -> float:
    """The smallest ε known for this δ; infinite if anything non-private was released, 0 if nothing was.

    A ``coarseness`` above 1 computes on a coarser grid of losses: faster, a little larger, for searches.
    """
    check_delta(delta)
    if not released:
        return 0.0
    if is_bare(released):
        return math.inf
    return _with_slack(released, delta, lambda at: _continuous_epsilon(released, at, coarseness))


def _with_slack(released: Account, delta: float, continuous: Callable[[float], float]) -> float:
    """ε of discrete noise from that of continuous noise at a δ."""
    noise = _noise(released)
    if noise == 0:
        return continuous(delta)
    _, inner = slack(noise, 0.0, delta)
    if not inner > 0:  # hardly any noise
        return math.inf
    epsilon = continuous(inner)
    return epsilon + slack(noise, epsilon, delta)[0] if math.isfinite(epsilon) else math.inf


def _noise(released: Account) -> float:
    """Σ 1/z² over all Gaussian releases, sampled or not."""
    return math.fsum(
        count * inner / event.noise_multiplier**2
        for whole, count in released
        for event, inner in leaves(whole.event if isinstance(whole, _POISSON | _FIXED_SIZE) else whole)
        if isinstance(event, dp_accounting.GaussianDpEvent)
    )


def _continuous_epsilon(released: Account, delta: float, coarseness: int) -> float:
    gaussian = merge_gaussians(tuple(released))
    if gaussian is not None:  # the only composition with a closed form (Balle and Wang 2018, Thm 8)
        return float(dp_accounting.get_epsilon_gaussian(gaussian.noise_multiplier, delta))
    bounds = []
    if _fits_pld(released):
        bounds.append(float(_pld(released, coarseness * _grid(released)).get_epsilon_for_delta(delta)))
    if not bounds or _has_two_bounds(released):
        sampled = bounds and any(isinstance(event, _POISSON) for event, _ in released)  # then broken orders take long
        orders, rdp = _rdp(released, _WHOLE_ORDERS if sampled else _ALL_ORDERS)
        bounds.append(float(rdp_privacy_accountant.compute_epsilon(orders, rdp, delta)[0]))
    return max(0.0, min(bounds))


def quick_bound(released: Account, delta: float) -> float:
    """An ε that ``epsilon`` will hardly exceed, by Rényi DP: a few per cent larger, and hundreds of times faster."""
    if not released:
        return 0.0
    if is_bare(released):
        return math.inf
    orders, rdp = _rdp(released, _WHOLE_ORDERS)
    return _with_slack(released, delta, lambda at: float(rdp_privacy_accountant.compute_epsilon(orders, rdp, at)[0]))


def largest(accounts: Iterable[Account], delta: float, coarseness: int = 1) -> float:
    """The largest ε of several accounts; those that clearly have a smaller one are not worked out."""
    check_delta(delta)
    different = set(accounts)
    if len(different) == 1:
        return epsilon(different.pop(), delta, coarseness)
    bounds = sorted(((quick_bound(one, delta), one) for one in different), key=lambda pair: -pair[0])
    most = 0.0
    for bound, one in bounds:
        if 1.01 * bound + 1e-3 < most:  # the margin covers the rounding of a loss distribution to its grid
            break
        most = max(most, epsilon(one, delta, coarseness))
    return most


@lru_cache(maxsize=4096)
def delta(released: Account, epsilon: float) -> float:
    """The smallest δ known for this ε; 1 if anything non-private was released."""
    if not (math.isfinite(epsilon) and epsilon >= 0):
        raise ValueError(f"epsilon must be a finite number of at least 0, got {epsilon}; ask for the δ of a real ε")
    if not released:
        return 0.0
    if is_bare(released):
        return 1.0
    noise, tails = _noise(released), 1e-30
    if noise == 0:
        return _continuous_delta(released, epsilon)
    extra, inner = slack(noise, epsilon, tails)
    if not inner > 0:  # hardly any noise
        return 1.0
    found = tails + _continuous_delta(released, max(0.0, epsilon - extra)) * tails / inner
    # With P <= e^extra·Q + δ(0), what of P is above e^ε·Q is at most δ(0) + e^extra − e^ε.
    return min(1.0, found + max(0.0, math.exp(extra) - math.exp(epsilon)))


def _continuous_delta(released: Account, epsilon: float) -> float:
    bounds = []
    if _fits_pld(released):
        bounds.append(float(_pld(released, _grid(released)).get_delta_for_epsilon(epsilon)))
    if not bounds or _has_two_bounds(released):
        orders, rdp = _rdp(released)
        bounds.append(float(rdp_privacy_accountant.compute_delta(orders, rdp, epsilon)[0]))
    return min(1.0, max(0.0, min(bounds)))


def deltas(released: Account, epsilons: Any) -> Any:
    """δ at many ε at once (an array, ascending from 0 on) that a test of one unit's own numbers can have at most.

    It is what ``delta`` gives or a little more, and faster; of cohorts of a fixed size, for which ``delta`` is a loose
    bound, it is what such a test attains.
    """
    noise, tails, at = _noise(released), 1e-30, np.asarray(epsilons, dtype=np.float64)
    extra, inner = slack(noise, float(at[-1]), tails) if noise else (0.0, tails)
    if not inner > 0:
        return np.ones(len(at))
    shifted, bounds = np.maximum(at - extra, 0.0), []
    if _fits_pld(released) or _only_fixed(released):
        bounds.append(np.array(_pld(released, 64 * _grid(released)).get_delta_for_epsilon(list(shifted))))
    if not bounds or _has_two_bounds(released):
        orders, rdp = _rdp(released)
        bounds.append(np.array([rdp_privacy_accountant.compute_delta(orders, rdp, one)[0] for one in shifted]))
    found = np.min(bounds, axis=0) * tails / inner + np.maximum(0.0, np.exp(extra) - np.exp(at))
    return np.clip(found + (tails if noise else 0.0), 0.0, 1.0)


def attained(released: Account, delta: float, coarseness: int = 1) -> float:
    """The ε that an attack on one unit's own numbers can reach at this δ: ``epsilon``, or less where that is loose."""
    if not _only_fixed(released):
        return epsilon(released, delta, coarseness)
    return float(_pld(released, coarseness * _grid(released)).get_epsilon_for_delta(delta))


def scaled(released: Account, factor: float) -> Account:
    """The same releases with all their noise times this factor."""
    return account((_scaled(event, factor), count) for event, count in released)


def _scaled(event: Event, factor: float) -> Event:
    match event:
        case dp_accounting.GaussianDpEvent(noise_multiplier=z):
            return dp_accounting.GaussianDpEvent(z * factor)
        case dp_accounting.LaplaceDpEvent(noise_multiplier=b):
            return dp_accounting.LaplaceDpEvent(b * factor)
        case dp_accounting.RandomizedResponseDpEvent(num_buckets=k):
            return dp_accounting.RandomizedResponseDpEvent(k / (math.exp(_largest_loss(event) / factor) + k - 1.0), k)
        case dp_accounting.ZCDpEvent():
            return dp_accounting.ZCDpEvent(event.rho / factor**2)
        case ExponentialDpEvent(epsilon=eps):
            return ExponentialDpEvent(eps / factor)
        case dp_accounting.PoissonSampledDpEvent(sampling_probability=q, event=inner):
            return poisson_sampled(q, tuple((_scaled(one, factor), count) for one, count in leaves(inner)))
        case dp_accounting.SampledWithoutReplacementDpEvent():
            inner = _scaled(event.event, factor)
            return dp_accounting.SampledWithoutReplacementDpEvent(event.source_dataset_size, event.sample_size, inner)
    raise Unaccountable(f"expected an event with noise, got {event}")


def method(released: Account) -> str:
    """The name of the accounting that ``epsilon`` uses, for reports."""
    if not released:
        return "nothing released"
    if is_bare(released):
        return "non-private"
    if merge_gaussians(tuple(released)) is not None:
        return "analytic Gaussian"
    if not _fits_pld(released):
        return "RDP"
    return "PLD or RDP, the smaller" if _has_two_bounds(released) else "PLD"


def _fits_pld(released: Account) -> bool:
    return not any(isinstance(event, _FIXED_SIZE | dp_accounting.ZCDpEvent) for event, _ in released)


def _only_fixed(released: Account) -> bool:
    return bool(released) and all(isinstance(event, _FIXED_SIZE) for event, _ in released)


def _has_two_bounds(released: Account) -> bool:
    """A selection's pure-DP bound is the better for a few, its zCDP bound for many."""
    return any(isinstance(event, ExponentialDpEvent) for event, _ in released)


# Privacy loss distributions


def check_known(event: DpEvent) -> None:
    """Refuse an event that cannot be accounted."""
    _largest_loss(event)


@lru_cache(maxsize=1024)
def _largest_loss(event: DpEvent) -> float:
    """About the largest privacy loss of one use (beyond it lies a mass below 1e-21); refuses an unknown event."""
    match event:
        case dp_accounting.ZCDpEvent():
            return math.inf
        case dp_accounting.GaussianDpEvent(noise_multiplier=z) if z > 0:
            return float(0.5 / z**2 + 10.0 / z)
        case dp_accounting.LaplaceDpEvent(noise_multiplier=b) if b > 0:
            return float(1.0 / b)
        case dp_accounting.RandomizedResponseDpEvent(noise_parameter=p, num_buckets=k) if 0 < p < 1 and k > 1:
            return math.log1p(k * (1.0 - p) / p)
        case ExponentialDpEvent(epsilon=eps) if eps > 0:
            return float(eps)
        case dp_accounting.PoissonSampledDpEvent(sampling_probability=q, event=inner) if 0 < q < 1:
            parts = tuple(leaves(inner))
            if not any(isinstance(e, _POISSON | _FIXED_SIZE | dp_accounting.ZCDpEvent) for e, _ in parts):
                return _amplified_loss(q, sum(n * _largest_loss(e) for e, n in parts))
        case dp_accounting.SampledWithoutReplacementDpEvent(event=dp_accounting.GaussianDpEvent(noise_multiplier=z)):
            if 0 < event.sample_size <= event.source_dataset_size and z > 0:
                return math.inf
    raise Unaccountable(
        f"expected Gaussian, Laplace, randomized-response or exponential events, sampled at most once, got {event}; "
        "release it with a mechanism of unalike.privacy.mechanisms, or record it as dp_accounting.NonPrivateDpEvent()"
    )


def _amplified_loss(q: float, loss: float) -> float:
    """log(1 − q + q·e^loss) without overflow."""
    return float(np.logaddexp(math.log1p(-q), math.log(q) + loss))


def _grid(released: Account) -> float:
    """Width of the loss grid: dp_accounting's default, doubled while the composed losses would need too many points."""
    width = 0.0
    for event, count in released:
        loss = _largest_loss(event.event if isinstance(event, _FIXED_SIZE) else event)
        rate = event.sampling_probability if isinstance(event, _POISSON) else 1.0
        width += min(count * loss, loss + 10.0 * math.sqrt(count) * rate * loss)
    return float(_GRID * 2.0 ** max(0, math.ceil(math.log2(max(width, 1.0) / _WIDEST))))


def _pld(released: Account, grid: float) -> Any:
    gaussians = tuple(part for part in released if isinstance(part[0], dp_accounting.GaussianDpEvent))
    rest = tuple(part for part in released if part not in gaussians)
    parts = sorted(rest, key=repr)
    merged = merge_gaussians(gaussians)
    if merged is not None:
        parts.append((merged, 1))
    total = _repeated_pld(*parts[0], grid)
    for event, count in parts[1:]:
        total = total.compose(_repeated_pld(event, count, grid))
    return total


@lru_cache(maxsize=32)  # so that one more event of one kind does not recompose the other kinds
def _repeated_pld(event: DpEvent, count: int, grid: float) -> Any:
    single = _single_pld(event, grid)
    if count == 1:
        return single
    parts = [single._pmf_remove] if single._symmetric else [single._pmf_remove, single._pmf_add]
    return privacy_loss_distribution.PrivacyLossDistribution(*(_repeated_pmf(pmf, count) for pmf in parts))


_CUT = 1e-15  # mass in the tails of a composition that may be counted as infinite loss: dp_accounting's own


def _repeated_pmf(pmf: Any, count: int) -> Any:
    """What dp_accounting's ``self_compose`` gives, where the pmf is an array: most of its time went into the bounds."""
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


@lru_cache(maxsize=128)
def _single_pld(event: DpEvent, grid: float) -> Any:
    if isinstance(event, _FIXED_SIZE):
        return _replaced_pld(event.sample_size / event.source_dataset_size, event.event.noise_multiplier, grid)
    q, inner = (event.sampling_probability, event.event) if isinstance(event, _POISSON) else (1.0, event)
    match inner:
        case dp_accounting.GaussianDpEvent(noise_multiplier=z):
            return _gaussian_pld(z, q, grid)
        case dp_accounting.LaplaceDpEvent(noise_multiplier=b):
            return privacy_loss_distribution.from_laplace_mechanism(
                b, value_discretization_interval=grid, sampling_prob=q
            )
        case dp_accounting.RandomizedResponseDpEvent(noise_parameter=p, num_buckets=k) if q == 1:
            return privacy_loss_distribution.from_randomized_response(p, k, value_discretization_interval=grid)
        case ExponentialDpEvent(epsilon=eps) if q == 1:
            pure = common.DifferentialPrivacyParameters(eps, 0.0)
            return privacy_loss_distribution.from_privacy_parameters(pure, value_discretization_interval=grid)
    return _amplified_pld(q, account([(inner, 1)]), grid)


def _gaussian_pld(z: float, q: float, grid: float) -> Any:
    """What dp_accounting's ``from_gaussian_mechanism`` gives, bit by bit."""

    def connect(adjacency: AdjacencyType) -> Any:
        losses = _GaussianLosses(z, sampling_prob=q, adjacency_type=adjacency)
        bounds = losses.connect_dots_bounds()
        first, last = math.floor(bounds.epsilon_lower / grid), math.ceil(bounds.epsilon_upper / grid)
        deltas = losses.get_delta_for_epsilon(np.arange(first, last + 1) * grid)
        return pld_pmf.create_pmf_pessimistic_connect_dots_fixed_gap(grid, first, last, deltas)

    removed = connect(AdjacencyType.REMOVE)
    if q == 1.0:  # the same both ways
        return privacy_loss_distribution.PrivacyLossDistribution(removed)
    return privacy_loss_distribution.PrivacyLossDistribution(removed, connect(AdjacencyType.ADD))


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


def _amplified_pld(q: float, inner: Account, grid: float) -> Any:
    """Poisson sampling of any composition whose loss distribution is the same both ways.

    If (P, Q) dominates the composition, then ((1−q)Q + qP, Q) dominates its sampled form when a unit is removed and
    (P, (1−q)P + qQ) when it is added (Zhu, Dong and Wang 2022, Thm 11). Their hockey-stick divergences follow from
    those of (P, Q); dp_accounting connects the dots.
    """
    base = _pld(inner, grid)
    largest = _amplified_loss(q, sum(count * _largest_loss(event) for event, count in inner))
    least = math.log1p(-q)

    def connect(low: float, high: float, added: bool) -> Any:
        first, last = math.floor(low / grid) - 1, math.ceil(high / grid) + 1
        gamma = np.exp(np.arange(first, last + 1) * grid)
        if added:  # H_γ(P ‖ (1−q)P + qQ) = w·H_{γq/w}(P ‖ Q) with w = 1 − γ(1−q), and 0 where w <= 0
            weight = 1.0 - gamma * (1.0 - q)
            inside = weight > 0
            ratio = gamma[inside] * q / weight[inside]
            deltas = np.zeros_like(gamma)
            deltas[inside] = weight[inside] * _hockey_stick(base, np.log(ratio))
        else:  # H_γ((1−q)Q + qP ‖ Q) = q·H_{(γ−1+q)/q}(P ‖ Q), and 1 − γ where γ <= 1 − q
            ratio = (gamma - 1.0 + q) / q
            inside = ratio > 0
            deltas = 1.0 - gamma
            deltas[inside] = q * _hockey_stick(base, np.log(ratio[inside]))
        deltas = np.minimum.accumulate(np.clip(deltas, 0.0, 1.0))
        return pld_pmf.create_pmf_pessimistic_connect_dots_fixed_gap(grid, first, last, deltas)

    return privacy_loss_distribution.PrivacyLossDistribution(
        connect(least, largest, added=False), connect(-largest, -least, added=True)
    )


def _replaced_pld(q: float, z: float, grid: float) -> Any:
    """A number that is 1/2 on one data set and −1/2 on its neighbour, or 0 if its client is not drawn, plus N(0, z²).

    The loss grows with what is seen, so δ at a loss follows from the place x at which it is reached.
    """
    from scipy.special import ndtr

    shift = 0.5 / z
    x = np.linspace(-10.0 - shift, 10.0 + shift, 1 << 16)
    away, drawn = math.log1p(-q) if q < 1 else -math.inf, math.log(q) - 0.5 * shift**2
    losses = np.logaddexp(away, drawn + shift * x) - np.logaddexp(away, drawn - shift * x)
    last = math.ceil(losses[-1] / grid) + 1
    at = np.arange(-last, last + 1) * grid
    place = np.interp(at, losses, x, left=-np.inf, right=np.inf)
    one, other = ((1.0 - q) * ndtr(-place) + q * ndtr(sign * shift - place) for sign in (1, -1))
    deltas = np.minimum.accumulate(np.clip(one - np.exp(at) * other, 0.0, 1.0))
    return privacy_loss_distribution.PrivacyLossDistribution(
        pld_pmf.create_pmf_pessimistic_connect_dots_fixed_gap(grid, -last, last, deltas)
    )


def _hockey_stick(pld: Any, epsilons: Any) -> Any:
    """δ at many ε: what ``pld.get_delta_for_epsilon`` gives, without its loop over every point of the grid."""
    pmf = pld._pmf_remove.to_dense_pmf()
    losses = (np.arange(len(pmf._probs)) + pmf._lower_loss) * pmf._discretization
    upper = pmf._infinity_mass + np.append(np.cumsum(pmf._probs[::-1])[::-1], 0.0)
    lower = np.append(np.cumsum((pmf._probs * np.exp(-losses))[::-1])[::-1], 0.0)
    first = np.searchsorted(losses, epsilons, side="right")
    return upper[first] - np.exp(epsilons) * lower[first]


# Rényi differential privacy


_ALL_ORDERS = tuple(rdp_privacy_accountant.DEFAULT_RDP_ORDERS)
_WHOLE_ORDERS = tuple(order for order in _ALL_ORDERS if order >= 2 and order == int(order))  # the fast ones


def _rdp(released: Account, orders: tuple[float, ...] = _ALL_ORDERS) -> tuple[Any, Any]:
    return np.array(orders), sum(count * rdp_of(event, orders) for event, count in sorted(released, key=repr))


@lru_cache(maxsize=512)
def rdp_of(event: DpEvent, orders: tuple[float, ...]) -> Any:
    """Rényi DP of one event at each of these orders."""
    if isinstance(event, ExponentialDpEvent):
        pure = rdp_of(dp_accounting.RandomizedResponseDpEvent(2.0 / (math.exp(event.epsilon) + 1.0), 2), orders)
        return np.minimum(pure, rdp_of(dp_accounting.ZCDpEvent(event.epsilon**2 / 8.0), orders))
    sampled = isinstance(event, _POISSON)
    relation = NeighboringRelation.ADD_OR_REMOVE_ONE if sampled else NeighboringRelation.REPLACE_ONE
    accountant = rdp_privacy_accountant.RdpAccountant(list(orders), relation)
    if accountant.supports(event):
        return accountant.compose(event).rdp
    # Rényi accounting knows amplification of Gaussian noise only; without amplification the bound still holds.
    return sum(count * rdp_of(inner, orders) for inner, count in leaves(event.event))
