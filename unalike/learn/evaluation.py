"""Evaluation: how good are personal models on their own clients' test data? Simulation only: charged to no ledger."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from unalike.core.client import Client, Clients
from unalike.core.federation import Cohort, Federation, QuorumError, each
from unalike.core.model import Model
from unalike.core.task import Sent, send, task
from unalike.learn.objective import loss_of

AT_ONCE = 256  # clients whose personal models are in memory together


@dataclass(frozen=True)
class Scorer:
    """Scores a model on a client: the share of right classes, or minus the mean squared error for real targets."""

    model: Model

    @task
    def score(self, client: Client, theta: Tensor) -> Sent:
        outputs = self.model(theta, client.x)
        if client.y.is_floating_point():
            quality = -2 * loss_of(outputs, client.y)
        else:
            quality = (outputs.argmax(-1) == client.y).to(torch.float32)
        return send(score=client.mean(quality), loss=client.mean(loss_of(outputs, client.y)))


@dataclass(frozen=True)
class Scores:
    """Per-client scores and losses, in the order of the clients; NaN for a client that got no model."""

    score: Tensor
    loss: Tensor

    @property
    def mean(self) -> float:
        return float(self.score.nanmean())

    @property
    def std(self) -> float:
        """Standard deviation over clients."""
        known = self.score[~self.score.isnan()]
        return float(known.std(correction=0)) if len(known) else float("nan")

    @property
    def p10(self) -> float:
        """The 10th percentile of the clients' scores."""
        return float(self.score.nanquantile(0.1))


def evaluate(
    model: Model,
    personalize: Callable[[Cohort], Tensor],
    federation: Federation,
    personal: Clients,
    test: Clients,
) -> Scores:
    """Score ``personalize``'s models: made from ``personal`` clients' data, tried on the same clients' ``test`` data.

    Works through the clients in parts, so that no more than a few hundred models are in memory. Clients without test
    data, and clients that fail to get a model, have NaN as their score.
    """
    if len(personal) != len(test) or not torch.equal(personal.ids, test.ids):
        raise ValueError("the clients that are personalized and the clients that are tested must be the same, in order")
    score = torch.full((len(test),), float("nan"))
    loss = score.clone()
    usable = ((test.size > 0) & (personal.size > 0)).nonzero().flatten()
    scorer = Scorer(model)
    for begin in range(0, len(usable), AT_ONCE):
        rows = usable[begin : begin + AT_ONCE]
        theta, served = _models(personalize, federation, personal.select(rows))
        rows = rows[served]
        if len(rows) == 0:
            continue
        replies = federation.aside(test.select(rows)).everyone().ask(scorer.score, theta=each(theta))
        score[rows[replies.answered]] = replies["score"]
        loss[rows[replies.answered]] = replies["loss"]
    return Scores(score, loss)


def _models(personalize: Callable[[Cohort], Tensor], federation: Federation, clients: Clients) -> tuple[Tensor, Tensor]:
    """Models [k, d] for the clients that get one, and their positions [k].

    A client whose own task fails, because its training diverged for example, gets none. The others are then asked again
    without it; a client's draws do not depend on the others, so their models stay the same.
    """
    rows = torch.arange(len(clients))
    while True:
        part = clients.select(rows)
        own = federation.aside(part)
        try:
            theta = personalize(own.everyone())
            if len(theta) == len(rows):
                return theta, rows
        except QuorumError:
            raise
        except (RuntimeError, ValueError):  # what fewer rows than clients lead to inside of a method
            if not own.failures:
                raise
        failed = {failure.client for failure in own.failures}
        if not failed:
            raise ValueError(f"personalize gave {len(theta)} models for {len(rows)} clients")
        rows = rows[[part.name(i) not in failed for i in range(len(part))]]
