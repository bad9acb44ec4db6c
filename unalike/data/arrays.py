"""Arrays from anywhere as a source: client ids become numbers, labels become classes, shapes are checked."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import torch

from unalike.core.lazy import pd
from unalike.core.notes import FLAG, Note
from unalike.core.schema import Schema
from unalike.data.source import COUNTED, KINDS, NAMED, Array, DataError, Kind, Names, Source, names_in

Task = Literal["classification", "regression"]
PartialLabels = Literal["keep", "drop", "error"]  # what to do about rows without a label of a client that has some
_MANY_CLASSES = 1000
_FEW_CLASSES = 10  # as of digits: more of them, or others than 0, 1, …, may be quantities


@dataclass(frozen=True)
class Labels:
    """Labels as int64 classes or float32 targets."""

    values: Array
    classes: int | None = None  # None: targets of a regression
    names: list[str] | None = None  # of the classes, where they are not called 0, 1, …
    note: str = ""  # what was decided about them that may not be meant


def array_source(
    x: Any,
    y: Any = None,
    client: Any = None,
    *,
    name: str = "arrays",
    kind: Kind | None = None,
    classes: int | str | Sequence[str] | None = None,
    task: Task | None = None,
    partial_labels: PartialLabels = "keep",
    schema: Schema | None = None,
    ids: Any = None,
    weight: Any = None,
) -> Source:
    """A source from arrays: ``x`` [rows, ...], optionally ``y`` [rows] and ``client`` [rows].

    - uint8 arrays [rows, height, width] or [rows, height, width, channels] or [rows, channels, height, width] are
      images and so are float arrays of four dimensions; anything else is features unless ``kind`` says otherwise.
    - ``client`` holds whole numbers or strings, in any order. A missing one is an error.
    - ``y``: strings, truth values and whole numbers are classes; other numbers are targets of a regression (``task``
      overrides the guess). NaN or an empty string is a missing label; -1 is not, it is a class like any other. A client
      may have no label at all. Of one that has some, the rows without a label describe it and are in no loss; with
      ``partial_labels="drop"`` it loses them, and with "error" it is refused.
    - ``classes``: how many there are, or all their names: ["no", "yes"] or "no,yes".
    - ``schema``: what the arrays must be; it then says kind, classes and task. ``ids`` [rows]: what rows are called.
    - ``weight`` [rows]: how much each row counts in local training, 0 or more.
    """
    class_names: Sequence[str] | None = None
    if classes is not None and not isinstance(classes, int):
        class_names = names_in(classes)
        if len(set(class_names)) != len(class_names) or len(class_names) < 2:
            raise DataError(f"{name}: classes = {classes!r}: expected a number, or two different names or more")
    count = classes if isinstance(classes, int) else None
    if schema is not None:
        class_names = schema.class_names
        kind, count, task = schema.kind, schema.classes, "regression" if schema.target == "number" else None
        y = None if schema.target == "none" else y
    kind, x = _inputs(name, x, kind)
    codes, names = (None, None) if client is None else encode_clients(_column(name, "client", client, len(x)), name)
    who: dict[str, Any] = {"client": codes, "client_names": names}
    ids = None if ids is None else _column(name, "ids", ids, len(x))
    weight = None if weight is None else _weights(name, _column(name, "weight", weight, len(x)))
    if y is None:
        none = {} if schema is None or schema.target == "none" else _blank_labels(name, len(x), codes, schema)
        return Source(name, kind, x, ids=ids, weight=weight, **who, **none)
    raw = _column(name, "y", y, len(x))
    missing = _missing(raw)
    if missing.all():
        raise DataError(f"{name}: every label is missing; leave y out if there are none")
    if missing.any():
        keep, mixed = rows_to_keep(name, missing, codes, names, partial_labels)
        if not keep.all():
            x, raw, missing = x[keep], raw[keep], missing[keep]
            ids, weight = (None if one is None else one[keep] for one in (ids, weight))
            codes = who["client"] = None if codes is None else codes[keep]
        who["known"] = ~missing if mixed else None
        if codes is not None:
            who["labeled"] = np.bincount(codes[~missing], minlength=int(codes.max()) + 1) > 0
    labels = encode_labels(raw[~missing], name, count, task, class_names)
    if schema is not None and labels.names is not None and schema.class_names is None:
        raise DataError(
            f"{name}: the schema numbers its classes 0 … {(count or 0) - 1}, but a label is {labels.names[0]!r}; "
            f"name the classes in the schema (class_names), or give their numbers"
        )
    y = np.zeros(len(raw), dtype=labels.values.dtype)
    y[~missing] = labels.values
    counted = labels.classes is not None and labels.names is None and count is None
    pooled = [COUNTED] if counted else [] if labels.names is None or class_names else [NAMED]
    notes = [labels.note] if labels.note else []
    return Source(
        name, kind, x, y, labels.classes, labels.names, pooled=pooled, notes=notes, ids=ids, weight=weight, **who
    )


def _weights(name: str, given: Array) -> Array:
    """Weights of rows, refused where they cannot be meant."""
    numbers = pd.to_numeric(pd.Series(given), errors="coerce").to_numpy(np.float32)
    wrong = np.flatnonzero(~(np.isfinite(numbers) & (numbers >= 0)))
    if len(wrong) or not numbers.any():
        what = f"that of data row {wrong[0] + 1} is {str(given[wrong[0]])!r}" if len(wrong) else "all are 0"
        raise DataError(f"{name}: weights must be finite numbers of 0 or more, not all 0, but {what}")
    return numbers


def _blank_labels(name: str, rows: int, codes: Array | None, schema: Schema) -> dict[str, Any]:
    """All clients came without labels, which the schema knows."""
    if codes is None:
        raise DataError(f"{name}: there are no labels, but the schema says that a label is a {schema.target}")
    blank = np.zeros(rows, dtype=np.float32 if schema.target == "number" else np.int64)
    nobody = np.zeros(int(codes.max()) + 1, dtype=bool)
    return {"y": blank, "classes": schema.classes, "class_names": schema.class_names, "labeled": nobody}


def _inputs(name: str, x: Any, kind: Kind | None) -> tuple[Kind, Array]:
    """Inputs with a row for each sample, and what kind they are."""
    x = _numpy(x)
    if x.dtype == object or x.dtype.kind not in "buif":
        raise DataError(f"{name}: x must be an array of numbers, but its type is {x.dtype}")
    if x.ndim == 0 or len(x) == 0:
        raise DataError(f"{name}: x must have one row for each sample, but its shape is {tuple(x.shape)}")
    if x.ndim == 1:
        x = x[:, None]
    if x.size == 0:
        raise DataError(f"{name}: a sample of x holds no numbers; its shape is {tuple(x.shape)}")
    if kind is not None and kind not in KINDS:
        raise DataError(f"{name}: kind must be one of {', '.join(KINDS)}, got {kind!r}")
    return _shape(name, x, kind)


def _numpy(values: Any) -> Array:
    return values.detach().cpu().numpy() if isinstance(values, torch.Tensor) else np.asarray(values)


def _column(name: str, what: str, values: Any, rows: int) -> Any:
    column = values if isinstance(values, pd.Categorical) else _numpy(values)
    if column.ndim == 2 and column.shape[1] == 1:
        column = column[:, 0]
    if column.ndim != 1 or len(column) != rows:
        raise DataError(
            f"{name}: `{what}` must hold one value for each of the {rows} rows of x, "
            f"but its shape is {tuple(column.shape)}"
        )
    return column


def _shape(name: str, x: Array, kind: Kind | None) -> tuple[Kind, Array]:
    if kind is None:
        kind = "image" if (x.dtype == np.uint8 and x.ndim in (3, 4)) or x.ndim == 4 else "features"
    if kind != "image":
        return kind, x
    if x.ndim == 3:
        return kind, x[:, None]
    if x.ndim != 4:
        raise DataError(
            f"{name}: images must be [rows, height, width], [rows, height, width, channels] or "
            f"[rows, channels, height, width], but the shape of x is {tuple(x.shape)}"
        )
    if x.shape[1] not in (1, 3, 4) and x.shape[3] in (1, 3, 4):
        return kind, x.transpose(0, 3, 1, 2)
    return kind, x


def _missing(values: Array | pd.Categorical) -> Array:
    """True where a value is absent: NaN, None, NaT or an empty string."""
    absent: Array = pd.isna(values)
    if isinstance(values, np.ndarray) and values.dtype.kind in "OUS":
        absent = absent | pd.Series(values).isin(["", b""]).to_numpy()
    return absent


def encode_clients(ids: Array | pd.Categorical, name: str) -> tuple[Array, Sequence[str] | None]:
    """Client ids as numbers 0, 1, … in sorted order, and their names (None: the ids were those numbers already)."""
    missing = np.flatnonzero(_missing(ids))
    if len(missing):
        lacking = "1 row has" if len(missing) == 1 else f"{len(missing)} rows have"
        raise DataError(f"{name}: {lacking} no client id, the first is data row {missing[0] + 1}")
    if isinstance(ids, pd.Categorical):
        used = ids.remove_unused_categories()
        names = used.categories.to_numpy()
        return _numbered(names if names.dtype.kind in "iu" else names.astype(str), used.codes)
    if ids.dtype.kind == "f":
        broken = ids[~(np.abs(ids) < 2**63) | (ids != np.rint(ids))]
        if len(broken):
            raise DataError(f"{name}: client ids must be whole numbers or strings, but one is {broken[0]}")
        ids = ids.astype(np.int64)
    if ids.dtype == object:
        kinds = sorted({type(v).__name__ for v in ids})
        if len(kinds) > 1:
            raise DataError(f"{name}: client ids must all be of one type, but there are {' and '.join(kinds)}")
        ids = ids.astype(np.int64 if isinstance(ids[0], int) else str)
    if ids.dtype.kind not in "iubUS":
        raise DataError(f"{name}: client ids must be whole numbers or strings, but their type is {ids.dtype}")
    if bool((ids[1:] >= ids[:-1]).all()):  # already grouped: no sort of millions of rows
        first = np.concatenate([[True], ids[1:] != ids[:-1]])
        return _numbered(ids[first], np.cumsum(first) - 1)
    return _numbered(*np.unique(ids, return_inverse=True))


def _numbered(unique: Array, codes: Array) -> tuple[Array, Sequence[str] | None]:
    """Codes of clients, and their names unless these are 0, 1, …."""
    plain = unique.dtype.kind in "iu" and int(unique[0]) == 0 and int(unique[-1]) == len(unique) - 1
    return codes.astype(np.int64, copy=False), None if plain else Names(unique)


def encode_labels(
    labels: Array | pd.Categorical,
    name: str,
    classes: int | None,
    task: Task | None,
    class_names: Sequence[str] | None = None,
) -> Labels:
    """Labels, none of them missing, as classes or targets.

    Whole numbers 0 … K−1 stay as they are (with ``classes`` also if some do not occur); other values are numbered in
    sorted order, and the names keep what they were. With ``class_names`` these are the classes, in their order.
    """
    if task not in (None, "classification", "regression"):
        raise DataError(f"{name}: task must be 'classification' or 'regression', got {task!r}")
    if isinstance(labels, pd.Categorical):
        used = labels.remove_unused_categories()
        words = encode_labels(used.categories.to_numpy().astype(str), name, classes, task, class_names)
        return replace(words, values=words.values[used.codes])
    labels = _numbers_or_words(labels, name)
    broken = labels[labels != np.rint(labels)] if labels.dtype.kind == "f" else labels[:0]
    if task == "regression" or (task is None and classes is None and class_names is None and len(broken)):
        targets = pd.to_numeric(pd.Series(labels), errors="coerce").to_numpy(np.float64)
        if np.isnan(targets).any():
            raise DataError(
                f"{name}: a regression needs numbers, but a label is {_word(labels[np.isnan(targets)][0])!r}; name a "
                f"column of numbers as label_column{FLAG}",
                "data.options.label_column",
            )
        return Labels(targets.astype(np.float32))
    if len(broken):
        raise DataError(f"{name}: classes must be whole numbers or strings, but a label is {broken[0]}")
    largest = max(float(labels.max()), -float(labels.min())) if labels.dtype.kind in "uf" else 0.0
    if largest >= 2**63:
        raise DataError(
            f"{name}: a label is {largest:.6g} in size, and whole numbers beyond 64 bits are no "
            f"classes; say task='regression' if they are quantities{FLAG}",
            "data.options.task",
        )
    if labels.dtype.kind in "iuf":
        labels = labels.astype(np.int64, copy=False)
    if class_names is not None:
        return Labels(_positions(labels, class_names, name), len(class_names), list(class_names))
    if labels.dtype.kind == "i" and classes is not None:
        low, high = int(labels.min()), int(labels.max())
        if low < 0 or high >= classes:
            raise DataError(
                f"{name}: labels must be 0 … {classes - 1} for classes={classes}, but there is a label "
                f"{low if low < 0 else high}"
            )
        return Labels(labels, classes)
    return _found_classes(labels, name, classes, task)


def _numbers_or_words(labels: Array, name: str) -> Array:
    """Labels of one type that can be compared."""
    if labels.dtype == object:
        numeric = all(isinstance(v, int | float | np.number) for v in labels)
        labels = labels.astype(np.float64 if numeric else str)
    if labels.dtype.kind not in "biufUS":
        raise DataError(f"{name}: labels must be numbers or strings, but their type is {labels.dtype}")
    if labels.dtype.kind == "f" and not np.isfinite(labels).all():
        raise DataError(f"{name}: a label is infinite")
    return labels


def _found_classes(labels: Array, name: str, classes: int | None, task: Task | None) -> Labels:
    """The different labels as classes."""
    whole = labels.dtype.kind == "i"
    unique = np.sort(pd.unique(labels)) if whole else np.unique(labels)  # hashing beats sorting for millions
    number = len(unique)
    if classes is not None and number > classes:
        raise DataError(f"{name}: classes={classes}, but there are {number} different labels")
    if number == 1:
        raise DataError(f"{name}: all labels are {str(unique[0])!r}; there is nothing to tell apart")
    numbered = whole and unique[0] == 0 and unique[-1] == number - 1
    note = ""
    if whole and task is None:
        choice = f"say task='regression' if they are quantities, or task='classification' if they are classes{FLAG}"
        if number > _MANY_CLASSES:
            raise DataError(f"{name}: {number} different whole numbers as labels: {choice}", "data.options.task")
        if number > 2 and (number > _FEW_CLASSES or not numbered):
            note = Note(
                f"the labels are {number} different whole numbers from {unique[0]} to {unique[-1]} and are read as "
                f"{number} classes: {choice}",
                "data.options.task",
            )
    if numbered:
        return Labels(labels, classes or number, note=note)
    names = [_word(v) for v in unique] + [f"class {i}" for i in range(number, classes or 0)]
    return Labels(np.searchsorted(unique, labels).astype(np.int64), len(names), names, note)


def rows_to_keep(
    name: str, missing: Array, codes: Array | None, names: Sequence[str] | None, partial: str
) -> tuple[Array, bool]:
    """Which rows to keep when labels are missing, and whether a client is left that has some labels but not all."""
    if partial not in ("keep", "drop", "error"):
        raise DataError(f"{name}: partial_labels must be 'keep', 'drop' or 'error', got {partial!r}")
    owner = np.zeros(len(missing), dtype=np.int64) if codes is None else codes
    absent = np.bincount(owner, weights=missing)
    total = np.bincount(owner)
    mixed = np.flatnonzero((absent > 0) & (absent < total))
    if len(mixed) and partial == "error":
        first = int(mixed[0])
        whose = "the rows" if codes is None else f"client {names[first] if names else first}"
        lack = "lack" if codes is None else "lacks"
        others = len(mixed) - 1
        more = "" if others == 0 else f" (and {others} other client{'s' if others > 1 else ''} likewise)"
        raise DataError(
            f"{name}: {whose} {lack} {int(absent[first])} of {int(total[first])} labels{more}, and "
            f"partial_labels='error' asks for all or none: fill them in, blank the rest, or drop those rows with "
            f"partial_labels='drop'{FLAG}",
            "data.options.partial_labels",
        )
    if partial == "keep":
        return np.ones(len(missing), dtype=bool), len(mixed) > 0
    return ~(missing & np.isin(owner, mixed)), False


def _word(value: object) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)


def _positions(labels: Array, class_names: Sequence[str], name: str) -> Array:
    """Where each label is among the classes."""
    place = {word: position for position, word in enumerate(class_names)}
    unique, which = np.unique(labels, return_inverse=True)
    strange = [_word(value) for value in unique if _word(value) not in place]
    if strange:
        raise DataError(f"{name}: a label is {strange[0]!r}, which is none of the classes {', '.join(class_names)}")
    return np.array([place[_word(value)] for value in unique], dtype=np.int64)[which]
