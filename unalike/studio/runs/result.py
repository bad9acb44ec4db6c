"""What a run came to, and the table in which several runs stand side by side."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from unalike.studio.errors import UserError
from unalike.studio.runs.folder import RESULT, read_json
from unalike.studio.runs.measure import GROUPS

NOT_SERVED = "not served"


@dataclass(frozen=True)
class Result:
    """A finished run, as in its ``result.json``.

    ``accuracy`` has ``seen``, ``unseen`` and ``unlabeled``, each with mean, std, p10 (10th percentile) over the scored
    clients, and how many clients there are, are scored and failed to be; or None where there is no such client or the
    method does not serve it. ``scored`` says which models were scored, and when.
    ``privacy`` has ``private``, ``epsilon``, ``delta`` and ``unit``; without a guarantee the last three are None.
    """

    method: str
    label: str
    data: str
    seed: int
    rounds: int
    seconds: float
    metric: str
    scored: str
    accuracy: dict[str, dict[str, float] | None]
    serves_unlabeled: bool
    bytes: dict[str, int]
    privacy: dict[str, Any]
    expected: dict[str, float | None] = field(default_factory=dict)
    failures: int = 0  # replies that clients failed to give
    partition: str = ""  # by which rows came to clients; empty: unknown
    clients: int = 0
    unseen: int = 0  # of the clients
    folder: Path | None = field(default=None, compare=False)

    def to_json(self) -> dict[str, Any]:
        return {name: value for name, value in asdict(self).items() if name != "folder"}

    @classmethod
    def load(cls, folder: Path) -> Result:
        content = read_json(folder / RESULT)
        try:
            return cls(**content, folder=folder)
        except TypeError as error:
            raise UserError(f"{folder / RESULT} is no result of this version of Unalike: {error}") from error

    def __str__(self) -> str:
        return as_text(table([[self]]))


def as_text(what: Table) -> str:
    console = Console(width=110, no_color=True, highlight=False)
    with console.capture() as captured:
        console.print(what)
    return captured.get().rstrip()


def table(groups: Sequence[Sequence[Result]], title: str = "") -> Table:
    """One line for each group of results that differ in the seed only.

    A single seed shows the mean over clients and, in brackets, their 10th percentile; several show mean ± std over
    seeds. Below it stands what the results are about.
    """
    caption = "\n".join(_about(groups))
    made = Table(
        title=title or None, caption=caption, caption_justify="left", title_justify="left", box=box.SIMPLE_HEAD
    )
    for column in ("method", *GROUPS, "up", "down", "ε", "time"):
        made.add_column(column, justify="left" if column == "method" else "right", overflow="fold")
    for results in groups:
        made.add_row(
            results[0].label,
            *(_score(results, group) for group in GROUPS),
            size(statistics.fmean(result.bytes["up"] for result in results)),
            size(statistics.fmean(result.bytes["down"] for result in results)),
            epsilon(max(_epsilon(result) for result in results)),
            f"{statistics.fmean(result.seconds for result in results):.1f} s",
        )
    return made


def _about(groups: Sequence[Sequence[Result]]) -> list[str]:
    """What is measured, over which clients, at which δ, and who is missing in the means."""
    results = [result for group in groups for result in group]
    many = max(map(len, groups)) > 1
    what = f"mean ± std over {len(groups[0])} seeds" if many else "mean over clients (10th percentile of clients)"
    lines = [f"{results[0].metric}, {what}"]
    lines += dict.fromkeys(
        f"{result.data}, partition {result.partition or 'not named'}, "
        f"{result.clients} clients, {result.unseen} of them unseen"
        for result in results
    )
    lines += dict.fromkeys(
        f"ε at δ = {result.privacy['delta']:.3g} for each {result.privacy['unit']}"
        for result in results
        if result.privacy["epsilon"]
    )
    for result in results:
        name = f"{result.label}, seed {result.seed}" if many else result.label
        for group, summary in result.accuracy.items():
            if summary is not None and summary.get("failed"):
                lines.append(
                    f"{name}: {summary['failed']} of {summary['clients']} {group} clients have no finite score "
                    "and are left out of the mean; a smaller --lr may help"
                )
        if result.failures:
            lines.append(f"{name}: {result.failures} replies of clients failed to come in training")
    return lines


def _epsilon(result: Result) -> float:
    spent = result.privacy["epsilon"]
    return math.inf if spent is None else float(spent)


def _score(results: Sequence[Result], group: str) -> str:
    found = [summary for result in results if (summary := result.accuracy[group]) is not None]
    if not found:
        return NOT_SERVED if group == "unlabeled" and not results[0].serves_unlabeled else "–"
    means = [summary["mean"] for summary in found]
    share = results[0].metric == "accuracy"
    if len(results) > 1:
        text = f"{number(statistics.fmean(means), share)} ± {number(statistics.pstdev(means), share)}"
    else:
        text = f"{number(means[0], share)} ({number(found[0]['p10'], share)})"
    wanted = results[0].expected.get(group)
    return text if wanted is None else f"{text} [expected {number(wanted, share)}]"


def number(value: float, share: bool = True) -> str:
    """A score as a person reads it: an accuracy in percent."""
    return f"{100 * value:.1f}%" if share else f"{value:.4g}"


def size(count: float) -> str:
    """Bytes in a unit that keeps the number short."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} TB"


def epsilon(value: float | None) -> str:
    return "∞" if value is None or math.isinf(value) else f"{value:.2f}"
