"""FedDP-KMeans: federated, differentially private k-means with the help of server data (T1 chapter 6).

FedDP-Init (Algorithm 11) asks the clients three times: for their outer products, whose top eigenvectors span a subspace
Π; for how many of their points lie nearest to each server point in it; and for sums and counts around the centres that
the server finds among its weighted points. FedDP-Lloyds (Algorithm 12) asks for sums and counts again, T times.

Symbols: P client points, Q server points, Δ radius, Π projection, w_q weight of server point q, ξ_j projected centres,
m_j and n_j sums and counts, ν_j centres.

For client-level privacy (T1 D.7.4) each client's share of a query is clipped. Step 3 then asks for the mean of each of
a client's clusters and whether it is there at all; Lloyd steps ask for sums and counts, as Algorithm 12 has them.

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

from unalike.analytics.kmeans.budget import Clips, Noise, Privacy, calibrate
from unalike.analytics.kmeans.diameter import Diameter, Reduced
from unalike.analytics.kmeans.ground import Ground, ground, reaches
from unalike.analytics.kmeans.server import elbow, one_thread, weighted_kmeans
from unalike.core.client import Client
from unalike.core.federation import Cohort, Federation
from unalike.core.release import Inputs, Release, Sum
from unalike.core.roster import Roster
from unalike.core.task import Sent, Task, send, task
from unalike.privacy.mechanisms import AdditiveNoise, Laplace

_SLACK = 1.1  # how far the bound on a client's cluster means or sums lies above their typical norm


def _clipped_points(
    client: Client, origin: Tensor, radius: Tensor, anchors: Tensor | None, moves: Tensor | None
) -> Tensor:
    """The client's points relative to ``origin``, each clipped to norm ``radius``; rows of padding become zero.

    With ``anchors`` a point first moves along with the nearest of them (see ``diameter.py``).
    """
    points = client.x
    if anchors is not None and moves is not None:
        middle = anchors.mean(0)
        points = points + moves[nearest_center(points - middle, anchors - middle)]
    points = points - origin
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
    return float(inputs["radius"]) ** 2 / float(inputs["scale"])


def _weight_change(inputs: Inputs) -> float:
    return 1.0 / float(inputs["scale"])


def _sum_change(inputs: Inputs) -> float:
    return float(inputs["radius"]) / float(inputs["scale"])


def _count_change(inputs: Inputs) -> float:
    return 1.0 / float(inputs["count_scale"])


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
    - ``clips``: those bounds themselves, where they are known.
    - ``sample``: the share of the clients that a query is put to; None asks all. With noise, each query gets a Poisson
      sample of its own, and its privacy is amplified (T1 §6.5.2; for clients: the ledger claims nothing for points).
    - ``simplify``: rounds of Algorithm 14, which thins out server points that too few client points are near to.
    - ``diameter``: first drop server points that nobody is near to and move far groups of clusters together (Lemma 28).
    - ``ground``: points of a lattice or a packing in the noisy subspace take the place of the server data, of which
      there is none then (T1 §7.3); ``places`` of them at most.
    - ``secure``: sums under masks, so that the server sees no client's own.
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
    clips: Clips = Clips()
    sample: float | None = None
    simplify: int = 0
    diameter: Diameter | None = None
    ground: Ground | None = None
    places: int = 2000
    secure: bool = False
    starts: int = 20
    k_max: int = 20
    initialize: bool = True
    noise: Noise | None = None

    def __post_init__(self) -> None:
        leasts = {"k": 1, "steps": 0, "simplify": 0, "starts": 1, "k_max": 3, "client_points": 1, "places": 1}
        for name, least in leasts.items():
            value = getattr(self, name)
            if value is not None and (type(value) is not int or value < least):
                raise ValueError(f"{name}={value!r}; expected a whole number of at least {least}")
        if self.ground not in (None, "lattice", "packing"):
            raise ValueError(f"ground={self.ground!r}; expected 'lattice' or 'packing', or None to use server data")
        if self.ground is not None and (self.simplify or self.diameter is not None or self.radius is None):
            raise ValueError(
                f"ground={self.ground!r} is for want of server data: simplify and diameter are of server points, so "
                "leave them out; and radius=... must be given, as nothing else says how far points may lie"
            )
        if self.sample is not None and not (type(self.sample) is float and 0 < self.sample <= 1):
            raise ValueError(f"sample={self.sample!r}; expected a share of the clients above 0, up to 1.0")
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
        queries = {"histograms": self.histograms, "refinements": self.refinements}
        return calibrate(self.privacy, initialize=self.initialize, **queries, rate=self.sample or 1.0)

    @property
    def histograms(self) -> int:
        """How often weights of server points are asked for."""
        return 1 + self.simplify + (self.diameter is not None)

    @property
    def refinements(self) -> int:
        """How often sums and counts are asked for: in Step 3 and in each Lloyd step."""
        return self.steps + self.initialize

    # The clients' side. An array is sent in units of ``scale``. For client-level privacy that is a typical client's (T1
    # D.7.4), and the array is clipped to 1. Else it is 1, or for a secure sum the most that a client may have, and a
    # point's share follows from the radius, to which the task itself clips the points.

    @task
    def outer_product(
        self,
        client: Client,
        origin: Tensor,
        radius: Tensor,
        scale: Tensor,
        anchors: Tensor | None = None,
        moves: Tensor | None = None,
    ) -> Sent:
        """Step 1: Σ p pᵀ over the client's points, as a vector of the same norm (see the module's text)."""
        points = self._exact(_clipped_points(client, origin, radius, anchors, moves))
        rows, columns, factor = _triangle(points.shape[1])
        return send(gram=(points.T @ points)[rows, columns] * factor / scale)

    @outer_product.into
    def _gram(self) -> list[Release]:
        return [self._sum("gram", self.plan.gram, _gram_change)]

    @task
    def nearest_counts(
        self,
        client: Client,
        origin: Tensor,
        radius: Tensor,
        points: Tensor,
        scale: Tensor,
        basis: Tensor | None = None,
        anchors: Tensor | None = None,
        moves: Tensor | None = None,
    ) -> Sent:
        """Step 2: w_q, how many of the client's points have ``points[q]`` nearest, in the subspace if there is one."""
        own = _clipped_points(client, origin, radius, anchors, moves)
        nearest = nearest_center(own if basis is None else own @ basis, points)
        empty = torch.zeros(points.shape[0], dtype=points.dtype)
        return send(weights=empty.scatter_add(0, nearest, client.mask.to(points.dtype)) / scale)

    @nearest_counts.into
    def _weights(self) -> list[Release]:
        return [self._sum("weights", self.plan.weights, _weight_change)]

    @task
    def cluster_sums(
        self,
        client: Client,
        origin: Tensor,
        radius: Tensor,
        centers: Tensor,
        scale: Tensor,
        count_scale: Tensor,
        basis: Tensor | None = None,
        anchors: Tensor | None = None,
        moves: Tensor | None = None,
    ) -> Sent:
        """Step 3 and a Lloyd step: m_j [k, d] and n_j [k] for the clusters around ``centers`` (in the subspace if there
        is a basis). For client-level privacy Step 3 sends the mean of each cluster, and whether it is there at all (T1
        D.7.4).
        """
        points = _clipped_points(client, origin, radius, anchors, moves)
        nearest = nearest_center(points if basis is None else points @ basis, centers)
        member = (nearest[:, None] == torch.arange(centers.shape[0])) & client.mask[:, None]
        points = self._exact(points)
        weight = member.to(points.dtype)
        sums, counts = weight.T @ points, weight.sum(0)
        if self._by_client and basis is not None:
            sums, counts = sums / counts.clamp(min=1.0)[:, None], (counts > 0).to(sums.dtype)
        return send(sums=sums / scale, counts=counts / count_scale)

    def _exact(self, points: Tensor) -> Tensor:
        """Points to be summed under noise, in double precision: rounding must not move a sum further than a point does.

        In single precision it would, from some ten thousand points on.
        """
        return points if self.noise is None and self.privacy is None else points.to(torch.float64)

    @cluster_sums.into
    def _sums(self) -> list[Release]:
        return [self._sum("sums", self.plan.sums, _sum_change), self._sum("counts", self.plan.counts, _count_change)]

    def _sum(self, name: str, noise: AdditiveNoise | None, change: Callable[[Inputs], float]) -> Sum:
        """A sum that one point changes by at most ``change``, or one client, in units of its scale, by at most 1."""
        clip = 1.0 if self.secure else None  # of a whole client, which only its scale has to reach
        if noise is None:
            return Sum(name, clip=clip, secure=self.secure)
        if self._by_client:
            return Sum(name, clip=1.0, noise=noise, unit="client", secure=self.secure)
        return Sum(name, clip=clip, noise=noise, sensitivity=change, unit="point", secure=self.secure)

    # The server's side

    def fit(self, federation: Federation, server: Tensor | None, initial: Tensor | None = None) -> Clustering:
        """Cluster the federation's points. ``server``: None with ``ground``, which needs none. ``initial`` centres take
        FedDP-Init's place, with ``initialize=False``.
        """
        dimension = self._check(federation.roster, server, initial)
        points = torch.zeros(0, dimension) if server is None else server.to(torch.float32)
        origin = points.mean(0) if self.center and len(points) else torch.zeros(dimension)
        reach = self.radius or float(torch.linalg.vector_norm(points - origin, dim=1).max())
        run = _Run(self, federation, origin, reach, points - origin)
        if initial is None:
            if self.diameter is not None:
                run.reduce(self.diameter)
            centers = start = run.initialize()
        else:
            centers = start = initial.to(torch.float32) - origin
        for _ in range(self.steps):
            centers = run.refine(centers, centers)
        return Clustering(run.home(centers), run.home(start), run.radius, run.used, tuple(run.curve))

    def _check(self, roster: Roster, server: Tensor | None, initial: Tensor | None) -> int:
        """Refuse what cannot be clustered before anything is asked; gives the dimension."""
        if (initial is None) != self.initialize:
            given = "no initial centres" if initial is None else "initial centres"
            raise ValueError(
                f"initialize={self.initialize}, but fit got {given}; initial=... goes with initialize=False"
            )
        shape = roster.schema.shape
        if len(shape) != 1:
            raise ValueError(f"k-means clusters points with a list of features each, but a client's rows are {shape}")
        wanted = self.k if self.k is not None else self.k_max
        total = int(roster.bound.sum())
        if (server is None) != (self.ground is not None):
            given = "no server data" if server is None else "server data"
            raise ValueError(
                f"ground={self.ground!r}, but fit got {given}; ground='lattice' or 'packing' takes the place of it"
            )
        if wanted > total:
            raise ValueError(f"k={wanted} clusters of {total} points in all: choose k between 1 and {total}")
        if server is not None:
            self._check_server(server, shape[0], wanted if initial is None else 1)
        if initial is not None and (initial.ndim != 2 or initial.shape[1] != shape[0]):
            raise ValueError(f"initial centres are {tuple(initial.shape)}; expected [k, {shape[0]}]")
        return shape[0]

    def _check_server(self, server: Tensor, dimension: int, wanted: int) -> None:
        if server.ndim != 2 or server.shape[1] != dimension:
            raise ValueError(
                f"the server data is {tuple(server.shape)}, but the clients' points have {dimension} features; "
                f"expected [points, {dimension}] with the features in the same order"
            )
        if len(server) == 0:
            raise ValueError("there is not a single server point; FedDP-Init finds its first centres among them")
        if not bool(torch.isfinite(server).all()):
            raise ValueError("the server data contains NaN or infinite values; leave those points out")
        if self.radius is None and bool((server == server[0]).all()):
            raise ValueError("all server points are identical, so they have no radius to clip to; give radius=...")
        distinct = len(torch.unique(server, dim=0)) if wanted > 1 else 1
        if distinct < wanted:
            raise ValueError(
                f"k={wanted} centres are started from the server data, which has only {distinct} distinct points "
                f"({len(server)} in all); choose k up to {distinct}, or give more server data"
            )


