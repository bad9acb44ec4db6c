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
from dp_accounting.rdp import rdp_privacy_accountant

from unalike.privacy.account import Account, Event, Unaccountable, account, is_bare
from unalike.privacy.checks import check_delta
from unalike.privacy.discrete import slack
from unalike.privacy.events import ExponentialDpEvent, leaves, merge_gaussians, poisson_sampled
from unalike.privacy.losses import FIXED_SIZE, POISSON, compose_losses, grid_of, largest_loss

_ALL_ORDERS = tuple(rdp_privacy_accountant.DEFAULT_RDP_ORDERS)
_WHOLE_ORDERS = tuple(order for order in _ALL_ORDERS if order >= 2 and order == int(order))  # the fast ones


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
    delta -= _truncated(released)
    if not delta > 0:
        return math.inf
    return _with_slack(released, delta, lambda at: _continuous_epsilon(released, at, coarseness))


def _truncated(released: Account) -> float:
    """The δ of samples that were cut: batches to the room that they have, and cohorts to the sizes that are planned.

    Both happen with a probability below 1e-12 on either side, for every Poisson sample.
    """
    return 2e-12 * sum(count for event, count in released if isinstance(event, POISSON))


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
        for event, inner in leaves(whole.event if isinstance(whole, POISSON | FIXED_SIZE) else whole)
        if isinstance(event, dp_accounting.GaussianDpEvent)
    )


def _continuous_epsilon(released: Account, delta: float, coarseness: int) -> float:
    gaussian = merge_gaussians(tuple(released))
    if gaussian is not None:  # the only composition with a closed form (Balle and Wang 2018, Thm 8)
        return float(dp_accounting.get_epsilon_gaussian(gaussian.noise_multiplier, delta))
    bounds = []
    if _fits_pld(released):
        bounds.append(float(compose_losses(released, coarseness * grid_of(released)).get_epsilon_for_delta(delta)))
    if not bounds or _has_two_bounds(released):
        sampled = bounds and any(isinstance(event, POISSON) for event, _ in released)  # then broken orders take long
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
    return float(_deltas(released, np.array([epsilon]), 1, _fits_pld(released))[0])


def deltas(released: Account, epsilons: Any) -> Any:
    """δ at many ε at once (an array, ascending from 0 on) that a test of one unit's own numbers can have at most.

    It is what ``delta`` gives or a little more, and faster; of cohorts of a fixed size, for which ``delta`` is a loose
    bound, it is what such a test attains.
    """
    at = np.asarray(epsilons, dtype=np.float64)
    return _deltas(released, at, 64, _fits_pld(released) or _only_fixed(released))


def _deltas(released: Account, at: Any, coarseness: int, by_pld: bool) -> Any:
    noise, tails = _noise(released), 1e-30
    extra, inner = slack(noise, float(at[-1]), tails) if noise else (0.0, tails)
    if not inner > 0:  # hardly any noise
        return np.ones(len(at))
    shifted, bounds = np.maximum(at - extra, 0.0), []
    if by_pld:
        losses = compose_losses(released, coarseness * grid_of(released))
        bounds.append(np.array(losses.get_delta_for_epsilon(list(shifted))))
    if not by_pld or _has_two_bounds(released):
        orders, rdp = _rdp(released)
        bounds.append(np.array([rdp_privacy_accountant.compute_delta(orders, rdp, one)[0] for one in shifted]))
    # With P <= e^extra·Q + δ(0), what of P is above e^ε·Q is at most δ(0) + e^extra − e^ε.
    found = np.min(bounds, axis=0) * tails / inner + np.exp(extra) - np.exp(np.minimum(at, extra))
    return np.clip(found + (tails if noise else 0.0) + _truncated(released), 0.0, 1.0)


