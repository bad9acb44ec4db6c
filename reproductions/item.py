"""An item is a table or figure of a document: its claim, the rows to compare, and how to compute them.

Everything that decides a verdict is written down in the item before anything runs: the paper's value of each row, the
tolerance, and where the tolerance comes from.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, TypeVar

from unalike.report.figures.file import Figure
from unalike.runs.words import counted

Verdict = Literal["holds", "differs", "not decided", "not comparable"]
TwoCores = Literal["yes", "hours", "scaled", "no"]
"""Whether two cores reach the paper's scale: in minutes, in hours, only scaled down, or not at all."""

Numbers = dict[str, Any]  # what a part found: numbers and lists of them, as JSON has them
Tick = Callable[[int, int], None]  # (done, total): how far a part is
Choice = TypeVar("Choice")
SEEDS_NEEDED = 3  # by a claim in which chance has a part


@dataclass(frozen=True)
class Row:
    """One line to compare; made by ``near`` or ``claim``.

    - ``paper``: the number as printed, or the claim in words. ``low`` and ``high``: what ours must lie between.
    - ``because``: where the tolerance comes from: the paper's own spread, the seeds' spread, or the scale.
    - ``test``: what must lie there. ``mean``: the mean over seeds. ``margin``: the mean over at least three seeds, with
      two standard errors on both sides; where the bound is nearer than that, nothing is decided. ``every``: each value.
    - ``main``: what the document is cited for; without it the item does not hold, whatever the other rows say.
    - ``not_comparable``: why ours says nothing about the paper's, for example a setting searched to match it.
    - ``full_only``: only a run at the paper's scale can be compared.
    - ``explanation``: shown if the row differs.
    """

    what: str
    paper: float | str
    low: float
    high: float
    because: str
    test: Literal["mean", "margin", "every"] = "mean"
    main: bool = False
    not_comparable: str = ""
    full_only: bool = False
    explanation: str = ""

    def __post_init__(self) -> None:
        if not self.because:
            raise ValueError(f"{self.what}: a tolerance must say where it comes from (because=...)")
        if not self.low <= self.high:
            raise ValueError(f"{self.what}: nothing lies between {self.low} and {self.high}")
        if math.isinf(self.low) and math.isinf(self.high) and not self.not_comparable:
            raise ValueError(f"{self.what}: every number would satisfy this row, so it tests nothing")

    def declared(self) -> Numbers:
        """The row before anything is computed."""
        tolerance = {"low": _finite(self.low), "high": _finite(self.high), "because": self.because}
        main = {"main": True} if self.main else {}
        return {"what": self.what, "paper": self.paper, "tolerance": tolerance, "test": self.test, **main}

    def compare(self, values: Sequence[float] | None, scaled: str) -> Numbers:
        """The row as it stands in verdict.json. ``values``: one for each seed; ``scaled``: how the run was smaller."""
        found = [float(value) for value in values or ()]
        verdict, why = self.judge(found, scaled)
        return {
            **self.declared(),
            "ours": _finite(statistics.fmean(found)) if found else None,
            "spread": statistics.stdev(found) if len(found) > 1 and all(map(math.isfinite, found)) else None,
            "values": [_finite(value) for value in found],
            "verdict": verdict,
            **({"why": why} if why else {}),
        }

    def judge(self, found: Sequence[float], scaled: str) -> tuple[Verdict, str]:
        """The verdict on these values, and why where that is not plain."""
        if self.not_comparable:
            return "not comparable", self.not_comparable
        if self.full_only and scaled:
            return "not comparable", f"scaled down: {scaled}"
        if not found:
            return "not comparable", "not part of this run" + (f", which is scaled down: {scaled}" if scaled else "")
        if not all(math.isfinite(value) for value in found):
            return "differs", self.explanation or "a seed gave no finite number"
        mean, margin = statistics.fmean(found), 0.0
        if self.test == "margin":
            if len(found) < SEEDS_NEEDED:
                return "not decided", f"{counted(len(found), 'seed')}; a claim like this one needs {SEEDS_NEEDED}"
            margin = 2 * statistics.stdev(found) / math.sqrt(len(found))
        tested = found if self.test == "every" else (mean - margin, mean + margin)
        if all(self.low <= value <= self.high for value in tested):
            return "holds", ""
        if self.test == "margin" and mean + margin >= self.low and mean - margin <= self.high:
            return "not decided", f"{mean:.3g} ± {margin:.2g} (two standard errors) reaches across the bound"
        return "differs", self.explanation


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
    exact: bool = False,
    **more: Any,
) -> Row:
    """A statement of the paper as a number with bounds.

    The mean over seeds must be clear of the bounds by two standard errors. ``exact``: chance has no part in it, as in
    an identity or a count, and every value must lie between them.
    """
    return Row(what, paper, low, high, because, test="every" if exact else "margin", **more)


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

    def choose(self, what: str, paper: Choice, smaller: Choice) -> Choice:
        """The paper's own with ``--full``, else a smaller one. The verdict's scale says which it was."""

    def part(self, name: str, compute: Callable[..., Numbers], **settings: Any) -> Numbers:
        """``compute(tick, **settings)``, or what it gave the last time with these settings."""


@dataclass(frozen=True)
class Item:
    """A table or figure that can be computed.

    - ``id``: document, kind and number in lower case: ``t2-figure-2.7``.
    - ``claim``: what the document says it shows, in words.
    - ``settings``: those that the document does not name, each with its value and how it was chosen.
    - ``lacks``: what no run of it has of the paper's, also not with ``--full``: a network, a data set, a panel.
    """

    id: str
    title: str
    claim: str
    two_cores: TwoCores
    rows: tuple[Row, ...]
    compute: Callable[[Work], Found]
    seeds: tuple[int, ...] = (0,)
    settings: Mapping[str, str] = field(default_factory=dict)
    lacks: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        names = [row.what for row in self.rows]
        if not names or len(set(names)) < len(names):
            raise ValueError(f"{self.id}: an item has rows, and each a name of its own; got {names}")


@dataclass(frozen=True)
class Planned:
    """A table or figure that nothing computes, and why."""

    id: str
    title: str
    two_cores: TwoCores
    why: str


def overall(rows: Sequence[Mapping[str, Any]]) -> Verdict:
    """An item differs if one of its rows does, and holds only if every row of its main claim does.

    Where no row is said to be the main claim, all that can be compared are.
    """
    main = [row["verdict"] for row in rows if row.get("main")]
    deciding = main or [row["verdict"] for row in rows if row["verdict"] != "not comparable"]
    if any(row["verdict"] == "differs" for row in rows):
        return "differs"
    if not deciding or "not comparable" in deciding:
        return "not comparable"
    return "not decided" if "not decided" in deciding else "holds"


def smaller(what: str, paper: object, here: object) -> str:
    """How a run is smaller than the paper's in one respect, such as ``10 of 200 rounds``; empty where it is not."""
    if here == paper:
        return ""
    if isinstance(here, tuple | list) and isinstance(paper, tuple | list):
        return f"{len(here)} of {len(paper)} {what}"
    if isinstance(here, int | float) and isinstance(paper, int | float):
        return f"{here:,} of {paper:,} {what}"
    return f"{here} for {paper}"


def _finite(value: float | None) -> float | None:
    """JSON has no infinity."""
    return value if value is not None and math.isfinite(value) else None
