"""What a worker of an analysis holds and lets out, without a cluster."""

from __future__ import annotations

import json

import pytest
import torch

from unalike.analytics.kmeans.algorithm import FedDPKMeans, squared_distances
from unalike.analytics.kmeans.baselines import KFed
from unalike.analytics.kmeans.budget import Privacy
from unalike.core import wire
from unalike.core.release import Each, Sum
from unalike.core.request import Purpose, Request, Wanted
from unalike.core.task import Task
from unalike.runtime.shard.shard import Shard
from unalike.studio.cluster import plain
from unalike.studio.cluster.analyses import Analysis

CLIENTS = 8
POINTS = {"data": f"gaussian-mixture:clients={CLIENTS},points=5,dim=3,components=2", "server": None}


def analysis(**how: object) -> Analysis:
    return Analysis(json.dumps({"what": "points", "how": {**POINTS, "standardize": False, **how}}))


def shard(site: Analysis, noise: str) -> Shard:
    made = site.shard(json.dumps({"noise": noise, "block": 4}), torch.arange(CLIENTS))
    method = FedDPKMeans(k=2, privacy=Privacy(1.0, 1e-4, "point"), radius=5.0)
    made.program = site.learn(plain.encoded([method, KFed(2)]))
    return made


def request(task: Task, purpose: Purpose, *wanted: Wanted) -> Request:
    given = {"centers": torch.zeros(2, 3)} if task is squared_distances else {}
    return Request("run", 1, task.name, torch.tensor([0]), "train", True, purpose, 7, wanted, given, {})


def test_a_shard_of_an_analysis_with_an_epsilon_lets_out_nothing_without_noise() -> None:
    """A curious server asks one client for its own cost or centres, under any purpose but a simulation's measuring."""
    site = analysis()
    sums = (Wanted.of(Sum("cost")), Wanted.of(Sum("points")))
    bare = [(squared_distances, sums), (KFed(2).local_centers, (Wanted.of(Each("centers", "size")),))]
    private = shard(site, "system")
    for task, wanted in bare:
        for purpose in ("train", "serve"):
            with pytest.raises(wire.WireError, match="without noise: nothing is sent"):
                list(private.answer(request(task, purpose, *wanted)))
        assert list(private.answer(request(task, "measure", *wanted)))
    without = shard(site, "seeded")
    assert all(list(without.answer(request(task, "train", *wanted))) for task, wanted in bare)
