"""How near simulated clients are to the true ones (T1 §3.4)."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import linear_sum_assignment
from scipy.spatial.distance import cdist

from unalike.data.partition.mixture import MDMError, Mixture

Array = NDArray[Any]


def client_distance(first: Array, second: Array) -> float:
    """How unlike two groups of clients are: the mean total variation between a client of one group and its partner in
    the other, where partners are chosen to make it least (the Wasserstein distance between the two groups of shares).

    Histograms [n, C]; equally many in both groups. 0: the same clients; 1: no category in common.
    """
    if first.shape != second.shape:
        raise MDMError(f"expected two equally large groups of histograms, got {first.shape} and {second.shape}")
    p, q = (group / group.sum(1, keepdims=True) for group in (first, second))
    cost = cdist(p, q, "cityblock") / 2
    rows, columns = linear_sum_assignment(cost)
    return float(cost[rows, columns].mean())


def compare(true: Array, mixture: Mixture, seed: int, most: int = 1000) -> tuple[dict[str, float], dict[str, Array]]:
    """Distances of MDM and fully IID clients from the true ones, and of the true ones' two halves from each other.

    A simulation's own view: it needs every true histogram. Groups are of one size, at most ``most``; the halves say
    what distance mere chance makes (rather more than at the full size, as they are smaller). Also gives the groups.
    """
    rng = np.random.default_rng([seed, 3])
    shuffled = true[rng.permutation(len(true))]
    if len(shuffled) < 4:
        raise MDMError(f"a comparison needs at least 4 clients, there are {len(shuffled)}")
    group = shuffled[:most]
    sizes = group.sum(1)
    pooled = true.sum(0) / true.sum()
    groups: dict[str, Array] = {
        "true": group,
        "mdm": mixture.sample(len(group), rng),
        "iid": rng.multinomial(sizes, np.broadcast_to(pooled, (len(group), len(pooled)))),
    }
    half = len(group) // 2
    distances = {name: client_distance(group, groups[name]) for name in ("mdm", "iid")}
    distances["halves_of_true"] = client_distance(group[:half], group[half : 2 * half])
    return distances, groups