def _std(noise: AdditiveNoise | None, unit: float) -> float:
    """Of the noise on a count: one point, or one client in its unit, changes it by at most ``unit``."""
    return 0.0 if noise is None else noise.std(unit)


def _weighty(weights: Tensor, least: int) -> Tensor:
    """Which server points have a noisy weight of one client point or more; ``least`` of them at least."""
    kept = (weights >= 1.0).nonzero().flatten()
    return kept if len(kept) >= least else torch.topk(weights, min(least, len(weights))).indices


@dataclass
class _Run:
    """One fit: the settings, the cohort, and the server's points relative to the origin."""

    method: FedDPKMeans
    federation: Federation
    origin: Tensor
    radius: float
    points: Tensor  # Q [points, d], from the origin
    used: int = 0
    curve: list[float] = field(default_factory=list)
    reduced: Reduced | None = None

    def __post_init__(self) -> None:
        self.spread = self.radius**2  # mean of ‖p‖², as far as is known: for the bounds of client-level privacy
        self.most = float(self.federation.roster.bound.max())  # points of a client

    def cohort(self) -> Cohort:
        """Whom a query is put to: everyone, or a sample of its own."""
        if self.method.sample is None:
            return self.federation.everyone()
        return self.federation.sample(self.method.sample, poisson=self.method.plan != Noise())

    def reduce(self, diameter: Diameter) -> None:
        """Lemma 28: one more histogram, over the server points where they are, and what follows from it."""
        weights = self._stand_for(None, self.points)
        noise = self.method.plan.weights
        epsilon = noise.epsilon if isinstance(noise, Laplace) else math.inf
        raw = self.points + self.origin
        self.reduced = diameter.reduce(raw, weights, self._total, epsilon, least=self.method.k or self.method.k_max)
        moved = self.reduced.anchors + self.reduced.moves
        self.origin = moved.mean(0) if self.method.center else torch.zeros_like(self.origin)
        self.points = moved - self.origin
        if self.method.radius is None:
            self.radius = float(torch.linalg.vector_norm(self.points, dim=1).max())
        self.spread = self.radius**2

    def home(self, centers: Tensor) -> Tensor:
        """Centres as the data has them: from zero, and back where Lemma 28 moved them from."""
        there = centers + self.origin
        return there if self.reduced is None else self.reduced.undone(there)

    def initialize(self) -> Tensor:
        """FedDP-Init (Algorithm 11)."""
        method = self.method
        dimension = method.k if method.k is not None else method.k_max
        basis, values = self._top_eigenvectors(min(dimension, self.origin.shape[0]))
        if method.ground is None:
            chosen = self._simplified(basis, dimension) if method.simplify else torch.arange(len(self.points))
            projected, length = self.points[chosen] @ basis, self.points[chosen].square().sum(1)
        else:
            reach = reaches(values / self._total, self.radius)
            projected = ground(method.ground, reach, method.places, self.federation.seed)
            length = projected.square().sum(1)
        weights = self._stand_for(basis, projected)
        kept = _weighty(weights, dimension)
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
        method, clips = self.method, self.method.clips
        if basis is not None:
            present = float(min(len(centers), self._client_points))
            typical = clips.means or self._typical_means(previous, present), clips.presence or present
        else:
            typical = clips.sums or self._typical_sums(previous), clips.counts or self._client_points
        scale = self._unit(typical[0], self.most * self.radius)
        count_scale = self._unit(typical[1], self.most)
        given: dict[str, Any] = {**self._ground(), "scale": scale} | ({} if basis is None else {"basis": basis})
        given |= {"centers": centers, "count_scale": count_scale}
        cohort = self.cohort()
        if method.secure:  # one secure sum an ask
            both = [cohort.ask(method.cluster_sums, into=one, **given) for one in method.cluster_sums.releases()]
            sums, counts = (both[0]["sums"] * scale).float(), (both[1]["counts"] * count_scale).float()
        else:
            replies = cohort.ask(method.cluster_sums, **given)
            sums, counts = (replies["sums"] * scale).float(), (replies["counts"] * count_scale).float()
        sure = counts > _std(method.plan.counts, self._change(count_scale))
        return torch.where(sure[:, None], self.bounded(sums / counts.clamp(min=1.0)[:, None]), previous)

    def bounded(self, centers: Tensor) -> Tensor:
        length = torch.linalg.vector_norm(centers, dim=1, keepdim=True)
        inside: Tensor = centers * (self.radius / length.clamp(min=self.radius))
        return inside

    def _top_eigenvectors(self, count: int) -> tuple[Tensor, Tensor]:
        """Step 1: Π as a basis [d, count], and the eigenvalues."""
        dimension = self.origin.shape[0]
        typical = self.method.clips.gram or self._typical_gram()
        triangle = self._asked(self.method.outer_product, "gram", typical, self.most * self.radius**2)
        rows, columns, factor = _triangle(dimension)
        gram = torch.zeros(dimension, dimension, dtype=torch.float64)
        gram[rows, columns] = gram[columns, rows] = triangle.to(torch.float64) / factor
        with one_thread(dimension):
            values, vectors = torch.linalg.eigh(gram)  # by rising eigenvalue
        return vectors[:, -count:].flip(1).to(torch.float32), values[-count:].flip(0).to(torch.float32)

    def _stand_for(self, basis: Tensor | None, points: Tensor) -> Tensor:
        """Step 2: how many client points each of these points, in the subspace if there is one, stands for."""
        typical = self.method.clips.weights or self._client_points
        more: dict[str, Any] = {"points": points} if basis is None else {"points": points, "basis": basis}
        return self._asked(self.method.nearest_counts, "weights", typical, self.most, **more)

    def _simplified(self, basis: Tensor, least: int) -> Tensor:
        """Algorithm 14: which server points to go on with; each round freezes those with weight enough and keeps a
        random half of the others.

        Enough is 2b·log(T·|Q|) for noise of scale b: all T·|Q| noises stay below half of it with probability near one
        (the printed 2·log(m)/ε forgets that the noise grows with T, and needs the number of client points).
        """
        rounds = self.method.simplify
        unit = self._change(self._unit(self.method.clips.weights or self._client_points, self.most))
        scale = _std(self.method.plan.weights, unit) / math.sqrt(2.0)
        threshold = 2.0 * scale * math.log(rounds * len(self.points))
        frozen, candidates = torch.arange(0), torch.arange(len(self.points))
        for _ in range(rounds):
            tried = torch.cat([frozen, candidates])
            weights = self._stand_for(basis, self.points[tried] @ basis)[len(frozen) :]
            enough = weights > threshold
            light = candidates[~enough]
            frozen = torch.cat([frozen, candidates[enough]])
            candidates = light[self.federation.draws().uniform(len(light)) < 0.5]
        if len(frozen) < least:  # too few to find the centres among: go on with those that were never frozen as well
            rest = torch.ones(len(self.points), dtype=torch.bool)
            rest[frozen] = False
            frozen = torch.cat([frozen, rest.nonzero().flatten()])
        return frozen

    def _asked(self, question: Task, name: str, typical: float, most: float, **inputs: Any) -> Tensor:
        """The sum of one array, whose norm at a typical client, and at most, is given."""
        scale = self._unit(typical, most)
        return self.cohort().ask(question, **self._ground(), scale=scale, **inputs)[name] * scale

    def _ground(self) -> dict[str, Any]:
        """From where points are measured, and how far they may lie."""
        given: dict[str, Any] = {"origin": self.origin, "radius": self.radius}
        return given if self.reduced is None else {**given, **self.reduced.inputs}

    def _unit(self, typical: float, most: float) -> float:
        """What arrays are measured in: for client-level privacy a typical client's norm; for a secure sum, which is of
        bounded numbers, the most that there can be; else 1.
        """
        return typical if self.method._by_client else most if self.method.secure else 1.0

    def _change(self, unit: float) -> float:
        """What one unit changes a count by: a client all of it, a point 1."""
        return unit if self.method._by_client else 1.0

    @property
    def _total(self) -> float:
        """How many points a query is put to, as far as is public."""
        return float(self.federation.roster.bound.sum()) * (self.method.sample or 1.0)

    @property
    def _client_points(self) -> float:
        return float(self.method.client_points or 1)

    def _typical_gram(self) -> float:
        """Root mean square of ‖Σ p pᵀ‖ for ``client_points`` points drawn from the server data; without any, the most
        that they may have.
        """
        n = self._client_points
        if len(self.points) == 0:
            return n * self.radius**2
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

    def _typical_sums(self, centers: Tensor) -> float:
        """Norm of the cluster sums of a typical client, and a little more.

        Of n points a cluster has N ~ Bin(n, 1/k); squared, its sum is about N²·‖ν‖² plus N times the variance.
        """
        n, k = self._client_points, len(centers)
        between = float(centers.square().sum(1).mean())
        within = max(0.0, self.spread - between)
        return _SLACK * math.sqrt(max((n * (1.0 - 1.0 / k) + n * n / k) * between + n * within, 1e-12))


def cost(federation: Federation, centers: Tensor) -> float:
    """The k-means cost per client point; measured in simulation and charged to nobody."""
    with federation.aside() as own:
        sums = own.everyone().ask(squared_distances, into=[Sum("cost"), Sum("points")], centers=centers)
    return float(sums["cost"]) / float(sums["points"])
