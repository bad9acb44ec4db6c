"""The server's side of FedDP-Init and FedDP-Lloyds (Algorithms 11, 12 and 14 of T1), one query after another."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from threadpoolctl import threadpool_limits  # type: ignore[import-untyped]
from torch import Tensor

from unalike.analytics.kmeans.budget import StepNoise
from unalike.analytics.kmeans.client import triangle_layout
from unalike.analytics.kmeans.diameter import Diameter, Reduction
from unalike.analytics.kmeans.ground import ground, reaches
from unalike.core.vocabulary import Cohort, Federation, Task
from unalike.privacy.mechanisms import AdditiveNoise, Laplace

if TYPE_CHECKING:
    from unalike.analytics.kmeans.algorithm import FedDPKMeans

_SMALL = 2000  # points or dimensions below which one thread is best
_SLACK = 1.1  # how far the bound on a client's cluster means or sums lies above their typical norm


def noise_std(noise: AdditiveNoise | None, unit: float) -> float:
    """Of a count that one point (or one client, in its unit) changes by at most ``unit``."""
    return 0.0 if noise is None else noise.std(unit)


def heavy_points(weights: Tensor, least: int) -> Tensor:
    """Which server points have a noisy weight of one client point or more; ``least`` of them at least."""
    kept = (weights >= 1.0).nonzero().flatten()
    return kept if len(kept) >= least else torch.topk(weights, min(least, len(weights))).indices


@dataclass
class ServerRun:
    """One fit as the server sees it: the settings, whom it asks, and its own points relative to the origin."""

    method: FedDPKMeans
    federation: Federation
    origin: Tensor
    radius: float
    points: Tensor  # Q [points, d], from the origin
    used: int = 0
    curve: list[float] = field(default_factory=list)
    reduction: Reduction | None = None
    sizes: Tensor | None = None
    errors: Tensor | None = None

    def __post_init__(self) -> None:
        self.spread = self.radius**2  # mean of ‖p‖², as far as is known: for the bounds of client-level privacy
        self.most = float(self.federation.roster.bound.max())  # points of a client

    def cohort(self) -> Cohort:
        """Whom a query is put to: everyone, or a sample of its own."""
        if self.method.sample is None:
            return self.federation.everyone()
        return self.federation.sample(self.method.sample, poisson=self.method.plan != StepNoise())

    def reduce_diameter(self, diameter: Diameter) -> None:
        """Lemma 28: one more histogram, over the server points where they are, and what follows from it."""
        weights = self._weigh(None, self.points)
        noise = self.method.plan.weights
        epsilon = noise.epsilon if isinstance(noise, Laplace) else math.inf
        raw = self.points + self.origin
        self.reduction = diameter.reduce(raw, weights, self._total, epsilon, least=self.method.k or self.method.k_max)
        moved = self.reduction.anchors + self.reduction.moves
        self.origin = moved.mean(0) if self.method.center else torch.zeros_like(self.origin)
        self.points = moved - self.origin
        if self.method.radius is None:
            self.radius = float(torch.linalg.vector_norm(self.points, dim=1).max())
        self.spread = self.radius**2

    def to_data(self, centers: Tensor) -> Tensor:
        """Centres as the data has them: from zero, and back where Lemma 28 moved them from."""
        there = centers + self.origin
        return there if self.reduction is None else self.reduction.move_back(there)

    def initialize(self) -> Tensor:
        """FedDP-Init (Algorithm 11)."""
        method = self.method
        dimension = method.k if method.k is not None else method.k_max
        basis, values = self._top_eigenvectors(min(dimension, self.origin.shape[0]))
        if method.ground is None:
            chosen = self._simplify(basis, dimension) if method.simplify else torch.arange(len(self.points))
            projected, length = self.points[chosen] @ basis, self.points[chosen].square().sum(1)
        else:
            reach = reaches(values / self._total, self.radius)
            projected = ground(method.ground, reach, method.places, self.federation.seed)
            length = projected.square().sum(1)
        weights = self._weigh(basis, projected)
        kept = heavy_points(weights, dimension)
        projected, weights = projected[kept], weights[kept].clamp(min=1e-3)
        self.used = len(kept)
        self.spread = float(weights @ length[kept] / weights.sum())
        seed = self.federation.seed
        k = method.k
        if k is None:
            most = min(method.k_max, len(torch.unique(projected, dim=0)))
            self.curve = [weighted_kmeans(projected, weights, k, method.starts, seed)[1] for k in range(1, most + 1)]
            k = elbow(self.curve)
        centers, _ = weighted_kmeans(projected, weights, k, method.starts, seed)  # ξ
        return self.refine(centers, centers @ basis.T, basis)

    def refine(self, centers: Tensor, previous: Tensor, basis: Tensor | None = None) -> Tensor:
        """Step 3, or (without a basis) a step of FedDP-Lloyds: ν_j = m_j / n_j.

        A cluster whose noisy count is not clear of its own noise keeps its ``previous`` centre: dividing noise by
        a number near zero would throw the centre anywhere. Means of clipped points lie within Δ, so new centres do too.
        """
        method, clips, n = self.method, self.method.clips, self._client_points
        if basis is not None:
            present = float(min(len(centers), n))
            typical = clips.means or typical_means(previous, n, self.spread, present), clips.presence or present
        else:
            typical = clips.sums or typical_sums(previous, n, self.spread), clips.counts or n
        scale = self._unit(typical[0], self.most * self.radius)
        count_scale = self._unit(typical[1], self.most)
        given: dict[str, Any] = {**self._geometry(), "scale": scale} | ({} if basis is None else {"basis": basis})
        given |= {"centers": centers, "count_scale": count_scale}
        cohort, plan = self.cohort(), method.plan
        own = basis is None and plan.lloyd_sums is not None
        question = method.lloyd_sums if own else method.cluster_sums
        noises = (plan.lloyd_sums, plan.lloyd_counts) if own else (plan.sums, plan.counts)
        asks = [[one] for one in question.releases()] if method.secure else [None]  # one secure sum an ask
        found = {name: value for into in asks for name, value in cohort.ask(question, into=into, **given).items()}
        sums, counts = (found["sums"] * scale).float(), (found["counts"] * count_scale).float()
        sure = counts > noise_std(noises[1], self._change(count_scale))
        self.sizes = None if basis is not None and method.by_client else counts
        error = noise_std(noises[0], scale if method.by_client else self.radius) / counts.clamp(min=1.0)
        self.errors = torch.where(sure, error, torch.inf)
        return torch.where(sure[:, None], self.clip_to_radius(sums / counts.clamp(min=1.0)[:, None]), previous)

    def clip_to_radius(self, centers: Tensor) -> Tensor:
        length = torch.linalg.vector_norm(centers, dim=1, keepdim=True)
        inside: Tensor = centers * (self.radius / length.clamp(min=self.radius))
        return inside

    def _top_eigenvectors(self, count: int) -> tuple[Tensor, Tensor]:
        """Step 1: Π as a basis [d, count], and the eigenvalues."""
        dimension = self.origin.shape[0]
        typical = self.method.clips.gram or typical_gram(self.points, self._client_points, self.radius)
        triangle = self._ask(self.method.outer_product, "gram", typical, self.most * self.radius**2)
        rows, columns, factor = triangle_layout(dimension)
        gram = torch.zeros(dimension, dimension, dtype=torch.float64)
        gram[rows, columns] = gram[columns, rows] = triangle.to(torch.float64) / factor
        with one_thread(dimension):
            values, vectors = torch.linalg.eigh(gram)  # by rising eigenvalue
        return vectors[:, -count:].flip(1).to(torch.float32), values[-count:].flip(0).to(torch.float32)

    def _weigh(self, basis: Tensor | None, points: Tensor) -> Tensor:
        """Step 2: how many client points each of these points, in the subspace if there is one, stands for."""
        typical = self.method.clips.weights or self._client_points
        more: dict[str, Any] = {"points": points} if basis is None else {"points": points, "basis": basis}
        return self._ask(self.method.nearest_counts, "weights", typical, self.most, **more)

    def _simplify(self, basis: Tensor, least: int) -> Tensor:
        """Algorithm 14: which server points to go on with; each round freezes those with weight enough and keeps a
        random half of the others.

        Enough is 2b·log(T·|Q|) for noise of scale b: all T·|Q| noises stay below half of it with probability near one.
        As printed it is 2·log(m)/ε, with b = T/ε and m client points, which forgets that the noise grows with T.
        """
        rounds = self.method.simplify
        unit = self._change(self._unit(self.method.clips.weights or self._client_points, self.most))
        scale = noise_std(self.method.plan.weights, unit) / math.sqrt(2.0)
        threshold = 2.0 * scale * math.log(rounds * len(self.points))
        if self.method.threshold == "printed":
            threshold = 2.0 * scale / rounds * math.log(self._total)
        frozen, candidates = torch.arange(0), torch.arange(len(self.points))
        for _ in range(rounds):
            tried = torch.cat([frozen, candidates])
            weights = self._weigh(basis, self.points[tried] @ basis)[len(frozen) :]
            enough = weights > threshold
            light = candidates[~enough]
            frozen = torch.cat([frozen, candidates[enough]])
            candidates = light[self.federation.draws().uniform(len(light)) < 0.5]
        if len(frozen) < least:  # too few to find the centres among: go on with those that were never frozen as well
            rest = torch.ones(len(self.points), dtype=torch.bool)
            rest[frozen] = False
            frozen = torch.cat([frozen, rest.nonzero().flatten()])
        return frozen

    def _ask(self, question: Task, name: str, typical: float, most: float, **inputs: Any) -> Tensor:
        """The sum of one array, whose norm at a typical client, and at most, is given."""
        scale = self._unit(typical, most)
        return self.cohort().ask(question, **self._geometry(), scale=scale, **inputs)[name] * scale

    def _geometry(self) -> dict[str, Any]:
        """From where points are measured, and how far they may lie."""
        given: dict[str, Any] = {"origin": self.origin, "radius": self.radius}
        return given if self.reduction is None else {**given, **self.reduction.inputs}

    def _unit(self, typical: float, most: float) -> float:
        """What arrays are measured in: for client-level privacy a typical client's norm; for a secure sum, which is of
        bounded numbers, the most that there can be; else 1.
        """
        return typical if self.method.by_client else most if self.method.secure else 1.0

    def _change(self, unit: float) -> float:
        """What one unit changes a count by: a client all of it, a point 1."""
        return unit if self.method.by_client else 1.0

    @property
    def _total(self) -> float:
        """How many points a query is put to, as far as is public."""
        return float(self.federation.roster.bound.sum()) * (self.method.sample or 1.0)

    @property
    def _client_points(self) -> float:
        return float(self.method.client_points or 1)


# A client's share of each query, for client-level privacy (T1 D.7.4): the norm at a typical client, one with a public
# number n of points that are drawn from the server data. ``spread`` is the mean of ‖p‖².


def typical_gram(points: Tensor, n: float, radius: float) -> float:
    """Root mean square of ‖Σ p pᵀ‖ for n of the server points; without any, the most that it can be."""
    if len(points) == 0:
        return n * radius**2
    mean = (points.T @ points / len(points)).square().sum()
    fourth = points.square().sum(1).square().mean()
    return float(torch.sqrt(n * n * mean + n * (fourth - mean)))


def typical_means(centers: Tensor, n: float, spread: float, present: float) -> float:
    """Norm of ``present`` cluster means of a typical client, and a little more: a mean that is clipped is biased.

    Squared, a mean is about its centre plus the variance around it over the points in the cluster, of which there
    are n/k; the mean of 1/points is k/n·(1 + k/n) to second order.
    """
    few = len(centers) / n
    between = float(centers.square().sum(1).mean())
    within = max(0.0, spread - between) * min(1.0, few * (1.0 + few))
    return _SLACK * math.sqrt(max(present * (between + within), 1e-12))


def typical_sums(centers: Tensor, n: float, spread: float) -> float:
    """Norm of the cluster sums of a typical client, and a little more.

    Of n points a cluster has N ~ Bin(n, 1/k); squared, its sum is about N²·‖ν‖² plus N times the variance.
    """
    k = len(centers)
    between = float(centers.square().sum(1).mean())
    within = max(0.0, spread - between)
    return _SLACK * math.sqrt(max((n * (1.0 - 1.0 / k) + n * n / k) * between + n * within, 1e-12))


# Plain k-means at the server, on points of its own


@contextmanager
def one_thread(size: int) -> Iterator[None]:
    """A small problem on one thread: waiting for other threads costs more than they help, a lot on a busy machine."""
    if size >= _SMALL:
        yield
        return
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with threadpool_limits(1):
            yield
    finally:
        torch.set_num_threads(before)


def weighted_kmeans(points: Tensor, weights: Tensor | None, k: int, starts: int, seed: int) -> tuple[Tensor, float]:
    """The best of several runs of k-means, each started by k-means++: the centres and their cost."""
    from sklearn.cluster import KMeans  # here, because it takes a second to import

    weight = None if weights is None else weights.numpy()
    with one_thread(len(points)):
        fitted = KMeans(k, n_init=starts, random_state=seed % (1 << 32)).fit(points.numpy(), sample_weight=weight)
    return torch.from_numpy(fitted.cluster_centers_).to(points.dtype), float(fitted.inertia_)


def elbow(costs: list[float]) -> int:
    """The k where a falling cost curve over k = 1, 2, ... bends: the farthest from the chord between its ends."""
    if len(costs) < 3 or costs[0] <= costs[-1]:
        return 1
    position = np.linspace(0.0, 1.0, len(costs))
    height = (np.array(costs) - costs[-1]) / (costs[0] - costs[-1])
    return int(np.argmax(1.0 - position - height)) + 1
