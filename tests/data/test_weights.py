"""Rows that count more than others: by a column of the table, and by their class."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch

import unalike
from unalike.data import DataError, from_arrays, load, load_lazily
from unalike.newcomers.client_model import client_model
from unalike.runs.errors import UserError
from unalike.runs.finished import FinishedRun

PLAIN: dict[str, Any] = {"test": 0.0, "unseen": 0, "normalize": False, "rounds": 3, "model": "logistic"}
WHOLE = {"local": {"batch": "none", "lr": 0.3}}


def visits() -> pd.DataFrame:
    rng = np.random.default_rng(0)
    table = pd.DataFrame({"client": np.repeat(["a", "b", "c"], [7, 4, 9]), "x": rng.normal(size=20)})
    table["z"], table["copies"] = rng.normal(size=20), rng.integers(1, 4, 20)
    table["y"] = np.where(table["x"] + 0.3 * table["z"] > 0.8, "yes", "no")
    return table


@pytest.mark.parametrize("batch", ["none", 9])
def test_a_row_of_weight_two_is_a_row_that_is_there_twice(batch: Any) -> None:
    """The oracle is the table with its rows repeated, in batches that hold all rows of a client."""
    table = visits()
    settings = {**PLAIN, "hyperparameters": {"local": {"batch": batch, "lr": 0.3}}}
    weighted = unalike.run("local", table, weight_column="copies", **settings)
    repeated = table.loc[table.index.repeat(table["copies"])].drop(columns="copies")
    twice = unalike.run("local", repeated, **{**PLAIN, "hyperparameters": WHOLE})
    plain = unalike.run("local", table.drop(columns="copies"), **settings)
    for client in ("a", "b", "c"):
        assert _of(weighted.run, client) == pytest.approx(_of(twice.run, client), abs=1e-5)
        assert _of(weighted.run, client) != pytest.approx(_of(plain.run, client), abs=1e-3)


def test_every_class_of_a_client_counts_the_same_in_its_training_rows() -> None:
    y = np.array([0, 0, 0, 1, 0, 0, 1, 1, 2, 0, 0, 0])
    population = from_arrays(
        np.zeros((12, 1)), y, [0] * 4 + [1] * 5 + [2] * 3, test=0, unseen=0, class_weights="balanced"
    )
    weight, labels = population.train.weight, population.train.y
    assert weight is not None and labels is not None
    expected = [4 / 6] * 3 + [2.0] + [5 / 6] * 4 + [5 / 3] + [1.0] * 3
    assert weight.tolist() == pytest.approx(expected)
    split = from_arrays(
        np.zeros((60, 1)), np.arange(60) % 3 == 0, [0] * 60, test=0.5, unseen=0, class_weights="balanced"
    )
    assert split.train.weight is not None and split.train.y is not None
    own, labels = split.train.weight[:30], split.train.y[:30]
    assert float(own[labels == 1].sum()) == pytest.approx(float(own[labels == 0].sum()))  # test rows have no say


def test_public_numbers_by_class_multiply_the_column(tmp_path: Path) -> None:
    visits().to_csv(tmp_path / "visits.csv", index=False)
    options: dict[str, Any] = {"weight_column": "copies", "class_weights": "yes=10,no=1", "test": 0, "unseen": 0}
    population = load(tmp_path / "visits.csv", **options)
    weight, y = population.train.weight, population.train.y
    assert weight is not None and y is not None and "copies" not in (population.columns or {})
    assert weight.tolist() == (visits()["copies"] * np.where(visits()["y"] == "yes", 10, 1)).tolist()
    some = load_lazily(tmp_path / "visits.csv", **options).select(torch.tensor([1]))["train"]
    assert some.weight is not None and some.weight.tolist() == weight[7:11].tolist()


def test_a_newcomer_counts_its_rows_as_the_others_did(tmp_path: Path) -> None:
    table = visits()
    settings = {**PLAIN, "hyperparameters": {**WHOLE, "finetune": {"batch": "none"}}, "out": tmp_path / "run"}
    table.to_csv(tmp_path / "visits.csv", index=False)
    unalike.run("fedavg-finetune", tmp_path / "visits.csv", weight_column="copies", **settings)
    run = unalike.Result.load(tmp_path / "run")
    new = table[table["client"] == "c"].assign(client="d")
    assert run.personalize(new).theta.tolist() == pytest.approx(_of(run.run, "c"), abs=1e-5)
    assert run.personalize(new.assign(copies=1)).theta.tolist() != pytest.approx(_of(run.run, "c"), abs=1e-4)


def _of(run: FinishedRun, client: str) -> list[float]:
    return client_model(run, client).theta.tolist()


def test_what_cannot_be_meant_is_explained() -> None:
    table = visits()
    with pytest.raises(DataError, match="expected balanced, or a number for each class: no=1,yes=1"):
        load(table, class_weights="yes=3", weight_column="copies")
    with pytest.raises(DataError, match="class_weights need classes"):
        load(table, label_column="x", class_weights="balanced")
    with pytest.raises(DataError, match=r"weights must be .* but that of data row 3 is '-1'"):
        load(table.assign(copies=[1, 1, -1, *[1] * 17]), weight_column="copies")
    with pytest.raises(UserError, match="DP-SGD counts all rows the same"):
        unalike.run("fedavg", table, weight_column="copies", unit="point", epsilon=4.0, simulate_noise=True, **PLAIN)
