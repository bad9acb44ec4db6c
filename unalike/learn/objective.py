"""What a step of local training descends: an objective of parameters and a batch."""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor

from unalike.core.model import Model

Params = Tensor | dict[str, Tensor]
_NOTHING = 1e-12  # a batch without weight has a mean of 0


@dataclass(frozen=True)
class Batch:
    """Samples of one step; ``weight`` says how much each counts, 0 where a row only fills up; None: all the same.

    ``known`` is 1 for rows that have a label; None: all have, or none has (then there is no ``y``).
    """

    x: Tensor
    y: Tensor | None
    weight: Tensor | None
    known: Tensor | None = field(default=None, kw_only=True)

    def part(self, rows: slice) -> Batch:
        """Some of its rows."""

        def of(values: Tensor | None) -> Tensor | None:
            return None if values is None else values[rows]

        return Batch(self.x[rows], of(self.y), of(self.weight), known=of(self.known))

    def mean(self, values: Tensor) -> Tensor:
        """Mean of per-sample values [B] over the batch's real samples."""
        if self.weight is None:
            return values.mean()
        return (values * self.weight).sum() / self.weight.sum().clamp(min=_NOTHING)

    def mean_gradient(self, gradients: Tensor) -> Tensor:
        """[B, k] gradients of the per-sample values as those of their mean."""
        if self.weight is None:
            return gradients / len(gradients)
        return gradients * (self.weight / self.weight.sum().clamp(min=_NOTHING))[:, None]


def take_rows(values: Tensor, rows: Tensor) -> Tensor:
    """``values[rows]``, by the operation that ``vmap`` vectorises best: several times as fast as an index."""
    return F.embedding(rows, values.reshape(len(values), -1)).reshape(*rows.shape, *values.shape[1:])


Objective = Callable[[Params, Batch], Tensor]  # what a step descends: parameters and a batch to a number
StepGradient = Callable[[Params, Batch], tuple[Params, Tensor]]  # its gradient, and its value


Moves = Generator[dict[str, Tensor], dict[str, Tensor], Tensor]


@dataclass(frozen=True)
class InTurns:
    """What a step does where parts move in turns (Gauss-Seidel), each at the newest values of the others.

    ``moves(params, batch)`` is a generator: ``params = yield {"mu": gradient}`` has the loop move that part and gives
    the parameters as they are then; what it returns is the step's loss.
    """

    moves: Callable[[dict[str, Tensor], Batch], Moves]


def loss_of(outputs: Tensor, y: Tensor) -> Tensor:
    """Per-sample loss [B]: cross-entropy for classes, squared error for real targets."""
    if y.is_floating_point():
        return (outputs.reshape(len(y), -1).squeeze(-1) - y).square() / 2
    # as F.cross_entropy, which under vmap is put together from many small operations
    return -F.log_softmax(outputs, -1).gather(-1, y[:, None])[:, 0]


def loss_and_slope(outputs: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """``loss_of``, and each loss's gradient with respect to its outputs."""
    if y.is_floating_point():
        away = outputs.reshape(len(y), -1).squeeze(-1) - y
        return away.square() / 2, away.reshape(outputs.shape)
    of_classes, at = F.log_softmax(outputs, -1), y.unsqueeze(-1)
    losses = -of_classes.gather(-1, at)
    return losses.squeeze(-1), of_classes.exp().scatter_add(-1, at, torch.full_like(losses, -1.0))


# Distillation. A model's scores [B, k] are its log-probabilities of the classes, or for real targets its outputs, as
# means of normal distributions of variance 1. With q and p expected by student and teacher, the gradients with respect
# to the student's outputs are q − target for the loss and q − p for the divergence. They are written out because in a
# small step it costs more to differentiate these few operations than to compute them.


def scores(outputs: Tensor, y: Tensor) -> Tensor:
    return outputs if y.is_floating_point() else F.log_softmax(outputs, -1)


def expected(of_model: Tensor, y: Tensor) -> Tensor:
    """[B, k] what scores expect: probabilities of classes, or the real target."""
    return of_model if y.is_floating_point() else of_model.exp()


def target(of_model: Tensor, y: Tensor) -> Tensor:
    """[B, k] what scores should expect."""
    return y.reshape(of_model.shape) if y.is_floating_point() else F.one_hot(y, of_model.shape[-1])


def divergence(of_teacher: Tensor, of_student: Tensor, y: Tensor) -> Tensor:
    """[B] KL(teacher ‖ student) from their scores; half the squared distance for real targets."""
    if y.is_floating_point():
        return (of_teacher - of_student).square().sum(-1) / 2
    return (of_teacher.exp() * (of_teacher - of_student)).sum(-1)


def teacher_gradient(of_teacher: Tensor, of_student: Tensor, y: Tensor) -> Tensor:
    """[B, k] the gradient of ``divergence`` with respect to the teacher's outputs: p·(log p/q − KL)."""
    if y.is_floating_point():
        return of_teacher - of_student
    p, ratio = of_teacher.exp(), of_teacher - of_student
    return p * (ratio - (p * ratio).sum(-1, keepdim=True))


@dataclass(frozen=True)
class Supervised:
    """The mean loss of a model on a batch's labels; with ``origin``, the parameters are what is added to that."""

    model: Model
    origin: Tensor | None = None

    def __call__(self, params: Params, batch: Batch) -> Tensor:
        assert batch.y is not None
        return batch.mean(loss_of(self.model(self.theta(params), batch.x), batch.y))

    def theta(self, params: Params) -> Tensor:
        """The model's own parameters."""
        assert isinstance(params, Tensor)
        return params if self.origin is None else self.origin + params

    def at(self, point: Callable[[Tensor], Tensor]) -> Objective:
        """The loss of ``point(θ)`` as a function of θ, which may be a part of the model, or lie in a subspace."""

        def objective(theta: Params, batch: Batch) -> Tensor:
            assert isinstance(theta, Tensor)
            return self(point(theta), batch)

        return objective


def penalised(objective: Objective, penalty: Callable[[Tensor], Tensor]) -> Objective:
    """The objective plus a function of the parameters alone."""

    def total(theta: Params, batch: Batch) -> Tensor:
        assert isinstance(theta, Tensor)
        return objective(theta, batch) + penalty(theta)

    return total
