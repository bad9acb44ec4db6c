"""Reading what an analysis is about, and what results say about rows: names of coordinates, clients left out."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from unalike.core.client import Clients
from unalike.core.failure import Failure
from unalike.core.request import Part
from unalike.data import DataError, Population, load, load_lazily
from unalike.data.lazy import LazyPopulation

_PIECE = 1 << 14  # rows that are looked at together
_SHOWN = 5

FILLED = (
    "missing='client' fills a gap by the mean of the client's other rows, so that one row changes others, and noise "
    "for a single row does not protect it: say missing='drop', or protect whole clients (unit='client')"
)
Ranges = Mapping[str, tuple[float, float]]  # of some columns; they are public
Groups = Iterable[Mapping[Part, Clients]]


def read_population(data: str, pieces: bool, **options: Any) -> tuple[Population, Groups, LazyPopulation | None]:
    """The clients in a named source, file or folder, their rows in groups, and where to have those of some of them.

    ``pieces``: the population has sizes and names alone, and a group the rows of some clients, which takes longer;
    else there is one group, and nothing more to read.
    """
    options = {"normalize": False, "test": 0.0, "unseen": 0.0, **options}
    if pieces:
        lazy = load_lazily(data, **options)
        return lazy.facts, lazy.groups(_PIECE), lazy
    population = load(data, **options)
    return population, [population.parts], None


def check_ranges(data: str, ranges: Ranges, columns: Sequence[str] | None) -> None:
    """Refuse public ranges of columns that are not there."""
    unknown = [name for name in ranges if name not in (columns or [])]
    if unknown:
        raise DataError(f"{data} has no column {unknown[0]!r}; it has {', '.join(columns or ['no names'])}")


def bad_rows(failures: Sequence[Failure], advice: str) -> list[str]:
    """A note on the clients that sent NaN, which tasks make of rows that they cannot use; none if there are none."""
    reasons = {one.client: one.reason for one in reversed(failures) if one.diverged}
    if not reasons:
        return []
    names = sorted(reasons)
    more = ", ..." if len(names) > _SHOWN else ""
    which = "client" if len(names) == 1 else f"{len(names)} clients,"
    return [f"left out: {which} {', '.join(names[:_SHOWN])}{more}: {reasons[names[0]]}; {advice}"]


def coordinate_names(columns: Mapping[str, Sequence[str] | None]) -> list[str]:
    """A name for each coordinate of a row: a column's own, and for a column of text one for each of its values."""
    return [
        one
        for name, values in columns.items()
        for one in ([name] if values is None else [f"{name}={value}" for value in values])
    ]
