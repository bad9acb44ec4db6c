"""Local SGD: the only inner training loop. Every method that trains at a client goes through it."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, TypedDict, Unpack

import torch
from torch import Tensor
from torch.func import grad_and_value

from unalike.core.dropout import dropout_from
from unalike.core.roster import Declarations
from unalike.core.vocabulary import Client, Model
from unalike.learn.dpsgd import PoissonBatches, PrivateGradient
from unalike.learn.objective import Batch, InTurns, Objective, Params, StepGradient, Supervised, take_rows
from unalike.privacy import dpsgd
from unalike.privacy.dpsgd import LocalCost, PointPrivacy, Steps


class OfRound(TypedDict, total=False):
    """What a client may be given for one call of ``LocalSGD``."""

    rate: Tensor | float  # multiplies the learning rate: a schedule's value for the round
    noise: Tensor | None  # the client's noise multiplier, where ``private`` gives each its own
    batch: Tensor | None  # likewise its batch size


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

    def __call__(self, objective: Model | Objective, start: Tensor, client: Client, **given: Unpack[OfRound]) -> Tensor:
        """The parameters after training."""
        return self.train(objective, start, client, **given)[0]

    def train(
        self, objective: Model | Objective, start: Tensor, client: Client, **given: Unpack[OfRound]
    ) -> tuple[Tensor, Tensor]:
        """The parameters after training, and the mean loss over its steps."""
        wanted = Supervised(objective) if isinstance(objective, Model) else objective
        params, loss = self.minimise(wanted, start, client, labels=True, **given)
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
        noise = self.noise_multipliers(declared)
        if self.private.batches is None:
            return {"noise": noise}
        assert declared.batch is not None  # noise_multipliers has checked it
        return {"noise": noise, "batch": declared.batch}

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
        known: Tensor | None = None
        if labels and not lacking:
            client = client.with_labels
        elif labels and client.partly_labeled:
            if self.private is not None:
                raise ValueError("a step of DP-SGD takes labeled rows only; leave lacking out")
            known = client.known.to(torch.float32)
        y = None if not labels else client.y if known is None else client.labels()
        schedule, step_gradient = self._steps(objective, client, known, noise, batch)
        descent, total = _Descent(self, start, least, undecayed), torch.zeros(())
        client.masks.draws.make_key()
        with dropout_from(client.masks):
            for step, drawn in enumerate(schedule.batches(client.x, y)):
                active = None if schedule.active is None else schedule.active[step]
                own_rate = rate if active is None else rate * active
                if isinstance(objective, InTurns):
                    loss = descent.move_in_turns(objective, drawn, own_rate)
                else:
                    assert step_gradient is not None
                    gradient, loss = step_gradient(descent.params, drawn)
                    descent.move(gradient, own_rate)
                total = total + (loss if active is None else torch.where(active, loss, 0))
        return descent.params, total / schedule.own_steps

    def _steps(
        self,
        objective: Objective | InTurns,
        client: Client,
        known: Tensor | None,
        noise: Tensor | None,
        batch: Tensor | None,
    ) -> tuple[_Batches | PoissonBatches, StepGradient | None]:
        """The batches of the steps, and the gradient of a batch; none where the objective gives its own."""
        if self.private is None:
            plain = _Batches(self, client, known)
            return plain, None if isinstance(objective, InTurns) else grad_and_value(objective)
        if client.weight is not None:
            raise ValueError("DP-SGD counts all rows the same; leave weights of rows and classes out")
        if isinstance(objective, InTurns):
            raise ValueError("DP-SGD moves all parameters at once, and this objective moves them in turns")
        if (batch is None) != (self.private.batches is None):
            raise ValueError("a client's own batch size and private.batches, the sizes of all, go together")
        assert not isinstance(self.batch, float)
        expected = self.batch if batch is None else batch
        schedule = PoissonBatches(client, self.steps, self.epochs, expected, self.private.batches or ())
        return schedule, PrivateGradient(objective, self.private, noise, expected, client)


class _Descent:
    """The parameters while they are trained, and their momentum. A single tensor is a part without a name."""

    def __init__(self, local: LocalSGD, start: Params, least: Mapping[str, float], undecayed: Collection[str]) -> None:
        self._parts = _parts_of(start)
        self._single = isinstance(start, Tensor)
        self._local, self._least, self._undecayed = local, least, undecayed
        self._rates = local.lr if isinstance(local.lr, Mapping) else dict.fromkeys(self._parts, local.lr)
        self._velocity: dict[str, Tensor] = {}

    @property
    def params(self) -> Params:
        return self._parts[""] if self._single else self._parts

    def move_in_turns(self, objective: InTurns, batch: Batch, rate: Tensor | float) -> Tensor:
        moves = objective.moves(self._parts, batch)
        try:
            gradient = next(moves)
            while True:
                self.move(gradient, rate)
                gradient = moves.send(self._parts)
        except StopIteration as done:
            loss: Tensor = done.value
            return loss

    def move(self, gradient: Params, rate: Tensor | float) -> None:
        """One step of the parts that have a gradient."""
        local, step = self._local, _parts_of(gradient)
        if local.clip is not None:
            length = torch.stack([part.square().sum() for part in step.values()]).sum().sqrt()
            factor = torch.clamp(local.clip / length.clamp(min=1e-12), max=1.0)
            step = {name: factor * part for name, part in step.items()}
        if local.weight_decay:
            decayed = step.keys() - set(self._undecayed)
            step = {k: v + local.weight_decay * self._parts[k] if k in decayed else v for k, v in step.items()}
        if local.momentum:
            before = self._velocity
            step = {k: local.momentum * before[k] + v if k in before else v for k, v in step.items()}
            self._velocity = {**before, **step}
        moved = {
            name: torch.addcmul(self._parts[name], part, torch.as_tensor(-self._rates[name] * rate))
            for name, part in step.items()
        }
        kept = {name: moved[name].clamp(min=least) for name, least in self._least.items() if name in moved}
        self._parts = {**self._parts, **moved, **kept}


def _parts_of(params: Params) -> dict[str, Tensor]:
    return {"": params} if isinstance(params, Tensor) else params


class _Batches:
    """Which rows of the client every step takes, and with which weights; all drawn before the first step."""

    def __init__(self, local: LocalSGD, client: Client, known: Tensor | None = None) -> None:
        capacity, epochs = client.capacity, local.epochs or 0
        self._known = known  # [capacity] which rows have a label, where some of them lack theirs
        self._row_weight = client.weight
        self.active: Tensor | None = None  # [steps]: does the client still train? None: every client of the block does
        self._orders: list[Tensor] = []  # [capacity] rows, for each epoch
        self._rows: Tensor | None = None  # [steps, B] rows, where they are not slices of the epochs' orders
        self._weights: Tensor | None = None  # [steps, B] or [B]: 0 for rows that fill up; None: every row counts
        own: int | Tensor  # samples of this client in a batch
        if isinstance(local.batch, float):
            self._size = int(_share(local.batch, torch.tensor(capacity)))
            own = self._size if client.full else _share(local.batch, client.n)
        else:
            own = self._size = capacity if local.batch is None else min(local.batch, capacity)
        self._steps = local.steps if local.steps is not None else epochs * math.ceil(capacity / self._size)
        if local.batch is None:
            self._weights = None if client.full else client.mask.to(torch.float32)
        elif local.steps is not None:
            self._draw(local.batch, client, own)
        else:
            self._orders = [client.draws.permutation(client.n, capacity) for _ in range(epochs)]
            if epochs and not client.full:
                self._place(local.batch, client, own)

    @property
    def own_steps(self) -> Tensor:
        """How many of the steps are this client's."""
        return torch.as_tensor(self._steps if self.active is None else self.active.sum()).clamp(min=1)

    def _draw(self, batch: int | float, client: Client, own: int | Tensor) -> None:
        """Batches that are drawn independently."""
        if not isinstance(batch, float):
            self._rows = client.draws.integers(client.n, self._steps, batch)
            return
        # drawn the other way round: a client's first samples are then the same in whatever block it is
        self._rows = client.draws.integers(client.n, self._size, self._steps).T
        if not client.full:
            self._weights = (torch.arange(self._size) < own).to(torch.float32).expand(self._steps, -1)

    def _place(self, batch: int | float, client: Client, own: int | Tensor) -> None:
        """Where each step is in the epochs' orders: a small client may be in a later epoch than others of its block."""
        capacity, epochs = client.capacity, len(self._orders)
        if isinstance(batch, float):
            self._steps = epochs * min(capacity, math.ceil(1 / batch))
        per_epoch = (client.n + own - 1) // own
        step, in_place = torch.arange(self._steps), torch.arange(self._size)
        epoch = torch.minimum(step // per_epoch, torch.tensor(epochs - 1))
        place = (step - epoch * per_epoch)[:, None] * own + in_place
        real = (place < client.n) & (in_place < own)
        self._rows = torch.cat(self._orders)[epoch[:, None] * capacity + torch.where(real, place, 0)]
        self._weights = real.to(torch.float32)
        self.active = step < epochs * per_epoch

    def batches(self, x: Tensor, y: Tensor | None) -> Iterator[Batch]:
        """The samples of each step."""

        def drawn(rows: Tensor, weight: Tensor | None) -> Batch:
            labels, known, own = (
                None if one is None else take_rows(one, rows) for one in (y, self._known, self._row_weight)
            )
            return Batch(take_rows(x, rows), labels, _product(own, weight), known=known)

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
                yield Batch(x, y, _product(self._row_weight, self._weights), known=self._known)


def _product(one: Tensor | None, other: Tensor | None) -> Tensor | None:
    """What two weights are together; None counts as 1."""
    return other if one is None else one if other is None else one * other


def _share(share: float, count: Tensor) -> Tensor:
    """A share of so many samples, rounded up; 1/60 of 300 is 5, though it comes out a hair above."""
    return torch.ceil(count.to(torch.float64) * share * (1 - 1e-12)).to(torch.int64).clamp(min=1)


def _once(function: Callable[[Any], Any], values: Sequence[Any]) -> list[Any]:
    """The function of each value, worked out once for equal ones."""
    found = {value: function(value) for value in set(values)}
    return [found[value] for value in values]
