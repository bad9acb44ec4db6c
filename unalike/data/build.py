"""From a source to a population: deal rows out to clients, divide each client's rows, say how inputs are scaled."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import torch
from numpy.random import Generator, default_rng
from torch import Tensor

from unalike.core.client import Clients
from unalike.core.request import Part
from unalike.core.schema import Schema
from unalike.data import spec
from unalike.data.partition.features import categories
from unalike.data.partition.mixture import Mixture
from unalike.data.partition.schemes import NEED_CLASSES, PARTITIONS, Partition, iid
from unalike.data.partition.shift import QUARTERS, draw_kinds, rotate_clients
from unalike.data.population import Population, Scaling
from unalike.data.rows import gather, group, in_file, owners, rank, shuffle, stored_type
from unalike.data.source import FILLED, Array, DataError, Names, Source

# One generator for each decision, so that e.g. hiding more labels leaves the partition as it was.
_PARTITION, _SPLIT, _UNSEEN, _LABELED, _SHIFT = range(5)
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
class _Dealt:
    """Rows in the order of their clients (None: as in the source), client sizes, and the natural client of each."""

    rows: Array | None
    sizes: Array
    natural: Array | None = None  # [clients]: its number in the source
    names: Sequence[str] | None = None
    angles: Sequence[float] | None = None  # of a rotation
    clusters: int | None = None  # of a concept shift
    counts: Sequence[int] | None = None  # clients of each angle or cluster


class LaidOut:
    """Rows dealt out to clients, whose inputs are still in the source: they are put together for whom they are wanted.

    ``facts`` is the population with all that is known but the inputs; its ``x`` is one row of zeros for all.
    """

    def __init__(
        self,
        source: Source,
        dealt: _Dealt,
        kept: Array,
        facts: Population,
        turned: tuple[Array, Sequence[float]] | None,
    ) -> None:
        self.source, self.facts = source, facts
        self._rows, self._sizes, self._kept, self._turned = dealt.rows, dealt.sizes, kept, turned
        self._start = np.cumsum(dealt.sizes) - dealt.sizes

    @property
    def mapped(self) -> bool:
        """Are the inputs in a file, so that those of others need no memory?"""
        return in_file(self.source.x) is not None

    def population(self, overwrite: bool = False) -> Population:
        """The population with everybody's inputs; ``overwrite``: those of the source may be changed."""
        source = self.source
        x = gather(source.name, source.x, self._rows, source.kind, overwrite)
        if self._turned is not None:
            x = x.copy() if x is source.x and not overwrite else x
            rotate_clients(x, self._sizes, *self._turned)
        whole = torch.from_numpy(x)
        train, validation, test = (replace(part, x=whole) for part in self.facts.parts.values())
        return replace(self.facts, train=train, validation=validation, test=test)

    def chosen(self, positions: Tensor) -> dict[Part, Clients]:
        """The clients at these positions, with their own rows alone."""
        clients = self._kept[positions.numpy()]
        places = self._places(clients)
        x, index = torch.from_numpy(self._inputs(clients, places)), torch.from_numpy(places)
        own = torch.from_numpy(np.cumsum(self._sizes[clients]) - self._sizes[clients] - self._start[clients])
        made: dict[Part, Clients] = {}
        for name, part in self.facts.parts.items():
            some = part.select(positions)
            y, known = (None if one is None else one[index] for one in (part.y, part.known))
            made[name] = replace(some, x=x, y=y, known=known, start=some.start + own)
        return made

    def groups(self, rows: int) -> Iterator[dict[Part, Clients]]:
        """All clients in their order, some at a time with their own rows alone, about so many."""
        ends = np.cumsum(self._sizes[self._kept])
        first = 0
        while first < len(ends):
            before = 0 if first == 0 else ends[first - 1]
            last = max(first + 1, int(np.searchsorted(ends, before + rows, side="right")))
            yield self.chosen(torch.arange(first, last))
            first = last

    def pieces(self, rows: int) -> Iterator[Array]:
        """All inputs in their order, those of some clients at a time, about so many rows."""
        ends = np.cumsum(self._sizes)
        first = 0
        while first < len(ends):
            last = max(first + 1, int(np.searchsorted(ends, self._start[first] + rows, side="right")))
            clients = np.arange(first, last)
            yield self._inputs(clients, self._places(clients))
            first = last

    def _places(self, clients: Array) -> Array:
        """Where the rows of these clients are in the order of all."""
        sizes = self._sizes[clients]
        before = np.cumsum(sizes) - sizes
        places: Array = np.arange(int(sizes.sum())) + np.repeat(self._start[clients] - before, sizes)
        return places

    def _inputs(self, clients: Array, places: Array) -> Array:
        rows = places if self._rows is None else self._rows[places]
        x = gather(self.source.name, self.source.x, rows, self.source.kind)
        if self._turned is not None:
            which, angles = self._turned
            rotate_clients(x, self._sizes[clients], which[clients], angles)
        return x


