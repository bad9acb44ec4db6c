"""pFedMe: personal models near a common one, by Moreau envelopes (Dinh, Tran and Nguyen, NeurIPS 2020, Algorithm 1).

w is the common model, θ̂_i(w) = argmin f_i(θ) + λ/2·‖θ − w‖² the personal one, η the rate of w (``local.lr``).
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import ClassVar, Literal

import torch
from torch import Tensor
from torch.func import grad_and_value

from unalike.core.checks import above, at_least
from unalike.core.vocabulary import Client, Cohort, Federation, Model, Models, Sent, State, send, task
from unalike.learn.local import LocalSGD
from unalike.learn.objective import Batch, Objective, Params, Supervised, penalised
from unalike.learn.schedules import Schedule
from unalike.methods import Presets, ozkara2022
from unalike.methods.averaging import Averaging, mean, private_inputs
from unalike.methods.newcomers import one_rate


@dataclass(frozen=True)
class PFedMe(Averaging):
    """A step at a client: θ̃ ≈ θ̂_i(w) on a batch by ``inner_steps`` (K) steps of ``inner_lr``, then w ← w − ηλ(w − θ̃).

    The server moves w by β times the mean change of the clients' w, which all count the same; ``server.lr`` is β. The
    model of every client, seen or new, is θ̂_i(w) of the final w, found by ``personal`` from w; the
    authors' code scores the θ̃ of the last batch instead. The other defaults are the authors'.

    With ``local.private`` the K inner steps are those of DP-SGD, each on a Poisson batch of its own; λ(θ − w) holds no
    data beyond θ. What w makes of θ̃ is charged nothing more, and has neither momentum nor weight decay.
    """

    model: Model
    cohort: int | float = 10
    local: LocalSGD = LocalSGD(steps=20, batch=20, lr=0.005)
    lambda_: float = 15.0
    inner_steps: int = 5
    inner_lr: float = 0.1
    personal: LocalSGD = LocalSGD(epochs=20, batch=10, lr=0.05)
    schedule: Schedule = field(default_factory=Schedule)
    serves_unlabeled: ClassVar[bool] = False
    point_private: ClassVar[Literal[True]] = True
    presets: ClassVar[Presets] = {
        "paper": {"personal": {"epochs": 20, "batch": 20, "lr": 0.1}},  # all else is theirs
        "ozkara2022": ozkara2022(0.2, lambda_=0.5, inner_steps=3),  # P3 §4.1; it names no inner rate
    }

    def __post_init__(self) -> None:
        self.check_privacy(self.local, points=True)
        above(self, lambda_=0, inner_lr=0)
        at_least(self, inner_steps=1)
        if self.local.private is not None and (
            not self.local.steps or self.local.momentum or self.local.weight_decay or self.local.clip
        ):
            raise ValueError("DP-SGD inside of a step of w: set local.steps, without momentum, weight_decay and clip")
        if self.lambda_ * self.inner_lr >= 2:
            raise ValueError(
                f"lambda_ × inner_lr = {self.lambda_ * self.inner_lr:g}; steps towards θ̂ diverge from 2 on, so choose "
                "a smaller inner_lr"
            )

    def near(self, w: Tensor) -> Objective:
        """f_i(θ) + λ/2·‖θ − w‖² on a batch."""
        return penalised(Supervised(self.model), lambda theta: self.lambda_ / 2 * (theta - w).square().sum())

    @property
    def charged(self) -> LocalSGD:
        """The inner steps of a round."""
        if self.local.private is None:
            return self.local
        return replace(self.local, steps=(self.local.steps or 0) * self.inner_steps)

    @task
    def fit(self, client: Client, w: Tensor, rate: Tensor, **private: Tensor) -> Sent:
        """R steps of w (Alg. 1, lines 5-8); sends what changed."""
        if self.local.private is not None:
            # θ − w is trained from 0, and its weight decay is λ(θ − w)
            inner = replace(self.local, steps=self.inner_steps, lr=self.inner_lr, weight_decay=self.lambda_)
            start, eta = w, one_rate(self.local)
            for _ in range(self.local.steps or 0):
                away = inner(Supervised(self.model, origin=w), torch.zeros_like(w), client, **private)
                w = w + rate * eta * self.lambda_ * away
            return send(update=w - start)

        def envelope(own: Params, batch: Batch) -> Tensor:
            """λ/2·‖w − θ̃‖² with θ̃ fixed: its gradient is λ(w − θ̃), that of the envelope. Its value is f_i(θ̃)."""
            assert isinstance(own, Tensor)
            fixed = own.detach()
            step, theta, value = grad_and_value(self.near(fixed)), fixed, own.new_zeros(())
            for _ in range(self.inner_steps):
                gradient, value = step(theta, batch)
                theta = theta - self.inner_lr * gradient
            term = self.lambda_ / 2 * (own - theta).square().sum()
            return term - term.detach() + value

        fitted, loss = self.local.train(envelope, w, client, rate=rate)
        return send(update=fitted - w, loss=loss)

    fit.into(mean)
    fit.derive(private_inputs)

    @task(stays="theta")
    def adapt(self, client: Client, w: Tensor) -> Sent:
        """θ̂_i(w)."""
        return send(theta=self.personal(self.near(w), w, client))

    def start(self, seed: int) -> State:
        return self.first_state("w", self.model.init(seed))

    def round(self, state: State, federation: Federation) -> State:
        cohort = self.sample(federation, self.cohort).within_budget(self.fit)
        replies = cohort.ask(self.fit, w=state.w, rate=self.schedule(federation.round))
        return self.server_step(state, "w", replies, federation)

    def personalize(self, state: State, cohort: Cohort) -> Models:
        return cohort.ask(self.adapt, w=state.w).held("theta")
