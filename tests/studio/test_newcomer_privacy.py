"""A private newcomer: what one of its rows can change, and what it is told about the noise."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from motley.federation import Federation
from motley.methods.odpfl import ODPFL, SENSITIVITY
from motley.privacy import Gaussian
from motley.studio.errors import UserError
from motley.studio.newcomer import FinishedRun, serve
from motley.studio.newcomer_file import read_newcomer
from motley.studio.recipe import checked
from motley.studio.run import execute
from tests.studio.test_newcomer import run_command
from tests.studio.test_newcomer_file import SHOPS, archive, sales, written


def trained(folder: Path, data: Path, unseen: float, options: dict[str, str], **more: Any) -> FinishedRun:
    recipe = {
        "method": "odpfl",
        "rounds": 1,
        "data": {"name": str(data), "unseen": unseen, "options": options},
        "model": {"name": "logistic"},
        "hyperparameters": {"cohort": 1, "descriptor": 4, "local": {"steps": 2}, "encoder": "sphere", **more},
    }
    execute(checked(recipe, "test"), folder / "run")
    return FinishedRun.open(folder / "run")


@pytest.fixture(scope="module")
def shops(tmp_path_factory: pytest.TempPathFactory) -> FinishedRun:
    folder = tmp_path_factory.mktemp("shops")
    table = sales(8, 0)
    table.loc[3, "price"] = np.nan
    return trained(folder, written(folder, table), 0.25, {**SHOPS, "missing": "mean"})


def descriptor(run: FinishedRun, file: Path) -> torch.Tensor:
    """Without noise."""
    assert isinstance(run.method, ODPFL)
    clients = read_newcomer(run, file).clients
    return run.method.descriptors(run.state, Federation(clients).everyone())[0]


def test_one_row_moves_a_descriptor_by_its_sensitivity_at_most_where_cells_are_missing(
    shops: FinishedRun, tmp_path: Path
) -> None:
    mine = sales(1, 7)
    mine.loc[1:, "price"] = np.nan
    found = []
    for price in (-1e4, 1e4):  # of the only row that has one; a mean of its own would move all rows
        mine.loc[0, "price"] = price
        found.append(descriptor(shops, written(tmp_path, mine)))
    assert 0.1 * SENSITIVITY / 12 < float((found[0] - found[1]).norm()) <= SENSITIVITY / 12 * (1 + 1e-5)


def test_no_row_is_left_out_of_a_private_newcomer(shops: FinishedRun, tmp_path: Path) -> None:
    mine = sales(2, 7)
    mine.loc[0, "price"] = np.nan
    file, words = written(tmp_path, mine), ("--set", "data.options.missing=drop", "--unlabeled")
    with pytest.raises(UserError, match=r"1 row would be left out for lack of a value.*missing=mean"):
        run_command(shops.path, "--data", file, "--client", "s00", "--epsilon", 1, *words)
    run_command(shops.path, "--data", file, "--client", "s01", "--epsilon", 1, *words)  # no row of its own is missing
    run_command(shops.path, "--data", file, "--client", "s00", *words, "--out", tmp_path / "not-private")
    run_command(shops.path, "--data", file, "--client", "s00", "--epsilon", 1, "--out", tmp_path / "filled")


def test_a_run_that_protects_newcomers_leaves_none_of_their_rows_out(tmp_path: Path) -> None:
    run = trained(tmp_path, written(tmp_path, sales(8, 0), "all.csv"), 0.25, SHOPS, newcomer_epsilon=1.0)
    file = written(tmp_path, sales(1, 7).assign(returned=["", *["yes", "no"] * 5, "yes"]))
    came = read_newcomer(run, file, {"partial_labels": "drop"})
    with pytest.raises(UserError, match=r"1 row would be left out.*with --unlabeled"):
        serve(run, came.clients, "mine", left_out=came.left_out)
    came = read_newcomer(run, file, unlabeled=True)
    assert serve(run, came.clients, "mine", left_out=came.left_out).samples == 12


def some_labels(folder: Path, unseen: float) -> FinishedRun:
    """20 clients of 8 rows, of which five have labels."""
    x = np.random.default_rng(0).normal(size=(160, 3))
    client = np.arange(160) // 8
    y = np.where(client % 4 == 0, (x[:, 0] > 0).astype(float), np.nan)
    np.savez(folder / "all.npz", x=x, y=y, client=client)
    return trained(folder, folder / "all.npz", unseen, {})


def test_only_clients_with_labels_say_what_to_expect(tmp_path: Path) -> None:
    run = some_labels(tmp_path, 0.5)
    labeled = run.population.test.labeled[run.population.unseen]
    assert 0 < int(labeled.sum()) < 0.5 * len(labeled)  # below the quorum, if all were asked
    came = read_newcomer(run, archive(tmp_path, x=np.ones((6, 3)))).clients
    assert (
        "the unseen clients of this run, with 6 samples each, score" in serve(run, came, "mine", epsilon=9.0).notes[-1]
    )
    none = replace(run.population, unseen=run.population.unseen[~labeled])
    run = replace(run, prepared=replace(run.prepared, population=none))
    assert "no unseen clients with labels to test" in serve(run, came, "mine", epsilon=9.0).notes[-1]


@pytest.mark.parametrize(("epsilon", "too_much"), [(0.5, True), (50.0, False)])
def test_the_size_of_the_noise_is_told_without_any_unseen_client(
    epsilon: float, too_much: bool, tmp_path: Path
) -> None:
    run = some_labels(tmp_path, 0.0)
    came = read_newcomer(run, archive(tmp_path, x=np.ones((6, 3)))).clients
    _, noise, expected = serve(run, came, "mine", epsilon=epsilon).notes
    std = Gaussian.for_budget(epsilon, 0.01).noise_multiplier * 2 / 6
    assert (std > 1) == too_much
    assert f"has standard deviation {std:.3g}, and the descriptor is at most 1 long" in noise
    assert ("hardly anything of the data is left in it" in noise) == too_much
    assert "no unseen clients with labels to test" in expected
