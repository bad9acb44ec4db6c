"""PFL-sampled, PFL-nearest and PFL-ensemble: newcomers who borrow training clients' models (P2 §6.2).

The baselines of ODPFL-HN: pFedHN trains a model for each training client, and an unlabeled newcomer gets one of them at
random, that of the client whose data looks most alike, or all of them with their outputs averaged. Only models of
clients that answered in some round are lent; a training client that never did is served as a newcomer.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import cached_property
from typing import ClassVar, Literal

import torch
from torch import Tensor

from unalike.core.checks import one_of
from unalike.core.client import Client
from unalike.core.draws import Draws, key
from unalike.core.federation import Cohort, Federation
from unalike.core.method import State
from unalike.core.model import Model
from unalike.core.task import Sent, send, task
from unalike.learn.local import LocalSGD
from unalike.learn.server import ServerOptimizer
from unalike.methods.pfedhn import PFedHN, rows_of
from unalike.methods.problem import Problem
from unalike.networks.ensemble import Ensemble
from unalike.networks.hypernet import Initial, Size, generate
from unalike.privacy import SystemDraws

_PROJECTION, _SAMPLED = 3, 4  # domains of the seed
MOST_COMPARED = 200  # training clients among which usual distances are measured


@dataclass(frozen=True)
class Borrowed:
    """pFedHN whose newcomers borrow models of training clients; training is pFedHN's.

    ``choice`` is "sampled" (one at random), "nearest" (the least A-distance) or "ensemble" (the mean output of all;
    training clients get it too, since a run has one kind of model). The paper scores PFL-sampled by the mean accuracy
    of all models on each newcomer; here a newcomer draws one, which has that mean in expectation.

    The A-distance of two clients is 2(1 − 2ε), ε the error of the best linear separator of their samples (Ben-David et
    al. 2007). Here ε is that of the Gaussian approximation, Φ(−Δ/2) with Mahalanobis' distance Δ under the mean of both
    covariances, on ``features`` random projections of the inputs (no more than there are inputs): so a client sends its
    mean and covariance with the first rounds it answers in, and no classifier is trained between clients. The nearest
    in Δ is the nearest in A. Samples of n and m rows of one distribution have a Δ² of about features · (1/n + 1/m);
    that is subtracted, so that few rows do not count as distance.

    The fields of training are pFedHN's. ``--preset paper`` has those of pFedHN's authors, and a tenth of the clients a
    round (its App. C).

    Before the first round nothing is trained, and newcomers borrow from the random models of all.
    """

    problem: Problem
    choice: Literal["sampled", "nearest", "ensemble"] = "nearest"
    cohort: int | float = 5
    local: LocalSGD = LocalSGD(steps=50, batch=32, lr=2e-3, momentum=0.9, weight_decay=5e-5)
    server: ServerOptimizer = ServerOptimizer("adam", lr=2e-4, warmup=10)
    descriptor: int | None = None
    descriptor_lr: float = 1e-2
    size: Size = "M"
    layers: int | None = None
    initial: Initial = "near"
    lambda_h: float = 1e-3
    weight_decay: float = 0.0
    features: int = 32
    serves_unlabeled: ClassVar[bool] = True
    asks_unlabeled: ClassVar[bool] = False
    not_client_private: ClassVar[str] = "newcomers get models of training clients, each as it is"

    def __post_init__(self) -> None:
        one_of(self, "choice")
        if self.choice == "nearest" and self.problem.kind == "tokens":
            raise ValueError("tokens have no means and covariances to compare; use choice='sampled' or 'ensemble'")
        _ = self.trainer

    @cached_property
    def trainer(self) -> PFedHN:
        shared = {one.name for one in fields(self)} & {one.name for one in fields(PFedHN)}
        return PFedHN(**{name: getattr(self, name) for name in shared})

    @cached_property
    def model(self) -> Model:
        plain = self.problem.model
        return Ensemble(plain, self.problem.clients) if self.choice == "ensemble" else plain

    @task
    def summarise(self, client: Client, projection: Tensor) -> Sent:
        """Mean and covariance of the client's projected inputs.

        A client may have fewer rows than there are projections, and then directions without any spread. So the
        covariance S is shrunk towards tr(S)/r · I, by the share of Chen et al. (2010, OAS) in scikit-learn's form.
        """
        z = client.x.flatten(1) @ projection
        mean = client.mean(z)
        centred = z - mean
        s = client.sum(centred[:, :, None] * centred[:, None, :]) / client.n
        power, trace, r = s.square().sum(), s.diagonal().sum(), len(mean)
        spare = ((client.n + 1) * (power - trace**2 / r)).clamp(min=1e-30)  # 0 if S is a multiple of I
        share = ((power + trace**2) / spare).clamp(max=1)
        covariance = (1 - share) * s + share * trace / r * torch.eye(r)
        return send(mean=mean, covariance=covariance, rows=client.n.to(torch.float32))

    def start(self, seed: int) -> State:
        state = self.trainer.start(seed)
        state = state.replace(trained=torch.zeros(self.problem.clients, dtype=torch.bool))
        if self.choice == "nearest":
            inputs, clients = torch.Size(self.problem.input_shape).numel(), self.problem.clients
            features = min(self.features, inputs)
            projection = Draws(key(seed, _PROJECTION)).normal(inputs, features) / inputs**0.5
            state = state.replace(
                projection=projection,
                means=torch.zeros(clients, features),
                covariances=torch.zeros(clients, features, features),
                rows=torch.ones(clients),
                summarised=torch.zeros(clients, dtype=torch.bool),
            )
        return state

    def round(self, state: State, federation: Federation) -> State:
        state, cohort = self.trainer.step(state, federation)
        rows, _ = rows_of(state, cohort)
        state = state.replace(trained=state.trained.index_fill(0, rows, True))
        if self.choice != "nearest" or bool(state.summarised[rows].all()):
            return state
        # all who are here are asked, also those known: one who never sends a summary must not be a quorum by itself
        replies = cohort.ask(self.summarise, projection=state.projection)
        rows = rows[replies.answered]
        return state.replace(
            means=state.means.index_copy(0, rows, replies["mean"]),
            covariances=state.covariances.index_copy(0, rows, replies["covariance"]),
            rows=state.rows.index_copy(0, rows, replies["rows"]),
            summarised=state.summarised.index_fill(0, rows, True),
        )

    def personalize(self, state: State, cohort: Cohort) -> Tensor:
        lent = state.trained if bool(state.trained.any()) else torch.ones_like(state.trained)
        if self.choice == "ensemble":
            counts = lent[:, None].to(torch.float32)
            members = generate(self.trainer.hypernet, state.hypernet, state.descriptors) * counts
            return torch.cat([members, counts], 1).reshape(-1).expand(len(cohort), -1)
        rows, seen = rows_of(state, cohort)
        new = ~(seen & state.trained[rows])
        if bool(new.any()):
            newcomers = cohort.only(new.nonzero().flatten())
            borrowed = self._sampled(lent, newcomers) if self.choice == "sampled" else self._nearest(state, newcomers)
            rows = rows.masked_scatter(new, borrowed)  # refuses fewer than there are newcomers
        return generate(self.trainer.hypernet, state.hypernet, state.descriptors[rows])

    def _sampled(self, lent: Tensor, cohort: Cohort) -> Tensor:
        """[C] a training client for each newcomer, drawn for it alone: who else is asked makes no difference.

        In a simulation the draw is the seed's and the id's. Newcomers who are served all have one id, so theirs is the
        operating system's: another one each time, and nothing of the newcomer is needed for it.
        """
        federation, rows = cohort.federation, lent.nonzero().flatten()
        if federation.purpose == "serve":
            return rows[SystemDraws().integers(len(rows), len(cohort))]
        keys = key(federation.seed, _SAMPLED, cohort.ids)
        return rows[torch.cat([Draws(one).integers(len(rows), 1) for one in keys])]

    def _nearest(self, state: State, cohort: Cohort) -> Tensor:
        """[C] the training client of least A-distance, among those that have sent a summary (none: the first one)."""
        replies = cohort.ask(self.summarise, projection=state.projection)
        sent = {name: replies[name] for name in ("mean", "covariance", "rows")}
        return torch.where(state.summarised, _squared(sent, _summaries(state)), torch.inf).argmin(1)

    def nearest(self, state: State, sent: Mapping[str, Tensor]) -> tuple[Tensor, Tensor] | None:
        """How far newcomers are from those who trained, by the A-distance (0: alike, 2: told apart without error)."""
        if self.choice != "nearest" or int(state.summarised.sum()) < 2:
            return None
        known = {name: values[state.summarised][:MOST_COMPARED] for name, values in _summaries(state).items()}
        among = _squared(known, known).masked_fill(torch.eye(len(known["rows"]), dtype=torch.bool), torch.inf)
        return _a_distance(_squared(sent, known).amin(1)), _a_distance(among.amin(1))


def _summaries(state: State) -> dict[str, Tensor]:
    """What training clients have sent about their inputs."""
    return {"mean": state.means, "covariance": state.covariances, "rows": state.rows}


def _squared(first: Mapping[str, Tensor], second: Mapping[str, Tensor]) -> Tensor:
    """[C, n] Mahalanobis' Δ² between clients, less what few rows alone make of it."""
    gap = first["mean"][:, None] - second["mean"]  # [C, n, r]
    pooled = (first["covariance"][:, None] + second["covariance"]) / 2
    pooled = pooled + 1e-12 * torch.eye(gap.shape[-1])  # two clients of one row each have no spread at all
    squared: Tensor = (gap * torch.linalg.solve(pooled, gap[..., None])[..., 0]).sum(-1)
    return squared - gap.shape[-1] * (1 / first["rows"][:, None] + 1 / second["rows"])


def _a_distance(squared: Tensor) -> Tensor:
    """2(1 − 2ε) with ε = Φ(−Δ/2)."""
    error: Tensor = torch.special.ndtr(-squared.clamp(min=0).sqrt() / 2)
    return 2 - 4 * error
