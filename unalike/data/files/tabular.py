"""Tables (CSV, TSV, Parquet) as arrays: which column is the client, which the label, and what the others hold."""

from __future__ import annotations

import importlib.util
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pandas as pd

from unalike.data.source import Array, DataError, on_command_line
from unalike.data.sources.folder import reading

Missing = Literal["error", "drop", "mean", "keep"]
KnownFrom = Literal["training", "the schema"]  # where the columns that are wanted are known from
Features = Mapping[str, Sequence[str] | None]  # a table's feature columns in order; those of text with their values
_MOST_CATEGORIES = 50
_LOOKS_LIKE_LABELS = {"label", "labels", "target", "targets", "class"}


@dataclass(frozen=True)
class Rows:
    """What a file or folder holds, as it stands there."""

    x: Array  # [rows, ...]; of a table float32 [rows, features]: a text column is one feature for each of its values
    y: Array | None
    client: Array | None
    columns: Features | None = None  # None: no table
    empty: list[str] = field(default_factory=list)  # clients without a row
    ids: Array | None = None  # of the rows
    ignored: list[str] = field(default_factory=list)  # columns that an earlier table did not have
    incomplete: int = 0  # rows left out for lack of a value


@dataclass(frozen=True)
class Layout:
    """How a file or table is laid out, and what it must hold.

    - ``missing``: a missing feature is an error, or its row is left out (``"drop"``), or it becomes the column's mean
      (``"mean"``), or NaN (``"keep"``, for a caller that deals with it).
    - ``known``: the features are those of an earlier table or a schema, found by name and with its values of text;
      beside those of training, other columns are ignored, and the client and label columns may be absent.
    - ``id_column`` names the rows (in NPZ it is an array) and is no feature.
    - ``epsilon_column`` says what ε a client grants (``[privacy] epsilons``) and is no feature.
    """

    client_column: str | None = None
    label_column: str | None = None
    delimiter: str | None = None
    missing: Missing = "error"
    size: int | Sequence[int] | None = None  # of images, in pixels
    known: Features | None = None
    known_from: KnownFrom = "training"
    id_column: str | None = None
    epsilon_column: str | None = None

    @property
    def text(self) -> set[str]:
        """Columns that are read as text: ids too, because 007 is not 7."""
        known = {column for column, values in (self.known or {}).items() if values is not None}
        return known | {self.client_column or "client", *([self.id_column] if self.id_column else [])}


def read_table(path: Path, layout: Layout) -> pd.DataFrame:
    """A CSV, TSV or Parquet file, with its columns' names checked."""
    with reading(path):
        if _is_parquet(path):
            try:
                frame = pd.read_parquet(path)
            except ImportError as error:
                raise DataError(f"{path}: reading Parquet files needs pyarrow: pip install 'unalike[data]'") from error
        else:
            frame = pd.read_csv(path, **_csv(path, layout), low_memory=False)
    for column in frame.columns:
        if str(column).strip() == "" or str(column).startswith("Unnamed: "):
            raise DataError(
                f"{path}: a column has no name ({column!r}), which is often a saved row number and no feature; "
                f"name it or remove it"
            )
    return frame


def _is_parquet(path: Path) -> bool:
    return path.name.lower().endswith((".parquet", ".pq"))


def _csv(path: Path, layout: Layout) -> dict[str, Any]:
    """How pandas reads a CSV or TSV file, whose header is checked."""
    separator = layout.delimiter or ("\t" if ".tsv" in path.name.lower() else ",")
    header = pd.read_csv(path, sep=separator, header=None, nrows=1, dtype=str, keep_default_na=False)
    titles = [str(title) for title in header.iloc[0]]
    repeated = sorted({title for title in titles if titles.count(title) > 1})
    if repeated:
        raise DataError(f"{path}: the column {repeated[0]!r} occurs more than once")
    if len(titles) == 1 and any(sign in titles[0] for sign in ";\t|"):
        raise DataError(
            f"{path}: only one column was found, {titles[0]!r}; is another delimiter needed? "
            f"Say e.g. delimiter=';' (on the command line: --set \"data.options.delimiter=';'\")"
        )
    return {"sep": separator, "dtype": {title: str for title in titles if title in layout.text}}


