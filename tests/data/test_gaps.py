"""Missing numbers of a table: what stands for them comes from training rows of seen clients, or of their own client."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from torch import Tensor

import unalike
from unalike.data import DataError, load, load_lazily
from unalike.data.population import Population
from unalike.runs.errors import UserError
from unalike.runs.watcher import Watcher

CLIENTS, ROWS = 6, 10


def hospital_rows(extreme: float = 1.0) -> pd.DataFrame:
    """Six clients of ten rows; every third age is missing, and test rows and the last client hold ``extreme``."""
    rng = np.random.default_rng(0)
    frame = pd.DataFrame({"client": np.repeat(np.arange(CLIENTS), ROWS), "y": np.tile([0, 1], 30)})
    frame["age"] = rng.normal(50, 10, CLIENTS * ROWS).round(1)
    frame["weight"] = rng.normal(80, 5, CLIENTS * ROWS).round(1)
    frame.loc[::3, "age"] = np.nan
    return frame


def same_split(frame: pd.DataFrame, **options: object) -> Population:
    return load(frame, test=0.3, unseen=[CLIENTS - 1], seed=3, **options)  # type: ignore[arg-type]


def scaled_inputs(population: Population) -> Tensor:
    """What a model gets of the training rows of client 0, after the clients were asked for mean and deviation."""
    federation = unalike.simulate(population)
    schema = federation.roster.schema
    assert schema.shift is not None and schema.scale is not None
    return population.using(schema).train.block(torch.tensor([0])).x[0]


def test_means_come_from_training_rows_of_seen_clients_alone() -> None:
    frame = hospital_rows()
    population = same_split(frame, missing="mean")
    raw = torch.cat([population.train.select([i]).rows(0)[0] for i in range(CLIENTS - 1)]).to(torch.float64)
    expected = torch.tensor([raw[:, j][~raw[:, j].isnan()].mean() for j in range(2)])
    federation = unalike.simulate(population)
    assert federation.roster.schema.shift is not None and federation.roster.schema.gaps
    torch.testing.assert_close(federation.roster.schema.shift, expected.float())
    gap = population.train.select([0]).rows(0)[0][:, 0].isnan()
    assert gap.any()
    assert (scaled_inputs(population)[gap, 0] == 0).all(), "a missing number counts as the mean"
    asked = {row["task"] for row in federation.transcript.rows()}
    assert any("totals" in task for task in asked), "the means are in the transcript"


def test_test_rows_and_unseen_clients_change_no_training_input() -> None:
    frame = hospital_rows()
    before = same_split(frame, missing="mean")
    away = frame.copy()
    x = torch.from_numpy(frame[["age", "weight"]].to_numpy(np.float32))
    elsewhere = [before.test.select([i]).rows(0)[0] for i in range(CLIENTS)] + [
        before.train.select([CLIENTS - 1]).rows(0)[0]
    ]
    for row in torch.cat(elsewhere):
        at = (torch.isclose(x, row, equal_nan=True)).all(1).nonzero()[0].item()
        away.loc[at, ["age", "weight"]] = [1000.0, -1000.0]
    after = same_split(away, missing="mean")
    torch.testing.assert_close(scaled_inputs(after), scaled_inputs(before), rtol=0, atol=0)
    own = same_split(away, missing="client")
    torch.testing.assert_close(
        own.train.rows(0)[0], same_split(frame, missing="client").train.rows(0)[0], rtol=0, atol=0
    )


def test_each_client_can_fill_by_its_own_training_rows(tmp_path: Path) -> None:
    frame = hospital_rows()
    population, raw = same_split(frame, missing="client"), same_split(frame, missing="mean")
    for client in range(CLIENTS):
        train, filled = raw.train.rows(client)[0][:, 0], population.train.rows(client)[0][:, 0]
        torch.testing.assert_close(filled[train.isnan()].unique(), train[~train.isnan()].mean()[None])
        test = raw.test.rows(client)[0][:, 0]
        assert (population.test.rows(client)[0][:, 0][test.isnan()] == filled[train.isnan()][0]).all()
    frame.to_csv(tmp_path / "own.csv", index=False)
    pieces = load_lazily(tmp_path / "own.csv", missing="client", test=0.3, unseen=[CLIENTS - 1], seed=3)
    part = pieces.select(torch.tensor([2]))["train"]
    torch.testing.assert_close(part.rows(0)[0], population.train.rows(2)[0])


def test_a_client_with_nothing_to_fill_with() -> None:
    frame = hospital_rows()
    frame.loc[frame["client"] == 1, "age"] = np.nan
    scaled = same_split(frame, missing="client")
    assert scaled.train.rows(1)[0][:, 0].isnan().all(), "it counts as the mean of the scaling"
    assert torch.isfinite(scaled_inputs(scaled)).all()
    with pytest.raises(DataError, match=r"client 1 has no value of feature 1 in its training rows"):
        same_split(frame, missing="client", normalize=False)
    with pytest.raises(DataError, match=r"these inputs are not scaled; .* missing='client'"):
        same_split(frame, missing="mean", normalize=False)


def test_under_epsilon_missing_numbers_are_charged_as_the_scaling_is() -> None:
    frame = pd.concat([hospital_rows()] * 20)
    population = load(frame, missing="mean", classes=2, normalize="private")
    assert not population.pooled, "the means are asked for in noisy sums, not read off the rows"
    result = unalike.run("fedavg", data=population, rounds=1, unit="point", epsilon=9.0, simulate_noise=True)
    assert result.privacy.epsilon is not None and 0 < result.privacy.epsilon <= 9.0
    own = load(frame, missing="client", classes=2, normalize="private")
    with pytest.raises(UserError, match=r"one row changes others, .* missing = mean"):
        unalike.run("fedavg", data=own, rounds=1, unit="point", epsilon=9.0, simulate_noise=True)


def test_a_client_that_loses_all_of_its_rows_is_named() -> None:
    frame = hospital_rows().assign(client=lambda table: "h" + table["client"].astype(str))
    frame.loc[frame["client"] == "h2", "weight"] = np.nan  # this one never measures it
    population = load(frame, missing="drop", unseen=0)
    assert population.dropped == ["h2"] and len(population) == CLIENTS - 1
    with pytest.raises(UserError, match="no training client 'h2'"):
        unalike.run("fedavg", frame, missing="drop", unseen=0, rounds=1).predict(frame[:1], client="h2")
    told: list[str] = []
    watcher = type("Told", (Watcher,), {"note": lambda self, text: told.append(text)})()
    unalike.run("fedavg", frame, missing="drop", unseen=0, rounds=1, watcher=watcher)
    assert "1 of 6 clients have too few rows to train and test on and are left out: h2" in told[0]
