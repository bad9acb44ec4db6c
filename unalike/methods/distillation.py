"""Distillation: a student learns from its labels and from a teacher. ``mix`` weighs the two."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor
from torch.func import vjp

from unalike.core.model import Model
from unalike.learn.objective import Batch, Objective, Params, divergence, expected, loss_of, scores, target


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
