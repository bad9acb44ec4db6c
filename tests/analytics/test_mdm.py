"""MDM against oracles: special functions, a direct maximum-likelihood fit, known mixtures, and the privacy ledger."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from scipy.optimize import minimize
from scipy.special import digamma, gammaln
from scipy.stats import dirichlet_multinomial
from torch import Tensor

from unalike import simulate
from unalike.analytics.mdm.algorithm import MDM
from unalike.analytics.mdm.counts import histogram_clients, known_mixture
from unalike.analytics.mdm.privacy import noise_for_budget
from unalike.analytics.mdm.steps import MOST_PRECISION
from unalike.core.client import Clients
from unalike.core.federation import Federation
from unalike.data.partition.mixture import MDMError, Mixture, look_up, relative_error, rise_table, size_edges
from unalike.privacy.mechanisms import Gaussian


def population(name: str, clients: int, seed: int = 0) -> tuple[Tensor, Mixture]:
    truth = known_mixture(name)
    return torch.from_numpy(truth.sample(clients, np.random.default_rng(seed))), truth


def federation(counts: Tensor, seed: int = 0, block: int = 4096) -> Federation:
    return simulate(histogram_clients(counts), seed=seed, block=block)


def test_the_table_equals_the_special_functions() -> None:
    alpha = torch.tensor([[0.05, 1.0, 30.0], [2.5, 0.3, 7.0]], dtype=torch.float64)
    table = rise_table(alpha, largest=40)
    for counts in ([0, 1, 40], [3, 0, 17]):
        found = look_up(table, torch.tensor(counts)).numpy()
        c, a = np.array(counts)[:, None], alpha.numpy().T
        np.testing.assert_allclose(found[:, :2], gammaln(c + a) - gammaln(a), rtol=1e-12, atol=1e-12)
        np.testing.assert_allclose(found[:, 2:], digamma(c + a) - digamma(a), rtol=1e-12, atol=1e-12)


def test_the_likelihood_equals_scipys_dirichlet_multinomial() -> None:
    counts, truth = population("medium-2", 30)
    each = [dirichlet_multinomial(alpha, 100).logpmf(counts.numpy()) for alpha in truth.alpha.numpy()]
    expected = np.logaddexp.reduce(np.stack(each) + truth.tau.log().numpy()[:, None])
    np.testing.assert_allclose(truth.log_likelihood(counts).numpy(), expected, rtol=1e-9)


def test_the_probabilities_of_all_histograms_add_up_to_one_in_bins_of_several_sizes_too() -> None:
    """Sizes 1 to 6 in bins of one, three and two sizes, so π of a bin is shared out."""
    mixture = Mixture(
        torch.tensor([0.3, 0.7], dtype=torch.float64),
        torch.tensor([[0.4, 1.1, 2.0], [3.0, 0.2, 0.9]], dtype=torch.float64),
        torch.tensor([[0.2, 0.5, 0.3], [0.1, 0.15, 0.75]], dtype=torch.float64),
        torch.tensor([1, 2, 5, 7]),
    )
    every = [c for c in itertools.product(range(7), repeat=3) if 1 <= sum(c) <= 6]
    likely = mixture.log_likelihood(torch.tensor(every)).exp()
    assert float(likely.sum()) == pytest.approx(1, abs=1e-9)
    of_size = [float(sum(p for p, c in zip(likely, every, strict=True) if sum(c) == m)) for m in range(1, 7)]
    shares = mixture.tau @ mixture.pi
    expected = [shares[0], *[shares[1] / 3] * 3, *[shares[2] / 2] * 2]
    assert of_size == pytest.approx([float(one) for one in expected])


def test_every_step_raises_the_likelihood() -> None:
    """With everybody in the cohort Algorithm 6 is the generalised EM of T1 Theorem 1."""
    counts, _ = population("high-2", 300)
    fitted = MDM(10, 100, components=2, rounds=40, cohort=300).fit(federation(counts))
    steps = np.diff(fitted.log_likelihood)
    assert (steps > -1e-6).all()
    assert fitted.log_likelihood[-1] > fitted.log_likelihood[0] + 0.1


def test_one_component_is_the_maximum_of_the_likelihood() -> None:
    counts, _ = population("medium-1", 400)

    def loss(log_alpha: np.ndarray) -> float:
        return -float(dirichlet_multinomial(np.exp(log_alpha), 100).logpmf(counts.numpy()).mean())

    direct = np.exp(minimize(loss, np.zeros(10), method="L-BFGS-B", options={"maxiter": 200}).x)
    fitted = MDM(10, 100, components=1, rounds=120, cohort=400).fit(federation(counts))
    np.testing.assert_allclose(fitted.mixture.alpha[0].numpy(), direct, rtol=5e-3)


@pytest.mark.parametrize(("name", "bound"), [("low-2", 0.05), ("medium-2", 0.04), ("high-3", 0.06)])
def test_known_parameters_are_recovered(name: str, bound: float) -> None:
    counts, truth = population(name, 5000)
    fitted = MDM(10, 100, components=truth.components).fit(federation(counts))
    errors = relative_error(fitted.mixture, truth)
    assert errors["alpha"] < bound
    assert errors["tau"] < 0.1
    assert fitted.notes == []


def test_a_random_start_is_far_worse_where_components_differ_in_concentration() -> None:
    """Why clients choose their component by concentration: Algorithm 5 as printed ends in a poor optimum on high-3."""
    counts, truth = population("high-3", 5000)
    asked = {start: federation(counts, seed=2) for start in ("random", "concentration")}
    fits = {start: MDM(10, 100, components=3, start=start).fit(one) for start, one in asked.items()}  # type: ignore[arg-type]
    errors = {start: relative_error(one.mixture, truth)["alpha"] for start, one in fits.items()}
    assert errors["random"] > 0.2 and errors["concentration"] < 0.05


def test_errors_do_not_depend_on_the_order_of_components() -> None:
    truth = known_mixture("medium-3")
    order = torch.tensor([2, 0, 1])
    turned = Mixture(truth.tau[order], truth.alpha[order] * 1.1, truth.pi[order], truth.edges)
    errors = relative_error(turned, truth)
    assert errors["alpha"] == pytest.approx(0.1)
    assert errors["tau"] == pytest.approx(0.0)


def test_the_block_does_not_change_the_result() -> None:
    counts, _ = population("medium-2", 200)
    settings = MDM(10, 100, rounds=5, cohort=50)
    whole, pieces = (settings.fit(federation(counts, block=block)).mixture for block in (4096, 7))
    torch.testing.assert_close(whole.alpha, pieces.alpha, rtol=1e-6, atol=1e-9)


def test_only_sums_leave_the_clients() -> None:
    counts, _ = population("medium-2", 200)
    asked = federation(counts)
    MDM(10, 100, rounds=2, cohort=50).fit(asked)
    assert {row["seen_as"] for row in asked.transcript.rows()} == {"sum"}


def test_sizes_are_fitted_too() -> None:
    rng = np.random.default_rng(0)
    sizes = rng.choice([5, 20], 600, p=[0.3, 0.7])
    counts = torch.from_numpy(rng.multinomial(sizes, rng.dirichlet(np.ones(4), 600)))
    mixture = MDM(4, 20, components=1, cohort=600).fit(federation(counts)).mixture
    assert float(mixture.pi[0, 4]) == pytest.approx(float((sizes == 5).mean()), abs=1e-3)
    drawn = mixture.sample(2000, rng).sum(1)
    assert set(drawn.tolist()) <= {*range(1, 21)}
    assert float((drawn == 20).mean()) == pytest.approx(0.7, abs=0.05)


def test_bins_of_sizes_cover_every_size_once() -> None:
    for largest, bins in ((1, 256), (100, 256), (3782, 256), (10, 3)):
        edges = size_edges(largest, bins)
        assert int(edges[0]) == 1 and int(edges[-1]) > largest and len(edges) - 1 <= bins
        assert bool((edges[1:] > edges[:-1]).all())


@pytest.mark.parametrize("clients", [100, 1000])
@pytest.mark.long
def test_validation_finds_three_components(clients: int) -> None:
    """T1 A.1.2."""
    counts, truth = population("selection", clients, seed=1)
    fresh = torch.from_numpy(truth.sample(1000, np.random.default_rng(2)))
    settings = MDM(5, 100, cohort=clients)
    choice = settings.choose(federation(counts), federation(fresh), range(1, 7))
    assert choice.fitted.mixture.components == 3
    assert choice.components == [1, 2, 3, 4, 5, 6]
    assert choice.below_best[0] > 5 * choice.error[0]


def test_scores_of_several_mixtures_equal_their_own_likelihoods() -> None:
    counts, truth = population("medium-3", 50)
    other = known_mixture("medium-1")
    score = MDM(10, 100).score(federation(counts), [other, truth])
    assert score.log_likelihood is not None
    own = [mixture.log_likelihood(counts) for mixture in (other, truth)]
    assert score.log_likelihood == pytest.approx([float(values.mean()) for values in own], rel=1e-9)
    difference = own[1] - own[0]
    assert float(score.error[0, 1]) == pytest.approx(float(difference.std(correction=0)) / math.sqrt(50), rel=1e-6)


# Privacy


def test_with_noise_the_ledger_stays_within_the_planned_budget() -> None:
    counts, truth = population("medium-2", 4000)
    settings = MDM(10, 100, rounds=20, cohort=400)
    noise = noise_for_budget(settings, 4000, [2], epsilon=4.0, delta=1e-5, validated=False)
    asked = federation(counts)
    fitted = replace(settings, noise=noise).fit(asked)
    spent = asked.ledger.epsilon(1e-5)
    assert spent == pytest.approx(4.0, rel=0.01) and spent <= 4.0 + 1e-6
    assert fitted.log_likelihood == []
    assert all(row["noise"] is not None for row in asked.transcript.rows())
    assert truth.components == fitted.mixture.components


def test_a_little_noise_changes_the_result_a_little() -> None:
    counts, truth = population("medium-1", 4000)
    settings = MDM(10, 100, components=1, cohort=2000, clip=40.0)
    noisy = replace(settings, noise=Gaussian(0.05)).fit(federation(counts)).mixture
    assert 1e-5 < relative_error(noisy, settings.fit(federation(counts)).mixture)["alpha"] < 0.05
    assert relative_error(noisy, truth)["alpha"] < 0.06


def test_without_noise_the_ledger_says_infinity() -> None:
    counts, _ = population("medium-1", 50)
    asked = federation(counts)
    MDM(10, 100, components=1, rounds=1, cohort=10).fit(asked)
    assert math.isinf(asked.ledger.epsilon(1e-5))


# Bad input


def assert_nothing_was_asked(asked: Federation) -> None:
    assert asked.transcript.rows() == [] and asked.traffic.total_up == 0


@pytest.mark.parametrize(
    ("counts", "message"),
    [
        ([[1, 2], [3, -4]], "client 1, category 1 is negative: -4"),
        ([[1.0, 2.5], [3.0, 4.0]], "client 0, category 1 is fractional: 2.5"),
        ([[1.0, math.nan], [3.0, 4.0]], "client 0, category 1 is not a finite number"),
        ([[1, 2], [0, 0]], r"1 clients have no data \(rows 1\); leave them out"),
        ([[1], [2]], "at least one client and two categories"),
    ],
)
def test_counts_that_are_none_are_refused(counts: list[list[float]], message: str) -> None:
    with pytest.raises(MDMError, match=message):
        histogram_clients(torch.tensor(counts))


def test_more_components_than_clients_are_refused_before_anything_is_asked() -> None:
    asked = federation(torch.tensor([[1, 2], [3, 4]]))
    with pytest.raises(MDMError, match=r"3 mixture components for 2 clients.*use at most 2"):
        MDM(2, 10, components=3).fit(asked)
    assert_nothing_was_asked(asked)


def test_a_client_above_the_bound_is_refused_where_histograms_are_made_and_never_answers() -> None:
    counts = torch.tensor([[1, 2], [30, 4], [2, 2], [4, 1]])
    with pytest.raises(MDMError, match="a client has 34 samples, but largest=10"):
        histogram_clients(counts, largest=10)
    asked = federation(counts)
    MDM(2, 10, components=1, rounds=1).fit(asked)
    assert {failure.client for failure in asked.failures} == {"1"}


def test_other_categories_are_refused() -> None:
    with pytest.raises(MDMError, match="have 2 categories, but categories=5"):
        MDM(5, 10).fit(federation(torch.tensor([[1, 2], [3, 4]])))


@pytest.mark.parametrize("components", [1, 3])
def test_clients_that_are_all_alike_end_at_the_largest_precision(components: int) -> None:
    """The best α_0 is infinite; it stops at a bound, and a note says so."""
    counts = torch.tensor([[10, 20, 70]]).repeat(40, 1)
    fitted = MDM(3, 100, components=components, rounds=10, cohort=40).fit(federation(counts))
    assert bool(torch.isfinite(fitted.mixture.alpha).all())
    precision = fitted.mixture.alpha.sum(1, keepdim=True)
    assert float(precision.max()) == pytest.approx(MOST_PRECISION)
    torch.testing.assert_close(
        (fitted.mixture.alpha / precision)[0], torch.tensor([0.1, 0.2, 0.7], dtype=torch.float64), rtol=1e-3, atol=1e-3
    )
    assert any("differ no more than samples of one distribution would" in note for note in fitted.notes)


def test_a_category_that_never_occurs_does_no_harm() -> None:
    counts, _ = population("medium-1", 100)
    counts = torch.cat([counts, torch.zeros(100, 1, dtype=torch.int64)], 1)
    mixture = MDM(11, 100, components=2, rounds=30, cohort=100).fit(federation(counts)).mixture
    assert bool(torch.isfinite(mixture.alpha).all())
    assert bool((mixture.alpha[:, -1] < 1e-3).all())


def test_settings_that_make_no_sense_are_refused() -> None:
    for wrong in ({"components": 0}, {"rounds": 0}, {"start": "best"}, {"clip": 0.0}, {"largest": 0}):
        with pytest.raises(MDMError, match=next(iter(wrong))):
            MDM(**{"categories": 3, "largest": 10, **wrong})  # type: ignore[arg-type]


def test_a_client_whose_counts_are_no_histogram_fails_in_every_ask_and_a_note_says_so() -> None:
    """Whatever is wrong with them, the others alone are fitted: a count beyond the table would read another's row."""
    counts, _ = population("medium-2", 20)
    found = []
    for row in (3 * counts[4], torch.tensor([-5, *counts[4, 1:].tolist()]), torch.zeros_like(counts[4])):
        wrong = counts.clone()
        wrong[4] = row
        asked = simulate(Clients.from_sizes(wrong, None, torch.ones(20)), block=8, threads=1)
        fitted = MDM(10, 100, rounds=2, cohort=20).fit(asked)
        assert [failure.client for failure in asked.failures] == ["4"]
        assert fitted.notes == [
            "left out: client 4: the array 'spread' is not finite (NaN or infinite); counts are whole numbers from 0 "
            "on, 1 to 100 (largest) in all"
        ]
        found.append(fitted.mixture.alpha)
        score = MDM(10, 100).score(asked.aside(), [fitted.mixture])
        assert score.log_likelihood is not None
        others = counts[torch.arange(20) != 4]
        assert score.log_likelihood[0] == pytest.approx(float(fitted.mixture.log_likelihood(others).mean()))
    assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2])
