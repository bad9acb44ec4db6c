"""Every method and every algorithm of analytics on real workers: the same result as in this process."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.analytics import algorithms
from tests.analytics.algorithms import CASES, DROP, drop_of, method_of
from tests.analytics.test_shards import assert_alike, stores
from tests.analytics.test_shards import found as found_here
from tests.cluster.sites import runtime
from tests.runtime import problems
from tests.runtime.test_conformance import NAMES, PROBLEMS, check_alike, here, quorum, seed_of
from unalike import Federation
from unalike.runtime.workers import Workers


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("tiny") / "rows.npz"
    problems.write(file)
    return file


def on_ray(name: str, data: Path, workers: Workers, folder: Path) -> dict[str, Tensor]:
    made = runtime(workers, PROBLEMS, name, data, folder)
    roster = made.roster.select(range(problems.SEEN))
    federation = Federation(made, seed_of(name), roster, quorum=quorum(name))
    return problems.outcome(problems.method_of(name), federation)


@pytest.mark.parametrize("name", NAMES)
def test_a_method_gives_the_same_result(name: str, data: Path, workers: Workers, tmp_path: Path) -> None:
    found = on_ray(name, data, workers, tmp_path)
    expected = here(name, data, 2)
    check_alike(found, {array: value for array, value in expected.items() if array != "model of each"})


@pytest.mark.parametrize("name", ["fedavg", "pefll", "local", "fedavg, client-level noise", "knnper"])
def test_repeated_it_has_equal_bits(name: str, data: Path, workers: Workers, tmp_path: Path) -> None:
    one, other = (on_ray(name, data, workers, tmp_path / str(turn)) for turn in range(2))
    for array, value in one.items():
        assert torch.equal(value.nan_to_num(), other[array].nan_to_num()), array


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("rows") / "rows.npz"
    algorithms.write(file, stores())
    return file


@pytest.mark.parametrize("name", [name + DROP for name in CASES])
def test_an_algorithm_of_analytics_finds_the_same(name: str, rows: Path, workers: Workers, tmp_path: Path) -> None:
    made = runtime(workers, algorithms.__name__, name, rows, tmp_path, drop=drop_of(name))
    found = algorithms.outcome(method_of(name), Federation(made, algorithms.seed_of(name)))
    assert_alike(found, found_here(name))
