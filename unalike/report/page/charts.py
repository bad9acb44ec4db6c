"""The charts of a report: which numbers are drawn, and what is said about each mark."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import altair as alt
import numpy as np
from markupsafe import Markup

from unalike.report.figures.clients import Dot, client_map
from unalike.report.figures.file import inline
from unalike.report.figures.parts import sample_evenly
from unalike.report.figures.theme import GROUP_SHAPES, STEPS
from unalike.report.figures.training import Axis, Line, Scores, lines, scores, span, traffic
from unalike.report.figures.treatment import budgets, clusters, weights
from unalike.report.page.read import Run
from unalike.report.page.words import GROUP_NAMES, Scale, groups_present
from unalike.runs.map_data import plane
from unalike.runs.result import Summary
from unalike.runs.words import counted, epsilon

_MOST_DOTS = 6000  # of all maps of one kind on a page together
_ROUND = Axis("round", ",d", whole=True)


class Panel(NamedTuple):
    """One chart with its heading; ``run``: whose it is, None: of all."""

    name: str
    about: str
    title: str
    chart: alt.LayerChart
    run: int | None = None

    @property
    def svg(self) -> Markup:
        return Markup(inline(self.chart, self.title))  # vega escapes all text


def accuracy(runs: Sequence[Run], scale: Scale, legend: bool = False) -> list[Panel]:
    """Score per round, one panel for each group of clients, all with the same scale; a page has its own legend."""
    drawn = {group: _lines(runs, group, scale) for group in GROUP_NAMES}
    heights = [y for each in drawn.values() for line in each for _, y in line.points]
    y = Axis(format=scale.format, domain=span(heights))
    return [
        Panel(GROUP_NAMES[group], "", f"{scale.metric} on {GROUP_NAMES[group]}", lines(each, _ROUND, y, legend=legend))
        for group, each in drawn.items()
        if each
    ]


def _lines(runs: Sequence[Run], name: str, form: Callable[[float], str]) -> list[Line]:
    """A value of each round, of a group of clients the mean; one line for each run that has any."""
    found = []
    for i, run in enumerate(runs):
        values = [(row.round, getattr(row, name)) for row in run.rounds]
        means = [(x, value.mean if isinstance(value, Summary) else value) for x, value in values]
        points = [(x, y) for x, y in means if y is not None and math.isfinite(y)]
        bands = [one.std for _, one in values if isinstance(one, Summary)] if len(run.seeds) > 1 else []
        if points:
            tips = [f"{run.label}\nround {x:,}: {form(y)}" for x, y in points]
            found.append(Line(i, run.label, points, tips, bands if len(bands) == len(points) else []))
    return found


def distribution(runs: Sequence[Run], scale: Scale) -> list[Panel]:
    """All clients' scores at the end, one panel for each group of clients, all with the same scale."""
    x = Axis(scale.metric, scale.format, domain=span(score_span(runs) or ()))
    panels = []
    for group in groups_present(runs):
        found = [(run.label, list(run.scores(group).values()), run.result.accuracy.of(group)) for run in runs]
        if clients := {client for run in runs for client, _ in run.scores(group)}:
            chart = scores([Scores(i, *one) for i, one in enumerate(found)], x, scale, scale.tail)
            about, title = counted(len(clients), "client"), f"{scale.metric} of {GROUP_NAMES[group]}"
            panels.append(Panel(GROUP_NAMES[group], about, title, chart))
    return panels


def costs(runs: Sequence[Run], legend: bool = False) -> list[Panel]:
    """Bytes of each run; ε and loss over rounds."""
    panels = []
    if any(run.result.bytes.up or run.result.bytes.down for run in runs):
        chart = traffic([(run.label, run.result.bytes.up, run.result.bytes.down) for run in runs])
        panels.append(Panel("Bytes sent", "up by clients, down to them", "bytes sent by each run", chart))
    for name, about, drawn in (
        ("Privacy spent", "ε so far", _lines(runs, "epsilon", epsilon)),
        ("Training loss", "as the method reports it", _lines(runs, "loss", "{:.3g}".format)),
    ):
        heights = [y for line in drawn for _, y in line.points]
        if any(heights):
            chart = lines(drawn, _ROUND, Axis(domain=span([0.0, *heights])), legend=legend)
            panels.append(Panel(name, about, f"{name} over rounds", chart))
    return panels


