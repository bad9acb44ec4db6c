"""Clients that keep a model of their own: who has one, how a newcomer gets one, and how a common model teaches it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.func import vjp

from unalike.core.vocabulary import Client, Cohort, Model, Models, Replies, Sent, State, Task, send, task
from unalike.learn.objective import Batch, Objective, Params, divergence, expected, loss_of, scores, target
from unalike.privacy.sampling import Poisson

NOBODY = torch.zeros(0, dtype=torch.int64)  # the first ``ids``


@dataclass(frozen=True, kw_only=True)
class PersonalModels:
    """Every client keeps a model θ of its own; a newcomer trains one, starting from what all have in common.

    - ``newcomer_rounds``: a newcomer, or a client that was never sampled, trains as many local steps as a client does
      in that many rounds. A client without labels gets the common model.
    - ``agreed_seed``: everybody knows it and draws the first models from it, so these are never sent.
    """

    newcomer_rounds: int = 1
    agreed_seed: int = 0
    serves_unlabeled: ClassVar[bool] = True

    @task(stays="theta")
    def recall(self, client: Client, common: Tensor) -> Sent:
        """The client's own model, or the common one where there is none."""
        return send(theta=client.kept.get("theta", common))

    def own_models(self, state: State, cohort: Cohort, join: Task, common: Tensor, **given: Tensor) -> Models:
        """The models of a cohort. Its newcomers train theirs first, by the task ``join``, from what is ``given``."""
        new = newcomers(state, cohort)
        if len(new) and self.newcomer_rounds:
            new.ask(join, **given, into=[])
        return cohort.ask(self.recall, common=common).held("theta")


def with_answered(state: State, cohort: Cohort, replies: Replies) -> State:
    """The state with those who answered among its ``ids``; a Poisson sample is secret, so it adds nobody."""
    if isinstance(cohort.sampling, Poisson):
        return state
    return state.replace(ids=torch.unique(torch.cat([state.ids, cohort.ids[replies.answered]])))


def newcomers(state: State, cohort: Cohort) -> Cohort:
    """Those of the cohort that have labels to train with and are not among the state's ``ids``."""
    federation = cohort.federation
    labeled = federation.roster.labeled[cohort.positions] & federation.labels
    return cohort.only((labeled & ~torch.isin(cohort.ids, state.ids)).nonzero().flatten())


# Distillation: a student learns from its labels and from a teacher; ``mix`` weighs the two


def distillation_loss(model: Model, teacher: Tensor, mix: Callable[[Tensor, Tensor], Tensor]) -> Objective:
    """The student's loss, the teacher fixed: the mix of its own loss and KL(p_teacher ‖ p_student)."""

    def objective(student: Params, batch: Batch) -> Tensor:
        assert isinstance(student, Tensor) and batch.y is not None
        of_student, of_teacher = (scores(model(one, batch.x), batch.y) for one in (student, teacher))
        return batch.mean(mix(loss_of(of_student, batch.y), divergence(of_teacher, of_student, batch.y)))

    return objective


def student_gradient(
    model: Model, student: Tensor, teacher: Tensor, batch: Batch, mix: Callable[[Tensor, Tensor], Tensor]
) -> tuple[Tensor, Tensor, Tensor, Callable[[Tensor], tuple[Tensor]]]:
    """The gradient of ``distillation_loss``, the student's own loss, and the teacher's scores with their pullback."""
    x, y = batch.x, batch.y
    assert y is not None
    outputs, pull_teacher = vjp(lambda theta: model(theta, x), teacher)[:2]
    of_teacher = scores(outputs, y)
    outputs, pull_student = vjp(lambda theta: model(theta, x), student)[:2]
    of_student = scores(outputs, y)
    q, p = expected(of_student, y), expected(of_teacher, y)
    gradient = pull_student(batch.mean_gradient(mix(q - target(of_student, y), q - p)))[0]
    return gradient, batch.mean(loss_of(of_student, y)), of_teacher, pull_teacher
