"""Exact noise: the whole distribution at small σ, its grid, and the bound by which it is accounted."""

from __future__ import annotations

import math
from collections.abc import Callable

import dp_accounting
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats
from torch import Tensor

from unalike.privacy import Exponential, Gaussian, Laplace, RandomizedResponse, SystemDraws, discrete
from unalike.privacy.account import account
from unalike.privacy.accountant import delta as delta_of
from unalike.privacy.accountant import epsilon as epsilon_of
from unalike.privacy.discrete import (
    bernoulli_exp,
    discrete_gaussian,
    discrete_laplace,
    gaussian_noise,
    grid,
    slack,
    to_grid,
    uniform_below,
)
from unalike.privacy.mechanisms import add_gaussian

COUNT = 100_000
CHANCE = 1e-6  # of each test to fail by bad luck


def gaussian_pmf(sigma: float, reach: int) -> np.ndarray:
    """Of −reach … reach, from its definition."""
    weights = np.array([math.exp(-(k**2) / (2.0 * sigma**2)) for k in range(-60 * reach, 60 * reach + 1)])
    middle = 60 * reach
    return np.asarray(weights[middle - reach : middle + reach + 1] / weights.sum())


def laplace_pmf(scale: float, reach: int) -> np.ndarray:
    """tanh(1/2t)·exp(−|k|/t)."""
    return math.tanh(0.5 / scale) * np.exp(-np.abs(np.arange(-reach, reach + 1)) / scale)


def chi_square(drawn: np.ndarray, pmf: np.ndarray) -> float:
    """p-value of all values within reach and of the two tails beyond it together."""
    reach = len(pmf) // 2
    inside = drawn[np.abs(drawn) <= reach] + reach
    counts = np.append(np.bincount(inside, minlength=len(pmf)), len(drawn) - len(inside))
    expected = np.append(pmf, max(0.0, 1.0 - pmf.sum())) * len(drawn)
    order = np.argsort(expected)  # rare values are taken together, so that each class is expected five times or more
    rare = order[: 1 + int(np.searchsorted(np.cumsum(expected[order]), 5.0))]
    keep = np.setdiff1d(order, rare)
    merged = np.append(counts[keep], counts[rare].sum()), np.append(expected[keep], expected[rare].sum())
    return float(stats.chisquare(*merged).pvalue)


@pytest.mark.parametrize("sigma", [1, 2, 3, 7])
def test_the_whole_distribution_at_small_sigma(sigma: int) -> None:
    assert chi_square(discrete_gaussian(sigma, COUNT), gaussian_pmf(sigma, 4 * sigma)) > CHANCE
    assert chi_square(discrete_laplace(sigma, COUNT), laplace_pmf(sigma, 8 * sigma)) > CHANCE


@pytest.mark.parametrize("sigma", [1_000, 2**22 + 12_345, 2**31 - 1, 2**31 + 5, 2**38])
def test_large_sigma_has_the_variance_and_tails_of_the_continuous_law(sigma: int) -> None:
    drawn = discrete_gaussian(sigma, COUNT) / sigma
    assert abs(drawn.mean()) < stats.norm.isf(CHANCE) / math.sqrt(COUNT)
    assert abs(np.square(drawn).mean() - 1.0) < stats.norm.isf(CHANCE) * math.sqrt(2.0 / COUNT)
    assert stats.kstest(drawn, "norm").pvalue > CHANCE
    for beyond in (2.0, 3.0, 3.5):
        rate = 2 * stats.norm.sf(beyond)
        assert stats.binomtest(int((np.abs(drawn) > beyond).sum()), COUNT, rate).pvalue > CHANCE
    assert stats.kstest(discrete_laplace(sigma, COUNT) / sigma, "laplace").pvalue > CHANCE
    low_digits = discrete_gaussian(sigma, COUNT) % 8
    if sigma > 8_000:  # a sampler in floating point would have missed some of the lowest bits
        assert stats.chisquare(np.bincount(low_digits, minlength=8)).pvalue > CHANCE


