"""Personal means and rates against oracles: closed forms, numerical integration, pooled moments, unbiased messages."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from scipy.integrate import quad
from scipy.stats import beta as beta_distribution
from torch import Tensor

from unalike import simulate
from unalike.analytics.estimation.means import BernoulliRates, GaussianMeans, gaussian_mse
from unalike.analytics.estimation.samples import (
    check_rows,
    counts_clients,
    flip_noise,
    folds,
    measure_error,
)
from unalike.analytics.estimation.shared import Channel, EstimationError, gain, mse
from unalike.core.client import Client, Clients
from unalike.core.draws import Draws, key
from unalike.core.federation import Federation, QuorumError
from unalike.core.release import Each
from unalike.core.task import Sent, send, task
from unalike.data import load
from unalike.privacy.ledger import Budget, BudgetExceeded
from unalike.privacy.mechanisms import Quantizer, RandomizedResponse


def federation(clients: Clients, seed: int = 0, **more: object) -> Federation:
    return simulate(clients, seed=seed, block=4096, **more)  # type: ignore[arg-type]


def uneven(seed: int = 0, clients: int = 40, dim: int = 3) -> Clients:
    """Clients of 2 to 9 samples around their own means."""
    random = np.random.default_rng(seed)
    sizes = random.integers(2, 10, clients)
    theta = 1.0 + 0.5 * random.standard_normal((clients, dim))
    x = np.repeat(theta, sizes, axis=0) + random.standard_normal((sizes.sum(), dim))
    return Clients.from_sizes(torch.from_numpy(x.astype(np.float32)), None, torch.from_numpy(sizes))


def means_of(clients: Clients) -> Tensor:
    return torch.stack([clients.rows(i)[0].double().mean(0) for i in range(len(clients))])


# Gaussian


@pytest.mark.parametrize("dim", [1, 4])
def test_gaussian_error_equals_its_closed_form(dim: int) -> None:
    population = load(f"gaussian-means:dim={dim},clients=40000", seed=0)
    found = GaussianMeans(sigma_theta=0.1, sigma_x=0.5).estimate(federation(population.train))
    error = mse(found.estimate, population.per_client["theta"])
    assert error == pytest.approx(gaussian_mse(dim, 15, 40_000, 0.1, 0.5), rel=0.02)
    assert mse(found.local, population.per_client["theta"]) == pytest.approx(dim * 0.25 / 15, rel=0.02)


def test_gaussian_estimates_are_the_formula_of_theorem_1_for_unequal_clients() -> None:
    clients = uneven()
    found = GaussianMeans(sigma_theta=0.5, sigma_x=1.0).estimate(federation(clients))
    means = means_of(clients)
    a = (0.25 / (0.25 + 1.0 / clients.size.double()))[:, None]
    torch.testing.assert_close(found.estimate, a * means + (1 - a) * means.mean(0))
    torch.testing.assert_close(found.local, means)


def test_unknown_deviations_are_the_pooled_moments() -> None:
    clients = uneven()
    found = GaussianMeans().estimate(federation(clients))
    means = means_of(clients)
    within = sum(float((clients.rows(i)[0].double() - means[i]).square().sum()) for i in range(len(clients)))
    noise = within / (3 * int((clients.size - 1).sum()))
    spread = float(means.var(0).mean()) - noise * float((1 / clients.size).mean())
    assert found.prior["sigma_x"] == pytest.approx(math.sqrt(noise), rel=1e-6)
    assert found.prior["sigma_theta"] == pytest.approx(math.sqrt(spread), rel=1e-6)


def test_known_gaussian_prior_gives_the_posterior_mean_and_sends_nothing() -> None:
    clients = Clients.from_sizes(torch.tensor([[0.3], [1.1], [0.2], [2.0], [1.5]]), None, torch.tensor([2, 3]))
    asked = federation(clients)
    found = GaussianMeans(mu=0.7, sigma_theta=0.4, sigma_x=0.9).estimate(asked)

    def posterior_mean(samples: list[float]) -> float:
        def density(theta: float) -> float:
            likelihood = math.exp(-sum((x - theta) ** 2 for x in samples) / (2 * 0.9**2))
            return likelihood * math.exp(-((theta - 0.7) ** 2) / (2 * 0.4**2))

        return float(quad(lambda t: t * density(t), -6, 8)[0] / quad(density, -6, 8)[0])

    expected = [[posterior_mean([0.3, 1.1])], [posterior_mean([0.2, 2.0, 1.5])]]
    np.testing.assert_allclose(found.estimate.numpy(), expected, rtol=1e-6)
    assert asked.traffic.total_up == 0
    assert asked.ledger.epsilon(1e-5) == 0


def test_private_means_cost_what_was_asked_and_are_accounted_at_the_client() -> None:
    clients = load("gaussian-means:clients=300", seed=0).train
    asked = federation(clients)
    private = GaussianMeans(sigma_theta=0.1, sigma_x=0.5, radius=0.5, channel=Channel(epsilon=0.8, delta=1e-5))
    found = private.estimate(asked)
    assert asked.ledger.epsilon(1e-5) == pytest.approx(0.8, rel=1e-3)
    bound = 0.5 + (0.1 + 0.5 / math.sqrt(15)) * math.sqrt(math.log(300**2 * 15))
    assert found.prior["bound"] == pytest.approx(bound)
    rows = [row for row in asked.transcript.rows() if row["noise"]]
    assert [(row["array"], row["seen_as"]) for row in rows] == [("mean", "individual")]


def test_the_papers_noise_is_its_formula_and_costs_less_than_it_claims() -> None:
    channel = Channel(epsilon=0.5, delta=1e-4, calibration="paper")
    assert channel.variance(2.0, 1) == pytest.approx((2.0 / 0.5) ** 2 * 8 * math.log(2 / 1e-4))
    assert Channel(epsilon=0.5, delta=1e-4).variance(2.0, 1) < channel.variance(2.0, 1)


def test_more_bits_and_more_epsilon_mean_less_error() -> None:
    population = load("gaussian-means:clients=2000", seed=0)
    known = {"sigma_theta": 0.1, "sigma_x": 0.5, "radius": 0.1}

    def error(channel: Channel) -> float:
        errors = []
        for seed in range(8):
            found = GaussianMeans(**known, channel=channel).estimate(federation(population.train, seed))  # type: ignore[arg-type]
            errors.append(mse(found.estimate, population.per_client["theta"]))
        return float(np.mean(errors))

    bare = error(Channel())
    assert bare <= error(Channel(bits=6)) * 1.001 <= error(Channel(bits=1)) * 1.002
    assert bare < error(Channel(epsilon=8.0)) < error(Channel(epsilon=0.5)) < 0.25 / 15 * 1.1


def test_a_budget_refuses_a_bare_message_before_it_is_sent() -> None:
    asked = federation(uneven(), budget=Budget(1.0, 1e-5))
    with pytest.raises(BudgetExceeded):
        GaussianMeans(sigma_theta=1.0, sigma_x=1.0).estimate(asked)
    assert asked.traffic.total_up == 0


# Messages


@task
def constant(client: Client, value: Tensor) -> Sent:
    return send(value=value)


@pytest.mark.parametrize("mechanism", [RandomizedResponse(1.0), Quantizer(1, 0.9), Quantizer(3, 0.9)])
@pytest.mark.parametrize("value", [0.0, 0.37, 0.8])
def test_messages_are_unbiased(mechanism: RandomizedResponse | Quantizer, value: float) -> None:
    clients = load("bernoulli:clients=20000,points=1", seed=0).train
    asked = federation(clients)
    sent = asked.everyone().ask(constant, into=Each("value", noise=mechanism), value=value)["value"].double()
    deviation = math.sqrt(float(mechanism.variance(torch.tensor(value))))
    assert float(sent.mean()) == pytest.approx(value, abs=4.5 * deviation / math.sqrt(len(sent)) + 1e-6)
    assert float(sent.std()) == pytest.approx(deviation, rel=0.05, abs=1e-6)
    private = isinstance(mechanism, RandomizedResponse)
    assert asked.ledger.epsilon(1e-9) == pytest.approx(1.0 if private else math.inf, rel=1e-3)


def test_a_randomizer_takes_no_bound_and_reports_one_number() -> None:
    with pytest.raises(ValueError, match="bounds its input by itself"):
        Each("value", clip=1.0, noise=Quantizer(2, 1.0))
    with pytest.raises(ValueError, match="one number is reported by one answer, got 2"):
        RandomizedResponse(1.0).randomize(torch.zeros(2), Draws(key(0)))


# Bernoulli


@pytest.mark.parametrize(("prior", "paper"), [("normal", 37.1), ("uniform", 12.0), ("3-spike", 24.3), ("beta", 34.0)])
@pytest.mark.parametrize("form", ["exact", "plug-in"])
def test_the_papers_bernoulli_gains(prior: str, paper: float, form: str) -> None:
    population = load(f"bernoulli:{prior}", seed=0)
    found = BernoulliRates(form=form).estimate(federation(population.train))  # type: ignore[arg-type]
    truth = population.per_client["p"]
    gained = gain(mse(found.estimate, truth), mse(found.local, truth))
    assert gained is not None and 100 * gained == pytest.approx(paper, abs=3.0)


def test_known_beta_prior_gives_the_posterior_mean_and_sends_nothing() -> None:
    asked = federation(counts_clients([0, 3, 7], [4, 5, 7]))
    found = BernoulliRates(alpha=2.0, beta=3.5).estimate(asked)

    def posterior_mean(ones: int, trials: int) -> float:
        def density(p: float) -> float:
            return float(p**ones * (1 - p) ** (trials - ones) * beta_distribution(2.0, 3.5).pdf(p))

        return float(quad(lambda p: p * density(p), 0, 1)[0] / quad(density, 0, 1)[0])

    expected = [[posterior_mean(0, 4)], [posterior_mean(3, 5)], [posterior_mean(7, 7)]]
    np.testing.assert_allclose(found.estimate.numpy(), expected, rtol=1e-6)
    assert asked.traffic.total_up == 0


@pytest.mark.parametrize("form", ["exact", "moments", "plug-in"])
def test_leave_one_out_is_what_a_client_gets_from_the_others_alone(form: str) -> None:
    random = np.random.default_rng(3)
    trials = random.integers(2, 9, 30)
    ones = random.binomial(trials, random.beta(2, 3, 30))
    found = BernoulliRates(form=form).estimate(federation(counts_clients(ones, trials)))  # type: ignore[arg-type]
    rate = ones / trials
    pair = ones * (ones - 1) / (trials * (trials - 1))
    for i in range(30):
        others = np.delete(rate, i)
        mu, variance = others.mean(), others.var(ddof=1)
        if form == "exact":
            spread = np.delete(pair, i).mean() - (mu**2 - variance / 30)
            precision = max(0.0, mu * (1 - mu) / spread - 1)
        else:
            precision = max(0.0, mu * (1 - mu) / variance - (form == "moments"))
        a = trials[i] / (trials[i] + precision)
        assert float(found.estimate[i, 0]) == pytest.approx(a * rate[i] + (1 - a) * mu, rel=1e-9)


def test_private_rates_are_epsilon_dp_and_exact_learns_the_spread_that_the_page_cannot() -> None:
    population = load("bernoulli:beta,clients=20000", seed=0)
    truth = population.per_client["p"]
    gains = {}
    for form in ("exact", "plug-in"):
        asked = federation(population.train)
        found = BernoulliRates(form=form, epsilon=2.0).estimate(asked)  # type: ignore[arg-type]
        gains[form] = gain(mse(found.estimate, truth), mse(found.local, truth))
        assert asked.ledger.epsilon(1e-9) == pytest.approx(2.0, rel=1e-3)
        weight = 14 / (14 + found.prior["precision"])
        assert (weight >= 14 / 15 - 1e-9) == (form == "plug-in")  # two values have no variance of their own
    assert gains["exact"] is not None and gains["exact"] > 0.2
    assert gains["plug-in"] is not None and gains["plug-in"] < 0.07


def test_exact_form_in_one_bit_is_nearly_as_good_as_bare() -> None:
    population = load("bernoulli:beta,clients=20000", seed=0)
    truth = population.per_client["p"]
    bare = BernoulliRates().estimate(federation(population.train))
    rounded = BernoulliRates(bits=1).estimate(federation(population.train))
    assert mse(rounded.estimate, truth) == pytest.approx(mse(bare.estimate, truth), rel=0.02)


def test_folds_leave_out_every_sample_once() -> None:
    clients = counts_clients([1, 2, 4, 0], [4, 4, 4, 4])
    parts = folds(clients, seed=0)
    left_out = torch.stack([part.held_out.x[part.held_out.start, 0] for part in parts if part.held_out is not None])
    assert left_out.sum(0).tolist() == [1, 2, 4, 0]
    for part in parts:
        assert part.clients.size.tolist() == [3, 3, 3, 3]
        asked, middle = simulate(part.parts), torch.full((4, 1), 0.5, dtype=torch.float64)
        assert measure_error(part, "mean", asked, middle, torch.arange(4)) == 0.25
    assert flip_noise(clients) == pytest.approx((3 / 16 + 4 / 16) / 4 * 4 / 3)


# Bad input: a clear message, and nothing leaves a client


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"epsilon": 0.0}, "epsilon must be a finite number above 0"),
        ({"epsilon": -1.0}, "epsilon must be a finite number above 0"),
        ({"bits": 0}, "bits must be a whole number of at least 1"),
        ({"bits": 2, "epsilon": 1.0}, "choose bits or epsilon"),
        ({"epsilon": 1.0, "delta": 1.0}, "delta"),
        ({"epsilon": 2.0, "calibration": "paper"}, "proven for epsilon below 1"),
    ],
)
def test_channels_that_make_no_sense(settings: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Channel(**settings)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"mu": 0.0}, "mu, sigma_theta and sigma_x together"),
        ({"sigma_x": 0.0}, "sigma_x=0.0; expected a number above 0"),
        ({"channel": Channel(bits=2)}, "deviations must be known"),
        ({"channel": Channel(bits=2), "sigma_x": 1.0, "sigma_theta": 1.0}, "give radius"),
    ],
)
def test_gaussian_settings_that_make_no_sense(settings: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        GaussianMeans(**settings)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("ones", "trials", "message"),
    [
        ([1, -1], [2, 2], "must not be negative"),
        ([1.5, 1], [2, 2], "must be whole numbers"),
        ([1, 0], [2, 0], "a client without data"),
        ([3, 1], [2, 2], "more successes than trials"),
        ([np.nan, 1], [2, 2], "missing or infinite"),
        (["a", "b"], [2, 2], "must be numbers"),
    ],
)
def test_bad_counts(ones: list[float], trials: list[float], message: str) -> None:
    with pytest.raises(EstimationError, match=message):
        counts_clients(ones, trials)


@pytest.mark.parametrize("value", [0.5, 2.0, -1.0])
def test_samples_that_are_no_coin_flips(value: float) -> None:
    x = torch.tensor([[0.0], [1.0], [value], [1.0]]).repeat(3, 1)
    clients = Clients.from_sizes(x, None, torch.full((6,), 2))
    with pytest.raises(EstimationError, match=f"client 1 has {value:g} in row 1 of its 2 .3 such rows"):
        check_rows(clients, "flips")
    asked = federation(clients)
    found = BernoulliRates().fit(asked)  # a client that does not check before does not answer
    assert {failure.client for failure in asked.failures} == {"1", "3", "5"}
    assert found.prior["mu"] == 0.5
    (note,) = [note for note in BernoulliRates().estimate(federation(clients)).notes if "left out" in note]
    assert (
        note.startswith("left out: 3 clients, 1, 3, 5: the array 'rate' is not finite") and "correct or remove" in note
    )


def test_too_few_clients_or_samples() -> None:
    with pytest.raises(EstimationError, match="at least 3 clients, got 2"):
        BernoulliRates().estimate(federation(counts_clients([1, 1], [2, 2])))
    with pytest.raises(EstimationError, match="client 1 has a single sample"):
        BernoulliRates().estimate(federation(counts_clients([1, 1, 2], [2, 1, 3])))
    with pytest.raises(EstimationError, match="at least 2 clients, got 1"):
        GaussianMeans().estimate(federation(uneven(clients=1)))
    single = Clients.from_sizes(torch.rand(5, 1), None, torch.ones(5))
    with pytest.raises(EstimationError, match="give sigma_x"):
        GaussianMeans().estimate(federation(single))
    with pytest.raises(ValueError, match="1 clients have no samples"):
        federation(Clients.from_sizes(torch.rand(3, 1), None, torch.tensor([3, 0])))
    unknown = Clients.from_sizes(torch.full((4, 1), torch.nan), None, torch.full((2,), 2))
    with pytest.raises(EstimationError, match="NaN or infinite"):
        check_rows(unknown)
    with pytest.raises(QuorumError, match="is not finite"):
        GaussianMeans().fit(federation(unknown))


@pytest.mark.parametrize("form", ["exact", "plug-in"])
def test_clients_that_are_all_alike_get_the_common_mean_and_are_told(form: str) -> None:
    found = BernoulliRates(form=form).estimate(federation(counts_clients([4] * 6, [4] * 6)))  # type: ignore[arg-type]
    assert found.estimate.flatten().tolist() == [1.0] * 6
    assert "do not differ" in found.notes[0]
    same = Clients.from_sizes(torch.tensor([[1.0], [3.0]]).repeat(5, 1), None, torch.full((5,), 2))
    alike = GaussianMeans().estimate(federation(same))
    torch.testing.assert_close(alike.estimate, torch.full((5, 1), 2.0, dtype=torch.float64))
    assert "do not differ" in alike.notes[0]
