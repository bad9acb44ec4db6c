"""How good the personal models are: on seen clients, on unseen ones, and on newcomers without labels.

Every score is made by the models that ``personalize`` gives, on the clients' own test rows. It is simulation only:
nothing of it reaches the ledger or the method.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor

from unalike.core.client import Clients
from unalike.core.federation import Federation
from unalike.core.method import Method, ServesUnlabeled, State, TrainsNewcomers
from unalike.data.population import Population
from unalike.learn.evaluation import Scores, evaluate
from unalike.studio.runs.result import Summary

Group = Literal["seen", "unseen", "unlabeled"]


@dataclass(frozen=True)
class Measured:
    """One group's scores; ``scores`` is NaN for a client that the method does not serve or that has no test labels.

    ``failed`` of them should have a score and have none: their model or its loss is not finite.
    """

    group: Group
    train: Clients
    test: Clients
    scores: Scores
    failed: int = 0

    def summary(self) -> Summary | None:
        """Over the clients with a score; None if no client has one."""
        scored, s = int((~self.scores.score.isnan()).sum()), self.scores
        counts = {"clients": len(self.train), "scored": scored, "failed": self.failed}
        return Summary(mean=s.mean, std=s.std, p10=s.p10, worst=s.worst, **counts) if scored else None

    def rows(self) -> list[dict[str, Any]]:
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


def serves_unlabeled(method: Method) -> bool:
    """Can it? A user's own method may leave the word out; then it serves no client without labels."""
    return isinstance(method, ServesUnlabeled) and method.serves_unlabeled


def measure(
    method: Method, state: State, federation: Federation, population: Population, newcomers: bool = True
) -> list[Measured]:
    """Score all groups of clients that there are and that the method serves.

    newcomers: also those who would have to train as long as the others did to get their model (``TrainsNewcomers``).
    """
    without_labels = serves_unlabeled(method)
    unseen = population.unseen if newcomers or not isinstance(method, TrainsNewcomers) else population.unseen[:0]

    def score(group: Group, which: Tensor, hidden: bool = False) -> Measured | None:
        if len(which) == 0 or (hidden and not without_labels):
            return None
        train, test = population.train.select(which), population.test.select(which)
        train = train.without_labels() if hidden else train
        rows = (test.labeled & (train.labeled | without_labels)).nonzero().flatten()
        roster = federation.runtime.roster.select(which[rows])
        part = evaluate(method.model, partial(method.personalize, state), federation, roster, labels=not hidden)
        scores = Scores(*(torch.full((len(which),), float("nan")) for _ in range(2)))
        scores.score[rows], scores.loss[rows] = part.score, part.loss
        failed = int((part.score.isnan() & (train.size[rows] > 0) & (test.size[rows] > 0)).sum())
        return Measured(group, train, test, scores, failed)

    measured = (score("seen", population.seen), score("unseen", unseen), score("unlabeled", unseen, hidden=True))
    return [one for one in measured if one is not None]


def metric_of(population: Population) -> str:
    """What a score is: the share of right classes, or minus the mean squared error."""
    return "accuracy" if population.classes is not None else "negative mean squared error"
