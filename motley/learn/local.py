"""Local SGD: the only inner training loop. Every method that trains at a client goes through it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.func import grad_and_value, vmap

from motley.client import Client
from motley.learn.ghost import GhostNorms
from motley.model import Model
from motley.privacy import dpsgd
from motley.privacy.dpsgd import LocalCost, PointPrivacy, Steps

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
        amount = self.steps if self.steps is not None else self.epochs
        if amount is None or amount < 0:
            raise ValueError(f"local training needs epochs or steps of 0 or more, got {amount}")
        if self.batch is not None and self.batch < 1:
            raise ValueError(f"batch={self.batch}; expected at least 1, or None for all of a client's samples")
        rates = self.lr.values() if isinstance(self.lr, Mapping) else [self.lr]
        if any(not rate >= 0 for rate in rates) or not 0 <= self.momentum < 1 or self.weight_decay < 0:
            raise ValueError(f"expected lr >= 0, 0 <= momentum < 1 and weight_decay >= 0, got {self}")

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
        schedule: _Batches | _PoissonBatches
        if self.private is None:
            schedule = _Batches(self, client)
        else:
            step_gradient = _Private(objective, self.private, noise, self.batch, client)
            schedule = _PoissonBatches(self, client)
        y = client.y if labels else None
        params, velocity = start, None
        total = torch.zeros(())
        for step in range(schedule.steps):
            index, weight = schedule.draw(step)
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
        self.weights: Sequence[Tensor | None] | Tensor  # [steps, B]: 0 for rows that fill up; None: every row counts
        if local.batch is None:
            self.steps = epochs if local.steps is None else local.steps
            self.rows: Sequence[Tensor | slice] | Tensor = [slice(None)] * self.steps  # a view, not a copy for a step
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

    def draw(self, step: int) -> tuple[Tensor | slice, Tensor | None]:
        return self.rows[step], self.weights[step]


class _PoissonBatches:
    """The same for DP-SGD. A batch is drawn when its step comes, so memory does not grow with samples times steps."""

    def __init__(self, local: LocalSGD, client: Client) -> None:
        self._client, self._batch = client, local.batch
        size = client.capacity if local.batch is None else min(local.batch, client.capacity)
        self.active: Tensor | None = None
        if local.steps is not None:
            self.steps = local.steps
        else:
            epochs = local.epochs or 0
            self.steps = epochs * math.ceil(client.capacity / size)
            if not client.full and local.batch is not None:
                self.active = torch.arange(self.steps) < epochs * ((client.n + local.batch - 1) // local.batch)
        self.own_steps = torch.as_tensor(self.steps if self.active is None else self.active.sum()).clamp(min=1)

    def draw(self, step: int) -> tuple[Tensor | slice, Tensor | None]:
        if self._batch is None:
            return slice(None), self._client.mask.to(torch.float32)
        rows, taken = dpsgd.poisson_batch(self._client.n, self._client.capacity, self._batch, self._client.noise)
        return rows, taken.to(torch.float32)


class _Private:
    """The gradient of a DP-SGD step, and the (unprotected) mean loss of its batch."""

    def __init__(
        self, objective: Objective, private: PointPrivacy, noise: Tensor | None, batch: int | None, client: Client
    ) -> None:
        if noise is None:
            if private.noise_multiplier is None:
                raise ValueError("each client has its own noise here: pass noise=each(local.multipliers(cohort.sizes))")
            noise = torch.tensor(private.noise_multiplier)
        self._noise, self._bound, self._draws = noise, private.clip, client.noise
        self._expected = client.n if batch is None else torch.clamp(client.n, max=batch)

        def of_one(params: Params, x: Tensor, y: Tensor | None) -> Tensor:
            return objective(params, Batch(x[None], None if y is None else y[None], None))

        self._each = grad_and_value(of_one)
        self._ghost = GhostNorms.of(objective.model, client.x[:2]) if isinstance(objective, Supervised) else None

    def __call__(self, params: Params, batch: Batch) -> tuple[Params, Tensor]:
        assert batch.weight is not None
        if self._ghost is not None and isinstance(params, Tensor) and batch.y is not None:
            total, losses = self._ghost.clipped_sum(params, batch.x, batch.y, loss_of, batch.weight, self._bound)
            made = dpsgd.noisy_mean(total, self._bound, self._noise, self._expected, self._draws)
            return made, batch.mean(losses)
        labels = None if batch.y is None else 0
        gradients, losses = vmap(self._each, in_dims=(None, 0, labels))(params, batch.x, batch.y)
        parts = {"": gradients} if isinstance(gradients, Tensor) else gradients
        flat = [part.reshape(len(batch.weight), -1) for part in parts.values()]
        rows = flat[0] if len(flat) == 1 else torch.cat(flat, dim=1)
        made = dpsgd.private_gradient(rows, batch.weight, self._bound, self._noise, self._expected, self._draws)
        loss = batch.mean(losses)
        if isinstance(gradients, Tensor):
            return made, loss
        pieces = torch.split(made, [part.shape[1] for part in flat])
        return {name: piece.view(params[name].shape) for name, piece in zip(parts, pieces, strict=True)}, loss


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