def lay_out(
    source: Source,
    *,
    partition: str | Partition | None = None,
    clients: int | None = None,
    samples: int | None = None,
    min_samples: int | None = None,
    test: float | Literal["source"] | None = None,
    validation: float = 0.0,
    unseen: int | float | Sequence[int] | None = None,
    labeled: float = 1.0,
    rotate: Sequence[float] | None = None,
    normalize: bool | Literal["private"] = True,
    schema: Schema | None = None,
    seed: int = 0,
) -> LaidOut:
    """Deal a source's rows out to clients; ``unalike.data.load`` explains the arguments."""
    if samples is not None and samples < 1:
        raise DataError(f"samples must be at least 1, got {samples}")
    if partition is None:
        partition = "iid" if source.client is None else "natural"
    dealt = _deal(source, partition, clients, default_rng([seed, _PARTITION]))
    angles = rotate if rotate is not None else dealt.angles
    test_share = _test_share(source, test)
    _fraction("validation", validation)
    if test_share is not None and test_share + validation >= 1:
        raise DataError(f"test ({test_share}) and validation ({validation}) together must leave rows to train on")
    test_size = _order(source, dealt, samples, test_share, validation, default_rng([seed, _SPLIT]))
    sizes, start = dealt.sizes, np.cumsum(dealt.sizes) - dealt.sizes
    validation_size = _share_of(sizes, validation, sizes - test_size)
    train_size = sizes - test_size - validation_size
    least = min_samples if min_samples is not None else 1 if test_share == 0 else 2
    kept = np.flatnonzero((sizes >= max(1, least)) & (train_size >= 1))
    if len(kept) == 0:
        raise DataError(
            f"{source.name}: no client has {max(1, least)} rows with at least one to train on "
            f"({len(sizes)} clients, the largest with {int(sizes.max())} rows)"
        )

    y = None if source.y is None else source.y if dealt.rows is None else source.y[dealt.rows]
    per_client = {} if dealt.natural is None else {k: v[dealt.natural[kept]] for k, v in source.per_client.items()}
    turned: tuple[Array, Sequence[float]] | None = None
    if angles is not None:
        rng = default_rng([seed, _SHIFT])
        which = draw_kinds(len(sizes), rng, len(angles), dealt.counts, "rotation", "angles")
        turned = which, angles
        per_client["rotation"] = np.asarray(angles, dtype=np.float32)[which[kept]]
    if dealt.clusters is not None and y is not None and source.classes is not None:
        rng = default_rng([seed, _SHIFT])
        which = draw_kinds(len(sizes), rng, dealt.clusters, dealt.counts, "concept-shift", "clusters")
        y = (y + np.repeat(which, sizes)) % source.classes
        per_client["cluster"] = which[kept]

    away = unseen if unseen is not None else 0 if source.whole else 0.1
    seen, unseen_index = _seen_unseen(len(kept), away, default_rng([seed, _UNSEEN]))
    scaling, shift, scale = _scaling(source, normalize, schema)
    known = None if source.known is None else source.known if dealt.rows is None else source.known[dealt.rows]
    have_labels = np.full(len(kept), source.y is not None)
    if source.labeled is not None and dealt.natural is not None:
        have_labels &= source.labeled[dealt.natural[kept]]
    may_use = _hide_labels(have_labels, seen, labeled, default_rng([seed, _LABELED]))
    names = dealt.names if len(kept) == len(sizes) else _select_names(dealt.names, kept)

    def part(first: Array, size: Array, flags: Array) -> Clients:
        made = Clients(
            x=tensors[0],
            y=tensors[1],
            start=torch.from_numpy(first[kept]),
            size=torch.from_numpy(size[kept]),
            labeled=torch.from_numpy(flags),
            ids=torch.arange(len(kept)),
            names=names,
            shift=shift,
            scale=scale,
            known=None if known is None else torch.from_numpy(np.require(known, requirements=["C", "W"])),
        )
        return made if known is None else replace(made, labeled=made.labels_there() > 0)  # some may be elsewhere

    blank = torch.from_numpy(np.zeros((1, *source.x.shape[1:]), stored_type(source.name, source.x, source.kind)))
    x = blank.expand(len(source.x) if dealt.rows is None else len(dealt.rows), *blank.shape[1:])
    tensors = (x, None if y is None else torch.from_numpy(np.require(y, requirements=["C", "W"])))
    left_out = _select_names(dealt.names, np.setdiff1d(np.arange(len(sizes)), kept))
    population = Population(
        name=source.name,
        kind=source.kind,
        train=part(start, train_size, may_use),
        validation=part(start + train_size, validation_size, may_use),
        test=part(start + train_size + validation_size, test_size, have_labels),
        seen=torch.from_numpy(seen),
        unseen=torch.from_numpy(unseen_index),
        classes=source.classes,
        class_names=source.class_names,
        per_client={key: torch.from_numpy(np.require(value, requirements="W")) for key, value in per_client.items()},
        shared={key: torch.from_numpy(np.require(value, requirements="W")) for key, value in source.shared.items()},
        dropped=[*source.dropped, *left_out],
        incomplete=source.incomplete,
        columns=source.columns,
        partition=partition if isinstance(partition, str) else "",
        scaling=scaling,
        pooled=[one for one in source.pooled if schema is None or one == FILLED],  # the rest is the schema's own
        network=source.network,
    )
    if schema is not None:
        population.check(schema)
    return LaidOut(source, dealt, kept, population, turned)


