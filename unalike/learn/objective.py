"""What a step of local training descends: an objective of parameters and a batch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor

from unalike.core.model import Model

Params = Tensor | dict[str, Tensor]


@dataclass(frozen=True)
class Batch:
    """Samples of one step; ``weight`` is 0 for rows that only fill up a partial batch, None where there are none."""

    x: Tensor
    y: Tensor | None
    weight: Tensor | None

    def mean(self, values: Tensor) -> Tensor:
        """Mean of per-sample values [B] over the batch's real samples."""
        if self.weight is None:
            return values.mean()
        return (values * self.weight).sum() / self.weight.sum().clamp(min=1)


def taken(values: Tensor, rows: Tensor) -> Tensor:
    """``values[rows]``, by the operation that ``vmap`` vectorises best: several times as fast as an index."""
    return F.embedding(rows, values.reshape(len(values), -1)).reshape(*rows.shape, *values.shape[1:])


Objective = Callable[[Params, Batch], Tensor]  # what a step descends: parameters and a batch to a number
StepGradient = Callable[[Params, Batch], tuple[Params, Tensor]]  # its gradient, and its value


def loss_of(outputs: Tensor, y: Tensor) -> Tensor:
    """Per-sample loss [B]: cross-entropy for classes, squared error for real targets."""
    if y.is_floating_point():
        return (outputs.reshape(len(y), -1).squeeze(-1) - y).square() / 2
    # as F.cross_entropy, which under vmap is put together from many small operations
    return -F.log_softmax(outputs, -1).gather(-1, y[:, None])[:, 0]


@dataclass(frozen=True)
class Supervised:
    """The mean loss of a model on a batch's labels."""

    model: Model

    def __call__(self, theta: Params, batch: Batch) -> Tensor:
        assert isinstance(theta, Tensor) and batch.y is not None
        return batch.mean(loss_of(self.model(theta, batch.x), batch.y))


def supervised(model: Model) -> Objective:
    """The mean loss of a model on a batch's labels."""
    return Supervised(model)
