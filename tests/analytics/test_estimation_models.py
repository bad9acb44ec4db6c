"""Personal regressions and mixture priors against oracles: Theorem 6, EM's monotony, autograd, integration."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from scipy.integrate import quad
from scipy.stats import multivariate_normal
from torch import Tensor

from unalike import simulate
from unalike.analytics.estimation.candidates import DiscreteMixture, spherical_em
from unalike.analytics.estimation.mixture import Clusters, MixturePrior, cluster, negative_log_prior_gradient
from unalike.analytics.estimation.private import Central
from unalike.analytics.estimation.regression import GaussianPrior, OneForAll, expected_mse
from unalike.analytics.estimation.samples import Samples, check_rows, measure_error
from unalike.analytics.estimation.shared import Channel, EstimationError, mse
from unalike.core.client import Clients
from unalike.core.federation import Federation
from unalike.data import load
from unalike.data.population import Population


def federation(clients: Clients, seed: int = 0, block: int = 4096) -> Federation:
    return simulate(clients, seed=seed, block=block)


def regressions(sizes: list[int], dim: int, seed: int = 0, classes: bool = False) -> Clients:
    random = np.random.default_rng(seed)
    theta = 0.5 + 0.7 * random.standard_normal((len(sizes), dim))
    x = random.standard_normal((sum(sizes), dim))
    y = (x * np.repeat(theta, sizes, axis=0)).sum(1) + 0.3 * random.standard_normal(len(x))
    target = torch.from_numpy((y > 0).astype(np.int64) if classes else y.astype(np.float32))
    return Clients.from_sizes(torch.from_numpy(x.astype(np.float32)), target, torch.tensor(sizes))


def data(clients: Clients, i: int) -> tuple[Tensor, Tensor]:
    x, y = clients.rows(i)
    assert y is not None
    return x.double(), y.double()


def population(options: str) -> Population:
    return load(f"linear-prior:{options}", seed=0)


# Linear, Gaussian prior


@pytest.mark.parametrize(
    "sizes", [[1, 2, 3, 2], [9, 4, 7, 12]]
)  # fewer and more rows than features: both Gram matrices
def test_known_prior_gives_theorem_6(sizes: list[int]) -> None:
    clients = regressions(sizes, dim=4)
    asked = federation(clients)
    found = GaussianPrior(mu=0.5, sigma_theta=0.7, sigma_x=0.3).estimate(asked)
    risks = []
    for i in range(len(sizes)):
        x, y = data(clients, i)
        inverse = torch.linalg.inv(torch.eye(4, dtype=torch.float64) / 0.49 + x.T @ x / 0.09)
        torch.testing.assert_close(found.estimate[i], inverse @ (x.T @ y / 0.09 + 0.5 / 0.49 * torch.ones(4).double()))
        torch.testing.assert_close(found.local[i], torch.linalg.pinv(x) @ y, rtol=1e-5, atol=1e-6)
        risks.append(float(inverse.trace()))
    assert expected_mse(asked) == pytest.approx(np.mean(risks))
    assert asked.traffic.total_up == 0


def test_the_error_is_what_theorem_6_says() -> None:
    made = population("dim=8,points=6,clients=4000,center=0,design=1.0")
    asked = federation(made.train)
    found = GaussianPrior(mu=0.0, sigma_theta=0.1, sigma_x=math.sqrt(0.05)).estimate(asked)
    assert mse(found.estimate, made.per_client["theta"]) == pytest.approx(expected_mse(asked), rel=0.03)


def test_em_raises_the_likelihood_which_is_that_of_the_pooled_model() -> None:
    clients = regressions([3, 8, 5, 2, 9, 6], dim=4)
    found = GaussianPrior(rounds=30, tolerance=0.0).estimate(federation(clients))
    assert np.all(np.diff(found.trace) > -1e-9)
    one_more = GaussianPrior(rounds=31, tolerance=0.0).estimate(federation(clients))
    mu, spread, noise = np.array(found.prior["mu"]), found.prior["sigma_theta"] ** 2, found.prior["sigma_x"] ** 2
    pooled = []
    for i in range(6):
        x, y = (value.numpy() for value in data(clients, i))
        covariance = spread * x @ x.T + noise * np.eye(len(y))
        pooled.append(multivariate_normal(x @ mu, covariance).logpdf(y))
    assert one_more.trace[-1] == pytest.approx(np.mean(pooled), rel=1e-9)


def test_em_finds_the_prior() -> None:
    made = population("dim=5,points=12,clients=3000,design=1.0,center=1.0")
    found = GaussianPrior().estimate(federation(made.train))
    assert found.prior["sigma_theta"] == pytest.approx(0.1, rel=0.05)
    assert found.prior["sigma_x"] == pytest.approx(math.sqrt(0.05), rel=0.02)
    np.testing.assert_allclose(found.prior["mu"], made.shared["mu"].numpy(), atol=0.02)


@pytest.mark.parametrize("family", ["linear", "logistic"])
def test_a_step_of_algorithms_2_and_3_is_the_gradient_of_the_joint_objective(family: str) -> None:
    clients = regressions([6, 5, 8], dim=3, classes=family == "logistic")
    settings = {"family": family, "solver": "gd", "lr": 1e-2, "lr_mean": 2e-2, "lr_variance": 1e-3, "floor": 1e-9}
    one, two = (GaussianPrior(rounds=rounds, **settings).estimate(federation(clients)) for rounds in (1, 2))  # type: ignore[arg-type]
    theta = one.estimate.clone().requires_grad_()
    mu = torch.tensor(one.prior["mu"], dtype=torch.float64, requires_grad=True)
    spread = torch.tensor(one.prior["sigma_theta"] ** 2, dtype=torch.float64, requires_grad=True)
    noise = torch.tensor(one.prior.get("sigma_x", 1.0) ** 2, dtype=torch.float64, requires_grad=True)
    objective = 1.5 * 3 * torch.log(spread) + (theta - mu).square().sum() / (2 * spread)
    for i in range(3):
        x, y = data(clients, i)
        if family == "linear":
            objective = objective + 0.5 * len(y) * torch.log(noise) + (y - x @ theta[i]).square().sum() / (2 * noise)
        else:
            objective = objective + (torch.nn.functional.softplus(x @ theta[i]) - y * (x @ theta[i])).sum()
    objective.backward()  # type: ignore[no-untyped-call]
    assert theta.grad is not None and mu.grad is not None and spread.grad is not None
    torch.testing.assert_close(two.estimate, (theta - 1e-2 * theta.grad).detach())
    expected = (mu - 2e-2 * mu.grad / 3).detach()  # the server takes the mean over clients
    torch.testing.assert_close(torch.tensor(two.prior["mu"], dtype=torch.float64), expected)
    assert two.prior["sigma_theta"] ** 2 == pytest.approx(float(spread.detach() - 1e-3 * spread.grad / 3))
    if family == "linear":
        assert noise.grad is not None
        assert two.prior["sigma_x"] ** 2 == pytest.approx(float(noise.detach() - 1e-3 * noise.grad / 3))


def test_private_regression_composes_its_rounds_and_needs_a_bound() -> None:
    clients = population("dim=3,points=8,clients=400,design=1.0,center=0.5").train
    asked = federation(clients)
    private = {"sigma_theta": 0.1, "sigma_x": math.sqrt(0.05), "rounds": 4}
    GaussianPrior(**private, channel=Channel(epsilon=2.0, delta=1e-5), bound=2.0).estimate(asked)  # type: ignore[arg-type]
    assert asked.ledger.epsilon(1e-5) == pytest.approx(2.0, rel=1e-3)
    with pytest.raises(EstimationError, match="and bound"):
        GaussianPrior(**private, channel=Channel(epsilon=2.0))  # type: ignore[arg-type]


@pytest.mark.parametrize("family", ["linear", "logistic"])
def test_the_baseline_for_all_is_the_pooled_fit(family: str) -> None:
    clients = regressions([6, 5, 8, 9], dim=3, classes=family == "logistic")
    clients = clients if family == "linear" else _flipped(clients)
    found = OneForAll(family).fit(federation(clients))  # type: ignore[arg-type]
    x, y = clients.x.double(), clients.y.double()  # type: ignore[union-attr]
    residual = x @ found - y if family == "linear" else torch.sigmoid(x @ found) - y
    torch.testing.assert_close(x.T @ residual, torch.zeros(3, dtype=torch.float64), atol=1e-6, rtol=0)
    steps = OneForAll(family, rounds=1, lr=0.5).fit(federation(clients))  # type: ignore[arg-type]
    means = []
    for i in range(4):
        xi, yi = data(clients, i)
        means.append(0.5 * xi.T @ (yi - (0.0 if family == "linear" else 0.5)) / len(yi))
    torch.testing.assert_close(steps, torch.stack(means).mean(0))


def _flipped(clients: Clients) -> Clients:
    """A few wrong labels, so that the pooled classes cannot be separated and a fit exists."""
    y = clients.y
    assert y is not None
    y = y.clone()
    y[::4] = 1 - y[::4]
    return Clients.from_sizes(clients.x, y, clients.size)


# Logistic, Gaussian prior


def test_logistic_posterior_mean_agrees_with_numerical_integration() -> None:
    x = torch.tensor([[0.5], [1.0], [-0.7], [1.4], [0.3], [-1.1], [0.9], [-0.2]])
    y = torch.tensor([1, 1, 0, 1, 0, 0, 1, 1])
    clients = Clients.from_sizes(x, y, torch.tensor([5, 3]))
    found = GaussianPrior(family="logistic", mu=0.3, sigma_theta=0.8).estimate(federation(clients))
    for i in range(2):
        xi, yi = (value.numpy() for value in data(clients, i))

        def density(t: float, xi: np.ndarray = xi[:, 0], yi: np.ndarray = yi) -> float:
            score = xi * t
            return float(np.exp((yi * score - np.logaddexp(0, score)).sum() - (t - 0.3) ** 2 / (2 * 0.64)))

        expected = quad(lambda t: t * density(t), -8, 9)[0] / quad(density, -8, 9)[0]
        assert float(found.estimate[i, 0]) == pytest.approx(expected, abs=0.02)


@pytest.mark.long
def test_logistic_prior_is_found_and_beats_both_baselines() -> None:
    made = population("response=logistic,dim=3,points=20,center=1.0,prior=0.25,design=1.0,clients=600")
    asked = federation(made.train)
    found = GaussianPrior(family="logistic", rounds=60).estimate(asked)
    truth = made.per_client["theta"]
    error = mse(found.estimate, truth)
    assert error < 0.5 * mse(found.local, truth)
    assert error < 0.9 * mse(OneForAll("logistic").fit(asked.aside()).expand(600, 3), truth)
    assert found.prior["sigma_theta"] == pytest.approx(0.5, rel=0.2)
    held_out = Samples(made.train, None, made.train)
    again, everyone = simulate(held_out.parts), torch.arange(600)
    errors = [
        measure_error(held_out, "logistic", again, theta.double(), everyone) for theta in (truth, torch.zeros(600, 3))
    ]
    assert errors[0] is not None and errors[1] is not None and errors[0] < errors[1]


# Mixtures


def test_known_candidates_give_the_posterior_mean_of_theorem_5() -> None:
    x = torch.tensor([[0.1, 0.0], [0.7, 0.2], [1.2, 1.0], [0.4, 0.9], [0.8, 0.1]])
    clients = Clients.from_sizes(x, None, torch.tensor([2, 3]))
    candidates, weights = torch.tensor([[0.0, 0.0], [1.0, 1.0], [0.5, 0.0]]), torch.tensor([0.5, 0.2, 0.3])
    asked = federation(clients)
    found = DiscreteMixture(3, 0.6, candidates=candidates, weights=weights).estimate(asked)
    for i in range(2):
        samples, _ = clients.rows(i)
        density = [
            float(p) * math.prod(multivariate_normal(mu.numpy(), 0.36).pdf(s.numpy()) for s in samples)
            for p, mu in zip(weights, candidates, strict=True)
        ]
        share = torch.tensor(density, dtype=torch.float32) / sum(density)
        torch.testing.assert_close(found.estimate[i].float(), share @ candidates)
    assert asked.traffic.total_up == 0


@pytest.mark.parametrize("once", [True, False])
@pytest.mark.parametrize("kind", ["means", "linear"])
def test_well_separated_candidates_are_found(once: bool, kind: str) -> None:
    if kind == "means":
        made = load("gaussian-means:dim=4,candidates=3,sigma_theta=3,sigma_x=1,points=6,clients=300", seed=0)
    else:
        made = population("dim=4,points=12,components=3,center=1.0,prior=1e-10,design=1.0,clients=300,noise=1.0")
    truth = made.per_client["theta"]
    found = DiscreteMixture(3, 1.0, model=kind, once=once, rounds=4).estimate(federation(made.train))  # type: ignore[arg-type]
    assert mse(found.estimate, truth) < 0.1 * mse(found.local, truth)


def test_em_on_one_message_raises_the_likelihood_and_is_near_the_known_prior() -> None:
    made = load("gaussian-means:dim=3,candidates=3,sigma_theta=0.8,sigma_x=1,points=5,clients=1500", seed=0)
    truth = made.per_client["theta"]
    found = DiscreteMixture(3, 1.0).estimate(federation(made.train))
    assert np.all(np.diff(found.trace) > -1e-9)
    candidates, counts = torch.unique(truth, dim=0, return_counts=True)  # type: ignore[no-untyped-call]
    known = DiscreteMixture(3, 1.0, candidates=candidates, weights=counts / 1500).estimate(federation(made.train))
    assert mse(found.estimate, truth) < 1.1 * mse(known.estimate, truth) < mse(found.local, truth)


def test_mixture_messages_are_accounted_whole() -> None:
    made = load("gaussian-means:dim=2,candidates=2,clients=200", seed=0)
    for once in (True, False):
        asked = federation(made.train)
        channel = Channel(epsilon=3.0, delta=1e-5)
        DiscreteMixture(2, 0.5, once=once, rounds=3, channel=channel, radius=0.5).estimate(asked)
        assert asked.ledger.epsilon(1e-5) == pytest.approx(3.0, rel=1e-3)


def test_the_regulariser_is_the_negative_log_density() -> None:
    """Algorithm 4's printed regulariser lost its signs; this one is a density that integrates to 1."""
    weights, variances = torch.tensor([0.3, 0.7]).double(), torch.tensor([0.5, 0.2]).double()
    centers = torch.tensor([[0.0, 1.0], [2.0, -1.0]]).double()
    theta = torch.tensor([0.7, 0.4], dtype=torch.float64, requires_grad=True)
    parts = [
        torch.log(weights[l])
        + torch.distributions.MultivariateNormal(centers[l], variances[l] * torch.eye(2).double()).log_prob(theta)  # type: ignore[no-untyped-call]
        for l in range(2)
    ]
    value = -torch.logsumexp(torch.stack(parts), 0)
    (expected,) = torch.autograd.grad(value, theta)
    torch.testing.assert_close(negative_log_prior_gradient(theta.detach(), weights, centers, variances), expected)


