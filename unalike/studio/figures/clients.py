"""Pictures of clients: a map on which alike ones are neighbours, and how unlike those of a data set are."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import altair as alt
import numpy as np
import torch

from unalike.data.population import Population
from unalike.studio.figures.theme import LIGHT
from unalike.studio.words import counted

MAP_WIDTH, MAP_HEIGHT = 240, 210  # of a map: several stand side by side
_TURNS = 400  # of the spiral on which a mark looks for a free spot
_MOST_APART = 400  # marks: a map of more is so full that they cover each other
_BARS = 60  # clients whose labels are drawn


@dataclass(frozen=True)
class Dot:
    """One client: where it is, what is said about it, how large, which step of the scale of scores, which shape."""

    x: float
    y: float
    tip: str
    size: float
    step: int | None  # None: not served
    shape: str


def client_map(dots: Sequence[Dot], words: Sequence[tuple[float, float, str]]) -> alt.LayerChart:
    """Clients without axes (a direction has no unit), as far apart as they are unlike; ``words`` name places."""
    # one unit in both directions, so that distances are true
    (x0, across), (y0, up) = (_middle([getattr(dot, way) for dot in dots]) for way in ("x", "y"))
    unit = max(across / (MAP_WIDTH / 2 - 14), up / (MAP_HEIGHT / 2 - 14), 1e-12)
    places = _apart([((dot.x - x0) / unit, (dot.y - y0) / unit) for dot in dots], 8.0)
    rows = [
        {
            "x": place[0],
            "y": place[1],
            "tip": dot.tip,
            "size": dot.size,
            "shape": dot.shape,
            "fill": "transparent" if dot.step is None else LIGHT[f"q{dot.step}"],
            "stroke": LIGHT["faint"] if dot.step is None else LIGHT["soft"],
        }
        for dot, place in zip(dots, places, strict=True)
    ]
    written = _apart([((a - x0) / unit, (b - y0) / unit) for a, b, _ in words], 15.0)
    named = [{"x": a, "y": b, "word": word} for (a, b), (_, _, word) in zip(written, words, strict=True)]
    x = alt.X("x:Q", axis=None, scale=alt.Scale(domain=[-MAP_WIDTH / 2, MAP_WIDTH / 2], nice=False))
    y = alt.Y("y:Q", axis=None, scale=alt.Scale(domain=[-MAP_HEIGHT / 2, MAP_HEIGHT / 2], nice=False))
    marks = (
        alt.Chart(alt.InlineData(values=rows))
        .mark_point(aria=True, strokeWidth=0.8, opacity=0.85)
        .encode(
            x=x,
            y=y,
            size=alt.Size("size:Q", scale=None),
            shape=alt.Shape("shape:N", scale=None),
            fill=alt.Fill("fill:N", scale=None),
            stroke=alt.Stroke("stroke:N", scale=None),
            description="tip:N",
        )
    )
    text = alt.Chart(alt.InlineData(values=named)).encode(x=x, y=y, text="word:N")
    bold: dict[str, Any] = {"fontSize": 12.5, "fontWeight": "bold", "limit": 90}
    halo = text.mark_text(stroke=LIGHT["paper"], strokeWidth=3, color=LIGHT["paper"], **bold)
    layers = [marks, halo, text.mark_text(color=LIGHT["ink"], **bold)]
    return alt.LayerChart(layer=layers, width=MAP_WIDTH, height=MAP_HEIGHT, padding=2)


def _middle(values: Sequence[float]) -> tuple[float, float]:
    """The middle of the values, and half the way from the lowest to the highest."""
    low, high = min(values), max(values)
    return (low + high) / 2, (high - low) / 2


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
    sizes = population.sizes
    shown = torch.linspace(0, len(population) - 1, min(_BARS, len(population))).round().to(torch.int64)
    some = "" if len(shown) == len(population) else f" ({len(shown)} of {counted(len(population), 'client')})"
    clients = [population.train.name(int(i)) for i in shown]
    rows: list[dict[str, Any]]
    if population.classes is None:
        rows = [{"client": name, "rows": int(sizes[i])} for name, i in zip(clients, shown.tolist(), strict=True)]
    else:
        names = [str(name) for name in population.class_names or range(population.classes)]
        counts = population.histogram()[shown].tolist()
        rows = [
            {"client": client, "class": name, "order": number, "rows": count}
            for client, row in zip(clients, counts, strict=True)
            for number, (name, count) in enumerate(zip(names, row, strict=True))
            if count
        ]
    heading = f"{'Rows' if population.classes is None else 'Labels'} of each client{some}"
    labels = alt.Axis(labels=len(shown) <= 30, labelAngle=-90)
    bars = (
        alt.Chart(alt.InlineData(values=rows), title=heading)
        .mark_bar()
        .encode(
            x=alt.X("client:N", sort=clients, axis=labels, scale=alt.Scale(paddingInner=0.08)),
            y=alt.Y("rows:Q", title="rows"),
        )
    )
    if population.classes is None:
        bars = bars.encode(color=alt.value(LIGHT["s0"]))
    else:
        legend = alt.Legend(title="class") if population.classes <= 20 else None
        scale = alt.Scale(scheme="viridis", domain=names)
        bars = bars.encode(color=alt.Color("class:O", sort=names, scale=scale, legend=legend), order="order:Q")
    tall, edges = np.histogram(sizes.numpy(), bins=min(30, int(sizes.max() - sizes.min()) + 1))
    bins = [
        {"from": float(low), "to": float(high), "clients": int(count)}
        for low, high, count in zip(edges[:-1], edges[1:], tall, strict=True)
    ]  # binned here: the file stays small
    histogram = (
        alt.Chart(alt.InlineData(values=bins), title="Client sizes")
        .mark_bar(color=LIGHT["s6"])
        .encode(
            x=alt.X("from:Q", title="rows of a client", bin="binned", scale=alt.Scale(zero=False)),
            x2="to:Q",
            y=alt.Y("clients:Q", axis=alt.Axis(tickMinStep=1)),
        )
    )
    title = f"{population.name}: {counted(len(population), 'client')}, {int(sizes.sum()):,} rows"
    panels = (bars.properties(width=640, height=320), histogram.properties(width=280, height=320))
    chart: alt.HConcatChart = alt.hconcat(*panels, title=title).resolve_scale(color="independent")
    return chart
