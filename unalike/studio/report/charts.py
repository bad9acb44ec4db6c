"""The charts of a report: what is drawn, from which numbers, and the line that says how to read it."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence

import numpy as np

from unalike.studio.report import plots
from unalike.studio.report.markup import Html, join, tag
from unalike.studio.report.read import ClientMap, Round, Run
from unalike.studio.report.words import GROUP_NAMES, Scale, epsilon, listed, present, size

SHAPE = {"seen": "circle", "unseen": "diamond", "unlabeled": "triangle"}
_MOST_DOTS = 6000  # of all maps of one kind on a page together


def accuracy(runs: Sequence[Run], scale: Scale) -> Html:
    """Score per round, one panel for each group of clients, all with the same scale."""
    panels = {}
    for group in present(runs):
        lines = [plots.Series(i, run.label, _curve(run, group)) for i, run in enumerate(runs)]
        if any(line.points for line in lines):
            panels[group] = lines
    if not panels:
        return tag("p", "No round of this run was evaluated, so there is no curve to show.", class_="absent")
    heights = [y for lines in panels.values() for line in lines for _, y in line.points]
    ticks = plots.nice_ticks(min(heights), max(heights))
    return panels_of(
        [
            panel_of(
                GROUP_NAMES[group],
                "",
                plots.line_chart(lines, ticks, title=f"{scale.metric} on {GROUP_NAMES[group]}", form=scale.tick),
            )
            for group, lines in panels.items()
        ]
    )


def _curve(run: Run, group: str) -> list[tuple[float, float]]:
    points = [(row.round, summary.mean) for row in run.rounds if (summary := row.of(group))]
    return [(float(x), y) for x, y in points if y is not None]


def distribution(runs: Sequence[Run], scale: Scale) -> Html:
    """Every client's score at the end, one panel for each group of clients, all with the same scale."""
    panels = {}
    for group in present(runs):
        strips = [_strip(i, run, group, scale) for i, run in enumerate(runs)]
        if any(strip.scores for strip in strips):
            panels[group] = strips
    if not panels:
        return tag("p", "There are no scores of single clients, so there is no distribution to show.", class_="absent")
    scores = [score for strips in panels.values() for strip in strips for score, _ in strip.scores]
    ticks = plots.nice_ticks(min(scores), max(scores))
    return panels_of(
        [
            panel_of(
                GROUP_NAMES[group],
                f"{max(len(strip.scores) for strip in strips):,} clients",
                plots.strip_chart(
                    strips,
                    ticks,
                    title=f"{scale.metric} of {GROUP_NAMES[group]}",
                    x_title=scale.metric,
                    form=scale.tick,
                ),
            )
            for group, strips in panels.items()
        ]
    )


def _strip(i: int, run: Run, group: str, scale: Scale) -> plots.Strip:
    marks = [
        (row.score, f"{row.client}\n{run.label}: {scale(row.score)}{_tested(row.n_test)}")
        for row in run.clients
        if row.group == group and row.score is not None
    ]
    summary = run.result.accuracy.of(group)
    if summary is None or summary.mean is None:
        return plots.Strip(i, run.label, "not served", [], None, None)
    low = "" if summary.p10 is None else f", {scale(summary.p10)} 10th percentile"
    return plots.Strip(i, run.label, f"{scale(summary.mean)} mean{low}", marks, summary.mean, summary.p10)


def _tested(count: float | None) -> str:
    return "" if count is None else f" of {count:,.0f} test samples"


def costs(runs: Sequence[Run]) -> Html:
    """Loss, bytes and ε over rounds."""
    panels = []
    for name, about, form, read in _COSTS:
        lines = [plots.Series(i, run.label, _cost(run, read)) for i, run in enumerate(runs)]
        if any(y for line in lines for _, y in line.points):
            ticks = plots.nice_ticks(0.0, max(y for line in lines for _, y in line.points))
            chart = plots.line_chart(lines, ticks, title=f"{name} over rounds", form=form)
            panels.append(panel_of(name, about, chart))
    without = [run.label for run in runs if run.result.privacy.epsilon in (None, math.inf)]
    note = None
    if without:
        verb = "has" if len(without) == 1 else "have"
        note = tag(
            "p", f"{listed(without, 9)} {verb} no finite ε: something was released without noise.", class_="note"
        )
    return join([panels_of(panels), note])


def _cost(run: Run, read: Callable[[Round], float | None]) -> list[tuple[float, float]]:
    values = [(float(row.round), read(row)) for row in run.rounds]
    return [(x, y) for x, y in values if y is not None and math.isfinite(y)]


