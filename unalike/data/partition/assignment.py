"""Partitions by name: which rows each client gets, and shifts by client: turned images or labels moved on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.random import Generator

from unalike.data import spec
from unalike.data.partition.features import categories
from unalike.data.partition.mixture import Mixture
from unalike.data.partition.schemes import NEED_CLASSES, PARTITIONS, Partition, iid
from unalike.data.rows import group
from unalike.data.source import Array, DataError, Names, Source

QUARTERS = (0, 90, 180, 270)  # T1 §5.6.1
_MOST_CLIENTS, _ROWS_EACH = 100, 40  # unless asked for otherwise


def natural(group_size: int = 1) -> None:
    """The source's own clients (writer, role, district, county, a file's client column).

    ``clients`` of them at random, or all; ``group_size`` merges that many, chosen at random, into one client.
    """


def rotation(angles: Sequence[float] = QUARTERS, counts: Sequence[int] | None = None) -> None:
    """Rows at random in equal numbers, and each client turns all its images by an angle of its own (Scott, 2026).

    The angle is drawn for each client, or ``counts`` says how many clients get each.
    """


def concept_shift(clusters: int = 4, counts: Sequence[int] | None = None) -> None:
    """Rows at random in equal numbers, and clients of cluster c call class y (y + c) mod classes (Malekmohammadi).

    The cluster is drawn for each client, or ``counts`` says how many clients are in each.
    """


_KNOWN: dict[str, Callable[..., Any]] = {
    "natural": natural,
    **PARTITIONS,
    "rotation": rotation,
    "concept-shift": concept_shift,
}


def list_partitions() -> dict[str, str]:
    """Every partition's name with one line about it."""
    return {name: (function.__doc__ or "").strip().splitlines()[0] for name, function in _KNOWN.items()}


def short_form(partition: str) -> str:
    """The partition with those options only that are no defaults: ``pathological:2`` is ``pathological``."""
    name, options = _named(partition)
    defaults = spec.options(_KNOWN[name])
    return spec.written(name, {key: value for key, value in options.items() if value != defaults[key].default})


def _named(partition: str) -> tuple[str, dict[str, Any]]:
    """A partition's name and the options that are given."""
    name, values, named = spec.parse(partition)
    if name not in _KNOWN:
        raise spec.unknown("partition", name, list(_KNOWN))
    hidden = 3 if name in PARTITIONS else 0
    return name, spec.bind(f"partition {name!r}", _KNOWN[name], values, named, hidden=hidden)


@dataclass
class Assignment:
    """Which rows each client gets: rows in the order of their clients (None: as in the source), and client sizes."""

    rows: Array | None
    sizes: Array
    natural: Array | None = None  # [clients]: its number in the source
    names: Sequence[str] | None = None
    angles: Sequence[float] | None = None  # of a rotation
    clusters: int | None = None  # of a concept shift
    counts: Sequence[int] | None = None  # clients of each angle or cluster


