"""Rounds of MDM, k-FED and FedDP-Lloyds written out in NumPy, and the noise that their releases really get.

No two roles in a fixture share a number, an order or a size.
"""

from __future__ import annotations

import importlib
import inspect
import itertools
import math
import pkgutil
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from scipy.special import digamma, gammaln
from torch import Tensor

from unalike import analytics, simulate
from unalike.analytics.estimation.candidates import DiscreteMixture
from unalike.analytics.estimation.mixture import MixturePrior
from unalike.analytics.estimation.regression import GaussianPrior
from unalike.analytics.estimation.shared import Estimator
from unalike.analytics.estimation.study import BernoulliRates, GaussianMeans, estimate, read_samples
from unalike.analytics.kmeans.algorithm import FedDPKMeans
from unalike.analytics.kmeans.baselines import KFed
from unalike.analytics.kmeans.budget import BudgetSplit, KMeansPrivacy, StepNoise
from unalike.analytics.kmeans.server import ServerRun
from unalike.analytics.mdm.algorithm import MDM
from unalike.analytics.mdm.counts import histogram_clients
from unalike.core.client import Clients
from unalike.data.partition.mixture import Mixture
from unalike.privacy.ledger import Budget
from unalike.privacy.mechanisms import AdditiveNoise, Gaussian, Laplace

Array = NDArray[np.float64]
LARGEST = 11
# Unequal sizes, so that π matters: small clients are concentrated, large ones are not.
COUNTS = np.array([[4, 0, 0], [0, 3, 1], [2, 3, 4], [4, 3, 3], [3, 5, 2], [0, 0, 2], [1, 4, 6], [5, 1, 0]], np.int64)


def start_by_numpy(
    component: NDArray[np.int64], components: int, category: int | None = None
) -> tuple[Array, Array, Array]:
    """Algorithm 5: τ, A and Π from the moments of each component's clients (size 1 to 11, one bin each)."""
    alpha, pi = [], []
    shares = COUNTS / COUNTS.sum(1, keepdims=True)
    for k in range(components):
        own = shares[component == k]
        first, second = own.mean(0), (own**2).mean(0)
        first = (first + 1e-6) / (first + 1e-6).sum()
        j = first.argmax() if category is None else category
        precision = np.clip((first[j] - second[j]) / max(second[j] - first[j] ** 2, 1e-9), 1e-2, 1e4)
        alpha.append(np.maximum(precision * first, 1e-4))
        sizes = np.bincount(COUNTS[component == k].sum(1), minlength=LARGEST + 1)[1:] + 0.01 / LARGEST
        pi.append(sizes / sizes.sum())
    return np.full(components, 1 / components), np.stack(alpha), np.stack(pi)


def round_by_numpy(tau: Array, alpha: Array, pi: Array) -> tuple[Array, Array, Array]:
    """Algorithm 6 with everybody in the cohort."""
    weight = np.zeros(len(tau))
    sizes = np.zeros_like(pi)
    up, down = np.zeros_like(alpha), np.zeros(len(tau))
    for c in COUNTS:
        m = c.sum()
        log_joint = np.log(tau) + np.log(pi[:, m - 1])  # τ_k π_km p(c | m, α_k)
        for k, a in enumerate(alpha):
            log_joint[k] += gammaln(c + a).sum() - gammaln(a).sum() - gammaln(m + a.sum()) + gammaln(a.sum())
        omega = np.exp(log_joint - np.logaddexp.reduce(log_joint))
        weight += omega
        sizes[:, m - 1] += omega
        up += omega[:, None] * (digamma(c + alpha) - digamma(alpha))
        down += omega * (digamma(m + alpha.sum(1)) - digamma(alpha.sum(1)))
    new_tau, new_pi = weight + 0.01 / len(tau), sizes + 0.01 / LARGEST
    return new_tau / new_tau.sum(), alpha * up / down[:, None], new_pi / new_pi.sum(1, keepdims=True)


def mdm_federation(counts: NDArray[np.int64] = COUNTS, seed: int = 0):  # type: ignore[no-untyped-def]
    return simulate(histogram_clients(counts), seed=seed)


