"""From a source to a population: deal rows out to clients, divide each client's rows, say how inputs are scaled."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import torch
from numpy.random import Generator, default_rng
from torch import Tensor

from unalike.core.client import Clients
from unalike.core.notes import FLAG
from unalike.core.schema import Schema
from unalike.data.lazy import LazyPopulation
from unalike.data.partition.assignment import Assignment, assign, draw_kinds, select_names
from unalike.data.partition.schemes import Partition
from unalike.data.population import Population, Scaling
from unalike.data.rows import owners, rank, shuffle, stored_type
from unalike.data.source import Array, DataError, Source

# One generator for each decision, so that e.g. hiding more labels leaves the partition as it was.
_PARTITION, _SPLIT, _UNSEEN, _LABELED, _SHIFT = range(5)
_FEW = 4  # of fewer clients none is set aside, unless somebody asks for it


@dataclass(frozen=True)
class Division:
    """How a source's rows become clients; ``unalike.data.load`` explains the fields."""

    partition: str | Partition | None = None
    clients: int | None = None
    samples: int | None = None
    min_samples: int | None = None
    test: float | Literal["source"] | None = None
    validation: float = 0.0
    unseen: int | float | Sequence[int] | None = None
    labeled: float = 1.0
    rotate: Sequence[float] | None = None
    normalize: bool | Literal["private"] = True
    schema: Schema | None = None
    class_weights: str | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        if self.samples is not None and self.samples < 1:
            raise DataError(f"samples must be at least 1, got {self.samples}")
        fraction("validation", self.validation)


@dataclass(frozen=True)
class _Parts:
    """How many rows of each client are for training, validation and test, and which clients have enough."""

    train: Array
    validation: Array
    test: Array
    kept: Array  # positions of clients


def divide(source: Source, division: Division) -> LazyPopulation:
    """Deal a source's rows out to clients."""
    partition = division.partition
    if partition is None:
        partition = "iid" if source.client is None else "natural"
    assigned = assign(source, partition, division.clients, default_rng([division.seed, _PARTITION]))
    parts = _split_rows(source, assigned, division)
    scaling, shift, scale = _scaling(source, division.normalize, division.schema)
    y, per_client, turned = _shifted(source, assigned, division, parts.kept)
    weight = row_weights(source, assigned, y, parts.train, division.class_weights)
    clients = replace(_clients(source, assigned, y, parts.kept, scaling, shift, scale), weight=weight)
    if division.normalize and division.schema is not None:
        center, deviation = division.schema.target_center, division.schema.target_deviation
        clients = replace(clients, target_center=center, target_deviation=deviation)

    away = division.unseen if division.unseen is not None else 0 if source.whole else usual_unseen(len(parts.kept))
    have_labels = np.full(len(parts.kept), source.y is not None)
    if source.labeled is not None and assigned.natural is not None:
        have_labels &= source.labeled[assigned.natural[parts.kept]]
    seen, unseen, may_use = set_apart(have_labels, away, division.labeled, division.seed)

    start = np.cumsum(assigned.sizes) - assigned.sizes
    left_out = select_names(assigned.names, np.setdiff1d(np.arange(len(assigned.sizes)), parts.kept))
    population = Population(
        name=source.name,
        kind=source.kind,
        train=_part(clients, start, parts.train, parts.kept, may_use),
        validation=_part(clients, start + parts.train, parts.validation, parts.kept, may_use),
        test=_part(clients, start + parts.train + parts.validation, parts.test, parts.kept, have_labels),
        seen=torch.from_numpy(seen),
        unseen=torch.from_numpy(unseen),
        classes=source.classes,
        class_names=source.class_names,
        per_client=_tensors(per_client),
        shared=_tensors(source.shared),
        dropped=[*source.dropped, *left_out],
        incomplete=source.incomplete,
        columns=source.columns,
        partition=partition if isinstance(partition, str) else "",
        scaling=scaling,
        fill=source.fill,
        pooled=list(source.pooled) if division.schema is None else [],  # with one, they are its own
        row_ids=source.ids if source.ids is None or assigned.rows is None else source.ids[assigned.rows],
        column_reports=source.column_reports,
        notes=source.notes,
        network=source.network,
    )
    if division.schema is not None:
        population.check(division.schema)
    return LazyPopulation(source, assigned, parts.train, parts.kept, population, turned)


