"""How good the personal models are: on seen clients, on unseen ones, and on newcomers without labels.

Every score is made by the models that ``personalize`` gives, on the clients' own test rows. It is simulation only:
nothing of it reaches the ledger or the method. Choices are made by validation rows, where there are any.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from unalike.core.client import Clients
from unalike.core.method import Method, ServesUnlabeled, TrainsNewcomers
from unalike.core.schema import Schema
from unalike.core.vocabulary import Cohort, Federation, Model, Models, State
from unalike.data.population import Population
from unalike.learn.evaluation import Scores, evaluate
from unalike.learn.metrics import Metric, Predictions, metric_named, score_clients, score_name, usual_metric
from unalike.runs.absent import Absent
from unalike.runs.errors import FLAG, UserError
from unalike.runs.result import Summary
from unalike.runs.simulate import gather_models, simulate

Group = Literal["seen", "unseen", "unlabeled", "validation"]


@dataclass(frozen=True)
class Measured:
    """One group's scores; ``scores`` is NaN for a client that the method does not serve or that has no test labels.

    ``failed`` of them should have a score and have none: their model or its loss is not finite. ``rows`` and
    ``validation`` are what was predicted for test and validation rows, if anybody looked.
    """

    group: Group
    train: Clients
    test: Clients
    scores: Scores
    failed: int = 0
    rows: Predictions | None = None
    validation: Predictions | None = None

    def summary(self) -> Summary | None:
        """Over the clients with a score; None if no client has one."""
        scored, s = int((~self.scores.score.isnan()).sum()), self.scores
        counts = {"clients": len(self.train), "scored": scored, "failed": self.failed}
        return Summary(mean=s.mean, std=s.std, p10=s.p10, worst=s.worst, **counts) if scored else None

    def by_client(self) -> list[dict[str, Any]]:
        """The per-client table."""
        score, loss = self.scores.score.tolist(), self.scores.loss.tolist()
        return [
            {
                "client": self.train.name(i),
                "group": self.group,
                "n_train": int(self.train.size[i]),
                "n_test": int(self.test.size[i]),
                "score": None if math.isnan(score[i]) else score[i],
                "loss": None if math.isnan(loss[i]) else loss[i],
            }
            for i in range(len(self.train))
        ]


@dataclass(frozen=True)
class Headline:
    """The metric that scores are by; ``look``: what is predicted for each row is kept, too."""

    name: str
    metric: Metric
    look: bool = False

    @classmethod
    def of(cls, population: Population, wanted: str | None = None) -> Headline:
        """The one that is asked for; else accuracy or RMSE."""
        usual = "RMSE" if population.classes is None else "accuracy"
        return cls(*metric_named(wanted or usual, population.classes))

    @property
    def made_at_clients(self) -> bool:
        """Do clients compute it themselves, so that no row is needed here?"""
        return self.name in ("accuracy", "RMSE")

    def score(self, part: Scores, rows: Predictions | None) -> Tensor:
        """[clients] by this metric; the larger, the better."""
        if self.made_at_clients:
            return -(-part.score).sqrt() if self.name == "RMSE" else part.score
        assert rows is not None
        scores = torch.from_numpy(score_clients(self.metric, self.name, rows, len(part.score)))
        return torch.where(part.score.isnan(), torch.nan, scores.to(part.score.dtype))


class _Rows:
    """Collects what the models of a group's clients predict for the rows of one part of the data."""

    def __init__(self, model: Model, part: Clients, train: Clients, schema: Schema) -> None:
        self._model, self._part, self._train, self._schema = model, part, train, schema
        self._found: dict[int, tuple[np.ndarray, ...]] = {}

    def add(self, models: Tensor, places: Tensor) -> None:
        """Models for the clients in these places of the group."""
        for theta, place in zip(models, places.tolist(), strict=True):
            x = self._part.inputs(place)
            if not len(x):
                continue
            with torch.no_grad():
                outputs = self._model(theta, x).reshape(len(x), -1).to(torch.float64)
            rows = np.arange(len(x)) + int(self._part.start[place])
            truth, own = _labels(self._part, place), _labels(self._train, place)
            base = np.tile(_baseline(own[~np.isnan(own)], self._schema.classes, outputs.shape[1]), (len(x), 1))
            answers = self._schema.in_units(outputs).numpy()
            self._found[place] = (np.full(len(x), place), rows, truth, answers, base)

    def predictions(self) -> Predictions | None:
        if not self._found:
            return None
        client, row, truth, outputs, base = (
            np.concatenate(one) for one in zip(*(self._found[place] for place in sorted(self._found)), strict=True)
        )
        return Predictions(client, row, truth, outputs, self._schema.classes, base)


def _labels(part: Clients, place: int) -> np.ndarray:
    """[rows] a client's labels as numbers; NaN where there is none."""
    x, y = part.rows(place)
    if y is None:
        return np.full(len(x), np.nan)
    known = slice(None) if part.known is None else part.known[int(part.start[place]) :][: len(y)].numpy()
    labels = np.full(len(y), np.nan)
    labels[known] = y.to(torch.float64).numpy()[known]
    return labels


