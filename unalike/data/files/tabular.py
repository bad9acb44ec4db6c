"""Tables (CSV, TSV, Parquet, pandas) as arrays, read twice and some rows at a time.

The first look finds out what the columns hold, the second turns the cells into numbers. Large inputs go to a temporary
file that is mapped, so that memory does not grow with the rows.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from unalike.core.lazy import pd
from unalike.core.notes import FLAG, Note
from unalike.data.files.columns import Cells, Column, Roles, survey
from unalike.data.files.frames import Piece, Pieces
from unalike.data.files.layout import MISSING, ColumnReport, Layout, RawRows
from unalike.data.rows import empty_array
from unalike.data.source import Array, DataError, column_places


def parse_table(pieces: Pieces, name: str, layout: Layout) -> RawRows:
    """Client, label and feature columns; text columns become one feature for each value."""
    if layout.intercept:
        pieces, layout = _with_intercept(pieces, name), replace(layout, features=_and_intercept(layout.features))
    roles, columns, text = survey(pieces, layout, name)
    features: dict[str, Sequence[str] | None] = {column.name: column.values for column in columns}
    features |= dict.fromkeys(f"{title}{MISSING}" for title in _indicated(columns, layout))
    if layout.known is not None:
        features = {title: features.get(title) for title in layout.known}
    places = column_places(features)
    width = sum(1 if values is None else len(values) for values in features.values())
    x = empty_array((columns[0].rows, width), np.dtype(np.float32))
    count, came = 0, set[str]()
    kept: dict[str, list[pd.Series]] = {
        title: [] for title in (roles.client, roles.label, roles.id, roles.weight) if title
    }
    for piece in pieces(text):
        cells = {column.name: Cells.of(piece.frame[column.name], layout, text) for column in columns}
        keep = np.ones(len(piece.frame), dtype=bool)
        if layout.missing == "drop":
            keep &= ~np.any([one.absent for one in cells.values()], axis=0)
            came |= set() if roles.client is None else {str(one).strip() for one in piece.frame[roles.client].unique()}
        rows = x[count : count + int(keep.sum())]
        for title, values in features.items():
            made = _encode(title, values, cells, piece, keep, layout)
            rows[:, places[title] : places[title] + made.shape[1]] = made
        count += len(rows)
        for title, series in kept.items():
            one = piece.frame[title][keep] if title in piece.frame else pd.Series(np.full(len(rows), np.nan))
            series.append(one if pd.api.types.is_numeric_dtype(one) else _compact(one))
    if count == 0:
        raise DataError(f"{name}: every row lacks a feature, so missing='drop' leaves nothing")
    client, label, ids, weight = (
        kept.get(title or "") for title in (roles.client, roles.label, roles.id, roles.weight)
    )
    clients = None if client is None else _clients(client)
    return RawRows(
        x[:count],
        None if label is None else _labels(label, layout),
        clients,
        features,
        empty=sorted(came - set(map(str, pd.Series(clients).unique()))) if came else (),
        ids=None if ids is None else _values(ids, layout),
        weight=None if weight is None else _values(weight, layout),
        ignored=roles.ignored,
        incomplete=columns[0].rows - count,
        gaps=layout.missing not in ("error", "drop") and any(column.missing for column in columns),
        column_reports=_report_columns(roles, columns),
        notes=_notes(columns, layout),
    )


INTERCEPT = "intercept"


def _and_intercept(features: Any) -> Any:
    return None if features is None else (*features, INTERCEPT)


def _with_intercept(pieces: Pieces, name: str) -> Pieces:
    """The table with a column of ones."""

    def made(text: Collection[str]) -> Iterator[Piece]:
        for piece in pieces(text):
            if INTERCEPT in piece.frame:
                raise DataError(f"{name}: there is a column {INTERCEPT!r} already; leave intercept out, or rename it")
            yield replace(piece, frame=piece.frame.assign(**{INTERCEPT: 1.0}))

    return made


def _indicated(columns: list[Column], layout: Layout) -> list[str]:
    """The features that have a 0/1 feature beside them which says where they are missing."""
    if layout.known is not None:
        return [title for title in layout.known if f"{title}{MISSING}" in layout.known]
    return [column.name for column in columns if layout.indicator and column.missing]


def _encode(
    title: str, values: Sequence[str] | None, cells: Mapping[str, Cells], piece: Piece, keep: Array, layout: Layout
) -> Array:
    """One feature as float32: [rows, 1], or for text [rows, values]; NaN where it is missing."""
    if title not in cells:  # an indicator
        return cells[title.removesuffix(MISSING)].absent[keep, None].astype(np.float32)
    own = cells[title]
    if values is None:
        return own.numbers[keep, None].astype(np.float32)
    assert own.words is not None, "survey has had it read as text"
    codes = pd.Index(values).get_indexer(pd.Index(own.words))
    strange = (codes < 0) & ~own.absent & keep
    if strange.any():
        at = int(np.argmax(strange))
        raise DataError(
            f"{piece.name}: the column {title!r} holds {own.words.iloc[at]!r} in data row {piece.first + at + 1}, "
            f"which was not in {layout.known_from}; the values there are {', '.join(values)}"
        )
    one_hot = np.eye(len(values), dtype=np.float32)[codes[keep]]
    one_hot[own.absent[keep]] = np.nan
    return one_hot


def _compact(column: pd.Series) -> pd.Series:
    """Trimmed words, each of which is stored once; a word that is empty is missing."""
    codes, found = pd.factorize(column)
    words = pd.Series([str(word).strip() for word in found], dtype=object)
    few = words.mask(words == "").astype("category")
    return pd.Series(pd.Categorical.from_codes(np.append(few.cat.codes, -1)[codes], few.cat.categories))


def _join(pieces: list[pd.Series]) -> pd.Series:
    """A column that is kept beside the features: numbers, or words as categories."""
    if any(not pd.api.types.is_numeric_dtype(piece) for piece in pieces):
        words = [_compact(piece) if pd.api.types.is_numeric_dtype(piece) else piece for piece in pieces]
        return pd.Series(pd.Categorical(pd.api.types.union_categoricals(words)))
    joined: pd.Series = pd.concat(pieces)
    return joined


def _labels(pieces: list[pd.Series], layout: Layout) -> Array | pd.Categorical:
    """Numbers (missing: NaN), or words, each of which is stored once."""
    whole = _join(pieces)
    if isinstance(whole.dtype, pd.CategoricalDtype):
        missing = [word for word in whole.cat.categories if word in layout.na_values]
        return pd.Categorical(whole.cat.remove_categories(missing))
    return _numbers(whole)


def _values(pieces: list[pd.Series], layout: Layout) -> Array:
    """Numbers (missing: NaN) or strings (missing: empty)."""
    found = _labels(pieces, layout)
    return as_strings(found) if isinstance(found, pd.Categorical) else found


def as_strings(words: pd.Categorical) -> Array:
    """Each row's word; empty where it is missing."""
    found: Array = np.array([*map(str, words.categories), ""])[words.codes]
    return found


