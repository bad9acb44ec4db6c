"""Mechanisms: the noise has exactly the variance that the ledger is told, and nonsense is refused."""

from __future__ import annotations

import math
from collections.abc import Callable

import dp_accounting
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats
from torch import Tensor

from unalike.core.draws import Draws, key
from unalike.privacy import Exponential, Gaussian, Laplace, Quantizer, RandomizedResponse, SystemDraws, clip
from unalike.privacy.mechanisms import AdditiveNoise, DrawsLike, uniform

COUNT = 200_000


def seeded(*parts: int) -> Draws:
    return Draws(key(17, *parts))


def variance_interval(kurtosis_excess: float, alpha: float = 1e-6) -> tuple[float, float]:
    """Bounds of sample variance / variance: the normal limit, whose width depends on the fourth moment."""
    half = stats.norm.isf(alpha / 2) * math.sqrt((2.0 + kurtosis_excess) / COUNT)
    return 1.0 - half, 1.0 + half


@pytest.mark.parametrize("epsilon", [0.1, 0.5, 1.0, 3.0, 8.0])
@pytest.mark.parametrize("delta", [1e-8, 1e-5, 1e-2])
def test_analytic_gaussian_gives_back_its_budget(epsilon: float, delta: float) -> None:
    z = Gaussian.for_budget(epsilon, delta).noise_multiplier
    assert dp_accounting.get_epsilon_gaussian(z, delta) == pytest.approx(epsilon, abs=1e-6)
    # Balle and Wang 2018, Thm 8, written out: δ = Φ(1/2z − εz) − e^ε·Φ(−1/2z − εz)
    normal = stats.norm.cdf
    written_out = normal(0.5 / z - epsilon * z) - math.exp(epsilon) * normal(-0.5 / z - epsilon * z)
    assert written_out == pytest.approx(delta, rel=1e-6)


def test_classical_formula_needs_more_noise_and_holds_up_to_epsilon_one() -> None:
    assert Gaussian.classical(0.5, 1e-5).noise_multiplier == pytest.approx(2 * math.sqrt(2 * math.log(125_000)))
    assert Gaussian.classical(1.0, 1e-5).noise_multiplier > Gaussian.for_budget(1.0, 1e-5).noise_multiplier
    with pytest.raises(ValueError, match=r"at most 1, got 2.*for_budget"):
        Gaussian.classical(2.0, 1e-5)


@pytest.mark.parametrize("draws", [seeded(1), SystemDraws()], ids=["seeded", "system"])
@pytest.mark.parametrize(
    ("mechanism", "law", "kurtosis"),
    [
        (Gaussian(0.7), lambda scale: stats.norm(scale=scale), 0.0),
        (Laplace(2.0), lambda scale: stats.laplace(scale=scale / math.sqrt(2)), 3.0),
    ],
    ids=["gaussian", "laplace"],
)
def test_noise_has_the_variance_and_the_law_it_says(
    draws: DrawsLike, mechanism: AdditiveNoise, law: Callable[[float], object], kurtosis: float
) -> None:
    sensitivity = 3.0
    value = torch.full((COUNT,), 5.0, dtype=torch.float64)
    noise = mechanism.add(value, sensitivity, draws) - value
    std = mechanism.std(sensitivity)
    low, high = variance_interval(kurtosis)
    assert low < float(noise.square().mean()) / std**2 < high
    assert abs(float(noise.mean())) < 5 * std / math.sqrt(COUNT)
    assert stats.kstest(noise.numpy(), law(std).cdf).pvalue > 1e-6  # type: ignore[attr-defined]


def test_events_carry_the_noise_that_is_added() -> None:
    sensitivity = 4.0
    gaussian, laplace = Gaussian(1.3), Laplace(0.25)
    assert gaussian.event() == dp_accounting.GaussianDpEvent(gaussian.std(sensitivity) / sensitivity)
    assert laplace.event() == dp_accounting.LaplaceDpEvent(laplace.scale(sensitivity) / sensitivity)
    assert Quantizer(4, 1.0).event() == dp_accounting.NonPrivateDpEvent()