def _tables(path: Path, layout: Layout, rows: int) -> Iterator[pd.DataFrame]:
    """The rows of ``read_table``, so many at a time."""
    with reading(path):
        if _is_parquet(path):
            import pyarrow.parquet

            with pyarrow.parquet.ParquetFile(path) as file:
                for batch in file.iter_batches(rows):
                    yield batch.to_pandas()
        else:
            with pd.read_csv(path, **_csv(path, layout), chunksize=rows, low_memory=False) as chunks:
                yield from chunks


def spooled(path: Path, layout: Layout, rows: int = 1 << 16) -> Rows | None:
    """What ``take_apart`` makes of a whole table, with inputs in a temporary file that is mapped.

    The table is read twice, some rows at a time. None where only a look at all rows at once can tell what a column
    holds, or what is wrong with it: numbers in one piece and text in another, text that reads as a number, dates, an
    empty piece, infinite or missing numbers (unless their rows are left out), too many values of text.
    """
    if _is_parquet(path) and importlib.util.find_spec("pyarrow") is None:
        return None
    if layout.missing not in ("error", "drop"):
        return None
    known = layout.known
    if known is None:
        features: dict[str, set[str] | None] = {}
        for number, frame in enumerate(_tables(path, layout, rows)):
            own = _features(frame, path.name, layout)
            if number == 0:
                features = {title: None if _is_number(frame[title]) else set() for title in own}
            if (
                not own
                or list(own) != list(features)
                or not all(_clear(frame[title], features[title]) for title in own)
            ):
                return None
        known = {title: None if values is None else sorted(values) for title, values in features.items()}
        if not known or any(
            values is not None and not 0 < len(values) <= _MOST_CATEGORIES for values in known.values()
        ):
            return None
    return _spool(path, replace(layout, known=known), rows)


def _features(frame: pd.DataFrame, name: str, layout: Layout) -> list[str]:
    """The feature columns, where nothing is known of them beforehand and nothing is wrong with them."""
    roles = [
        _find(frame, name, "client_column", layout.client_column, "client", required=True),
        _find(frame, name, "label_column", layout.label_column, "y", required=True),
        layout.epsilon_column and _find(frame, name, "epsilon_column", layout.epsilon_column, "", required=True),
    ]
    titles = [str(title) for title in frame.columns]
    looks = (
        roles[1] is None and layout.label_column is None and any(one.lower() in _LOOKS_LIKE_LABELS for one in titles)
    )
    odd = any(title.strip() == "" or title.startswith("Unnamed: ") for title in titles)
    return [] if looks or odd else [title for title in titles if title not in roles]


def _is_number(column: pd.Series) -> bool:
    return pd.api.types.is_bool_dtype(column) or pd.api.types.is_numeric_dtype(column)


def _clear(column: pd.Series, values: set[str] | None) -> bool:
    """Is a piece of a column what the first piece was, numbers or text? Values of text are added to ``values``."""
    present = column.dropna()
    if len(present) == 0 or _is_number(column) != (values is None) or pd.api.types.is_datetime64_any_dtype(column):
        return False
    if values is None:
        return bool(np.isfinite(present.to_numpy(dtype=np.float64)).all())
    found = {str(value) for value in present.unique()}
    values |= found
    return len(values) <= _MOST_CATEGORIES and not pd.to_numeric(pd.Series(list(found)), errors="coerce").notna().any()


def _spool(path: Path, layout: Layout, rows: int) -> Rows | None:
    """The second look: inputs go to a temporary file, clients and labels stay."""
    clients, labels, incomplete, count, width = list[Array](), list[Array](), 0, 0, 0
    with tempfile.TemporaryFile() as file:
        for frame in _tables(path, layout, rows):
            lacking = frame[list(layout.known or ())].isna().any(axis=1)
            if layout.missing == "error" and lacking.any():
                return None
            incomplete += int(lacking.sum())
            if lacking.all():
                continue
            try:
                piece = take_apart(frame, path.name, layout)
            except DataError:
                return None  # whoever reads all rows can say which row is wrong
            file.write(np.ascontiguousarray(piece.x).data)
            count, width = count + len(piece.x), piece.x.shape[1]
            for column, all_ in ((piece.client, clients), (piece.y, labels)):
                all_ += [] if column is None else [column]
        if count == 0 or len({column.dtype.kind.replace("f", "i") for column in labels}) > 1:
            return None  # a label that is a number in one piece only
        file.flush()
        x = np.memmap(file, np.float32, "r", shape=(count, width))
    client = np.concatenate(clients) if clients else None
    if client is not None and len({column.dtype.kind for column in clients}) > 1:
        return None  # ids that are numbers in one piece only
    y = np.concatenate(labels) if labels else None
    return Rows(x, y, client, layout.known, incomplete=incomplete)


