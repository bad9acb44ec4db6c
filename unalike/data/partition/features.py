"""Which category a row belongs to: by its label, by other features, or by several of them jointly (T1 §3, A.3.2).

MDM models one categorical feature of the clients' data. A text column of a table is one already; a number becomes one
by bins; several are one over the product of their values.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from unalike.core.notes import did_you_mean
from unalike.data.source import Array, DataError, column_places

LABEL = "label"  # the name of the label among features
_MOST = 10_000  # categories: clients send a share of each


@dataclass(frozen=True)
class Feature:
    """One feature and its categories: a text's values, a label's classes, or the lower ``edges`` of a number's bins.

    What lies below the first edge is in the first bin; the last bin is open.
    """

    name: str
    values: tuple[str, ...] = ()
    edges: tuple[float, ...] = ()

    @property
    def categories(self) -> tuple[str, ...]:
        """The names of the categories."""
        if not self.edges:
            return self.values
        ends = [*(f"{edge:g}" for edge in self.edges[1:]), "..."]
        return tuple(f"{edge:g} to {end}" for edge, end in zip(self.edges, ends, strict=True))


def features_of(
    names: Sequence[str],
    bins: Mapping[str, Sequence[float]],
    columns: Mapping[str, Sequence[str] | None] | None,
    classes: Sequence[str] | None,
) -> tuple[Feature, ...]:
    """The features of these names in a table of these columns, whose label has these classes."""
    known = [*(columns or {}), *([] if classes is None else [LABEL])]
    found = []
    for name in names:
        if name not in known:
            there = f"there are {', '.join(known[:20])}" if known else "the data is no table and has no classes"
            raise DataError(f"there is no feature {name!r}{did_you_mean(name, known)}; {there}")
        values = classes if name == LABEL else (columns or {})[name]
        edges = tuple(float(edge) for edge in bins.get(name, ()))
        if values is None and not edges:
            raise DataError(
                f"the feature {name!r} is a number; say where its bins begin, for example "
                f"--bins {name}=0:200000:5000 (first, last, width) or --bins {name}=18/30/65"
            )
        if values is not None and edges:
            raise DataError(f"the feature {name!r} has values by name ({', '.join(values[:5])}, ...): it takes no bins")
        if any(b <= a for a, b in itertools.pairwise(edges)):
            raise DataError(f"the bins of {name!r} must begin at rising numbers, got {list(edges)}")
        found.append(Feature(name, tuple(values or ()), edges))
    if len(set(names)) < len(names) or not found:
        raise DataError(f"expected features by name, each once, got {', '.join(names) or 'none'}")
    strange = [name for name in bins if name not in names]
    if strange:
        raise DataError(f"bins are given for {', '.join(strange)}, which is not among the features")
    total = count(found)
    if not 2 <= total <= _MOST:
        raise DataError(f"{', '.join(names)} together have {total} categories; expected 2 to {_MOST}")
    return tuple(found)


def count(features: Sequence[Feature]) -> int:
    """Of all categories together."""
    return int(np.prod([len(one.categories) for one in features]))


def category_names(features: Sequence[Feature]) -> list[str]:
    """In the order of the numbers that ``categories`` gives."""
    return [" × ".join(one) for one in itertools.product(*(feature.categories for feature in features))]


def categories(
    features: Sequence[Feature], x: Array, y: Array | None, columns: Mapping[str, Sequence[str] | None] | None
) -> Array:
    """[rows] int64: the category of each row; −1 where it has no value of one of the features.

    ``x`` is as tables are read: a number is one column, a text has a 0/1 column for each of its values.
    """
    places = column_places(columns or {})
    total = np.zeros(len(x), dtype=np.int64)
    missing = np.zeros(len(x), dtype=bool)
    for feature in features:
        own = _one(feature, x, y, columns or {}, places)
        missing |= own < 0
        total = total * len(feature.categories) + own
    total[missing] = -1
    return total


def _one(
    feature: Feature, x: Array, y: Array | None, columns: Mapping[str, Sequence[str] | None], places: Mapping[str, int]
) -> Array:
    if feature.name == LABEL:
        if y is None or y.dtype.kind not in "iu":
            raise DataError("the mixture is over the label's classes, but this data has none")
        return y.astype(np.int64)
    if feature.name not in columns:
        raise DataError(f"the mixture is over {feature.name!r}, which this data lacks; it has {', '.join(columns)}")
    place, values = places[feature.name], columns[feature.name]
    if feature.edges:
        if values is not None:
            raise DataError(f"the mixture has bins of {feature.name!r}, which is text in this data")
        numbers = x[:, place].astype(np.float64)
        found = np.maximum(np.searchsorted(np.array(feature.edges), numbers, side="right") - 1, 0)
        return np.where(np.isnan(numbers), -1, found)
    if values is None or tuple(values) != feature.values:
        raise DataError(
            f"the mixture knows {feature.name!r} as one of {', '.join(feature.values[:10])}; in this data it is "
            f"{'a number' if values is None else ', '.join(values[:10])}"
        )
    block = x[:, place : place + len(values)]
    return np.where(block.any(axis=1), block.argmax(axis=1), -1)
