"""FedRep (Collins, Hassani, Mokhtari and Shakkottai, ICML 2021, Alg. 1): φ is the body, h_i the head of client i."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import ClassVar, Literal

import torch
from torch import Tensor

from unalike.core.vocabulary import Client, Cohort, Federation, Model, Models, Sent, State, send, task
from unalike.learn.local import LocalSGD
from unalike.learn.objective import Objective, Supervised
from unalike.learn.schedules import Schedule
from unalike.methods import Presets
from unalike.methods.averaging import Averaging, mean, private_inputs
from unalike.methods.newcomers import NOBODY, kept_or, newcomers, with_answered


@dataclass(frozen=True)
class FedRep(Averaging):
    """A client trains its head on the body that it got, then the body under the new head, and sends the body alone.

    ``head``: how many of the model's last tensors are the head; 2 is a last layer with its bias, 0 is FedAvg, and all
    of them is local training. ``local_head`` trains the head, ``local`` the body. The first head is drawn from
    ``agreed_seed``, so no head ever travels. A newcomer, or a client that was never asked, trains a head on the final
    body by ``newcomer`` when it wants a model. Updates count the same.

    With ``local.private`` head and body are both trained by DP-SGD, because the body's update tells of the head under
    which it was made; a round is charged for both. ``local_head`` then has the batches of ``local``.
    """

    model: Model
    cohort: int | float = 10
    local: LocalSGD = LocalSGD(epochs=1, batch=10, lr=0.1, momentum=0.5)
    local_head: LocalSGD = LocalSGD(epochs=5, batch=10, lr=0.1, momentum=0.5)
    newcomer: LocalSGD = LocalSGD(epochs=20, batch=10, lr=0.1, momentum=0.5)
    schedule: Schedule = field(default_factory=Schedule)
    head: int = 2
    agreed_seed: int = 0
    serves_unlabeled: ClassVar[bool] = False
    point_private: ClassVar[Literal[True]] = True
    presets: ClassVar[Presets] = {
        "paper": {  # the authors' code
            "local": {"epochs": 1, "batch": 10, "lr": 0.01, "momentum": 0.5},
            "local_head": {"epochs": 10, "batch": 10, "lr": 0.01, "momentum": 0.5},
            "newcomer": {"epochs": 20, "batch": 10, "lr": 0.01, "momentum": 0.5},
        }
    }

    def __post_init__(self) -> None:
        self.check_privacy(self.local, points=True)
        tensors = len(self.model.shapes)
        if not 0 <= self.head <= tensors:
            raise ValueError(f"head={self.head}; expected 0 to {tensors}, the number of the model's tensors")
        _ = self.first_head  # made here, because a vectorised task must not draw initial values
        if self.local.private is not None:
            _ = self.charged

    @cached_property
    def head_training(self) -> LocalSGD:
        """The training of the head, with the noise and the batches of the body's."""
        if self.local.private is None:
            return self.local_head
        return replace(self.local_head, private=self.local.private, batch=self.local.batch)

    @property
    def charged(self) -> LocalSGD:
        """Head and body in one."""
        if self.local.private is None or not self.head:
            return self.local
        head, body = self.local_head, self.local
        if (head.steps is None) != (body.steps is None):
            raise ValueError("DP-SGD of head and body is charged as one: give steps or epochs in both")
        if not self.body_size:
            return self.head_training
        if body.steps is not None:
            return replace(body, steps=body.steps + (head.steps or 0))
        return replace(body, epochs=(body.epochs or 0) + (head.epochs or 0))

    @cached_property
    def body_size(self) -> int:
        """How many of the model's numbers are the body's; they come first."""
        names = list(self.model.shapes)[: len(self.model.shapes) - self.head]
        return self.model.span(names[-1]).stop if names else 0

    @cached_property
    def first_head(self) -> Tensor:
        """Every client's first head."""
        return self.model.init(self.agreed_seed)[self.body_size :]

    # The clients' side

    @task
    def fit(self, client: Client, body: Tensor, rate: Tensor, **private: Tensor) -> Sent:
        """Head first, then body (Alg. 1, lines 8-13); the head is kept, the change of the body is sent."""
        head = kept_or(client, self.first_head, "head")
        loss = torch.zeros((), device=client.n.device)
        if self.head:
            head, loss = self.head_training.train(self._under(body), head, client, rate=rate, **private)
        if not self.body_size:
            return send(update=body, loss=loss, keep={"head": head})
        with_head = Supervised(self.model).at(lambda own: torch.cat([own, head]))
        fitted, loss = self.local.train(with_head, body, client, rate=rate, **private)
        return send(update=fitted - body, loss=loss, keep={"head": head})

    fit.into(mean)
    fit.derive(private_inputs)

    @task
    def join(self, client: Client, body: Tensor) -> Sent:
        """A first head on the final body. It was trained without noise, so no later round begins with it."""
        head = kept_or(client, self.first_head, "joined")
        return send(keep={"joined": client.kept.get("joined", self.newcomer(self._under(body), head, client))})

    @task(stays="theta")
    def personal_model(self, client: Client, body: Tensor) -> Sent:
        joined = kept_or(client, self.first_head, "joined")
        return send(theta=torch.cat([body, client.kept.get("head", joined)]))

    def _under(self, body: Tensor) -> Objective:
        """The loss of a head on this body."""
        return Supervised(self.model).at(lambda head: torch.cat([body, head]))

    # The server's side

    def start(self, seed: int) -> State:
        body = self.model.init(seed)[: self.body_size]
        return self.first_state("body", body).replace(ids=NOBODY)

    def round(self, state: State, federation: Federation) -> State:
        cohort = self.sample(federation, self.cohort).within_budget(self.fit)
        replies = cohort.ask(self.fit, body=state.body, rate=self.schedule(federation.round))
        return with_answered(self.server_step(state, "body", replies, federation), cohort, replies)

    def personalize(self, state: State, cohort: Cohort) -> Models:
        new = newcomers(state, cohort)
        if len(new) and self.head:
            new.ask(self.join, into=[], body=state.body)
        return cohort.ask(self.personal_model, body=state.body).held("theta")
