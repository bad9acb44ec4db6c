"""A private run that was killed and resumes is charged again, and still ends with a result."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.runs.helpers import At, Crash, crash
from unalike.api import resume, run

SMALL: dict[str, Any] = {
    "data": "digits", "partition": "iid", "clients": 40, "unseen": 4, "cohort": 0.5, "model": "logistic", "rounds": 6,
    "epsilon": 8.0, "clip": 0.5, "delta": 1e-3, "checkpoint_every": 3, "block": 8, "threads": 1,
}  # fmt: skip


def test_a_budget_that_ends_before_the_rounds_gives_the_result_of_the_last_one(tmp_path: Path) -> None:
    out = tmp_path / "run"
    with pytest.raises(Crash):
        run("fedavg", **SMALL, out=out, watcher=At(5, crash))
    result = resume(out)  # rounds 4 and 5 were charged, and are again
    assert result.stopped is not None and "charged again" in result.stopped
    assert "the result is that of round 4 of 6" in result.stopped
    assert result.privacy.epsilon is not None and result.privacy.epsilon <= 8.0
    stored = json.loads((out / "result.json").read_text())
    assert stored["stopped"] == result.stopped
    assert resume(out).stopped == result.stopped  # it has ended, and is only read


def test_a_run_that_was_not_stopped_does_its_rounds(tmp_path: Path) -> None:
    assert run("fedavg", **SMALL, out=tmp_path / "whole").stopped is None