def _split_rows(source: Source, assigned: Assignment, division: Division) -> _Parts:
    """Order each client's rows as train, validation, test (changes ``assigned``)."""
    share, validation = test_share(source, division.test), division.validation
    if share is not None and share + validation >= 1:
        raise DataError(f"test ({share}) and validation ({validation}) together must leave rows to train on")
    rng = default_rng([division.seed, _SPLIT])
    test = order_parts(source, assigned, division.samples, share, validation, rng)
    sizes = assigned.sizes
    validating = share_of(sizes, validation, sizes - test)
    train = sizes - test - validating
    least = max(1, division.min_samples if division.min_samples is not None else 1 if share == 0 else 2)
    kept = np.flatnonzero((sizes >= least) & (train >= 1))
    if len(kept) == 0:
        raise DataError(
            f"{source.name}: no client has {least} rows with at least one to train on "
            f"({len(sizes)} clients, the largest with {int(sizes.max())} rows)"
        )
    return _Parts(train, validating, test, kept)


def _shifted(
    source: Source, assigned: Assignment, division: Division, kept: Array
) -> tuple[Array | None, dict[str, Array], tuple[Array, Sequence[float]] | None]:
    """Labels, what is known of each kept client, and each client's angle: by a rotation or a shift of concepts."""
    y = source.y if source.y is None or assigned.rows is None else source.y[assigned.rows]
    known = {} if assigned.natural is None else {k: v[assigned.natural[kept]] for k, v in source.per_client.items()}
    turned: tuple[Array, Sequence[float]] | None = None
    count, rng = len(assigned.sizes), default_rng([division.seed, _SHIFT])
    angles = division.rotate if division.rotate is not None else assigned.angles
    if angles is not None:
        which = draw_kinds(count, rng, len(angles), assigned.counts, "rotation", "angles")
        turned = which, angles
        known["rotation"] = np.asarray(angles, dtype=np.float32)[which[kept]]
    if assigned.clusters is not None and y is not None and source.classes is not None:
        rng = default_rng([division.seed, _SHIFT])
        which = draw_kinds(count, rng, assigned.clusters, assigned.counts, "concept-shift", "clusters")
        y = (y + np.repeat(which, assigned.sizes)) % source.classes
        known["cluster"] = which[kept]
    return y, known, turned


def _clients(
    source: Source,
    assigned: Assignment,
    y: Array | None,
    kept: Array,
    scaling: Scaling,
    shift: Tensor | None,
    scale: Tensor | None,
) -> Clients:
    """The kept clients with all labels, one row of zeros for all inputs, and no rows of their own yet."""
    if source.fill == "mean" and source.gaps and scaling == "none":
        raise DataError(
            f"{source.name}: values are missing, and with missing='mean' they count as the mean by which inputs are "
            f"scaled, but these inputs are not scaled; fill them in, or say missing='client' (the mean of the client's "
            f"own training rows) or missing='drop'{FLAG}",
            "data.options.missing",
        )
    known = source.known if source.known is None or assigned.rows is None else source.known[assigned.rows]
    blank = torch.from_numpy(np.zeros((1, *source.x.shape[1:]), stored_type(source.name, source.x, source.kind)))
    none = torch.zeros(len(kept), dtype=torch.int64)
    return Clients(
        x=blank.expand(len(source.x) if assigned.rows is None else len(assigned.rows), *blank.shape[1:]),
        y=None if y is None else torch.from_numpy(np.require(y, requirements=["C", "W"])),
        start=none,
        size=none,
        labeled=none.to(torch.bool),
        ids=torch.arange(len(kept)),
        names=assigned.names if len(kept) == len(assigned.sizes) else select_names(assigned.names, kept),
        shift=shift,
        scale=scale,
        known=None if known is None else torch.from_numpy(np.require(known, requirements=["C", "W"])),
        gaps=source.fill is not None and scaling != "none",
    )


