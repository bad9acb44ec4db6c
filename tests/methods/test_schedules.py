"""Every method with a schedule takes its first round at the full rate, and its second at the second round's."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.runtime import problems
from unalike import Schedule, State, simulate, train
from unalike.methods import METHODS

# A usual prior is so steep here that its curvature and not the rate says how long a step is.
CHANGES: dict[str, dict[str, float]] = {"learned-prior": {"strength": 1e-5}}


def scheduled(name: str) -> bool:
    return "schedule" in {field.name for field in dataclasses.fields(METHODS[name].cls)}


def state_after(name: str, schedule: Schedule, rounds: int, file: Path) -> State:
    method: Any = dataclasses.replace(problems.method_of(name), schedule=schedule, **CHANGES.get(name, {}))
    return train(method, simulate(problems.read(file), 3), rounds)


@pytest.mark.parametrize("name", [name for name in METHODS if scheduled(name)])
def test_rates_fall_from_the_second_round_on(name: str, tmp_path: Path) -> None:
    problems.write(file := tmp_path / "rows.npz")
    constant, falling = Schedule(), Schedule("exponential", 0.5, 1)
    first, same = (state_after(name, schedule, 1, file) for schedule in (constant, falling))
    for key, value in first.items():
        assert torch.equal(value.nan_to_num(), same[key].nan_to_num()), key
    second, other = (state_after(name, schedule, 2, file) for schedule in (constant, falling))
    assert any(not torch.equal(value.nan_to_num(), other[key].nan_to_num()) for key, value in second.items())
