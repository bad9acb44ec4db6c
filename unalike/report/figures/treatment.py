"""Clients that are treated apart: what each has spent of its own ε, what weight it has, in which cluster it is."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import altair as alt

from unalike.report.evenly import sample_evenly
from unalike.report.figures.clients import MAP_HEIGHT, MAP_WIDTH
from unalike.report.figures.parts import FIT, Rows, chart_of
from unalike.report.figures.theme import LIGHT, colour, shape
from unalike.report.figures.training import WIDTH

_MOST = 60  # clients that are drawn


class Budget(NamedTuple):
    """What a client has declared and spent."""

    client: str
    declared: float
    spent: float


def budgets(shown: Sequence[Budget]) -> alt.LayerChart:
    """A bar for what each client has spent, and a mark at what it declared; the smallest ε first."""
    ordered = sample_evenly(sorted(shown, key=lambda one: (one.declared, one.client)), _MOST)
    rows: Rows = [
        {
            "client": one.client,
            "spent": one.spent,
            "declared": one.declared,
            "tip": f"{one.client}\nspent {one.spent:.3g} of ε = {one.declared:.3g}",
        }
        for one in ordered
    ]
    labels = alt.Axis(labels=len(rows) <= 30, labelAngle=-90, labelLimit=60)
    x = alt.X("client:N", sort=[one.client for one in ordered], axis=labels, title="client")
    base = chart_of(rows)
    bars = base.mark_bar(color=LIGHT["s0"], opacity=0.75, aria=True)
    bars = bars.encode(x=x, y=alt.Y("spent:Q", title="ε"), description=alt.Description("tip:N"))
    marks = base.mark_tick(color=LIGHT["ink"], thickness=2).encode(x=x, y=alt.Y("declared:Q", title="ε"))
    return alt.LayerChart(layer=[bars, marks], width=WIDTH, height=220, autosize=FIT)


def weights(shown: Sequence[tuple[str, float, float | None]]) -> alt.LayerChart:
    """Weights of clients (name, weight, declared ε) over their ε; without one, one beside the other."""
    some = sample_evenly(sorted(shown, key=lambda one: -one[1]), 400)
    known = all(epsilon is not None for _, _, epsilon in some)
    rows: Rows = [
        {
            "x": epsilon if known else number + 1,
            "weight": weight,
            "tip": f"{client}\nweight {weight:.3g}" + (f", ε = {epsilon:.3g}" if epsilon is not None else ""),
        }
        for number, (client, weight, epsilon) in enumerate(some)
    ]
    x = alt.X("x:Q", title="declared ε" if known else "clients, the heaviest first", scale=alt.Scale(zero=False))
    dots = chart_of(rows).mark_point(filled=True, size=60, opacity=0.8, color=LIGHT["s1"], aria=True)
    dots = dots.encode(x=x, y=alt.Y("weight:Q", title="weight"), description=alt.Description("tip:N"))
    return alt.LayerChart(layer=[dots], width=WIDTH, height=220, autosize=FIT)


def clusters(shown: Sequence[tuple[str, int | None, tuple[float, float] | None]]) -> alt.LayerChart:
    """Clients (name, cluster, place) in the plane of their first updates; without places, a column for each cluster."""
    planar = any(place is not None for _, _, place in shown)
    heights: dict[int | None, int] = {}
    rows: Rows = []
    for client, cluster, place in shown:
        heights[cluster] = heights.get(cluster, 0) + 1
        if planar and place is None:
            continue
        x, y = place if place is not None else (-1.0 if cluster is None else float(cluster), float(heights[cluster]))
        looks = {"fill": "transparent" if cluster is None else colour(cluster), "shape": shape(cluster or 0)}
        told = "no cluster yet" if cluster is None else f"cluster {cluster + 1}"
        rows.append({"x": x, "y": y, **looks, "tip": f"{client}\n{told}"})
    scale = alt.Scale(zero=False, padding=12)
    marks = chart_of(rows).mark_point(aria=True, size=70, strokeWidth=0.8, opacity=0.85, stroke=LIGHT["soft"])
    marks = marks.encode(
        x=alt.X("x:Q", axis=None, scale=scale),
        y=alt.Y("y:Q", axis=None, scale=scale),
        shape=alt.Shape("shape:N", scale=None),
        fill=alt.Fill("fill:N", scale=None),
        description=alt.Description("tip:N"),
    )
    return alt.LayerChart(layer=[marks], width=MAP_WIDTH, height=MAP_HEIGHT, padding=2)
