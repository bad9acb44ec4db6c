"""Local SGD: the only inner training loop. Every method that trains at a client goes through it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.func import grad_and_value

from unalike.core.client import Client
from unalike.core.model import Model
from unalike.learn.dpsgd import PoissonBatches, PrivateGradient
from unalike.learn.objective import Batch, Objective, Params, StepGradient, supervised, taken
from unalike.privacy import dpsgd
from unalike.privacy.dpsgd import LocalCost, PointPrivacy, Steps


@dataclass(frozen=True)
class LocalSGD:
    """SGD on one client's own samples, for ``epochs`` shuffled passes or for ``steps`` batches drawn afresh.

    An epoch's last batch may be partial; it is averaged over its own samples. ``batch=None`` is the whole client.
    With ``steps``, every batch is drawn independently, with replacement. ``clip`` bounds the gradient's norm.
    ``lr`` may name a rate for each part when the parameters are a dict.

    With ``private`` the steps are those of DP-SGD (Abadi et al. 2016): every batch is a Poisson sample of expected size
    ``batch``, as many in an epoch as there are batches in a pass, and all parameters leave the loop as private as
    ``cost`` says. The loss that the loop gives is not protected.
    """

    epochs: int | None = 1
    steps: int | None = None
    batch: int | None = 32
    lr: float | Mapping[str, float] = 0.1
    momentum: float = 0.0
    weight_decay: float = 0.0
    clip: float | None = None
    private: PointPrivacy | None = None

    def __post_init__(self) -> None:
        if self.steps is not None and self.epochs not in (None, 1):
            raise ValueError(f"give epochs ({self.epochs}) or steps ({self.steps}), not both")
        name, amount = ("steps", self.steps) if self.steps is not None else ("epochs", self.epochs)
        if amount is None or amount < 0:
            raise ValueError(f"{name} = {amount}: local training needs epochs or steps of 0 or more")
        if self.batch is not None and self.batch < 1:
            raise ValueError(f"batch = {self.batch}: expected at least 1, or none for all of a client's samples")
        rates = self.lr.values() if isinstance(self.lr, Mapping) else [self.lr]
        if any(not rate >= 0 for rate in rates):
            raise ValueError(f"lr = {self.lr}: expected 0 or more")
        if not 0 <= self.momentum < 1:
            raise ValueError(f"momentum = {self.momentum}: expected at least 0 and below 1")
        if self.weight_decay < 0:
            raise ValueError(f"weight_decay = {self.weight_decay}: expected 0 or more")

    def __call__(
        self,
        objective: Model | Objective,
        start: Tensor,
        client: Client,
        *,
        rate: Tensor | float = 1.0,
        noise: Tensor | None = None,
    ) -> Tensor:
        """The parameters after training; ``rate`` multiplies the learning rate (a schedule's value for the round).

        ``noise``: this client's noise multiplier, where ``private`` gives each its own (``multipliers`` finds them).
        """
        return self.train(objective, start, client, rate=rate, noise=noise)[0]

    def train(
        self,
        objective: Model | Objective,
        start: Tensor,
        client: Client,
        *,
        rate: Tensor | float = 1.0,
        noise: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """The parameters after training, and the mean loss over its steps."""
        wanted = supervised(objective) if isinstance(objective, Model) else objective
        params, loss = self.minimise(wanted, start, client, labels=True, rate=rate, noise=noise)
        assert isinstance(params, Tensor)
        return params, loss

    def steps_of(self, size: int) -> Steps:
        """What DP-SGD does in one call at a client with ``size`` samples: the rate of its batches and how many."""
        assert self.private is not None
        batch = size if self.batch is None else min(self.batch, size)
        count = self.steps if self.steps is not None else (self.epochs or 0) * math.ceil(size / batch)
        return self.private.accounted(Steps.of(batch, size, count))

    def multipliers(self, sizes: Tensor) -> Tensor:
        """[C] the noise multiplier of each client, from its number of samples."""
        assert self.private is not None
        return torch.tensor([self.private.multiplier(self.steps_of(size)) for size in sizes.tolist()])

    def cost(self, sizes: Tensor) -> LocalCost:
        """What one call costs the points of clients of these sizes: goes into the release of what they trained."""
        assert self.private is not None
        made = {}
        for size in set(sizes.tolist()):
            steps = self.steps_of(size)
            made[size] = dpsgd.event(self.private.multiplier(steps), steps)
        return LocalCost(tuple(made[size] for size in sizes.tolist()), self.private.clip, str(self.private))

    def minimise(
        self,
        objective: Objective,
        start: Params,
        client: Client,
        *,
        labels: bool,
        rate: Tensor | float = 1.0,
        noise: Tensor | None = None,
    ) -> tuple[Params, Tensor]:
        """The loop itself, for parameters that are a tensor or a dict of tensors; ``labels=False`` hides ``batch.y``.

        Clients of one block may have different numbers of steps: those that are done go on with a rate of 0.
        """
        step_gradient: StepGradient = grad_and_value(objective)
        schedule: _Batches | PoissonBatches
        if self.private is None:
            schedule = _Batches(self, client)
        else:
            step_gradient = PrivateGradient(objective, self.private, noise, self.batch, client)
            schedule = PoissonBatches(client, self.steps, self.epochs, self.batch)
        params, velocity = start, None
        total = torch.zeros(())
        for step, batch in enumerate(schedule.batches(client.x, client.y if labels else None)):
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
        """One pass over the parameters."""
        if isinstance(params, Tensor):
            assert isinstance(direction, Tensor) and not isinstance(self.lr, Mapping)
            return torch.addcmul(params, direction, torch.as_tensor(-self.lr * rate))
        assert isinstance(direction, dict)
        rates = self.lr if isinstance(self.lr, Mapping) else dict.fromkeys(params, self.lr)
        return {
            name: torch.addcmul(value, direction[name], torch.as_tensor(-rates[name] * rate))
            for name, value in params.items()
        }


class _Batches:
    """Which rows of the client every step takes, and with which weights; all drawn before the first step."""

    def __init__(self, local: LocalSGD, client: Client) -> None:
        capacity, epochs = client.capacity, local.epochs or 0
        self.active: Tensor | None = None  # [steps]: does the client still train? None: every client of the block does
        self._orders: list[Tensor] = []  # [capacity] rows, for each epoch
        self._rows: Tensor | None = None  # [steps, B] rows, where they are not slices of the epochs' orders
        self._weights: Tensor | None = None  # [steps, B] or [B]: 0 for rows that fill up; None: every row counts
        self._size = capacity if local.batch is None else min(local.batch, capacity)
        self._steps = local.steps if local.steps is not None else epochs * math.ceil(capacity / self._size)
        if local.batch is None:
            self._weights = None if client.full else client.mask.to(torch.float32)
        elif local.steps is not None:
            self._rows = client.draws.integers(client.n, self._steps, local.batch)
        else:
            self._orders = [client.draws.permutation(client.n, capacity) for _ in range(epochs)]
            if epochs and not client.full:
                # at the same step a small client may be in a later epoch than a large one of its block
                per_epoch = (client.n + self._size - 1) // self._size
                step = torch.arange(self._steps)
                epoch = torch.minimum(step // per_epoch, torch.tensor(epochs - 1))
                place = (step - epoch * per_epoch)[:, None] * self._size + torch.arange(self._size)
                real = place < client.n
                self._rows = torch.cat(self._orders)[epoch[:, None] * capacity + torch.where(real, place, 0)]
                self._weights = real.to(torch.float32)
                self.active = step < epochs * per_epoch
        count = self._steps if self.active is None else self.active.sum()
        self.own_steps = torch.as_tensor(count).clamp(min=1)  # of this client

    def batches(self, x: Tensor, y: Tensor | None) -> Iterator[Batch]:
        """The samples of each step."""
        if self._rows is not None:
            for step in range(self._steps):
                rows, weight = self._rows[step], None if self._weights is None else self._weights[step]
                yield Batch(taken(x, rows), None if y is None else taken(y, rows), weight)
        elif self._orders:
            for order in self._orders:  # shuffled at once: slices of that are views
                shuffled, labels = taken(x, order), None if y is None else taken(y, order)
                for begin in range(0, len(order), self._size):
                    part = slice(begin, begin + self._size)
                    yield Batch(shuffled[part], None if labels is None else labels[part], None)
        else:
            for _ in range(self._steps):
                yield Batch(x, y, self._weights)


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