def row_weights(
    source: Source, assigned: Assignment, y: Array | None, train: Array, class_weights: str | None
) -> Tensor | None:
    """[rows] how much each row counts in local training; None: all the same.

    ``class_weights``: "balanced", so that every class of a client has as much weight as its others, or public numbers
    by the names of classes, ``yes=10,no=1``. A weight column is multiplied in.
    """
    weight = source.weight if source.weight is None or assigned.rows is None else source.weight[assigned.rows]
    if class_weights is None:
        return None if weight is None else torch.from_numpy(np.require(weight, requirements=["C", "W"]))
    if y is None or source.classes is None:
        raise DataError(f"{source.name}: class_weights need classes, and there are none{FLAG}", "data.class_weights")
    if class_weights == "balanced":
        cell = owners(assigned.sizes) * source.classes + y
        used = rank(assigned.sizes) < np.repeat(train, assigned.sizes)
        if source.known is not None:
            used &= source.known if assigned.rows is None else source.known[assigned.rows]
        counts = np.bincount(cell[used], minlength=len(train) * source.classes).reshape(len(train), source.classes)
        usual = counts.sum(1, keepdims=True) / np.maximum(1, (counts > 0).sum(1, keepdims=True))
        made = (usual / np.maximum(1, counts)).reshape(-1)[cell]
    else:
        made = _class_weights(source, class_weights)[y]
    return torch.from_numpy((made if weight is None else made * weight).astype(np.float32))


def _class_weights(source: Source, text: str) -> Array:
    """[classes] the numbers of ``yes=10,no=1``."""
    names = list(map(str, source.class_names or range(source.classes or 0)))
    found = dict(part.rpartition("=")[::2] for part in text.split(","))
    try:
        numbers = np.array([float(found[name]) for name in names])
        if len(found) != len(names) or not (np.isfinite(numbers).all() and (numbers >= 0).all() and numbers.any()):
            raise ValueError
    except (KeyError, ValueError):
        expected = ",".join(f"{name}=1" for name in names[:4]) + (",…" if len(names) > 4 else "")
        raise DataError(
            f"{source.name}: class_weights = {text!r}{FLAG}: expected balanced, or a number for each class: {expected}",
            "data.class_weights",
        ) from None
    return numbers


def _part(clients: Clients, start: Array, size: Array, kept: Array, labeled: Array) -> Clients:
    """One part of the clients' rows."""
    first, count = torch.from_numpy(start[kept]), torch.from_numpy(size[kept])
    part = replace(clients, start=first, size=count, labeled=torch.from_numpy(labeled))
    return part if part.known is None else replace(part, labeled=part.label_counts() > 0)  # some may be elsewhere


def _tensors(arrays: Mapping[str, Array]) -> dict[str, Tensor]:
    return {key: torch.from_numpy(np.require(value, requirements="W")) for key, value in arrays.items()}


def _scaling(
    source: Source, normalize: bool | Literal["private"], schema: Schema | None
) -> tuple[Scaling, Tensor | None, Tensor | None]:
    """How inputs are scaled, and the constants where they are public. Nothing is computed from the rows here."""
    if not normalize or source.kind == "tokens":
        return "none", None, None
    if schema is not None and schema.shift is not None:
        return "public", schema.shift, schema.scale
    if source.normalize == "none":
        return "none", None, None
    if source.normalize == "published" and source.mean is not None and source.std is not None:
        return "public", torch.from_numpy(source.mean), torch.from_numpy((1 / source.std).astype(np.float32))
    return "private" if normalize == "private" else "asked", None, None


def test_share(source: Source, test: float | str | None) -> float | None:
    """The fraction of a client's rows to test on; None: the source's own test rows."""
    if test is None:
        return None if source.is_test is not None else 0.0 if source.whole else 0.2
    if test == "source":
        if source.is_test is None:
            raise DataError(f"{source.name} has no test rows of its own; give `test` as a fraction, e.g. 0.2")
        return None
    return fraction("test", test)


