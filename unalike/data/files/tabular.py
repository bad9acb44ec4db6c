"""Tables (CSV, TSV, Parquet, pandas) as arrays, read twice and some rows at a time.

The first look finds out what the columns hold, the second turns the cells into numbers. Large inputs go to a temporary
file that is mapped, so that memory does not grow with the rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd

from unalike.core.notes import FLAG, Note
from unalike.data.files.columns import Column, Roles, cells, numbers_of, survey
from unalike.data.files.frames import Piece, Pieces
from unalike.data.files.layout import MISSING, ColumnReport, Layout, RawRows
from unalike.data.rows import empty_array
from unalike.data.source import Array, DataError


def parse_table(pieces: Pieces, name: str, layout: Layout) -> RawRows:
    """Client, label and feature columns; text columns become one feature for each value."""
    roles, columns, text = survey(pieces, layout, name)
    indicators = _indicators(columns, layout)
    features: dict[str, Sequence[str] | None] = {column.name: column.values for column in columns}
    features |= dict.fromkeys(f"{title}{MISSING}" for title in indicators)
    if layout.known is not None:
        features = {title: features.get(title) for title in layout.known}
    width = sum(1 if values is None else len(values) for values in features.values())
    x = empty_array((columns[0].rows, width), np.dtype(np.float32))
    count = 0
    client, label, ids = _Gathered(), _Gathered(), _Gathered()
    for piece in pieces(text):
        frame = piece.frame.drop(index=piece.frame.index[_left_out(piece, columns, layout)])
        made = [_encode(frame, piece, title, columns, layout) for title in features]
        x[count : count + len(frame)] = np.concatenate(made, axis=1)
        count += len(frame)
        for collected, title in ((client, roles.client), (label, roles.label), (ids, roles.id)):
            if title is not None:
                collected.add(frame[title] if title in frame else pd.Series(np.nan, frame.index))
    if count == 0:
        raise DataError(f"{name}: every row lacks a feature, so missing='drop' leaves nothing")
    return RawRows(
        x[:count],
        label.values(layout),
        client.clients(),
        features,
        ids=ids.values(layout),
        ignored=roles.ignored,
        incomplete=columns[0].rows - count,
        gaps=layout.missing not in ("error", "drop") and any(column.missing for column in columns),
        column_reports=_report_columns(roles, columns),
        notes=_notes(columns, layout),
    )


def _indicators(columns: list[Column], layout: Layout) -> list[str]:
    """The features that have a 0/1 feature beside them which says where they are missing."""
    if layout.known is not None:
        return [title for title in layout.known if f"{title}{MISSING}" in layout.known]
    return [column.name for column in columns if layout.indicator and column.missing]


def _left_out(piece: Piece, columns: list[Column], layout: Layout) -> Array:
    """[rows] bool: who lacks a feature and is left out for it."""
    lacking = np.zeros(len(piece.frame), dtype=bool)
    if layout.missing == "drop":
        for column in columns:
            if column.missing:
                lacking |= cells(piece.frame[column.name], layout)[2]
    return lacking


def _encode(frame: pd.DataFrame, piece: Piece, title: str, columns: list[Column], layout: Layout) -> Array:
    """One feature as float32: [rows, 1], or for text [rows, values]; NaN where it is missing."""
    column = next((column for column in columns if column.name == title), None)
    if column is None:  # an indicator
        gone = cells(frame[title.removesuffix(MISSING)], layout)[2]
        return gone.astype(np.float32)[:, None]
    numbers, words, absent = cells(frame[title], layout)
    if column.values is None:
        if numbers is None and words is not None:
            numbers = numbers_of(words.where(~absent, ""), layout)
        assert numbers is not None
        return np.where(absent, np.nan, numbers).astype(np.float32)[:, None]
    if words is None:
        words = frame[title].astype(str)
    codes = pd.Index(column.values).get_indexer(pd.Index(words))
    strange = (codes < 0) & ~absent
    if strange.any():
        at = int(np.argmax(strange))
        row = piece.first + int(np.flatnonzero(piece.frame.index == frame.index[at])[0]) + 1
        raise DataError(
            f"{piece.name}: the column {title!r} holds {words.iloc[at]!r} in data row {row}, which was not in "
            f"{layout.known_from}; the values there are {', '.join(column.values)}"
        )
    one_hot = np.zeros((len(codes), len(column.values)), dtype=np.float32)
    one_hot[np.arange(len(codes)), codes] = 1
    one_hot[absent] = np.nan
    return one_hot


class _Gathered:
    """A column that is kept beside the features, piece by piece."""

    def __init__(self) -> None:
        self._pieces: list[pd.Series] = []

    def add(self, column: pd.Series) -> None:
        text = not pd.api.types.is_numeric_dtype(column) and not isinstance(column.dtype, pd.CategoricalDtype)
        self._pieces.append(column.astype("category") if text else column)  # each word once: it takes little memory

    def _whole(self) -> pd.Series:
        if any(isinstance(piece.dtype, pd.CategoricalDtype) for piece in self._pieces):
            pieces = [piece.astype("category") for piece in self._pieces]
            return pd.Series(pd.api.types.union_categoricals(pieces)) if len(pieces) > 1 else pieces[0]
        return pd.concat(self._pieces) if len(self._pieces) > 1 else self._pieces[0]

    def values(self, layout: Layout) -> Array | None:
        """Numbers (missing: NaN) or strings (missing: empty)."""
        if not self._pieces:
            return None
        whole = self._whole()
        if isinstance(whole.dtype, pd.CategoricalDtype):
            names = np.array([_word(value, layout) for value in whole.cat.categories] + [""])
            return names[whole.cat.codes.to_numpy()]
        if whole.isna().any() or not (pd.api.types.is_bool_dtype(whole) or pd.api.types.is_integer_dtype(whole)):
            return whole.to_numpy(dtype=np.float64, na_value=np.nan)
        return whole.to_numpy(dtype=bool if pd.api.types.is_bool_dtype(whole) else np.int64)

    def clients(self) -> Any:
        """Client ids; words that are all plain whole numbers are read as numbers, so that 10 comes after 9."""
        if not self._pieces:
            return None
        whole = self._whole()
        if not isinstance(whole.dtype, pd.CategoricalDtype):
            return self.values(Layout())
        names = [str(value).strip() for value in whole.cat.categories]
        codes = whole.cat.codes.to_numpy()
        plain = bool((codes >= 0).all()) and all(
            text.isascii() and text.isdigit() and len(text) < 18 and str(int(text)) == text for text in names
        )
        unique, back = np.unique([int(name) for name in names] if plain else names, return_inverse=True)
        back = np.append(np.where(np.array(names) == "", -1, back), -1)  # the last is that of code -1
        index: Any = pd.Index(unique)
        return pd.Categorical.from_codes(back[codes], categories=index)


def _word(value: object, layout: Layout) -> str:
    text = str(value).strip()
    return "" if text in layout.na_values else text


def _report_columns(roles: Roles, columns: list[Column]) -> list[ColumnReport]:
    named = [(roles.client, "client"), (roles.label, "label"), (roles.id, "id"), (roles.epsilon, "ε")]
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