def test_mdm_start_and_rounds() -> None:
    """Components by concentration: the more concentrated half starts in the second one."""
    method = MDM(3, LARGEST, components=2, rounds=3, cohort=len(COUNTS))
    fitted = method.fit(mdm_federation())
    spread = ((COUNTS / COUNTS.sum(1, keepdims=True)) ** 2).sum(1)
    now = start_by_numpy((spread > np.median(spread)).astype(np.int64), 2)
    for step in fitted.path:
        for name, expected in zip(("tau", "alpha", "pi"), now, strict=True):
            np.testing.assert_allclose(getattr(step, name).numpy(), expected, rtol=2e-5, atol=1e-7, err_msg=name)
        now = round_by_numpy(*now)


def test_mdm_random_start_is_algorithm_5_as_printed() -> None:
    """With one component nothing is random: moments of category 1, which here is not the largest."""
    counts = COUNTS[:, [1, 2, 0]]
    fitted = MDM(3, LARGEST, components=1, rounds=1, cohort=len(counts), start="random").fit(mdm_federation(counts))
    alpha = start_by_numpy(np.zeros(len(COUNTS), np.int64), 1, category=1)[1][0, [1, 2, 0]]
    assert alpha.argmax() != 0
    np.testing.assert_allclose(fitted.path[0].alpha[0].numpy(), alpha, rtol=2e-5)


def test_mdm_tells_components_apart_by_their_sizes_alone() -> None:
    """Two components of the same α: only ln π_km says which of them a client is of."""
    pi = torch.full((2, LARGEST), 0.01, dtype=torch.float64)
    pi[0, :4], pi[1, 4:] = 1.0, 1.0
    pi /= pi.sum(1, keepdim=True)
    alpha = torch.tensor([[1.3, 0.7, 2.1]] * 2, dtype=torch.float64)
    tau = torch.tensor([0.35, 0.65], dtype=torch.float64)
    method = MDM(3, LARGEST, components=2)
    asked = mdm_federation().everyone()
    found = asked.ask(method.expectation, tau=tau[None], alpha=alpha[None], pi=pi[None])["membership"][0, :, 0]
    joint = tau.numpy()[:, None] * pi.numpy()[:, COUNTS.sum(1) - 1]
    np.testing.assert_allclose(found.numpy(), (joint / joint.sum(0)).sum(1), rtol=1e-5)


def test_simulated_clients_have_the_sizes_of_their_own_component() -> None:
    """Component 0 has clients of 2 samples in category 0; component 1 has clients of 9 in category 1."""
    pi = torch.zeros(2, LARGEST, dtype=torch.float64)
    pi[0, 1], pi[1, 8] = 1.0, 1.0
    alpha = torch.tensor([[900.0, 1e-3], [1e-3, 700.0]], dtype=torch.float64)
    mixture = Mixture(torch.tensor([0.3, 0.7], dtype=torch.float64), alpha, pi, torch.arange(1, LARGEST + 2))
    drawn = mixture.sample(400, np.random.default_rng(5))
    first = drawn[:, 0] > drawn[:, 1]
    assert set(drawn[first].sum(1)) == {2} and set(drawn[~first].sum(1)) == {9}
    assert 0.2 < first.mean() < 0.4


# The noise that arrives


def local_spread(method: MDM, name: str, counts: NDArray[np.int64]) -> float:
    """Deviation of the noise on one number of a client's message."""
    same = np.repeat(counts, 3000, 0)
    thresholds, components = torch.full((1, 1), 0.4, dtype=torch.float64), torch.tensor([2])
    cohort = mdm_federation(same).everyone()
    return float(cohort.ask(method.moments, thresholds=thresholds, components=components)[name].double().std(0).mean())


def moments_of(counts: Array, component: int) -> Array:
    """What Algorithm 5 has a client send: 1, its size, p and p² in its component's row."""
    p = counts / counts.sum()
    message = np.zeros((2, 1 + LARGEST + 2 * len(p)))
    message[component] = np.concatenate([[1.0], np.eye(LARGEST)[int(counts.sum()) - 1], p, p**2])
    return message


def test_local_noise_of_mdm_hides_any_two_clients_from_each_other() -> None:
    """Sensitivity by brute force: the largest distance between two clients' messages."""
    extreme = [np.array(c, dtype=float) for c in ([7, 0, 0], [0, 0, 2], [1, 1, 1], [0, 11, 0])]
    messages = [moments_of(c, k) for c, k in itertools.product(extreme, (0, 1))]
    widest = max(float(np.linalg.norm(a - b)) for a, b in itertools.combinations(messages, 2))
    assert widest == pytest.approx(2 * math.sqrt(2))
    method = MDM(3, LARGEST, components=2, rounds=1, noise=Gaussian(1.7), local=True)
    found = local_spread(method, "moments", np.array([[3, 1, 2]]))
    assert found == pytest.approx(1.7 * widest, rel=0.03)