_COSTS: tuple[tuple[str, str, Callable[[float], str], Callable[[Round], float | None]], ...] = (
    ("Sent by clients", "total so far", size, lambda row: row.bytes_up),
    ("Sent to clients", "total so far", size, lambda row: row.bytes_down),
    ("Privacy spent", "ε so far", epsilon, lambda row: row.epsilon),
    ("Training loss", "as the method reports it", lambda loss: f"{loss:.3g}", lambda row: row.loss),
)


def client_maps(runs: Sequence[Run], scale: Scale) -> Html:
    """Clients as points, near each other if alike, shaded by how well each run serves them."""
    span = score_span(runs) or (0.0, 1.0)
    kinds: list[list[Html]] = []
    for kind, about in (("label_histogram", "labels"), ("descriptor", "descriptors")):
        panels = []
        for i, run in enumerate(runs):
            rows = None if run.map is None else getattr(run.map, kind)
            if run.map is not None and rows and len(rows[0]) > 0:
                chart = _map(run, run.map, np.asarray(rows, dtype=np.float64), kind, scale, span, len(runs))
                panels.append(panel_of(run.label, f"by {about}", chart, i))
        if panels:
            kinds.append(panels)
    if not kinds:
        return tag(
            "p", "The run folder holds neither label histograms nor descriptors, so there is no map.", class_="absent"
        )
    rows = [[panel for panels in kinds for panel in panels]] if len(runs) == 1 else kinds
    shown = {group for run in runs if run.map for group in run.map.group}
    return join([map_legend(shown, score_span(runs), scale), *(panels_of(row, "maps") for row in rows)])


def score_span(runs: Sequence[Run]) -> tuple[float, float] | None:
    """The lowest and the highest score of any client: the ends of the scale of colours on maps."""
    scores = [row.score for run in runs for row in run.clients if row.score is not None]
    return (min(scores), max(scores)) if scores else None


def map_legend(groups: Collection[str], span: tuple[float, float] | None, scale: Scale) -> Html:
    """What shapes and colours of a map mean."""
    marks = [
        tag("span", plots.key_mark(shape, "dot none"), f" {group}", class_="item")
        for group, shape in SHAPE.items()
        if group in groups
    ]
    ramp = None
    if span is not None:
        steps = [tag("i", class_=f"q{step}") for step in range(plots.STEPS)]
        ramp = tag("span", scale.tick(span[0]), tag("span", *steps, class_="ramp"), scale.tick(span[1]), class_="item")
    return tag("p", *marks, ramp, class_="legend")


def _map(
    run: Run, clients: ClientMap, rows: np.ndarray, kind: str, scale: Scale, span: tuple[float, float], runs: int
) -> Html:
    labels = kind == "label_histogram"
    if labels:
        rows = rows / np.maximum(rows.sum(1, keepdims=True), 1e-12)
    places = plane(rows)
    scored = {(row.client, row.group): row.score for row in run.clients}
    count = len(clients.names)
    largest = max(clients.n, default=1) or 1
    names = clients.class_names or [str(i) for i in range(rows.shape[1])]
    dots = []
    for i in sorted(
        mapped(count, runs), key=lambda i: -clients.n[i]
    ):  # large ones first, so that they hide no small one
        score = scored.get((clients.names[i], clients.group[i]))
        share = "" if not labels else f"\nmostly {_top(rows[i], names)}"
        result = "not served" if score is None else scale(score)
        tip = f"{clients.names[i]} ({clients.group[i]}, {clients.n[i]:,} samples){share}\n{run.label}: {result}"
        step = None if score is None else step_of(score, span)
        radius = 2.6 + 3.6 * math.sqrt(clients.n[i] / largest)
        shape = SHAPE.get(clients.group[i], "square")
        dots.append(plots.Dot(places[i, 0], places[i, 1], tip, radius, step, shape))
    words = _class_words(rows, places, names) if labels and rows.shape[1] <= 20 else []
    return plots.scatter(dots, words, title=f"map of {count} clients by {kind.replace('_', ' ')}, {run.label}")


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


def step_of(score: float, span: tuple[float, float]) -> int:
    low, high = span
    share = (score - low) / (high - low) if high > low else 1.0
    return min(int(share * plots.STEPS), plots.STEPS - 1)


def panel_of(name: str, about: str, chart: Html, run: int | None = None) -> Html:
    heading = tag("h3", name, " ", tag("span", about))
    return tag("figure", heading, chart, data_run=run, class_=None if run is None else "run")


def panels_of(panels: Sequence[Html], kind: str = "") -> Html:
    return tag("div", *panels, class_=f"panels {kind or f'n{min(len(panels), 4)}'}")
