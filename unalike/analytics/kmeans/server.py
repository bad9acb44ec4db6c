"""Plain k-means at the server, on points that are its own: weighted, with several starts, and the elbow of its cost."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch
from threadpoolctl import threadpool_limits  # type: ignore[import-untyped]
from torch import Tensor

_SMALL = 2000  # points or dimensions below which one thread is best


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