def test_noise_keeps_shape_and_type_and_works_for_a_block_of_clients() -> None:
    def noisy(client: Tensor) -> Tensor:
        draws = Draws(key(3, client))
        return Laplace(1.0).add(Gaussian(1.0).add(torch.zeros(2, 3), 1.0, draws), 1.0, draws)

    block = torch.func.vmap(noisy)(torch.arange(4))
    assert block.shape == (4, 2, 3)
    assert block.dtype == torch.float32
    torch.testing.assert_close(block, torch.stack([noisy(torch.tensor(i)) for i in range(4)]))
    assert Gaussian(1.0).add(torch.tensor(1.0), 1.0, seeded(2)).shape == ()
    with pytest.raises(TypeError, match="floating-point"):
        Gaussian(1.0).add(torch.arange(3), 1.0, seeded(2))


def test_shares_of_gaussian_noise_add_up_to_the_whole() -> None:
    whole = Gaussian(2.0)
    assert 25 * whole.share(25).std(1.5) ** 2 == pytest.approx(whole.std(1.5) ** 2)


@pytest.mark.parametrize("epsilon", [0.5, 2.0])
@pytest.mark.parametrize("value", [0.0, 0.3, 1.0])
def test_randomized_response_reports_are_unbiased_with_the_stated_variance(epsilon: float, value: float) -> None:
    mechanism = RandomizedResponse(epsilon)
    low, high = mechanism.reports
    assert low == pytest.approx(-1 / (math.exp(epsilon) - 1))
    assert high == pytest.approx(math.exp(epsilon) / (math.exp(epsilon) - 1))
    reports = mechanism.report(torch.full((COUNT,), value, dtype=torch.float64), seeded(4))
    assert set(reports.tolist()) == {low, high}
    variance = float(mechanism.variance(torch.tensor(value)))
    assert float(reports.mean()) == pytest.approx(value, abs=5 * math.sqrt(variance / COUNT))
    assert float(reports.var()) == pytest.approx(variance, rel=0.03)


@pytest.mark.parametrize("categories", [2, 5])
def test_randomized_response_tells_the_truth_as_often_as_its_event_says(categories: int) -> None:
    mechanism = RandomizedResponse(1.2, categories)
    answers = torch.arange(COUNT) % categories
    given_answers = mechanism.respond(answers, seeded(5))
    lies = torch.bincount((given_answers - answers) % categories, minlength=categories)
    expected = torch.full((categories,), mechanism.lie * COUNT, dtype=torch.float64)
    expected[0] = mechanism.truth * COUNT
    assert stats.chisquare(lies.numpy(), expected.numpy()).pvalue > 1e-6
    assert mechanism.truth / mechanism.lie == pytest.approx(math.exp(1.2))
    event = mechanism.event()
    assert 1 - event.noise_parameter + event.noise_parameter / categories == pytest.approx(mechanism.truth)
    estimate = mechanism.estimate(mechanism.respond(torch.full((COUNT,), 1), seeded(6))).mean(dim=0)
    torch.testing.assert_close(estimate, torch.eye(categories, dtype=torch.float64)[1], atol=0.02, rtol=0.0)


def test_exponential_mechanism_selects_with_softmax_probabilities() -> None:
    mechanism = Exponential(1.5)
    scores = torch.tensor([0.0, 1.0, 4.0, -2.0])
    chosen = mechanism.select(scores.expand(COUNT, 4), 2.0, seeded(7))
    expected = torch.softmax(1.5 * scores.double() / (2 * 2.0), 0)
    torch.testing.assert_close(mechanism.probabilities(scores, 2.0), expected)
    counts = torch.bincount(chosen, minlength=4).numpy()
    assert stats.chisquare(counts, expected.numpy() * COUNT).pvalue > 1e-6