def test_each_client_of_a_block_may_have_a_sigma_of_its_own() -> None:
    def noise(sigma: Tensor, like: Tensor) -> Tensor:
        return gaussian_noise(sigma, [COUNT // 2], like)

    wide, narrow = torch.vmap(noise)(torch.tensor([5_000_000, 3]), torch.zeros(2, 1)).numpy()
    assert chi_square(narrow, gaussian_pmf(3, 12)) > CHANCE
    assert stats.kstest(wide / 5e6, "norm").pvalue > CHANCE


@pytest.mark.parametrize(("a", "b"), [(0, 5), (1, 3), (3, 3), (7, 3), (25, 10), (2**40, 2**41 + 1)])
def test_coins_of_exp(a: int, b: int) -> None:
    heads = int(bernoulli_exp(np.full(COUNT, a), b).sum())
    assert stats.binomtest(heads, COUNT, math.exp(-a / b)).pvalue > CHANCE


@pytest.mark.parametrize("bound", [3, 12, 3 * 2**29, 3 * 2**61])
def test_uniform_integers_are_uniform(bound: int) -> None:
    drawn = uniform_below(bound, COUNT)
    assert drawn.min() >= 0 and drawn.max() < bound
    bins = min(bound, 6)
    assert stats.chisquare(np.bincount(drawn // (-(-bound // bins)), minlength=bins)).pvalue > CHANCE


def test_words_that_would_bias_are_drawn_again(monkeypatch: pytest.MonkeyPatch) -> None:
    # Of 2^32 words, 3 has one too many: word 0 gives a product whose lower half is below 2^32 mod 3 = 1.
    words = [0, 2**31, 0, 2**32 - 1]
    monkeypatch.setattr(discrete, "_short_words", lambda count: np.array([words.pop(0) for _ in range(count)], int))
    assert uniform_below(3, 2).tolist() == [2, 1]


def test_digits_of_the_constant_and_a_tie() -> None:
    from decimal import Decimal, getcontext

    getcontext().prec = 80
    assert discrete._digits_of_inverse_e(190) == int(Decimal(1).exp() ** -1 * 2**190)
    tied = [bool(discrete._below_constant(np.array([discrete._DIGITS]))[0]) for _ in range(400)]
    share = (discrete._digits_of_inverse_e(126) % 2**63) / 2**63  # the next digits decide
    assert stats.binomtest(sum(tied), 400, share).pvalue > CHANCE


def test_no_floating_point_number_takes_part_in_sampling(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every array that the sampler makes, and every word that it compares with, is of integers or truth values."""
    seen: list[np.dtype] = []
    for name in ("_exp_of_product", "_successes", "_small_below", "_words"):
        real: Callable[..., np.ndarray] = getattr(discrete, name)

        def watched(*args: object, real: Callable[..., np.ndarray] = real) -> np.ndarray:
            made = real(*args)
            seen.extend(one.dtype for one in (*args, made) if isinstance(one, np.ndarray))
            return made

        monkeypatch.setattr(discrete, name, watched)
    discrete_gaussian(12_345, 1_000)
    discrete_laplace(2**33, 1_000)
    assert seen and all(one.kind in "iub" for one in seen)
    with pytest.raises(TypeError, match="whole number"):
        discrete_gaussian(2.5, 3)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="must be from 1 to"):
        discrete_gaussian(0, 3)


# The grid


@given(st.floats(1e-6, 1e6), st.floats(1e-3, 30.0), st.integers(1, 1 << 20), st.sampled_from(["l1", "l2"]))
def test_the_grid_is_fine_enough_and_exact_in_float32(clip: float, z: float, d: int, norm: str) -> None:
    step = grid(clip, z * clip, d, norm)
    assert math.log2(step) == int(math.log2(step))
    assert d * (clip / step) ** -2 * 2**26 <= 1.0  # what the accounting assumes: Σ 1/σ² <= 2^−26/z²
    if norm == "l2":
        assert clip / step <= 2**24
    assert discrete.rounding(d, step, norm) <= clip / 2**14


def test_rounding_keeps_within_the_clip_and_does_nothing_twice() -> None:
    generator = torch.Generator().manual_seed(0)
    value = torch.randn(5_000, generator=generator)
    clip = 0.7
    step = grid(clip, clip, len(value))
    shorter = clip - discrete.rounding(len(value), step)
    on_grid = to_grid(value * (shorter / value.norm()), step)
    assert on_grid.dtype == torch.float32
    assert float(on_grid.double().norm()) <= clip
    assert torch.equal(to_grid(on_grid, step), on_grid)
    assert torch.equal(torch.round(on_grid.double() / step), on_grid.double() / step)
    long = to_grid(torch.zeros((1 << 20) + 1), 2.0**-30)
    assert long.dtype == torch.float64


@pytest.mark.parametrize("mechanism", [Gaussian(0.8), Laplace(0.8)], ids=["gaussian", "laplace"])
def test_noise_on_a_grid_is_whole_steps_and_rounded_up(mechanism: Gaussian | Laplace) -> None:
    value = torch.full((20_000,), 0.3, dtype=torch.float64)
    step = grid(3.0, mechanism.std(3.0), len(value), mechanism.norm)
    noisy = mechanism.add(value, 3.0, SystemDraws())
    assert torch.equal(noisy / step, torch.round(noisy / step))
    noise = noisy - to_grid(value, step)
    assert float(noise.std()) == pytest.approx(mechanism.std(3.0), rel=0.05)
    with pytest.raises(ValueError, match="exact sampling ends"):
        Gaussian(1e9).add(value, 1.0, SystemDraws())


def test_sigma_counts_the_rounding_unless_the_value_is_on_the_grid(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []

    def no_noise(scale: Tensor | int, shape: tuple[int, ...], like: Tensor | None) -> Tensor:
        asked.append(int(scale))
        return torch.zeros(shape, dtype=torch.int64)

    monkeypatch.setattr(discrete, "gaussian_noise", no_noise)
    monkeypatch.setattr(discrete, "laplace_noise", no_noise)
    value, step = torch.zeros(100), 2.0**-20
    Gaussian(1.5).add(value, 2.0, SystemDraws(), step)
    Gaussian(1.5).add(value, 2.0, SystemDraws())
    Laplace(0.5).add(value, 2.0, SystemDraws(), step)
    own = grid(2.0, 3.0, 100)
    assert asked[0] == math.ceil(1.5 * 2.0 / step * (1 + 1e-12))
    assert asked[1] == math.ceil(1.5 * (2.0 / own + 10.0) * (1 + 1e-12))
    assert asked[2] == math.ceil((2.0 / step + 200) / 0.5 * (1 + 1e-12))


def test_a_block_of_clients_shares_no_noise_and_each_may_have_its_own_level() -> None:
    def noisy(client: Tensor, z: Tensor) -> Tensor:
        draws = SystemDraws()
        draws.like = client  # type: ignore[attr-defined]
        return add_gaussian(torch.zeros(3_000), 1.0, z, draws)

    block = torch.func.vmap(noisy)(torch.arange(3), torch.tensor([1.0, 1.0, 5.0]))
    assert not torch.equal(block[0], block[1])
    assert block.std(dim=1).tolist() == pytest.approx([1.0, 1.0, 5.0], rel=0.08)


def test_what_is_not_finite_counts_as_nothing() -> None:
    noisy = Gaussian(1e-3).add(torch.tensor([math.nan, 5.0]), 1.0, SystemDraws())
    assert float(noisy.abs().max()) < 0.1


# Choices


def test_exact_choices_have_the_probabilities_that_they_claim() -> None:
    mechanism, scores = Exponential(1.5), torch.tensor([0.0, 1.0, 4.0, -2.0, math.nan])
    chosen = mechanism.select(scores.expand(COUNT, 5), 2.0, SystemDraws())
    weights = torch.exp(1.5 * scores[:4].double() / 4.0)
    expected = torch.cat([weights / weights.sum(), torch.zeros(1)]).numpy()
    counts = torch.bincount(chosen, minlength=5).numpy()
    assert counts[4] == 0 and stats.chisquare(counts[:4], expected[:4] * COUNT).pvalue > CHANCE
    own = torch.func.vmap(lambda s, e: Exponential(1.0).select(s, 2.0, SystemDraws(), e))
    split = own(scores[:4].expand(COUNT, 4), torch.where(torch.arange(COUNT) % 2 == 0, 1.5, 1e-9))
    assert stats.chisquare(torch.bincount(split[::2], minlength=4), expected[:4] * COUNT / 2).pvalue > CHANCE
    assert stats.chisquare(torch.bincount(split[1::2], minlength=4)).pvalue > CHANCE


@pytest.mark.parametrize("categories", [2, 5])
def test_exact_randomized_response(categories: int) -> None:
    mechanism = RandomizedResponse(1.2, categories)
    answers = torch.arange(COUNT) % categories
    lies = torch.bincount((mechanism.respond(answers, SystemDraws()) - answers) % categories, minlength=categories)
    expected = np.full(categories, mechanism.lie * COUNT)
    expected[0] = mechanism.truth * COUNT
    assert stats.chisquare(lies.numpy(), expected).pvalue > CHANCE


def test_exact_reports_are_unbiased() -> None:
    mechanism = RandomizedResponse(0.9)
    reports = mechanism.report(torch.full((COUNT,), 0.3, dtype=torch.float64), SystemDraws())
    assert set(reports.tolist()) == set(mechanism.reports)
    deviation = math.sqrt(float(mechanism.variance(torch.tensor(0.3))) / COUNT)
    assert abs(float(reports.mean()) - 0.3) < 5 * deviation


# Accounting


def test_the_pointwise_bounds_of_the_proof_hold() -> None:
    """R(k)/G(k) from the two definitions, against the bounds by which the slack is proven."""
    for sigma in (1.0, 1.7, 4.0, 20.0):
        reach = int(6 * sigma)
        k = np.arange(-reach, reach + 1)
        rounded = stats.norm.cdf(-(np.abs(k) - 0.5) / sigma) - stats.norm.cdf(-(np.abs(k) + 0.5) / sigma)
        log_ratio = np.log(rounded / gaussian_pmf(sigma, reach))
        assert (log_ratio >= -1 / (24 * sigma**2) - 1e-12).all()
        assert (log_ratio <= k**2 / (8 * sigma**4) + 1 / (24 * sigma**2) + 1e-12).all()


def discrete_delta(pmf: np.ndarray, shift: int, epsilon: float) -> float:
    """Hockey-stick divergence of integer noise and itself, shifted, by summing over all integers."""
    padded = np.concatenate([np.zeros(shift), pmf, np.zeros(shift)])
    return float(np.maximum(padded[: len(padded) - shift] - math.exp(epsilon) * padded[shift:], 0.0).sum())


@pytest.mark.parametrize(("sigma", "z"), [(4, 2.0), (10, 1.0), (30, 0.5)])
def test_the_slack_bounds_a_discrete_gaussian_that_is_summed_up(sigma: int, z: float) -> None:
    """On grids far coarser than those in use, where the slack can be seen: one number, so Σ 1/σ² = 1/σ²."""
    pmf = gaussian_pmf(sigma, 14 * sigma)
    for delta in (1e-3, 1e-6):
        extra, inner = slack(2.0**26 / sigma**2, 0.0, delta)
        continuous = dp_accounting.get_epsilon_gaussian(z, inner)
        extra, _ = slack(2.0**26 / sigma**2, continuous, delta)
        assert discrete_delta(pmf, round(sigma / z), continuous + extra) <= delta
        assert extra < 60 / sigma**2


def test_the_accountant_charges_the_slack_and_no_more() -> None:
    sampled = dp_accounting.PoissonSampledDpEvent(0.05, dp_accounting.GaussianDpEvent(1.1))
    continuous = (
        dp_accounting.pld.PLDAccountant().compose(sampled, 200).get_epsilon(1e-5 - 200 * 2e-12)
    )  # a Poisson sample may be cut
    found = epsilon_of(account([(sampled, 200)]), 1e-5)
    extra = slack(200 / 1.1**2, continuous, 1e-5)[0]
    assert 0 < extra < 1e-4
    assert found == pytest.approx(continuous + extra, abs=1e-6)
    assert delta_of(account([(sampled, 200)]), found) == pytest.approx(1e-5, rel=1e-3)


@pytest.mark.parametrize("z", [0.5, 1.0, 4.0])
def test_unsampled_zcdp_is_an_independent_upper_bound(z: float) -> None:
    """ρ = 1/2z² holds for the discrete Gaussian itself (Canonne, Kamath, Steinke 2020, Thm 4)."""
    proven = dp_accounting.rdp.RdpAccountant(
        neighboring_relation=dp_accounting.NeighboringRelation.REPLACE_ONE
    ).compose(dp_accounting.ZCDpEvent(10 / (2 * z**2)))
    ours = epsilon_of(account([(dp_accounting.GaussianDpEvent(z), 10)]), 1e-5)
    assert 0.7 * proven.get_epsilon(1e-5) < ours <= proven.get_epsilon(1e-5)


def test_zhu_and_wangs_renyi_bound_under_poisson_sampling_is_another() -> None:
    """Thm 6 of Zhu and Wang (2019) at integer orders needs the RDP of the mechanism only: α/2z² for discrete noise."""
    z, q, rounds, delta = 1.2, 0.02, 500, 1e-5
    best = math.inf
    for order in range(2, 33):
        terms = [
            math.comb(order, j) * (1 - q) ** (order - j) * q**j * math.exp((j - 1) * j / (2 * z**2))
            for j in range(2, order + 1)
        ]
        first = (1 - q) ** (order - 1) * (order * q - q + 1)
        rdp = math.log(first + terms[0] + 3 * sum(terms[1:])) / (order - 1)
        best = min(best, rounds * rdp + math.log(1 / delta) / (order - 1))
    sampled = dp_accounting.PoissonSampledDpEvent(q, dp_accounting.GaussianDpEvent(z))
    ours = epsilon_of(account([(sampled, rounds)]), delta)
    assert 0.5 * best < ours <= best


@pytest.mark.parametrize(("change", "epsilon"), [(3, 1.0), (10, 0.5), (40, 4.0)])
def test_discrete_laplace_is_dominated_by_what_it_is_accounted_as(change: int, epsilon: float) -> None:
    scale = math.ceil((change + 2) / epsilon)
    pmf = laplace_pmf(scale, 60 * scale)
    for at in np.linspace(0.0, 1.1 * epsilon, 23):
        accounted = max(0.0, 1.0 - math.exp((at - epsilon) / 2))  # continuous Laplace, one use
        assert discrete_delta(pmf, change, float(at)) <= accounted + 1e-12


def test_a_change_spread_over_coordinates_costs_laplace_noise_no_more() -> None:
    """The vector mechanism is accounted as one coordinate that moves by the whole L1 sensitivity."""
    from dp_accounting.pld import privacy_loss_distribution as pld

    whole = pld.from_laplace_mechanism(1.0, sensitivity=2.0)
    for parts in ((1.0, 1.0), (1.5, 0.5), (1.9, 0.1), (0.8, 0.7, 0.5)):
        spread = pld.from_laplace_mechanism(1.0, sensitivity=parts[0])
        for part in parts[1:]:
            spread = spread.compose(pld.from_laplace_mechanism(1.0, sensitivity=part))
        for at in (0.0, 0.3, 1.0, 1.9):
            assert spread.get_delta_for_epsilon(at) <= whole.get_delta_for_epsilon(at) + 1e-4


def test_a_hundred_selections_cost_what_a_hundred_cost() -> None:
    one, delta = Exponential(0.1).event(), 1e-6
    hundred = epsilon_of(account([(one, 100)]), delta)
    # By hand: bounded range makes each 0.1²/8-zCDP, so a hundred are 0.125-zCDP; in (ε, δ) at least the KL bound's √.
    rho = 100 * 0.1**2 / 8
    assert hundred <= rho + 2 * math.sqrt(rho * math.log(1 / delta))
    assert hundred > 10 * epsilon_of(account([(one, 1)]), delta)
    assert epsilon_of(account([(one, 1)]), delta) == pytest.approx(0.1, abs=1e-3)
    several = epsilon_of(account([(one, 1)] * 100), delta)  # recorded one by one
    assert several == hundred
    assert epsilon_of(account([(one, 200)]), delta) > 1.3 * hundred
