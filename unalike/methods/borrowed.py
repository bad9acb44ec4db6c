"""PFL-sampled, PFL-nearest and PFL-ensemble: unlabeled newcomers borrow training clients' models (P2 §6.2)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from functools import cached_property
from typing import ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from unalike.core.checks import at_least, one_of
from unalike.core.draws import Draws, key
from unalike.core.vocabulary import Client, Cohort, Federation, Model, Sent, State, Task, send, task
from unalike.methods import Presets
from unalike.methods.generated import GeneratedModels
from unalike.methods.pfedhn import PFedHN, rows_of
from unalike.networks.ensemble import Ensemble
from unalike.networks.hypernet import generate
from unalike.privacy import SystemDraws

_PROJECTION, _SAMPLED = 3, 4  # domains of the seed
_RIDGE, _STEPS = 1e-2, 20  # of a separator's logistic regression
MOST_COMPARED = 200  # training clients among which usual distances are measured


@dataclass(frozen=True)
class Borrowed(GeneratedModels):
    """pFedHN whose newcomers borrow models of training clients; training is pFedHN's.

    ``choice`` is "sampled" (one at random), "nearest" (the least A-distance) or "ensemble" (the mean output of all;
    training clients get it too, since a run has one kind of model). The paper scores PFL-sampled by the mean accuracy
    of all models on each newcomer; here a newcomer draws one, which has that mean in expectation. Only models of
    clients that answered in some round are lent (before the first round all); who never did is served as a newcomer.

    Clients are compared by ``features`` random projections of their inputs, no more than there are inputs. With the
    ``separator`` "gaussian" a client sends their mean and covariance with the first rounds it answers in; the nearest
    in Mahalanobis' distance is the nearest in A, and no classifier is trained. With "trained", as in the paper, it
    sends the projections of up to ``compared_rows`` rows themselves, and the server trains a linear separator for each
    newcomer and each training client.

    The other fields are pFedHN's.
    """

    choice: Literal["sampled", "nearest", "ensemble"] = field(default="nearest", kw_only=True)
    descriptor_lr: float = 1e-2
    weight_decay: float = 0.0
    separator: Literal["gaussian", "trained"] = "gaussian"
    features: int = 32
    compared_rows: int = 100
    presets: ClassVar[Presets] = {
        "paper": {**PFedHN.presets["paper"], "cohort": 0.1, "separator": "trained"}  # P2 App. C, §6.2
    }
    serves_unlabeled: ClassVar[bool] = True
    not_client_private: ClassVar[str] = "newcomers get models of training clients, each as it is"

    def __post_init__(self) -> None:
        one_of(self, "choice", "separator")
        at_least(self, features=1, compared_rows=2)
        if self.choice == "nearest" and self.problem.kind == "tokens":
            raise ValueError("tokens cannot be projected and compared; use choice='sampled' or 'ensemble'")
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

    @task
    def sample_rows(self, client: Client, projection: Tensor) -> Sent:
        """The projections of some of the client's inputs, drawn without replacement."""
        index = client.draws.permutation(client.n, client.capacity)[: self.compared_rows]
        spare = self.compared_rows - len(index)
        points = F.pad(client.x[index].flatten(1) @ projection, (0, 0, 0, spare))
        return send(points=points, rows=client.n.clamp(max=self.compared_rows).to(torch.float32))

    @property
    def _summary(self) -> Task:
        """What a client sends of its inputs."""
        return self.summarise if self.separator == "gaussian" else self.sample_rows

    def start(self, seed: int) -> State:
        clients, none = self.problem.clients, torch.zeros(self.problem.clients, dtype=torch.bool)
        state = self.trainer.start(seed).replace(trained=none)
        if self.choice != "nearest":
            return state
        inputs = math.prod(self.problem.input_shape)
        features = min(self.features, inputs)
        projection = Draws(key(seed, _PROJECTION)).normal(inputs, features) / inputs**0.5
        shapes = {"mean": [features], "covariance": [features, features]}
        if self.separator == "trained":
            shapes = {"points": [self.compared_rows, features]}
        empty = {name: torch.zeros(clients, *shape) for name, shape in shapes.items()}
        state = state.with_part("summary", {**empty, "rows": torch.ones(clients)})
        return state.replace(projection=projection, summarised=none)

    def round(self, state: State, federation: Federation) -> State:
        state, cohort = self.trainer.step(state, federation)
        rows, _ = rows_of(state, cohort)
        state = state.replace(trained=state.trained.index_fill(0, rows, True))
        if self.choice != "nearest" or bool(state.summarised[rows].all()):
            return state
        # all who are here are asked, also those known: one who never sends a summary must not be a quorum by itself
        replies = cohort.ask(self._summary, projection=state.projection)
        rows = rows[replies.answered]
        known = {name: values.index_copy(0, rows, replies[name]) for name, values in state.part("summary").items()}
        return state.with_part("summary", known).replace(summarised=state.summarised.index_fill(0, rows, True))

    def personalize(self, state: State, cohort: Cohort) -> Tensor:
        available = state.trained if bool(state.trained.any()) else torch.ones_like(state.trained)
        if self.choice == "ensemble":
            counts = available[:, None].to(torch.float32)
            members = generate(self.trainer.hypernet, state.hypernet, state.descriptors) * counts
            return torch.cat([members, counts], 1).reshape(-1).expand(len(cohort), -1)
        rows, seen = rows_of(state, cohort)
        new = ~(seen & state.trained[rows])
        if bool(new.any()):
            who, drawn = cohort.only(new.nonzero().flatten()), self.choice == "sampled"
            borrowed = self._draw_rows(available, who) if drawn else self._nearest_rows(state, who)
            rows = rows.masked_scatter(new, borrowed)  # refuses fewer than there are newcomers
        return generate(self.trainer.hypernet, state.hypernet, state.descriptors[rows])

    def _draw_rows(self, available: Tensor, cohort: Cohort) -> Tensor:
        """[C] a training client for each newcomer, drawn for it alone: in a simulation by the seed and its id.

        Newcomers who are served all have one id, so theirs is drawn by the operating system.
        """
        federation, rows = cohort.federation, available.nonzero().flatten()
        if federation.purpose == "serve":
            return rows[SystemDraws().integers(len(rows), len(cohort))]
        keys = key(federation.seed, _SAMPLED, cohort.ids)
        return rows[torch.cat([Draws(one).integers(len(rows), 1) for one in keys])]

    def _nearest_rows(self, state: State, cohort: Cohort) -> Tensor:
        """[C] the training client of least A-distance, among those that have sent a summary (none: the first one)."""
        replies = cohort.ask(self._summary, projection=state.projection)
        distances = self._compare(replies, state.part("summary"))
        return torch.where(state.summarised, distances, torch.inf).argmin(1)

    def _compare(self, first: Mapping[str, Tensor], second: Mapping[str, Tensor]) -> Tensor:
        """[C, n] distances that order clients as the A-distance does."""
        return (mahalanobis if self.separator == "gaussian" else of_separators)(first, second)

    def nearest(self, state: State, sent: Mapping[str, Tensor]) -> tuple[Tensor, Tensor] | None:
        """How far newcomers are from those who trained, by the A-distance (0: alike, 2: told apart without error)."""
        if self.choice != "nearest" or int(state.summarised.sum()) < 2:
            return None
        known = {name: values[state.summarised][:MOST_COMPARED] for name, values in state.part("summary").items()}
        among = self._compare(known, known).masked_fill(torch.eye(len(known["rows"]), dtype=torch.bool), torch.inf)
        found = self._compare(sent, known).amin(1), among.amin(1)
        return found if self.separator == "trained" else (of_gaussians(found[0]), of_gaussians(found[1]))