def test_gains_of_mdm_may_have_either_sign() -> None:
    """Two clients' clipped gains may point in opposite directions, so they differ by twice the clip."""
    method = MDM(3, LARGEST, noise=Gaussian(0.9), local=True, gain_clip=6.5)
    alpha = torch.tensor([[[1.0, 2.0, 3.0]], [[40.0, 0.5, 0.5]]], dtype=torch.float64)
    mixtures = {"tau": torch.ones(2, 1, dtype=torch.float64), "alpha": alpha,
                "pi": torch.full((2, 1, LARGEST), 1 / LARGEST, dtype=torch.float64)}  # fmt: skip
    cohort = mdm_federation(np.repeat(np.array([[2, 3, 1]]), 4000, 0)).everyone()
    gains = cohort.ask(method.validation, **mixtures)["gain"].double()  # type: ignore[arg-type]
    assert float(gains.std(0).mean()) == pytest.approx(0.9 * 2 * 6.5, rel=0.03)


@pytest.mark.parametrize("secure", [False, True])
@pytest.mark.parametrize("unit", ["point", "client"])
def test_counts_of_feddp_lloyds_get_the_noise_that_the_ledger_knows(unit: str, secure: bool) -> None:
    """Sums and counts, over many answers to the same question: one point (or client) changes a count by 1 (or B)."""
    epsilon, sigma, bound = 0.8, 2.5, 5.0
    noise = StepNoise(Gaussian(1.1), Laplace(1.9), Gaussian(sigma), Laplace(epsilon))
    privacy = KMeansPrivacy(1.0, 1e-5, unit)  # type: ignore[arg-type]
    method = FedDPKMeans(k=3, privacy=privacy, noise=noise, client_points=4, secure=secure, radius=7.0)
    x = torch.from_numpy(np.random.default_rng(3).standard_normal((12, 2)).astype(np.float32))
    clients = Clients.from_sizes(x, None, torch.tensor([5, 4, 3]))
    federation = simulate(clients, seed=11)
    given = {"origin": torch.zeros(2), "radius": 7.0, "centers": torch.tensor([[0.0, 0.0], [1.0, 0.4], [-0.7, 1.0]])}
    unit_of = {"scale": bound, "count_scale": bound} if unit == "client" or secure else {"scale": 1.0, "count_scale": 1}
    counts = []
    for _ in range(40 if secure else 120):
        federation.begin_round(federation.round + 1)
        one = method.cluster_sums.releases()[1] if secure else None
        found = federation.everyone().ask(method.cluster_sums, into=one, **given, **unit_of)  # type: ignore[arg-type]
        counts.append(found["counts"].double() * unit_of["count_scale"])
    spread = float(torch.stack(counts).std(0).square().mean().sqrt())
    change = bound if unit == "client" else 1.0
    assert spread == pytest.approx(math.sqrt(2) * change / epsilon, rel=0.3)


def test_k_fed() -> None:
    """Clients' own clusters are clear, so their centres are group means; the server weighs them by their points."""
    groups = np.array([[0.0, 0.0], [9.0, 1.0], [2.0, 11.0]])
    random = np.random.default_rng(8)
    sizes = np.array([[2, 5, 3], [6, 1, 4], [3, 2, 7], [1, 4, 2]])  # points of each client in each group
    rows, owner, members = [], [], []
    for client, of_client in enumerate(sizes):
        for group, count in enumerate(of_client):
            points = groups[group] + 0.3 * client + 0.1 * random.standard_normal((count, 2))
            rows.append(points)
            owner += [client] * count
            members += [group] * count
    x = np.concatenate(rows).astype(np.float32)
    clients = Clients.from_sizes(torch.from_numpy(x), None, torch.from_numpy(sizes.sum(1)))
    found = KFed(3).fit(simulate(clients, seed=2)).numpy()
    expected = np.stack([x[np.array(members) == group].mean(0) for group in range(3)])
    order = np.linalg.norm(found[:, None] - expected, axis=2).argmin(0)
    np.testing.assert_allclose(found[order], expected, atol=1e-4)


def lloyd_by_numpy(points: Array, centers: Array, radius: float) -> Array:
    """Algorithm 12 without noise: points clipped to Δ, then the mean of those nearest to each centre."""
    points = points * np.minimum(1.0, radius / np.linalg.norm(points, axis=1))[:, None]
    nearest = ((points[:, None] - centers) ** 2).sum(2).argmin(1)
    return np.stack([points[nearest == j].mean(0) for j in range(len(centers))])


