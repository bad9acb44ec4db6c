"""FedDP-KMeans: federated, differentially private k-means with the help of server data (T1 chapter 6).

FedDP-Init (Algorithm 11) asks the clients three times: for their outer products, whose top eigenvectors span a subspace
Π; for how many of their points lie nearest to each server point in it; and for sums and counts around the centres that
the server finds among its weighted points. FedDP-Lloyds (Algorithm 12) asks for sums and counts again, T times.

Symbols: P client points, Q server points, Δ radius, Π projection, w_q weight of server point q, ξ_j projected centres,
m_j and n_j sums and counts, ν_j centres.

The Gram matrix. One point changes Σ p pᵀ by p pᵀ, of Frobenius norm ‖p‖² <= Δ². A client sends the upper triangle with
the off-diagonal entries times √2: as a vector it has that same norm, so the L2 sensitivity is Δ², and the noise that
comes back on an entry off the diagonal is σ/√2. Sending all d² entries and symmetrising the noisy sum gives exactly
this distribution (an average of two independent draws) for twice the bytes; the plain triangle has the same
sensitivity (at p = Δ·e_1) but the whole σ everywhere, so √2 more noise in spectral norm.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from unalike.analytics.kmeans.budget import Noise, Privacy, calibrate
from unalike.analytics.kmeans.server import elbow, one_thread, weighted_kmeans
from unalike.core.client import Client
from unalike.core.federation import Cohort, Federation
from unalike.core.release import Inputs, Release, Sum
from unalike.core.roster import Roster
from unalike.core.task import Sent, Task, send, task
from unalike.privacy.mechanisms import AdditiveNoise

_SLACK = 1.1  # how far the bound on a client's cluster means lies above their typical norm


def _clipped_points(client: Client, origin: Tensor, radius: Tensor) -> Tensor:
    """The client's points relative to ``origin``, each clipped to norm ``radius``; rows of padding become zero."""
    points = client.x - origin
    length = torch.linalg.vector_norm(points, dim=1, keepdim=True)
    factor = torch.clamp((1.0 - 1e-6) * radius / length.clamp(min=1e-30), max=1.0)  # rounding stays below the radius
    return torch.where(client.mask[:, None], points * factor, 0.0)


def nearest_center(points: Tensor, centers: Tensor) -> Tensor:
    """[points]: which centre is nearest (the first of several)."""
    return torch.argmin(centers.square().sum(1) - 2.0 * points @ centers.T, dim=1)


def _triangle(dimension: int) -> tuple[Tensor, Tensor, Tensor]:
    """Rows and columns of the upper triangle, and the factor that keeps the Frobenius norm: √2 off the diagonal."""
    rows, columns = torch.triu_indices(dimension, dimension)
    return rows, columns, torch.where(rows == columns, 1.0, math.sqrt(2.0))


@task
def squared_distances(client: Client, centers: Tensor) -> Sent:
    """The k-means cost of the client's (unclipped) points; for measuring in simulation."""
    middle = centers.mean(0)
    nearest = nearest_center(client.x - middle, centers - middle)
    return send(cost=client.sum((client.x - centers[nearest]).square().sum(1)), points=client.n)


# What one point changes: functions of the ask's inputs, so that both sides know them and neither is told


def _gram_change(inputs: Inputs) -> float:
    return float(inputs["radius"]) ** 2


def _sum_change(inputs: Inputs) -> float:
    return float(inputs["radius"])


@dataclass(frozen=True)
class Clustering:
    """Centres [k, d], the ones before any Lloyd step, and the cost curve if k was chosen by its elbow."""

    centers: Tensor
    initial: Tensor
    radius: float
    server_points: int  # how many of them had weight enough to be clustered; 0: none was used
    curve: tuple[float, ...] = ()  # weighted k-means cost of the server points for k = 1, 2, ...

    @property
    def k(self) -> int:
        return len(self.centers)


