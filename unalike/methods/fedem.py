"""FedEM: every client's model is its own mixture of a few common ones (Marfoq et al., NeurIPS 2021, Algorithm 1).

Symbols: θ_m the components, π_i the client's weights of them, q_m(s) the share of θ_m in sample s.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import ClassVar, Literal

import torch
from torch import Tensor
from torch.func import vmap

from unalike.core.checks import at_least
from unalike.core.vocabulary import Client, Cohort, Federation, Models, Sent, State, send, task
from unalike.learn.local import LocalSGD
from unalike.learn.objective import Batch, Params, loss_of
from unalike.learn.schedules import Schedule
from unalike.methods import Presets, ozkara2022
from unalike.methods.averaging import ONE_PASS, Averaging, mean_by_size
from unalike.methods.problem import Problem
from unalike.networks.ensemble import Ensemble


@dataclass(frozen=True)
class FedEM(Averaging):
    """A round: q_m(s) ∝ π_im·exp(−loss of θ_m on s), π_im = mean q_m, then local SGD on Σ_m mean q_m(s)·loss. The
    server takes the mean of the components, weighted by sizes. π_i stays at its client.

    ``components``: M; each starts from its own seed. Every client, seen or new, mixes the final components by
    ``weight_steps`` steps of EM on π, from the π that it kept (uniform at first). This needs labels. With ``noise`` the
    M changes are clipped together, as one vector.
    """

    problem: Problem
    cohort: int | float = 10
    local: LocalSGD = ONE_PASS
    components: int = 3
    weight_steps: int = 10
    schedule: Schedule = field(default_factory=Schedule)
    serves_unlabeled: ClassVar[bool] = False
    presets: ClassVar[Presets] = {
        "paper": {"components": 3, "local": {"epochs": 1, "batch": 128, "lr": 0.03}},  # the authors' code, for CIFAR-10
        "ozkara2022": ozkara2022(0.2, components=2),  # P3 §4.1
    }

    def __post_init__(self) -> None:
        self.check_privacy(self.local)
        at_least(self, components=1, weight_steps=0)
        if self.components > 1 and self.problem.model.drawn == set():
            raise ValueError(
                "its components must begin apart, and all that is trained here begins with the network's own values; "
                "add lora"
            )
        _ = self.model

    @cached_property
    def model(self) -> Ensemble:
        """The mixture as one model."""
        mean_of: Literal["outputs", "probabilities"] = "outputs" if self.problem.classes is None else "probabilities"
        return Ensemble(self.problem.model, self.components, mean_of)

    def losses(self, theta: Tensor, x: Tensor, y: Tensor) -> Tensor:
        """[M, rows] the loss of each component on each sample."""
        return vmap(lambda own: loss_of(self.problem.model(own, x), y))(theta)

    def shares(self, losses: Tensor, pi: Tensor) -> Tensor:
        """q [M, rows] (E-step)."""
        return torch.softmax(pi.clamp(min=1e-30).log()[:, None] - losses, 0)

    def _kept(self, client: Client) -> Tensor:
        """π_i so far."""
        return client.kept.get("pi", torch.full((self.components,), 1 / self.components, device=client.n.device))

    @task
    def fit(self, client: Client, theta: Tensor, rate: Tensor) -> Sent:
        """One step of EM (Alg. 1, lines 5-10); π is kept, the change of all components is sent as one vector."""
        pi, client = self._kept(client), client.with_labels
        q = self.shares(self.losses(theta, client.x, client.y), pi)
        after = client.mean(q.T)

        def weighted(own: Params, batch: Batch) -> Tensor:
            assert isinstance(own, Tensor) and batch.y is not None
            # q of the batch's samples under the components and weights that the round began with
            q = self.shares(self.losses(theta, batch.x, batch.y), pi).detach()
            return batch.mean((q * self.losses(own, batch.x, batch.y)).sum(0))

        fitted, loss = self.local.train(weighted, theta, client, rate=rate)
        return send(update=(fitted - theta).reshape(-1), loss=loss, keep={"pi": after})

    fit.into(mean_by_size)

    @task(stays="theta")
    def mix(self, client: Client, theta: Tensor) -> Sent:
        """The client's weights of the final components, and with them its model."""
        pi, client = self._kept(client), client.with_labels
        losses = self.losses(theta, client.x, client.y)
        for _ in range(self.weight_steps):
            pi = client.mean(self.shares(losses, pi).T)
        return send(theta=torch.cat([theta, pi[:, None]], 1).reshape(-1))

    def start(self, seed: int) -> State:
        first = [self.problem.model.init(seed + 1000 * m) for m in range(self.components)]
        return self.first_state("theta", torch.stack(first))

    def round(self, state: State, federation: Federation) -> State:
        cohort = self.sample(federation, self.cohort)
        replies = cohort.ask(self.fit, theta=state.theta, rate=self.schedule(federation.round))
        return self.server_step(state, "theta", replies, federation)

    def personalize(self, state: State, cohort: Cohort) -> Models:
        return cohort.ask(self.mix, theta=state.theta).held("theta")
