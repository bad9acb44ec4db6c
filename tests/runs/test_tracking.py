"""Rounds in a real local store of MLflow, and in TensorBoard's own files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import unalike as ua
from unalike.commands.main import app
from unalike.runs.tracking import Tracker

PLAIN: dict[str, Any] = {"data": "digits", "partition": "iid", "clients": 6, "rounds": 2, "model": "logistic"}
PRIVATE = {"epsilon": 8.0, "delta": 1e-2, "clip": 1.0, "normalize": False, "simulate_noise": "simulated"}


def in_mlflow(uri: str) -> list[dict[str, list[float]]]:
    """The metrics of each run, round by round."""
    from mlflow import MlflowClient

    client = MlflowClient(tracking_uri=uri)
    experiment = client.get_experiment_by_name("unalike")
    runs = client.search_runs([experiment.experiment_id], order_by=["attributes.start_time"])
    return [
        {name: [one.value for one in client.get_metric_history(run.info.run_id, name)] for name in run.data.metrics}
        for run in runs
    ]


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    return (tmp_path / "store").as_uri()


def test_mlflow_has_the_rounds_of_a_run(store: str) -> None:
    result = ua.run("fedavg", watcher=Tracker(f"mlflow={store}"), **PLAIN)
    (found,) = in_mlflow(store)
    assert found["score/seen"] == pytest.approx(list(result.rounds["seen"]))
    assert found["loss"] == pytest.approx(list(result.rounds["loss"])) and "round" not in found


def test_scores_of_a_private_run_are_not_logged(store: str) -> None:
    result = ua.run("fedavg", watcher=Tracker(f"mlflow={store}"), **PLAIN, **PRIVATE)
    (found,) = in_mlflow(store)
    assert found["epsilon"] == pytest.approx(list(result.rounds["epsilon"]))
    assert not [name for name in found if name.startswith("score/")]


def test_tensorboard_has_the_rounds_of_each_run_of_a_comparison(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    words = "compare fedavg local --data digits --partition iid --clients 6 --rounds 2 --model logistic --json"
    done = CliRunner().invoke(
        app, [*words.split(), "--track", f"tensorboard={tmp_path}", "--out", str(tmp_path / "run")]
    )
    assert done.exit_code == 0, done.output
    for name in ("fedavg", "local"):
        events = EventAccumulator(str(tmp_path / name)).Reload()
        logged = {one.step: one.value for one in events.Scalars("score/seen")}
        rounds = ua.Result.load(tmp_path / "run" / name).rounds
        assert logged == pytest.approx(dict(rounds["seen"]))


def test_another_place_is_refused() -> None:
    with pytest.raises(ua.UserError, match="expected mlflow"):
        Tracker("wandb")