@dataclass(frozen=True)
class FedDPKMeans:
    """Algorithms 11 and 12 of T1, with one (ε, δ) for all of it.

    - ``k``: number of clusters; None chooses it by the elbow on the weighted server data, up to ``k_max`` (T1 D.8.3).
    - ``steps``: T of FedDP-Lloyds; the best runs of T1 mostly used none (Tables D.4, D.5).
    - ``radius``: Δ, to which every point is clipped in every step; None takes that of the server data.
    - ``center``: measure points from the mean of the server data, which is public, instead of from zero. A translation
      does not change k-means, but Δ is smaller, and so is all the noise. False is the algorithm as printed.
    - ``client_points``: for client-level privacy, how many points a client typically has, a public number: the bounds
      to which a client's statistics are clipped follow from it and from the server data (T1 D.7.4).
    - ``simplify``: rounds of Algorithm 14, which thins out server points that too few client points are near to.
    - ``initialize``: False leaves FedDP-Init out, and its share of the budget to FedDP-Lloyds: ``fit`` is then given
      the initial centres (this is how the baselines run).
    - ``noise``: of every kind of query; None is the least for ``privacy``. The ledger accounts what it says.
    """

    k: int | None = 10
    privacy: Privacy | None = None
    steps: int = 0
    radius: float | None = None
    center: bool = True
    client_points: int | None = None
    simplify: int = 0
    starts: int = 20
    k_max: int = 20
    initialize: bool = True
    noise: Noise | None = None

    def __post_init__(self) -> None:
        for name, least in (("k", 1), ("steps", 0), ("simplify", 0), ("starts", 1), ("k_max", 3), ("client_points", 1)):
            value = getattr(self, name)
            if value is not None and (type(value) is not int or value < least):
                raise ValueError(f"{name}={value!r}; expected a whole number of at least {least}")
        if self.radius is not None and not (math.isfinite(self.radius) and self.radius > 0):
            raise ValueError(f"radius={self.radius}; expected a number above 0, to which points are clipped")
        if self.client_points is None and self._by_client:
            raise ValueError(
                "client-level privacy needs client_points: how many points a client typically has, as a public number "
                "(for example the cap that clients keep to); the bounds of what a client sends are set by it"
            )

    @property
    def _by_client(self) -> bool:
        return self.privacy is not None and self.privacy.unit == "client"

    @cached_property
    def plan(self) -> Noise:
        """The noise of every query of a run. It depends on no data: whoever has the settings has the noise."""
        if self.noise is not None or self.privacy is None:
            return self.noise or Noise()
        refinements = self.steps + self.initialize
        histograms = 1 + self.simplify
        return calibrate(self.privacy, initialize=self.initialize, histograms=histograms, refinements=refinements)

    # The clients' side. For client-level privacy an array is sent in units of ``scale``, a typical client's (T1
    # D.7.4), and clipped to 1; a point's share follows from the radius, to which the task itself clips the points.

    @task
    def outer_product(self, client: Client, origin: Tensor, radius: Tensor, scale: Tensor | None = None) -> Sent:
        """Step 1: Σ p pᵀ over the client's points, as a vector of the same norm (see the module's text)."""
        points = _clipped_points(client, origin, radius)
        rows, columns, factor = _triangle(points.shape[1])
        return send(gram=self._scaled((points.T @ points)[rows, columns] * factor, scale))

    @outer_product.into
    def _gram(self) -> list[Release]:
        return [self._sum("gram", self.plan.gram, _gram_change)]

    @task
    def nearest_counts(
        self, client: Client, origin: Tensor, radius: Tensor, basis: Tensor, points: Tensor, scale: Tensor | None = None
    ) -> Sent:
        """Step 2: w_q, how many of the client's points have ``points[q]`` nearest in the subspace."""
        nearest = nearest_center(_clipped_points(client, origin, radius) @ basis, points)
        empty = torch.zeros(points.shape[0], dtype=points.dtype)
        return send(weights=self._scaled(empty.scatter_add(0, nearest, client.mask.to(points.dtype)), scale))

    @nearest_counts.into
    def _weights(self) -> list[Release]:
        return [self._sum("weights", self.plan.weights, 1.0)]

    @task
    def cluster_sums(
        self,
        client: Client,
        origin: Tensor,
        radius: Tensor,
        centers: Tensor,
        basis: Tensor | None = None,
        scale: Tensor | None = None,
        count_scale: Tensor | None = None,
    ) -> Sent:
        """Step 3 and a Lloyd step: m_j [k, d] and n_j [k] for the clusters around ``centers`` (in the subspace if there
        is a basis). For client-level privacy: the mean of each cluster, and whether it is there at all (T1 D.7.4).
        """
        points = _clipped_points(client, origin, radius)
        nearest = nearest_center(points if basis is None else points @ basis, centers)
        member = (nearest[:, None] == torch.arange(centers.shape[0])) & client.mask[:, None]
        weight = member.to(points.dtype)
        sums, counts = weight.T @ points, weight.sum(0)
        if self._by_client:
            sums, counts = sums / counts.clamp(min=1.0)[:, None], (counts > 0).to(sums.dtype)
        return send(sums=self._scaled(sums, scale), counts=self._scaled(counts, count_scale))

    @cluster_sums.into
    def _sums(self) -> list[Release]:
        return [self._sum("sums", self.plan.sums, _sum_change), self._sum("counts", self.plan.counts, 1.0)]

    def _scaled(self, value: Tensor, scale: Tensor | None) -> Tensor:
        if not self._by_client:
            return value
        assert scale is not None, "client-level privacy measures what a client sends by a typical client's"
        return value / scale

    def _sum(self, name: str, noise: AdditiveNoise | None, change: float | Callable[[Inputs], float]) -> Sum:
        """A sum that one point changes by at most ``change``, or one client, in units of its scale, by at most 1."""
        if noise is None:
            return Sum(name)
        if self._by_client:
            return Sum(name, clip=1.0, noise=noise, unit="client")
        return Sum(name, noise=noise, sensitivity=change, unit="point")

    # The server's side

    def fit(self, federation: Federation, server: Tensor, initial: Tensor | None = None) -> Clustering:
        """Cluster the federation's points. ``initial`` centres take FedDP-Init's place, with ``initialize=False``."""
        dimension = self._check(federation.roster, server, initial)
        server = server.to(torch.float32)
        origin = server.mean(0) if self.center else torch.zeros(dimension)
        points = server - origin
        radius = self.radius or float(torch.linalg.vector_norm(points, dim=1).max())
        run = _Run(self, federation, origin, radius, points)
        if initial is None:
            centers = start = run.initialize()
        else:
            centers = start = run.bounded(initial.to(torch.float32) - origin)
        for _ in range(self.steps):
            centers = run.refine(centers, centers)
        return Clustering(centers + origin, start + origin, radius, run.used, tuple(run.curve))

    def _check(self, roster: Roster, server: Tensor, initial: Tensor | None) -> int:
        """Refuse what cannot be clustered before anything is asked; gives the dimension."""
        if (initial is None) != self.initialize:
            given = "no initial centres" if initial is None else "initial centres"
            raise ValueError(
                f"initialize={self.initialize}, but fit got {given}; initial=... goes with initialize=False"
            )
        shape = roster.schema.shape
        if len(shape) != 1:
            raise ValueError(f"k-means clusters points with a list of features each, but a client's rows are {shape}")
        if server.ndim != 2 or server.shape[1] != shape[0]:
            raise ValueError(
                f"the server data is {tuple(server.shape)}, but the clients' points have {shape[0]} features; "
                f"expected [points, {shape[0]}] with the features in the same order"
            )
        if len(server) == 0:
            raise ValueError("there is not a single server point; FedDP-Init finds its first centres among them")
        if not bool(torch.isfinite(server).all()):
            raise ValueError("the server data contains NaN or infinite values; leave those points out")
        if self.radius is None and bool((server == server[0]).all()):
            raise ValueError("all server points are identical, so they have no radius to clip to; give radius=...")
        wanted = self.k if self.k is not None else self.k_max
        total = int(roster.bound.sum())
        if wanted > total:
            raise ValueError(f"k={wanted} clusters of {total} points in all: choose k between 1 and {total}")
        if initial is None:
            distinct = len(torch.unique(server, dim=0))
            if distinct < wanted:
                raise ValueError(
                    f"k={wanted} centres are started from the server data, which has only {distinct} distinct points "
                    f"({len(server)} in all); choose k up to {distinct}, or give more server data"
                )
        elif initial.ndim != 2 or initial.shape[1] != shape[0]:
            raise ValueError(f"initial centres are {tuple(initial.shape)}; expected [k, {shape[0]}]")
        return shape[0]


