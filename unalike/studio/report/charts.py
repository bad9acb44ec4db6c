"""The charts of a report: which numbers are drawn, and what is said about each mark."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import altair as alt
import numpy as np
from markupsafe import Markup

from unalike.studio.figures.clients import Dot, client_map
from unalike.studio.figures.file import inline
from unalike.studio.figures.theme import GROUP_SHAPES, STEPS
from unalike.studio.figures.training import Axis, Line, Scores, lines, scores, span, traffic
from unalike.studio.report.read import ClientMap, Round, Run
from unalike.studio.report.words import GROUP_NAMES, Scale, present
from unalike.studio.words import counted, epsilon

_MOST_DOTS = 6000  # of all maps of one kind on a page together


@dataclass(frozen=True)
class Panel:
    """One chart with its heading; ``run``: whose it is, None: of all."""

    name: str
    about: str
    svg: Markup
    run: int | None = None


def panel(name: str, about: str, title: str, chart: alt.LayerChart, run: int | None = None) -> Panel:
    return Panel(name, about, Markup(inline(chart, title)), run)  # vega escapes all text


def accuracy(runs: Sequence[Run], scale: Scale) -> list[Panel]:
    """Score per round, one panel for each group of clients, all with the same scale."""
    drawn = {group: _lines(runs, partial(_mean, group), scale) for group in present(runs)}
    heights = [y for each in drawn.values() for line in each for _, y in line.points]
    if not heights:
        return []
    y = Axis(format=scale.format, domain=span(heights))
    return [
        panel(GROUP_NAMES[group], "", f"{scale.metric} on {GROUP_NAMES[group]}", lines(each, _ROUND, y))
        for group, each in drawn.items()
        if each
    ]


_ROUND = Axis("round", ",d", whole=True)


def _mean(group: str, row: Round) -> float | None:
    summary = row.of(group)
    return None if summary is None else summary.mean


def _lines(runs: Sequence[Run], read: Callable[[Round], float | None], form: Callable[[float], str]) -> list[Line]:
    """What ``read`` finds in each round, one line for each run that has any."""
    found = []
    for i, run in enumerate(runs):
        points = [(row.round, y) for row in run.rounds if (y := read(row)) is not None and math.isfinite(y)]
        if points:
            found.append(Line(i, run.label, points, [f"{run.label}\nround {x:,}: {form(y)}" for x, y in points]))
    return found


def distribution(runs: Sequence[Run], scale: Scale) -> list[Panel]:
    """All clients' scores at the end, one panel for each group of clients, all with the same scale."""
    drawn = {group: [_scores(i, run, group, scale) for i, run in enumerate(runs)] for group in present(runs)}
    drawn = {group: rows for group, rows in drawn.items() if any(row.scores for row in rows)}
    every = [score for rows in drawn.values() for row in rows for score in row.scores]
    if not every:
        return []
    x = Axis(scale.metric, scale.format, domain=span(every))
    return [
        panel(
            GROUP_NAMES[group],
            counted(max(len(row.scores) for row in rows), "client"),
            f"{scale.metric} of {GROUP_NAMES[group]}",
            scores(rows, x, scale),
        )
        for group, rows in drawn.items()
    ]


def _scores(i: int, run: Run, group: str, scale: Scale) -> Scores:
    summary = run.result.accuracy.of(group)
    if summary is None:
        return Scores(i, run.label, "not served", [], None, None)
    says = f"{scale(summary.mean)} mean, {scale(summary.p10)} 10th percentile"
    return Scores(i, run.label, says, list(run.scores(group).values()), summary.mean, summary.p10)


def costs(runs: Sequence[Run]) -> list[Panel]:
    """Bytes of each run; ε and loss over rounds."""
    panels = []
    if any(run.result.bytes.up or run.result.bytes.down for run in runs):
        chart = traffic([(run.label, run.result.bytes.up, run.result.bytes.down) for run in runs])
        panels.append(panel("Bytes sent", "up by clients, down to them", "bytes sent by each run", chart))
    for name, about, form, read in _COSTS:
        drawn = _lines(runs, read, form)
        heights = [y for line in drawn for _, y in line.points]
        if any(heights):
            chart = lines(drawn, _ROUND, Axis(domain=span([0.0, *heights])))
            panels.append(panel(name, about, f"{name} over rounds", chart))
    return panels


_COSTS: tuple[tuple[str, str, Callable[[float], str], Callable[[Round], float | None]], ...] = (
    ("Privacy spent", "ε so far", epsilon, lambda row: row.epsilon),
    ("Training loss", "as the method reports it", lambda loss: f"{loss:.3g}", lambda row: row.loss),
)


