"""Mixture priors by noisy sums: a share's norm, the sums of EM by hand, the ledger, and what it is good for."""

from __future__ import annotations

import json
import math
from collections import Counter

import pytest
import torch
from typer.testing import CliRunner

from unalike import simulate
from unalike.analytics.estimation.candidates import DiscreteMixture
from unalike.analytics.estimation.mixture import MixturePrior
from unalike.analytics.estimation.private import (
    Central,
    Components,
    NoisyEM,
    client_share,
    count_releases,
    next_components,
)
from unalike.analytics.estimation.shared import Channel, EstimationError, mse
from unalike.commands.main import app
from unalike.core.client import Clients
from unalike.core.release import Sum

CANDIDATES = torch.tensor([[1.5, 0.0, 0.0], [0.0, 1.5, 0.0], [-1.0, -1.0, 1.0]])


def population(clients: int = 900, points: int = 10) -> tuple[Clients, torch.Tensor]:
    random = torch.Generator().manual_seed(0)
    truth = CANDIDATES[torch.randint(3, (clients,), generator=random)]
    x = truth.repeat_interleave(points, 0) + torch.randn(clients * points, 3, generator=random)
    return Clients.from_sizes(x, None, torch.full((clients,), points)), truth


def test_nobodys_share_is_longer_than_one() -> None:
    random = torch.Generator().manual_seed(1)
    for length in (0.1, 1.0, 50.0):
        theta = torch.randn(4, dtype=torch.float64, generator=random)
        belongs = torch.softmax(torch.randn(3, dtype=torch.float64, generator=random), 0)
        own = client_share(length * theta / theta.norm(), belongs, torch.tensor(0.3, dtype=torch.float64))
        assert float(own.norm()) <= 1 + 1e-12
    longest = client_share(theta / theta.norm(), torch.eye(3, dtype=torch.float64)[0])
    assert float(longest.norm()) == pytest.approx(1.0)


def test_a_step_without_noise_is_one_of_em() -> None:
    """Weights, means and the pooled variance of points in two certain groups, written out."""
    points = torch.tensor([[0.1, 0.2], [0.3, 0.2], [-0.5, 0.0], [-0.3, -0.2], [-0.1, -0.1]], dtype=torch.float64)
    group = torch.tensor([0, 0, 1, 1, 1])
    total = torch.stack(
        [client_share(x, torch.eye(2, dtype=torch.float64)[g]) for x, g in zip(points, group, strict=True)]
    ).sum(0)
    before = Components(torch.ones(2) / 2, torch.zeros(2, 2), torch.tensor(1.0), torch.ones(2))
    found = next_components(total, before, noise_std=0.0)
    torch.testing.assert_close(found.weights, torch.tensor([0.4, 0.6], dtype=torch.float64))
    centers = torch.stack([points[group == g].mean(0) for g in (0, 1)])
    torch.testing.assert_close(found.centers, centers)
    within = (points - centers[group]).square().sum() / (5 * 2)
    assert float(found.variance) == pytest.approx(float(within))


def test_a_component_that_drowns_in_noise_stays_where_it_was() -> None:
    before = Components(
        torch.ones(2, dtype=torch.float64) / 2,
        torch.tensor([[0.1, 0.0], [0.7, 0.0]], dtype=torch.float64),
        torch.tensor(0.1),
        torch.ones(2),
    )
    total = torch.zeros(2, 4, dtype=torch.float64)
    total[0, -1] = 500.0
    found = next_components(total, before, noise_std=5.0)
    torch.testing.assert_close(found.centers[1], before.centers[1])
    assert float(found.centers[0].norm()) == 0.0


def test_splits_find_clear_groups() -> None:
    points = torch.cat([c / 4 + 0.01 * torch.randn(50, 3, generator=torch.Generator().manual_seed(i)) for i, c in
                        enumerate(CANDIDATES)]).double()  # fmt: skip
    asked = 0

    def ask(now: Components) -> torch.Tensor:
        nonlocal asked
        asked += 1
        belongs = torch.nn.functional.one_hot(torch.cdist(points, now.centers).argmin(1), len(now.weights)).double()
        return torch.stack([client_share(x, b) for x, b in zip(points, belongs, strict=True)]).sum(0)

    found = NoisyEM(ask, 3, 3, 0.0).run(4)
    assert asked == count_releases(3, 4) == 9
    assert float(torch.cdist(CANDIDATES.double() / 4, found.centers).min(1).values.max()) < 0.02


def test_private_candidates_are_near_the_bare_ones_and_cost_what_they_may() -> None:
    clients, truth = population()
    bare = DiscreteMixture(3, 1.0).estimate(simulate(clients))
    federation = simulate(clients)
    private = DiscreteMixture(3, 1.0, rounds=4, central=Central(2.0, 1e-4), bound=2.5).estimate(federation)
    errors = {name: mse(found, truth) for name, found in (("bare", bare.estimate), ("private", private.estimate))}
    assert errors["bare"] < errors["private"] < 0.5 * mse(private.local, truth)
    assert federation.ledger.epsilon(1e-4) == pytest.approx(2.0, rel=1e-3)
    assert {row["seen_as"] for row in federation.transcript.rows()} == {"sum"}
    assert {row["array"] for row in federation.transcript.rows()} == {"share"}