def test_feddp_lloyds() -> None:
    random = np.random.default_rng(4)
    points = random.standard_normal((31, 3)) + 2.5 * random.integers(0, 2, (31, 3))
    start = np.array([[0.1, 0.2, 0.0], [2.0, 2.6, 2.2], [2.4, 0.0, 1.0]])
    clients = Clients.from_sizes(torch.from_numpy(points.astype(np.float32)), None, torch.tensor([9, 2, 13, 7]))
    method = FedDPKMeans(k=3, steps=2, radius=2.9, center=False, initialize=False)
    found = method.fit(simulate(clients), torch.from_numpy(start).float(), torch.from_numpy(start)).centers
    expected = lloyd_by_numpy(points, lloyd_by_numpy(points, start, 2.9), 2.9)
    np.testing.assert_allclose(found.numpy(), expected, rtol=1e-4, atol=1e-5)


# As printed: ε₄ of Algorithm 12, the margin of Algorithms 13 and 15, the threshold of Algorithm 14


def test_lloyd_steps_have_an_epsilon_of_their_own() -> None:
    """Shares .3 and .1 for all three Lloyd steps: each gets a third, and everything together keeps to (ε, δ)."""
    split = BudgetSplit(0.2, 0.15, 0.45, 0.2, 0.3, 0.12)
    privacy = KMeansPrivacy(1.3, 1e-5, split=split)
    plan = FedDPKMeans(k=2, privacy=privacy, steps=3).plan
    assert isinstance(plan.counts, Laplace) and isinstance(plan.lloyd_counts, Laplace)
    assert plan.lloyd_counts.epsilon / plan.counts.epsilon == pytest.approx(0.12 / 3 / 0.2)
    assert isinstance(plan.weights, Laplace) and plan.counts.epsilon / plan.weights.epsilon == pytest.approx(0.2 / 0.15)
    x = torch.from_numpy(np.random.default_rng(0).standard_normal((60, 2)).astype(np.float32))
    federation = simulate(Clients.from_sizes(x, None, torch.tensor([25, 35])), budget=Budget(1.3, 1e-5))
    FedDPKMeans(k=2, privacy=privacy, steps=3).fit(federation, x[:20])
    assert 1.25 < federation.ledger.epsilon(1e-5) <= 1.3
    asked = [row for row in federation.transcript.rows() if row["array"] == "counts"]
    assert [row["task"].split(".")[-1] for row in asked] == ["cluster_sums", "lloyd_sums"]


def test_a_lloyd_step_has_the_noise_of_epsilon_4() -> None:
    """Step 3 nearly without noise, Lloyd steps with a lot: 400 answers about the same centres."""
    noise = StepNoise(Gaussian(1e-6), Laplace(1e6), Gaussian(1e-6), Laplace(1e6), Gaussian(1.5), Laplace(0.25))
    method = FedDPKMeans(k=2, privacy=KMeansPrivacy(1.0), noise=noise, radius=3.0, steps=1)
    clients = Clients.from_sizes(torch.zeros(7, 2), None, torch.tensor([3, 4]))
    federation = simulate(clients, seed=6)
    given = {"origin": torch.zeros(2), "radius": 3.0, "centers": torch.eye(2), "scale": 1.0, "count_scale": 1.0}
    found = []
    for _ in range(200):
        federation.begin_round(federation.round + 1)
        found.append(federation.everyone().ask(method.lloyd_sums, **given))  # type: ignore[arg-type]
    assert float(torch.stack([one["counts"] for one in found]).std(0).mean()) == pytest.approx(
        math.sqrt(2) / 0.25, rel=0.2
    )
    assert float(torch.stack([one["sums"] for one in found]).std(0).mean()) == pytest.approx(1.5 * 3.0, rel=0.15)


