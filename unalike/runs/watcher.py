"""Who watches a run: what it is given while the run goes on. The command line shows it (``commands/progress.py``)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from unalike.runs.words import duration


class Watcher:
    """Sees what happens in a run, and changes nothing. This one shows nothing; derive from it one that does."""

    def begin(self, label: str, rounds: int, done: int, metric: str) -> None: ...

    def round(self, record: Mapping[str, Any]) -> None: ...

    def workers(self, text: str) -> None:
        """How the workers of a cluster are doing, in a line; while they are waited for and after a round."""

    def note(self, text: str) -> None:
        """What the user should know; a ``Note``, where it names settings."""

    def end(self) -> None: ...


def describe_workers(report: Sequence[Mapping[str, Any]], late: Sequence[int], seconds: float) -> str:
    """The workers in a line: how fast each is (sites do not tell), who was started again, and who is waited for."""
    each = []
    for one in report:
        again = f", started again {one['restarts'] + one['missed']}×" if one["restarts"] + one["missed"] else ""
        speed = f"{one['rate']:,.0f} clients/s" if one["rate"] else f"{one['answered']:,} replies"
        each.append(f"{one['name']}: {speed}{again}")
    waiting = f"; late: {', '.join(report[one]['name'] for one in late)} ({duration(seconds)})" if late else ""
    return f"{'  '.join(each)}{waiting}"
