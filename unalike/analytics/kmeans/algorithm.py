"""FedDP-KMeans: federated, differentially private k-means with the help of server data (T1 chapter 6).

FedDP-Init (Algorithm 11) asks the clients three times: for their outer products, whose top eigenvectors span a subspace
Π; for how many of their points lie nearest to each server point in it; and for sums and counts around the centres that
the server finds among its weighted points. FedDP-Lloyds (Algorithm 12) asks for sums and counts again, T times.

Symbols: P client points, Q server points, Δ radius, Π projection, w_q weight of server point q, ξ_j projected centres,
m_j and n_j sums and counts, ν_j centres.

For client-level privacy (T1 D.7.4) each client's share of a query is clipped. Step 3 then asks for the mean of each of
a client's clusters and whether it is there at all; Lloyd steps ask for sums and counts, as Algorithm 12 has them.

The accuracy that Theorem 26 promises is no number of a run: it holds from so many points on as contain a universal
constant that the thesis does not give. ``study.check_assumptions`` shows its conditions, with constants of 1.

The Gram matrix. One point changes Σ p pᵀ by p pᵀ, of Frobenius norm ‖p‖² <= Δ². A client sends the upper triangle with
the off-diagonal entries times √2: as a vector it has that same norm, so the L2 sensitivity is Δ². The noise on an entry
off the diagonal is then σ/√2, as if all d² noisy entries were averaged with their mirror images.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, get_args

import torch
from torch import Tensor

from unalike.analytics.kmeans.budget import Clips, KMeansPrivacy, StepNoise, calibrate
from unalike.analytics.kmeans.client import (
    clipped_points,
    count_change,
    gram_change,
    nearest_center,
    sum_change,
    triangle_layout,
    weight_change,
)
from unalike.analytics.kmeans.diameter import Diameter
from unalike.analytics.kmeans.ground import Ground
from unalike.analytics.kmeans.server import ServerRun
from unalike.core.release import Inputs, Release, Sum
from unalike.core.roster import Roster
from unalike.core.vocabulary import Client, Federation, Sent, send, task
from unalike.privacy.checks import SettingError, check_positive
from unalike.privacy.mechanisms import AdditiveNoise

Threshold = Literal["noise", "printed"]


@dataclass(frozen=True)
class Clustering:
    """Centres [k, d], the ones before any Lloyd step, and the cost curve if k was chosen by its elbow.

    ``sizes`` [k]: points of each cluster in the last step, with its noise; None where only presence was asked for.
    ``errors`` [k]: what that noise makes of the deviation of each coordinate of a centre; infinite: the centre is as
    it was before, because its cluster's count was not clear of the noise.
    """

    centers: Tensor
    initial: Tensor
    radius: float
    server_points: int  # how many of them had weight enough to be clustered; 0: none was used
    sizes: Tensor | None = None
    errors: Tensor | None = None
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
    - ``margin``: Step 3 takes the points that are at most this many times as far from their centre as from any other,
      in the subspace; 1/3 is part 2 of Algorithms 13 and 15, 1 takes all points, as in Algorithm 11.
    - ``simplify``: rounds of Algorithm 14, which thins out server points that too few client points are near to.
    - ``threshold``: the weight that is enough there: by the ``noise`` that all rounds together have, or as ``printed``.
    - ``diameter``: first drop server points that nobody is near to and move far groups of clusters together (Lemma 28).
    - ``ground``: points of a lattice or a packing in the noisy subspace take the place of the server data, of which
      there is none then (T1 §7.3); ``places`` of them at most.
    - ``secure``: sums under masks, so that the server sees no client's own.
    - ``initialize``: False leaves FedDP-Init out, and its share of the budget to FedDP-Lloyds: ``fit`` is then given
      the initial centres (this is how the baselines run).
    - ``noise``: of every kind of query; None is the least for ``privacy``. The ledger accounts what it says.
    """

    k: int | None = 10
    privacy: KMeansPrivacy | None = None
    steps: int = 0
    radius: float | None = None
    center: bool = True
    client_points: int | None = None
    clips: Clips = Clips()
    sample: float | None = None
    margin: float = 1.0
    simplify: int = 0
    threshold: Threshold = "noise"
    diameter: Diameter | None = None
    ground: Ground | None = None
    places: int = 2000
    secure: bool = False
    starts: int = 20
    k_max: int = 20
    initialize: bool = True
    noise: StepNoise | None = None

    def __post_init__(self) -> None:
        leasts = {"k": 1, "steps": 0, "simplify": 0, "starts": 1, "k_max": 3, "client_points": 1, "places": 1}
        for name, least in leasts.items():
            value = getattr(self, name)
            if value is not None and (type(value) is not int or value < least):
                raise SettingError(f"{name}={value!r}; expected a whole number of at least {least}")
        for name, known in (("ground", (None, *get_args(Ground))), ("threshold", get_args(Threshold))):
            if getattr(self, name) not in known:
                raise SettingError(f"{name}={getattr(self, name)!r}; expected one of {known}")
        if self.ground is not None and (self.simplify or self.diameter is not None or self.radius is None):
            raise SettingError(
                f"ground={self.ground!r} is for want of server data: simplify and diameter are of server points, so "
                "leave them out; and radius=... must be given, as nothing else says how far points may lie"
            )
        if not 0 < self.margin <= 1:
            raise SettingError(f"margin={self.margin}; expected a number above 0, up to 1, such as 1/3")
        if self.sample is not None and not (type(self.sample) is float and 0 < self.sample <= 1):
            raise SettingError(f"sample={self.sample!r}; expected a share of the clients above 0, up to 1.0")
        if self.radius is not None:
            check_positive(self.radius, "radius", "points are clipped to it")
        if self.client_points is None and self.by_client:
            raise SettingError(
                "client-level privacy needs client_points: how many points a client typically has, as a public number "
                "(for example the cap that clients keep to); the bounds of what a client sends are set by it"
            )

    @property
    def by_client(self) -> bool:
        return self.privacy is not None and self.privacy.unit == "client"

    @cached_property
    def plan(self) -> StepNoise:
        """The noise of every query of a run. It depends on no data: whoever has the settings has the noise."""
        if self.noise is not None or self.privacy is None:
            return self.noise or StepNoise()
        queries = {"initialize": self.initialize, "histograms": self.histograms, "steps": self.steps}
        return calibrate(self.privacy, **queries, rate=self.sample or 1.0)

    @property
    def histograms(self) -> int:
        """How often weights of server points are asked for."""
        return 1 + self.simplify + (self.diameter is not None)

    # The clients' side. An array is sent in units of ``scale``. For client-level privacy that is a typical client's (T1
    # D.7.4), and the array is clipped to 1. Else it is 1, or for a secure sum the most that a client may have, and a
    # point's share follows from the radius, to which the task itself clips the points.

    @task
    def outer_product(
        self, client: Client, origin: Tensor, radius: Tensor, scale: Tensor, moves: Tensor | None = None
    ) -> Sent:
        """Step 1: Σ p pᵀ over the client's points, as a vector of the same norm (see the module's text)."""
        points = self._exact(clipped_points(client, origin, radius, moves))
        rows, columns, factor = triangle_layout(points.shape[1])
        return send(gram=(points.T @ points)[rows, columns] * factor / scale)

    @outer_product.into
    def _gram(self) -> list[Release]:
        return [self._sum("gram", self.plan.gram, gram_change)]

    @task
    def nearest_counts(
        self,
        client: Client,
        origin: Tensor,
        radius: Tensor,
        points: Tensor,
        scale: Tensor,
        basis: Tensor | None = None,
        moves: Tensor | None = None,
    ) -> Sent:
        """Step 2: w_q, how many of the client's points have ``points[q]`` nearest, in the subspace if there is one."""
        own = clipped_points(client, origin, radius, moves)
        nearest = nearest_center(own if basis is None else own @ basis, points)
        empty = torch.zeros(points.shape[0], dtype=points.dtype)
        return send(weights=empty.scatter_add(0, nearest, client.mask.to(points.dtype)) / scale)

    @nearest_counts.into
    def _weights(self) -> list[Release]:
        return [self._sum("weights", self.plan.weights, weight_change)]

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
        moves: Tensor | None = None,
    ) -> Sent:
        """Step 3 and a Lloyd step: m_j [k, d] and n_j [k] for the clusters around ``centers`` (in the subspace if there
        is a basis). For client-level privacy Step 3 sends the mean of each cluster, and whether it is there at all (T1
        D.7.4).
        """
        points = clipped_points(client, origin, radius, moves)
        places = points if basis is None else points @ basis
        member = (nearest_center(places, centers)[:, None] == torch.arange(centers.shape[0])) & client.mask[:, None]
        if basis is not None and self.margin < 1 and len(centers) > 1:
            first, second = torch.cdist(places, centers).topk(2, largest=False).values.T
            member &= (first <= self.margin * second)[:, None]
        points = self._exact(points)
        weight = member.to(points.dtype)
        sums, counts = weight.T @ points, weight.sum(0)
        if self.by_client and basis is not None:
            sums, counts = sums / counts.clamp(min=1.0)[:, None], (counts > 0).to(sums.dtype)
        return send(sums=sums / scale, counts=counts / count_scale)

    def _exact(self, points: Tensor) -> Tensor:
        """Points to be summed under noise, in double precision: rounding must not move a sum further than a point does.

        In single precision it would, from some ten thousand points on.
        """
        return points if self.noise is None and self.privacy is None else points.to(torch.float64)

    @cluster_sums.into
    def _sums(self) -> list[Release]:
        return [self._sum("sums", self.plan.sums, sum_change), self._sum("counts", self.plan.counts, count_change)]

    @task
    def lloyd_sums(self, client: Client, **inputs: Tensor) -> Sent:
        """``cluster_sums`` in a Lloyd step whose noise is not that of Step 3."""
        return self.cluster_sums(client, **inputs)

    @lloyd_sums.into
    def _lloyd_sums(self) -> list[Release]:
        sums, counts = self.plan.lloyd_sums, self.plan.lloyd_counts
        return [self._sum("sums", sums, sum_change), self._sum("counts", counts, count_change)]

    def _sum(self, name: str, noise: AdditiveNoise | None, change: Callable[[Inputs], float]) -> Sum:
        """A sum that one point changes by at most ``change``, or one client, in units of its scale, by at most 1."""
        clip = 1.0 if self.secure else None  # of a whole client, which only its scale has to reach
        if noise is None:
            return Sum(name, clip=clip, secure=self.secure)
        if self.by_client:
            return Sum(name, clip=1.0, noise=noise, unit="client", secure=self.secure)
        return Sum(name, clip=clip, noise=noise, sensitivity=change, unit="point", secure=self.secure, of_rows=True)

    # The server's side

    def fit(self, federation: Federation, server: Tensor | None, initial: Tensor | None = None) -> Clustering:
        """Cluster the federation's points. ``server``: None with ``ground``, which needs none. ``initial`` centres take
        FedDP-Init's place, with ``initialize=False``.
        """
        dimension = self._check(federation.roster, server, initial)
        points = torch.zeros(0, dimension) if server is None else server.to(torch.float32)
        origin = points.mean(0) if self.center and len(points) else torch.zeros(dimension)
        reach = self.radius or float(torch.linalg.vector_norm(points - origin, dim=1).max())
        run = ServerRun(self, federation, origin, reach, points - origin)
        if initial is None:
            if self.diameter is not None:
                run.reduce_diameter(self.diameter)
            centers = start = run.initialize()
        else:
            centers = start = initial.to(torch.float32) - origin
        for _ in range(self.steps):
            centers = run.refine(centers, centers)
        home = run.to_data(centers), run.to_data(start)
        return Clustering(*home, run.radius, run.used, run.sizes, run.errors, tuple(run.curve))

    def _check(self, roster: Roster, server: Tensor | None, initial: Tensor | None) -> int:
        """Refuse what cannot be clustered before anything is asked; gives the dimension."""
        if (initial is None) != self.initialize:
            given = "no initial centres" if initial is None else "initial centres"
            raise SettingError(
                f"initialize={self.initialize}, but fit got {given}; initial=... goes with initialize=False"
            )
        shape, total = roster.schema.shape, int(roster.bound.sum())
        wanted = self.k if self.k is not None else self.k_max
        if len(shape) != 1:
            raise SettingError(f"k-means clusters points with a list of features each, but a client's rows are {shape}")
        if (server is None) != (self.ground is not None):
            given = "no server data" if server is None else "server data"
            raise SettingError(
                f"ground={self.ground!r}, but fit got {given}; ground='lattice' or 'packing' takes the place of it"
            )
        if wanted > total:
            raise SettingError(f"k={wanted} clusters of {total} points in all: choose k between 1 and {total}")
        if server is not None:
            self._check_server(server, shape[0], wanted if initial is None else 1)
        if initial is not None and (initial.ndim != 2 or initial.shape[1] != shape[0]):
            raise SettingError(f"initial centres are {tuple(initial.shape)}; expected [k, {shape[0]}]")
        return shape[0]

    def _check_server(self, server: Tensor, dimension: int, wanted: int) -> None:
        if server.ndim != 2 or server.shape[1] != dimension:
            raise SettingError(
                f"the server data is {tuple(server.shape)}, but the clients' points have {dimension} features; "
                f"expected [points, {dimension}] with the features in the same order"
            )
        if len(server) == 0:
            raise SettingError("there is not a single server point; FedDP-Init finds its first centres among them")
        if not bool(torch.isfinite(server).all()):
            raise SettingError("the server data contains NaN or infinite values; leave those points out")
        if self.radius is None and bool((server == server[0]).all()):
            raise SettingError("all server points are identical, so they have no radius to clip to; give radius=...")
        distinct = len(torch.unique(server, dim=0)) if wanted > 1 else 1
        if distinct < wanted:
            raise SettingError(
                f"k={wanted} centres are started from the server data, which has only {distinct} distinct points "
                f"({len(server)} in all); choose k up to {distinct}, or give more server data"
            )