def test_a_margin_leaves_points_between_centres_out_of_step_3() -> None:
    """Algorithm 13, part 2: S_j has the points at most a third as far from ν_j as from any other, in the subspace."""
    random = np.random.default_rng(9)
    points, centers = random.uniform(-3, 3, (37, 3)), np.array([[-2.0, 0.0], [1.5, 0.7], [0.2, -2.4]])
    basis = np.linalg.qr(random.standard_normal((3, 2)))[0]
    apart = np.linalg.norm((points @ basis)[:, None] - centers, axis=2)
    method = FedDPKMeans(k=3, margin=1 / 3, radius=50.0)
    clients = Clients.from_sizes(torch.from_numpy(points.astype(np.float32)), None, torch.tensor([11, 6, 20]))
    given = {"origin": torch.zeros(3), "radius": 50.0, "scale": 1.0, "count_scale": 1.0,
             "centers": torch.from_numpy(centers).float(), "basis": torch.from_numpy(basis).float()}  # fmt: skip
    found = simulate(clients).everyone().ask(method.cluster_sums, **given)  # type: ignore[arg-type]
    for j in range(3):
        others = np.delete(apart, j, axis=1)
        own = (apart[:, j, None] <= others / 3).all(1)
        assert 0 < own.sum() < (apart.argmin(1) == j).sum()
        assert float(found["counts"][j]) == own.sum()
        np.testing.assert_allclose(found["sums"][j].numpy(), points[own].sum(0), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("threshold", "enough"), [("noise", 2 * 4 * math.log(5 * 6)), ("printed", 2 * 4 / 5 * math.log(900))]
)
def test_algorithm_14_freezes_points_of_enough_weight(
    threshold: str, enough: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Six server points, 900 client points, Laplace noise of scale 4 = T/ε in each of 5 rounds."""
    server = torch.arange(12.0).reshape(6, 2)
    weights = torch.tensor([enough - 0.5, enough + 0.5, 0.0, enough + 30, 1.0, enough - 3])

    def weigh(run: ServerRun, basis: Tensor | None, points: Tensor) -> Tensor:
        return weights[torch.cdist(points, server).argmin(1)]

    monkeypatch.setattr(ServerRun, "_weigh", weigh)
    noise = StepNoise(weights=Laplace(0.25))
    method = FedDPKMeans(k=2, privacy=KMeansPrivacy(1.0), noise=noise, simplify=5, threshold=threshold)  # type: ignore[arg-type]
    clients = Clients.from_sizes(torch.zeros(900, 2), None, torch.tensor([400, 500]))
    run = ServerRun(method, simulate(clients), torch.zeros(2), 9.0, server)
    assert run._simplify(torch.eye(2), 2).tolist() == [1, 3]


def test_every_query_has_noise_where_there_is_privacy() -> None:
    plan = FedDPKMeans(k=2, privacy=KMeansPrivacy(1.0), steps=1).plan
    assert all(isinstance(one, AdditiveNoise) for one in (plan.gram, plan.weights, plan.sums, plan.counts))


# Numbers of theorems, and standard errors


def test_bounds_of_gaussian_means_beside_the_estimate() -> None:
    """(46) is the posterior variance, 1/(n/σx² + 1/σθ²); (47) adds what the m clients' common mean leaves in doubt."""
    samples = read_samples("gaussian-means:clients=400,points=7,dim=3", seed=2)
    known = estimate(GaussianMeans(0.0, 0.3, 0.8), samples, simulate)
    assert known.theory["lower_bound"] == pytest.approx(3 / (7 / 0.64 + 1 / 0.09))
    learned = estimate(GaussianMeans(sigma_theta=0.3, sigma_x=0.8), samples, simulate)
    expected = 3 * (0.09 * 0.64 + 0.64**2 / (400 * 7)) / (7 * 0.09 + 0.64)
    assert learned.theory["lower_bound"] == pytest.approx(expected)


def test_the_risk_of_known_rates_is_what_a_million_coins_have() -> None:
    """§5.2: the squared error of the posterior mean under Beta(2, 5), n = 6 flips, by Monte Carlo."""
    random = np.random.default_rng(1)
    p = random.beta(2, 5, 1_000_000)
    error = ((2 + random.binomial(6, p)) / (7 + 6) - p) ** 2
    samples = read_samples("bernoulli:beta,clients=50,points=6")
    found = estimate(BernoulliRates(2.0, 5.0), samples, simulate)
    assert found.theory["expected_mse"] == pytest.approx(error.mean(), rel=5e-3)


def test_the_bounds_of_theorems_3_and_4_are_as_printed() -> None:
    samples = read_samples("bernoulli:beta,clients=300,points=9")
    found = estimate(BernoulliRates(form="plug-in"), samples, simulate)
    mu, total = found.estimates.prior["mu"], found.estimates.prior["precision"]
    alpha, beta = mu * total, (1 - mu) * total
    a = 9 / (total + 9)
    noise = alpha * beta / (9 * (alpha + beta) * (alpha + beta + 1))
    spread = alpha * beta / ((alpha + beta) ** 2 * (alpha + beta + 1))
    doubt = math.log(4 * 300**2 * 9) / 299
    assert found.theory["theorem_3_bound"] == pytest.approx(a**2 * noise + (1 - a) ** 2 * (spread + 3 * doubt))
    assert found.theory["theorem_3_bound"] > found.errors["personal"]
    private = estimate(BernoulliRates(epsilon=1.5), samples, simulate)
    mu, total = private.estimates.prior["mu"], private.estimates.prior["precision"]
    a, spread = 9 / (total + 9), mu * (1 - mu) / (total + 1)
    e = math.exp(1.5)
    doubt *= (e + 1) ** 2 / (3 * (e - 1) ** 2)
    bound = a**2 * mu * (1 - mu) * total / (9 * (total + 1)) + (1 - a) ** 2 * (spread + doubt)
    assert private.theory["theorem_4_bound"] == pytest.approx(bound)


MIXED = "linear-prior:dim=3,points=12,components=2,center=1,prior=0.05,design=1,clients=500"


@pytest.mark.parametrize(
    ("estimator", "data", "least", "most"),
    [
        (GaussianMeans(), "gaussian-means:clients=800,points=9,dim=2", 0.95, 1.05),
        (BernoulliRates(), "bernoulli:beta,clients=3000,points=12", 0.93, 1.07),
        (GaussianPrior(), "linear-prior:dim=3,clients=600,design=1", 0.95, 1.05),
        (GaussianPrior(), "linear-prior:dim=9,points=4,clients=600,design=1", 0.93, 1.07),  # fewer rows than columns
        (GaussianPrior("logistic"), "linear-prior:response=logistic,dim=3,points=25,center=1,prior=0.25,design=1,"
         "clients=600", 0.9, 1.1),
        (MixturePrior(2, "linear", math.sqrt(0.05)), MIXED, 0.85, 1.15),
        (DiscreteMixture(3, 1.0), "gaussian-means:dim=2,candidates=3,sigma_theta=0.8,sigma_x=1,clients=2000,points=4",
         0.85, 1.2),
    ],
)  # fmt: skip
@pytest.mark.long
def test_errors_are_as_large_as_their_standard_errors_say(
    estimator: Estimator, data: str, least: float, most: float
) -> None:
    samples = read_samples(data, seed=4)
    found = estimate(estimator, samples, simulate).estimates
    assert samples.truth is not None
    error = found.estimate - samples.truth[found.positions].double().reshape(found.estimate.shape)
    assert least < float((error.square().sum() / found.deviation.square().sum()).sqrt()) < most


# Which test writes out which algorithm

ORACLES = {
    "FedDPKMeans": "test_kmeans.test_without_noise_it_is_the_pooled_algorithm",
    "KFed": "test_oracles.test_k_fed",
    "MDM": "test_oracles.test_mdm_start_and_rounds",
    "NoisyHistograms": "test_mdm_privacy.test_noisy_counts_become_the_nearest_histogram",
    "GaussianMeans": "test_estimation.test_gaussian_estimates_are_the_formula_of_theorem_1_for_unequal_clients",
    "BernoulliRates": "test_estimation.test_known_beta_prior_gives_the_posterior_mean_and_sends_nothing",
    "GaussianPrior": "test_estimation_models.test_known_prior_gives_theorem_6",
    "DiscreteMixture": "test_estimation_models.test_known_candidates_give_the_posterior_mean_of_theorem_5",
    "MixturePrior": "test_estimation_models.test_an_alternating_step_is_the_gradient_of_the_negative_log_prior",
    "OneForAll": "test_estimation_models.test_the_baseline_for_all_is_the_pooled_fit",
}


def test_every_algorithm_is_written_out_somewhere() -> None:
    modules = [
        importlib.import_module(one.name) for one in pkgutil.walk_packages(analytics.__path__, "unalike.analytics.")
    ]
    found = {
        name
        for module in modules
        for name, thing in vars(module).items()
        if inspect.isclass(thing) and thing.__module__ == module.__name__ and not inspect.isabstract(thing)
        if any(hasattr(thing, verb) for verb in ("fit", "gather")) and not getattr(thing, "_is_protocol", False)
    }
    assert found == set(ORACLES)
    for where in ORACLES.values():
        file, test = where.split(".")
        assert f"def {test}(" in (Path(__file__).parent / f"{file}.py").read_text(), where