@pytest.mark.parametrize("family", ["linear", "logistic"])
def test_an_alternating_step_is_the_gradient_of_the_negative_log_prior(family: str) -> None:
    clients = regressions([6, 5, 8, 7], dim=2, classes=family == "logistic")
    settings = {"family": family, "sigma_x": 0.5, "solver": "gd", "lr": 1e-3, "lr_mean": 2e-2, "lr_variance": 1e-3}
    one, two = (
        MixturePrior(2, rounds=rounds, local_steps=1, corrected=False, **settings).estimate(federation(clients))  # type: ignore[arg-type]
        for rounds in (1, 2)
    )
    logit = torch.tensor(one.prior["weights"], dtype=torch.float64).log().requires_grad_()
    mu = torch.tensor(one.prior["centers"], dtype=torch.float64, requires_grad=True)
    spread = (torch.tensor(one.prior["sigma_theta"], dtype=torch.float64) ** 2).requires_grad_()

    def penalty(theta: Tensor) -> Tensor:
        density = [
            torch.softmax(logit, 0)[k]
            * torch.distributions.MultivariateNormal(mu[k], spread[k] * torch.eye(2, dtype=torch.float64))
            .log_prob(theta)
            .exp()
            for k in range(2)
        ]
        return -torch.log(density[0] + density[1])

    total = torch.zeros((), dtype=torch.float64)
    for i in range(4):
        x, y = data(clients, i)
        theta = one.estimate[i].clone().requires_grad_()
        logits = x @ theta
        loss = (y - logits).square().sum() / (2 * 0.5**2)
        if family == "logistic":
            loss = (torch.nn.functional.softplus(logits) - y * logits).sum()
        (slope,) = torch.autograd.grad(loss + penalty(theta), theta)
        torch.testing.assert_close(two.estimate[i], (theta - 1e-3 * slope).detach())
        total = total + penalty(two.estimate[i]) / 4
    by_logit, by_mu, by_spread = torch.autograd.grad(total, (logit, mu, spread))
    found = {name: torch.tensor(two.prior[name], dtype=torch.float64) for name in ("weights", "centers", "sigma_theta")}
    torch.testing.assert_close(found["weights"], torch.softmax(logit - by_logit, 0).detach())
    torch.testing.assert_close(found["centers"], (mu - 2e-2 * by_mu).detach())
    torch.testing.assert_close(found["sigma_theta"] ** 2, (spread - 1e-3 * by_spread).detach())