def test_quantizer_is_unbiased_on_its_grid_with_the_stated_variance() -> None:
    quantizer = Quantizer(3, 2.0)
    assert quantizer.largest_std == pytest.approx(2.0 / 7)
    for value in (-2.0, 0.123, 0.9, 2.0):
        rounded = quantizer.randomize(torch.full((COUNT,), value, dtype=torch.float64), seeded(8))
        levels = (rounded + 2.0) / quantizer.step
        torch.testing.assert_close(levels, levels.round())
        variance = float(quantizer.variance(torch.tensor(value, dtype=torch.float64)))
        assert float(rounded.mean()) == pytest.approx(value, abs=5 * math.sqrt(variance / COUNT) + 1e-9)
        assert float(rounded.var()) == pytest.approx(variance, rel=0.03, abs=1e-9)
    assert float(quantizer.randomize(torch.tensor(9.0), seeded(8))) == pytest.approx(2.0)


def test_uniform_never_reaches_its_ends() -> None:
    class Extreme:
        def bits(self, count: int) -> Tensor:
            return torch.tensor([0, -1])

        def normal(self, *shape: int) -> Tensor:
            raise AssertionError

    low, high = uniform(Extreme(), 2).tolist()
    assert 0.0 < low < high < 1.0


@given(
    st.lists(st.floats(-(2.0**100), 2.0**100, width=32), min_size=1, max_size=20),
    st.floats(1e-6, 1e6),
    st.sampled_from(["l1", "l2"]),
)
def test_clip_respects_its_bound_and_leaves_small_values_alone(entries: list[float], bound: float, norm: str) -> None:
    value = torch.tensor(entries)
    order = 1 if norm == "l1" else 2
    length = float(torch.linalg.vector_norm(value.double(), ord=order))
    clipped = clip(value, bound, norm)  # type: ignore[arg-type]
    assert float(torch.linalg.vector_norm(clipped.double(), ord=order)) <= bound
    if length <= bound:
        assert torch.equal(clipped, value)
    elif bound / length > 1e-30:
        torch.testing.assert_close(clipped.double(), value.double() * (bound / length), rtol=1e-5, atol=1e-37)


@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf])
def test_clip_turns_what_is_not_finite_into_nothing(poison: float) -> None:
    assert torch.equal(clip(torch.tensor([1.0, poison]), 1.0), torch.zeros(2))


def test_system_draws_cover_their_ranges() -> None:
    draws = SystemDraws()
    u = draws.uniform(COUNT)
    assert u.dtype == torch.float64
    assert stats.kstest(u.numpy(), "uniform").pvalue > 1e-6
    whole = draws.integers(7, COUNT)
    assert stats.chisquare(torch.bincount(whole, minlength=7).numpy()).pvalue > 1e-6
    order = draws.permutation(5, 8).tolist()
    assert sorted(order[:5]) == [0, 1, 2, 3, 4]
    assert order[5:] == [5, 6, 7]
    assert not torch.equal(draws.bits(4), draws.bits(4))
    assert draws.bits(0).shape == (0,)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: Gaussian(0.0), "noise_multiplier must be a finite number above 0, got 0"),
        (lambda: Gaussian(math.nan), "noise_multiplier"),
        (lambda: Gaussian.for_budget(0.0, 1e-5), "epsilon must be a finite number above 0, got 0"),
        (lambda: Gaussian.for_budget(1.0, 1.0), "delta must be above 0 and below 1, got 1"),
        (lambda: Gaussian.for_budget(1.0, 0.0), "delta must be above 0"),
        (lambda: Laplace(-1.0), "epsilon"),
        (lambda: Laplace(1.0).std(0.0), "sensitivity must be a finite number above 0, got 0.0; give the clip"),
        (lambda: RandomizedResponse(math.inf), "epsilon"),
        (lambda: RandomizedResponse(1.0, 1), "categories must be a whole number of at least 2, got 1"),
        (lambda: RandomizedResponse(1.0, 3).report(torch.zeros(1), seeded(1)), "2 categories, got 3"),
        (lambda: Exponential(0.0), "epsilon"),
        (lambda: Quantizer(0, 1.0), "bits must be a whole number of at least 1, got 0"),
        (lambda: Quantizer(33, 1.0), "at most 32"),
        (lambda: Quantizer(4, -1.0), "bound"),
        (lambda: clip(torch.zeros(1), 0.0), "clip bound"),
    ],
)
def test_nonsense_is_refused_at_construction(build: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build()
