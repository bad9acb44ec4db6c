"""One noise multiplier for each client that pays for a first round, later rounds and selections of a cluster."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from unalike.core.roster import Declarations
from unalike.learn.local import LocalSGD
from unalike.privacy import dpsgd
from unalike.privacy.dpsgd import LocalCost, PointPrivacy, Steps
from unalike.privacy.mechanisms import Exponential, Gaussian


class ClientPlan(NamedTuple):
    """What a client does: its noise multiplier z, the steps of a first and of a later round, the ε of a selection."""

    z: float
    first: Steps | None
    later: Steps
    selection: float


@dataclass(frozen=True)
class PhasedBudget:
    """DP-SGD by ``first`` in one round (None: there is no such round) and by ``local`` in all others of ``rounds``.

    The ``selections`` are by the exponential mechanism, each for the share ``selection`` of the client's ε.
    """

    first: LocalSGD | None
    local: LocalSGD
    rounds: int
    selections: int
    selection: float

    @property
    def private(self) -> PointPrivacy:
        assert self.local.private is not None
        return self.local.private

    def plans(self, declared: Declarations) -> list[ClientPlan]:
        """A plan for each client."""
        private, count = self.private, len(declared.bound)
        batches = [None] * count if private.batches is None or declared.batch is None else declared.batch.tolist()
        epsilons, deltas = [private.epsilon] * count, [private.delta] * count
        if private.per_client and declared.epsilon is not None and declared.delta is not None:
            epsilons, deltas = declared.epsilon.tolist(), declared.delta.tolist()
        clients = zip(declared.bound.tolist(), batches, epsilons, deltas, strict=True)
        return [self._plan(*one) for one in clients]

    def _plan(self, size: int, batch: int | None, epsilon: float | None, delta: float | None) -> ClientPlan:
        first = None if self.first is None else self.first.steps_of(size)
        later = self.local.steps_of(size, batch)
        selection = self.selection * (1.0 if epsilon is None else epsilon)
        z = self.private.noise_multiplier
        if z is None:
            if epsilon is None or delta is None:
                raise ValueError("every client has its own (ε, δ) here, but this one declares none")
            times = (self.private.rounds or self.rounds) - (first is not None)
            phases = [Steps(later.rate, later.count * max(1, times)), *([] if first is None else [first])]
            others = [Exponential(selection).event()] * self.selections
            others += [Gaussian(one).event() for one in self.private.also]  # such as private statistics of the inputs
            z = dpsgd.noise_for(epsilon, delta, *phases, also=tuple(others))
        return ClientPlan(z, first, later, selection)

    def multipliers(self, declared: Declarations) -> Tensor:
        """[C] z of each client."""
        return torch.tensor([one.z for one in self.plans(declared)])

    def selection_epsilons(self, declared: Declarations) -> Tensor:
        """[C] the ε of a selection of each client."""
        return torch.tensor([one.selection for one in self.plans(declared)], dtype=torch.float64)

    def first_cost(self, declared: Declarations) -> LocalCost:
        """What the first round costs each client."""
        return self.private.cost(
            [dpsgd.event(one.z, one.first) for one in self.plans(declared) if one.first is not None]
        )

    def later_cost(self, declared: Declarations) -> LocalCost:
        """What a later round costs each client."""
        return self.private.cost([dpsgd.event(one.z, one.later) for one in self.plans(declared)])

    def selection_cost(self, declared: Declarations) -> LocalCost:
        """What a selection costs each client."""
        events = [Exponential(one.selection).event() for one in self.plans(declared)]
        return LocalCost(tuple(events), 1.0, (("kind", "Exponential"),))
