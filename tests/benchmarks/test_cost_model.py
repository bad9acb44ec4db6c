"""The fit of the cost model's constants."""

from __future__ import annotations

import pytest

from benchmarks.cost_model import fit
from benchmarks.plan import Costs


def test_constants_that_made_the_times_are_found_again() -> None:
    true = Costs(exchange=0.01, slower=1.2)
    rows = []
    for cohort, workers, client in [(500, 1, 1e-4), (2000, 1, 1e-4), (8000, 2, 1e-4), (300, 1, 5e-3), (9000, 4, 1e-5)]:
        sizes = {"clients": cohort, "workers": workers, "client": client, "asks": 1.0}
        seconds = true.seconds(**sizes, bytes_per_worker=1e5)["total"]  # type: ignore[arg-type]
        rows.append(
            {**sizes, "cohort": cohort, "median": seconds, "bytes_down": 5e4 * workers, "bytes_up": 5e4 * workers}
        )
    found = fit(rows)
    assert found.exchange == pytest.approx(0.01, rel=1e-3) and found.slower == pytest.approx(1.2, rel=1e-3)