def _deal(source: Source, partition: str | Partition, clients: int | None, rng: Generator) -> _Dealt:
    """Rows to clients by the named partition."""
    count = clients or max(1, min(_MOST_CLIENTS, len(source.x) // _ROWS_EACH))
    if callable(partition):
        return _from_lists(partition(_labels(source, ""), count, rng), source)
    name, options = _named(partition)
    if name == "natural":
        return _natural(source, clients, rng, **options)
    if name in ("rotation", "concept-shift"):
        dealt = _from_lists(iid(_labels(source, name), count, rng), source)
        counts = options.get("counts")
        if name == "rotation":
            dealt.angles = _many(options.get("angles", QUARTERS))
        else:
            dealt.clusters = int(options.get("clusters", 4))
        dealt.counts = None if counts is None else _many(counts)
        return dealt
    labels = _modelled(source, options) if name == "mdm" else _labels(source, name)
    return _from_lists(PARTITIONS[name](labels, count, rng, **options), source)


def _modelled(source: Source, options: dict[str, Any]) -> Array:
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


def _from_lists(lists: list[Array], source: Source) -> _Dealt:
    sizes = np.array([len(part) for part in lists], dtype=np.int64)
    rows = np.concatenate(lists).astype(np.int64)
    if len(rows) and (rows.min() < 0 or rows.max() >= len(source.x) or np.bincount(rows).max() > 1):
        raise DataError("a partition must give each row index at most once, between 0 and the number of rows")
    return _Dealt(rows, sizes)


def _natural(source: Source, clients: int | None, rng: Generator, group_size: int = 1) -> _Dealt:
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
        return _Dealt(rows, sizes, np.arange(count), names)
    drawn = rng.permutation(count)[: wanted * group_size].reshape(wanted, group_size)
    drawn = drawn[np.argsort(drawn.min(axis=1))]
    owner = np.full(count, -1, dtype=np.int64)
    owner[drawn] = np.arange(wanted)[:, None]
    rows, sizes = group(owner[source.client], wanted)
    if group_size == 1:
        return _Dealt(rows, sizes, drawn[:, 0], _select_names(names, drawn[:, 0]))
    if source.labeled is not None and not source.labeled.all():
        raise DataError(f"{source.name}: some clients have no labels, so clients cannot be merged into groups")
    known = names or Names(np.arange(count))
    return _Dealt(rows, sizes, None, ["+".join(known[int(i)] for i in row) for row in drawn])


def _select_names(names: Sequence[str] | None, index: Array) -> Sequence[str]:
    """The names at these positions; a client without a name keeps its number."""
    if names is None:
        return Names(index)
    return Names(names.values[index]) if isinstance(names, Names) else [names[int(i)] for i in index]


def _test_share(source: Source, test: float | str | None) -> float | None:
    """The fraction of a client's rows to test on; None: the source's own test rows."""
    if test is None:
        return None if source.is_test is not None else 0.0 if source.whole else 0.2
    if test == "source":
        if source.is_test is None:
            raise DataError(f"{source.name} has no test rows of its own; give `test` as a fraction, e.g. 0.2")
        return None
    return _fraction("test", test)


def _fraction(name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 1:
        raise DataError(f"{name} must be a fraction of a client's rows, at least 0 and below 1, got {value!r}")
    return float(value)


def _order(
    source: Source, dealt: _Dealt, samples: int | None, test: float | None, validation: float, rng: Generator
) -> Array:
    """Order each client's rows as train, validation, test (changes ``dealt``); how many test rows each client has."""
    if samples is not None or test or validation:
        dealt.rows = shuffle(dealt.rows, dealt.sizes, rng)
        if source.known is not None:
            dealt.rows = _spread_out(source.known[dealt.rows], dealt.rows, owners(dealt.sizes))
    if samples is not None and dealt.rows is not None:
        dealt.rows = dealt.rows[rank(dealt.sizes) < samples]
        dealt.sizes = np.minimum(dealt.sizes, samples)
    if test is not None:
        return _share_of(dealt.sizes, test, dealt.sizes)
    if source.is_test is None:
        raise AssertionError("checked by _test_share")
    flags = source.is_test if dealt.rows is None else source.is_test[dealt.rows]
    owner = owners(dealt.sizes)
    key = 2 * owner + flags
    if not bool((key[1:] >= key[:-1]).all()):
        order = np.argsort(key, kind="stable")
        dealt.rows = order if dealt.rows is None else dealt.rows[order]
    return np.bincount(owner[flags], minlength=len(dealt.sizes))


def _spread_out(known: Array, rows: Array, owner: Array) -> Array:
    """Each client's rows with its labeled ones at equal distances, so that every part gets its share of the labels."""
    kind = 2 * owner + known
    order = np.argsort(kind, kind="stable")
    counts = np.bincount(kind)
    place = np.empty(len(rows))
    place[order] = (rank(counts) + 0.5) / np.repeat(counts, counts)
    result: Array = rows[np.lexsort((place, owner))]
    return result


def _share_of(sizes: Array, share: float, available: Array) -> Array:
    """``share`` of each client's rows, rounded; at least one row and at most all but one of those available."""
    if share == 0:
        return np.zeros_like(sizes)
    return np.clip(np.rint(sizes * share).astype(np.int64), 1, None).clip(max=np.maximum(available - 1, 0))


def _seen_unseen(count: int, unseen: int | float | Sequence[int], rng: Generator) -> tuple[Array, Array]:
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


def _hide_labels(have: Array, seen: Array, share: float, rng: Generator) -> Array:
    """Whose labels may be used: a fraction ``share`` of the seen clients that have some, and every unseen one."""
    if not 0 <= share <= 1:
        raise DataError(f"labeled must be the fraction of training clients with labels, between 0 and 1, got {share!r}")
    candidates = seen[have[seen]]
    number = max(round(share * len(candidates)), int(share > 0 and len(candidates) > 0))
    may_use = have.copy()
    may_use[rng.permutation(candidates)[number:]] = False
    return may_use


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
