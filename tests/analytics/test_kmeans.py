"""FedDP-KMeans against oracles: the pooled algorithm, sensitivities, the noise's law, and the ledger."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from sklearn.cluster import KMeans
from torch import Tensor

from unalike import simulate
from unalike.analytics.kmeans.algorithm import FedDPKMeans
from unalike.analytics.kmeans.budget import CLIENT_SPLIT, POINT_SPLIT, BudgetSplit, KMeansPrivacy, StepNoise, calibrate
from unalike.analytics.kmeans.client import cost
from unalike.analytics.kmeans.server import elbow
from unalike.core.client import Clients
from unalike.core.failure import Failure
from unalike.core.federation import Federation, QuorumError
from unalike.core.release import Each, Sum
from unalike.core.roster import Declarations
from unalike.core.task import Task
from unalike.privacy import Gaussian
from unalike.privacy.ledger import Ledger


def mixture(
    seed: int = 0, sizes: tuple[int, ...] = (30, 50, 7, 120, 93), d: int = 6, k: int = 4
) -> tuple[Clients, Tensor, Tensor]:
    """Unequal clients, server points with a fifth of strangers, and the true means."""
    random = np.random.default_rng(seed)
    means = 4 * random.standard_normal((k, d))
    x = means[random.integers(k, size=sum(sizes))] + random.standard_normal((sum(sizes), d))
    server = np.concatenate([means.repeat(8, 0) + random.standard_normal((8 * k, d)), 4 * random.random((8, d))])
    clients = Clients.from_sizes(torch.from_numpy(x.astype(np.float32)), None, torch.tensor(sizes))
    return clients, torch.from_numpy(server.astype(np.float32)), torch.from_numpy(means.astype(np.float32))


def federation(clients: Clients, seed: int = 0, block: int = 3) -> Federation:
    return simulate(clients, seed=seed, block=block)


def pooled(x: np.ndarray, server: np.ndarray, k: int, steps: int, center: bool) -> np.ndarray:
    """Algorithms 11 and 12 without noise on all points in one array, in double precision."""
    origin = server.mean(0) if center else np.zeros(x.shape[1])
    q = server - origin
    radius = np.linalg.norm(q, axis=1).max()
    p = x - origin
    p = p * np.minimum(1.0, radius / np.linalg.norm(p, axis=1))[:, None]
    basis = np.linalg.eigh(p.T @ p)[1][:, ::-1][:, :k]
    nearest = ((p @ basis)[:, None] - (q @ basis)[None]) ** 2
    weights = np.bincount(nearest.sum(2).argmin(1), minlength=len(q))
    kept = weights >= 1
    xi = KMeans(k, n_init=20, random_state=0).fit(q[kept] @ basis, sample_weight=weights[kept]).cluster_centers_
    label = (((p @ basis)[:, None] - xi[None]) ** 2).sum(2).argmin(1)
    nu = np.stack([p[label == j].mean(0) for j in range(k)])
    for _ in range(steps):
        label = ((p[:, None] - nu[None]) ** 2).sum(2).argmin(1)
        nu = np.stack([p[label == j].mean(0) for j in range(k)])
    return nu + origin


def in_order(centers: Tensor | np.ndarray) -> np.ndarray:
    centers = np.asarray(centers)
    return centers[np.lexsort(centers.T)]


@pytest.mark.parametrize("steps", [0, 2])
@pytest.mark.parametrize("center", [True, False])
def test_without_noise_it_is_the_pooled_algorithm(steps: int, center: bool) -> None:
    clients, server, _ = mixture()
    found = FedDPKMeans(k=4, steps=steps, center=center).fit(federation(clients), server)
    expected = pooled(clients.x.double().numpy(), server.double().numpy(), 4, steps, center)
    np.testing.assert_allclose(in_order(found.centers), in_order(expected), rtol=1e-5, atol=1e-5)


def test_blocks_do_not_matter_with_noise() -> None:
    clients, server, _ = mixture()
    method = FedDPKMeans(k=4, privacy=KMeansPrivacy(5.0), steps=1)
    one, other = (method.fit(federation(clients, block=block), server).centers for block in (1, 5))
    torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)


def difference(task: Task, clients: Clients, without: int, **inputs: Tensor | float) -> dict[str, Tensor]:
    """How far each released sum moves when one row leaves the only client, in units of what its noise is made for."""
    rest = torch.arange(len(clients.x)) != without
    fewer = Clients.from_sizes(clients.x[rest], None, torch.tensor([int(rest.sum())]))
    whole = Clients.from_sizes(clients.x, None, torch.tensor([len(clients.x)]))
    known = {name: torch.as_tensor(value) for name, value in inputs.items()}
    stated = {one.names[0]: one.resolve(known, Declarations(whole.size)) for one in task.releases()}
    plain = [Sum(name) for name in stated]
    answers = [simulate(c).everyone().ask(task, into=plain, **inputs) for c in (whole, fewer)]
    moved = {}
    for name, release in stated.items():
        assert isinstance(release, Sum) and release.noise is not None and release.unit == "point"
        assert isinstance(release.sensitivity, float)
        moved[name] = (answers[0][name] - answers[1][name]).flatten() / release.sensitivity
    return moved


@pytest.mark.parametrize("scale", [1.0, 0.5])
def test_one_point_moves_each_sum_by_no_more_than_its_stated_sensitivity(scale: float) -> None:
    """Whatever scale the clients are told, the noise follows it."""
    clients, server, means = mixture()
    x = clients.x.clone()
    x[3] *= 100  # far outside: it is clipped in every step
    clients = Clients.from_sizes(x, None, torch.tensor([len(x)]))
    method = FedDPKMeans(k=4, privacy=KMeansPrivacy(1.0), steps=1)
    ground = {"origin": torch.zeros(6), "radius": 9.0, "scale": scale}
    basis = torch.eye(6)[:, :4]
    gram = difference(method.outer_product, clients, 3, **ground)["gram"]
    assert float(gram.norm()) == pytest.approx(1.0, rel=1e-4)  # reached, and by the clipped point
    weights = difference(method.nearest_counts, clients, 3, basis=basis, points=server @ basis, **ground)["weights"]
    assert float(weights.abs().sum()) == pytest.approx(1.0)
    ground["count_scale"] = scale / 2
    step3 = difference(method.cluster_sums, clients, 3, basis=basis, centers=means @ basis, **ground)
    lloyd = difference(method.cluster_sums, clients, 3, centers=means, **ground)
    for moved in (step3, lloyd):
        assert float(moved["sums"].norm()) == pytest.approx(1.0, rel=1e-4)
        assert float(moved["counts"].abs().sum()) == pytest.approx(1.0)


def test_the_gram_noise_is_symmetric_with_half_the_variance_off_the_diagonal() -> None:
    """As if all d² entries had got noise of Δ²·z and been symmetrised."""
    d, radius = 60, 2.0
    clients = Clients.from_sizes(torch.zeros(50, d), None, torch.tensor([50]))  # no signal: only noise comes back
    server = torch.randn(40, d, generator=torch.Generator().manual_seed(0))
    method = FedDPKMeans(k=2, privacy=KMeansPrivacy(1.0), radius=radius, center=False)
    seen: dict[str, Tensor] = {}
    original = torch.linalg.eigh

    def spy(matrix: Tensor) -> object:
        seen["gram"] = matrix.clone()
        return original(matrix)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.linalg, "eigh", spy)
        method.fit(federation(clients), server)
    gram = seen["gram"]
    assert torch.equal(gram, gram.T)
    z = calibrate(method.privacy, initialize=True, histograms=1, steps=0).gram  # type: ignore[arg-type]
    assert z is not None
    expected = z.noise_multiplier * radius**2
    rows, columns = torch.triu_indices(d, d, 1)
    off = gram[rows, columns]
    assert float(off.std()) == pytest.approx(expected / math.sqrt(2), rel=0.06)  # 1,770 draws: 1.7 % standard error
    assert float(gram.diagonal().std()) == pytest.approx(expected, rel=0.3)  # 60 draws


def test_a_clients_means_and_presence() -> None:
    x = torch.tensor([[0.0, 1.0], [0.0, 3.0], [5.0, 0.0]])
    clients = Clients.from_sizes(x, None, torch.tensor([3]))
    centers = torch.tensor([[0.0, 2.0], [5.0, 0.0], [-9.0, -9.0]])
    method = FedDPKMeans(k=3, privacy=KMeansPrivacy(1.0, unit="client"), client_points=3)
    inputs = {"origin": torch.zeros(2), "radius": 10.0, "centers": centers, "scale": 10.0, "count_scale": 2.0}
    step3 = simulate(clients).everyone().ask(method.cluster_sums, into=Each(), basis=torch.eye(2), **inputs)
    torch.testing.assert_close(step3["sums"][0], torch.tensor([[0.0, 0.2], [0.5, 0.0], [0.0, 0.0]]), check_dtype=False)
    assert step3["counts"][0].tolist() == [0.5, 0.5, 0.0]
    lloyd = simulate(clients).everyone().ask(method.cluster_sums, into=Each(), **inputs)  # Algorithm 12: plain sums
    torch.testing.assert_close(lloyd["sums"][0], torch.tensor([[0.0, 0.4], [0.5, 0.0], [0.0, 0.0]]), check_dtype=False)
    assert lloyd["counts"][0].tolist() == [1.0, 0.5, 0.0]


def test_a_clients_share_is_clipped_whatever_scale_it_is_told() -> None:
    clients, server, _ = mixture()
    hardly = StepNoise(gram=Gaussian(1e-9))  # calibrating for so large an ε takes long
    method = FedDPKMeans(k=4, privacy=KMeansPrivacy(1.0, unit="client"), client_points=50, noise=hardly)
    ground = {"origin": server.mean(0), "radius": 9.0}
    noisy = simulate(clients).everyone().ask(method.outer_product, scale=1e-9, **ground)["gram"]
    assert float(noisy.norm()) <= len(clients) * (1 + 1e-3)


@pytest.mark.parametrize("unit", ["point", "client"])
@pytest.mark.parametrize("steps", [0, 2])
def test_the_ledger_ends_just_below_the_budget(unit: str, steps: int) -> None:
    clients, server, _ = mixture()
    privacy = KMeansPrivacy(0.8, 1e-5, unit)  # type: ignore[arg-type]
    asked = federation(clients)
    FedDPKMeans(k=4, privacy=privacy, steps=steps, client_points=50).fit(asked, server)
    spent = asked.ledger.epsilon(1e-5)
    assert 0.998 * 0.8 <= spent <= 0.8
    assert asked.ledger.unit == unit
    assert asked.ledger.method == "PLD"
    rows = asked.transcript.rows()
    assert {row["array"] for row in rows} == {"gram", "weights", "sums", "counts"}
    assert all(row["noise"] is not None and row["seen_as"] == "sum" and row["unit"] == unit for row in rows)


@pytest.mark.parametrize(("split", "histograms"), [(POINT_SPLIT, 1), (CLIENT_SPLIT, 4)])
def test_the_budget_is_shared_in_proportion(split: BudgetSplit, histograms: int) -> None:
    noise = calibrate(KMeansPrivacy(1.0, split=split), initialize=True, histograms=histograms, steps=0)
    assert noise.weights is not None and noise.counts is not None and noise.gram is not None and noise.sums is not None
    assert histograms * noise.weights.epsilon / noise.counts.epsilon == pytest.approx(split.weights / split.counts)
    for mechanism, share in ((noise.gram, split.gram), (noise.sums, split.sums)):
        alone = Ledger("point")
        alone.record(mechanism.event(), unit="point")
        ratio = alone.epsilon(1e-6) / noise.counts.epsilon
        assert ratio == pytest.approx(share / split.counts, rel=1e-2)


def test_nothing_asked_needs_no_noise() -> None:
    assert calibrate(KMeansPrivacy(1.0), initialize=False, histograms=1, steps=0) == StepNoise()


def test_a_cluster_without_points_keeps_its_centre_and_no_centre_leaves_the_ball() -> None:
    clients, server, means = mixture()
    stray = torch.full((1, 6), 50.0)
    method = FedDPKMeans(k=5, steps=1, radius=400.0, initialize=False)
    found = method.fit(federation(clients), server, initial=torch.cat([means, stray]))
    torch.testing.assert_close(found.centers[4], stray[0], rtol=1e-4, atol=1e-3)
    with pytest.raises(ValueError, match="initialize=False, but fit got no initial centres"):
        method.fit(federation(clients), server)
    noisy = FedDPKMeans(k=4, privacy=KMeansPrivacy(0.01)).fit(federation(clients), server)
    distance = (noisy.centers - server.mean(0)).norm(dim=1)
    assert float(distance.max()) <= noisy.radius * (1 + 1e-5)


@pytest.mark.parametrize(("unit", "epsilon", "size"), [("point", 1.0, 2000), ("client", 8.0, 10)])
def test_private_clustering_of_a_mixture_is_near_the_optimum(unit: str, epsilon: float, size: int) -> None:
    clients, server, means = mixture(seed=3, sizes=(size,) * (20_000 // size))
    asked = federation(clients, block=500)
    method = FedDPKMeans(k=4, privacy=KMeansPrivacy(epsilon, unit=unit), client_points=size)  # type: ignore[arg-type]
    found = method.fit(asked, server)
    assert cost(asked, found.centers) < 1.03 * cost(asked, means)
    assert cost(asked, server[:4]) > 2 * cost(asked, means)  # the bound above is not for free


def test_the_elbow_finds_the_number_of_clusters() -> None:
    assert elbow([100, 60, 30, 10, 9, 8.5, 8]) == 4
    assert elbow([5.0, 5.0, 5.0]) == 1
    clients, server, _ = mixture(seed=1, sizes=(500,) * 8)
    asked = federation(clients)
    found = FedDPKMeans(k=None, k_max=9, privacy=KMeansPrivacy(2.0)).fit(asked, server)
    assert found.k == 4
    assert len(found.curve) == 9
    assert asked.ledger.epsilon(1e-6) <= 2.0


def test_simplified_server_data_still_finds_the_clusters() -> None:
    clients, server, means = mixture(seed=2, sizes=(1000,) * 8)
    asked = federation(clients)
    found = FedDPKMeans(k=4, privacy=KMeansPrivacy(3.0), simplify=2).fit(asked, server)
    assert 4 <= found.server_points < len(server)
    assert asked.ledger.epsilon(1e-6) <= 3.0
    assert sum(row["times"] for row in asked.transcript.rows() if row["array"] == "weights") == 3
    assert cost(asked, found.centers) < 1.02 * cost(asked, means)


def test_cost_leaves_padding_out_and_does_not_clip() -> None:
    clients, _, means = mixture()
    distances = torch.cdist(clients.x, means).square().min(1).values
    assert cost(federation(clients), means) == pytest.approx(float(distances.mean()), rel=1e-5)


def test_moving_all_data_far_away_moves_the_centres_along() -> None:
    clients, server, _ = mixture()
    far = Clients.from_sizes(clients.x + 300.0, None, clients.size)
    near_centers = FedDPKMeans(k=4, steps=1).fit(federation(clients), server).centers
    far_centers = FedDPKMeans(k=4, steps=1).fit(federation(far), server + 300.0).centers
    np.testing.assert_allclose(in_order(far_centers - 300.0), in_order(near_centers), atol=2e-3)


def test_a_cost_is_missing_only_where_a_site_did_not_consent_to_measuring() -> None:
    broken = Clients.from_sizes(torch.full((6, 2), torch.nan), None, torch.tensor([3, 3]))
    with pytest.raises(QuorumError):
        cost(federation(broken), torch.zeros(2, 2))
    reasons = ("refused by its site, rule purposes: no", "ValueError: no")
    assert [QuorumError("", [Failure("a", "measure", 1, reason)]).refused for reason in reasons] == [True, False]