def test_alternating_gradient_steps_find_the_mixture_and_refuse_what_they_cannot_do() -> None:
    options = "dim=3,points=10,components=2,center=2.0,prior=0.05,design=1.0,noise=1.0,clients=300,response=linear"
    made = population(options)
    method = MixturePrior(2, "linear", 1.0, rounds=10, solver="gd")
    found = method.estimate(federation(made.train))
    assert mse(found.estimate, made.per_client["theta"]) < 0.7 * mse(found.local, made.per_client["theta"])
    with pytest.raises(EstimationError, match="diverged"):
        MixturePrior(2, "linear", 1.0, rounds=1, solver="gd", lr_mean=1e14).estimate(federation(made.train))
    with pytest.raises(EstimationError, match="go with solver 'clusters'"):
        MixturePrior(2, "linear", 1.0, solver="gd", central=Central(1.0, 1e-5), bound=1.0)


@pytest.mark.parametrize("family", ["linear", "logistic"])
@pytest.mark.long
def test_gaussian_mixture_prior_beats_one_gaussian_and_local(family: str) -> None:
    options = "dim=3,points=10,components=2,center=2.0,prior=0.05,design=1.0,noise=1.0,clients=400"
    made = population(f"{options},response={family}")
    truth = made.per_client["theta"]
    sigma_x = 1.0 if family == "linear" else None
    found = MixturePrior(2, family=family, sigma_x=sigma_x, rounds=10).estimate(federation(made.train))  # type: ignore[arg-type]
    single = GaussianPrior(family=family, rounds=40).estimate(federation(made.train))  # type: ignore[arg-type]
    assert mse(found.estimate, truth) < 0.9 * mse(single.estimate, truth)
    assert mse(found.estimate, truth) < 0.7 * mse(found.local, truth)


