"""PFL-sampled, PFL-nearest and PFL-ensemble: newcomers who borrow training clients' models (P2 §6.2).

The baselines of ODPFL-HN: pFedHN trains a model for each training client, and an unlabeled newcomer gets one of them at
random, that of the client whose data looks most alike, or all of them with their outputs averaged.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn
from torch.func import vmap

from motley.client import Client
from motley.draws import Draws, key
from motley.federation import Cohort, Federation
from motley.learn.local import LocalSGD
from motley.learn.server import ServerOptimizer
from motley.method import State
from motley.methods.pfedhn import PFedHN, rows_of
from motley.methods.problem import Problem
from motley.model import Model
from motley.networks.hypernet import generate
from motley.task import Sent, send, task

_PROJECTION, _SAMPLED = 3, 4  # domains of the seed


class Ensemble(Model):
    """Several models as one: theta holds their parameters end to end, and the output is the mean of theirs."""

    def __init__(self, member: Model, count: int) -> None:
        if count < 1:
            raise ValueError(f"an ensemble needs at least one member, got {count}")
        self.member, self.count, self.size = member, count, member.size * count

    def __call__(self, theta: Tensor, *inputs: Tensor) -> Tensor:
        outputs: Tensor = vmap(lambda own: self.member(own, *inputs))(theta.view(self.count, self.member.size))
        return outputs.mean(0)

    def tensors(self, theta: Tensor) -> dict[str, Tensor]:
        """Every member's named tensors, as ``0.NAME``, ``1.NAME``, …"""
        members = enumerate(theta.view(self.count, self.member.size))
        return {f"{i}.{name}": value for i, own in members for name, value in self.member.tensors(own).items()}

    def module(self, theta: Tensor) -> nn.Module:
        """An ordinary module with these parameters."""
        return _Mean(self.member.module(own) for own in theta.view(self.count, self.member.size))

    def __repr__(self) -> str:
        return f"Ensemble of {self.count} × {self.member!r}"


class _Mean(nn.ModuleList):
    """The mean output of modules."""

    def forward(self, *inputs: Tensor) -> Tensor:
        return torch.stack([member(*inputs) for member in self]).mean(0)


@dataclass(frozen=True)
class Borrowed:
    """pFedHN whose newcomers borrow models of training clients; training is pFedHN's.

    choice: "sampled": one at random; "nearest": the least A-distance; "ensemble": the mean output of all (training
    clients get it too, since a run has one kind of model).

    The A-distance of two clients is 2(1 − 2ε), ε the error of the best linear separator of their samples (Ben-David et
    al. 2007). Here ε is that of the Gaussian approximation, Φ(−Δ/2) with Mahalanobis' distance Δ under the mean of both
    covariances, on ``features`` random projections of the inputs: so every client sends its mean and covariance once,
    in the first round, and no classifier is trained between clients. The nearest in Δ is the nearest in A.
    """

    problem: Problem
    choice: Literal["sampled", "nearest", "ensemble"] = "nearest"
    cohort: int | float = 5
    local: LocalSGD = LocalSGD(steps=50, batch=32, lr=2e-3, momentum=0.9, weight_decay=5e-5)
    server: ServerOptimizer = ServerOptimizer("adam", lr=2e-4)
    descriptor: int | None = None
    descriptor_lr: float = 1e-2
    features: int = 32
    serves_unlabeled: ClassVar[bool] = True

    @classmethod
    def for_problem(cls, problem: Problem, **hyperparameters: Any) -> Borrowed:
        return cls(problem, **hyperparameters)

    def __post_init__(self) -> None:
        if self.choice not in ("sampled", "nearest", "ensemble"):
            raise ValueError(f"choice={self.choice!r}; expected sampled, nearest or ensemble")
        if self.choice == "nearest" and self.problem.kind == "tokens":
            raise ValueError("tokens have no means and covariances to compare; use choice='sampled' or 'ensemble'")
        _ = self.trainer

    @cached_property
    def trainer(self) -> PFedHN:
        return PFedHN(
            self.problem,
            cohort=self.cohort,
            local=self.local,
            server=self.server,
            descriptor=self.descriptor,
            descriptor_lr=self.descriptor_lr,
        )

    @cached_property
    def model(self) -> Model:
        plain = self.problem.model
        return Ensemble(plain, self.problem.clients) if self.choice == "ensemble" else plain

    @task
    def summarise(self, client: Client, projection: Tensor) -> Sent:
        """Mean and covariance of the client's projected inputs."""
        z = client.x.flatten(1) @ projection
        mean = client.mean(z)
        centred = z - mean
        return send(mean=mean, covariance=client.sum(centred[:, :, None] * centred[:, None, :]) / client.n)

    def start(self, seed: int) -> State:
        state = self.trainer.start(seed)
        if self.choice == "nearest":
            inputs, features, clients = self._inputs, self.features, self.problem.clients
            projection = Draws(key(seed, _PROJECTION)).normal(inputs, features) / inputs**0.5
            state = state.replace(
                projection=projection,
                means=torch.zeros(clients, features),
                covariances=torch.zeros(clients, features, features),
                summarised=torch.zeros(clients, dtype=torch.bool),
            )
        return state

    def round(self, state: State, federation: Federation) -> State:
        state = self.trainer.round(state, federation)
        if self.choice != "nearest":
            return state
        unknown = (~state.summarised).nonzero().flatten()
        if len(unknown) == 0:
            return state
        replies = federation.cohort(unknown).ask(self.summarise, projection=state.projection)
        rows = unknown[replies.answered]
        return state.replace(
            means=state.means.index_copy(0, rows, replies["mean"]),
            covariances=state.covariances.index_copy(0, rows, replies["covariance"]),
            summarised=state.summarised.index_fill(0, rows, True),
        )

    def personalize(self, state: State, cohort: Cohort) -> Tensor:
        if self.choice == "ensemble":
            members = generate(self.trainer.hypernet, state.hypernet, state.descriptors)
            return members.reshape(-1).expand(len(cohort), -1)
        rows, known = rows_of(state, cohort)
        if not bool(known.all()):
            borrowed = self._sampled(state, cohort) if self.choice == "sampled" else self._nearest(state, cohort)
            rows = torch.where(known, rows, borrowed)
        return generate(self.trainer.hypernet, state.hypernet, state.descriptors[rows])

    @property
    def _inputs(self) -> int:
        return int(torch.Size(self.problem.input_shape).numel())

    def _sampled(self, state: State, cohort: Cohort) -> Tensor:
        """[C] a training client for each newcomer, drawn for it alone: who else is asked makes no difference."""
        seed, ids = cohort.federation.seed, cohort.federation.clients.ids[cohort.positions]
        return torch.cat([Draws(key(seed, _SAMPLED, number)).integers(len(state.ids), 1) for number in ids])

    def _nearest(self, state: State, cohort: Cohort) -> Tensor:
        """[C] the training client of least A-distance, among those that have sent a summary."""
        if not bool(state.summarised.any()):
            raise ValueError("no training client has sent a summary yet; train for at least one round")
        replies = cohort.ask(self.summarise, projection=state.projection)
        gap = replies["mean"][:, None] - state.means  # [C, n, r]
        pooled = (replies["covariance"][:, None] + state.covariances) / 2
        pooled = pooled + 1e-4 * torch.eye(self.features)  # few samples leave directions without any spread
        squared = (gap * torch.linalg.solve(pooled, gap[..., None])[..., 0]).sum(-1)
        return torch.where(state.summarised, squared, torch.inf).argmin(1)