def take_apart(frame: pd.DataFrame, name: str, layout: Layout) -> Rows:
    """Client, label and feature columns; text columns become one feature for each value (at most 50 values)."""
    missing, known = layout.missing, layout.known
    if missing not in ("error", "drop", "mean", "keep"):
        raise DataError(f"{name}: missing must be 'error', 'drop' or 'mean', got {missing!r}")
    if len(frame) == 0:
        raise DataError(f"{name}: the table has no rows")
    required = known is None or layout.known_from == "the schema"
    ids = _find(frame, name, "client_column", layout.client_column, "client", required)
    label = _find(frame, name, "label_column", layout.label_column, "y", required)
    names = None if layout.id_column is None else _find(frame, name, "id_column", layout.id_column, "", required=True)
    granted = layout.epsilon_column and _find(frame, name, "epsilon_column", layout.epsilon_column, "", required)
    features = [column for column in frame.columns if column not in (ids, label, names, granted)]
    ignored: list[str] = []
    if known is not None:
        _check_columns(features, known, name, layout.known_from)
        ignored = [column for column in features if column not in known]
        features = list(known)
    elif label is None and layout.label_column is None:
        for column in features:
            if column.lower() in _LOOKS_LIKE_LABELS:
                raise DataError(
                    f"{name}: the column {column!r} looks like labels; say label_column={column!r}, or label_column='' "
                    f"if it is a feature and there are no labels (on the command line: --label-column {column!r} or '')"
                )
    if not features:
        raise DataError(f"{name}: there is no feature column beside {', '.join(frame.columns)}")
    rows = len(frame)
    if missing == "drop":
        frame = frame.dropna(subset=features)
        if len(frame) == 0:
            raise DataError(f"{name}: every row lacks a feature, so missing='drop' leaves nothing")
    pieces: list[Array] = []
    columns: dict[str, Sequence[str] | None] = {}
    for column in features:
        values, columns[str(column)] = _encode(frame[column], name, layout)
        pieces.append(values)
    x = np.concatenate(pieces, axis=1, dtype=np.float32) if len(pieces) > 1 else pieces[0]
    return Rows(
        x,
        _raw(frame, label),
        _client_ids(frame, ids),
        columns,
        ids=_raw(frame, names),
        ignored=ignored,
        incomplete=rows - len(frame),
    )


def _check_columns(features: Sequence[str], known: Features, name: str, known_from: KnownFrom) -> None:
    lacking = [column for column in known if column not in features]
    strange = [column for column in features if column not in known]
    if lacking or (strange and known_from == "the schema"):  # a newcomer is told which of its columns are ignored
        found = [f"{column!r} is missing" for column in lacking] + [f"{column!r} was not there" for column in strange]
        raise DataError(
            f"{name}: its feature columns must be those of {known_from}, {', '.join(known)}; {', '.join(found)}: "
            f"rename, add or remove {'it' if len(found) == 1 else 'them'} (the order does not matter)"
        )


def _find(frame: pd.DataFrame, name: str, option: str, wanted: str | None, default: str, required: bool) -> str | None:
    if wanted is None:
        return default if default in frame.columns else None
    if wanted == "" or (wanted not in frame.columns and not required):
        return None
    if wanted not in frame.columns:
        raise DataError(f"{name}: there is no column {wanted!r} ({option}); the columns are {', '.join(frame.columns)}")
    return wanted


