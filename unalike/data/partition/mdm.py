"""Simulated clients out of the server's own data (T1 §3.4).

Three ways to deal out rows with labels: like a fitted mixture (*MDM*), at random with the true client sizes only
(*fully IID*), and with exactly the true clients' histograms (*conditionally IID*, an oracle: the server would have to
see them).
No row is given twice, so one client's test rows are never another's training rows.
"""

from __future__ import annotations

import numpy as np
from numpy.random import Generator

from unalike.data.partition.mixture import MDMError, Mixture
from unalike.data.source import Array


def mdm_partition(labels: Array, clients: int, rng: Generator, mixture: Mixture) -> list[Array]:
    """Clients like those of the mixture: each draws its size and its class shares p, then its rows by p.

    When a class runs out, a client takes its remaining rows by its own p over the classes that are left, and by what
    there is if all its classes have run out; so the last clients served deviate a little from their draw.
    """
    pools = _pools(labels, mixture.categories, rng)
    sizes, shares = mixture.draw(clients, rng)
    _enough(sizes, len(labels), clients, mixture.mean_size)
    taken = np.zeros(len(pools), dtype=np.int64)
    stock = np.array([len(pool) for pool in pools])
    parts = []
    for size, share in zip(sizes, shares, strict=True):
        counts = draw_counts(int(size), share, stock - taken, rng)
        parts.append(_take(pools, taken, counts))
        taken += counts
    return parts


def draw_counts(size: int, share: Array, stock: Array, rng: Generator) -> Array:
    """How many rows of each class a client gets: drawn by its class shares, and never more than there are.

    When a class runs out, the shares of the others are scaled up; if all its classes have, it gets what there is.
    """
    counts = np.zeros(len(stock), dtype=np.int64)
    while (missing := size - int(counts.sum())) > 0:
        weight = np.where(stock > counts, share, 0.0)
        if weight.sum() <= 0:
            weight = (stock - counts).astype(np.float64)
        counts = np.minimum(counts + rng.multinomial(missing, weight / weight.sum()), stock)
    return counts


def iid_partition(labels: Array, clients: int, rng: Generator, mixture: Mixture) -> list[Array]:
    """Fully IID clients: sizes as the mixture has them, rows at random."""
    sizes, _ = mixture.draw(clients, rng)
    _enough(sizes, len(labels), clients, mixture.mean_size)
    order = rng.permutation(len(labels))
    return [np.asarray(part) for part in np.split(order[: sizes.sum()], np.cumsum(sizes)[:-1])]


def conditional_partition(labels: Array, counts: Array, rng: Generator) -> list[Array]:
    """Conditionally IID clients: one for each true histogram [clients, C], with rows at random inside a class."""
    pools = _pools(labels, counts.shape[1], rng)
    short = counts.sum(0) - np.array([len(pool) for pool in pools])
    if (short > 0).any():
        worst = int(short.argmax())
        raise MDMError(
            f"the true clients hold {int(short[worst])} more rows of class {worst} than the server; use fewer clients"
        )
    taken = np.zeros(len(pools), dtype=np.int64)
    parts = []
    for row in counts:
        parts.append(_take(pools, taken, row))
        taken += row
    return parts


def _pools(labels: Array, categories: int, rng: Generator) -> list[Array]:
    """The rows of each class, shuffled."""
    if labels.size and int(labels.max()) >= categories:
        raise MDMError(f"the data has a class {int(labels.max())}, but the mixture knows {categories} categories only")
    return [rng.permutation(np.flatnonzero(labels == category)) for category in range(categories)]


def _take(pools: list[Array], taken: Array, counts: Array) -> Array:
    return np.concatenate([pool[a : a + n] for pool, a, n in zip(pools, taken, counts, strict=True)])


def _enough(sizes: Array, rows: int, clients: int, mean: float) -> None:
    if sizes.sum() > rows:
        raise MDMError(
            f"{clients} clients of this mixture hold {int(sizes.sum())} rows, but there are {rows}: use at most about "
            f"{int(0.95 * rows / mean)} clients"
        )
