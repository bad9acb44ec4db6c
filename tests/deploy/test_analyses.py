"""What a worker of an analysis holds and lets out, without a cluster."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch

from unalike.analytics import reading
from unalike.analytics.kmeans.algorithm import FedDPKMeans
from unalike.analytics.kmeans.baselines import KFed
from unalike.analytics.kmeans.budget import KMeansPrivacy
from unalike.analytics.kmeans.client import squared_distances
from unalike.commands.console import worker_lines
from unalike.core import wire
from unalike.core.release import Each, Sum
from unalike.core.request import Purpose, ReleaseName, Request
from unalike.core.task import Task
from unalike.data import lazy
from unalike.data.rows import gather
from unalike.deploy import plain
from unalike.deploy.session import Away, Here
from unalike.deploy.site import Site
from unalike.runtime.shard.shard import Shard

CLIENTS = 8
POINTS = {"data": f"gaussian-mixture:clients={CLIENTS},points=5,dim=3,components=2", "server": None}


def analysis(**how: object) -> Site:
    return Site(json.dumps({"what": "points", "how": {**POINTS, "standardize": False, **how}}))


def shard(site: Site, noise: str) -> Shard:
    made = site.shard(json.dumps({"noise": noise, "block": 4}), torch.arange(CLIENTS))
    method = FedDPKMeans(k=2, privacy=KMeansPrivacy(1.0, 1e-4, "point"), radius=5.0)
    made.program = site.learn(plain.encode([method, KFed(2)]))
    return made


def request(task: Task, purpose: Purpose, *wanted: ReleaseName) -> Request:
    given = {"centers": torch.zeros(2, 3)} if task is squared_distances else {}
    return Request("run", 1, task.name, torch.tensor([0]), "train", True, purpose, 7, wanted, given, {})


ROWS = {
    "points": {"server": None, "server_points": 30, "standardize": True, "seed": 1, "label_column": "y"},
    "samples": {"check": "linear", "counts": None, "clients": None, "seed": 0, "test": 0.3, "label_column": "y"},
    "histograms": {"counts": None, "feature": ["a"], "bins": {"a": [-9.0, 0.0, 1.0]}, "label_column": "y"},
}  # fmt: skip


@pytest.mark.parametrize("what", ROWS)
def test_a_worker_reads_the_rows_of_its_own_clients_alone(
    what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    random, file = np.random.default_rng(0), tmp_path / "rows.csv"
    client = random.permutation(np.repeat(np.arange(30), 10))
    x = random.normal(size=(300, 2)) + client[:, None] / 10
    pd.DataFrame({"client": client, "a": x[:, 0], "b": x[:, 1], "y": x.sum(1)}).to_csv(file, index=False)
    how = {**ROWS[what], "data": str(file)}
    whole = Here("seeded").read(what, **how)
    parts = whole.parts if what == "samples" else {"train": whole.clients}
    taken: list[int] = []

    def spy(name: str, source: Any, rows: Any, *more: Any, **how: Any) -> Any:
        taken.append(len(source) if rows is None else len(rows))
        return gather(name, source, rows, *more, **how)

    monkeypatch.setattr(lazy, "gather", spy)
    monkeypatch.setattr(reading, "_PIECE", 25)
    site = Site(json.dumps({"what": what, "how": how}))
    given = plain.decode(site.about())
    assert len(given.clients.x) == 0 and torch.equal(given.clients.size, whole.clients.size)
    mine = torch.tensor([2, 3, 11, 29])
    made = site.shard(json.dumps({"noise": "seeded", "block": 4}), mine)
    for name, part in parts.items():
        ours, theirs = part.select(mine), made.parts[name]
        assert torch.equal(theirs.x[theirs.pool_rows()[0]], ours.x[ours.pool_rows()[0]])
        assert theirs.roster().schema == ours.roster().schema and torch.equal(theirs.ids, ours.ids)
        if ours.y is not None:
            assert torch.equal(theirs.y[theirs.pool_rows()[0]], ours.y[ours.pool_rows()[0]])
    assert max(taken) <= 40 and sum(taken) > 0


def test_a_shard_of_an_analysis_with_an_epsilon_lets_out_nothing_without_noise() -> None:
    """A curious server asks a client for its own cost or centres; a simulation's measuring gives the cost alone."""
    site = analysis()
    sums = (ReleaseName.of(Sum("cost")), ReleaseName.of(Sum("points")))
    bare = [(squared_distances, sums), (KFed(2).local_centers, (ReleaseName.of(Each("centers", "size")),))]
    private = shard(site, "system")
    for task, wanted in bare:
        for purpose in ("train", "serve", *(["measure"] if task is not squared_distances else [])):
            with pytest.raises(wire.WireError, match="without noise: nothing is sent"):
                list(private.answer(request(task, purpose, *wanted)))
    assert list(private.answer(request(squared_distances, "measure", *sums)))
    without = shard(site, "seeded")
    assert all(list(without.answer(request(task, "train", *wanted))) for task, wanted in bare)


@pytest.mark.parametrize(("noise", "shown"), [("system", False), ("seeded", True)])
def test_what_workers_answered_in_a_private_analysis_is_not_told(noise: str, shown: bool) -> None:
    """It would tell how large secret cohorts were."""
    tally = {
        "worker": 0,
        "name": "worker 0",
        "clients": 40,
        "answered": 4711,
        "failed": 0,
        "rate": 4711.0,
        "restarts": 0,
        "bytes_up": 4711,
    }
    place: Any = object.__new__(Away)
    place._noise, place._runtime = noise, (None, SimpleNamespace(report=lambda: [tally]))
    assert ("4711" in str(place.summary())) == shown
    assert ("4,711" in str(worker_lines(place.summary()))) == shown
    assert "40 clients" in worker_lines(place.summary())[0]
