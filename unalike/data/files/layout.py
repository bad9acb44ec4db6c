"""How a file or table is laid out, as its owner says; and what comes of reading it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from unalike.data.source import Array, DataError, names_in

Missing = Literal["error", "drop", "mean", "client", "keep"]
KnownFrom = Literal["training", "the schema"]  # where the columns that are wanted are known from
Features = Mapping[str, Sequence[str] | None]  # a table's feature columns in order; those of text with their values
MISSING = " is missing"  # the end of an indicator's name


@dataclass(frozen=True)
class Layout:
    """How a file or table is laid out, and what it must hold.

    - ``client_column`` (default ``client``) says whose a row is, ``label_column`` (default ``y``) holds the labels.
      ``id_column`` names the rows (in NPZ it is an array), ``epsilon_column`` says what ε a client grants.
      ``weight_column`` says how much a row counts in training.
    - ``features``: the columns to learn from, all others are left out; ``drop``: columns to leave out. ``categorical``:
      columns whose numbers are names. Each is a list, or names with commas between them.
    - ``na_values``: what stands for a missing value, beside an empty cell, such as ``?,-9``. ``decimal``: ``","`` for
      numbers such as 3,14. ``delimiter``: of cells.
    - ``missing``: a missing feature is an error, or its row is left out (``"drop"``), or it becomes the mean by which
      inputs are scaled (``"mean"``) or that of its client's own training rows (``"client"``). It stays NaN here for
      the last two, and with ``"keep"``, for a caller that deals with it. ``indicator``: each feature that lacks values
      has a 0/1 feature beside it that says where.
    - ``intercept``: one feature more, which is 1 in every row, so that a linear model need not pass through 0.
    - ``known``: the features are those of an earlier table or a schema, found by name and with its values of text;
      beside those of training, other columns are ignored, and the client and label columns may be absent.
    """

    client_column: str | None = None
    label_column: str | None = None
    id_column: str | None = None
    epsilon_column: str | None = None
    weight_column: str | None = None
    features: str | Sequence[str] | None = None
    drop: str | Sequence[str] = ()
    categorical: str | Sequence[str] = ()
    na_values: Any = ()
    decimal: str = "."
    delimiter: str | None = None
    missing: Missing = "error"
    indicator: bool = False
    intercept: bool = False
    size: int | Sequence[int] | None = None  # of images, in pixels
    known: Features | None = None
    known_from: KnownFrom = "training"
    id_required: bool = True  # else a file without the id column is read without ids

    def __post_init__(self) -> None:
        if self.missing not in get_args(Missing):
            raise DataError(f"missing must be 'error', 'drop', 'mean' or 'client', got {self.missing!r}")
        if self.decimal not in (".", ","):
            raise DataError(f"decimal must be '.' or ',', got {self.decimal!r}")
        for option in ("features", "drop", "categorical", "na_values"):
            if (given := getattr(self, option)) is not None:
                object.__setattr__(self, option, names_in(given))

    @property
    def text(self) -> set[str]:
        """Columns that are read as text: ids too, because 007 is not 7."""
        known = {column for column, values in (self.known or {}).items() if values is not None}
        return known | {self.client_column or "client", *self.categorical, *filter(None, [self.id_column])}


@dataclass(frozen=True)
class ColumnReport:
    """What was made of one column of a table."""

    name: str
    role: str  # client, label, id, ε, weight, feature, left out
    content: str  # e.g. "numbers from 1 to 9", "text with 3 values: a, b, c"
    missing: int = 0


@dataclass(frozen=True)
class RawRows:
    """What a file or folder holds, as it stands there."""

    x: Array  # [rows, ...]; of a table float32 [rows, features]: a text column is one feature for each of its values
    y: Any  # [rows] values, or a pandas Categorical; None: there are no labels
    client: Any  # [rows] values, or a pandas Categorical, which takes little memory; None: the file does not say
    columns: Features | None = None  # None: no table
    empty: Sequence[str] = ()  # clients without a row
    ids: Array | None = None  # of the rows
    weight: Array | None = None  # of the rows
    ignored: list[str] = field(default_factory=list)  # columns that an earlier table did not have
    incomplete: int = 0  # rows left out for lack of a value
    gaps: bool = False  # some features are missing (NaN)
    column_reports: Sequence[ColumnReport] = ()  # a table's columns
    notes: Sequence[str] = ()  # what may not be meant
