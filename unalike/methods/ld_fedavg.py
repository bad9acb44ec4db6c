"""LD-FedAvg: FedAvg in the random subspace of FLowDUP (Scott, 2026; T1 §5.6.1)."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import ClassVar

import torch
from torch import Tensor

from unalike.core.vocabulary import Client, Cohort, Federation, Model, Sent, State, send, task
from unalike.learn.local import LocalSGD
from unalike.learn.objective import Supervised
from unalike.learn.schedules import Schedule
from unalike.methods import Presets
from unalike.methods.averaging import Averaging, mean_by_size
from unalike.methods.flowdup import Lift
from unalike.networks.subspace import Kind


@dataclass(frozen=True)
class LDFedAvg(Averaging):
    """FedAvg on v instead of θ = θ0 + P·v: one model for all, in the subspace that FLowDUP uses.

    ``subspace``, ``dimension`` and ``agreed_seed`` are those of FLowDUP; the other fields are those of ``Averaging``.
    With ``scale_rate``, which is not in the paper, ``local.lr`` is the rate of the whole space: steps on v are d/k
    times as long, because the subspace holds about k/d of a gradient's square.
    """

    model: Model
    cohort: int | float = 100
    local: LocalSGD = LocalSGD(epochs=1, batch=50, lr=0.1)
    schedule: Schedule = field(default_factory=Schedule)
    subspace: Kind = "signs"
    dimension: int | None = None
    agreed_seed: int = 0
    scale_rate: bool = True
    presets: ClassVar[Presets] = {"paper": {"scale_rate": False}}  # T1 §5.6.1
    serves_unlabeled: ClassVar[bool] = True

    def __post_init__(self) -> None:
        self.check_privacy(self.local)
        _ = self.lift  # made here, because a vectorised task must not draw initial values

    @cached_property
    def lift(self) -> Lift:
        return Lift(self.model, self.subspace, self.dimension, self.agreed_seed)

    @task
    def fit(self, client: Client, v: Tensor, rate: Tensor) -> Sent:
        """Local SGD on v; sends v_new − v."""
        objective = Supervised(self.model).at(self.lift)
        factor = self.model.size / self.lift.k if self.scale_rate else 1.0
        fitted, loss = self.local.train(objective, v, client, rate=rate * factor)
        return send(update=fitted - v, loss=loss)

    fit.into(mean_by_size)

    def start(self, seed: int) -> State:
        return self.first_state("v", torch.zeros(self.lift.k))

    def round(self, state: State, federation: Federation) -> State:
        cohort = self.sample(federation, self.cohort)
        replies = cohort.ask(self.fit, v=state.v, rate=self.schedule(federation.round))
        return self.server_step(state, "v", replies, federation)

    def personalize(self, state: State, cohort: Cohort) -> Tensor:
        return self.lift(state.v).expand(len(cohort), -1)
