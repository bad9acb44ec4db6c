"""kNN-Per: a common model, and beside it the client's own nearest neighbours (Marfoq et al., ICML 2022).

φ is the representation, the common model without its last layer; λ_i is the weight of the neighbours at client i.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from unalike.core.checks import above
from unalike.core.vocabulary import Client, Cohort, Federation, Model, Models, Sent, State, send, task
from unalike.learn.local import LocalSGD
from unalike.learn.schedules import Schedule
from unalike.methods import Presets
from unalike.methods.averaging import ONE_PASS, Averaging, mean_by_size
from unalike.methods.problem import Problem
from unalike.networks.heads import without_head

GRID = 11  # λ = 0, 0.1, …, 1


class Memory(Model):
    """A model with a memory: log(λ·p_neighbours + (1 − λ)·p_model).

    theta holds the model's parameters, then ``rows`` remembered samples (φ, its label, and whether it counts), then λ
    and k. The ``most`` nearest are looked at, of which k count.
    """

    def __init__(self, plain: Model, classes: int, rows: int, most: int, scale: float) -> None:
        self.plain, self.classes, self.rows, self.most, self.scale = plain, classes, rows, most, scale
        self.features, self.width = without_head(plain)
        self.size = plain.size + rows * (self.width + 2) + 2

    @cached_property
    def digest(self) -> str | None:
        return self.plain.digest

    def __call__(self, theta: Tensor, *inputs: Tensor) -> Tensor:
        own, _, weight, k = self.parts(theta)
        known = F.softmax(self.plain(own, *inputs), -1)
        found = self.neighbours(theta, self.seen(own, *inputs), k)
        return (weight * found + (1 - weight) * known).clamp(min=1e-30).log()

    def seen(self, own: Tensor, *inputs: Tensor) -> Tensor:
        """φ [rows, width] of inputs."""
        return self.features(own[: self.features.size], *inputs)

    def parts(self, theta: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """The model's parameters, the memory [rows, width + 2], λ and k."""
        d = self.plain.size
        return theta[:d], theta[d:-2].view(self.rows, self.width + 2), theta[-2], theta[-1]

    def neighbours(self, theta: Tensor, phi: Tensor, k: Tensor, apart: Tensor | None = None) -> Tensor:
        """[B, classes] p_neighbours: the k nearest, each with weight exp(−squared distance / (width · scale)).

        apart [B, rows]: remembered samples that are not to be looked at, as a sample is its own neighbour.
        """
        _, memory, _, _ = self.parts(theta)
        keys, labels, counts = memory[:, :-2], memory[:, -2].to(torch.int64), memory[:, -1] > 0
        squared = (phi.square().sum(1)[:, None] + keys.square().sum(1) - 2 * phi @ keys.T).clamp(min=0)
        far = ~counts if apart is None else ~counts | apart
        squared = torch.where(far, torch.inf, squared)
        nearest, which = squared.topk(self.most, 1, largest=False)
        within = torch.arange(self.most, device=phi.device) < k
        # from the nearest on, so that far neighbours do not all get a weight of 0; none at all: no class is likelier
        exponent = -(nearest - nearest[:, :1].nan_to_num(posinf=0)) / (self.width * self.scale)
        weight = torch.where(within & nearest.isfinite(), exponent.exp(), 0)
        votes = F.one_hot(labels, self.classes).to(weight.dtype)[which] * weight[..., None]
        total = weight.sum(1, keepdim=True)
        return torch.where(total > 0, votes.sum(1) / total.clamp(min=1e-30), 1 / self.classes)

    def tensors(self, theta: Tensor) -> dict[str, Tensor]:
        own, memory, weight, k = self.parts(theta)
        return {**self.plain.tensors(own), "memory": memory, "neighbours.weight": weight, "neighbours.k": k}

    def module(self, theta: Tensor) -> nn.Module:
        return _Remembers(self, theta)

    def __repr__(self) -> str:
        return f"{self.plain!r} with a memory of {self.rows} samples"


class _Remembers(nn.Module):
    """The model with its memory as an ordinary module."""

    def __init__(self, model: Memory, theta: Tensor) -> None:
        super().__init__()
        self._model = model
        self.register_buffer("theta", theta.detach().clone())

    def forward(self, *inputs: Tensor) -> Tensor:
        return self._model(self.get_buffer("theta"), *inputs)