def _encode(column: pd.Series, name: str, layout: Layout) -> tuple[Array, Sequence[str] | None]:
    """One column as float32 [rows, 1], or for text [rows, values] and the values."""
    title, missing, known = str(column.name), layout.missing, layout.known
    values = None if known is None else known[title]
    absent = column.isna().to_numpy()
    if absent.any() and missing == "error":
        raise DataError(
            f"{name}: the column {title!r} lacks {int(absent.sum())} of {len(column)} values, the first in data row "
            f"{int(np.argmax(absent)) + 1}; fill them in, or say missing='drop' (leave such rows out) or "
            f"missing='mean' {on_command_line('missing', 'drop')}"
        )
    numeric = pd.api.types.is_bool_dtype(column) or pd.api.types.is_numeric_dtype(column)
    if numeric and values is None:
        numbers = column.to_numpy(dtype=np.float64, na_value=np.nan)
        if np.isinf(numbers).any():
            row = int(np.argmax(np.isinf(numbers))) + 1
            raise DataError(f"{name}: the column {title!r} holds an infinite number, the first in data row {row}")
        if absent.any() and missing == "mean":
            if absent.all():
                raise DataError(f"{name}: the column {title!r} is empty; remove it")
            numbers = np.where(absent, numbers[~absent].mean(), numbers)
        return numbers.astype(np.float32)[:, None], None
    if pd.api.types.is_datetime64_any_dtype(column):
        raise DataError(f"{name}: the column {title!r} holds dates; turn them into numbers first")
    text = column.astype(str)
    parsed = pd.to_numeric(column, errors="coerce").to_numpy(dtype=np.float64, na_value=np.nan)
    wrong = np.isnan(parsed) & ~absent
    if values is None and (known is not None or 0 < wrong.sum() < 0.5 * len(column)):
        row = int(np.argmax(wrong))
        raise DataError(
            f"{name}: the column {title!r} should hold numbers, but data row {row + 1} holds {text.iloc[row]!r}"
        )
    if absent.all() or (absent.any() and missing != "keep"):
        raise DataError(
            f"{name}: the text column {title!r} lacks values, and text has no mean; fill them in (or, if these are the "
            f"labels, name the column by label_column; on the command line: --label-column {title!r})"
        )
    if values is None:
        values = [str(value) for value in np.unique(text[~absent].to_numpy(dtype=str))]
    if len(values) > _MOST_CATEGORIES:
        raise DataError(
            f"{name}: the column {title!r} holds text with {len(values)} different values, e.g. {values[0]!r}; "
            f"at most {_MOST_CATEGORIES} become features of their own: remove the column or turn it into numbers"
        )
    codes = pd.Index(values).get_indexer(pd.Index(text))
    strange = (codes < 0) & ~absent
    if strange.any():
        row = int(np.argmax(strange))
        raise DataError(
            f"{name}: the column {title!r} holds {text.iloc[row]!r} in data row {row + 1}, which was not in "
            f"{layout.known_from}; the values there are {', '.join(values)}"
        )
    one_hot = np.zeros((len(codes), len(values)), dtype=np.float32)
    one_hot[np.arange(len(codes)), codes] = 1
    one_hot[absent] = np.nan
    return one_hot, values


def _raw(frame: pd.DataFrame, column: str | None) -> Array | None:
    """A column as numbers (missing: NaN) or strings (missing: empty)."""
    if column is None:
        return None
    series = frame[column]
    if pd.api.types.is_bool_dtype(series) and not series.isna().any():
        return series.to_numpy(dtype=bool)
    if pd.api.types.is_integer_dtype(series) and not series.isna().any():
        return series.to_numpy(dtype=np.int64)
    if pd.api.types.is_numeric_dtype(series):
        return series.to_numpy(dtype=np.float64, na_value=np.nan)
    return np.array(["" if gone else str(v) for v, gone in zip(series, series.isna(), strict=True)])


def _client_ids(frame: pd.DataFrame, column: str | None) -> Array | None:
    """The client column; text that is all plain whole numbers is read as numbers, so that 10 comes after 9."""
    ids = _raw(frame, column)
    if ids is None or ids.dtype.kind != "U":
        return ids
    unique = np.unique(ids)
    plain = all(text.isascii() and text.isdigit() and len(text) < 18 and str(int(text)) == text for text in unique)
    return ids.astype(np.int64) if plain else ids
