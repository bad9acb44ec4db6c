"""Numbers to predict are standardised by constants from sums over clients; predictions have the units of the data."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

import unalike as ua
from unalike.data.schema_file import read_schema, schema_text
from unalike.runs.watcher import Watcher

COLUMNS: dict[str, Any] = {"client_column": "shop", "label_column": "price", "task": "regression"}
QUICK: dict[str, Any] = {**COLUMNS, "rounds": 3, "model": "mlp", "block": 4, "threads": 1}


def prices(factor: float = 1.0, offset: float = 0.0) -> pd.DataFrame:
    random = np.random.default_rng(0)
    size, age = random.normal(70, 20, 240), random.integers(0, 80, 240)
    price = factor * (0.5 * size - 0.2 * age + random.normal(0, 2, 240)) + offset
    return pd.DataFrame({"shop": np.arange(240) % 8, "size": size, "age": age, "price": price})


def score(result: ua.Result, group: str = "seen") -> float:
    found = result.accuracy.of(group)
    assert found is not None
    return -found.mean


def test_another_unit_gives_the_same_models_and_scores_in_that_unit() -> None:
    """1,024 is a power of two, so that the same bits are trained; an offset costs some digits."""
    for factor, offset, digits in ((1024.0, 0.0, 1e-5), (1000.0, 5e4, 1e-2)):
        one, other = (ua.run("fedavg-finetune", prices(*unit), **QUICK) for unit in ((1.0, 0.0), (factor, offset)))
        for group in ("seen", "unseen"):
            assert score(other, group) == pytest.approx(factor * score(one, group), rel=digits)
        both = one.predictions.merge(other.predictions, on=["group", "client", "row"])
        np.testing.assert_allclose(both["prediction_y"], factor * both["prediction_x"] + offset, rtol=10 * digits)
    assert score(one) < 0.8 * float(prices()["price"].std())


def test_the_constants_are_those_of_the_labelled_training_rows_and_are_in_the_transcript() -> None:
    population = ua.data.load(prices(1000.0, 5e4), labeled=0.5, seed=0, **COLUMNS)
    federation = ua.simulate(population)
    schema, train = federation.roster.schema, population.train.select(population.seen)
    rows = [train.rows(i)[1] for i in range(len(train)) if bool(train.labeled[i])]
    y = np.concatenate([one.double().numpy() for one in rows if one is not None])
    assert 0 < len(rows) < len(train)
    assert schema.target_center == pytest.approx(y.mean(), rel=1e-9)
    assert schema.target_deviation == pytest.approx(y.std(), rel=1e-9)
    asked = {(row["task"], row["array"]) for row in federation.transcript.rows()}
    assert {("Scaling.targets", name) for name in ("total", "square", "rows")} <= asked


def test_public_constants_are_asked_of_nobody(tmp_path: Path) -> None:
    written = json.loads(schema_text(ua.data.load(prices(), **COLUMNS)))
    del written["note"]
    file = tmp_path / "public.json"
    file.write_text(json.dumps(written | {"target_center": 20.0, "target_deviation": 8.0}))
    assert read_schema(file).target_center == 20.0
    result = ua.run("fedavg", prices(), schema=str(file), out=tmp_path / "run", **QUICK)
    assert "Scaling" not in (tmp_path / "run" / "transcript.json").read_text()
    assert result.run.schema.target_deviation == 8.0 and score(result) < 8
    file.write_text(json.dumps(written | {"note": "of these rows", "target_center": 20.0, "target_deviation": 8.0}))
    assert read_schema(file).target_center is None
    file.write_text(json.dumps(written | {"target_deviation": 0.0}))
    with pytest.raises(ua.data.DataError, match=r"target_deviation=0\.0; expected a number above 0"):
        read_schema(file)


def test_a_newcomers_predictions_have_the_users_units_also_as_onnx(tmp_path: Path) -> None:
    table = prices(1000.0, 5e4)
    result = ua.run("fedavg", table, out=tmp_path / "run", **QUICK)
    new = prices(1000.0, 5e4).head(24).assign(shop="new")
    found = ua.predict(tmp_path / "run", new)["prediction"].astype(float)
    assert float((found - new["price"]).abs().mean()) < float(table["price"].std())
    model = result.personalize(new)
    onnx = pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    model.save_onnx(tmp_path / "new.onnx")
    x = new[["size", "age"]].to_numpy(np.float32)
    graph = onnx.InferenceSession(tmp_path / "new.onnx").run(None, {"x": x})[0][:, 0]
    np.testing.assert_allclose(graph, found, rtol=1e-4)


def test_evaluate_scores_errors_in_the_users_units() -> None:
    population = ua.data.load(prices(1000.0, 5e4), seed=0, **COLUMNS)
    method = ua.FedAvg(ua.Model.named("mlp", population), cohort=1.0)
    federation = ua.simulate(population)
    scores = ua.evaluate(method, ua.train(method, federation, 3), population, federation=federation)
    deviation = float(prices(1000.0, 5e4)["price"].std())
    assert scores.seen is not None and 0.01 * deviation < -scores.seen.mean < deviation


def test_a_private_run_without_public_constants_says_that_targets_are_as_they_are() -> None:
    notes: list[str] = []

    class Notes(Watcher):
        def note(self, text: str) -> None:
            notes.append(text)

    private = {"epsilon": 8.0, "delta": 0.001, "normalize": "private", "unit": "point", "simulate_noise": True}
    assert ua.run("fedavg", prices(), watcher=Notes(), **QUICK, **private).privacy.epsilon is not None
    assert "the numbers to predict are used as they are" in " ".join(notes)
