"""The cost model and the plan for many clients, which need no cluster."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from unalike.core.client import Clients
from unalike.deploy.plan import ClientCost, estimate_round, most
from unalike.runs.absent import select_rows

COST = ClientCost(
    client=0.001, asks=1, shared=1e5, own=20.0, row=100.0, rows=10.0, cohort=0.1, mapped=False, name="a recipe"
)


def test_the_busiest_worker_has_more_than_its_share() -> None:
    assert most(100, 1) == 100
    assert most(10_000, 4) == pytest.approx(2500 + math.sqrt(2 * 2500 * 0.75 * math.log(4)))


def test_a_plan_adds_up_and_says_what_breaks_first() -> None:
    found = estimate_round(COST, 1_000_000, 10, memory=1.5e9)
    assert found["cohort"] == 100_000
    seconds = found["round"]
    assert seconds["total"] == pytest.approx(seconds["exchanges"] + seconds["computing"] + seconds["sending"])
    assert found["sent"] == pytest.approx(10 * 1e5 + 20 * 100_000)
    what, count = found["limits"][0].values()
    of_all, own = 10 * 24 + 260, (1000 + 260) / 10 + 260
    assert "has all of it in memory" in what and count == pytest.approx(1e9 / (1000 + of_all + own))
    mapped = estimate_round(replace(COST, mapped=True), 1_000_000, 10, memory=1.5e9)
    assert (
        found["loading"] - mapped["loading"] == pytest.approx(1e9) and mapped["worker_memory"] == found["worker_memory"]
    )
    assert "has the order of all rows" in mapped["limits"][0]["what"]
    assert found["loading"] > 1e9 and [one["clients"] for one in found["limits"]] == sorted(
        one["clients"] for one in found["limits"]
    )
    more = estimate_round(COST, 1_000_000, 20, memory=1.5e9)
    assert more["round"]["computing"] < seconds["computing"] and more["worker_memory"] < found["worker_memory"]


def test_a_worker_keeps_its_own_rows_with_the_labels_that_they_have() -> None:
    x, y, known = torch.arange(12.0)[:, None], torch.arange(12), torch.arange(12) % 3 != 0
    everybody = Clients.from_sizes(x, y, torch.tensor([3, 4, 5]), known=known)
    mine = select_rows({"train": everybody}, torch.tensor([0, 2]))["train"]
    assert mine.known is not None and mine.y is not None and len(mine.x) == 8
    rows, _ = mine.pool_rows()
    theirs, _ = everybody.select([0, 2]).pool_rows()
    for ours, all_ in ((mine.x, x), (mine.y, y), (mine.known, known)):
        assert torch.equal(ours[rows], all_[theirs])
    assert torch.equal(mine.label_counts(), everybody.label_counts()[[0, 2]])
