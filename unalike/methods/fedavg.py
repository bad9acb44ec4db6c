"""FedAvg with its nearest relatives: FedProx, and FedAvg with fine-tuning.

FedAvg: McMahan et al., AISTATS 2017 (T1 Algorithms 3 and 4). FedProx: Li et al., MLSys 2020.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from unalike.core.client import Client
from unalike.core.federation import Cohort, Federation, Models
from unalike.core.method import State
from unalike.core.model import Model
from unalike.core.release import SIZE, Mean, Release, Stays
from unalike.core.task import Sent, send, task
from unalike.learn.local import LocalSGD
from unalike.learn.objective import Batch, Params, supervised
from unalike.learn.schedules import Schedule
from unalike.learn.server import ServerOptimizer
from unalike.privacy.dpsgd import PointPrivacy, Steps
from unalike.privacy.mechanisms import AdditiveNoise


@dataclass(frozen=True)
class FedAvg:
    """One model for all: the mean of the clients' updates, weighted by their numbers of samples (T1 Alg. 3-4).

    With ``noise`` (client-level privacy) the cohort is a Poisson sample, every update is clipped to ``clip`` and counts
    the same, and no loss is released. With ``local.private`` (point-level privacy) the clients train by DP-SGD; again
    updates count the same and no loss is released. ``secure`` sums the updates under masks, for which they are clipped.
    ``mu`` adds FedProx's term μ/2·‖θ − θ_global‖² to every client's objective. With ``mu_step`` it is only the first μ,
    which then grows by the step when the loss has risen, and falls by it after five falls of the loss in a row (Li et
    al. §5.3 and T1 C.1.2: from 1 by 0.1). The loss is the clients' in training, with the term.
    With ``finetune`` every client, a newcomer too, trains the final model a little further on its own labels.
    """

    model: Model
    cohort: int | float = 10
    local: LocalSGD = field(default_factory=LocalSGD)
    server: ServerOptimizer = field(default_factory=ServerOptimizer)
    schedule: Schedule = field(default_factory=Schedule)
    mu: float = 0.0
    mu_step: float = 0.0
    finetune: LocalSGD | None = None
    clip: float | None = None
    noise: AdditiveNoise | None = None
    secure: bool = False
    asks_unlabeled: ClassVar[bool] = False
    client_private: ClassVar[Literal[True]] = True

    @property
    def serves_unlabeled(self) -> bool:
        return self.finetune is None  # then everybody gets the same model; fine-tuning needs labels

    def __post_init__(self) -> None:
        if self.secure and self.clip is None:
            raise ValueError("a secure sum is over bounded integers; set clip=..., the most that an update may be long")
        if self.noise is not None and self.local.private is not None:
            raise ValueError(
                "noise (which protects clients) and local.private (which protects points) at once: a ledger speaks "
                "about one of them; choose one"
            )
        for name in ("mu", "mu_step"):
            if not getattr(self, name) >= 0:
                raise ValueError(f"{name}={getattr(self, name)}; expected 0 or more")
        if self.mu_step and not self._loss_is_released:
            raise ValueError(
                f"mu_step={self.mu_step} follows the clients' loss, which noise, secure and local.private keep back; "
                "set mu_step=0 for a fixed mu"
            )

    def dp_sgd(self, size: int) -> tuple[PointPrivacy, Steps] | None:
        return None if self.local.private is None else (self.local.private, self.local.steps_of(size))

    @property
    def _loss_is_released(self) -> bool:
        return self.noise is None and not self.secure and self.local.private is None

    @task
    def fit(
        self, client: Client, theta: Tensor, rate: Tensor, mu: Tensor | None = None, noise: Tensor | None = None
    ) -> Sent:
        """ClientUpdate (T1 Alg. 4): local SGD from the global θ; sends θ_new − θ."""
        plain = supervised(self.model)

        def proximal(local: Params, batch: Batch) -> Tensor:
            assert isinstance(local, Tensor)
            return plain(local, batch) + (self.mu if mu is None else mu) / 2 * (local - theta).square().sum()

        near = proximal if self.mu or mu is not None else plain
        fitted, loss = self.local.train(near, theta, client, rate=rate, noise=noise)
        return send(update=fitted - theta, loss=loss)

    @fit.into
    def sums(self) -> list[Release]:
        """What the server sees of an update: a sum, weighted by declared sizes where nothing is to be protected."""
        if self.local.private is not None:
            return [Mean("update", clip=self.clip, secure=self.secure, cost=self.local.cost)]
        if not self._loss_is_released:
            return [Mean("update", clip=self.clip, noise=self.noise, secure=self.secure)]
        return [Mean("update", weight=SIZE, clip=self.clip), Mean("loss", weight=SIZE)]

    @fit.derive
    def own_noise(self, bound: Tensor) -> dict[str, Tensor]:
        """DP-SGD's noise multiplier, which each client finds from its own declared size."""
        return {} if self.local.private is None else {"noise": self.local.multipliers(bound)}

    @task
    def adapt(self, client: Client, theta: Tensor) -> Sent:
        """Fine-tuning at the client, where the result stays."""
        assert self.finetune is not None
        return send(theta=self.finetune(self.model, theta, client))

    @adapt.into
    def stays(self) -> list[Release]:
        """A personal model does not leave its client."""
        return [Stays("theta")]

    def start(self, seed: int) -> State:
        theta = self.model.init(seed)
        state = State(theta=theta).with_part("server", self.server.start(theta))
        if not self.mu_step:
            return state
        first = {"mu": torch.tensor(float(self.mu)), "loss": torch.tensor(torch.nan), "falls": torch.zeros(())}
        return state.with_part("prox", first)

    def round(self, state: State, federation: Federation) -> State:
        cohort = federation.sample(self.cohort, poisson=self.noise is not None, labeled=True)
        prox = state.part("prox")
        shared: dict[str, Any] = {"mu": prox["mu"]} if prox else {}
        rate = self.schedule(federation.round)
        replies = cohort.ask(self.fit, theta=state.theta, rate=rate, **shared)
        if "loss" in replies:
            federation.report(loss=replies["loss"])
            if prox:
                state = state.with_part("prox", self._next_mu(prox, replies["loss"]))
        if "update" not in replies:
            return state  # the very first Poisson cohort was empty
        theta, moments = self.server.step(state.theta, replies["update"], state.part("server"))
        return state.replace(theta=theta).with_part("server", moments)

    def _next_mu(self, prox: Mapping[str, Tensor], loss: Tensor) -> dict[str, Tensor]:
        falls = prox["falls"] + 1 if loss < prox["loss"] else torch.zeros(())
        step = self.mu_step * (float(loss > prox["loss"]) - float(falls == 5))
        return {"mu": (prox["mu"] + step).clamp(min=0), "loss": loss, "falls": falls % 5}

    def attacked(self, model: Model, cohort: int | float, local: LocalSGD, noise: AdditiveNoise | None) -> FedAvg:
        """For an audit: the same rounds on another model, with nothing but the mean of the updates in the state."""
        changed = replace(self, model=model, cohort=cohort, local=local, noise=noise)
        return replace(changed, server=ServerOptimizer(), schedule=Schedule(), finetune=None, mu=0.0)

    def personalize(self, state: State, cohort: Cohort) -> Models:
        if self.finetune is None:
            return state.theta.expand(len(cohort), -1)
        return cohort.ask(self.adapt, theta=state.theta).held("theta")
