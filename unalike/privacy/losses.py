"""Privacy loss distributions of accounts: dp_accounting's, and those of samples that it does not have."""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any

import dp_accounting
import numpy as np
from dp_accounting import DpEvent
from dp_accounting.pld import common, pld_pmf, privacy_loss_distribution

from unalike.privacy.account import Account, Unaccountable, account
from unalike.privacy.events import ExponentialDpEvent, leaves, merge_gaussians

_GRID = 1e-4  # dp_accounting's own discretization of the privacy loss
_WIDEST = 400.0  # beyond this range of losses (ε in the hundreds) a coarser grid keeps it fast, still an upper bound
POISSON = dp_accounting.PoissonSampledDpEvent
FIXED_SIZE = dp_accounting.SampledWithoutReplacementDpEvent


@lru_cache(maxsize=1024)
def largest_loss(event: DpEvent) -> float:
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
            if not any(isinstance(e, POISSON | FIXED_SIZE | dp_accounting.ZCDpEvent) for e, _ in parts):
                return _amplified_loss(q, sum(n * largest_loss(e) for e, n in parts))
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


def grid_of(released: Account) -> float:
    """Width of the loss grid: dp_accounting's default, doubled while the composed losses would need too many points."""
    width = 0.0
    for event, count in released:
        loss = largest_loss(event.event if isinstance(event, FIXED_SIZE) else event)
        rate = event.sampling_probability if isinstance(event, POISSON) else 1.0
        width += min(count * loss, loss + 10.0 * math.sqrt(count) * rate * loss)
    return float(_GRID * 2.0 ** max(0, math.ceil(math.log2(max(width, 1.0) / _WIDEST))))


def compose_losses(released: Account, grid: float) -> Any:
    """The loss distribution of everything in the account, on a grid of this width."""
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
    return single if count == 1 else single.self_compose(count)


@lru_cache(maxsize=128)
def _single_pld(event: DpEvent, grid: float) -> Any:
    if isinstance(event, FIXED_SIZE):
        return _replace_one_pld(event.sample_size / event.source_dataset_size, event.event.noise_multiplier, grid)
    q, inner = (event.sampling_probability, event.event) if isinstance(event, POISSON) else (1.0, event)
    match inner:
        case dp_accounting.GaussianDpEvent(noise_multiplier=z):
            return privacy_loss_distribution.from_gaussian_mechanism(
                z, value_discretization_interval=grid, sampling_prob=q
            )
        case dp_accounting.LaplaceDpEvent(noise_multiplier=b):
            return privacy_loss_distribution.from_laplace_mechanism(
                b, value_discretization_interval=grid, sampling_prob=q
            )
        case dp_accounting.RandomizedResponseDpEvent(noise_parameter=p, num_buckets=k) if q == 1:
            return privacy_loss_distribution.from_randomized_response(p, k, value_discretization_interval=grid)
        case ExponentialDpEvent(epsilon=eps) if q == 1:
            pure = common.DifferentialPrivacyParameters(eps, 0.0)
            return privacy_loss_distribution.from_privacy_parameters(pure, value_discretization_interval=grid)
    return _sampled_pld(q, account([(inner, 1)]), grid)


def _sampled_pld(q: float, inner: Account, grid: float) -> Any:
    """Poisson sampling of any composition whose loss distribution is the same both ways.

    If (P, Q) dominates the composition, then ((1−q)Q + qP, Q) dominates its sampled form when a unit is removed and
    (P, (1−q)P + qQ) when it is added (Zhu, Dong and Wang 2022, Thm 11). Their hockey-stick divergences follow from
    those of (P, Q); dp_accounting connects the dots.
    """
    base = compose_losses(inner, grid)
    largest = _amplified_loss(q, sum(count * largest_loss(event) for event, count in inner))
    least = math.log1p(-q)

    def delta_at(losses: Any) -> Any:
        return np.array(base.get_delta_for_epsilon(list(losses)))

    def connect(low: float, high: float, added: bool) -> Any:
        first, last = math.floor(low / grid) - 1, math.ceil(high / grid) + 1
        gamma = np.exp(np.arange(first, last + 1) * grid)
        if added:  # H_γ(P ‖ (1−q)P + qQ) = w·H_{γq/w}(P ‖ Q) with w = 1 − γ(1−q), and 0 where w <= 0
            weight = 1.0 - gamma * (1.0 - q)
            inside = weight > 0
            ratio = gamma[inside] * q / weight[inside]
            deltas = np.zeros_like(gamma)
            deltas[inside] = weight[inside] * delta_at(np.log(ratio))
        else:  # H_γ((1−q)Q + qP ‖ Q) = q·H_{(γ−1+q)/q}(P ‖ Q), and 1 − γ where γ <= 1 − q
            ratio = (gamma - 1.0 + q) / q
            inside = ratio > 0
            deltas = 1.0 - gamma
            deltas[inside] = q * delta_at(np.log(ratio[inside]))
        deltas = np.minimum.accumulate(np.clip(deltas, 0.0, 1.0))
        return pld_pmf.create_pmf_pessimistic_connect_dots_fixed_gap(grid, first, last, deltas)

    return privacy_loss_distribution.PrivacyLossDistribution(
        connect(least, largest, added=False), connect(-largest, -least, added=True)
    )


def _replace_one_pld(q: float, z: float, grid: float) -> Any:
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
