"""The baselines: what each one starts from, what it costs, and how it fares on clear clusters."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from tests.analytics.test_kmeans import federation, mixture
from unalike import simulate
from unalike.analytics.kmeans.algorithm import FedDPKMeans
from unalike.analytics.kmeans.baselines import (
    INITIAL,
    KFed,
    optimal,
    pooled_points,
    server_kmeans_plus_plus,
    sphere_packing,
)
from unalike.analytics.kmeans.budget import KMeansPrivacy
from unalike.analytics.kmeans.client import cost
from unalike.analytics.kmeans.pareto import front
from unalike.analytics.kmeans.points import Points
from unalike.analytics.kmeans.study import KMeansRun, run


@pytest.mark.parametrize("name", list(INITIAL))
def test_a_baseline_spends_its_whole_budget_on_lloyd_steps(name: str) -> None:
    clients, server, _ = mixture()
    method = FedDPKMeans(k=4, privacy=KMeansPrivacy(1.0), steps=2)
    asked, found = run(name, method, Points("mixture", clients, server), 0, simulate)
    assert 0.998 <= asked.ledger.epsilon(1e-6) <= 1.0
    assert {row["array"] for row in asked.transcript.rows()} == {"sums", "counts"}
    assert found.centers.shape == (4, 6)
    unasked, _ = run(name, replace(method, steps=0), Points("mixture", clients, server), 0, simulate)
    assert unasked.transcript.rows() == []


def test_server_kmeans_plus_plus_takes_server_points() -> None:
    _, server, _ = mixture()
    centers = server_kmeans_plus_plus(server, 4, 0)
    assert float(torch.cdist(centers, server).min(1).values.max()) < 1e-5


def test_spheres_are_packed_apart_from_each_other_and_from_the_corners() -> None:
    _, server, _ = mixture()
    centers = sphere_packing(server, 4, 0)
    radius = float(server.norm(dim=1).max())
    apart = torch.pdist(centers).min() / 2
    corners = (radius - centers.abs()).norm(dim=1).min()
    assert float(centers.abs().max()) <= radius
    assert float(torch.minimum(apart, corners)) > 0.5 * radius  # four random points would be nearer
    with pytest.raises(ValueError, match="needs a given k"):
        run("SpherePacking", FedDPKMeans(k=None), Points("mixture", *mixture()[:2]), 0, simulate)


def test_k_fed_and_optimal_find_clear_clusters_and_are_not_private() -> None:
    clients, _, means = mixture(sizes=(80, 120, 60, 200))
    asked = federation(clients)
    truth = cost(asked, means)
    best = optimal(clients, 4)
    assert cost(asked, best) <= truth
    assert cost(asked, KFed(4).fit(asked)) < 1.05 * truth
    assert asked.ledger.epsilon(1e-6) == math.inf


def test_k_fed_serves_a_client_with_fewer_points_than_clusters() -> None:
    clients, _, means = mixture(sizes=(2, 300, 1, 200))
    asked = federation(clients)
    assert cost(asked, KFed(4).fit(asked)) < 1.1 * cost(asked, means)


def test_pooled_points_are_those_of_the_clients_in_the_scale_that_tasks_see() -> None:
    clients, _, _ = mixture()
    scaled = replace(clients, shift=torch.ones(6), scale=torch.full((6,), 2.0))
    some = scaled.select([3, 0])
    expected = torch.cat([clients.rows(3)[0], clients.rows(0)[0]])
    torch.testing.assert_close(pooled_points(some), (expected - 1.0) * 2.0)


def test_the_front_holds_what_nothing_beats() -> None:
    runs = [
        KMeansRun("a", 1.0, 0, 5.0),
        KMeansRun("a", 0.5, 1, 7.0),
        KMeansRun("a", 0.7, 2, 8.0),
        KMeansRun("b", 0.1, 0, 1.0),
    ]
    assert [(m.epsilon, m.cost) for m in front(runs, "a")] == [(0.5, 7.0), (1.0, 5.0)]
