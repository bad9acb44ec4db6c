"""FML, federated mutual learning (Shen et al., 2020)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from torch import Tensor

from unalike.core.vocabulary import Client, Cohort, Federation, Models, Sent, State, send, task
from unalike.learn.local import LocalSGD
from unalike.learn.objective import Batch, Params, divergence, loss_of, scores
from unalike.learn.schedules import Schedule
from unalike.methods import Presets, ozkara2022
from unalike.methods.averaging import Averaging, mean_by_size
from unalike.methods.newcomers import NOBODY, PersonalModels, kept_or, with_answered


@dataclass(frozen=True)
class FML(Averaging, PersonalModels):
    """Every client trains a private model, which stays, and a copy of the common "meme", which is averaged by sizes.

    The private model's loss is α·f + (1 − α)·KL(p_meme ‖ p_private), the meme's β·f + (1 − β)·KL(p_private ‖ p_meme);
    both move at once, and neither loss reaches the other's parameters. Here both have one architecture and start alike.
    A newcomer starts from the meme and trains both. The other fields are those of ``Averaging`` and ``PersonalModels``.
    """

    cohort: int | float = 10
    local: LocalSGD = field(default_factory=lambda: LocalSGD(epochs=5, lr=0.01, momentum=0.9))
    alpha: float = 0.5
    beta: float = 0.5
    schedule: Schedule = field(default_factory=Schedule)
    presets: ClassVar[Presets] = {
        "paper": {},  # the defaults
        "ozkara2022": ozkara2022(alpha=0.25, beta=0.25),  # P3 §4.1
    }

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_privacy(self.local)
        for name in ("alpha", "beta"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"{name}={getattr(self, name)}; expected at least 0 and at most 1")

    @task
    def fit(self, client: Client, meme: Tensor, rate: Tensor) -> Sent:
        """Mutual training; sends the change of the meme."""
        start: Params = {"private": kept_or(client, self.first), "meme": meme}
        after, loss = self.local.minimise(self._loss, start, client, labels=True, rate=rate)
        assert isinstance(after, dict)
        return send(update=after["meme"] - meme, loss=loss, keep={"theta": after["private"]})

    fit.into(mean_by_size)

    @task
    def join(self, client: Client, meme: Tensor) -> Sent:
        """The private model of a newcomer; a client that has one keeps it."""
        start: Params = {"private": meme, "meme": meme}
        after, _ = self.local.repeat(self.newcomer_rounds).minimise(self._loss, start, client, labels=True)
        assert isinstance(after, dict)
        return send(keep={"theta": client.kept.get("theta", after["private"])})

    def _loss(self, params: Params, batch: Batch) -> Tensor:
        """Both losses; what a model learns from is detached, so each reaches its own model alone."""
        assert isinstance(params, dict) and batch.y is not None
        y = batch.y
        private, meme = (scores(self.model(params[name], batch.x), y) for name in ("private", "meme"))
        own = self.alpha * loss_of(private, y) + (1 - self.alpha) * divergence(meme.detach(), private, y)
        shared = self.beta * loss_of(meme, y) + (1 - self.beta) * divergence(private.detach(), meme, y)
        return batch.mean(own + shared)

    def start(self, seed: int) -> State:
        return self.first_state("meme", self.first).replace(ids=NOBODY)

    def round(self, state: State, federation: Federation) -> State:
        cohort = self.sample(federation, self.cohort)
        replies = cohort.ask(self.fit, meme=state.meme, rate=self.schedule(federation.round))
        return with_answered(self.server_step(state, "meme", replies, federation), cohort, replies)

    def personalize(self, state: State, cohort: Cohort) -> Models:
        return self.own_models(state, cohort, self.join, state.meme, meme=state.meme)
