"""Robust-HDP and other ways to weigh clients that train by DP-SGD with unequal noise (T2 chapter 3, Algorithm 1).

Symbols: Δθ_i the clients' updates, M = [Δθ_1 | … | Δθ_n], σ_i² the variance of the noise in one of them, w_i the
weights. WeiAvg and PFA: Liu et al., VLDB 2022. DPFedAvg: Noble, Bellet and Dieuleveut, AISTATS 2022.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar, Literal

import torch
from torch import Tensor

from unalike.core.checks import at_least, one_of
from unalike.core.release import Each, Release
from unalike.core.roster import Declarations
from unalike.core.vocabulary import Client, Cohort, Federation, Model, Models, Sent, State, send, task
from unalike.learn.local import LocalSGD
from unalike.learn.robust_pca import robust_pca
from unalike.learn.schedules import Schedule
from unalike.learn.server import ServerOptimizer
from unalike.methods import Presets
from unalike.methods.averaging import ONE_PASS, private_inputs

Weights = Literal["robust", "epsilon", "projected", "size", "uniform", "oracle"]


@dataclass(frozen=True)
class RobustHDP:
    """θ ← θ + Σ w_i Δθ_i, over updates that every client makes private by itself (``local.private``).

    - ``weights``: how the server chooses w_i.
      robust: w_i ∝ 1/‖S_i‖², from robust PCA of M = L + S in every round; nothing that a client declares is used.
      epsilon (WeiAvg): w_i ∝ ε_i. Where no client declares an ε, all weigh the same.
      projected (PFA): w_i ∝ ε_i, and the updates of clients with small ε are projected on the span of the first
      ``dimensions`` singular vectors of the others' updates; two-means of ε divides the clients.
      size (DPFedAvg): w_i ∝ N̄_i. uniform: all the same. oracle: w_i ∝ 1/σ_i² from what clients declare (Eq. 3.6).
    - ``rows``: p′. Larger models are decomposed in blocks of p′ rows, whose estimates are averaged (§3.5.5).
      ``blocks``: Q, the number of blocks, from the first on; None: all. The experiments have Q = 1.
    - ``least_epsilon``: the noise of all clients is made for the smallest ε of all; a recipe's ``[privacy] epsilons``
      obeys it.

    Neighbours: one point of a client is added or removed, and N̄ is public. Without ``local.private`` nothing is
    protected.
    """

    model: Model
    cohort: int | float = 1.0
    local: LocalSGD = ONE_PASS
    weights: Weights = "robust"
    rows: int = 200_000
    blocks: int | None = None
    dimensions: int = 1
    least_epsilon: bool = False
    server: ServerOptimizer = field(default_factory=ServerOptimizer)
    schedule: Schedule = field(default_factory=Schedule)
    point_private: ClassVar[Literal[True]] = True
    presets: ClassVar[Presets] = {
        "paper": {  # T2 §3.6 with uniform batch sizes and §3.5.5; c and δ are those of its experiments
            "local": {"epochs": 1, "batch": 128},
            "blocks": 1,
            "privacy": {"clip": 3.0, "delta": 1e-4},
        }
    }
    serves_unlabeled: ClassVar[bool] = True
    asks_unlabeled: ClassVar[bool] = False
    not_client_private: ClassVar[str] = (
        "each update is weighed by its own noise, so the server sees every update by itself"
    )

    def __post_init__(self) -> None:
        one_of(self, "weights")
        at_least(self, rows=1, blocks=1, dimensions=1)

    @task
    def fit(self, client: Client, theta: Tensor, rate: Tensor, **private: Tensor) -> Sent:
        """Δθ_i: K epochs of DP-SGD from θ (Alg. 1, line 5)."""
        return send(update=self.local(self.model, theta, client, rate=rate, **private) - theta)

    @fit.into
    def releases(self) -> list[Release]:
        """The server sees every update, which its client has made private."""
        return [Each("update", cost=None if self.local.private is None else self.local.cost)]

    fit.derive(private_inputs)

    def start(self, seed: int) -> State:
        theta = self.model.init(seed)
        nobody = {"ids": torch.zeros(0, dtype=torch.int64), "weights": torch.zeros(0, dtype=torch.float64)}
        return State(theta=theta, **nobody).with_part("server", self.server.start(theta))

    def round(self, state: State, federation: Federation) -> State:
        """``ids`` and ``weights`` of the state tell how much each client of this round counted."""
        cohort = federation.sample(self.cohort, labeled=True).within_budget(self.fit)
        replies = cohort.ask(self.fit, theta=state.theta, rate=self.schedule(federation.round))
        if "update" not in replies:
            return state  # the budgets of all are spent
        answered, updates = cohort.only(replies.answered), replies["update"]
        w = self.weigh(updates, answered.declarations)
        if self.weights == "projected" and answered.declarations.epsilon is not None:
            updates = projected(updates, answered.declarations.epsilon, self.dimensions)
        direction = (w @ updates.to(torch.float64)).to(updates.dtype)
        theta, moments = self.server.step(state.theta, direction, state.part("server"))
        return state.replace(theta=theta, ids=answered.ids, weights=w).with_part("server", moments)

    def distinctions(self, state: State) -> dict[str, Tensor]:
        return {"ids": state.ids, "weight": state.weights}

    def weigh(self, updates: Tensor, declared: Declarations) -> Tensor:
        """[C] w, which add up to 1, for updates [C, p]."""
        same = torch.ones(len(updates), dtype=torch.float64)
        if self.weights == "robust":
            return _normal(_inverse(noise_of(updates, self.rows, self.blocks)))
        if self.weights == "oracle":
            return _normal(_inverse(declared_noise(self.local, declared)))
        if self.weights in ("epsilon", "projected"):
            return _normal(same if declared.epsilon is None else declared.epsilon)
        return _normal(declared.bound.to(torch.float64) if self.weights == "size" else same)

    def personalize(self, state: State, cohort: Cohort) -> Models:
        return state.theta.expand(len(cohort), -1)


def noise_of(updates: Tensor, rows: int, blocks: int | None = None) -> Tensor:
    """[C] σ̂_i² = ‖S_i‖² of updates [C, p] (Alg. 1, lines 7-10), averaged over the first blocks of ``rows`` parameters.

    There are ⌊p/rows⌋ blocks, the last of which ends at p. A smaller model is one block.
    """
    m = updates.T
    ends = [*range(rows, len(m) - rows + 1, rows), len(m)][:blocks]
    found = [robust_pca(m[max(0, end - rows) : end])[1].square().sum(0) for end in ends]
    return torch.stack(found).mean(0)


def declared_noise(local: LocalSGD, declared: Declarations) -> Tensor:
    """[C] σ_i²/(p·η²) of Eq. 3.5: as many steps as a round has, each with noise of variance (z_i·c/b_i)²."""
    if local.private is None:
        raise ValueError("the oracle knows the noise of DP-SGD, and there is none: give local.private")
    made = zip(local.noise_and_steps(declared), declared.bound.tolist(), strict=True)
    found = [steps.count * (z * local.private.clip / (steps.rate * size)) ** 2 for (z, steps), size in made]
    return torch.tensor(found, dtype=torch.float64)


def projected(updates: Tensor, epsilon: Tensor, dimensions: int) -> Tensor:
    """PFA: updates of clients with small ε, projected on the leading directions of those with large ε."""
    public = large(epsilon)
    _, _, basis = torch.linalg.svd(updates[public].to(torch.float64), full_matrices=False)  # rows: singular vectors
    v = basis[:dimensions].to(updates.dtype)
    return torch.where(public[:, None], updates, updates @ v.T @ v)


def large(epsilon: Tensor) -> Tensor:
    """[C] whose ε is in the upper of two groups: the split of sorted ε with the least variance inside the groups."""
    values, order = torch.sort(epsilon)
    spread = [
        sum(float((part - part.mean()).square().sum()) for part in (values[:cut], values[cut:]))
        for cut in range(1, len(values))
    ]
    found = torch.ones(len(values), dtype=torch.bool)
    if spread and values[0] < values[-1]:
        found[order[: 1 + spread.index(min(spread))]] = False
    return found


def _inverse(variance: Tensor) -> Tensor:
    """1/σ²; no client's noise counts as less than 1e-12 of the largest."""
    most = variance.max()
    return 1 / variance.clamp(min=1e-12 * most) if most > 0 else torch.ones_like(variance)


def _normal(weights: Tensor) -> Tensor:
    return weights / weights.sum()
