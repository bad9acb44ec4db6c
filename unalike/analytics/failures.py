"""The note about clients that were left out because their rows could not be used."""

from __future__ import annotations

from collections.abc import Sequence

from unalike.core.request import Failure

_SHOWN = 5


def bad_rows(failures: Sequence[Failure], advice: str) -> list[str]:
    """A note on the clients that sent NaN, which tasks make of rows that they cannot use; none if there are none."""
    reasons = {one.client: one.reason for one in reversed(failures) if "not finite" in one.reason}
    if not reasons:
        return []
    names = sorted(reasons)
    more = ", ..." if len(names) > _SHOWN else ""
    which = "client" if len(names) == 1 else f"{len(names)} clients,"
    return [f"left out: {which} {', '.join(names[:_SHOWN])}{more}: {reasons[names[0]]}; {advice}"]
