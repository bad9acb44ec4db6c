"""What the tests of runs share: a small, quick setting, and watchers that break in."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from unalike.runs.watcher import Watcher

# 12 clients, a linear model, no measuring of blocks: a round takes milliseconds
SMALL: dict[str, Any] = {
    "data": "digits",
    "partition": "pathological:2",
    "clients": 12,
    "unseen": 3,
    "cohort": 4,
    "model": "logistic",
    "rounds": 8,
    "eval_every": 4,
    "checkpoint_every": 3,
    "block": 4,
    "threads": 1,
}
FLAGS = [f"--{name.replace('_', '-')}={value}" for name, value in SMALL.items()]


class At(Watcher):
    """Does something after a given round."""

    def __init__(self, round: int, act: Callable[[], None]) -> None:
        self._round, self._act = round, act

    def round(self, record: Mapping[str, Any]) -> None:
        if record["round"] == self._round:
            self._act()


class Crash(Exception):
    """Stands for the process being gone."""


def crash() -> None:
    raise Crash


def metrics(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def timeless(folder: Path) -> list[dict[str, Any]]:
    timed = ("seconds", "measuring")
    return [{name: value for name, value in record.items() if name not in timed} for record in metrics(folder)]
