"""What FedDP-KMeans is compared with (T1 6.5 and D.7.3).

ServerKMeans++, ServerLloyds and SpherePacking start from centres that cost no privacy and spend it all on FedDP-Lloyds.
k-FED (Dennis et al., ICML 2021) shares every client's centres, and Optimal pools all points: neither is private.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from unalike.analytics.kmeans.algorithm import Clustering, FedDPKMeans
from unalike.analytics.kmeans.client import nearest_center
from unalike.analytics.kmeans.server import weighted_kmeans
from unalike.core.client import Clients
from unalike.core.vocabulary import Client, Federation, Sent, send, task
from unalike.privacy.checks import SettingError

_ATTEMPTS = 1000  # candidates for each centre of a sphere packing
_HALVINGS = 20  # steps of the binary search for the largest spheres


def server_kmeans_plus_plus(server: Tensor, k: int, seed: int) -> Tensor:
    """k server points chosen by k-means++."""
    from sklearn.cluster import kmeans_plusplus

    centers, _ = kmeans_plusplus(server.numpy(), k, random_state=seed)
    return torch.from_numpy(centers)


def server_lloyds(server: Tensor, k: int, seed: int) -> Tensor:
    """k-means of the server data."""
    return weighted_kmeans(server, None, k, 20, seed)[0]


def sphere_packing(server: Tensor, k: int, seed: int) -> Tensor:
    """Centres drawn from the cube [-Δ, Δ]^d, as far from its corners and from one another as can be (T1 D.7.3).

    A distance a is feasible if k centres are found, with 1,000 attempts each, that are at least a from all corners and
    2a from each other; the largest feasible a is found by binary search. Only Δ depends on data, the server's.
    """
    random = np.random.default_rng(seed)
    dimension = server.shape[1]
    radius = float(torch.linalg.vector_norm(server, dim=1).max())
    low, high = 0.0, radius * dimension**0.5
    best = _pack(random, k, dimension, radius, low)
    if best is None:
        raise SettingError(f"no {k} centres were found in a cube of half-width {radius}; give other server data")
    for _ in range(_HALVINGS):
        middle = 0.5 * (low + high)
        packed = _pack(random, k, dimension, radius, middle)
        if packed is None:
            high = middle
        else:
            low, best = middle, packed
    return torch.from_numpy(best.astype(np.float32))


def _pack(random: np.random.Generator, k: int, dimension: int, radius: float, a: float) -> np.ndarray | None:
    centers = np.empty((0, dimension))
    for _ in range(k):
        candidates = random.uniform(-radius, radius, (_ATTEMPTS, dimension))
        good = np.linalg.norm(radius - np.abs(candidates), axis=1) >= a  # the nearest corner has the signs of the point
        if len(centers):
            square = (candidates**2).sum(1)[:, None] - 2 * candidates @ centers.T + (centers**2).sum(1)
            good &= square.min(axis=1) >= 4 * a * a
        if not good.any():
            return None
        centers = np.concatenate([centers, candidates[np.argmax(good)][None]])
    return centers


INITIAL: dict[str, Callable[[Tensor, int, int], Tensor]] = {
    "ServerKMeans++": server_kmeans_plus_plus,
    "ServerLloyds": server_lloyds,
    "SpherePacking": sphere_packing,
}
"""Initial centres (server data, k, seed) -> [k, d] that no client is asked for."""


def run_baseline(name: str, method: FedDPKMeans, federation: Federation, server: Tensor) -> Clustering:
    """A baseline's own centres, refined by ``method.steps`` of FedDP-Lloyds with the whole budget of ``method``."""
    if method.k is None:
        raise SettingError("a baseline needs a given k: only FedDP-Init can choose it by the elbow")
    if method.k > len(server):
        raise SettingError(f"k={method.k} centres are taken from the server data, which has only {len(server)} points")
    return replace(method, simplify=0, diameter=None, initialize=False).fit(
        federation, server, INITIAL[name](server, method.k, federation.seed)
    )


@dataclass(frozen=True)
class KFed:
    """k-FED: all clients cluster their own points once, the server clusters their centres. Not private: ε = ∞.

    The server weighs a centre by its points and takes the best of several runs of k-means, where the paper does
    one step of Lloyd's algorithm from one client's centres.
    """

    k: int
    rounds: int = 20

    @task
    def local_centers(self, client: Client) -> Sent:
        """k-means++ and Lloyd's algorithm on the client's own points; sends centres and sizes."""
        points, own = client.x, client.mask
        far = torch.full((client.capacity,), torch.inf)
        found = []
        for _ in range(self.k):  # k-means++: the next centre with probability proportional to the squared distance
            weight = torch.where(own, torch.where(torch.isinf(far), 1.0, far), 0.0)
            total = torch.cumsum(weight, 0)
            pick = torch.searchsorted(total, client.draws.uniform(1) * total[-1], right=True)
            point = torch.index_select(points, 0, pick.clamp(max=client.capacity - 1))[0]
            found.append(point)
            far = torch.minimum(far, (points - point).square().sum(1))
        now = torch.stack(found)
        size = torch.zeros(self.k)
        for _ in range(self.rounds):
            member = ((nearest_center(points, now)[:, None] == torch.arange(self.k)) & own[:, None]).to(points.dtype)
            size = member.sum(0)
            now = torch.where(size[:, None] > 0, member.T @ points / size.clamp(min=1.0)[:, None], now)
        return send(centers=now, size=size)

    def fit(self, federation: Federation) -> Tensor:
        """Centres [k, d]."""
        replies = federation.everyone().ask(self.local_centers)
        size = replies["size"].flatten()
        centers = replies["centers"].flatten(0, 1)[size > 0]
        if len(torch.unique(centers, dim=0)) < self.k:
            raise SettingError(
                f"the clients have fewer than k={self.k} different centres among them; choose a smaller k"
            )
        return weighted_kmeans(centers, size[size > 0], self.k, 10, federation.seed)[0]


def pooled_points(clients: Clients) -> Tensor:
    """All clients' points in one array, as tasks see them: what only a simulation can do."""
    points = clients.x[clients.pool_rows()[0]].to(torch.float32)
    if clients.shift is not None and clients.scale is not None:
        points = (points - clients.shift) * clients.scale
    return points


def optimal(clients: Clients, k: int, starts: int = 10, seed: int = 0, near: Sequence[Tensor] = ()) -> Tensor:
    """Non-private k-means of all points together: the best of ``starts`` runs, and of one from each of ``near``."""
    from sklearn.cluster import KMeans

    points = pooled_points(clients).numpy()
    runs = [KMeans(k, n_init=starts, random_state=seed), *(KMeans(k, init=one.numpy(), n_init=1) for one in near)]
    best = min((one.fit(points) for one in runs), key=lambda fitted: float(fitted.inertia_))
    return torch.from_numpy(best.cluster_centers_).to(torch.float32)
