"""Local SGD: the only inner training loop. Every method that trains at a client goes through it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
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
            index, weight = schedule.at(step)
            batch = Batch(client.x[index], None if y is None else y[index], weight)
            gradient, loss = step_gradient(params, batch)
            active = schedule.active(step)
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


Rows = tuple[Tensor, Tensor | None]


class _Batches:
    """Which rows of the client every step takes, and with which weights."""

    def __init__(self, local: LocalSGD, client: Client) -> None:
        self._client = client
        self._at: Callable[[int], Rows]
        epochs = local.epochs or 0
        self._own: Tensor | None = None  # this client's number of steps, where clients of the block differ in it
        if local.batch is None:
            self._at, self.steps = self._everything, epochs if local.steps is None else local.steps
        elif local.steps is not None:
            self._at, self.steps, self._size = self._fresh, local.steps, local.batch
        else:
            self._at, self._size = self._in_turn, min(local.batch, client.capacity)
            self._orders = [client.draws.permutation(client.n, client.capacity) for _ in range(epochs)]
            longest = math.ceil(client.capacity / self._size)
            self.steps = epochs * longest
            self._longest = longest
            if not client.full:
                # one table of all epochs: at the same step a small client may be in a later epoch than a large one
                self._table = torch.cat(self._orders) if epochs else client.n
                self._per_epoch = (client.n + self._size - 1) // self._size
                self._own = epochs * self._per_epoch
        self.own_steps: Tensor | int = max(1, self.steps) if self._own is None else self._own.clamp(min=1)

    def at(self, step: int) -> Rows:
        """Row indices [B] and weights [B] of a step (None: every row counts)."""
        return self._at(step)

    def active(self, step: int) -> Tensor | None:
        """Does the client still train at this step? None: every client of the block does."""
        return None if self._own is None else step < self._own

    def _everything(self, _: int) -> Rows:
        rows = torch.arange(self._client.capacity)
        return rows, None if self._client.full else self._client.mask.to(torch.float32)

    def _fresh(self, _: int) -> Rows:
        return self._client.draws.integers(self._client.n, self._size), None

    def _in_turn(self, step: int) -> Rows:
        """The next rows of the epoch's order; rows beyond the client's last one repeat its first, with weight 0."""
        size, capacity = self._size, self._client.capacity
        if self._own is None:
            epoch, turn = divmod(step, self._longest)
            return self._orders[epoch][turn * size : (turn + 1) * size], None
        last = len(self._orders) - 1
        epoch_of = (step // self._per_epoch).clamp(max=last)
        place = (step - epoch_of * self._per_epoch) * size + torch.arange(size)
        real = place < self._client.n
        return self._table[epoch_of * capacity + torch.where(real, place, 0)], real.to(torch.float32)


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
