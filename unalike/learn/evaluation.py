"""Evaluation: how good are personal models on their own clients' test data? Simulation only: charged to no ledger."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from unalike.core.federation import Held, QuorumError
from unalike.core.outside import WrongReturn, first_line_of
from unalike.core.roster import Roster
from unalike.core.vocabulary import Client, Cohort, Federation, Model, Models, Sent, each, send, task
from unalike.learn.objective import loss_of

AT_ONCE = 256  # clients whose personal models are in memory together


@dataclass(frozen=True)
class Scorer:
    """Scores a model on a client: the share of right classes, or minus the mean squared error for real targets."""

    model: Model

    @task
    def score(self, client: Client, theta: Tensor) -> Sent:
        client = client.with_labels
        outputs = self.model(theta, client.x)
        if client.y.is_floating_point():
            quality = -2 * loss_of(outputs, client.y)
        else:
            quality = (outputs.argmax(-1) == client.y).to(torch.float32)
        rows = client.n.clamp(min=1)  # a client without rows has no score, and says so by sending 0 of them
        loss = client.sum(loss_of(outputs, client.y)) / rows
        return send(score=client.sum(quality) / rows, loss=loss, rows=client.n)


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

    @property
    def worst(self) -> float:
        """The lowest score of a client."""
        return float(self.score.nanquantile(0.0))


def evaluate(
    model: Model,
    personalize: Callable[[Cohort], Models],
    federation: Federation,
    roster: Roster,
    *,
    labels: bool = True,
    look: Callable[[Cohort, Models, Tensor], None] | None = None,
) -> Scores:
    """Score ``personalize``'s models: made from the clients' training rows, tried on their test rows, both where the
    clients live. Only the scores come back.

    labels: may ``personalize`` read labels? look: sees each cohort, its models, and where it is in the roster.

    Works through the clients in parts, so that no more than a few hundred
    models are in memory. Clients without test rows, and clients that fail to get a model, have NaN as their score.
    """
    score = torch.full((len(roster),), float("nan"))
    loss = score.clone()
    scorer, unit = Scorer(model), federation.roster.schema.target_deviation or 1.0
    for begin in range(0, len(roster), AT_ONCE):
        rows = torch.arange(begin, min(begin + AT_ONCE, len(roster)))
        while len(rows):
            with federation.aside(roster.select(rows), labels=labels) as own:
                cohort = own.everyone()
                models, failed = _models(personalize, cohort)
                if len(failed):
                    # a client's draws do not depend on the others, so theirs stay the same without it
                    rows = rows[[position not in failed for position in range(len(rows))]]
                    continue
                theta = models if isinstance(models, Held) else each(models)
                replies = cohort.on("test").ask(scorer.score, theta=theta)
                tested = replies["rows"] > 0
                served = rows[replies.answered][tested]
                score[served] = unit**2 * replies["score"][tested].to(score.dtype)
                loss[served] = replies["loss"][tested].to(loss.dtype)
                if look is not None:
                    look(cohort, models, rows)
            break
    return Scores(score, loss)


def _models(personalize: Callable[[Cohort], Models], cohort: Cohort) -> tuple[Models, set[int]]:
    """Models for all clients of the cohort, or the positions of those that get none.

    A client whose own task fails, because its training diverged for example, gets none.
    """
    federation = cohort.federation
    nothing = torch.zeros(0)
    try:
        models = personalize(cohort)
    except QuorumError:
        raise
    except (RuntimeError, ValueError):  # what fewer rows than clients lead to inside of a method
        if not federation.failures:
            raise
        models = nothing
    names = {failure.client for failure in federation.failures}
    failed = {position for position in range(len(cohort)) if federation.roster.name(position) in names}
    if not failed and not isinstance(models, Held):
        _check_shape(models, len(cohort), personalize)
    return models, failed


def _check_shape(models: object, clients: int, personalize: Callable[[Cohort], Models]) -> None:
    if isinstance(models, Tensor) and models.ndim == 2 and len(models) == clients:
        return
    found = f"a tensor {list(models.shape)}" if isinstance(models, Tensor) else type(models).__name__
    raise WrongReturn(
        f"personalize gave {found} for {clients} clients; expected a matrix [C, d], one row a client (one model for "
        f"all: theta.expand(len(cohort), -1)), or replies.held(...){first_line_of(personalize)}"
    )
