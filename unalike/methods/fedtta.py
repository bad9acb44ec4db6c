"""FedTTA: a common model θ that adapts itself to unlabeled data by one learned gradient step (Ye et al., SDM 2024).

In the form in which T1 §5.6.1 compares FLowDUP with it (C.1.2). φ, the adaptation network, gives a number for a
sample's logits.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import ClassVar

import torch
from torch import Tensor
from torch.func import grad

from unalike.core.checks import at_least
from unalike.core.vocabulary import Client, Cohort, Federation, Model, Models, Sent, State, send, task
from unalike.learn.local import LocalSGD
from unalike.learn.objective import Batch, Params, loss_of
from unalike.learn.schedules import Schedule
from unalike.methods.averaging import Averaging, mean_by_size
from unalike.methods.problem import Problem
from unalike.networks.classifiers import MLP

PARTS = ("theta", "phi")


@dataclass(frozen=True)
class FedTTA(Averaging):
    """θ and φ are trained so that θ' = θ − η·∇_θ ‖φ(f(x; θ))‖₂ over a batch is good on that batch's labels.

    Training differentiates through the inner step. ``adapt_lr``: η. A newcomer takes the same step on all its rows, the
    norm scaled to that of a training batch. ``schedule``: factor of the local rate. The other fields are those of
    ``Averaging``, for the changes of both networks as one vector.
    """

    problem: Problem
    cohort: int | float = 100
    local: LocalSGD = LocalSGD(epochs=1, batch=50, lr=0.1)
    schedule: Schedule = field(default_factory=Schedule)
    adapt_lr: float = 0.01
    serves_unlabeled: ClassVar[bool] = True

    def __post_init__(self) -> None:
        at_least(self, adapt_lr=0)
        self.check_privacy(self.local)
        _ = self.adaptation  # made here, because a vectorised task must not draw initial values

    @property
    def model(self) -> Model:
        return self.problem.model

    @cached_property
    def adaptation(self) -> Model:
        """φ's network: logits → 32 → 32 → 32 → 1 with ReLU between."""
        return Model(MLP((self.problem.classes or 1,), 1, hidden=(32, 32, 32)))

    # The clients' side

    @task
    def fit(self, client: Client, theta: Tensor, phi: Tensor, rate: Tensor) -> Sent:
        """Local SGD on both networks; sends what changed."""
        start = {"theta": theta, "phi": phi}
        fitted, loss = self.local.minimise(self.objective, start, client, labels=True, rate=rate)
        assert isinstance(fitted, dict)
        return send(update=torch.cat([fitted["theta"] - theta, fitted["phi"] - phi]), loss=loss)

    fit.into(mean_by_size)

    @task(stays="theta")
    def adapt(self, client: Client, theta: Tensor, phi: Tensor) -> Sent:
        """Test-time adaptation at the client, where the result stays."""
        weight = client.mask.to(torch.float32) * (self.local.batch_of(client.n) / client.n.clamp(min=1))
        return send(theta=self.adapted(theta, phi, client.x, weight))

    def adapted(self, theta: Tensor, phi: Tensor, x: Tensor, weight: Tensor | None) -> Tensor:
        """θ' after the inner step on inputs x; a row counts with its weight (None: 1)."""

        def inner(theta: Tensor) -> Tensor:
            value = self.adaptation(phi, self.model(theta, x))[:, 0].square()
            total = value.sum() if weight is None else (value * weight).sum()
            return torch.sqrt(total + 1e-12)

        step: Tensor = grad(inner)(theta)
        return theta - self.adapt_lr * step

    def objective(self, params: Params, batch: Batch) -> Tensor:
        """The outer loss of a batch: that of the adapted model on the same batch."""
        assert isinstance(params, dict) and batch.y is not None
        adapted = self.adapted(params["theta"], params["phi"], batch.x, batch.weight)
        return batch.mean(loss_of(self.model(adapted, batch.x), batch.y))

    # The server's side

    def start(self, seed: int) -> State:
        return self.server.begin(State(theta=self.model.init(seed), phi=self.adaptation.init(seed + 1)), *PARTS)

    def round(self, state: State, federation: Federation) -> State:
        cohort = self.sample(federation, self.cohort)
        replies = cohort.ask(self.fit, theta=state.theta, phi=state.phi, rate=self.schedule(federation.round))
        if "loss" in replies:
            federation.report(loss=replies["loss"])
        if "update" not in replies:
            return state  # the very first Poisson cohort was empty
        changes = torch.split(replies["update"], [len(state[name]) for name in PARTS])
        for name, change in zip(PARTS, changes, strict=True):
            state = self.server.move(state, name, change)
        return state

    def personalize(self, state: State, cohort: Cohort) -> Models:
        return cohort.ask(self.adapt, theta=state.theta, phi=state.phi).held("theta")
