"""MR-MTL, mean-regularised multi-task learning (Liu, Hu, Wu and Smith, NeurIPS 2022, Algorithm 1).

Symbols: w_k the client's model, w̄ the mean of all, λ how strongly they are held together.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import ClassVar, Literal

from torch import Tensor

from unalike.core.release import Mean, Release
from unalike.core.vocabulary import Client, Cohort, Federation, Model, Models, Sent, State, send, task
from unalike.learn.local import LocalSGD
from unalike.learn.objective import Supervised
from unalike.learn.schedules import Schedule
from unalike.methods.averaging import ONE_PASS, private_inputs


@dataclass(frozen=True)
class MRMTL:
    """Every client minimises f_k(w) + λ/2·‖w − w̄‖² from the w_k that it kept, and sends w_k − w̄. The server adds the
    mean of these to w̄. With ``local.private`` the steps are those of DP-SGD; λ·(w − w̄) holds no data beyond w and is
    added to the private gradient.

    A client that was never asked, such as a newcomer, has w̄. This is multi-task learning under a known covariance
    (Ozkara et al., 2022, §3.6) by which all pairs of clients are equally close; for any other the server would have to
    see every model.
    """

    model: Model
    cohort: int | float = 1.0
    local: LocalSGD = ONE_PASS
    strength: float = 0.1  # λ
    schedule: Schedule = field(default_factory=Schedule)
    point_private: ClassVar[Literal[True]] = True
    serves_unlabeled: ClassVar[bool] = True
    asks_unlabeled: ClassVar[bool] = False
    not_client_private: ClassVar[str] = "its mean of w − w̄ has no clip; DP-SGD protects points (unit = point)"

    def __post_init__(self) -> None:
        if not self.strength >= 0 or self.local.weight_decay:
            raise ValueError(
                f"strength={self.strength}, local.weight_decay={self.local.weight_decay}; expected 0 or more, and no "
                "weight decay beside it"
            )
        _ = self.regularised

    @cached_property
    def regularised(self) -> LocalSGD:
        """Training of v = w − w̄: its weight decay is the term λ/2·‖v‖²."""
        return replace(self.local, weight_decay=self.strength)

    @task
    def fit(self, client: Client, mean: Tensor, rate: Tensor, **private: Tensor) -> Sent:
        before = client.kept.get("w", mean) - mean
        shifted = Supervised(self.model, origin=mean)
        v = self.regularised(shifted, before, client, rate=rate, **private)
        return send(update=v, keep={"w": mean + v})

    @fit.into
    def releases(self) -> list[Release]:
        return [Mean("update", cost=None if self.local.private is None else self.local.cost)]

    fit.derive(private_inputs)

    @task(stays="theta")
    def personal_model(self, client: Client, mean: Tensor) -> Sent:
        return send(theta=client.kept.get("w", mean))

    def start(self, seed: int) -> State:
        return State(mean=self.model.init(seed))

    def round(self, state: State, federation: Federation) -> State:
        cohort = federation.sample(self.cohort, labeled=True).within_budget(self.fit)
        replies = cohort.ask(self.fit, mean=state.mean, rate=self.schedule(federation.round))
        return state.replace(mean=state.mean + replies["update"]) if "update" in replies else state

    def personalize(self, state: State, cohort: Cohort) -> Models:
        return cohort.ask(self.personal_model, mean=state.mean).held("theta")
