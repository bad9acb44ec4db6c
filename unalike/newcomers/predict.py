"""Predictions for the rows of a file: every client by its own model, a line for every row, and a score if it can be."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from unalike.core.lazy import pd
from unalike.core.schema import Schema
from unalike.data import load
from unalike.learn.metrics import (
    ERRORS,
    Metric,
    Predictions,
    bootstrap,
    metric_named,
    metrics_for,
    score_clients,
    usual_metric,
    value_of,
)
from unalike.newcomers.client_model import client_model
from unalike.newcomers.file import Newcomer, NewcomerFile
from unalike.newcomers.model import PersonalModel, words_for
from unalike.newcomers.serve import serve
from unalike.runs.errors import FLAG, UserError
from unalike.runs.finished import FinishedRun
from unalike.runs.measure import measure, metric_of
from unalike.runs.simulate import simulate
from unalike.runs.words import no_formula


@dataclass(frozen=True)
class Predicted:
    """One client's rows and what its model says to them."""

    newcomer: Newcomer
    served: PersonalModel
    answers: Tensor  # [rows, outputs]

    @property
    def name(self) -> str:
        return self.newcomer.name

    @property
    def learned(self) -> bool:
        """Did the labels that score the model also make it?"""
        return bool(self.newcomer.clients.labeled.all())


def predict_client(
    file: NewcomerFile,
    client: str,
    *,
    unlabeled: bool = False,
    seen: bool = False,
    classes: Sequence[str] | None = None,
) -> Predicted:
    """One client's model and its predictions.

    The client is a newcomer, whose model is made from these rows, or (``seen``) the training client of that name, who
    has a model already. ``unlabeled``: labels do not make the model, they only score it. ``classes``: those that a
    newcomer says it has.
    """
    run = file.run
    newcomer = file.newcomer(client, unlabeled=unlabeled or seen, truth=True)
    try:
        if seen:
            served = client_model(run, newcomer.name)
        else:
            served = serve(
                run,
                newcomer.clients,
                newcomer.name,
                classes=classes,
                left_out=newcomer.left_out,
                names=newcomer.row_names,
                expect=False,
            )
        answers = served.answers(newcomer.clients)
        if not bool(answers.isfinite().all()):
            raise UserError("the network overflows on these rows; give them on the same scale as in training")
    except UserError as error:
        if len(file.clients) == 1:
            raise
        raise UserError(f"client {newcomer.name}: {error}") from error
    return Predicted(newcomer, replace(served, notes=served.notes + newcomer.notes), answers)


@dataclass(frozen=True)
class Score:
    """How good predictions are by one metric, over all rows with a label."""

    metric: str
    value: float
    interval: tuple[float, float]  # of a bootstrap over clients, or over the rows of a single one
    clients: Sequence[float]  # each client's own; NaN: it has no such rows
    all: Mapping[str, float]  # by every metric


def find_metric(run: FinishedRun, wanted: str) -> tuple[str, Metric]:
    """The metric of this name, refused where the run's predictions have none that is called so."""
    try:
        return metric_named(wanted, run.schema.classes)
    except ValueError as error:
        raise UserError(f"{error}{FLAG}", "metric") from error


def score_rows(predicted: Sequence[Predicted], run: FinishedRun, wanted: str | None = None) -> Score | None:
    """By the metric that is wanted, else the run's; None where no row has a label."""
    sizes, truths = [len(one.answers) for one in predicted], [one.newcomer.truth for one in predicted]
    truth = np.concatenate([np.full(n, np.nan) if y is None else y for n, y in zip(sizes, truths, strict=True)])
    outputs = torch.cat([one.answers for one in predicted]).to(torch.float64).numpy()
    client = np.repeat(np.arange(len(sizes)), sizes)
    base = np.zeros_like(outputs)  # nobody asks what a newcomer's labels alone predict
    rows = Predictions(client, np.arange(len(truth)), truth, outputs, run.schema.classes, base).known()
    if not len(rows.truth):
        return None
    counts = None if rows.classes is None else np.bincount(rows.truth.astype(np.int64), minlength=rows.classes)
    name, metric = find_metric(run, wanted or run.recipe.metric or usual_metric(counts))
    sign = -1.0 if name in ERRORS else 1.0
    known = {one: value_of(metric, rows) for one, metric in metrics_for(rows.classes).items()}
    own = (sign * score_clients(metric, name, rows, len(sizes))).tolist()
    return Score(name, value_of(metric, rows), bootstrap(metric, rows), own, known)


def as_frame(predicted: Sequence[Predicted], schema: Schema) -> pd.DataFrame:
    """A line for each row in the order of the file: id, client, prediction, and the probability ``p_CLASS`` of each."""
    frames = []
    for one in predicted:
        chances = torch.softmax(one.answers.to(torch.float64), 1).numpy()[:, : schema.classes or 0]
        frame = pd.DataFrame(chances, one.newcomer.rows, [f"p_{name}" for name in schema.class_labels])
        for place, column in enumerate((one.newcomer.ids, one.name, words_for(one.answers, schema))):
            frame.insert(place, ("id", "client", "prediction")[place], column)
        frames.append(frame)
    return pd.concat(frames).sort_index(kind="stable").reset_index(drop=True)


def as_csv(predicted: Sequence[Predicted], schema: Schema) -> str:
    """``as_frame`` as CSV."""
    return as_frame(predicted, schema).map(no_formula).to_csv(index=False, float_format="%.9g", lineterminator="\n")


def score_elsewhere(
    path: Path, data: str, *, partition: str | None = None, clients: int | None = None, seed: int = 0, **options: Any
) -> dict[str, Any]:
    """Score a run on clients of another source: trained on simulated clients, say, and tried on real ones (T1 §7.3).

    Every client of ``data`` is a newcomer to the run at ``path``: it gets its model from its training rows, and the
    model is tried on its test rows. Rows are read and scaled as in the run; ``options`` as in ``unalike.data.load``.
    """
    finished = FinishedRun.open(path)
    how: dict[str, Any] = {"partition": partition, "clients": clients, "unseen": 0, "seed": seed, **options}
    population = load(data, schema=finished.schema, **how).using(finished.schema)
    federation, everybody = simulate(population, seed=seed), torch.arange(len(population))
    population = replace(population, seen=everybody[:0], unseen=everybody)
    measured = measure(finished.method, finished.state, federation, population)
    if not measured:
        raise UserError(f"{finished.recipe.method} makes no models for newcomers, so there is nothing to score")
    groups = {
        "labeled" if one.group == "unseen" else one.group: {
            "clients": int((~one.scores.score.isnan()).sum()),
            "mean": one.scores.mean,
            "p10": one.scores.p10,
            "worst": one.scores.worst,
        }
        for one in measured
    }
    return {
        "run": str(path),
        "trained_on": finished.recipe.data.name,
        "partition": finished.recipe.data.partition,
        "data": population.name,
        "metric": metric_of(population),
        "scores": groups,
        "notes": finished.notes,
    }