def test_the_block_does_not_change_an_estimate() -> None:
    clients = regressions([3, 8, 5, 2, 9, 6], dim=4)
    small, large = (
        MixturePrior(2, family="linear", sigma_x=0.3, rounds=3).estimate(federation(clients, block=b)) for b in (1, 64)
    )
    torch.testing.assert_close(small.estimate, large.estimate, rtol=1e-7, atol=1e-9)


# Bad input


def test_more_components_than_clients_is_refused_and_nothing_is_sent() -> None:
    for estimator in (DiscreteMixture(5, 1.0, model="linear"), MixturePrior(5, family="logistic")):
        asked = federation(regressions([3, 3, 3], dim=2, classes=isinstance(estimator, MixturePrior)))
        with pytest.raises(EstimationError, match="5 mixture components for 3 clients"):
            estimator.estimate(asked)
        assert asked.traffic.total_up == 0


def test_a_constant_feature_gives_least_norm_locally_and_a_proper_posterior() -> None:
    clients = regressions([6, 7, 8, 5], dim=3)
    x = torch.cat([clients.x, torch.ones(26, 1), torch.ones(26, 1)], 1)  # the same constant twice: XᵀX is singular
    clients = Clients.from_sizes(x, clients.y, clients.size)
    found = GaussianPrior(rounds=10).estimate(federation(clients))
    for i in range(4):
        xi, yi = data(clients, i)
        torch.testing.assert_close(found.local[i], torch.linalg.pinv(xi, rtol=1e-6) @ yi, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(found.estimate[:, 3], found.estimate[:, 4])
    assert bool(found.estimate.isfinite().all())
    zero = Clients.from_sizes(torch.zeros(8, 2), torch.ones(8), torch.tensor([4, 4]))
    with pytest.raises(EstimationError, match="nothing to regress"):
        GaussianPrior().estimate(federation(zero))


def test_clients_that_are_all_alike() -> None:
    one = regressions([6], dim=2)
    assert one.y is not None
    same = Clients.from_sizes(one.x.repeat(5, 1), one.y.repeat(5), torch.full((5,), 6))
    found = GaussianPrior(rounds=100, tolerance=0.0).estimate(federation(same))
    spread = found.estimate - found.estimate[0]
    assert float(spread.abs().max()) < 1e-9
    mixed = DiscreteMixture(2, 0.3, model="linear").estimate(federation(same))
    assert "some components are empty" in mixed.notes[0]
    torch.testing.assert_close(mixed.estimate, mixed.local, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize(
    ("clients", "family", "message"),
    [
        (Clients.from_sizes(torch.rand(6, 2), None, torch.tensor([3, 3])), "linear", "needs a target for every row"),
        (regressions([3, 3], 2), "logistic", "needs targets 0 and 1"),
        (
            Clients.from_sizes(torch.rand(6, 1, 2, 2), torch.rand(6), torch.tensor([3, 3])),
            "linear",
            "columns of numbers",
        ),
        (regressions([3], 2), "linear", "at least 2 clients, got 1"),
    ],
)
def test_data_that_cannot_be_regressed(clients: Clients, family: str, message: str) -> None:
    asked = federation(clients)
    with pytest.raises(EstimationError, match=message):
        check_rows(clients, family)  # type: ignore[arg-type]
        GaussianPrior(family=family).estimate(asked)  # type: ignore[arg-type]
    assert asked.traffic.total_up == 0


@pytest.mark.parametrize("solver", ["em", "gd"])
def test_a_client_whose_targets_are_no_classes_does_not_answer(solver: str) -> None:
    clients = regressions([3, 3, 3, 3], 2, classes=True)
    assert clients.y is not None
    y = clients.y.to(torch.float32)
    y[4] = 0.5
    asked = federation(Clients.from_sizes(clients.x, y, clients.size))
    GaussianPrior(family="logistic", rounds=2, solver=solver).fit(asked)  # type: ignore[arg-type]
    assert {failure.client for failure in asked.failures} == {"1"}


def test_settings_that_make_no_sense() -> None:
    with pytest.raises(EstimationError, match="mu, sigma_theta and"):
        GaussianPrior(mu=0.0)
    with pytest.raises(ValueError, match="solver='newton'; expected one of em, gd"):
        GaussianPrior(solver="newton")  # type: ignore[arg-type]
    with pytest.raises(EstimationError, match="needs sigma_x"):
        MixturePrior(2, family="linear")
    with pytest.raises(EstimationError, match="candidates and weights together"):
        DiscreteMixture(1, 1.0, weights=torch.ones(1))
    with pytest.raises(EstimationError, match="probabilities that add up to 1"):
        known = DiscreteMixture(1, 1.0, candidates=torch.zeros(1, 2), weights=torch.full((1,), 0.5), model="linear")
        known.estimate(federation(regressions([3, 3], dim=2)))
    with pytest.raises(EstimationError, match="diverged"):
        wild = GaussianPrior(solver="gd", lr=1e3, lr_mean=1.0, sigma_theta=1.0, sigma_x=1.0, rounds=50)
        wild.estimate(federation(regressions([3, 3], dim=2)))


def test_clusters_and_em_keep_the_points_mean() -> None:
    points = torch.randn(60, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    start = cluster(points, 3, seed=0)
    assert isinstance(start, Clusters)
    centers, weights, _ = spherical_em(points, start, steps=50)
    torch.testing.assert_close(weights @ centers, points.mean(0))
