"""Predictions for the rows of a file: every client by its own model, a line for every row, and a score if it can be."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from unalike.core.schema import Schema
from unalike.studio.errors import UserError
from unalike.studio.newcomer.file import Newcomer, NewcomerFile
from unalike.studio.newcomer.serve import Served, serve, words_for
from unalike.studio.runs.own_model import own_model


@dataclass(frozen=True)
class Predicted:
    """One client's rows and what its model says to them."""

    newcomer: Newcomer
    served: Served
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
            served = own_model(run, newcomer.name)
        else:
            served = serve(
                run, newcomer.clients, newcomer.name, classes=classes, left_out=newcomer.left_out, expect=False
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


def as_table(predicted: Sequence[Predicted], schema: Schema) -> str:
    """CSV in the order of the file: id, client, prediction, and for each class its probability ``p_CLASS``."""
    frames = []
    for one in predicted:
        chances = torch.softmax(one.answers.to(torch.float64), 1).numpy()[:, : schema.classes or 0]
        frame = pd.DataFrame(chances, one.newcomer.rows, [f"p_{name}" for name in schema.classes_named])
        for place, column in enumerate((one.newcomer.ids, one.name, words_for(one.answers, schema))):
            frame.insert(place, ("id", "client", "prediction")[place], column)
        frames.append(frame)
    return pd.concat(frames).sort_index(kind="stable").to_csv(index=False, float_format="%.9g", lineterminator="\n")
