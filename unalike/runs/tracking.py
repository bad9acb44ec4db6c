"""Logs a run's rounds to MLflow or TensorBoard while it goes on; either is an extra."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from unalike.runs.errors import FLAG, UserError
from unalike.runs.folder import plain_name
from unalike.runs.result import GROUPS
from unalike.runs.watcher import Watcher

KNOWN = ("mlflow", "tensorboard")


class Tracker(Watcher):
    """Passes all on to another watcher, and logs the numbers of each round.

    ``where``: "mlflow" (the store of MLFLOW_TRACKING_URI), "mlflow=URI", "tensorboard" (in the folder runs) or
    "tensorboard=FOLDER". Of a run with an ε no score is logged, because no noise protects it.
    """

    def __init__(self, where: str, inner: Watcher | None = None) -> None:
        kind, _, place = where.partition("=")
        if kind not in KNOWN:
            known = "mlflow, mlflow=URI, tensorboard or tensorboard=FOLDER"
            raise UserError(f"track = {where!r}{FLAG}: expected {known}", "track")
        self._inner = inner or Watcher()
        try:
            self._log: _MLflow | _TensorBoard = _MLflow(place) if kind == "mlflow" else _TensorBoard(place or "runs")
        except ModuleNotFoundError as error:
            raise UserError(f"to track by {kind} needs {error.name}: pip install 'unalike[{kind}]'") from error

    def begin(self, label: str, rounds: int, done: int, metric: str) -> None:
        self._log.begin(label, {"rounds": rounds, "metric": metric})
        self._inner.begin(label, rounds, done, metric)

    def round(self, record: Mapping[str, Any]) -> None:
        values = {name: value for name, value in record.items() if name != "round"}
        if not record.get("epsilon"):
            values |= {f"score/{group}": (record.get(group) or {}).get("mean") for group in GROUPS}
        numbers = {name: float(value) for name, value in values.items() if isinstance(value, int | float)}
        self._log.round(record["round"], numbers)
        self._inner.round(record)

    def workers(self, text: str) -> None:
        self._inner.workers(text)

    def note(self, text: str) -> None:
        self._inner.note(text)

    def end(self) -> None:
        self._log.end()
        self._inner.end()


class _MLflow:
    def __init__(self, uri: str) -> None:
        from mlflow import MlflowClient

        self._client, self._run = MlflowClient(tracking_uri=uri or None), ""

    def begin(self, label: str, facts: Mapping[str, Any]) -> None:
        known = self._client.get_experiment_by_name("unalike")
        experiment = self._client.create_experiment("unalike") if known is None else known.experiment_id
        self._run = self._client.create_run(experiment, run_name=label).info.run_id
        for name, value in {"label": label, **facts}.items():
            self._client.log_param(self._run, name, value)

    def round(self, number: int, values: Mapping[str, float]) -> None:
        from mlflow.entities import Metric

        now = int(1000 * time.time())
        self._client.log_batch(self._run, metrics=[Metric(name, value, now, number) for name, value in values.items()])

    def end(self) -> None:
        self._client.set_terminated(self._run)


class _TensorBoard:
    def __init__(self, folder: str) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._make, self._folder = SummaryWriter, Path(folder)

    def begin(self, label: str, facts: Mapping[str, Any]) -> None:
        self._writer = self._make(str(self._folder / plain_name(label)))
        self._writer.add_text("run", ", ".join(f"{name}: {value}" for name, value in {"label": label, **facts}.items()))

    def round(self, number: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, number)

    def end(self) -> None:
        self._writer.close()
