"""What a person sees while a run goes on: a live line in a terminal, plain lines elsewhere, or nothing."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import rich.live
from rich.console import Console, Group
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.text import Text

from unalike.commands.console import with_flags
from unalike.runs.result import GROUPS, score
from unalike.runs.watcher import Watcher
from unalike.runs.words import duration, size, stated

PLAIN_EVERY = 10.0  # seconds between plain lines of rounds that were not evaluated


class Live(Watcher):
    """Two lines that move: a bar with the round and the time left; below it scores, loss, bytes and ε."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._display: rich.live.Live | None = None
        self._progress = Progress()
        self._task = TaskID(0)
        self._latest: dict[str, Any] = {}
        self._metric = self._workers = ""

    def begin(self, label: str, rounds: int, done: int, metric: str) -> None:
        self._latest, self._metric, self._workers = {}, metric, ""
        self._progress = Progress(
            TextColumn("[bold]{task.description}"),
            BarColumn(bar_width=24),
            TextColumn("round"),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
        )
        self._task = self._progress.add_task(label, total=rounds, completed=done)
        self._display = rich.live.Live(self._progress, console=self._console, refresh_per_second=8)
        self._display.start()

    def round(self, record: Mapping[str, Any]) -> None:
        assert self._display is not None
        self._latest.update({name: value for name, value in record.items() if value is not None or name == "epsilon"})
        self._progress.update(self._task, completed=record["round"])
        self._show()

    def workers(self, text: str) -> None:
        self._workers = text
        self._show()

    def _show(self) -> None:
        lines = [describe(self._latest, self._metric)] if self._latest else []
        lines += [self._workers] if self._workers else []
        if self._display is not None:
            self._display.update(Group(self._progress, *(Text("  " + line, style="dim") for line in lines)))

    def note(self, text: str) -> None:
        self._console.print(with_flags(text), style="yellow", highlight=False)

    def end(self) -> None:
        if self._display is not None:
            self._display.stop()
            self._display = None


class Lines(Watcher):
    """A line for each evaluated round, and one now and then between them."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._last = 0.0
        self._first: tuple[float, int] | None = None  # when the first round ended, and its number
        self._label, self._rounds, self._metric, self._workers = "", 0, "", ""

    def begin(self, label: str, rounds: int, done: int, metric: str) -> None:
        self._label, self._rounds, self._metric = label, rounds, metric
        self._last, self._first = time.monotonic(), None

    def round(self, record: Mapping[str, Any]) -> None:
        now = time.monotonic()
        self._first = begun, first = self._first or (now, record["round"])
        if "seen" not in record and now - self._last < PLAIN_EVERY:
            return
        self._last = now
        left = ""
        if record["round"] > first:  # the first round also finds out how to compute, so it tells nothing
            left = duration((now - begun) / (record["round"] - first) * (self._rounds - record["round"]))
        said = describe(record, self._metric)
        self.note(f"{self._label}: round {record['round']}/{self._rounds}  {said}{left and f'  {left} left'}")
        if self._workers:
            self.note(f"  {self._workers}")

    def workers(self, text: str) -> None:
        self._workers = text
        if "late" in text and time.monotonic() - self._last > PLAIN_EVERY:
            self._last = time.monotonic()
            self.note(f"{self._label}: {text}")

    def note(self, text: str) -> None:
        self._console.print(with_flags(text), highlight=False, soft_wrap=True, markup=False)


def describe(record: Mapping[str, Any], metric: str) -> str:
    """A round's numbers in one line."""
    parts = [f"{group} {score(record[group]['mean'], metric)}" for group in GROUPS if record.get(group)]
    if record.get("validation") is not None:
        parts.append(f"validation {score(record['validation'], metric)}")
    if record.get("loss") is not None:
        loss = record["loss"]
        parts.append(f"loss {loss:.3f}" if 1e-3 <= abs(loss) < 1e3 else f"loss {loss:.3g}")
    if record.get("gap") is not None:
        parts.append(f"gap {record['gap']:.2g}")
    parts.append(f"↑{size(record['bytes_up'])} ↓{size(record['bytes_down'])}")
    if "epsilon" in record:
        parts.append(f"ε {stated(record['epsilon'], record.get('noise'))}")
    return "  ".join(parts)


def watcher_for(console: Console, quiet: bool) -> Watcher:
    """Live in a terminal, lines elsewhere."""
    if quiet:
        return Watcher()
    return Live(console) if console.is_terminal else Lines(console)
