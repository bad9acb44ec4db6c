"""FedAvg, and FedAvg with fine-tuning: McMahan et al., AISTATS 2017 (T1 Algorithms 3 and 4)."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import ClassVar, Literal

from torch import Tensor

from unalike.core.client import Client
from unalike.core.federation import Cohort, Federation, Models
from unalike.core.method import State
from unalike.core.model import Model
from unalike.core.release import SIZE, Mean, Release
from unalike.core.roster import Declared
from unalike.core.task import Sent, send, task
from unalike.learn.local import LocalSGD
from unalike.learn.schedules import Schedule
from unalike.learn.server import ServerOptimizer
from unalike.methods.averaging import averaged, begun, check_averaging, moved
from unalike.privacy.dpsgd import PointPrivacy, Steps
from unalike.privacy.mechanisms import AdditiveNoise


@dataclass(frozen=True)
class FedAvg:
    """One model for all: the mean of the clients' updates, weighted by their numbers of samples.

    With ``noise`` (client-level privacy) the cohort is a Poisson sample, every update is clipped to ``clip`` and counts
    the same, and no loss is released. With ``local.private`` (point-level privacy) the clients train by DP-SGD; again
    updates count the same and no loss is released. ``secure`` sums the updates under masks, for which they are clipped.
    With ``finetune`` every client, a newcomer too, trains the final model a little further on its own labels.
    """

    model: Model
    cohort: int | float = 10
    local: LocalSGD = field(default_factory=LocalSGD)
    server: ServerOptimizer = field(default_factory=ServerOptimizer)
    schedule: Schedule = field(default_factory=Schedule)
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
        check_averaging(self.clip, self.noise, self.secure, self.local, points=True)

    def dp_sgd(self, size: int) -> tuple[PointPrivacy, Steps] | None:
        return None if self.local.private is None else (self.local.private, self.local.steps_of(size))

    @task
    def fit(
        self, client: Client, theta: Tensor, rate: Tensor, noise: Tensor | None = None, batch: Tensor | None = None
    ) -> Sent:
        """ClientUpdate (T1 Alg. 4): local SGD from the global θ; sends θ_new − θ."""
        fitted, loss = self.local.train(self.model, theta, client, rate=rate, noise=noise, batch=batch)
        return send(update=fitted - theta, loss=loss)

    @fit.into
    def sums(self) -> list[Release]:
        """What the server sees of an update: a sum, weighted by declared sizes where nothing is to be protected."""
        if self.local.private is not None:
            return [Mean("update", clip=self.clip, secure=self.secure, cost=self.local.cost)]
        return averaged(self.clip, self.noise, self.secure, weight=SIZE)

    @fit.derive
    def own(self, declared: Declared) -> dict[str, Tensor]:
        """DP-SGD's noise multiplier, and where each has its own the batch size, which each client finds for itself."""
        return self.local.own(declared)

    @task(stays="theta")
    def adapt(self, client: Client, theta: Tensor) -> Sent:
        """Fine-tuning at the client, where the result stays."""
        assert self.finetune is not None
        return send(theta=self.finetune(self.model, theta, client))

    def start(self, seed: int) -> State:
        return begun("theta", self.model.init(seed), self.server)

    def round(self, state: State, federation: Federation) -> State:
        cohort = federation.sample(self.cohort, poisson=self.noise is not None, labeled=True).within_budget(self.fit)
        replies = cohort.ask(self.fit, theta=state.theta, rate=self.schedule(federation.round))
        return moved(state, "theta", replies, self.server, federation)

    def attacked(self, model: Model, cohort: int | float, local: LocalSGD, noise: AdditiveNoise | None) -> FedAvg:
        """For an audit: the same rounds on another model, with nothing but the mean of the updates in the state."""
        changed = replace(self, model=model, cohort=cohort, local=local, noise=noise)
        return replace(changed, server=ServerOptimizer(), schedule=Schedule(), finetune=None)

    def personalize(self, state: State, cohort: Cohort) -> Models:
        if self.finetune is None:
            return state.theta.expand(len(cohort), -1)
        return cohort.ask(self.adapt, theta=state.theta).held("theta")
