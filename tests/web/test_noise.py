"""The page's noise: drawn as its distribution says, on the grid, of the size and at the price that Python names."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from scipy import stats

from unalike.privacy import Gaussian, Laplace, Ledger
from unalike.privacy.sampling import Local

if TYPE_CHECKING:
    from playwright.sync_api import Page

Whole = np.ndarray[Any, np.dtype[np.int64]]
COUNT = 12_000


def in_page(page: Page, call: str, *arguments: object) -> Any:
    """What a call of noise.js gives."""
    program = f"async (given) => {{ const noise = await import('/page/noise.js'); return ({call})(noise, ...given); }}"
    return page.evaluate(program, list(arguments))


def draws(page: Page, kind: str, scale: int) -> Whole:
    call = "(noise, kind, scale, count) => Array.from({ length: count }, () => String(noise[kind](BigInt(scale))))"
    return np.array([int(one) for one in in_page(page, call, kind, str(scale), COUNT)])


def fits(drawn: Whole, weight: Any) -> float:
    """χ²: how likely so large a distance from probabilities ∝ weight(k) is. The tails are one bin on each side."""
    reach = np.arange(-60 * 40, 60 * 40 + 1)
    chances = weight(reach.astype(float))
    expected = COUNT * chances / chances.sum()
    wide = int(np.abs(reach[expected >= 20]).max())
    clipped = np.clip(drawn, -wide, wide)
    seen = np.array([(clipped == k).sum() for k in range(-wide, wide + 1)])
    wanted = expected[np.abs(reach) <= wide].copy()
    wanted[0] += expected[reach < -wide].sum()
    wanted[-1] += expected[reach > wide].sum()
    return float(stats.chisquare(seen, wanted, sum_check=False).pvalue)


@pytest.mark.parametrize("sigma", [1, 2, 7, 40])
def test_gaussian_noise_has_its_distribution(page: Page, sigma: int) -> None:
    drawn = draws(page, "discreteGaussian", sigma)
    assert fits(drawn, lambda k: np.exp(-(k**2) / (2 * sigma**2))) > 1e-6


@pytest.mark.parametrize("scale", [1, 3, 25])
def test_laplace_noise_has_its_distribution(page: Page, scale: int) -> None:
    assert fits(draws(page, "discreteLaplace", scale), lambda k: np.exp(-np.abs(k) / scale)) > 1e-6


def test_rounded_normal_numbers_would_be_noticed() -> None:
    rounded = np.random.default_rng(0).normal(size=COUNT).round().astype(np.int64)
    assert fits(rounded, lambda k: np.exp(-(k**2) / 2)) < 1e-6


def test_wide_noise_has_all_of_its_bits(page: Page) -> None:
    sigma = 2**41  # a draw has more bits than a double
    drawn = draws(page, "discreteGaussian", sigma)
    assert stats.kstest(drawn / sigma, "norm").pvalue > 1e-6
    assert stats.chisquare(np.bincount(drawn % 64, minlength=64)).pvalue > 1e-6


@pytest.mark.parametrize("kind", ["gaussian", "laplace"])
def test_numbers_with_noise_are_on_the_grid_with_the_deviation_of_python(page: Page, kind: str) -> None:
    noise, sensitivity = (Gaussian(1.3) if kind == "gaussian" else Laplace(0.8)), 0.02
    name, size = ("addGaussian", 1.3) if kind == "gaussian" else ("addLaplace", 0.8)
    call = (
        f"(noise, values, by, size) => [[...noise.{name}(values, by, size)], noise.gridStep(by, values.length, '{{}}')]"
    )
    values = np.linspace(-1, 1, 3000)
    came, step = in_page(page, call.format("l2" if kind == "gaussian" else "l1"), values.tolist(), sensitivity, size)
    steps = np.array(came) / step
    np.testing.assert_array_equal(steps, steps.round())
    assert np.std(np.array(came) - values) == pytest.approx(_std(noise, sensitivity, len(values)), rel=0.12)
    nothing, _ = in_page(page, call.format("l2"), [1.0, float("nan"), 3.0], sensitivity, size)
    assert np.abs(nothing).max() < 100 * sensitivity / 0.5  # noise on zeros: what is no number shows nothing


def _std(noise: Gaussian | Laplace, sensitivity: float, count: int) -> float:
    import torch

    from unalike.privacy import SystemDraws

    return float(noise.add(torch.zeros(count), sensitivity, SystemDraws()).std())


@pytest.mark.parametrize("epsilon", [0.5, 1.0, 4.0, 11.31])
@pytest.mark.parametrize("delta", [1e-2, 1e-5])
def test_the_multiplier_is_the_least_that_balle_and_wang_allow(page: Page, epsilon: float, delta: float) -> None:
    z = in_page(page, "(noise, epsilon, delta) => noise.gaussianMultiplier(epsilon, delta)", epsilon, delta)

    def delta_at(z: float) -> float:
        far, shift = epsilon * z, 0.5 / z
        return float(stats.norm.sf(far - shift) - np.exp(epsilon) * stats.norm.sf(far + shift))

    assert delta_at(z) <= delta * (1 + 1e-9) and delta_at(z * (1 - 1e-9)) > delta * (1 - 1e-8)


def test_what_releases_cost_together_is_what_the_ledger_says(page: Page) -> None:
    releases = [{"noise": "gaussian", "multiplier": 3.7}, {"noise": "gaussian", "multiplier": 2.1}]
    ledger = Ledger()
    for noise in (Gaussian(3.7), Gaussian(2.1)):
        ledger.record(noise.event(), unit="point", sampling=Local(), newcomers=["row"])
    call = "(noise, releases, delta) => noise.spent(releases, delta)"
    assert in_page(page, call, releases, 1e-4) == pytest.approx(ledger.epsilon(1e-4, newcomer="row"), rel=1e-4)
    ledger.record(Laplace(0.5).event(), unit="point", sampling=Local(), newcomers=["row"])
    told = in_page(page, call, [*releases, {"noise": "laplace", "epsilon": 0.5}], 1e-4)
    assert ledger.epsilon(1e-4, newcomer="row") <= told * (
        1 + 1e-6
    )  # ε of Laplace is added: no less than the exact one
    assert in_page(page, "(noise, r) => noise.spent(r, 1e-4) === Infinity", [*releases, {"noise": "none"}])