def _weighty(chosen: Tensor, weights: Tensor, least: int) -> tuple[Tensor, Tensor]:
    """Drop server points whose noisy weight is below one client point, unless fewer than ``least`` would be left."""
    kept = (weights >= 1.0).nonzero().flatten()
    if len(kept) < least:
        kept = torch.topk(weights, min(least, len(weights))).indices
    return chosen[kept], weights[kept].clamp(min=1e-3)


@dataclass
class _Run:
    """One fit: the settings, the cohort, and the server's points relative to the origin."""

    method: FedDPKMeans
    federation: Federation
    origin: Tensor
    radius: float
    points: Tensor  # Q [points, d]
    used: int = 0
    curve: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.everyone: Cohort = self.federation.everyone()
        self.spread = self.radius**2  # mean of ‖p‖², as far as is known: for the bounds of client-level privacy

    def initialize(self) -> Tensor:
        """FedDP-Init (Algorithm 11)."""
        method = self.method
        dimension = method.k if method.k is not None else method.k_max
        basis = self._top_eigenvectors(min(dimension, self.points.shape[1]))
        chosen = self._simplified(basis, dimension) if method.simplify else torch.arange(len(self.points))
        weights = self._stand_for(basis, chosen)
        chosen, weights = _weighty(chosen, weights, dimension)
        self.used = len(chosen)
        self.spread = float(weights @ self.points[chosen].square().sum(1) / weights.sum())
        projected = self.points[chosen] @ basis
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
        a number near zero would throw the centre anywhere. Means of clipped points lie within Δ, so centres are too.
        """
        inputs: dict[str, Any] = {} if basis is None else {"basis": basis}
        k, points = len(centers), self.method.client_points
        present = float(k if points is None else min(k, points))
        typical = self._typical_means(previous, present)
        if self.method._by_client:
            inputs |= {"scale": typical, "count_scale": present}
        replies = self.everyone.ask(self.method.cluster_sums, centers=centers, **self._ground(), **inputs)
        sums, counts = self._unscaled(replies["sums"], typical), self._unscaled(replies["counts"], present)
        sure = counts > self._std(self.method.plan.counts, present)
        return self.bounded(torch.where(sure[:, None], sums / counts.clamp(min=1.0)[:, None], previous))

    def bounded(self, centers: Tensor) -> Tensor:
        length = torch.linalg.vector_norm(centers, dim=1, keepdim=True)
        inside: Tensor = centers * (self.radius / length.clamp(min=self.radius))
        return inside

    def _top_eigenvectors(self, count: int) -> Tensor:
        """Step 1: Π as a basis [d, count]."""
        dimension = self.points.shape[1]
        triangle = self._asked(self.method.outer_product, "gram", self._typical_gram()).to(torch.float64)
        rows, columns, factor = _triangle(dimension)
        gram = torch.zeros(dimension, dimension, dtype=torch.float64)
        gram[rows, columns] = gram[columns, rows] = triangle / factor
        with one_thread(dimension):
            vectors: Tensor = torch.linalg.eigh(gram).eigenvectors  # by rising eigenvalue
        return vectors[:, -count:].flip(1).to(torch.float32)

    def _stand_for(self, basis: Tensor, chosen: Tensor) -> Tensor:
        """Step 2: how many client points each of the chosen server points stands for."""
        projected = self.points[chosen] @ basis
        return self._asked(self.method.nearest_counts, "weights", self._client_points, basis=basis, points=projected)

    def _simplified(self, basis: Tensor, least: int) -> Tensor:
        """Algorithm 14: which server points to go on with; each round freezes those with weight enough and keeps a
        random half of the others.

        Enough is 2b·log(T·|Q|) for noise of scale b: all T·|Q| noises stay below half of it with probability near one
        (the printed 2·log(m)/ε forgets that the noise grows with T, and needs the number of client points).
        """
        rounds = self.method.simplify
        scale = self._std(self.method.plan.weights, self._client_points) / math.sqrt(2.0)
        threshold = 2.0 * scale * math.log(rounds * len(self.points))
        frozen, candidates = torch.arange(0), torch.arange(len(self.points))
        for _ in range(rounds):
            weights = self._stand_for(basis, torch.cat([frozen, candidates]))[len(frozen) :]
            enough = weights > threshold
            light = candidates[~enough]
            frozen = torch.cat([frozen, candidates[enough]])
            candidates = light[self.federation.draws().uniform(len(light)) < 0.5]
        if len(frozen) < least:  # too few to find the centres among: go on with those that were never frozen as well
            rest = torch.ones(len(self.points), dtype=torch.bool)
            rest[frozen] = False
            frozen = torch.cat([frozen, rest.nonzero().flatten()])
        return frozen

    def _asked(self, question: Task, name: str, typical: float, **inputs: Tensor) -> Tensor:
        """The sum of one array, whose norm at a typical client is given."""
        given: dict[str, Any] = {**self._ground(), **inputs}
        if self.method._by_client:
            given["scale"] = typical
        return self._unscaled(self.everyone.ask(question, **given)[name], typical)

    def _unscaled(self, value: Tensor, scale: float) -> Tensor:
        return value * scale if self.method._by_client else value

    def _std(self, noise: AdditiveNoise | None, typical: float) -> float:
        """Of the noise on a count, of which a point changes one by 1."""
        return 0.0 if noise is None else noise.std(typical if self.method._by_client else 1.0)

    @property
    def _client_points(self) -> float:
        return float(self.method.client_points or 1)

    def _ground(self) -> dict[str, Any]:
        return {"origin": self.origin, "radius": self.radius}

    def _typical_gram(self) -> float:
        """Root mean square of ‖Σ p pᵀ‖ for ``client_points`` points drawn from the server data."""
        n = self._client_points
        mean = (self.points.T @ self.points / len(self.points)).square().sum()
        fourth = self.points.square().sum(1).square().mean()
        return float(torch.sqrt(n * n * mean + n * (fourth - mean)))

    def _typical_means(self, centers: Tensor, present: float) -> float:
        """Norm of ``present`` cluster means of a typical client, and a little more: a mean that is clipped is biased.

        Squared, a mean is about its centre plus the variance around it over the points in the cluster, of which there
        are n/k; the mean of 1/points is k/n·(1 + k/n) to second order.
        """
        few = len(centers) / self._client_points
        between = float(centers.square().sum(1).mean())
        within = max(0.0, self.spread - between) * min(1.0, few * (1.0 + few))
        return _SLACK * math.sqrt(max(present * (between + within), 1e-12))


def cost(federation: Federation, centers: Tensor) -> float:
    """The k-means cost per client point; measured in simulation and charged to nobody."""
    with federation.aside() as own:
        sums = own.everyone().ask(squared_distances, into=[Sum("cost"), Sum("points")], centers=centers)
    return float(sums["cost"]) / float(sums["points"])
