"""The cost model and the plan for many clients, which need no cluster."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from unalike.core.client import Clients
from unalike.studio.cluster.absent import chosen
from unalike.studio.cluster.costs import Costs, fitted, most
from unalike.studio.cluster.plan import Probed, outlook

PROBED = Probed(
    client=0.001, asks=1, shared=1e5, own=20.0, row=100.0, rows=10.0, cohort=0.1, mapped=False, name="a recipe"
)


def test_constants_that_made_the_times_are_found_again() -> None:
    true = Costs(exchange=0.01, route=1e-6, slower=1.2)
    rows = []
    for cohort, workers, client in [(500, 1, 1e-4), (2000, 1, 1e-4), (8000, 2, 1e-4), (300, 1, 5e-3), (9000, 4, 1e-5)]:
        sizes = {"clients": cohort, "workers": workers, "client": client, "asks": 1.0}
        seconds = true.seconds(**sizes, bytes_per_worker=1e5).total  # type: ignore[arg-type]
        rows.append(
            {**sizes, "cohort": cohort, "median": seconds, "bytes_down": 5e4 * workers, "bytes_up": 5e4 * workers}
        )
    found = fitted(rows)
    assert found.exchange == pytest.approx(0.01, rel=1e-3) and found.slower == pytest.approx(1.2, rel=1e-3)
    assert found.route == pytest.approx(1e-6, rel=1e-2)


def test_the_busiest_worker_has_more_than_its_share() -> None:
    assert most(100, 1) == 100
    assert most(10_000, 4) == pytest.approx(2500 + math.sqrt(2 * 2500 * 0.75 * math.log(4)))


def test_a_plan_adds_up_and_says_what_breaks_first() -> None:
    found = outlook(PROBED, 1_000_000, 10, memory=1.5e9)
    assert found.cohort == 100_000
    seconds = found.seconds
    assert seconds.total == pytest.approx(seconds.exchanges + seconds.routing + seconds.computing + seconds.sending)
    assert found.sent == pytest.approx(10 * 1e5 + 20 * 100_000)
    what, count = found.limits[0]
    of_all, own = 10 * 24 + 260, (1000 + 260) / 10 + 260
    assert "has all of it in memory" in what and count == pytest.approx(1e9 / (1000 + of_all + own))
    mapped = outlook(replace(PROBED, mapped=True), 1_000_000, 10, memory=1.5e9)
    assert found.loading - mapped.loading == pytest.approx(1e9) and mapped.worker_memory == found.worker_memory
    assert "has the order of all rows" in mapped.limits[0][0]
    assert found.loading > 1e9 and [one for _, one in found.limits] == sorted(one for _, one in found.limits)
    more = outlook(PROBED, 1_000_000, 20, memory=1.5e9)
    assert more.seconds.computing < seconds.computing and more.worker_memory < found.worker_memory


def test_a_worker_keeps_its_own_rows_with_the_labels_that_they_have() -> None:
    x, y, known = torch.arange(12.0)[:, None], torch.arange(12), torch.arange(12) % 3 != 0
    everybody = Clients.from_sizes(x, y, torch.tensor([3, 4, 5]), known=known)
    mine = chosen({"train": everybody}, torch.tensor([0, 2]))["train"]
    assert mine.known is not None and mine.y is not None and len(mine.x) == 8
    rows, _ = mine.pooled()
    theirs, _ = everybody.select([0, 2]).pooled()
    for ours, all_ in ((mine.x, x), (mine.y, y), (mine.known, known)):
        assert torch.equal(ours[rows], all_[theirs])
    assert torch.equal(mine.labels_there(), everybody.labels_there()[[0, 2]])
