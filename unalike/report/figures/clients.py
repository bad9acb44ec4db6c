"""Pictures of clients: a map on which alike ones are neighbours, and how unlike those of a data set are."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import altair as alt
import numpy as np

from unalike.data.population import Population
from unalike.report.figures.parts import Rows, as_they_are, chart_of, number, sample_evenly
from unalike.report.figures.theme import LIGHT
from unalike.runs.words import counted

MAP_WIDTH, MAP_HEIGHT = 240, 210  # of a map: several stand side by side
_TURNS = 400  # of the spiral on which a mark looks for a free spot
_MOST_APART = 400  # marks: a map of more is so full that they cover each other
_BARS = 60  # clients whose labels are drawn


class Dot(NamedTuple):
    """One client: where it is, what is said about it, how large, which step of the scale of scores, which shape."""

    x: float
    y: float
    tip: str
    size: float
    step: int | None  # None: not served
    shape: str


def client_map(
    dots: Sequence[Dot], words: Sequence[tuple[float, float, str]], fills: Sequence[str] | None = None
) -> alt.LayerChart:
    """Clients without axes (a direction has no unit), as far apart as they are unlike; ``words`` name places.

    ``fills``: a colour for each client, in the place of that of its score.
    """
    # one unit in both directions, so that distances are true
    spots = np.array([(dot.x, dot.y) for dot in dots])
    low, high = spots.min(0), spots.max(0)
    unit = max(1e-12, *((high - low) / 2 / (np.array([MAP_WIDTH, MAP_HEIGHT]) / 2 - 14)).tolist())

    def placed(some: np.ndarray, gap: float) -> list[tuple[float, float]]:
        return _apart(((some - (low + high) / 2) / unit).tolist(), gap)

    rows: Rows = []
    for dot, (left, top), fill in zip(dots, placed(spots, 8.0), fills or [""] * len(dots), strict=True):
        plain = "transparent" if dot.step is None else LIGHT[f"q{dot.step}"]
        looks = {"size": dot.size, "shape": dot.shape, "fill": fill or plain}
        rows.append(
            {"x": left, "y": top, "tip": dot.tip, "stroke": LIGHT["faint" if dot.step is None else "soft"], **looks}
        )
    written = placed(np.array([place for *place, _ in words]).reshape(-1, 2), 15.0)
    named: Rows = [{"x": x, "y": y, "word": word} for (x, y), (*_, word) in zip(written, words, strict=True)]
    x = alt.X("x:Q", axis=None, scale=alt.Scale(domain=[-MAP_WIDTH / 2, MAP_WIDTH / 2], nice=False))
    y = alt.Y("y:Q", axis=None, scale=alt.Scale(domain=[-MAP_HEIGHT / 2, MAP_HEIGHT / 2], nice=False))
    marks = chart_of(rows).mark_point(aria=True, strokeWidth=0.8, opacity=0.85)
    size = alt.Size("size:Q", scale=None)
    marks = marks.encode(x=x, y=y, size=size, description="tip:N", **as_they_are("shape", "fill", "stroke"))
    text = chart_of(named).encode(x=x, y=y, text="word:N")
    bold: dict[str, Any] = {"fontSize": 12.5, "fontWeight": "bold", "limit": 90}
    halo = text.mark_text(stroke=LIGHT["paper"], strokeWidth=3, color=LIGHT["paper"], **bold)
    layers = [marks, halo, text.mark_text(color=LIGHT["ink"], **bold)]
    return alt.LayerChart(layer=layers, width=MAP_WIDTH, height=MAP_HEIGHT, padding=2)


def _apart(places: Sequence[tuple[float, float]], gap: float) -> list[tuple[float, float]]:
    """The places, in pixels; one that is nearer than ``gap`` to another moves to the nearest free spot of a spiral."""
    if len(places) > _MOST_APART:
        return list(places)
    taken: dict[tuple[int, int], list[tuple[float, float]]] = {}
    found = []
    for place in places:
        for turn in range(_TURNS):
            radius, angle = 0.45 * gap * math.sqrt(turn), 2.399963 * turn  # the golden angle
            x, y = place[0] + radius * math.cos(angle), place[1] + radius * math.sin(angle)
            column, row = int(x // gap), int(y // gap)
            near = (taken.get((column + i, row + j), ()) for i in (-1, 0, 1) for j in (-1, 0, 1))
            if all(math.hypot(x - a, y - b) >= gap for cell in near for a, b in cell):
                break
        taken.setdefault((column, row), []).append((x, y))
        found.append((x, y))
    return found


def population_chart(population: Population) -> alt.HConcatChart:
    """Labels of (at most 60) clients as stacked bars, and a histogram of client sizes."""
    sizes, shown = population.sizes, sample_evenly(range(len(population)), _BARS)
    some = "" if len(shown) == len(population) else f" ({len(shown)} of {counted(len(population), 'client')})"
    clients = [population.train.name(i) for i in shown]
    names, counts = [""], sizes[:, None]
    colour: Any = alt.value(LIGHT["s0"])
    if population.classes is not None:
        names = [str(name) for name in population.class_names or range(population.classes)]
        counts = population.histogram()
        legend = alt.Legend(title="class") if population.classes <= 20 else None
        colour = alt.Color("class:O", sort=names, scale=alt.Scale(scheme="viridis", domain=names), legend=legend)
    rows: Rows = [
        {"client": client, "class": name, "order": order, "rows": count}
        for client, row in zip(clients, counts[shown].tolist(), strict=True)
        for order, (name, count) in enumerate(zip(names, row, strict=True))
        if count
    ]
    heading = f"{'Rows' if population.classes is None else 'Labels'} of each client{some}"
    labels = alt.Axis(labels=len(shown) <= 30, labelAngle=-90)
    bars = chart_of(rows, title=heading, width=640, height=320).mark_bar()
    bars = bars.encode(
        x=alt.X("client:N", sort=clients, axis=labels, scale=alt.Scale(paddingInner=0.08)),
        y=alt.Y("rows:Q", title="rows"),
        color=colour,
        order="order:Q",
    )
    # binned here: the file stays small
    tall, edges = np.histogram(sizes.numpy(), bins=min(30, int(sizes.max() - sizes.min()) + 1))
    pieces = zip(edges.tolist(), edges[1:].tolist(), tall.tolist(), strict=False)
    bins: Rows = [{"from": low, "to": high, "clients": count} for low, high, count in pieces]
    histogram = chart_of(bins, title="Client sizes", width=280, height=320).mark_bar(color=LIGHT["s6"])
    histogram = histogram.encode(
        x=alt.X(**number("from", "rows of a client"), bin="binned"),
        x2="to:Q",
        y=alt.Y("clients:Q", axis=alt.Axis(tickMinStep=1)),
    )
    title = f"{population.name}: {counted(len(population), 'client')}, {int(sizes.sum()):,} rows"
    chart: alt.HConcatChart = alt.hconcat(bars, histogram, title=title).resolve_scale(color="independent")
    return chart