def _baseline(labels: np.ndarray, classes: int | None, width: int) -> np.ndarray:
    """What training labels predict by themselves: their shares of the classes, or their mean."""
    if classes is None:
        return np.array([labels.mean() if len(labels) else 0.0])
    counts = np.bincount(labels.astype(np.int64), minlength=width)[:width]
    return counts / len(labels) if len(labels) else np.full(width, 1 / width)


def serves_unlabeled(method: Method) -> bool:
    """Can it? A user's own method may leave the word out; then it serves no client without labels."""
    return isinstance(method, ServesUnlabeled) and method.serves_unlabeled


def measure(
    method: Method,
    state: State,
    federation: Federation,
    population: Population,
    newcomers: bool = True,
    by: Headline | None = None,
) -> list[Measured]:
    """Score all groups of clients that there are and that the method serves.

    newcomers: also those who would have to train as long as the others did to get their model (``TrainsNewcomers``).
    """
    by = by or Headline.of(population)
    unseen = population.unseen if newcomers or not isinstance(method, TrainsNewcomers) else population.unseen[:0]
    here = population.using(federation.roster.schema) if by.look else population
    groups: list[tuple[Group, Tensor]] = [("seen", population.seen), ("unseen", unseen)]
    if serves_unlabeled(method):
        groups.append(("unlabeled", unseen))
    return [_measure_group(group, which, method, state, federation, here, by) for group, which in groups if len(which)]


def _measure_group(
    group: Group, which: Tensor, method: Method, state: State, federation: Federation, here: Population, by: Headline
) -> Measured:
    train, validation, test = (part.select(which) for part in here.parts.values())
    labels = train
    train = train.without_labels() if group == "unlabeled" else train
    there = test.size + validation.size > 0
    rows = (there & test.labeled & (train.labeled | serves_unlabeled(method))).nonzero().flatten()
    if not len(rows):  # nobody has a score: at a network's sites, say, that show none
        none = torch.full((len(which),), float("nan"))
        return Measured(group, train, test, Scores(none, none))
    roster = federation.runtime.roster.select(which[rows])
    tested, validated = (_Rows(method.model, part, labels, here.schema) for part in (test, validation))

    def look(cohort: Cohort, models: Models, places: Tensor) -> None:
        theta = gather_models(cohort, models)
        tested.add(theta, rows[places])
        if group == "seen":
            validated.add(theta, rows[places])

    part = evaluate(
        method.model,
        partial(method.personalize, state),
        federation,
        roster,
        labels=group != "unlabeled",
        look=look if by.look else None,
    )
    scores = Scores(*(torch.full((len(which),), float("nan")) for _ in range(2)))
    scores.score[rows], scores.loss[rows] = part.score, part.loss
    found = tested.predictions()
    if found is not None or by.made_at_clients:
        scores.score.copy_(by.score(scores, found))
    failed = int((part.score.isnan() & (train.size[rows] > 0) & (test.size[rows] > 0)).sum())
    return Measured(group, train, test, scores, failed, found, validated.predictions())


def score_newcomers(
    method: Method, state: State, train: Clients, test: Clients, federation: Federation, labels: bool = True
) -> Scores:
    """The scores of clients that are not in the federation, in the round that it is in.

    They personalize with ``train`` and are scored on ``test``; without ``labels`` the method does not see theirs.
    """
    theirs = simulate({"train": train, "test": test}, federation.seed, round=federation.round)
    return evaluate(method.model, partial(method.personalize, state), theirs, theirs.roster, labels=labels)


def headline(population: Population, wanted: str | None, private: bool) -> tuple[Headline, str]:
    """The metric of a run, and why, where nobody asked for it and it is not the usual one.

    In a private run nobody looks at the labels for this choice.
    """
    why = ""
    if wanted is None and population.classes is not None and not private and population.has_labels:
        counts = None if isinstance(population, Absent) else population.histogram().sum(0)
        if counts is not None and (name := usual_metric(counts.numpy())) != "accuracy":
            share = float(counts.max()) / float(counts.sum())
            largest = str(population.class_names[int(counts.argmax())]) if population.class_names else "one class"
            why = f"{share:.0%} of the rows are {largest!r}, so accuracy says little; scored by {name}{FLAG}"
            wanted = name
    try:
        found = Headline.of(population, wanted)
    except ValueError as error:
        raise UserError(f"{error}{FLAG}", "metric") from error
    if not found.made_at_clients:
        import_module("sklearn.metrics")  # takes seconds, which are no time of measuring
    if isinstance(population, Absent) and not found.made_at_clients:
        raise UserError(f"metric = {found.name!r}{FLAG}: rows of workers are not here; use accuracy or RMSE", "metric")
    return found, why


def validation_score(measured: Sequence[Measured], by: Headline) -> float | None:
    """The mean score of seen clients on their validation rows: what choices are made by; None: there are none."""
    rows = next((one.validation for one in measured if one.group == "seen"), None)
    if rows is None:
        return None
    scores = score_clients(by.metric, by.name, rows, int(rows.client.max()) + 1)
    return None if np.isnan(scores).all() else float(np.nanmean(scores))


def metric_of(population: Population) -> str:
    """What a score is, where nothing else is asked for; the larger, the better."""
    return score_name(Headline.of(population).name)