def _numbers(whole: pd.Series) -> Array:
    """Truth values and whole numbers as they are, all others as float64."""
    if whole.isna().any() or not (pd.api.types.is_bool_dtype(whole) or pd.api.types.is_integer_dtype(whole)):
        return whole.to_numpy(dtype=np.float64, na_value=np.nan)
    kind = (
        bool if pd.api.types.is_bool_dtype(whole) else np.uint64 if whole.max() > np.iinfo(np.int64).max else np.int64
    )
    return whole.to_numpy(dtype=kind)


def _clients(pieces: list[pd.Series]) -> Array | pd.Categorical:
    """Client ids; words that are all plain whole numbers are read as numbers, so that 10 comes after 9."""
    whole = _join(pieces)
    if not isinstance(whole.dtype, pd.CategoricalDtype):
        return _numbers(whole)
    names: list[Any] = [str(name) for name in whole.cat.categories]
    if not whole.isna().any() and all(re.fullmatch("0|[1-9][0-9]{0,16}", name, re.ASCII) for name in names):
        names = [int(name) for name in names]
    return pd.Categorical(whole.cat.rename_categories(names), categories=sorted(names))


def _report_columns(roles: Roles, columns: list[Column]) -> list[ColumnReport]:
    named = [
        (roles.client, "client"),
        (roles.label, "label"),
        (roles.id, "id"),
        (roles.epsilon, "ε"),
        (roles.weight, "weight"),
    ]
    found = [ColumnReport(title, role, "") for title, role in named if title is not None]
    found += [column.report for column in columns]
    return found + [ColumnReport(title, "left out", "") for title in [*roles.dropped, *roles.ignored]]


def _notes(columns: list[Column], layout: Layout) -> list[str]:
    if layout.known is not None:
        return []
    return [
        Note(
            f"the column {column.name!r} holds a different whole number in each row and looks like an id, which is no "
            f"feature: leave it out (drop{FLAG}), or say id_column={column.name!r}{FLAG}",
            "data.options.drop",
            "data.options.id_column",
        )
        for column in columns
        if column.looks_like_id
    ]