@dataclass(frozen=True)
class KNNPer(Averaging):
    """FedAvg, and then every client with labels mixes the common model with its k nearest own samples in φ.

    - ``rows``: the most samples that a client remembers; if it has more, it draws this many of them.
    - ``neighbours``: candidates for k. λ is one of 0, 0.1, …, 1. Both are chosen by the client, on its validation rows,
      or where it has none on its training rows, each without itself.
    - ``scale``: of the kernel. Scott (2026) found 100 to be the best of 0.1, 1, 10, 100.

    A newcomer needs no training. A client without labels gets the common model.
    """

    problem: Problem
    cohort: int | float = 10
    local: LocalSGD = ONE_PASS
    schedule: Schedule = field(default_factory=Schedule)
    neighbours: tuple[int, ...] = (5, 10)
    scale: float = 1.0
    rows: int = 512
    serves_unlabeled: ClassVar[bool] = True
    presets: ClassVar[Presets] = {  # the authors' code
        "paper": {"local": {"epochs": 1, "batch": 128, "lr": 0.05}, "neighbours": list(range(1, 11))}
    }

    def __post_init__(self) -> None:
        self.check_privacy(self.local)
        if self.problem.classes is None:
            raise ValueError("kNN-Per mixes probabilities of classes, but the targets are numbers; use another method")
        above(self, scale=0)
        if not self.neighbours or min(self.neighbours) < 1 or max(self.neighbours) > self.rows:
            raise ValueError(f"neighbours={self.neighbours}, rows={self.rows}; expected numbers from 1 to rows")
        _ = self.model

    @cached_property
    def model(self) -> Memory:
        assert self.problem.classes is not None
        return Memory(self.problem.model, self.problem.classes, self.rows, max(self.neighbours), self.scale)

    # The clients' side

    @task
    def fit(self, client: Client, theta: Tensor, rate: Tensor) -> Sent:
        """FedAvg's local training."""
        fitted, loss = self.local.train(self.problem.model, theta, client, rate=rate)
        return send(update=fitted - theta, loss=loss)

    fit.into(mean_by_size)

    @task(stays="theta")
    def remember(self, client: Client, theta: Tensor) -> Sent:
        """φ and label of the client's samples, and the λ and k that are best for these samples, each without itself."""
        client = client.with_labels
        order = client.draws.permutation(client.n, client.capacity)[: self.rows]
        phi, y = self.model.seen(theta, client.x[order]), client.labels()[order]
        counts = (torch.arange(len(order), device=phi.device) < client.n) & client.labeled
        memory = torch.cat([phi, y.to(phi.dtype)[:, None], torch.ones_like(phi[:, :1])], 1)
        memory = F.pad(torch.where(counts[:, None], memory, 0), (0, 0, 0, self.rows - len(order)))
        first = torch.tensor([0.0, float(min(self.neighbours))], device=phi.device)
        whole = torch.cat([theta, memory.reshape(-1), first])
        itself = torch.arange(len(order), device=phi.device)[:, None] == torch.arange(self.rows, device=phi.device)
        return send(theta=self._with_best(whole, phi, client.x[order], y, counts, itself))

    @task(stays="theta")
    def choose(self, client: Client, memory: Tensor) -> Sent:
        """λ and k once more, on validation rows, if there are any."""
        own, remembered, *_ = self.model.parts(memory)
        counts = client.known & (remembered[:, -1] > 0).any()
        best = self._with_best(memory, self.model.seen(own, client.x), client.x, client.labels(), counts, None)
        return send(theta=torch.where(counts.any(), best, memory))

    def _with_best(
        self, theta: Tensor, phi: Tensor, x: Tensor, y: Tensor, counts: Tensor, apart: Tensor | None
    ) -> Tensor:
        """theta with the λ and k that get the most of these samples right; of equals, the least λ and the first k."""
        own, *_ = self.model.parts(theta)
        known = F.softmax(self.problem.model(own, x), -1)
        weights = torch.linspace(0, 1, GRID, device=phi.device)
        right, pairs = [], []
        for k in self.neighbours:
            size = torch.tensor(float(k), device=phi.device)
            found = self.model.neighbours(theta, phi, size, apart)
            mixed = weights[:, None, None] * found + (1 - weights[:, None, None]) * known
            right.append(((mixed.argmax(-1) == y) & counts).sum(1))
            pairs.append(torch.stack([weights, size.expand(GRID)], 1))
        scores = torch.cat(right)
        best = (scores * len(scores) - torch.arange(len(scores), device=phi.device)).argmax()
        pair = torch.where(counts.any(), torch.cat(pairs)[best], theta[-2:])
        return torch.cat([theta[:-2], pair])

    # The server's side

    def start(self, seed: int) -> State:
        return self.first_state("theta", self.problem.model.init(seed))

    def round(self, state: State, federation: Federation) -> State:
        cohort = self.sample(federation, self.cohort)
        replies = cohort.ask(self.fit, theta=state.theta, rate=self.schedule(federation.round))
        return self.server_step(state, "theta", replies, federation)

    def personalize(self, state: State, cohort: Cohort) -> Models:
        memory = cohort.ask(self.remember, theta=state.theta).held("theta")
        return cohort.on("validation").ask(self.choose, memory=memory).held("theta")