def treatment(runs: Sequence[Run]) -> list[Panel]:
    """Who spent what, who has which weight, and who is in which cluster; for each run that has such a thing."""
    panels = []
    for i, run in enumerate(runs):
        own, treated = run.result.privacy.clients, run.treated
        name = "" if len(runs) == 1 else f", {run.label}"
        if own:
            title = f"ε that clients declared and spent, {run.label}"
            panels.append(Panel(f"Own ε{name}", "bar: spent, line: declared", title, budgets(own), i))
        if treated and treated.weight:
            title = f"weights of clients, {run.label}"
            panels.append(Panel(f"Weights{name}", "in the last round", title, weights(treated, own), i))
        if treated and treated.cluster:
            count = counted(len({one for one in treated.cluster if one is not None}), "cluster")
            about = f"{count}, {'in the plane of first updates' if treated.place else 'a column each'}"
            panels.append(Panel(f"Clusters{name}", about, f"clusters of clients, {run.label}", clusters(treated), i))
    return panels


def client_maps(runs: Sequence[Run], scale: Scale) -> list[list[Panel]]:
    """Clients as points, near each other if alike, coloured by how well a run serves them; one list for each kind."""
    kinds = [
        [panel for i in range(len(runs)) if (panel := _map(i, kind, runs, scale)) is not None]
        for kind in ("label_histogram", "descriptor")
    ]
    return [panels for panels in (kinds if len(runs) > 1 else [kinds[0] + kinds[1]]) if panels]


def _map(number: int, kind: str, runs: Sequence[Run], scale: Scale) -> Panel | None:
    """A run's clients by their label histograms or by their descriptors; None if it has none, or they form a line."""
    run, labels = runs[number], kind == "label_histogram"
    clients = run.map
    rows = np.array(getattr(clients, kind, None) or [[]], dtype=np.float64)
    if clients is None or not rows.size:
        return None
    if labels:
        rows = rows / np.maximum(rows.sum(1, keepdims=True), 1e-12)
    places = plane(rows)
    wide, high = np.ptp(places, axis=0)
    if high <= 1e-6 * wide:  # shares of two classes do
        return None
    largest = max(clients.n, default=1) or 1
    names = clients.class_names or [str(i) for i in range(rows.shape[1])]
    spots = []
    for i in sorted(range(len(rows)), key=lambda i: -clients.n[i]):  # large ones first, so that they hide no small one
        about = f", {counted(clients.n[i], 'sample')})" + (f"\nmostly {_top(rows[i], names)}" if labels else "")
        radius = 2.8 + 3.4 * math.sqrt(clients.n[i] / largest)
        spots.append((clients.names[i], clients.group[i], places[i], about, radius))
    words = []
    if labels and len(names) <= 20:  # a class is written where the clients that have much of it are
        centres = (rows**2).T @ places / np.maximum((rows**2).sum(0), 1e-300)[:, None]
        words = [(*centres[c].tolist(), name) for c, name in enumerate(names) if rows[:, c].any()]
    chart = client_map(dots(run, spots, scale, runs), words)
    title = f"map of {len(clients.names)} clients by {kind.replace('_', ' ')}, {run.label}"
    return Panel(run.label, f"by {'labels' if labels else 'descriptors'}", title, chart, number)


def _top(shares: np.ndarray, names: Sequence[str]) -> str:
    best = np.argsort(-shares)[:3]
    return ", ".join(f"{names[c]} {100 * shares[c]:.0f}%" for c in best if shares[c] > 0.05) or "evenly mixed"


def score_span(runs: Sequence[Run]) -> tuple[float, float] | None:
    """The lowest and the highest score of any client: the ends of the scale of colours on maps."""
    found = [score for run in runs for score in run.mean_scores().values()]
    return (min(found), max(found)) if found else None


def dots(
    run: Run, clients: Sequence[tuple[str, str, Sequence[float], str, float]], scale: Scale, runs: Sequence[Run]
) -> list[Dot]:
    """Clients (name, group, place, what is said about it, radius) in the colours of their scores."""
    scored, (low, high) = run.mean_scores(), score_span(runs) or (0.0, 0.0)
    found = []
    # the more runs have a map, the fewer dots on each
    for name, group, (x, y), about, radius in sample_evenly(clients, max(200, _MOST_DOTS // len(runs))):
        score, step = scored.get((name, group)), None
        if score is not None:
            step = min(int(STEPS * (score - low) / (high - low)), STEPS - 1) if high > low else STEPS - 1
            step = STEPS - 1 - step if run.lower_is_better else step
        tip = f"{name} ({group}{about}\n{run.label}: {'not served' if score is None else scale(score)}"
        found.append(Dot(float(x), float(y), tip, math.pi * radius**2, step, GROUP_SHAPES.get(group, "square")))
    return found
