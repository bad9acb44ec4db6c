"""Local SGD: the only inner training loop. Every method that trains at a client goes through it."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from types import MappingProxyType
from typing import Any, overload

import torch
from torch import Tensor
from torch.func import grad_and_value

from unalike.core.client import Client
from unalike.core.dropout import dropout_from
from unalike.core.model import Model
from unalike.core.roster import Declarations
from unalike.learn.dpsgd import PoissonBatches, PrivateGradient
from unalike.learn.objective import Batch, InTurns, Objective, Params, StepGradient, Supervised, take_rows
from unalike.privacy import dpsgd
from unalike.privacy.dpsgd import LocalCost, PointPrivacy, Steps


@dataclass(frozen=True)
class LocalSGD:
    """SGD on one client's own samples, for ``epochs`` shuffled passes or for ``steps`` batches drawn afresh.

    An epoch's last batch may be partial; it is averaged over its own samples. ``batch=None`` is the whole client, and
    a ``batch`` below 1 that share of its samples, rounded up. With ``steps``, every batch is drawn independently, with
    replacement. ``clip`` bounds the gradient's norm. ``lr`` may name a rate for each part when the parameters are a
    dict.

    With ``private`` the steps are those of DP-SGD (Abadi et al. 2016): every batch is a Poisson sample of expected size
    ``batch``, as many in an epoch as there are batches in a pass, and all parameters leave the loop as private as
    ``cost`` says. The loss that the loop gives is not protected.
    """

    epochs: int | None = 1
    steps: int | None = None
    batch: int | float | None = 32
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
        if self.batch is not None and not (self.batch >= 1 if isinstance(self.batch, int) else 0 < self.batch < 1):
            raise ValueError(
                f"batch = {self.batch}: expected at least 1, or none for all of a client's samples, or a share of them "
                "between 0 and 1"
            )
        if self.private is not None and isinstance(self.batch, float):
            raise ValueError(f"batch = {self.batch}: DP-SGD takes a number of samples, not a share of them")
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
        batch: Tensor | None = None,
    ) -> Tensor:
        """The parameters after training; ``rate`` multiplies the learning rate (a schedule's value for the round).

        ``noise``, ``batch``: this client's noise multiplier and batch size, where ``private`` gives each its own; a
        client derives them by ``own``.
        """
        return self.train(objective, start, client, rate=rate, noise=noise, batch=batch)[0]

    def train(
        self,
        objective: Model | Objective,
        start: Tensor,
        client: Client,
        *,
        rate: Tensor | float = 1.0,
        noise: Tensor | None = None,
        batch: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """The parameters after training, and the mean loss over its steps."""
        wanted = Supervised(objective) if isinstance(objective, Model) else objective
        params, loss = self.minimise(wanted, start, client, labels=True, rate=rate, noise=noise, batch=batch)
        assert isinstance(params, Tensor)
        return params, loss

    def repeat(self, rounds: int) -> LocalSGD:
        """What several calls do, in one."""
        if self.steps is not None:
            return replace(self, steps=rounds * self.steps)
        return replace(self, epochs=rounds * (self.epochs or 0))

    def batch_of(self, size: Tensor) -> Tensor:
        """How many samples of a client are in a batch."""
        if self.batch is None:
            return size
        return _share(self.batch, size) if isinstance(self.batch, float) else size.clamp(max=self.batch)

    def steps_of(self, size: int, batch: int | None = None) -> Steps:
        """What DP-SGD does in one call at a client with ``size`` samples: the rate of its batches and how many.

        ``batch``: that of the client, where it has its own.
        """
        assert self.private is not None and not isinstance(self.batch, float)
        expected = self.batch if self.private.batches is None else batch
        taken = size if expected is None else min(expected, size)
        count = self.steps if self.steps is not None else (self.epochs or 0) * math.ceil(size / taken)
        return self.private.charged_steps(Steps.of(taken, size, count))

    def private_inputs(self, declared: Declarations) -> dict[str, Tensor]:
        """What DP-SGD needs and each client derives from what it declares: ``noise``, and where it has its own
        ``batch``. Nothing without ``private``.
        """
        if self.private is None:
            return {}
        found = {"noise": self.noise_multipliers(declared)}
        if self.private.batches is not None:
            assert declared.batch is not None  # noise_multipliers has checked it
            found["batch"] = declared.batch
        return found

    def noise_multipliers(self, declared: Declarations) -> Tensor:
        """[C] the noise multiplier of each client."""
        return torch.tensor([z for z, _ in self.noise_and_steps(declared)])

    def cost(self, declared: Declarations) -> LocalCost:
        """What one call costs the points of these clients: goes into the release of what they trained."""
        assert self.private is not None
        events = _once(lambda one: dpsgd.event(*one), self.noise_and_steps(declared))
        return self.private.cost(events)

    def noise_and_steps(self, declared: Declarations) -> list[tuple[float, Steps]]:
        """The noise multiplier of each client and the steps that it is charged with; equal clients are alike."""
        private = self.private
        assert private is not None
        none: list[Any] = [None] * len(declared.bound)
        batches = none
        if private.batches is not None:
            if declared.batch is None or not set(declared.batch.tolist()) <= set(private.batches):
                stated = "none does" if declared.batch is None else f"these are {sorted(set(declared.batch.tolist()))}"
                raise ValueError(f"clients are to declare batch sizes out of {private.batches}, but {stated}")
            batches = declared.batch.tolist()
        epsilons = none if declared.epsilon is None else declared.epsilon.tolist()
        deltas = none if declared.delta is None else declared.delta.tolist()

        def noise(one: tuple[int, int | None, float | None, float | None]) -> tuple[float, Steps]:
            size, batch, epsilon, delta = one
            steps = self.steps_of(size, batch)
            return private.multiplier(steps, epsilon, delta), steps

        return _once(noise, list(zip(declared.bound.tolist(), batches, epsilons, deltas, strict=True)))

    def minimise(
        self,
        objective: Objective | InTurns,
        start: Params,
        client: Client,
        *,
        labels: bool,
        lacking: bool = False,
        rate: Tensor | float = 1.0,
        noise: Tensor | None = None,
        batch: Tensor | None = None,
        least: Mapping[str, float] = MappingProxyType({}),
        undecayed: Collection[str] = (),
    ) -> tuple[Params, Tensor]:
        """The loop itself, for parameters that are a tensor or a dict of tensors; ``labels=False`` hides ``batch.y``.

        Where labels are used, rows that lack theirs are left out; with ``lacking`` they are in the batches, too, and
        ``batch.known`` tells them.
        ``least``: parts that no step takes below a number; ``undecayed``: parts without weight decay. Clients of one
        block may have different numbers of steps: those that are done go on with a rate of 0.
        """
        schedule: _Batches | PoissonBatches
        known: Tensor | None = None
        if labels and not lacking:
            client = client.with_labels
        elif labels and client.partly_labeled:
            if self.private is not None:
                raise ValueError("a step of DP-SGD takes labeled rows only; leave lacking out")
            known = client.known.to(torch.float32)
        y = None if not labels else client.y if known is None else client.labels()
        if self.private is None:
            schedule = _Batches(self, client, known)
        else:
            if (batch is None) != (self.private.batches is None):
                raise ValueError("a client's own batch size and private.batches, the sizes of all, go together")
            assert not isinstance(self.batch, float)
            expected, sizes = self.batch if batch is None else batch, self.private.batches or ()
            schedule = PoissonBatches(client, self.steps, self.epochs, expected, sizes)
        descent = _Descent(self, start, least, undecayed)
        take = self._step(objective, descent, noise, batch, client)
        total = torch.zeros(())
        with dropout_from(client.masks):
            for step, drawn in enumerate(schedule.batches(client.x, y)):
                active = None if schedule.active is None else schedule.active[step]
                loss = take(drawn, rate if active is None else rate * active)
                total = total + (loss if active is None else torch.where(active, loss, 0))
        return descent.params, total / schedule.own_steps

    def _step(
        self,
        objective: Objective | InTurns,
        descent: _Descent,
        noise: Tensor | None,
        batch: Tensor | None,
        client: Client,
    ) -> Callable[[Batch, Tensor | float], Tensor]:
        """What is done with a batch at a rate; it gives the loss."""
        if isinstance(objective, InTurns):
            if self.private is not None:
                raise ValueError("DP-SGD moves all parameters at once, and this objective moves them in turns")
            return partial(descent.in_turns, objective)
        step_gradient: StepGradient = grad_and_value(objective)
        if self.private is not None:
            assert not isinstance(self.batch, float)
            expected = self.batch if batch is None else batch
            step_gradient = PrivateGradient(objective, self.private, noise, expected, client)
        return partial(descent.at_once, step_gradient)


class _Descent:
    """The parameters while they are trained, and their momentum."""

    def __init__(self, local: LocalSGD, start: Params, least: Mapping[str, float], undecayed: Collection[str]) -> None:
        self.params = start
        self._local, self._least, self._undecayed = local, least, undecayed
        self._velocity: Params | None = None

    def at_once(self, step_gradient: StepGradient, batch: Batch, rate: Tensor | float) -> Tensor:
        gradient, loss = step_gradient(self.params, batch)
        self._move(gradient, rate)
        return loss

    def in_turns(self, objective: InTurns, batch: Batch, rate: Tensor | float) -> Tensor:
        moves = objective.moves(_parts(self.params), batch)
        try:
            gradient = next(moves)
            while True:
                self._move(gradient, rate)
                gradient = moves.send(_parts(self.params))
        except StopIteration as done:
            loss: Tensor = done.value
            return loss

    def _move(self, gradient: Params, rate: Tensor | float) -> None:
        """One step of the parts that have a gradient."""
        local = self._local
        if local.clip is not None:
            gradient = _shorten(gradient, local.clip)
        if local.weight_decay:
            decayed = _map(lambda g, p: g + local.weight_decay * p, gradient, self.params)
            if isinstance(decayed, dict):
                decayed |= {name: value for name, value in _parts(gradient).items() if name in self._undecayed}
            gradient = decayed
        if local.momentum:
            if self._velocity is not None:
                gradient = _map(lambda g, v: local.momentum * v + g, gradient, self._velocity)
            self._velocity = gradient if isinstance(gradient, Tensor) else {**_parts(self._velocity), **gradient}
        self._advance(gradient, rate)

    def _advance(self, direction: Params, rate: Tensor | float) -> None:
        """One pass over the parameters."""
        lr = self._local.lr
        if isinstance(direction, Tensor):
            assert isinstance(self.params, Tensor) and not isinstance(lr, Mapping)
            self.params = torch.addcmul(self.params, direction, torch.as_tensor(-lr * rate))
            return
        params = _parts(self.params)
        rates = lr if isinstance(lr, Mapping) else dict.fromkeys(params, lr)
        moved = {
            name: torch.addcmul(params[name], value, torch.as_tensor(-rates[name] * rate))
            for name, value in direction.items()
        }
        self.params = {**params, **moved, **{k: moved[k].clamp(min=v) for k, v in self._least.items() if k in moved}}


class _Batches:
    """Which rows of the client every step takes, and with which weights; all drawn before the first step."""

    def __init__(self, local: LocalSGD, client: Client, known: Tensor | None = None) -> None:
        capacity, epochs = client.capacity, local.epochs or 0
        self._known = known  # [capacity] which rows have a label, where some of them lack theirs
        self.active: Tensor | None = None  # [steps]: does the client still train? None: every client of the block does
        self._orders: list[Tensor] = []  # [capacity] rows, for each epoch
        self._rows: Tensor | None = None  # [steps, B] rows, where they are not slices of the epochs' orders
        self._weights: Tensor | None = None  # [steps, B] or [B]: 0 for rows that fill up; None: every row counts
        own: int | Tensor  # samples of this client in a batch
        if isinstance(local.batch, float):
            self._size = _share(local.batch, capacity)
            own = self._size if client.full else _share(local.batch, client.n)
        else:
            own = self._size = capacity if local.batch is None else min(local.batch, capacity)
        in_place = torch.arange(self._size)
        self._steps = local.steps if local.steps is not None else epochs * math.ceil(capacity / self._size)
        if local.batch is None:
            self._weights = None if client.full else client.mask.to(torch.float32)
        elif isinstance(local.batch, float) and local.steps is not None:
            # drawn the other way round: a client's first samples are then the same in whatever block it is
            self._rows = client.draws.integers(client.n, self._size, self._steps).T
            self._weights = None if client.full else (in_place < own).to(torch.float32).expand(self._steps, -1)
        elif local.steps is not None:
            assert isinstance(local.batch, int)
            self._rows = client.draws.integers(client.n, self._steps, local.batch)
        else:
            self._orders = [client.draws.permutation(client.n, capacity) for _ in range(epochs)]
            if epochs and not client.full:
                # at the same step a small client may be in a later epoch than a large one of its block
                if isinstance(local.batch, float):
                    self._steps = epochs * min(capacity, math.ceil(1 / local.batch))
                per_epoch = (client.n + own - 1) // own
                step = torch.arange(self._steps)
                epoch = torch.minimum(step // per_epoch, torch.tensor(epochs - 1))
                place = (step - epoch * per_epoch)[:, None] * own + in_place
                real = (place < client.n) & (in_place < own)
                self._rows = torch.cat(self._orders)[epoch[:, None] * capacity + torch.where(real, place, 0)]
                self._weights = real.to(torch.float32)
                self.active = step < epochs * per_epoch
        count = self._steps if self.active is None else self.active.sum()
        self.own_steps = torch.as_tensor(count).clamp(min=1)  # of this client

    def batches(self, x: Tensor, y: Tensor | None) -> Iterator[Batch]:
        """The samples of each step."""

        def drawn(rows: Tensor, weight: Tensor | None) -> Batch:
            labels, known = (None if one is None else take_rows(one, rows) for one in (y, self._known))
            return Batch(take_rows(x, rows), labels, weight, known=known)

        if self._rows is not None:
            for step in range(self._steps):
                yield drawn(self._rows[step], None if self._weights is None else self._weights[step])
        elif self._orders:
            for order in self._orders:
                shuffled = drawn(order, None)  # at once: slices of that are views
                for begin in range(0, len(order), self._size):
                    yield shuffled.part(slice(begin, begin + self._size))
        else:
            for _ in range(self._steps):
                yield Batch(x, y, self._weights, known=self._known)


@overload
def _share(share: float, count: int) -> int: ...
@overload
def _share(share: float, count: Tensor) -> Tensor: ...
def _share(share: float, count: int | Tensor) -> int | Tensor:
    """A share of so many samples, rounded up; 1/60 of 300 is 5, though it comes out a hair above."""
    if isinstance(count, int):
        return max(1, math.ceil(count * share * (1 - 1e-12)))
    return torch.ceil(count.to(torch.float64) * share * (1 - 1e-12)).to(torch.int64).clamp(min=1)


def _once(function: Callable[[Any], Any], values: Sequence[Any]) -> list[Any]:
    """The function of each value, worked out once for equal ones."""
    found = {value: function(value) for value in set(values)}
    return [found[value] for value in values]


def _parts(params: Params | None) -> dict[str, Tensor]:
    """Parameters that are a dict; no momentum yet is an empty one."""
    assert not isinstance(params, Tensor)
    return params or {}


def _map(function: Callable[[Tensor, Tensor], Tensor], first: Params, second: Params) -> Params:
    """The function of each part of the first with the same part of the second, where it has one."""
    if isinstance(first, Tensor):
        assert isinstance(second, Tensor)
        return function(first, second)
    others = _parts(second)
    return {name: function(value, others[name]) if name in others else value for name, value in first.items()}


def _shorten(gradient: Params, bound: float) -> Params:
    """The gradient, scaled down to the norm ``bound`` if it is longer."""
    parts = [gradient] if isinstance(gradient, Tensor) else list(gradient.values())
    length = torch.stack([part.square().sum() for part in parts]).sum().sqrt()
    factor = torch.clamp(bound / length.clamp(min=1e-12), max=1.0)
    return gradient * factor if isinstance(gradient, Tensor) else {k: v * factor for k, v in gradient.items()}
