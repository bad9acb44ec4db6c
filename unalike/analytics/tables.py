"""What results say about rows: names of coordinates, and clients whose rows could not be used."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from unalike.core.failure import Failure

_SHOWN = 5


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