def assign(source: Source, partition: str | Partition, clients: int | None, rng: Generator) -> Assignment:
    """Rows to clients by the named partition."""
    count = clients or max(1, min(_MOST_CLIENTS, len(source.x) // _ROWS_EACH))
    if callable(partition):
        return _from_lists(partition(_labels(source, ""), count, rng), source)
    name, options = _named(partition)
    if name == "natural":
        return _natural(source, clients, rng, **options)
    if name in ("rotation", "concept-shift"):
        assigned = _from_lists(iid(_labels(source, name), count, rng), source)
        counts = options.get("counts")
        if name == "rotation":
            assigned.angles = _many(options.get("angles", QUARTERS))
        else:
            assigned.clusters = int(options.get("clusters", 4))
        assigned.counts = None if counts is None else _many(counts)
        return assigned
    labels = _mdm_categories(source, options) if name == "mdm" else _labels(source, name)
    return _from_lists(PARTITIONS[name](labels, count, rng, **options), source)


def _mdm_categories(source: Source, options: dict[str, Any]) -> Array:
    """What a fitted mixture divides by: the label, or the features that it is over."""
    features = Mixture.load(options["file"]).features if "file" in options else ()
    return categories(features, source.x, source.y, source.columns) if features else _labels(source, "mdm")


def _many(value: Any) -> Any:
    """A list; ``90`` is typed for a list of one."""
    return [value] if isinstance(value, int | float) else value


def _labels(source: Source, partition: str) -> Array:
    """What a partition divides by; refused where dealing anew would make no sense."""
    if source.labeled is not None and not source.labeled.all():
        raise DataError(
            f"{source.name}: some clients have no labels, so rows cannot be dealt out anew; use partition 'natural'"
        )
    if source.known is not None and (partition in NEED_CLASSES or not partition):
        raise DataError(
            f"{source.name}: some rows have no label, so rows cannot be dealt out by class; use partition 'iid', "
            f"'size-skew' or 'natural'"
        )
    if source.y is None or source.classes is None:
        if partition in NEED_CLASSES:
            what = "no labels" if source.y is None else "numbers as targets, not classes"
            usable = "'iid', 'size-skew' or 'natural'"
            raise DataError(f"{source.name} has {what}; partition {partition!r} divides by class: use {usable}")
        return np.zeros(len(source.x), dtype=np.int64)
    return source.y


def _from_lists(lists: list[Array], source: Source) -> Assignment:
    sizes = np.array([len(part) for part in lists], dtype=np.int64)
    rows = np.concatenate(lists).astype(np.int64)
    if len(rows) and (rows.min() < 0 or rows.max() >= len(source.x) or np.bincount(rows).max() > 1):
        raise DataError("a partition must give each row index at most once, between 0 and the number of rows")
    return Assignment(rows, sizes)


def _natural(source: Source, clients: int | None, rng: Generator, group_size: int = 1) -> Assignment:
    if source.client is None:
        raise DataError(f"{source.name} has no client ids; use a partition such as 'iid' or 'dirichlet:0.5'")
    if group_size < 1:
        raise DataError(f"group_size must be at least 1, got {group_size}")
    count = source.clients or 0
    names = source.client_names
    wanted = count // group_size if clients is None else clients
    if not 1 <= wanted <= count // group_size:
        raise DataError(
            f"{source.name} has {count} natural clients, which gives at most {count // group_size} "
            f"in groups of {group_size}; {wanted} were asked for"
        )
    if wanted == count:
        rows, sizes = group(source.client, count)
        return Assignment(rows, sizes, np.arange(count), names)
    drawn = rng.permutation(count)[: wanted * group_size].reshape(wanted, group_size)
    drawn = drawn[np.argsort(drawn.min(axis=1))]
    owner = np.full(count, -1, dtype=np.int64)
    owner[drawn] = np.arange(wanted)[:, None]
    rows, sizes = group(owner[source.client], wanted)
    if group_size == 1:
        return Assignment(rows, sizes, drawn[:, 0], select_names(names, drawn[:, 0]))
    if source.labeled is not None and not source.labeled.all():
        raise DataError(f"{source.name}: some clients have no labels, so clients cannot be merged into groups")
    known = names or Names(np.arange(count))
    return Assignment(rows, sizes, None, ["+".join(known[int(i)] for i in row) for row in drawn])


def select_names(names: Sequence[str] | None, index: Array) -> Sequence[str]:
    """The names at these positions; a client without a name keeps its number."""
    if names is None:
        return Names(index)
    return Names(names.values[index]) if isinstance(names, Names) else [names[int(i)] for i in index]


def draw_kinds(clients: int, rng: Generator, kinds: int, counts: Sequence[int] | None, name: str, what: str) -> Array:
    """One of so many kinds for each client: at random, or ``counts[k]`` clients of each (in random places)."""
    if kinds < 1:
        raise DataError(f"{name} needs {what}, at least one")
    if counts is None:
        return rng.integers(kinds, size=clients)
    if len(counts) != kinds or sum(counts) != clients:
        raise DataError(
            f"{name}: counts must name how many of the {clients} clients get each of the {kinds} {what}, "
            f"got {list(counts)} (sum {sum(counts)})"
        )
    return rng.permutation(np.repeat(np.arange(kinds), counts))


def rotate_clients(x: Array, sizes: Array, which: Array, angles: Sequence[float]) -> None:
    """Turn the images [rows, channels, height, width] of each client, in place; clients' rows follow one another."""
    if x.ndim != 4:
        raise DataError(f"rotation needs images [rows, channels, height, width], but x has shape {tuple(x.shape)}")
    group = np.repeat(which, sizes)
    for number, angle in enumerate(angles):
        rows = np.flatnonzero(group == number)
        if angle % 360 == 0 or len(rows) == 0:
            continue
        for piece in np.array_split(rows, max(1, len(rows) // 4096)):  # small pieces: little memory beside x
            x[piece] = rotate(x[piece], angle)


def rotate(images: Array, angle: float) -> Array:
    """Images turned counter-clockwise; quarter turns of squares are exact, others are interpolated linearly."""
    height, width = images.shape[-2:]
    if angle % 180 == 0 or (angle % 90 == 0 and height == width):
        return np.rot90(images, k=int(angle // 90), axes=(-2, -1))
    from scipy import ndimage  # here, because it takes long to import

    turned = ndimage.rotate(images.astype(np.float32), angle, axes=(-1, -2), reshape=False, order=1, mode="nearest")
    if images.dtype == np.uint8:
        turned = np.clip(np.rint(turned), 0, 255)
    result: Array = turned.astype(images.dtype)
    return result
