"""Local SGD: the only inner training loop. Every method that trains at a client goes through it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.func import grad_and_value

from motley.client import Client
from motley.model import Model

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


Objective = Callable[[Params, Batch], Tensor]  # what a step descends: parameters and a batch to a number


def loss_of(outputs: Tensor, y: Tensor) -> Tensor:
    """Per-sample loss [B]: cross-entropy for classes, squared error for real targets."""
    if y.is_floating_point():
        return (outputs.reshape(len(y), -1).squeeze(-1) - y).square() / 2
    return F.cross_entropy(outputs, y, reduction="none")


def supervised(model: Model) -> Objective:
    """The mean loss of a model on a batch's labels."""

    def objective(theta: Params, batch: Batch) -> Tensor:
        assert isinstance(theta, Tensor) and batch.y is not None
        return batch.mean(loss_of(model(theta, batch.x), batch.y))

    return objective


@dataclass(frozen=True)
class LocalSGD:
    """SGD on one client's own samples, for ``epochs`` shuffled passes or for ``steps`` batches drawn afresh.

    An epoch's last batch may be partial; it is averaged over its own samples. ``batch=None`` is the whole client.
    With ``steps``, every batch is drawn independently, with replacement. ``clip`` bounds the gradient's norm.
    ``lr`` may name a rate for each part when the parameters are a dict.
    """

    epochs: int | None = 1
    steps: int | None = None
    batch: int | None = 32
    lr: float | Mapping[str, float] = 0.1
    momentum: float = 0.0
    weight_decay: float = 0.0
    clip: float | None = None

    def __post_init__(self) -> None:
        if self.steps is not None and self.epochs not in (None, 1):
            raise ValueError(f"give epochs ({self.epochs}) or steps ({self.steps}), not both")
        amount = self.steps if self.steps is not None else self.epochs
        if amount is None or amount < 0:
            raise ValueError(f"local training needs epochs or steps of 0 or more, got {amount}")
        if self.batch is not None and self.batch < 1:
            raise ValueError(f"batch={self.batch}; expected at least 1, or None for all of a client's samples")
        rates = self.lr.values() if isinstance(self.lr, Mapping) else [self.lr]
        if any(not rate >= 0 for rate in rates) or not 0 <= self.momentum < 1 or self.weight_decay < 0:
            raise ValueError(f"expected lr >= 0, 0 <= momentum < 1 and weight_decay >= 0, got {self}")

    def __call__(
        self, objective: Model | Objective, start: Tensor, client: Client, *, rate: Tensor | float = 1.0
    ) -> Tensor:
        """The parameters after training; ``rate`` multiplies the learning rate (a schedule's value for the round)."""
        return self.train(objective, start, client, rate=rate)[0]

    def train(
        self, objective: Model | Objective, start: Tensor, client: Client, *, rate: Tensor | float = 1.0
    ) -> tuple[Tensor, Tensor]:
        """The parameters after training, and the mean loss over its steps."""
        wanted = supervised(objective) if isinstance(objective, Model) else objective
        params, loss = self.minimise(wanted, start, client, labels=True, rate=rate)
        assert isinstance(params, Tensor)
        return params, loss

    def minimise(
        self, objective: Objective, start: Params, client: Client, *, labels: bool, rate: Tensor | float = 1.0
    ) -> tuple[Params, Tensor]:
        """The loop itself, for parameters that are a tensor or a dict of tensors; ``labels=False`` hides ``batch.y``.

        Clients of one block may have different numbers of steps: those that are done go on with a rate of 0.
        """
        step_gradient = grad_and_value(objective)
        y = client.y if labels else None
        schedule = _Batches(self, client)
        params, velocity = start, None
        total = torch.zeros(())
        for step in range(schedule.steps):
            index, weight = schedule.rows[step], schedule.weights[step]
            batch = Batch(client.x[index], None if y is None else y[index], weight)
            gradient, loss = step_gradient(params, batch)
            active = None if schedule.active is None else schedule.active[step]
            if self.clip is not None:
                gradient = _shortened(gradient, self.clip)
            if self.weight_decay:
                gradient = _map(lambda g, p: g + self.weight_decay * p, gradient, params)
            if self.momentum:
                if velocity is not None:
                    gradient = _map(lambda v, g: self.momentum * v + g, velocity, gradient)
                velocity = gradient
            params = self._moved(params, gradient, rate if active is None else rate * active)
            total = total + (loss if active is None else torch.where(active, loss, 0))
        return params, total / schedule.own_steps

    def _moved(self, params: Params, direction: Params, rate: Tensor | float) -> Params:
        if isinstance(params, Tensor):
            assert isinstance(direction, Tensor) and not isinstance(self.lr, Mapping)
            return torch.addcmul(params, direction, torch.as_tensor(-self.lr * rate))  # one pass over the parameters
        assert isinstance(direction, dict)
        rates = self.lr if isinstance(self.lr, Mapping) else dict.fromkeys(params, self.lr)
        return {name: value - (rates[name] * rate) * direction[name] for name, value in params.items()}


class _Batches:
    """Which rows of the client every step takes, and with which weights; all drawn before the first step."""

    def __init__(self, local: LocalSGD, client: Client) -> None:
        capacity, epochs = client.capacity, local.epochs or 0
        self.active: Tensor | None = None  # [steps]: does the client still train? None: every client of the block does
        self.weights: Sequence[Tensor | None] | Tensor  # [steps, B]: 0 for rows that fill up; None: every row counts
        if local.batch is None:
            self.steps = epochs if local.steps is None else local.steps
            self.rows: Sequence[Tensor] | Tensor = torch.arange(capacity).expand(self.steps, -1)
            self.weights = [None if client.full else client.mask.to(torch.float32)] * self.steps
        elif local.steps is not None:
            self.steps = local.steps
            self.rows = client.draws.integers(client.n, self.steps, local.batch)
            self.weights = [None] * self.steps
        else:
            size = min(local.batch, capacity)
            orders = [client.draws.permutation(client.n, capacity) for _ in range(epochs)]
            self.steps = epochs * math.ceil(capacity / size)
            if client.full:
                starts = range(0, capacity, size)
                self.rows = [order[start : start + size] for order in orders for start in starts]
                self.weights = [None] * self.steps
            elif epochs:
                # at the same step a small client may be in a later epoch than a large one of its block
                per_epoch = (client.n + size - 1) // size
                step = torch.arange(self.steps)
                epoch = torch.minimum(step // per_epoch, torch.tensor(epochs - 1))
                place = (step - epoch * per_epoch)[:, None] * size + torch.arange(size)
                real = place < client.n
                self.rows = torch.cat(orders)[epoch[:, None] * capacity + torch.where(real, place, 0)]
                self.weights = real.to(torch.float32)
                self.active = step < epochs * per_epoch
        count = self.steps if self.active is None else self.active.sum()
        self.own_steps = torch.as_tensor(count).clamp(min=1)  # of this client


def _map(function: Callable[..., Tensor], first: Params, second: Params) -> Params:
    if isinstance(first, Tensor):
        return function(first, second)
    assert isinstance(second, dict)
    return {name: function(value, second[name]) for name, value in first.items()}


def _shortened(gradient: Params, bound: float) -> Params:
    """The gradient, scaled down to the norm ``bound`` if it is longer."""
    parts = [gradient] if isinstance(gradient, Tensor) else list(gradient.values())
    length = torch.stack([part.square().sum() for part in parts]).sum().sqrt()
    factor = torch.clamp(bound / length.clamp(min=1e-12), max=1.0)
    return gradient * factor if isinstance(gradient, Tensor) else {k: v * factor for k, v in gradient.items()}