def client_maps(runs: Sequence[Run], scale: Scale) -> list[list[Panel]]:
    """Clients as points, near each other if alike, coloured by how well a run serves them; one list for each kind."""
    kinds = []
    for kind, about in (("label_histogram", "labels"), ("descriptor", "descriptors")):
        panels = []
        for i, run in enumerate(runs):
            rows = None if run.map is None else getattr(run.map, kind)
            if run.map is not None and rows and len(rows[0]) > 0:
                chart = _map(run, run.map, np.asarray(rows, dtype=np.float64), about == "labels", scale, runs)
                title = f"map of {len(run.map.names)} clients by {kind.replace('_', ' ')}, {run.label}"
                panels.append(panel(run.label, f"by {about}", title, chart, i))
        if panels:
            kinds.append(panels)
    return [[one for panels in kinds for one in panels]] if len(runs) == 1 and kinds else kinds


def score_span(runs: Sequence[Run]) -> tuple[float, float] | None:
    """The lowest and the highest score of any client: the ends of the scale of colours on maps."""
    found = [row.score for run in runs for row in run.clients if row.score is not None]
    return (min(found), max(found)) if found else None


def marker(
    run: Run, scale: Scale, ends: tuple[float, float] | None
) -> Callable[[str, str, Sequence[float], str, float], Dot]:
    """What makes the dots of a run's map: a client's name, group and place, what is said about it, and its radius."""
    scored = {(row.client, row.group): row.score for row in run.clients}

    def mark(name: str, group: str, place: Sequence[float], about: str, radius: float) -> Dot:
        score = scored.get((name, group))
        step = None if score is None or ends is None else step_of(score, ends)
        tip = f"{name} ({group}{about}\n{run.label}: {'not served' if score is None else scale(score)}"
        return Dot(float(place[0]), float(place[1]), tip, math.pi * radius**2, step, GROUP_SHAPES.get(group, "square"))

    return mark


def _map(
    run: Run, clients: ClientMap, rows: np.ndarray, labels: bool, scale: Scale, runs: Sequence[Run]
) -> alt.LayerChart:
    if labels:
        rows = rows / np.maximum(rows.sum(1, keepdims=True), 1e-12)
    places = plane(rows)
    largest = max(clients.n, default=1) or 1
    names = clients.class_names or [str(i) for i in range(rows.shape[1])]
    mark = marker(run, scale, score_span(runs))
    dots = []
    shown = mapped(len(clients.names), len(runs))
    for i in sorted(shown, key=lambda i: -clients.n[i]):  # large ones first, so that they hide no small one
        about = f", {counted(clients.n[i], 'sample')})" + (f"\nmostly {_top(rows[i], names)}" if labels else "")
        radius = 2.8 + 3.4 * math.sqrt(clients.n[i] / largest)
        dots.append(mark(clients.names[i], clients.group[i], places[i].tolist(), about, radius))
    return client_map(dots, _class_words(rows, places, names) if labels and rows.shape[1] <= 20 else [])


def mapped(clients: int, runs: int) -> list[int]:
    """Which clients have a dot on a run's map, evenly: the more runs have one, the fewer."""
    most = min(clients, max(200, _MOST_DOTS // runs))
    return [int(i) for i in np.unique(np.linspace(0, clients - 1, most).round())]


def plane(rows: np.ndarray) -> np.ndarray:
    """[clients, 2] first two principal components, with a fixed sign so that equal data gives an equal picture."""
    centred = rows - rows.mean(0)
    _, _, axes = np.linalg.svd(centred, full_matrices=False)
    axes = np.vstack([axes, np.zeros((2, rows.shape[1]))])[:2]
    strongest = axes[np.arange(2), np.abs(axes).argmax(1)]
    return np.asarray(centred @ (axes * np.where(strongest < 0, -1.0, 1.0)[:, None]).T)


def _class_words(rows: np.ndarray, places: np.ndarray, names: Sequence[str]) -> list[tuple[float, float, str]]:
    """A class is written where the clients that have much of it are."""
    weights = rows**2
    totals = weights.sum(0)
    return [(*(weights[:, c] @ places / totals[c]).tolist(), names[c]) for c in range(rows.shape[1]) if totals[c] > 0]


def _top(shares: np.ndarray, names: Sequence[str]) -> str:
    best = np.argsort(-shares)[:3]
    return ", ".join(f"{names[c]} {100 * shares[c]:.0f}%" for c in best if shares[c] > 0.05) or "evenly mixed"


def step_of(score: float, ends: tuple[float, float]) -> int:
    low, high = ends
    share = (score - low) / (high - low) if high > low else 1.0
    return min(int(share * STEPS), STEPS - 1)
