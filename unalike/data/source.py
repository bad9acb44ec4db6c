"""A source: samples as they come, before they are dealt out to clients."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, overload

from numpy.typing import NDArray

from unalike.core.notes import Note

Array = NDArray[Any]
Kind = Literal["image", "features", "tokens"]
KINDS: tuple[Kind, ...] = ("image", "features", "tokens")
Fill = Literal["mean", "client"]  # what a missing number becomes: the mean of the scaling, or the client's own
COUNTED = "the number of classes (data.options.classes)"
NAMED = "the names of the classes"


class DataError(ValueError):
    """The data is not what was expected; the message says what was expected, what came and what to do.

    keys: the settings that it names, as in a ``Note``.
    """

    def __init__(self, message: str, *keys: str) -> None:
        self.note = Note(message, *keys)
        super().__init__(str(self.note))


class Names(Sequence[str]):
    """Client names kept as one array and turned into a string when read: a million names cost no Python objects."""

    def __init__(self, values: Array) -> None:
        self.values = values

    @overload
    def __getitem__(self, index: int) -> str: ...
    @overload
    def __getitem__(self, index: slice) -> Names: ...
    def __getitem__(self, index: int | slice) -> str | Names:
        if isinstance(index, slice):
            return Names(self.values[index])
        value = self.values[index]
        return value.decode() if isinstance(value, bytes) else str(value)

    def __len__(self) -> int:
        return len(self.values)


@dataclass(frozen=True, eq=False)
class Source:
    """Samples with what is known about them. Images stay uint8 [rows, channels, height, width].

    ``normalize`` says how inputs are scaled before a model sees them: by the published ``mean`` and ``std``
    (``"published"``), by the mean and standard deviation of the training clients' rows, for which these are asked
    (``"standard"``), or not at all (``"none"``).
    """

    name: str
    kind: Kind
    x: Array  # [rows, ...]
    y: Array | None = None  # [rows]: int64 classes or float32 targets
    classes: int | None = None  # None: targets are numbers, or there are none
    class_names: Sequence[str] | None = None
    client: Array | None = None  # [rows] int64: the natural client of a row, 0 .. clients - 1
    client_names: Sequence[str] | None = None
    labeled: Array | None = None  # [natural clients] bool: False for one who came without labels
    known: Array | None = None  # [rows] bool: which labels are there, where a client has some of them; None: see above
    weight: Array | None = None  # [rows] float32: how much each row counts in local training; None: all the same
    is_test: Array | None = None  # [rows] bool: the source's own division into training and test rows
    normalize: Literal["published", "standard", "none"] = "standard"
    mean: Array | None = None  # per channel, in units of x
    std: Array | None = None
    per_client: Mapping[str, Array] = field(default_factory=dict)  # [natural clients, ...], e.g. the true parameters
    shared: Mapping[str, Array] = field(default_factory=dict)  # what the server has or knows, e.g. its own points
    dropped: Sequence[str] = ()  # clients that came without a single sample
    incomplete: int = 0  # rows left out for lack of a value
    columns: Mapping[str, Sequence[str] | None] | None = None  # a table's features, text with its values; else None
    pooled: Sequence[str] = ()  # what was read off the rows of all clients together, e.g. the values of a text column
    fill: Fill | None = None  # how missing numbers (NaN) of a table are filled; None: there are none
    gaps: bool = False  # some numbers of a table are missing (NaN)
    ids: Array | None = None  # [rows] what the rows are called
    column_reports: Sequence[Any] = ()  # what was made of a table's columns (``files.layout.ColumnReport``)
    notes: Sequence[str] = ()  # what was decided about the rows that may not be meant
    whole: bool = False  # for analytics: unless asked for, no test rows and no unseen clients
    network: str | None = None  # the architecture that it is meant for; None: as its inputs suggest

    def __post_init__(self) -> None:
        rows = len(self.x)
        if rows == 0:
            raise DataError(f"{self.name}: there is not a single sample")
        for what, column in (
            ("y", self.y),
            ("client", self.client),
            ("is_test", self.is_test),
            ("known", self.known),
            ("weight", self.weight),
        ):
            if column is not None and (column.ndim != 1 or len(column) != rows):
                raise DataError(
                    f"{self.name}: `{what}` must hold one value for each of the {rows} rows of x, "
                    f"but its shape is {tuple(column.shape)}"
                )

    @property
    def clients(self) -> int | None:
        """How many natural clients there are; None: the source has no client ids."""
        return None if self.client is None else int(self.client.max()) + 1


def names_in(value: Any) -> tuple[str, ...]:
    """Names from a list, or with commas between them."""
    values = value.split(",") if isinstance(value, str) else value if isinstance(value, list | tuple) else [value]
    return tuple(str(one).strip() for one in values if str(one).strip())


def column_places(columns: Mapping[str, Sequence[str] | None]) -> dict[str, int]:
    """Where each column of a table begins in x."""
    widths = [1 if values is None else len(values) for values in columns.values()]
    return dict(zip(columns, itertools.accumulate([0, *widths[:-1]]), strict=True))


def number_places(columns: Mapping[str, Sequence[str] | None]) -> dict[str, int]:
    """Where each column of numbers of a table is in x."""
    return {name: place for name, place in column_places(columns).items() if columns[name] is None}
