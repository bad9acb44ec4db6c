"""Analyses over sites: the same result as in one process, and what a site refuses, charges and never tells."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch

from tests.deploy.nodes import make_site, use
from tests.network.sites import together
from unalike.analytics.estimation.mixture import MixturePrior
from unalike.analytics.estimation.samples import Samples
from unalike.analytics.estimation.study import estimate
from unalike.analytics.kmeans.algorithm import FedDPKMeans
from unalike.analytics.kmeans.budget import KMeansPrivacy
from unalike.analytics.kmeans.points import Points
from unalike.analytics.kmeans.study import cluster
from unalike.analytics.mdm.study import Histograms, fit_mixture, population_histograms
from unalike.core.federation import QuorumError
from unalike.deploy import plain
from unalike.deploy.node.host import NodeHost
from unalike.deploy.node.ledger import SiteLedger
from unalike.deploy.session import Place, place
from unalike.runs.errors import UserError
from unalike.runs.simulate import simulate
from unalike.runtime.shard.host import result
from unalike.runtime.shard.shard import Refused

Patch = pytest.MonkeyPatch
RAW: dict[str, Any] = {"normalize": False, "test": 0.0}
FEATURES = list("abcde")
PRIVATE = {
    "methods": ["kmeans"], "trust": ["server"], "individual": "never", "sums": "noise", "unit": "point",
    "epsilon": 5.0, "epsilon_run": 3.0, "delta": 1e-6, "purposes": ["train"],
}  # fmt: skip


def sites(folder: Path, monkeypatch: Patch, **policy: Any) -> list[Path]:
    made = [make_site(folder, name, number, policy, clients=4, per_client=30) for number, name in enumerate("abc")]
    use(monkeypatch, made)
    return [site.folder for site in made]


def there(noise: Any = "seeded") -> Place:
    return place(noise, "network", network="hub")


def server_points(folder: Path) -> tuple[Path, torch.Tensor]:
    x = torch.randn(60, 5, generator=torch.Generator().manual_seed(1)).float() * 2
    pd.DataFrame(x.numpy(), columns=list("abcde")).to_csv(folder / "server.csv", index=False)
    return folder / "server.csv", torch.from_numpy(pd.read_csv(folder / "server.csv").to_numpy()).float()


def points_of(where: Place, file: Path) -> Points:
    found: Points = where.read("points", data="rows", server=str(file), ranges={}, seed=0, features=FEATURES)
    return found


def test_kmeans_at_sites_is_that_of_one_process(tmp_path: Path, monkeypatch: Patch) -> None:
    folders = sites(tmp_path, monkeypatch)
    file, server = server_points(tmp_path)
    away = there()
    points = points_of(away, file)
    assert len(points.clients.x) == 0 and len(points.clients) == 12
    found = cluster(FedDPKMeans(k=3, steps=2), points, away.federate, starts=0)
    with_rows = together(folders, features=FEATURES, **RAW).train
    here = cluster(FedDPKMeans(k=3, steps=2), Points("rows", with_rows, points.server), simulate, starts=0)
    torch.testing.assert_close(points.server.sort(0).values, server.sort(0).values)
    torch.testing.assert_close(found.centers, here.centers, rtol=1e-5, atol=1e-5)
    assert found.cost == pytest.approx(here.cost, rel=1e-5)
    away.close()


def test_mixtures_at_sites_are_those_of_one_process(tmp_path: Path, monkeypatch: Patch) -> None:
    folders = sites(tmp_path, monkeypatch)
    whole = Histograms(population_histograms(together(folders, **RAW)))
    how: dict[str, Any] = {"components": [2], "rounds": 5, "largest": 30, "cohort": 12}
    here = fit_mixture(whole, simulate, **how)
    away = there()
    found = fit_mixture(away.read("histograms", data="rows", counts=None, seed=0), away.federate, **how)
    assert found.log_likelihood == pytest.approx(here.log_likelihood, rel=1e-5)
    torch.testing.assert_close(found.mixture.alpha, here.mixture.alpha, rtol=1e-4, atol=1e-4)


def test_estimates_at_sites_are_those_of_one_process(tmp_path: Path, monkeypatch: Patch) -> None:
    folders = sites(tmp_path, monkeypatch)
    estimator = MixturePrior(components=2, family="linear", sigma_x=1.0, rounds=3)
    rows = together(folders, task="regression", **RAW).train
    here = estimate(estimator, Samples(rows), simulate)
    away = there()
    how: dict[str, Any] = {"data": "rows", "counts": None, "seed": 0, "test": 0.0, "check": "linear"}
    found = estimate(estimator, away.read("samples", **how), away.federate)
    torch.testing.assert_close(found.estimates.estimate, here.estimates.estimate, rtol=1e-5, atol=1e-5)


def test_a_private_analysis_is_charged_by_each_site_and_measured_nowhere(tmp_path: Path, monkeypatch: Patch) -> None:
    folders = sites(tmp_path, monkeypatch, **PRIVATE)
    file, _ = server_points(tmp_path)
    away, method = there("system"), FedDPKMeans(k=3, steps=1, privacy=KMeansPrivacy(2.0, 1e-6))
    found = cluster(method, points_of(away, file), away.federate, starts=0)
    assert found.values()["cost"] is None and bool(found.centers.isfinite().all())
    for folder in folders:
        spent = SiteLedger(folder).total
        assert spent.keys() == {"point"} and spent["point"].epsilon(1e-6) == pytest.approx(found.epsilon, rel=0.05)
    with pytest.raises(QuorumError, match="rule epsilon: the cost would be"):
        for _ in range(8):
            again = there("system")
            cluster(method, points_of(again, file), again.federate, starts=0)
    assert all(SiteLedger(folder).total["point"].epsilon(1e-6) <= 5.0 for folder in folders)


@pytest.mark.parametrize(
    ("policy", "noise", "told"),
    [
        ({"methods": ["fedavg"]}, "seeded", "rule methods: kmeans is not listed"),
        ({"trust": ["nobody"]}, "system", "rule trust: in an analysis the server adds the noise"),
        ({"network": "other"}, "seeded", "rule network"),
        ({"approve": True}, "seeded", "rule approve: recipe [0-9a-f]{16} waits"),
    ],
)
def test_an_analysis_that_a_rule_forbids(
    policy: dict[str, Any], noise: str, told: str, tmp_path: Path, monkeypatch: Patch
) -> None:
    sites(tmp_path, monkeypatch, **policy)
    file, _ = server_points(tmp_path)
    with pytest.raises(UserError, match=told):
        points_of(there(noise), file)


def test_what_needs_rows_in_one_place_or_would_tell_of_them(tmp_path: Path, monkeypatch: Patch) -> None:
    sites(tmp_path, monkeypatch, **PRIVATE)
    with pytest.raises(UserError, match="server_points: at sites each reads its own rows"):
        there().read("points", data="rows", server_points=3)
    with pytest.raises(UserError, match="give some with --server FILE"):
        there().read("points", data="rows")
    with pytest.raises(UserError, match="the names of categories would be"):
        there("system").read("points", data="rows", none=True, features=["a", "y"], categorical=["y"], label_column="")
    with pytest.raises(UserError, match="rule closed"):
        there().read("points", data="rows", none=True, features=["/etc/passwd"])


@pytest.mark.parametrize(
    ("how", "told"),
    [
        ({"partition": "iid", "clients": 72}, "rule closed: .* leave clients, partition out"),  # each row a client
        ({"min_samples": 20}, "rule closed: .* leave min_samples out"),  # who has fewer would be told
        ({"schema": "schema.json"}, "rule closed: .* leave schema out"),
        ({"missing": "client"}, "rule unit: missing = client has one row change others"),
    ],
)
def test_a_server_does_not_say_who_the_clients_of_a_site_are(how: dict[str, Any], told: str, tmp_path: Path) -> None:
    site = make_site(tmp_path, policy=PRIVATE)
    asked = {"method": "kmeans", "how": {"features": FEATURES, **how}, "noise": "system"}
    with pytest.raises(Refused, match=told):
        result(NodeHost(site).call("load", json.dumps({"run": "0" * 32, "analysis": asked}).encode()), "node a")
    assert not (site.folder / "runs" / ("0" * 32)).exists()


def test_a_site_is_taught_listed_algorithms_alone(tmp_path: Path) -> None:
    site = make_site(tmp_path)
    host = NodeHost(site)
    asked = {"method": "kmeans", "how": {"drop": ["y"], "label_column": ""}, "noise": "seeded"}
    told = result(host.call("load", json.dumps({"run": "0" * 32, "analysis": asked}).encode()), "node a")
    given = plain.decode(told)
    assert list(given.clients.names) == ["a/1", "a/2", "a/3"] and len(given.clients.x) == 0
    with pytest.raises(Refused, match="a block and the source of noise"):
        result(host.call("settle", told), "node a")
    with pytest.raises(Refused, match="has seeded noise"):
        result(host.call("settle", plain.encode([given, 4, "system"])), "node a")
    result(host.call("settle", plain.encode([given, 4, "seeded"])), "node a")
    result(host.call("learn", plain.encode([FedDPKMeans(k=2)])), "node a")
    with pytest.raises(Refused, match="is not expected here"):
        result(host.call("learn", plain.encode([given])), "node a")
    other = {**asked, "how": {}}
    with pytest.raises(Refused, match="goes on as the analysis that it began as"):
        result(host.call("load", json.dumps({"run": "0" * 32, "analysis": other}).encode()), "node a")