# The A-distance 2(1 − 2ε) of two clients, ε the error of a linear separator of their inputs (Ben-David et al., 2007).
# Both forms compare what clients sent of their inputs: [C, ...] of some with [n, ...] of others.


def mahalanobis(first: Mapping[str, Tensor], second: Mapping[str, Tensor]) -> Tensor:
    """[C, n] squared distances Δ² of means under the mean of both covariances, less what few rows alone make of it.

    Samples of n and m rows of one distribution have a Δ² of about r · (1/n + 1/m) in r features.
    """
    gap = first["mean"][:, None] - second["mean"]  # [C, n, r]
    pooled = (first["covariance"][:, None] + second["covariance"]) / 2
    pooled = pooled + 1e-12 * torch.eye(gap.shape[-1])  # two clients of one row each have no spread at all
    squared: Tensor = (gap * torch.linalg.solve(pooled, gap[..., None])[..., 0]).sum(-1)
    return squared - gap.shape[-1] * (1 / first["rows"][:, None] + 1 / second["rows"])


def of_gaussians(squared: Tensor) -> Tensor:
    """The A-distance by the best separator of two Gaussians with one covariance: ε = Φ(−Δ/2)."""
    error: Tensor = torch.special.ndtr(-squared.clamp(min=0).sqrt() / 2)
    return 2 - 4 * error


