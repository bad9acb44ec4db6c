"""Per-FedAvg: a common model from which one gradient step gives every client a good one.

Fallah, Mokhtari and Ozdaglar, NeurIPS 2020, Algorithm 1. Symbols: w the common model, α the rate of the client's own
step, β the rate of training (``local.lr``), F_i(w) = f_i(w − α∇f_i(w)) what is minimised.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar, Literal

import torch
from torch import Tensor
from torch.func import grad

from unalike.core.checks import at_least, one_of
from unalike.core.vocabulary import Client, Cohort, Federation, Model, Models, Sent, State, send, task
from unalike.learn.local import LocalSGD
from unalike.learn.objective import Batch, Params, Supervised
from unalike.learn.schedules import Schedule
from unalike.methods import Presets, ozkara2022
from unalike.methods.averaging import ONE_PASS, Averaging, mean


@dataclass(frozen=True)
class PerFedAvg(Averaging):
    """Clients train w so that w − α∇f_i(w) is good for them, and the server takes the mean.

    ``order="first"`` leaves out the Hessian in ∇F_i(w) = (I − α∇²f_i(w))∇f_i(w − α∇f_i(w)), as Scott (2026) and the
    authors' FO variant do; ``"exact"`` differentiates through the step. The paper draws a batch for the step and
    another for the gradient behind it (and a third for the Hessian): here they are the even and the odd rows of one
    batch, and with ``local.batch=None`` all rows serve for both. Everybody, a newcomer too, gets w after
    ``adapt_steps`` steps of rate α on all of its rows.
    """

    model: Model
    cohort: int | float = 10
    local: LocalSGD = ONE_PASS
    schedule: Schedule = field(default_factory=Schedule)
    alpha: float = 0.1
    order: Literal["first", "exact"] = "first"
    adapt_steps: int = 1
    serves_unlabeled: ClassVar[bool] = False
    presets: ClassVar[Presets] = {
        # of the experiments that pFedMe's authors published for it
        "paper": {"local": {"epochs": "none", "steps": 20, "batch": 20, "lr": 0.001}, "alpha": 0.02},
        "ozkara2022": ozkara2022(0.075, alpha=0.001),  # P3 §4.1
    }

    def __post_init__(self) -> None:
        self.check_privacy(self.local)
        if self.local.batch == 1:
            raise ValueError("local.batch=1; a batch has a row for the client's own step and another behind it: give 2")
        at_least(self, alpha=0, adapt_steps=0)
        one_of(self, "order")

    @task
    def fit(self, client: Client, w: Tensor, rate: Tensor) -> Sent:
        """Local steps on F_i (Alg. 1, lines 6-9); sends what changed."""
        loss = Supervised(self.model)

        def adapted_loss(own: Params, batch: Batch) -> Tensor:
            assert isinstance(own, Tensor)
            inner, outer = (batch, batch) if self.local.batch is None else (_every_other(batch, i) for i in (0, 1))
            step = self.alpha * grad(loss)(own, inner)
            return loss(own - (step.detach() if self.order == "first" else step), outer)

        fitted, value = self.local.train(adapted_loss, w, client, rate=rate)
        return send(update=fitted - w, loss=value)

    fit.into(mean)

    @task(stays="theta")
    def adapt(self, client: Client, w: Tensor) -> Sent:
        """The client's own steps, w − α∇f_i(w)."""
        return send(theta=LocalSGD(steps=self.adapt_steps, batch=None, lr=self.alpha)(self.model, w, client))

    def start(self, seed: int) -> State:
        return self.first_state("w", self.model.init(seed))

    def round(self, state: State, federation: Federation) -> State:
        cohort = self.sample(federation, self.cohort)
        replies = cohort.ask(self.fit, w=state.w, rate=self.schedule(federation.round))
        return self.server_step(state, "w", replies, federation)

    def personalize(self, state: State, cohort: Cohort) -> Models:
        return cohort.ask(self.adapt, w=state.w).held("theta")


def _every_other(batch: Batch, first: int) -> Batch:
    """Every other row. The second half of a single row is that row with a weight of 0: it moves nothing."""
    if first and len(batch.x) == 1:
        return Batch(batch.x, batch.y, torch.zeros(1, device=batch.x.device))
    return batch.part(slice(first, None, 2))
