"""The cost model and the plan for many clients, which need no cluster."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import pytest
import torch
from typer.testing import CliRunner

from benchmarks.plan import ClientCost, app, estimate_round, most
from unalike.runs.errors import UserError

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


def test_a_recipe_is_tried_and_its_plan_is_for_the_clients_that_were_asked_for() -> None:
    threads = torch.get_num_threads()
    words = ["fedavg", "--data", "digits", "--model", "mlp", "--cohort", "0.5", "--clients", "1e5", "--workers", "4"]
    try:
        found = json.loads(CliRunner().invoke(app, [*words, "--json"], catch_exceptions=False).stdout)
        shown = CliRunner().invoke(app, words, catch_exceptions=False).stdout
        refused = CliRunner().invoke(app, ["fedavg", "--clients", "3"])
    finally:
        torch.set_num_threads(threads)
    assert (found["clients"], found["cohort"], found["workers"]) == (100_000, 50_000, 4)
    assert found["probed"]["asks"] == 1 and found["probed"]["client"] > 0
    numbers = 64 * 64 + 64 + 64 * 10 + 10  # four bytes each to clients, eight in the sum that comes back
    assert found["probed"]["shared"] == pytest.approx((4 + 8) * numbers, rel=0.05)
    assert "100,000 clients, 50,000 of them in a round, on 4 workers" in shown and "what breaks first" in shown
    assert isinstance(refused.exception, UserError) and "at least the 16 workers" in str(refused.exception)
