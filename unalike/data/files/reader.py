"""The user's own files, with no code: one file, a folder with a file for each client, or images in folders."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from unalike.core.lazy import pd
from unalike.core.notes import did_you_mean
from unalike.core.schema import Schema
from unalike.data.arrays import array_source
from unalike.data.files.archive import mapped_npz, open_npz
from unalike.data.files.frames import of_files, of_frame
from unalike.data.files.layout import MISSING, Layout, Missing, RawRows
from unalike.data.files.pictures import PICTURES, picture_folder, visible
from unalike.data.files.tabular import parse_table
from unalike.data.source import Array, DataError, Fill, Source

_TABLES = (".csv", ".csv.gz", ".tsv", ".tsv.gz", ".parquet", ".pq")
_KNOWN = (*_TABLES, ".npz")


def file_source(path: Path, *, schema: Schema | None = None, lazily: bool = False, **options: Any) -> Source:
    """A source from the user's own data.

    - NPZ: arrays ``x``, ``client`` and optionally ``y`` (see ``arrays.array_source`` for what they may hold).
    - CSV, TSV, Parquet: ``client_column`` (default ``client``) and ``label_column`` (default ``y`` if there is one);
      all other columns are features: numbers, dates, truth values, or text with at most 50 different values.
    - a folder with one such file for each client, called by its name; a client's file may lack the label column. With a
      ``client_column`` its tables are the parts of one.
    - a folder of images: ``client/class/image.png``, or ``client/image.png`` without labels; ``size`` scales them.

    ``schema``: what the data must be; columns, values of text and classes are then its own. ``options`` are fields of
    ``Layout`` and ``kind``, ``classes``, ``task``, ``partial_labels`` of ``array_source``. ``lazily``: arrays of an NPZ
    stay in their file where they can be mapped.
    """
    layout, others = _layout(path.name, schema, options)
    return _source(read_rows(path, layout, lazily), path.name, layout.missing, schema, others)


def frame_source(table: Any, *, name: str = "table", schema: Schema | None = None, **options: Any) -> Source:
    """A source from a table in memory, read as ``file_source`` reads a file of the same rows.

    ``table``: of pandas, or what has ``to_pandas``: a table of polars or pyarrow, a data set of Hugging Face.
    """
    frame = table if isinstance(table, pd.DataFrame) else table.to_pandas()
    titles: list[object] = list(frame.columns)
    wrong = [title for title in titles if not isinstance(title, str) or titles.count(title) > 1]
    if wrong:
        raise DataError(f"{name}: columns need names that differ, and one is {wrong[0]!r}; rename it")
    layout, others = _layout(name, schema, options)
    named = [str(title) for title in titles if isinstance(frame[title].dtype, pd.CategoricalDtype)]
    frame = frame.astype(dict.fromkeys(named, object)).reset_index(drop=True)
    roles = {layout.client_column or "client", layout.label_column or "y"}
    layout = replace(layout, categorical=(*layout.categorical, *(title for title in named if title not in roles)))
    return _source(parse_table(of_frame(frame, name), name, layout), name, layout.missing, schema, others)


def _layout(name: str, schema: Schema | None, options: Mapping[str, Any]) -> tuple[Layout, dict[str, Any]]:
    """How rows are laid out, and those options that are about what they mean."""
    own = [one.name for one in fields(Layout) if one.name not in ("known", "known_from", "id_required")]
    meaning = ["kind", "classes", "task", "partial_labels"]
    for option in options:
        if option not in (*own, *meaning):
            raise DataError(f"{name}: a file has no option {option!r}{did_you_mean(option, [*own, *meaning])}")
    laid_out = {key: value for key, value in options.items() if key in own}
    others = {key: value for key, value in options.items() if key in meaning}
    return Layout(known=None if schema is None else schema.columns, known_from="the schema", **laid_out), others


def _source(rows: RawRows, name: str, missing: Missing, schema: Schema | None, others: Mapping[str, Any]) -> Source:
    source = array_source(
        rows.x, rows.y, rows.client, name=name, schema=schema, ids=rows.ids, weight=rows.weight, **others
    )
    text = [title for title, values in (rows.columns or {}).items() if values is not None]
    pooled = [*source.pooled, *(f"the values of the text column {title!r}" for title in text)]
    if any(title.endswith(MISSING) for title in rows.columns or {}):
        pooled.append("which features lack values")
    fill: Fill | None = missing if missing in ("mean", "client") and rows.columns is not None else None
    return replace(
        source,
        dropped=rows.empty,
        incomplete=rows.incomplete,
        columns=rows.columns,
        pooled=pooled,
        fill=fill,
        gaps=rows.gaps,
        column_reports=rows.column_reports,
        notes=[*rows.notes, *source.notes],
    )


def read_rows(path: Path, layout: Layout, lazily: bool = False) -> RawRows:
    """What ``file_source`` makes a source of; ``lazily``: inputs may be an array that is mapped from a file."""
    if path.is_dir():
        inside = visible(path)
        if not inside:
            raise DataError(f"the folder {path} is empty")
        folders = [entry for entry in inside if entry.is_dir()]
        if len(folders) == len(inside):
            return picture_folder(path, folders, layout.size)
        if folders:
            raise DataError(
                f"{path} holds both files and folders; expected one data file for each client, or one folder of images "
                f"for each client"
            )
        return _folder_of_files(path, inside, layout)
    suffix, id_column = _suffix(path), layout.id_column
    if suffix is None:
        pictures = " (an image goes into a folder of its client)" if path.suffix.lower() in PICTURES else ""
        raise DataError(f"cannot read {path}: expected a file ending in {', '.join(_KNOWN)}, or a folder{pictures}")
    if suffix != ".npz":
        return parse_table(of_files([path], layout), path.name, layout)
    mapped = mapped_npz(path, "x") if lazily else None
    known = {"x", "y", "client"} | ({id_column} if id_column else set())
    arrays = _read_npz(path, known, {} if mapped is None else {"x": mapped})
    if id_column and id_column not in arrays and layout.id_required:
        raise DataError(f"{path}: there is no array {id_column!r} (id_column); it holds {', '.join(arrays)}")
    ids = arrays.get(id_column) if id_column else None
    return RawRows(arrays["x"], arrays.get("y"), arrays.get("client"), ids=ids)


def _suffix(path: Path) -> str | None:
    return next((suffix for suffix in _KNOWN if path.name.lower().endswith(suffix)), None)


def _read_npz(path: Path, known: set[str], given: Mapping[str, Array] = MappingProxyType({})) -> dict[str, Array]:
    """The arrays of a file, but for those that are given."""
    with open_npz(path) as archive:
        strange = sorted(set(archive.files) - known)
        if strange or "x" not in archive.files:
            raise DataError(
                f"{path} holds the arrays {', '.join(sorted(archive.files)) or 'none'}; expected x and, where there "
                f"are some, {' and '.join(sorted(known - {'x'}))}"
                + (f": rename or remove {strange[0]!r}" if strange else "")
            )
        found: dict[str, Array] = dict(given)
        for key in set(archive.files) - set(given):
            try:
                found[key] = archive[key]
            except ValueError as error:
                if "allow_pickle" not in str(error):
                    raise
                raise DataError(
                    f"{path}: the array {key!r} holds Python objects, which are never loaded; save numbers or strings, "
                    f"e.g. {key}.astype(str)"
                ) from error
    return found


def _folder_of_files(folder: Path, inside: list[Path], layout: Layout) -> RawRows:
    """One file for each client: all NPZ (x, y) or all tables. A file without rows is a client left out."""
    strange = [entry for entry in inside if _suffix(entry) is None]
    if strange:
        raise DataError(f"{strange[0]} is not a data file; expected files ending in {', '.join(_KNOWN)}")
    packed = [_suffix(entry) == ".npz" for entry in inside]
    if any(packed) and not all(packed):
        raise DataError(f"{folder}: some clients have NPZ files and some have tables; use one kind for all")
    if layout.client_column and not any(packed):
        return parse_table(of_files(inside, layout), folder.name, layout)
    if layout.client_column:
        raise DataError(f"{folder}: each NPZ file is one client, so there is no client column; leave client_column out")
    names = [entry.name[: -len(_suffix(entry) or "")] for entry in inside]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise DataError(f"{folder}: the client {twice[0]!r} has more than one file")
    if all(packed):
        if layout.id_column and layout.id_required:
            raise DataError(f"{folder}: the rows of several NPZ files have no ids; leave id_column out")
        return _join_arrays(inside, names)
    rows = parse_table(of_files(inside, layout, names), folder.name, replace(layout, client_column="client"))
    there = set(map(str, rows.client.categories))
    return replace(rows, empty=[name for name in names if name not in there])


def _join_arrays(inside: list[Path], names: list[str]) -> RawRows:
    found: dict[str, dict[str, Array]] = {}
    for path, name in zip(inside, names, strict=True):
        arrays = _read_npz(path, {"x", "y"})
        x, y = arrays["x"], arrays.get("y")
        if x.ndim == 0 or len(x) == 0:
            continue
        first, other = next(iter(found.items()), (name, arrays))
        if x.shape[1:] != other["x"].shape[1:] or x.dtype != other["x"].dtype:
            raise DataError(
                f"{path}: its samples have shape {x.shape[1:]} and type {x.dtype}, those of client {first!r} have "
                f"shape {other['x'].shape[1:]} and type {other['x'].dtype}"
            )
        if y is not None and len(y) != len(x):
            raise DataError(f"{path}: {len(x)} rows of x but {len(y)} labels")
        found[name] = arrays
    if not found:
        raise DataError(f"none of the {len(inside)} files holds a sample")
    xs = [arrays["x"] for arrays in found.values()]
    y = _join_labels(xs, [arrays.get("y") for arrays in found.values()])
    client = np.repeat(list(found), [len(x) for x in xs])
    return RawRows(np.concatenate(xs), y, client, empty=[name for name in names if name not in found])


def _join_labels(xs: list[Array], ys: list[Array | None]) -> Array | None:
    """All labels in one array; NaN or an empty string for a client that has none."""
    present = [y for y in ys if y is not None]
    if len(present) == len(ys):
        return np.concatenate(present)
    if not present:
        return None
    text = any(y.dtype.kind in "US" for y in present)
    blank = "" if text else np.nan
    filled = [np.full(len(x), blank) if y is None else y for x, y in zip(xs, ys, strict=True)]
    return np.concatenate([y.astype(str if text else np.float64) for y in filled])
