"""What a person sees while a run goes on: a live line in a terminal, plain lines elsewhere, or nothing."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any, Protocol

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from motley.studio.result import epsilon, number, size

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
    """One line that moves: bar, round, scores, loss, bytes, ε and the time left."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._progress: Progress | None = None
        self._task = TaskID(0)
        self._seen: dict[str, Any] = {}
        self._share = True

    def begin(self, label: str, rounds: int, done: int, metric: str) -> None:
        self._seen, self._share = {}, metric == "accuracy"
        self._progress = Progress(
            TextColumn("[bold]{task.description}"),
            BarColumn(bar_width=20),
            MofNCompleteColumn(),
            TextColumn("{task.fields[scores]}"),
            TimeRemainingColumn(compact=True),
            console=self._console,
        )
        self._progress.start()
        self._task = self._progress.add_task(label, total=rounds, completed=done, scores="starting")

    def round(self, record: Mapping[str, Any]) -> None:
        assert self._progress is not None
        self._seen.update({name: value for name, value in record.items() if value is not None})
        scores = describe(self._seen, self._share)
        self._progress.update(self._task, completed=record["round"], scores=scores)

    def note(self, text: str) -> None:
        self._console.print(text, style="yellow", highlight=False)

    def end(self) -> None:
        if self._progress is not None:
            self._progress.stop()
            self._progress = None


class Lines:
    """A line for each evaluated round, and one now and then between them."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._last = 0.0
        self._begun = (0.0, 0)
        self._label, self._rounds, self._share = "", 0, True

    def begin(self, label: str, rounds: int, done: int, metric: str) -> None:
        self._label, self._rounds, self._share = label, rounds, metric == "accuracy"
        self._last = time.monotonic()
        self._begun = (self._last, done)

    def round(self, record: Mapping[str, Any]) -> None:
        now = time.monotonic()
        if "seen" not in record and now - self._last < PLAIN_EVERY:
            return
        self._last = now
        begun, done = self._begun
        left = (now - begun) / max(1, record["round"] - done) * (self._rounds - record["round"])
        line = (
            f"{self._label}: round {record['round']}/{self._rounds}  {describe(record, self._share)}  {left:.0f} s left"
        )
        self._console.print(line, highlight=False, soft_wrap=True, markup=False)

    def note(self, text: str) -> None:
        self._console.print(text, highlight=False, soft_wrap=True, markup=False)

    def end(self) -> None:
        pass


def describe(record: Mapping[str, Any], share: bool) -> str:
    """A round's numbers in one line."""
    parts = []
    for group in ("seen", "unseen", "unlabeled"):
        if record.get(group):
            parts.append(f"{group} {number(record[group]['mean'], share)}")
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
