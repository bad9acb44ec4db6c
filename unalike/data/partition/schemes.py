"""Ways to deal samples out to clients.

A partition is a plain function ``partition(labels, clients, rng, **options)`` that gives a list of row indices for each
client; no row is given twice. Names and options are those of flwr-datasets where the two coincide. Dividing by natural
client ids and rotating images are not here but in ``unalike.data.build``: they need more than the labels.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any, Literal

import numpy as np
from numpy.random import Generator

from unalike.core.notes import FLAG
from unalike.data.partition.histograms import read_counts
from unalike.data.partition.mixture import MDMError, Mixture
from unalike.data.source import Array, DataError

Partition = Callable[..., list[Array]]


def iid(labels: Array, clients: int, rng: Generator) -> list[Array]:
    """Rows at random, in equal numbers (sizes differ by at most one)."""
    _enough(len(labels), clients, 1)
    return np.array_split(rng.permutation(len(labels)), clients)


def dirichlet(
    labels: Array, clients: int, rng: Generator, alpha: float = 0.5, min_partition_size: int = 10
) -> list[Array]:
    """Each class is divided among the clients in proportions drawn from Dir(alpha) (Yurochkin et al. 2019).

    A small ``alpha`` gives clients with few classes and very unequal sizes. Clients that get fewer than
    ``min_partition_size`` rows are filled up with rows taken at random from those that have more, so one draw is always
    enough.
    """
    _check("alpha", alpha, alpha > 0, "a positive number")
    _enough(len(labels), clients, min_partition_size)
    owner = np.empty(len(labels), dtype=np.int64)
    for rows in _by_class(labels):
        cuts = np.rint(np.cumsum(rng.dirichlet(np.full(clients, float(alpha)))) * len(rows))
        owner[rng.permutation(rows)] = np.searchsorted(cuts[:-1], np.arange(len(rows)), side="right")
    return _lists(_fill_up(owner, clients, min_partition_size, rng), clients)


def inner_dirichlet(
    labels: Array,
    clients: int,
    rng: Generator,
    alpha: float | Sequence[float] = 0.1,
    partition_size: int | None = None,
) -> list[Array]:
    """Each client draws its own class proportions from Dir(alpha) and gets equally many rows (Hsu et al. 2019).

    This is how T1 §4.4 and P2 §6.3 make clients. Rows are not given twice: when a class runs out, the proportions of
    the others are scaled up, so the last clients served deviate from their draw; a ``partition_size`` below
    rows / clients avoids that. ``alpha`` may be one number for each client, e.g. another one for clients that are kept
    unseen (T1 B.1.3).
    """
    alphas = np.broadcast_to(np.asarray(alpha, dtype=np.float64), (clients,))
    _check("alpha", alpha, bool((alphas > 0).all()), "positive, one number or one for each client")
    size = len(labels) // clients if partition_size is None else partition_size
    _enough(len(labels), clients, max(size, 1))
    pools = [rng.permutation(rows) for rows in _by_class(labels)]
    left = np.array([len(pool) for pool in pools])
    parts: list[Array] = [np.empty(0, dtype=np.int64)] * clients
    for client in rng.permutation(clients):
        share = rng.dirichlet(np.full(len(pools), alphas[client]))
        taken = draw_counts(size, share, left, rng)
        pieces = [pool[a - n : a] for pool, a, n in zip(pools, left, taken, strict=True)]
        left = left - taken
        parts[client] = np.concatenate(pieces)
    return parts


def pathological(
    labels: Array,
    clients: int,
    rng: Generator,
    num_classes_per_partition: int = 2,
    class_assignment_mode: Literal["random", "balanced", "deterministic", "first-deterministic"] = "random",
) -> list[Array]:
    """Each client gets a fixed number of classes; a class is divided evenly among those who got it (Scott, 2026).

    The classes are drawn at random for each client; or at random among those that the clients before it drew least
    (``balanced``, as the code of PeFLL and pFedHN deals them: with two of ten classes, any five clients in a row, from
    a multiple of five on, hold every class once); or ``deterministic`` (client i gets i, i+1, … modulo the number of
    classes), or only the first one so (``first-deterministic``). Rows of a class that no client drew stay unused; that
    happens with ``random`` alone, or with few clients.
    """
    groups = _by_class(labels)
    count, wanted = len(groups), num_classes_per_partition
    _check("num_classes_per_partition", wanted, 1 <= wanted <= count, f"between 1 and the {count} classes")
    chosen = np.empty((clients, wanted), dtype=np.int64)
    dealt = np.zeros(count)
    for client in range(clients):
        first = client % count
        if class_assignment_mode == "random":
            chosen[client] = rng.choice(count, wanted, replace=False)
        elif class_assignment_mode == "balanced":
            chosen[client] = np.argsort(dealt + rng.random(count))[:wanted]
            dealt[chosen[client]] += 1
        elif class_assignment_mode == "deterministic":
            chosen[client] = (first + np.arange(wanted)) % count
        elif class_assignment_mode == "first-deterministic":
            others = np.delete(np.arange(count), first)
            chosen[client] = np.append(first, rng.choice(others, wanted - 1, replace=False))
        else:
            modes = "'random', 'balanced', 'deterministic' or 'first-deterministic'"
            raise DataError(f"class_assignment_mode must be {modes}, got {class_assignment_mode!r}")
    owner = np.full(len(labels), -1, dtype=np.int64)
    for number, rows in enumerate(groups):
        takers = np.flatnonzero((chosen == number).any(axis=1))
        if len(takers) > len(rows):
            raise DataError(
                f"pathological partition: {len(takers)} clients drew a class that has only {len(rows)} rows; "
                f"use fewer clients or fewer classes for each"
            )
        if len(takers):
            owner[rng.permutation(rows)] = takers[np.arange(len(rows)) * len(takers) // len(rows)]
    return _lists(owner, clients)


def shards(
    labels: Array,
    clients: int,
    rng: Generator,
    num_shards_per_partition: int = 2,
    shard_size: int | None = None,
    keep_incomplete_shard: bool = False,
) -> list[Array]:
    """Rows sorted by label are cut into equal shards, and each client gets some at random (McMahan et al. 2017).

    Rows left over after the last whole shard are unused, or go to random clients with ``keep_incomplete_shard``.
    """
    per_client = num_shards_per_partition
    _check("num_shards_per_partition", per_client, per_client >= 1, "at least 1")
    size = len(labels) // (clients * per_client) if shard_size is None else shard_size
    _check("shard_size", size, size >= 1 or shard_size is None, "at least 1")
    _enough(len(labels), clients, max(1, size) * per_client)
    shuffled = rng.permutation(len(labels))
    by_label = shuffled[np.argsort(labels[shuffled], kind="stable")]
    whole = len(labels) // size
    drawn = rng.permutation(whole)[: clients * per_client].reshape(clients, per_client)
    pieces = by_label[: whole * size].reshape(whole, size)
    parts: list[Array] = [pieces[row].reshape(-1) for row in drawn]
    if keep_incomplete_shard:
        for row in by_label[whole * size :]:
            lucky = int(rng.integers(clients))
            parts[lucky] = np.append(parts[lucky], row)
    return parts


def size_skew(
    labels: Array,
    clients: int,
    rng: Generator,
    distribution: Literal["lognormal", "exponential", "linear", "square"] = "lognormal",
    sigma: float = 1.0,
    min_partition_size: int = 1,
) -> list[Array]:
    """Rows at random, in unequal numbers: proportional to lognormal(0, sigma) or exponential draws, or to i or i²."""
    _enough(len(labels), clients, min_partition_size)
    number = np.arange(1, clients + 1, dtype=np.float64)
    if distribution == "lognormal":
        _check("sigma", sigma, sigma >= 0, "not negative")
        weight = rng.lognormal(0.0, sigma, clients)
    elif distribution == "exponential":
        weight = rng.exponential(1.0, clients)
    elif distribution == "linear":
        weight = number
    elif distribution == "square":
        weight = number**2
    else:
        known = "'lognormal', 'exponential', 'linear' or 'square'"
        raise DataError(f"size-skew: the distribution must be {known}, got {distribution!r}")
    cuts = np.rint(np.cumsum(weight) / weight.sum() * len(labels))
    owner = np.empty(len(labels), dtype=np.int64)
    owner[rng.permutation(len(labels))] = np.searchsorted(cuts[:-1], np.arange(len(labels)), side="right")
    return _lists(_fill_up(owner, clients, min_partition_size, rng), clients)


def mdm(labels: Array, clients: int, rng: Generator, file: str, mode: Literal["mdm", "iid"] = "mdm") -> list[Array]:
    """Clients like those that a mixture of Dirichlet-multinomials was fitted on: ``mdm:FILE`` (Scott, 2026).

    ``unalike mdm --out FILE`` writes the mixture. Sizes come from it too; ``mode="iid"`` takes only the sizes.
    A mixture over other features than the label divides by those: ``build`` hands their categories in as the labels.
    """
    if mode not in ("mdm", "iid"):
        raise DataError(f"mode must be 'mdm' or 'iid', got {mode!r}")
    return (mdm_partition if mode == "mdm" else iid_partition)(labels, clients, rng, Mixture.load(file))


def conditional(labels: Array, clients: int, rng: Generator, file: str) -> list[Array]:
    """Conditionally IID clients (Scott, 2026): the first histograms of ``conditional:FILE`` (CSV, NPZ or NPY)."""
    counts = read_counts(file).long().numpy()
    if clients > len(counts):
        raise MDMError(
            f"{file} has {len(counts)} histograms, for {clients} clients: use at most that many clients{FLAG}",
            "data.clients",
        )
    return conditional_partition(labels, counts[:clients], rng)


PARTITIONS: dict[str, Partition] = {
    "iid": iid,
    "dirichlet": dirichlet,
    "inner-dirichlet": inner_dirichlet,
    "pathological": pathological,
    "shards": shards,
    "size-skew": size_skew,
    "mdm": mdm,
    "conditional": conditional,
}
NEED_CLASSES = frozenset(
    {"dirichlet", "inner-dirichlet", "pathological", "shards", "mdm", "conditional", "concept-shift"}
)


def _by_class(labels: Array) -> list[Array]:
    """The rows of each class that occurs, classes in increasing order."""
    order = np.argsort(labels, kind="stable")
    cuts = np.flatnonzero(np.diff(labels[order])) + 1
    return np.split(order, cuts)


def _lists(owner: Array, clients: int) -> list[Array]:
    """Row indices of each client from the owner of each row (-1: nobody)."""
    order = np.argsort(owner, kind="stable")
    cuts = np.searchsorted(owner[order], np.arange(clients + 1))
    return [order[a:b] for a, b in pairwise(cuts)]


def _fill_up(owner: Array, clients: int, least: int, rng: Generator) -> Array:
    """Bring every client to ``least`` rows with rows that others have beyond theirs, chosen at random."""
    sizes = np.bincount(owner, minlength=clients)
    needed = np.maximum(least - sizes, 0)
    if not needed.any():
        return owner
    shuffled = rng.permutation(len(owner))
    order = shuffled[np.argsort(owner[shuffled], kind="stable")]  # grouped by owner, at random inside a group
    rank = np.arange(len(owner)) - np.repeat(np.cumsum(sizes) - sizes, sizes)
    spare = order[rank >= least]  # at least needed.sum() of them, because rows >= clients * least
    moved = owner.copy()
    moved[rng.permutation(spare)[: needed.sum()]] = np.repeat(np.arange(clients), needed)
    return moved


def _enough(rows: int, clients: int, least: int) -> None:
    if clients < 1:
        raise DataError(f"the number of clients must be at least 1, got {clients}")
    if clients * least > rows:
        raise DataError(
            f"{rows} rows cannot give each of {clients} clients {least}: use at most {rows // max(1, least)} clients, "
            f"or ask for fewer rows each"
        )


def _check(name: str, value: Any, good: bool, wanted: str) -> None:
    if not good:
        raise DataError(f"{name} must be {wanted}, got {value!r}")


def mdm_partition(labels: Array, clients: int, rng: Generator, mixture: Mixture) -> list[Array]:
    """Clients like those of the mixture: each draws its size and its class shares p, then its rows by p.

    When a class runs out, a client takes its remaining rows by its own p over the classes that are left, and by what
    there is if all its classes have run out; so the last clients served deviate a little from their draw.
    """
    pools = _pools(labels, mixture.categories, rng)
    sizes, shares = mixture.draw(clients, rng)
    _enough_rows(sizes, len(labels), clients, mixture.mean_size)
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
    _enough_rows(sizes, len(labels), clients, mixture.mean_size)
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


def _enough_rows(sizes: Array, rows: int, clients: int, mean: float) -> None:
    if sizes.sum() > rows:
        raise MDMError(
            f"{clients} clients of this mixture hold {int(sizes.sum())} rows, but there are {rows}: use at most about "
            f"{int(0.95 * rows / mean)} clients"
        )
