"""FedDP-KMeans beyond the plain algorithm: samples of clients, no server data, a smaller diameter, bounds by hand,
secure sums, and fronts over random budgets."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from torch import Tensor
from typer.testing import CliRunner

from tests.analytics.test_kmeans import federation, in_order, mixture, pooled
from unalike import simulate
from unalike.analytics.kmeans.algorithm import FedDPKMeans
from unalike.analytics.kmeans.baselines import sphere_packing
from unalike.analytics.kmeans.budget import Clips, KMeansPrivacy, StepNoise, calibrate
from unalike.analytics.kmeans.client import cost
from unalike.analytics.kmeans.diameter import Diameter
from unalike.analytics.kmeans.ground import lattice, packing
from unalike.analytics.kmeans.pareto import explore, shares_on_front
from unalike.analytics.kmeans.points import Points, read_points
from unalike.analytics.kmeans.study import KMeansRun, check_assumptions, cluster, describe_assumptions, run
from unalike.commands.main import app
from unalike.core.client import Clients
from unalike.core.federation import Cohort
from unalike.privacy import Gaussian, Laplace
from unalike.privacy.ledger import Ledger

HARDLY = StepNoise(Gaussian(1e-7), Laplace(1e6), Gaussian(1e-7), Laplace(1e6))  # never ask a ledger for its ε


# Samples of clients


def test_each_query_has_a_sample_of_its_own_whose_privacy_is_amplified(monkeypatch: pytest.MonkeyPatch) -> None:
    clients, server, _ = mixture(sizes=(8,) * 200)
    asked, seen = federation(clients, block=200), []
    plain = Cohort.ask

    def ask(self: Cohort, *task: object, **inputs: object) -> object:
        seen.append(frozenset(self.positions.tolist()))
        return plain(self, *task, **inputs)  # type: ignore[arg-type]

    monkeypatch.setattr(Cohort, "ask", ask)
    method = FedDPKMeans(k=4, privacy=KMeansPrivacy(3.0, 1e-5, "client"), client_points=8, sample=0.2)
    method.fit(asked, server)
    assert len(seen) == len(set(seen)) == 3  # Gram matrix, weights, Step 3
    assert all(15 <= len(one) <= 75 for one in seen)  # 40 ± 6 of 200
    assert 0.998 * 3.0 <= asked.ledger.epsilon(1e-5) <= 3.0
    everybody = Ledger("client")  # the same noise, were all clients asked
    for noise in filter(None, vars(method.plan).values()):
        everybody.record(noise.event())
    assert everybody.epsilon(1e-5) > 2 * 3.0


def test_no_amplification_is_claimed_for_points() -> None:
    plan = calibrate(KMeansPrivacy(1.0, 1e-5), initialize=True, histograms=1, steps=0, rate=0.2)
    whole = calibrate(KMeansPrivacy(1.0, 1e-5), initialize=True, histograms=1, steps=0)
    assert plan == whole


def test_a_sample_of_everybody_is_the_pooled_algorithm() -> None:
    clients, server, _ = mixture()
    found = FedDPKMeans(k=4, sample=1.0, steps=1).fit(federation(clients), server)
    expected = pooled(clients.x.double().numpy(), server.double().numpy(), 4, 1, True)
    np.testing.assert_allclose(in_order(found.centers), in_order(expected), rtol=1e-5, atol=1e-5)
    with pytest.raises(ValueError, match=r"sample=1\.5; expected a share"):
        FedDPKMeans(k=4, sample=1.5)


# Secure sums


@pytest.mark.parametrize("privacy", [None, KMeansPrivacy(1.0), KMeansPrivacy(1.0, unit="client")])
def test_secure_sums_find_the_same(privacy: KMeansPrivacy | None) -> None:
    clients, server, _ = mixture()
    settings: Any = {"k": 4, "privacy": privacy, "client_points": 60, "steps": 1, "noise": privacy and HARDLY}
    open_, closed = federation(clients), federation(clients)
    plain = FedDPKMeans(**settings).fit(open_, server)
    masked = FedDPKMeans(**settings, secure=True).fit(closed, server)
    np.testing.assert_allclose(in_order(masked.centers), in_order(plain.centers), atol=1e-3)
    assert {row["seen_as"] for row in closed.transcript.rows()} == {"secure sum"}
    assert closed.ledger.event() == open_.ledger.event()


def test_the_noise_on_a_secure_sum_is_that_of_a_plain_one() -> None:
    clients = Clients.from_sizes(torch.zeros(50, 40), None, torch.full((5,), 10))
    method = FedDPKMeans(k=2, noise=StepNoise(gram=Gaussian(3.0)), privacy=KMeansPrivacy(1.0), secure=True)
    given: Any = {"origin": torch.zeros(40), "radius": 2.0, "scale": 10 * 2.0**2}
    noisy = simulate(clients).everyone().ask(method.outer_product, **given)["gram"] * given["scale"]
    assert float(noisy.std()) == pytest.approx(3.0 * 2.0**2, rel=0.1)  # 820 draws: 2.5 %


# No server data


def test_a_lattice_has_levels_where_there_is_room() -> None:
    places = lattice(torch.tensor([4.0, 1.0, 0.01]), 20)
    levels = [torch.unique(places[:, axis]) for axis in range(3)]
    counts = [len(one) for one in levels]
    assert math.prod(counts) == len(places) <= 20
    assert counts[0] > counts[1] > counts[2] == 1
    for one, reach in zip(levels, (4.0, 1.0, 0.01), strict=True):
        edge = reach * (1 - 1 / len(one))
        torch.testing.assert_close(one, torch.linspace(-edge, edge, len(one)))
    widest = max(range(3), key=lambda axis: (4.0, 1.0, 0.01)[axis] / counts[axis])
    counts[widest] += 1
    assert math.prod(counts) > 20


def test_a_packing_is_spread_out() -> None:
    reach = torch.tensor([3.0, 1.0, 2.0])
    places = packing(reach, 40, 0)
    assert places.shape == (40, 3) and bool((places.abs() <= reach).all())
    random = (2 * torch.rand(40, 3, generator=torch.Generator().manual_seed(0)) - 1) * reach
    assert float(torch.pdist(places).min()) > 4 * float(torch.pdist(random).min())


@pytest.mark.parametrize("ground", ["lattice", "packing"])
def test_without_server_data_clear_clusters_are_found(ground: str) -> None:
    clients, server, means = mixture(seed=3, sizes=(500,) * 20)
    asked = federation(clients, block=20)
    method = FedDPKMeans(k=4, privacy=KMeansPrivacy(2.0), ground=ground, radius=16.0, places=300)  # type: ignore[arg-type]
    found = method.fit(asked, None)
    assert cost(asked, found.centers) < 1.05 * cost(asked, means)
    assert asked.ledger.epsilon(1e-6) <= 2.0
    with pytest.raises(ValueError, match="but fit got server data"):
        method.fit(asked, server)
    with pytest.raises(ValueError, match="but fit got no server data"):
        FedDPKMeans(k=4).fit(asked, None)
    with pytest.raises(ValueError, match=r"radius=\.\.\. must be given"):
        FedDPKMeans(k=4, ground=ground)  # type: ignore[arg-type]


# Server data that lacks clusters


def test_the_server_may_lack_clusters_and_all_else_stays() -> None:
    whole, without = (
        read_points(f"gaussian-mixture:clients=3,points=40,dim=30,components=4,variance=0.01,missing={missing}")
        for missing in (0, 3)
    )
    assert torch.equal(whole.clients.x, without.clients.x)
    assert torch.equal(whole.server[60:], without.server)  # 20 points of one component, 100 strangers
    assert len(without.server) == 120


# Lemma 28


def far_apart() -> tuple[Clients, Tensor, Tensor]:
    """Two pairs of clusters a hundred thousand apart, and server points of which a few lie where nobody is."""
    random = np.random.default_rng(5)
    means = np.array([[0, 0, 0], [30, 0, 0], [1e5, 1e5, 0], [1e5, 1e5 + 30, 0]])
    x = means[random.integers(4, size=800)] + random.standard_normal((800, 3))
    server = np.concatenate([means.repeat(6, 0) + random.standard_normal((24, 3)), [[-9e5, 0, 0], [0, 0, 8e5]]])
    clients = Clients.from_sizes(torch.from_numpy(x.astype(np.float32)), None, torch.full((8,), 100))
    return clients, torch.from_numpy(server.astype(np.float32)), torch.from_numpy(means.astype(np.float32))


def test_lemma_28_by_hand() -> None:
    _, server, _ = far_apart()
    weights = torch.cat([torch.full((24,), 800 / 24), torch.zeros(2)])
    diameter = Diameter(smallest=0.2, deviation=1.0)
    assert diameter.reach(800, 3) == pytest.approx(4 * math.log(800) * math.sqrt(3))  # 46: a pair is one group
    reduced = diameter.reduce(server, weights, 800, epsilon=math.inf, least=4)
    assert torch.equal(reduced.anchors, server[:24]) and reduced.groups == 2  # nobody is near the last two
    there = reduced.anchors + reduced.moves
    for first, last in ((0, 12), (12, 24)):  # a group moves as one
        torch.testing.assert_close(torch.pdist(there[first:last]), torch.pdist(server[first:last]), rtol=1e-3, atol=0.1)
    widest = max(float(torch.pdist(server[:12]).max()), float(torch.pdist(server[12:24]).max()))
    assert float((there[0] - there[12]).norm()) == pytest.approx(100 * widest, rel=0.01)
    torch.testing.assert_close(reduced.move_back(there), reduced.anchors)
    frozen = diameter.reduce(server, 0 * weights, 800, epsilon=0.01, least=4)  # six near each other are enough to stay
    assert len(frozen.anchors) == 26


@pytest.mark.long
def test_a_smaller_diameter_means_less_noise_and_the_same_clusters() -> None:
    clients, server, means = far_apart()
    method = FedDPKMeans(k=4, diameter=Diameter(smallest=0.2, deviation=1.0))
    found = method.fit(federation(clients), server)
    apart = torch.cdist(found.centers, means, compute_mode="donot_use_mm_for_euclid_dist")
    assert float(apart.min(0).values.max()) < 0.6 and float(apart.min(1).values.max()) < 0.6
    assert found.radius < 1e4 < 1e5 < FedDPKMeans(k=4).fit(federation(clients), server).radius
    asked = federation(clients)
    private = FedDPKMeans(k=4, privacy=KMeansPrivacy(20.0), diameter=method.diameter).fit(asked, server)
    assert private.radius == pytest.approx(found.radius, rel=0.05)
    histograms = sum(row["times"] for row in asked.transcript.rows() if row["array"] == "weights")
    assert histograms == 2 and asked.ledger.epsilon(1e-6) <= 20.0


# Bounds by hand


def test_a_clients_share_is_clipped_to_the_bound_that_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    clients, server, _ = mixture()
    seen: dict[str, Tensor] = {}
    original = torch.linalg.eigh
    monkeypatch.setattr(torch.linalg, "eigh", lambda matrix: original(seen.setdefault("gram", matrix.clone())))
    privacy = KMeansPrivacy(1.0, unit="client")
    method = FedDPKMeans(
        k=4, privacy=privacy, client_points=50, noise=HARDLY, clips=Clips(gram=40.0), center=False, radius=100.0
    )
    method.fit(federation(clients), server)
    expected = torch.zeros(6, 6, dtype=torch.float64)
    for client in range(len(clients)):
        points = clients.rows(client)[0].double()
        gram = points.T @ points
        expected += gram * min(1.0, 40.0 / float(gram.norm()))
    torch.testing.assert_close(seen["gram"], expected, rtol=1e-4, atol=1e-3)
    with pytest.raises(ValueError, match="the clip of 'means'"):
        Clips(means=0.0)


def test_sphere_packing_is_not_projected() -> None:
    clients, server, _ = mixture()
    _, found = run("SpherePacking", FedDPKMeans(k=4), Points("mixture", clients, server), 0, simulate)
    torch.testing.assert_close(found.centers, sphere_packing(server, 4, 0), rtol=1e-5, atol=1e-5)
    assert float((found.centers - server.mean(0)).norm(dim=1).max()) > found.radius


# The assumptions, and fronts over random budgets


def test_the_assumptions_of_the_thesis() -> None:
    """D.7.2, federal employees: about 123,000."""
    census: Any = {"k": 10, "points": 44_720, "dimension": 819, "epsilon": 0.5, "radius": 2.65, "server_points": 1020}
    found = check_assumptions(**census, deviation=1.87)
    assert found["most_radius"] == pytest.approx(123_000, rel=0.01) and found["hold"]
    assert found["most_server_points"] == pytest.approx(0.5 * 44_720 * 10 * math.log(44_720) * 1.87**2 / 2.65**2)
    crowded = check_assumptions(**census | {"server_points": 10**7}, deviation=1.87)
    assert not crowded["hold"] and "do not hold" in describe_assumptions(crowded)[0]
    assert describe_assumptions(check_assumptions(**census | {"epsilon": math.inf}, deviation=1.0)) == []


def test_what_the_runs_on_a_front_have_in_common() -> None:
    best = [KMeansRun("a", 1.0, 0, 5.0, (0.1, 0.2, 0.3, 0.4)), KMeansRun("a", 2.0, 1, 4.0, (0.3, 0.2, 0.5, 0.0))]
    found = shares_on_front(best)
    assert found["shares"] == pytest.approx({"gram": 0.2, "weights": 0.2, "sums": 0.4, "counts": 0.2})
    assert found["lloyd_steps"] == {"0": 0.5, "1": 0.5, "2": 0.0}


def test_random_budgets_cost_what_the_ledger_says_and_no_more_than_allowed() -> None:
    clients, server, _ = mixture()
    method = FedDPKMeans(k=4, privacy=KMeansPrivacy(1.0))
    points = Points("mixture", clients, server)
    found = explore(method, points, simulate, settings=2, seeds=2, seed=1)
    assert len(found) == 2 and all(0 < one.epsilon <= 1.0 for one in found)
    assert len({one.split for one in found}) == 2
    for one in found:  # of a run with Lloyd steps also the shares of ε₄
        assert one.split is not None and sum(one.split[:4]) == pytest.approx(1.0)
        assert len(one.split) == (6 if one.steps else 4)
    assert found == explore(method, points, simulate, settings=2, seeds=2, seed=1)


@pytest.mark.long
def test_the_command_has_them_all() -> None:
    def told_by(*words: str) -> Any:
        data = ("--data", "gaussian-mixture:clients=12,points=60,dim=6,components=3,missing=1", "--k", "3", "--json")
        result = CliRunner().invoke(app, ["kmeans", *data, "--starts", "1", *words])
        assert result.exit_code == 0, result.output
        return json.loads(result.stdout)

    told = told_by("--epsilon", "4", "--diameter", "0.1,0.8", "--secure")
    assert told["secure"] and told["epsilon"] <= 4 and told["server_points"] == 140
    told = told_by("--ground", "lattice", "--places", "50", "--radius", "4", "--epsilon", "4")
    assert told["ground"] == "lattice" and told["server_points"] == 0
    by_client = ("--unit", "client", "--client-points", "60", "--epsilon", "4")
    told = told_by(*by_client, "--clips", "gram=90,means=4", "--cohort", "6")
    assert told["sample"] == 0.5
    told = told_by("--epsilon", "1", "--pareto", "--explore", "2", "--seeds", "2")
    assert sum(told["on_front"]["lloyd_steps"].values()) == pytest.approx(1)
    for words in (("--clips", "grams=3"), ("--diameter", "1"), ("--explore", "3"), ("--ground", "sand")):
        assert CliRunner().invoke(app, ["kmeans", *by_client, *words]).exit_code == 1


def test_columns_of_unlike_scale_are_told_unless_they_are_scaled(tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    file = tmp_path / "walks.csv"
    table = {"client": np.arange(200) % 10, "steps": 1000 * random.normal(size=200), "pace": random.normal(size=200)}
    pd.DataFrame(table).to_csv(file, index=False)
    notes = [
        cluster(FedDPKMeans(k=2), read_points(str(file), server_points=50, standardize=one), simulate).notes
        for one in (False, True)
    ]
    assert len(notes[0]) == 1 and "so clusters hardly depend on the latter; say standardize" in notes[0][0]
    assert notes[0][0].startswith("steps varies ") and notes[1] == []
