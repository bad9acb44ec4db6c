"""QuPeD in full precision: personalization via distillation, with a fixed weight (Ozkara et al., NeurIPS 2021)."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import ClassVar, Literal

from torch import Tensor
from torch.func import vjp

from unalike.core.checks import at_least
from unalike.core.client import Client
from unalike.core.device import beside
from unalike.core.federation import Cohort, Federation, Models
from unalike.core.method import State
from unalike.core.model import Model
from unalike.core.release import Release
from unalike.core.task import Sent, send, task
from unalike.learn.local import LocalSGD
from unalike.learn.objective import (
    Batch,
    InTurns,
    Moves,
    Params,
    divergence,
    expected,
    loss_of,
    scores,
    target,
    teacher_gradient,
)
from unalike.learn.schedules import Schedule
from unalike.learn.server import ServerOptimizer
from unalike.methods.averaging import averaged, check_averaging, moved
from unalike.methods.newcomers import NOBODY, newcomers, with_answered
from unalike.privacy.mechanisms import AdditiveNoise


@dataclass(frozen=True)
class QuPeD:
    """Every client has a model x of its own, which a common model w teaches (QuPeD, Alg. 2, without its quantization).

    A client's loss is (1 − λp)·f(x) + λp·KL(p_w ‖ p_x). In each local step x moves, then its copy of w at the new x, by
    the distillation alone. x stays; the server averages what became of w. ``weight`` is λp, ``w_lr`` the rate of w
    (none: as that of x). Settings are those of Ozkara et al. §4.1.

    A newcomer, or a client that was never sampled, starts from w and trains with w fixed for as many steps as
    ``newcomer_rounds`` have; without labels it gets w. ``clip``, ``noise`` and ``secure`` are as in FedAvg.
    """

    model: Model
    cohort: int | float = 10
    local: LocalSGD = field(default_factory=lambda: LocalSGD(steps=10, batch=1 / 60, lr=0.1, weight_decay=1e-4))
    weight: float = 0.25
    w_lr: float | None = None
    schedule: Schedule = field(default_factory=lambda: Schedule("exponential", 0.99, 6))
    newcomer_rounds: int = 6
    agreed_seed: int = 0
    clip: float | None = None
    noise: AdditiveNoise | None = None
    secure: bool = False
    serves_unlabeled: ClassVar[bool] = True
    asks_unlabeled: ClassVar[bool] = False
    client_private: ClassVar[Literal[True]] = True

    def __post_init__(self) -> None:
        check_averaging(self.clip, self.noise, self.secure, self.local)
        if not 0 <= self.weight < 1:
            raise ValueError(f"weight={self.weight} (λp); expected at least 0 and below 1")
        at_least(self, w_lr=0, newcomer_rounds=0)
        if not isinstance(self.local.lr, float | int):
            raise ValueError(f"local.lr={self.local.lr}; expected the rate of x alone: that of w is w_lr")
        _ = self.first  # made here, because a vectorised task must not draw initial values

    @cached_property
    def first(self) -> Tensor:
        """All models before the first round."""
        return self.model.init(self.agreed_seed)

    @cached_property
    def _in_turns(self) -> LocalSGD:
        lr = self.local.lr
        assert isinstance(lr, float | int)
        return replace(self.local, lr={"x": lr, "w": lr if self.w_lr is None else self.w_lr})

    @task
    def fit(self, client: Client, w: Tensor, rate: Tensor) -> Sent:
        """The local steps; sends the change of w."""
        start = {"x": client.kept.get("x", beside(self.first, client.n)), "w": w}
        after, loss = self._in_turns.minimise(InTurns(self._moves), start, client, labels=True, rate=rate)
        assert isinstance(after, dict)
        return send(update=after["w"] - w, loss=loss, keep={"x": after["x"]})

    @fit.into
    def sums(self) -> list[Release]:
        """What the server sees: the mean change of w, every client alike, and the loss if nothing is protected."""
        return averaged(self.clip, self.noise, self.secure)

    @task
    def join(self, client: Client, w: Tensor) -> Sent:
        """The personal model of a newcomer; a client that has one keeps it."""

        def objective(x: Params, batch: Batch) -> Tensor:
            assert isinstance(x, Tensor) and batch.y is not None
            of_x, of_w = (scores(self.model(one, batch.x), batch.y) for one in (x, w))
            own, taught = loss_of(of_x, batch.y), divergence(of_w, of_x, batch.y)
            return batch.mean((1 - self.weight) * own + self.weight * taught)

        trained = self.local.times(self.newcomer_rounds)(objective, w, client)
        return send(keep={"x": client.kept.get("x", trained)})

    @task(stays="x")
    def own(self, client: Client, w: Tensor) -> Sent:
        """The personal model, or w where there is none."""
        return send(x=client.kept.get("x", w))

    def _moves(self, params: dict[str, Tensor], batch: Batch) -> Moves:
        """One step; the forward pass of w serves both moves."""
        y = batch.y
        assert y is not None
        outputs, pull_w = vjp(lambda w: self.model(w, batch.x), params["w"])[:2]
        of_w = scores(outputs, y)
        outputs, pull_x = vjp(lambda x: self.model(x, batch.x), params["x"])[:2]
        of_x = scores(outputs, y)
        loss = batch.mean(loss_of(of_x, y))
        q, p = expected(of_x, y), expected(of_w, y)
        g = (1 - self.weight) * (q - target(of_x, y)) + self.weight * (q - p)
        params = yield {"x": pull_x(batch.mean_gradient(g))[0]}
        of_x = scores(self.model(params["x"], batch.x), y)
        yield {"w": pull_w(batch.mean_gradient(self.weight * teacher_gradient(of_w, of_x, y)))[0]}
        return loss

    def start(self, seed: int) -> State:
        return State(w=self.first, ids=NOBODY)

    def round(self, state: State, federation: Federation) -> State:
        cohort = federation.sample(self.cohort, poisson=self.noise is not None, labeled=True)
        replies = cohort.ask(self.fit, w=state.w, rate=self.schedule(federation.round))
        return with_answered(moved(state, "w", replies, ServerOptimizer(), federation), cohort, replies)

    def personalize(self, state: State, cohort: Cohort) -> Models:
        new = newcomers(state, cohort)
        if len(new) and self.newcomer_rounds:
            new.ask(self.join, w=state.w, into=[])
        return cohort.ask(self.own, w=state.w).held("x")
