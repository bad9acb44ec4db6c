"""Clients that are treated apart: what each has spent of its own ε, what weight it has, in which cluster it is."""

from __future__ import annotations

from collections.abc import Mapping

import altair as alt

from unalike.report.figures.clients import MAP_HEIGHT, MAP_WIDTH
from unalike.report.figures.parts import FIT, Rows, as_they_are, chart_of, sample_evenly
from unalike.report.figures.theme import LIGHT, colour, shape
from unalike.report.figures.training import WIDTH
from unalike.runs.map_data import Treatment
from unalike.runs.result import OwnBudget

_MOST = 60  # clients that are drawn


def budgets(own: Mapping[str, OwnBudget]) -> alt.LayerChart:
    """A bar for what each client has spent, and a mark at what it declared; the smallest ε first."""
    shown = sample_evenly(sorted(own, key=lambda client: (own[client].declared, client)), _MOST)
    rows: Rows = []
    for client in shown:
        spent, declared = own[client].spent, own[client].declared
        tip = f"{client}\nspent {spent:.3g} of ε = {declared:.3g}"
        rows.append({"client": client, "spent": spent, "declared": declared, "tip": tip})
    labels = alt.Axis(labels=len(rows) <= 30, labelAngle=-90, labelLimit=60)
    base = chart_of(rows).encode(x=alt.X("client:N", sort=shown, axis=labels, title="client"))
    bars = base.mark_bar(color=LIGHT["s0"], opacity=0.75, aria=True)
    marks = base.mark_tick(color=LIGHT["ink"], thickness=2).encode(y=alt.Y("declared:Q", title="ε"))
    layers = [bars.encode(y=alt.Y("spent:Q", title="ε"), description="tip:N"), marks]
    return alt.LayerChart(layer=layers, width=WIDTH, height=220, autosize=FIT)


def weights(treated: Treatment, own: Mapping[str, OwnBudget]) -> alt.LayerChart:
    """Weights of clients over the ε that they declared; if not all did, the heaviest first."""
    found = zip(treated.names, treated.weight or (), strict=True)
    some = sample_evenly(sorted(found, key=lambda one: -one[1]), 400)
    known = all(client in own for client, _ in some)
    rows: Rows = []
    for number, (client, weight) in enumerate(some, start=1):
        declared = f", ε = {own[client].declared:.3g}" if client in own else ""
        at = own[client].declared if known else number
        rows.append({"x": at, "weight": weight, "tip": f"{client}\nweight {weight:.3g}{declared}"})
    x = alt.X("x:Q", title="declared ε" if known else "clients, the heaviest first", scale=alt.Scale(zero=False))
    dots = chart_of(rows).mark_point(filled=True, size=60, opacity=0.8, color=LIGHT["s1"], aria=True)
    dots = dots.encode(x=x, y=alt.Y("weight:Q", title="weight"), description="tip:N")
    return alt.LayerChart(layer=[dots], width=WIDTH, height=220, autosize=FIT)


def clusters(treated: Treatment) -> alt.LayerChart:
    """Clients in the plane of their first updates; without places, a column for each cluster."""
    places, heights, rows = treated.place or [None] * len(treated.names), dict[int | None, int](), Rows()
    planar = any(place is not None for place in places)
    for client, cluster, place in zip(treated.names, treated.cluster or (), places, strict=True):
        heights[cluster] = heights.get(cluster, 0) + 1
        if planar and place is None:
            continue
        at, height = place or (-1 if cluster is None else cluster, heights[cluster])
        looks = {"fill": "transparent" if cluster is None else colour(cluster), "shape": shape(cluster or 0)}
        says = "no cluster yet" if cluster is None else f"cluster {cluster + 1}"
        rows.append({"x": at, "y": height, **looks, "tip": f"{client}\n{says}"})
    scale = alt.Scale(zero=False, padding=12)
    marks = chart_of(rows).mark_point(aria=True, size=70, strokeWidth=0.8, opacity=0.85, stroke=LIGHT["soft"])
    x, y = alt.X("x:Q", axis=None, scale=scale), alt.Y("y:Q", axis=None, scale=scale)
    marks = marks.encode(x=x, y=y, description="tip:N", **as_they_are("shape", "fill"))
    return alt.LayerChart(layer=[marks], width=MAP_WIDTH, height=MAP_HEIGHT, padding=2)
