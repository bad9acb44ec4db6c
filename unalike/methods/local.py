"""Local training: what every client reaches by itself, the baseline of all personalization."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar, Literal

import torch
from torch import Tensor

from unalike.core.checks import at_least
from unalike.core.vocabulary import Client, Cohort, Federation, Model, Models, Sent, State, send, task
from unalike.learn.local import LocalSGD
from unalike.methods import Presets
from unalike.methods.averaging import ONE_PASS
from unalike.methods.newcomers import NOBODY, kept_or


@dataclass(frozen=True)
class Local:
    """No federation at all: every client trains a model of its own, from ``agreed_seed``, and sends nothing.

    A round is one call of ``local`` at every client with labels. A newcomer, or a client that missed a round, makes up
    for what it lacks when it wants a model. With ``calls`` all clients, newcomers too, make so many calls, however many
    rounds there are.
    """

    model: Model
    local: LocalSGD = ONE_PASS
    agreed_seed: int = 0
    calls: int | None = None
    serves_unlabeled: ClassVar[bool] = False
    presets: ClassVar[Presets] = {  # T1 §4.4, which does not state its rate
        "paper": {"local": {"epochs": 1, "batch": 32, "lr": 0.01, "momentum": 0.9}, "calls": 200}
    }
    asks_unlabeled: ClassVar[bool] = False
    not_client_private: ClassVar[str] = "no client sends anything, so there is nothing that noise could protect"
    trains_newcomers: ClassVar[Literal[True]] = True

    def __post_init__(self) -> None:
        at_least(self, calls=1)
        _ = self.first  # made here, because a vectorised task must not draw initial values

    @cached_property
    def first(self) -> Tensor:
        """Every client's first parameters."""
        return self.model.init(self.agreed_seed)

    @task
    def fit(self, client: Client) -> Sent:
        return send(keep={"theta": self.local(self.model, kept_or(client, self.first), client)})

    @task(stays="theta")
    def personal_model(self, client: Client) -> Sent:
        return send(theta=kept_or(client, self.first))

    def start(self, seed: int) -> State:
        return State(rounds=torch.zeros((), dtype=torch.int64), ids=NOBODY, calls=NOBODY)

    def round(self, state: State, federation: Federation) -> State:
        if self.calls is not None and int(state.rounds) >= self.calls:
            return state
        cohort = federation.sample(1.0, labeled=True)
        answered = cohort.ids[cohort.ask(self.fit, into=[]).answered]
        ids, calls = torch.unique(torch.cat([state.ids.repeat_interleave(state.calls), answered]), return_counts=True)
        return state.replace(rounds=state.rounds + 1, ids=ids, calls=calls)

    def personalize(self, state: State, cohort: Cohort) -> Models:
        same = cohort.ids[:, None] == state.ids
        lacking = int(state.rounds) - (same * state.calls).sum(1)
        if self.calls is not None:  # whoever was never asked is new
            lacking = torch.where(same.any(1), lacking, self.calls)
        for call in range(int(lacking.max())):
            cohort.only((lacking > call).nonzero().flatten()).ask(self.fit, into=[])
        return cohort.ask(self.personal_model).held("theta")