def attainable_epsilon(released: Account, delta: float, coarseness: int = 1) -> float:
    """The ε that an attack on one unit's own numbers can reach at this δ: ``epsilon``, or less where that is loose."""
    if not _only_fixed(released):
        return epsilon(released, delta, coarseness)
    return float(compose_losses(released, coarseness * grid_of(released)).get_epsilon_for_delta(delta))


def scale_noise(released: Account, factor: float) -> Account:
    """The same releases with all their noise times this factor."""
    return account((_scale_event(event, factor), count) for event, count in released)


def _scale_event(event: Event, factor: float) -> Event:
    match event:
        case dp_accounting.GaussianDpEvent(noise_multiplier=z):
            return dp_accounting.GaussianDpEvent(z * factor)
        case dp_accounting.LaplaceDpEvent(noise_multiplier=b):
            return dp_accounting.LaplaceDpEvent(b * factor)
        case dp_accounting.RandomizedResponseDpEvent(num_buckets=k):
            return dp_accounting.RandomizedResponseDpEvent(k / (math.exp(largest_loss(event) / factor) + k - 1.0), k)
        case dp_accounting.ZCDpEvent():
            return dp_accounting.ZCDpEvent(event.rho / factor**2)
        case ExponentialDpEvent(epsilon=eps):
            return ExponentialDpEvent(eps / factor)
        case dp_accounting.PoissonSampledDpEvent(sampling_probability=q, event=inner):
            return poisson_sampled(q, tuple((_scale_event(one, factor), count) for one, count in leaves(inner)))
        case dp_accounting.SampledWithoutReplacementDpEvent():
            inner = _scale_event(event.event, factor)
            return dp_accounting.SampledWithoutReplacementDpEvent(event.source_dataset_size, event.sample_size, inner)
    raise Unaccountable(f"expected an event with noise, got {event}")


def method(released: Account) -> str:
    """The name of the accounting that ``epsilon`` uses for what is not bare, for reports."""
    if merge_gaussians(tuple(released)) is not None:
        return "analytic Gaussian"
    if not _fits_pld(released):
        return "RDP"
    return "PLD or RDP, the smaller" if _has_two_bounds(released) else "PLD"


def _fits_pld(released: Account) -> bool:
    return not any(isinstance(event, FIXED_SIZE | dp_accounting.ZCDpEvent) for event, _ in released)


def _only_fixed(released: Account) -> bool:
    return bool(released) and all(isinstance(event, FIXED_SIZE) for event, _ in released)


def _has_two_bounds(released: Account) -> bool:
    """A selection's pure-DP bound is the better for a few, its zCDP bound for many."""
    return any(isinstance(event, ExponentialDpEvent) for event, _ in released)


# Rényi differential privacy


def _rdp(released: Account, orders: tuple[float, ...] = _ALL_ORDERS) -> tuple[Any, Any]:
    """The orders, and the Rényi DP of everything in the account at each of them."""
    return np.array(orders), sum(count * rdp_of(event, orders) for event, count in sorted(released, key=repr))


@lru_cache(maxsize=512)
def rdp_of(event: DpEvent, orders: tuple[float, ...]) -> Any:
    """Rényi DP of one event at each of these orders."""
    if isinstance(event, ExponentialDpEvent):
        pure = rdp_of(dp_accounting.RandomizedResponseDpEvent(2.0 / (math.exp(event.epsilon) + 1.0), 2), orders)
        return np.minimum(pure, rdp_of(dp_accounting.ZCDpEvent(event.epsilon**2 / 8.0), orders))
    sampled = isinstance(event, POISSON)
    relation = NeighboringRelation.ADD_OR_REMOVE_ONE if sampled else NeighboringRelation.REPLACE_ONE
    accountant = rdp_privacy_accountant.RdpAccountant(list(orders), relation)
    if accountant.supports(event):
        return accountant.compose(event).rdp
    # Rényi accounting knows amplification of Gaussian noise only; without amplification the bound still holds.
    return sum(count * rdp_of(inner, orders) for inner, count in leaves(event.event))