def of_separators(first: Mapping[str, Tensor], second: Mapping[str, Tensor]) -> Tensor:
    """[C, n] proxy A-distances: for each pair a logistic regression learns from the even rows which client a row is of,
    and ε is its error on the odd rows. Both clients count the same, whatever their numbers of ``rows``.

    Each has ``points`` [m, r], of which the first ``rows`` are real.
    """
    return torch.stack(
        [_separate(points, rows, second) for points, rows in zip(first["points"], first["rows"], strict=True)]
    )


def _separate(points: Tensor, rows: Tensor, others: Mapping[str, Tensor]) -> Tensor:
    """[n] the A-distance of one client to each of the others; where one has a single row, ε is that of training."""
    both = torch.cat([points.expand(len(others["points"]), -1, -1), others["points"]], 1).to(torch.float64)
    place = torch.arange(points.shape[0])
    real = torch.cat([(place < rows).expand(len(both), -1), place < others["rows"][:, None]], 1)
    side = torch.cat([torch.ones(len(place)), -torch.ones(len(place))]).to(torch.float64)
    few = torch.minimum(rows, others["rows"]) < 2
    even = torch.cat([place % 2 == 0] * 2)
    learns, judges = real & (even | few[:, None]), real & (~even | few[:, None])
    weight = _weight(learns, side)
    center = (weight[..., None] * both).sum(1, keepdim=True)
    spread = (weight[..., None] * (both - center).square()).sum(1, keepdim=True).sqrt().clamp(min=1e-12)
    inputs = torch.cat([(both - center) / spread, torch.ones_like(both[..., :1])], 2)
    margin = side * (inputs @ _logistic(inputs, side, weight)[..., None])[..., 0]
    error = (_weight(judges, side) * (margin < 0)).sum(1)
    return (2 - 4 * error).clamp(min=0).to(points.dtype)


def _weight(rows: Tensor, side: Tensor) -> Tensor:
    """[n, 2m] weights of these rows, ½ in all for each side."""
    kept = rows.to(torch.float64)
    one, other = (kept * (side == which) for which in (1, -1))
    return 0.5 * (one / one.sum(1, keepdim=True).clamp(min=1) + other / other.sum(1, keepdim=True).clamp(min=1))


def _logistic(inputs: Tensor, side: Tensor, weight: Tensor) -> Tensor:
    """[n, r + 1] the minimum of Σ weight · ln(1 + exp(−side · xᵀw)) + ridge/2 · ‖w‖², by Newton's method."""
    w = torch.zeros(inputs.shape[0], inputs.shape[2], dtype=torch.float64)
    for _ in range(_STEPS):
        wrong = torch.sigmoid(-side * (inputs @ w[..., None])[..., 0])
        slope = _RIDGE * w - ((weight * side * wrong)[:, None] @ inputs)[:, 0]
        bend = (weight * wrong * (1 - wrong))[..., None] * inputs
        hessian = inputs.mT @ bend + _RIDGE * torch.eye(inputs.shape[2], dtype=torch.float64)
        w = w - torch.linalg.solve(hessian, slope[..., None])[..., 0]
    return w
