"""Predictions for the rows of a file: every client by its own model, a line for every row, and a score if it can be."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from unalike.core.lazy import pd
from unalike.core.schema import Schema
from unalike.data import load
from unalike.newcomers.client_model import client_model
from unalike.newcomers.file import Newcomer, NewcomerFile
from unalike.newcomers.model import PersonalModel, words_for
from unalike.newcomers.serve import serve
from unalike.runs.errors import UserError
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
    def right(self) -> Tensor:
        """[labeled rows] 1 where the class is right, else 0; of numbers the squared error."""
        if self.newcomer.truth is None:
            return torch.zeros(0, dtype=torch.float64)
        there = torch.from_numpy(~np.isnan(self.newcomer.truth))
        truth, answers = torch.from_numpy(self.newcomer.truth)[there], self.answers[there]
        if self.served.run.schema.classes is None:
            return (answers[:, 0].to(torch.float64) - truth).square()
        return (answers.argmax(1) == truth).to(torch.float64)

    @property
    def score(self) -> float | None:
        return mean_score([self])

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


def mean_score(predicted: Sequence[Predicted]) -> float | None:
    """Over all rows with a label: accuracy, or the mean squared error; None if there are none."""
    values = torch.cat([one.right for one in predicted])
    return float(values.mean()) if len(values) else None


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
