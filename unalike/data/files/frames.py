"""Tables as pieces of pandas tables: CSV, TSV and Parquet files, one or several, some rows at a time."""

from __future__ import annotations

import csv
import gzip
import importlib.util
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from unalike.core.lazy import pd
from unalike.core.notes import FLAG
from unalike.data.files.archive import reading
from unalike.data.files.layout import Layout
from unalike.data.source import DataError

ROWS = 1 << 16  # at a time


@dataclass(frozen=True)
class Piece:
    """Some rows of a table, and where they stand."""

    frame: pd.DataFrame
    name: str  # of the file, for messages
    first: int = 0  # how many rows of the file are before them
    one_of_many: bool = False  # are there other files?


# All pieces of a table from the start, with these columns as text.
Pieces = Callable[[Collection[str]], Iterator[Piece]]


def of_frame(frame: pd.DataFrame, name: str) -> Pieces:
    """A pandas table as one piece."""
    return lambda text: iter([Piece(frame, name)])


def of_files(paths: list[Path], layout: Layout, clients: list[str] | None = None, rows: int = ROWS) -> Pieces:
    """The rows of all files, one after the other; ``clients``: each file is one client, called so."""

    def pieces(text: Collection[str]) -> Iterator[Piece]:
        columns: tuple[Path, list[str]] | None = None
        for number, path in enumerate(paths):
            first = 0
            for frame in _frames(path, layout, text, rows):
                titles = [title for title in frame.columns if title != (layout.label_column or "y")]
                columns = columns or (path, titles)
                _check_same(path, titles, *columns)
                whole = frame if clients is None else frame.assign(client=clients[number])
                if len(frame) or len(paths) == 1:
                    yield Piece(whole, path.name, first, len(paths) > 1)
                first += len(frame)

    return pieces


def read_table(path: Path, layout: Layout) -> pd.DataFrame:
    """A whole file as one pandas table."""
    return pd.concat(list(_frames(path, layout, layout.text, ROWS)), ignore_index=True)


def is_parquet(path: Path) -> bool:
    return path.name.lower().endswith((".parquet", ".pq"))


def _check_same(path: Path, titles: list[str], first: Path, others: list[str]) -> None:
    odd = sorted(set(titles) ^ set(others))
    if odd:
        here, there = (path, first) if odd[0] in titles else (first, path)
        raise DataError(f"{path.parent}: the column {odd[0]!r} is in {here.name} but not in {there.name}")


def _frames(path: Path, layout: Layout, text: Collection[str], rows: int) -> Iterator[pd.DataFrame]:
    """A file's rows, some at a time, with its columns' names checked; a file without rows gives an empty table."""
    with reading(path):
        if is_parquet(path):
            if importlib.util.find_spec("pyarrow") is None:
                raise DataError(f"{path}: reading Parquet files needs pyarrow: pip install 'unalike[data]'")
            import pyarrow.parquet

            with pyarrow.parquet.ParquetFile(path) as file:
                _check_names(path, [str(title) for title in file.schema_arrow.names])
                if file.metadata.num_rows == 0:
                    yield file.schema_arrow.empty_table().to_pandas()
                for batch in file.iter_batches(rows):
                    yield batch.to_pandas()
        else:
            options = _csv_options(path, layout, text)
            with pd.read_csv(path, **options, chunksize=rows, low_memory=False) as pieces:
                yield from pieces


def _csv_options(path: Path, layout: Layout, text: Collection[str]) -> dict[str, Any]:
    """How pandas reads a CSV or TSV file, whose header and first row are checked."""
    separator = layout.delimiter or ("\t" if ".tsv" in path.name.lower() else ",")
    opened = gzip.open if path.name.lower().endswith(".gz") else open
    with opened(path, "rt", encoding="utf-8-sig", newline="") as lines:
        cells = csv.reader(lines, delimiter=separator)
        rows = (row for row in cells if row)
        header, first, line = next(rows, []), next(rows, []), cells.line_num
    if not header:
        raise ValueError("No columns to parse from file")
    titles = [title.strip() for title in header]
    if len(titles) == 1 and any(sign in titles[0] for sign in ";\t|"):
        raise DataError(
            f"{path}: only one column was found, {titles[0]!r}; is another delimiter needed? "
            f"Say e.g. delimiter=';'{FLAG}",
            "data.options.delimiter",
        )
    _check_names(path, titles)
    if len(first) > len(titles):  # pandas would take the first cells of all rows as an index
        raise DataError(
            f"{path}: line {line} has {len(first)} cells, but the header names {len(titles)} columns, so nobody can "
            "say which cell belongs to which; name the column that the header lacks, or remove the cell"
        )
    ids = {layout.client_column or "client", layout.id_column}
    return {
        "sep": separator,
        "header": 0,
        "names": titles,
        "decimal": layout.decimal,
        "dtype": {title: str for title in titles if title in text},
        "na_values": {title: list(layout.na_values) for title in titles if title not in ids},
    }


def _check_names(path: Path, titles: list[str]) -> None:
    repeated = sorted({title for title in titles if titles.count(title) > 1})
    if repeated:
        raise DataError(f"{path}: the column {repeated[0]!r} occurs more than once")
    nameless = [title for title in titles if title == "" or title.startswith("Unnamed: ")]
    if nameless:
        raise DataError(
            f"{path}: a column has no name ({nameless[0]!r}), which is often a saved row number and no feature; "
            f"name it or remove it"
        )
