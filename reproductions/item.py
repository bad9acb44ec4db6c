"""An item is a table or figure of a document: its claim, the rows to compare, and how to compute them.

Everything that decides a verdict is written down in the item before anything runs: the paper's value of each row, the
tolerance, and where the tolerance comes from.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from unalike.report.figures.file import Figure

Verdict = Literal["holds", "differs", "not comparable"]
Scale = Literal["paper", "scaled"]
TwoCores = Literal["yes", "hours", "scaled", "no"]
"""Whether two cores reach the paper's scale: in minutes, in hours, only scaled down, or not at all."""

Numbers = dict[str, Any]  # what a part found: numbers and lists of them, as JSON has them
Tick = Callable[[int, int], None]  # (done, total): how far a part is


@dataclass(frozen=True)
class Row:
    """One line to compare; made by ``near`` or ``claim``.

    - ``paper``: the number as printed, or the claim in words. ``low`` and ``high``: what ours must lie between.
    - ``because``: where the tolerance comes from: the paper's own spread, the seeds' spread, or the scale.
    - ``every``: each seed must lie between the bounds; otherwise the mean over seeds.
    - ``not_comparable``: why ours says nothing about the paper's, for example a setting searched to match it.
    - ``full_only``: only a run at the paper's scale can be compared.
    - ``explanation``: shown if the row differs.
    """

    what: str
    paper: float | str
    low: float
    high: float
    because: str
    every: bool = False
    not_comparable: str = ""
    full_only: bool = False
    explanation: str = ""

    def __post_init__(self) -> None:
        if not self.because:
            raise ValueError(f"{self.what}: a tolerance must say where it comes from (because=...)")
        if not self.low <= self.high:
            raise ValueError(f"{self.what}: nothing lies between {self.low} and {self.high}")

    def compare(self, values: Sequence[float] | None, scaled: str) -> Numbers:
        """The row as it stands in verdict.json. ``values``: one for each seed; ``scaled``: how the run was smaller."""
        found = [float(value) for value in values or ()]
        verdict, why = self._verdict(found, scaled)
        ours = statistics.fmean(found) if found else None
        return {
            "what": self.what,
            "paper": self.paper,
            "ours": _finite(ours),
            "spread": _finite(statistics.stdev(found)) if len(found) > 1 else None,
            "tolerance": {"low": _finite(self.low), "high": _finite(self.high), "because": self.because},
            "verdict": verdict,
            **({"why": why} if why else {}),
        }

    def _verdict(self, found: list[float], scaled: str) -> tuple[Verdict, str]:
        if self.not_comparable:
            return "not comparable", self.not_comparable
        if self.full_only and scaled:
            return "not comparable", f"scaled down: {scaled}"
        if not found:
            return "not comparable", "not part of this run" + (f", which is scaled down: {scaled}" if scaled else "")
        tested = found if self.every else [statistics.fmean(found)]
        if all(math.isfinite(value) and self.low <= value <= self.high for value in tested):
            return "holds", ""
        broken = [value for value in found if not math.isfinite(value)]
        return "differs", self.explanation or ("a seed gave no finite number" if broken else "")


def near(what: str, paper: float, within: float, because: str, **more: Any) -> Row:
    """A number of the paper, and how far the mean of our seeds may lie from it."""
    return Row(what, paper, paper - within, paper + within, because, **more)


def claim(
    what: str,
    paper: str,
    because: str,
    *,
    low: float = -math.inf,
    high: float = math.inf,
    every: bool = True,
    **more: Any,
) -> Row:
    """A statement of the paper as a number with bounds, which every seed must keep."""
    return Row(what, paper, low, high, because, every=every, **more)


@dataclass
class Found:
    """What an item computed.

    - ``values``: by the rows' ``what``, a number for each seed. A row may be left out of a scaled run.
    - ``table``: all numbers behind them, as records of numbers.csv.
    - ``chart``: the figure; None for a table.
    """

    values: Mapping[str, Sequence[float]]
    table: list[dict[str, Any]]
    chart: Figure | None = None
    notes: list[str] = field(default_factory=list)


class Work(Protocol):
    """What an item gets to compute with."""

    @property
    def full(self) -> bool:
        """Whether the paper's scale was asked for."""

    def part(self, name: str, compute: Callable[..., Numbers], **settings: Any) -> Numbers:
        """``compute(tick, **settings)``, or what it gave the last time with these settings."""


@dataclass(frozen=True)
class Item:
    """A table or figure that can be computed.

    - ``id``: document, kind and number in lower case: ``t2-figure-2.7``.
    - ``claim``: what the document says it shows, in words.
    - ``settings``: those that the document does not name, each with its value and how it was chosen.
    - ``scaled``: how a run is smaller than the paper's unless ``--full`` is given; empty: it is not.
    """

    id: str
    title: str
    claim: str
    two_cores: TwoCores
    rows: tuple[Row, ...]
    compute: Callable[[Work], Found]
    seeds: tuple[int, ...] = (0,)
    settings: Mapping[str, str] = field(default_factory=dict)
    scaled: str = ""

    def __post_init__(self) -> None:
        names = [row.what for row in self.rows]
        if not names or len(set(names)) < len(names):
            raise ValueError(f"{self.id}: an item has rows, and each a name of its own; got {names}")

    def scale(self, full: bool) -> Scale:
        return "scaled" if self.scaled and not full else "paper"


@dataclass(frozen=True)
class Planned:
    """A table or figure that nothing computes, and why."""

    id: str
    title: str
    two_cores: TwoCores
    why: str


def overall(rows: Sequence[Mapping[str, Any]]) -> Verdict:
    """An item differs if one of its rows does, else holds if one of its rows does, else is not comparable."""
    verdicts = {row["verdict"] for row in rows}
    return "differs" if "differs" in verdicts else "holds" if "holds" in verdicts else "not comparable"


def _finite(value: float | None) -> float | None:
    """JSON has no infinity."""
    return value if value is not None and math.isfinite(value) else None
