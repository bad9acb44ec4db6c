"""QuPeD (Ozkara et al., NeurIPS 2021, Algorithm 2) in full precision."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import ClassVar

from torch import Tensor

from unalike.core.checks import at_least
from unalike.core.vocabulary import Client, Cohort, Federation, Models, Sent, State, send, task
from unalike.learn.local import LocalSGD
from unalike.learn.objective import Batch, InTurns, Moves, Params, scores, teacher_gradient
from unalike.learn.schedules import Schedule
from unalike.methods import Presets
from unalike.methods.averaging import Averaging, mean
from unalike.methods.distillation import distillation_loss, student_gradient
from unalike.methods.newcomers import NOBODY, PersonalModels, kept_or, one_rate, with_answered


@dataclass(frozen=True)
class QuPeD(Averaging, PersonalModels):
    """Every client has a model x of its own, which a common model w teaches; nothing is quantized.

    A client's loss is (1 − λp)·f(x) + λp·KL(p_w ‖ p_x). In each local step x moves, then its copy of w at the new x, by
    the distillation alone. x stays; the server averages what became of w. ``weight`` is λp, ``w_lr`` the rate of w
    (none: as that of x). A newcomer starts from w, which stays as it is. The other fields are those of ``Averaging``
    and ``PersonalModels``.
    """

    cohort: int | float = 10
    local: LocalSGD = field(default_factory=lambda: LocalSGD(steps=10, batch=1 / 60, lr=0.1, weight_decay=1e-4))
    weight: float = 0.25
    w_lr: float | None = None
    schedule: Schedule = field(default_factory=lambda: Schedule("exponential", 0.99, 6))
    newcomer_rounds: int = field(default=6, kw_only=True)
    presets: ClassVar[Presets] = {"paper": {}, "ozkara2022": {}}  # the defaults are those of P3 §4.1

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_privacy(self.local)
        if not 0 <= self.weight < 1:
            raise ValueError(f"weight={self.weight} (λp); expected at least 0 and below 1")
        at_least(self, w_lr=0)
        _ = self._alternating

    @cached_property
    def _alternating(self) -> LocalSGD:
        lr = one_rate(self.local, "that of x: w has w_lr")
        return replace(self.local, lr={"x": lr, "w": lr if self.w_lr is None else self.w_lr})

    @task
    def fit(self, client: Client, w: Tensor, rate: Tensor) -> Sent:
        """The local steps; sends the change of w."""
        start: Params = {"x": kept_or(client, self.first), "w": w}
        after, loss = self._alternating.minimise(InTurns(self._moves), start, client, labels=True, rate=rate)
        assert isinstance(after, dict)
        return send(update=after["w"] - w, loss=loss, keep={"theta": after["x"]})

    fit.into(mean)

    @task
    def join(self, client: Client, w: Tensor) -> Sent:
        """The personal model of a newcomer; a client that has one keeps it."""
        trained = self.local.repeat(self.newcomer_rounds)(distillation_loss(self.model, w, self._mix), w, client)
        return send(keep={"theta": client.kept.get("theta", trained)})

    def _moves(self, params: dict[str, Tensor], batch: Batch) -> Moves:
        """One step; the forward pass of w serves both moves."""
        gradient, loss, of_w, pull_w = student_gradient(self.model, params["x"], params["w"], batch, self._mix)
        params, y = (yield {"x": gradient}), batch.y
        assert y is not None
        of_x = scores(self.model(params["x"], batch.x), y)
        yield {"w": pull_w(batch.mean_gradient(self.weight * teacher_gradient(of_w, of_x, y)))[0]}
        return loss

    def _mix(self, of_data: Tensor, of_teacher: Tensor) -> Tensor:
        return (1 - self.weight) * of_data + self.weight * of_teacher

    def start(self, seed: int) -> State:
        return self.first_state("w", self.first).replace(ids=NOBODY)

    def round(self, state: State, federation: Federation) -> State:
        cohort = self.sample(federation, self.cohort)
        replies = cohort.ask(self.fit, w=state.w, rate=self.schedule(federation.round))
        return with_answered(self.server_step(state, "w", replies, federation), cohort, replies)

    def personalize(self, state: State, cohort: Cohort) -> Models:
        return self.own_models(state, cohort, self.join, state.w, w=state.w)