def test_a_share_of_algorithm_1_is_the_posterior_mean_at_the_nearest_candidate() -> None:
    """Step 6 over single samples, and step 11's sums, written out."""
    clients, _ = population(clients=20, points=3)
    weights, bound = [0.5, 0.3, 0.2], 2.5
    centers = (CANDIDATES + 0.2).double()
    expected = torch.zeros(3, 5, dtype=torch.float64)
    for i in range(20):
        samples = clients.x[3 * i : 3 * i + 3].double()
        alpha = [
            p * math.exp(-sum(float((x - mu).square().sum()) for x in samples) / (2 * 0.8**2))
            for p, mu in zip(weights, centers, strict=True)
        ]
        theta = sum(a * mu for a, mu in zip(alpha, centers, strict=True)) / sum(alpha)
        nearest = min(range(3), key=lambda k: float((theta - centers[k]).norm()))
        row = torch.tensor([*(theta / bound), float((theta / bound).square().sum()), 1.0], dtype=torch.float64)
        expected[nearest] += row / math.sqrt(3)
    method = DiscreteMixture(3, 0.8, once=False, central=Central(1.0, 1e-5), bound=bound)
    inputs = {"weights": torch.tensor(weights), "centers": centers / bound, "variance": torch.tensor(1.0)}
    unit = torch.tensor(bound, dtype=torch.float64)
    found = simulate(clients).everyone().ask(method.alternate, into=Sum("share"), **inputs, unit=unit)["share"]
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)


def test_private_algorithm_1_alternates_and_costs_what_it_may() -> None:
    clients, truth = population()
    federation = simulate(clients)
    method = DiscreteMixture(3, 1.0, rounds=3, once=False, central=Central(2.0, 1e-4), bound=2.5)
    found = method.estimate(federation)
    assert mse(found.estimate, truth) < 0.5 * mse(found.local, truth)
    assert federation.ledger.epsilon(1e-4) == pytest.approx(2.0, rel=1e-3)
    asked = Counter[str]()
    for row in federation.transcript.rows():
        asked[row["task"]] += row["times"]
    assert asked == {"DiscreteMixture.join": count_releases(3, 1), "DiscreteMixture.alternate": 2}


def test_private_mixture_of_regressions() -> None:
    random = torch.Generator().manual_seed(0)
    component = torch.randint(2, (600,), generator=random)
    truth = torch.tensor([[1.0, -1.0], [-1.0, 1.0]])[component] + 0.1 * torch.randn(600, 2, generator=random)
    x = torch.randn(600, 4, 2, generator=random)
    y = (x @ truth[:, :, None])[:, :, 0] + 0.7 * torch.randn(600, 4, generator=random)
    clients = Clients.from_sizes(x.reshape(-1, 2), y.flatten(), torch.full((600,), 4))
    federation = simulate(clients)
    method = MixturePrior(2, "linear", 0.7, rounds=3, central=Central(3.0, 1e-4), bound=3.0)
    found = method.estimate(federation)
    assert mse(found.estimate, truth) < 0.5 * mse(found.local, truth)
    assert federation.ledger.epsilon(1e-4) == pytest.approx(3.0, rel=1e-3)
    assert {row["seen_as"] for row in federation.transcript.rows()} == {"sum"}


def test_what_makes_no_sense_is_refused() -> None:
    central = Central(1.0, 1e-5)
    with pytest.raises(EstimationError, match="give one"):
        DiscreteMixture(2, 1.0, central=central, channel=Channel(epsilon=1.0, delta=1e-5), bound=1.0)
    with pytest.raises(EstimationError, match="a bound must be known"):
        DiscreteMixture(2, 1.0, central=central)
    with pytest.raises(EstimationError, match="need bound"):
        MixturePrior(2, central=central)
    assert math.isclose(central.noise(4).noise_multiplier, 2 * central.noise(1).noise_multiplier)


def test_the_command() -> None:
    data = "gaussian-means:dim=3,candidates=2,sigma_theta=1,sigma_x=1,clients=200"
    words = ["estimate", "mixture", "--data", data, "--components", "2", "--rounds", "2", "--json"]
    result = CliRunner().invoke(app, [*words, "--epsilon", "4", "--central", "--bound", "4"])
    assert result.exit_code == 0, result.output
    told = json.loads(result.stdout)
    assert told["privacy"]["epsilon"] == pytest.approx(4.0, rel=1e-3)
    assert "give --epsilon" in CliRunner().invoke(app, [*words, "--central"]).output
