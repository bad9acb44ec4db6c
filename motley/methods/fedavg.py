"""FedAvg with its nearest relatives (FedProx, FedAvg with fine-tuning), and training without any federation.

FedAvg: McMahan et al., AISTATS 2017 (T1 Algorithms 3 and 4). FedProx: Li et al., MLSys 2020.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor

from motley.client import Client
from motley.federation import Cohort, Federation, PerClient, each
from motley.learn.local import LocalSGD
from motley.learn.objective import Batch, Params, supervised
from motley.learn.schedules import Schedule
from motley.learn.server import ServerOptimizer
from motley.method import State
from motley.model import Model
from motley.privacy.mechanisms import AdditiveNoise
from motley.release import Each, Mean, Release
from motley.task import Sent, send, task


@dataclass(frozen=True)
class FedAvg:
    """One model for all: the mean of the clients' updates, weighted by their numbers of samples (T1 Alg. 3-4).

    With ``noise`` (client-level privacy) the cohort is a Poisson sample, every update is clipped to ``clip`` and counts
    the same, and no loss is released. With ``local.private`` (point-level privacy) the clients train by DP-SGD; again
    updates count the same and no loss is released. ``secure`` sums the updates under masks, for which they are clipped.
    ``mu`` adds FedProx's term μ/2·‖θ − θ_global‖² to every client's objective.
    With ``finetune`` every client, a newcomer too, trains the final model a little further on its own labels.
    """

    model: Model
    cohort: int | float = 10
    local: LocalSGD = field(default_factory=LocalSGD)
    server: ServerOptimizer = field(default_factory=ServerOptimizer)
    schedule: Schedule = field(default_factory=Schedule)
    mu: float = 0.0
    finetune: LocalSGD | None = None
    clip: float | None = None
    noise: AdditiveNoise | None = None
    secure: bool = False
    point_private: ClassVar[bool] = True  # charges the ledger with local.private

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
        if not self.mu >= 0:
            raise ValueError(f"mu={self.mu}; expected 0 or more")

    @task
    def fit(self, client: Client, theta: Tensor, rate: Tensor, noise: Tensor | None = None) -> Sent:
        """ClientUpdate (T1 Alg. 4): local SGD from the global θ; sends θ_new − θ."""
        plain = supervised(self.model)

        def proximal(local: Params, batch: Batch) -> Tensor:
            assert isinstance(local, Tensor)
            return plain(local, batch) + self.mu / 2 * (local - theta).square().sum()

        fitted, loss = self.local.train(proximal if self.mu else plain, theta, client, rate=rate, noise=noise)
        return send(update=fitted - theta, loss=loss, n=client.n.to(torch.float32))

    @task
    def adapt(self, client: Client, theta: Tensor) -> Sent:
        """Fine-tuning at the client, where the result stays."""
        assert self.finetune is not None
        return send(theta=self.finetune(self.model, theta, client))

    def start(self, seed: int) -> State:
        theta = self.model.init(seed)
        return State(theta=theta).with_part("server", self.server.start(theta))

    def round(self, state: State, federation: Federation) -> State:
        cohort = federation.sample(self.cohort, poisson=self.noise is not None, labeled=True)
        into: list[Release] = [Mean("update", weight="n", clip=self.clip), Mean("loss", weight="n")]
        own: dict[str, PerClient] = {}
        if self.local.private is not None:
            own["noise"] = each(self.local.multipliers(cohort.sizes))
            into = [Mean("update", clip=self.clip, secure=self.secure, cost=self.local.cost(cohort.sizes))]
        elif self.noise is not None or self.secure:
            into = [Mean("update", clip=self.clip, noise=self.noise, secure=self.secure)]
        rate = self.schedule(federation.round)
        replies = cohort.ask(self.fit, theta=state.theta, rate=rate, into=into, **own)
        if "loss" in replies:
            federation.report(loss=replies["loss"])
        if "update" not in replies:
            return state  # the very first Poisson cohort was empty
        theta, moments = self.server.step(state.theta, replies["update"], state.part("server"))
        return state.replace(theta=theta).with_part("server", moments)

    def personalize(self, state: State, cohort: Cohort) -> Tensor:
        if self.finetune is None:
            return state.theta.expand(len(cohort), -1)
        return cohort.ask(self.adapt, theta=state.theta, into=Each("theta", simulation_only=True))["theta"]


@dataclass(frozen=True)
class Local:
    """No federation at all: every client trains its own model, which never leaves it.

    A round trains the cohort's kept models further. A client that has not trained yet, a newcomer for example, trains
    from the common start with ``newcomer``.
    """

    model: Model
    cohort: int | float = 10
    local: LocalSGD = field(default_factory=LocalSGD)
    newcomer: LocalSGD = field(default_factory=lambda: LocalSGD(steps=200))
    serves_unlabeled: ClassVar[bool] = False

    @task
    def fit(self, client: Client, start: Tensor) -> Sent:
        fitted = self.local(self.model, client.kept.get("theta", start), client)
        return send(keep={"theta": fitted, "trained": torch.ones(())})

    @task
    def has_model(self, client: Client) -> Sent:
        return send(trained=client.kept.get("trained", torch.zeros(())))

    @task
    def own(self, client: Client, start: Tensor) -> Sent:
        """The client's own model, which stays there."""
        return send(theta=client.kept.get("theta", start))

    @task
    def fresh(self, client: Client, start: Tensor) -> Sent:
        return send(theta=self.newcomer(self.model, start, client))

    def start(self, seed: int) -> State:
        return State(theta=self.model.init(seed))

    def round(self, state: State, federation: Federation) -> State:
        federation.sample(self.cohort, labeled=True).ask(self.fit, start=state.theta, into=[])
        return state

    def personalize(self, state: State, cohort: Cohort) -> Tensor:
        stays = Each(simulation_only=True)
        trained = cohort.ask(self.has_model, into=stays)["trained"] > 0
        theta = state.theta.repeat(len(cohort), 1)
        for question, rows in ((self.own, trained.nonzero().flatten()), (self.fresh, (~trained).nonzero().flatten())):
            if len(rows):
                theta[rows] = cohort.only(rows).ask(question, start=state.theta, into=stays)["theta"]
        return theta
