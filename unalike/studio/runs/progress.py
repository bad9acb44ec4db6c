"""What a person sees while a run goes on: a live line in a terminal, plain lines elsewhere, or nothing."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any, Protocol

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

from unalike.studio.runs.result import GROUPS, score
from unalike.studio.words import duration, epsilon, size

PLAIN_EVERY = 10.0  # seconds between plain lines of rounds that were not evaluated


class Watcher(Protocol):
    """Is told what happens in a run; it changes nothing."""

    def begin(self, label: str, rounds: int, done: int, metric: str) -> None: ...

    def round(self, record: Mapping[str, Any]) -> None: ...

    def note(self, text: str) -> None: ...

    def end(self) -> None: ...


class Quiet:
    """Says nothing."""

    def begin(self, label: str, rounds: int, done: int, metric: str) -> None:
        pass

    def round(self, record: Mapping[str, Any]) -> None:
        pass

    def note(self, text: str) -> None:
        pass

    def end(self) -> None:
        pass


class Live:
    """Two lines that move: a bar with the round and the time left; below it scores, loss, bytes and ε."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._display: rich.live.Live | None = None
        self._progress = Progress()
        self._task = TaskID(0)
        self._latest: dict[str, Any] = {}
        self._metric = ""

    def begin(self, label: str, rounds: int, done: int, metric: str) -> None:
        self._latest, self._metric = {}, metric
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
        self._display.update(Group(self._progress, Text("  " + describe(self._latest, self._metric), style="dim")))

    def note(self, text: str) -> None:
        self._console.print(text, style="yellow", highlight=False)

    def end(self) -> None:
        if self._display is not None:
            self._display.stop()
            self._display = None


class Lines:
    """A line for each evaluated round, and one now and then between them."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._last = 0.0
        self._begun = (0.0, 0)
        self._label, self._rounds, self._metric = "", 0, ""

    def begin(self, label: str, rounds: int, done: int, metric: str) -> None:
        self._label, self._rounds, self._metric = label, rounds, metric
        self._last = time.monotonic()
        self._begun = (self._last, done)

    def round(self, record: Mapping[str, Any]) -> None:
        now = time.monotonic()
        if "seen" not in record and now - self._last < PLAIN_EVERY:
            return
        self._last = now
        begun, done = self._begun
        left = (now - begun) / max(1, record["round"] - done) * (self._rounds - record["round"])
        said = describe(record, self._metric)
        self.note(f"{self._label}: round {record['round']}/{self._rounds}  {said}  {duration(left)} left")

    def note(self, text: str) -> None:
        self._console.print(text, highlight=False, soft_wrap=True, markup=False)

    def end(self) -> None:
        pass


def describe(record: Mapping[str, Any], metric: str) -> str:
    """A round's numbers in one line."""
    parts = [f"{group} {score(record[group]['mean'], metric)}" for group in GROUPS if record.get(group)]
    if record.get("loss") is not None:
        parts.append(f"loss {record['loss']:.3f}")
    parts.append(f"↑{size(record['bytes_up'])} ↓{size(record['bytes_down'])}")
    if "epsilon" in record:
        parts.append(f"ε {epsilon(record['epsilon'])}")
    return "  ".join(parts)


def watcher_for(console: Console, quiet: bool) -> Watcher:
    """Live in a terminal, lines elsewhere."""
    if quiet:
        return Quiet()
    return Live(console) if console.is_terminal else Lines(console)
