"""FedAvg, and FedAvg with fine-tuning: McMahan et al., AISTATS 2017 (T1 Algorithms 3 and 4)."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import ClassVar, Literal

from torch import Tensor

from unalike.core.vocabulary import Client, Cohort, Federation, Model, Models, Sent, State, send, task
from unalike.learn.local import LocalSGD
from unalike.learn.schedules import Schedule
from unalike.learn.server import ServerOptimizer
from unalike.methods import Presets, ozkara2022
from unalike.methods.averaging import ONE_PASS, Averaging, mean_by_size, private_inputs
from unalike.privacy.mechanisms import AdditiveNoise


@dataclass(frozen=True)
class FedAvg(Averaging):
    """One model for all: the mean of the clients' updates, weighted by their numbers of samples.

    With ``local.private`` (point-level privacy) clients train by DP-SGD; then, as with ``noise`` or ``secure``, updates
    count the same and no loss is shown. With ``finetune`` every client, a newcomer too, trains the final model a little
    further on its own labels. The other fields are those of ``Averaging``.
    """

    model: Model
    cohort: int | float = 10
    local: LocalSGD = ONE_PASS
    schedule: Schedule = field(default_factory=Schedule)
    finetune: LocalSGD | None = None
    point_private: ClassVar[Literal[True]] = True
    presets: ClassVar[Presets] = {
        "paper": {
            "cohort": 0.05,  # T1 §4.4; lr is ours
            "local": {"epochs": 1, "batch": 32, "lr": 0.01, "momentum": 0.9},
        },
        "ozkara2022": ozkara2022(),  # P3 §4.1
    }

    @property
    def serves_unlabeled(self) -> bool:
        return self.finetune is None  # then everybody gets the same model; fine-tuning needs labels

    def __post_init__(self) -> None:
        self.check_privacy(self.local, points=True)

    @task
    def fit(self, client: Client, theta: Tensor, rate: Tensor, **private: Tensor) -> Sent:
        """ClientUpdate (T1 Alg. 4): local SGD from the global θ; sends θ_new − θ."""
        fitted, loss = self.local.train(self.model, theta, client, rate=rate, **private)
        return send(update=fitted - theta, loss=loss)

    fit.into(mean_by_size)
    fit.derive(private_inputs)

    @task(stays="theta")
    def adapt(self, client: Client, theta: Tensor) -> Sent:
        """Fine-tuning at the client, where the result stays."""
        assert self.finetune is not None
        return send(theta=self.finetune(self.model, theta, client))

    def start(self, seed: int) -> State:
        return self.first_state("theta", self.model.init(seed))

    def round(self, state: State, federation: Federation) -> State:
        cohort = self.sample(federation, self.cohort).within_budget(self.fit)
        replies = cohort.ask(self.fit, theta=state.theta, rate=self.schedule(federation.round))
        return self.server_step(state, "theta", replies, federation)

    def for_audit(self, model: Model, cohort: int | float, local: LocalSGD, noise: AdditiveNoise | None) -> FedAvg:
        """For an audit: the same rounds on another model, with nothing but the mean of the updates in the state."""
        changed = replace(self, model=model, cohort=cohort, local=local, noise=noise)
        return replace(changed, server=ServerOptimizer(), schedule=Schedule(), finetune=None)

    def personalize(self, state: State, cohort: Cohort) -> Models:
        if self.finetune is None:
            return state.theta.expand(len(cohort), -1)
        return cohort.ask(self.adapt, theta=state.theta).held("theta")