def fraction(name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 1:
        raise DataError(f"{name} must be a fraction of a client's rows, at least 0 and below 1, got {value!r}")
    return float(value)


def order_parts(
    source: Source, assigned: Assignment, samples: int | None, test: float | None, validation: float, rng: Generator
) -> Array:
    """Order each client's rows as train, validation, test (changes ``assigned``); gives each client's test rows."""
    if samples is not None or test or validation:
        assigned.rows = shuffle(assigned.rows, assigned.sizes, rng)
        if source.known is not None:
            assigned.rows = _spread_out(source.known[assigned.rows], assigned.rows, owners(assigned.sizes))
    if samples is not None and assigned.rows is not None:
        assigned.rows = assigned.rows[rank(assigned.sizes) < samples]
        assigned.sizes = np.minimum(assigned.sizes, samples)
    if test is not None:
        return share_of(assigned.sizes, test, assigned.sizes)
    if source.is_test is None:
        raise AssertionError("checked by test_share")
    flags = source.is_test if assigned.rows is None else source.is_test[assigned.rows]
    owner = owners(assigned.sizes)
    key = 2 * owner + flags
    if not bool((key[1:] >= key[:-1]).all()):
        order = np.argsort(key, kind="stable")
        assigned.rows = order if assigned.rows is None else assigned.rows[order]
    return np.bincount(owner[flags], minlength=len(assigned.sizes))


def _spread_out(known: Array, rows: Array, owner: Array) -> Array:
    """Each client's rows with its labeled ones at equal distances, so that every part gets its share of the labels."""
    kind = 2 * owner + known
    order = np.argsort(kind, kind="stable")
    counts = np.bincount(kind)
    place = np.empty(len(rows))
    place[order] = (rank(counts) + 0.5) / np.repeat(counts, counts)
    result: Array = rows[np.lexsort((place, owner))]
    return result


def share_of(sizes: Array, share: float, available: Array) -> Array:
    """``share`` of each client's rows, rounded; at least one row and at most all but one of those available."""
    if share == 0:
        return np.zeros_like(sizes)
    return np.clip(np.rint(sizes * share).astype(np.int64), 1, None).clip(max=np.maximum(available - 1, 0))


def set_apart(
    have_labels: Array, unseen: int | float | Sequence[int], labeled: float, seed: int
) -> tuple[Array, Array, Array]:
    """The positions of the clients that train and of those that arrive afterwards, and whose labels may be used."""
    seen, later = split_unseen(len(have_labels), unseen, default_rng([seed, _UNSEEN]))
    return seen, later, hide_labels(have_labels, seen, labeled, default_rng([seed, _LABELED]))


def usual_unseen(clients: int) -> float:
    """The share of clients that arrive afterwards, where nobody says."""
    return 0 if clients < _FEW else 0.1


def split_unseen(count: int, unseen: int | float | Sequence[int], rng: Generator) -> tuple[Array, Array]:
    if isinstance(unseen, bool):
        raise DataError("unseen must be a fraction, a number of clients or their positions, not a truth value")
    if isinstance(unseen, int | float):
        # Written so that NaN, which compares as False with everything, is refused too.
        if not 0 <= unseen < count + (unseen == 0) or (isinstance(unseen, float) and unseen >= 1):
            raise DataError(
                f"unseen must be a fraction below 1 or a number of clients below the {count} there are, got {unseen}"
            )
        number = unseen if isinstance(unseen, int) else min(count - 1, max(round(unseen * count), int(unseen > 0)))
        chosen = rng.permutation(count)[:number]
    else:
        chosen = np.asarray(unseen, dtype=np.int64)
        if len(np.unique(chosen)) != len(chosen) or len(chosen) >= count or not np.isin(chosen, range(count)).all():
            raise DataError(f"unseen must list different positions below {count} and leave a client to train on")
    hidden = np.zeros(count, dtype=bool)
    hidden[chosen] = True
    return np.flatnonzero(~hidden), np.flatnonzero(hidden)


def hide_labels(have: Array, seen: Array, share: float, rng: Generator) -> Array:
    """Whose labels may be used: a fraction ``share`` of the seen clients that have some, and every unseen one."""
    if not 0 <= share <= 1:
        raise DataError(f"labeled must be the fraction of training clients with labels, between 0 and 1, got {share!r}")
    candidates = seen[have[seen]]
    number = max(round(share * len(candidates)), int(share > 0 and len(candidates) > 0))
    may_use = have.copy()
    may_use[rng.permutation(candidates)[number:]] = False
    return may_use
