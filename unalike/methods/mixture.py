"""Clusters of clients as a Gaussian mixture of their first updates (T2 §4.5.5)."""

from __future__ import annotations

import math
import warnings
from typing import NamedTuple

import torch
from torch import Tensor

COMPONENTS = 2  # of the PCA of first updates
STARTS = 10  # of a Gaussian mixture


class SoftClusters(NamedTuple):
    """A Gaussian mixture of clients' first updates."""

    pi: Tensor  # [C, M]
    mss: float  # the smallest separation ‖μ_i − μ_j‖ / (2·max(σ_i, σ_j)) of two components
    mpo: float  # the largest overlap 1 − erf(separation/√2)
    points: Tensor  # [C, 2] the updates' principal components, on which it was fitted


def mixture_of(updates: Tensor, clusters: int | None, most: int, seed: int) -> SoftClusters:
    """The Gaussian mixture of updates [C, p] with M components, or with the M of the largest MSS (lines 9-11)."""
    count = len(updates)
    if min(count, clusters or 2) == 1:
        alone = torch.ones(count, 1, dtype=torch.float64)
        return SoftClusters(alone, math.inf, 0.0, torch.zeros(count, COMPONENTS, dtype=torch.float64))
    points = principal(updates)
    sizes = range(2, min(most, count) + 1) if clusters is None else [min(clusters, count)]
    return max((_mixture(points, m, seed) for m in sizes), key=lambda one: one.mss)


def principal(updates: Tensor) -> Tensor:
    """[C, 2] the first principal components of updates, over their own spread; PCA is fitted to what it is applied to.

    From the Gram matrix [C, C], because a model has far more parameters than there are clients.
    """
    centred = updates.to(torch.float64) - updates.to(torch.float64).mean(0)
    squares, vectors = torch.linalg.eigh(centred @ centred.T)
    points = vectors[:, -COMPONENTS:].flip(1) * squares[-COMPONENTS:].flip(0).clamp(min=0).sqrt()
    points = points * points.gather(0, points.abs().argmax(0, keepdim=True)).sign()  # a sign that no rounding changes
    return points / points.std(correction=0).clamp(min=1e-300)


def _mixture(points: Tensor, count: int, seed: int) -> SoftClusters:
    from sklearn.exceptions import ConvergenceWarning
    from sklearn.mixture import GaussianMixture

    fitted = GaussianMixture(
        count, covariance_type="spherical", init_params="k-means++", n_init=STARTS, random_state=seed
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)  # the best of several starts counts
        pi = torch.from_numpy(fitted.fit(points.numpy()).predict_proba(points.numpy()))
    mu, sigma = torch.from_numpy(fitted.means_), torch.from_numpy(fitted.covariances_).sqrt()
    pi = pi[:, mu[:, 0].argsort()]  # several starts end alike but for the order, and rounding chooses among them
    i, j = torch.triu_indices(count, count, 1)
    separation = float(((mu[i] - mu[j]).norm(dim=1) / (2 * torch.maximum(sigma[i], sigma[j]))).min())
    return SoftClusters(pi, separation, 1 - math.erf(separation / math.sqrt(2)), points)
