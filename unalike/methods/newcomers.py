"""Clients that keep a model of their own: who has one, and how a newcomer gets one."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from functools import cached_property
from typing import ClassVar

import torch
from torch import Tensor

from unalike.core.checks import at_least
from unalike.core.torch_internals import to_device_of
from unalike.core.vocabulary import Client, Cohort, Model, Models, Replies, Sent, State, Task, send, task
from unalike.learn.local import LocalSGD
from unalike.privacy.sampling import Poisson

NOBODY = torch.zeros(0, dtype=torch.int64)  # the first ``ids``


def kept_or(client: Client, first: Tensor, name: str = "theta") -> Tensor:
    """What the client keeps under a name, at first what all begin with."""
    return client.kept.get(name, to_device_of(first, client.n))


def one_rate(local: LocalSGD, others: str = "as there is one model to train") -> float:
    """The rate of local training; several, for parts by name, are refused."""
    if not isinstance(local.lr, float | int):
        raise ValueError(f"local.lr={local.lr}; expected one rate, {others}")
    return local.lr


@dataclass(frozen=True)
class PersonalModels:
    """Every client keeps a model θ of its own; a newcomer trains one, starting from what all have in common.

    - ``newcomer_rounds``: a newcomer, or a client that was never sampled, trains as many local steps as a client does
      in that many rounds. A client without labels gets the common model.
    - ``agreed_seed``: everybody knows it and draws the first models from it, so these are never sent.
    """

    model: Model
    _: KW_ONLY
    newcomer_rounds: int = 1
    agreed_seed: int = 0
    serves_unlabeled: ClassVar[bool] = True

    def __post_init__(self) -> None:
        at_least(self, newcomer_rounds=0)
        _ = self.first  # made here, because a vectorised task must not draw initial values

    @cached_property
    def first(self) -> Tensor:
        """All models before the first round."""
        return self.model.init(self.agreed_seed)

    @task(stays="theta")
    def recall(self, client: Client, common: Tensor) -> Sent:
        """The client's own model, or the common one where there is none."""
        return send(theta=client.kept.get("theta", client.kept.get("joined", common)))

    def own_models(self, state: State, cohort: Cohort, join: Task, common: Tensor, **given: Tensor) -> Models:
        """The models of a cohort. Its newcomers train theirs first, by the task ``join``, from what is ``given``."""
        new = newcomers(state, cohort)
        if len(new) and self.newcomer_rounds:
            new.ask(join, **given, into=[])
        return cohort.ask(self.recall, common=common).held("theta")


def with_answered(state: State, cohort: Cohort, replies: Replies) -> State:
    """The state with those who answered among its ``ids``; a Poisson sample is secret, so it adds nobody."""
    if isinstance(cohort.sampling, Poisson):
        return state
    return state.replace(ids=torch.unique(torch.cat([state.ids, cohort.ids[replies.answered]])))


def newcomers(state: State, cohort: Cohort) -> Cohort:
    """Those of the cohort that have labels to train with and are not among the state's ``ids``."""
    federation = cohort.federation
    labeled = federation.roster.labeled[cohort.positions] & federation.labels
    return cohort.only((labeled & ~torch.isin(cohort.ids, state.ids)).nonzero().flatten())
