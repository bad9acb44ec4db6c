"""Figures of federated k-means: cost against privacy (T1 Fig. 6.1, 6.2), and one clustering."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import altair as alt
import torch
from torch import Tensor

from unalike.analytics.kmeans.algorithm import Clustering
from unalike.analytics.kmeans.results import Clustered, Fronts
from unalike.analytics.kmeans.study import Measured, front
from unalike.studio.figures.theme import LIGHT


def chart(done: Clustered | Fronts) -> alt.LayerChart | alt.HConcatChart:
    """What ``unalike kmeans`` found."""
    if isinstance(done, Fronts):
        return pareto(done.measured, done.levels, done.title)
    return clustering(done.clustering, done.points.server, done.costs, done.title)


def pareto(measured: Sequence[Measured], levels: Mapping[str, float], title: str) -> alt.LayerChart:
    """The fronts of all methods, faint the runs behind them; ``levels`` are methods without privacy, by cost."""
    names = list(dict.fromkeys(one.method for one in measured))
    every = [{"method": one.method, "epsilon": one.epsilon, "cost": one.cost} for one in measured]
    best = [
        {"method": name, "epsilon": one.epsilon, "cost": one.cost} for name in names for one in front(measured, name)
    ]
    x = alt.X("epsilon:Q", title="ε in total, by the ledger", scale=alt.Scale(zero=False))
    y = alt.Y("cost:Q", title="k-means cost per point", scale=alt.Scale(zero=False))
    known, legend = alt.Scale(domain=names), alt.Legend(title=None, symbolOpacity=1)
    method, shape = alt.Color("method:N", scale=known, legend=legend), alt.Shape("method:N", scale=known, legend=legend)
    fronts = alt.Chart(alt.InlineData(values=best)).encode(x=x, y=y, color=method)
    layers: list[alt.Chart] = [
        alt.Chart(alt.InlineData(values=every))
        .mark_point(filled=True, opacity=0.3, size=40)
        .encode(x=x, y=y, color=method, shape=shape),
        fronts.mark_line(strokeWidth=2),
        fronts.mark_point(filled=True, size=60, opacity=1).encode(shape=shape),
    ]
    for name, cost in levels.items():
        level = alt.Chart(alt.InlineData(values=[{"cost": cost, "name": f"{name} (not private)"}])).encode(y=y)
        layers.append(level.mark_rule(strokeDash=[2, 3], color=LIGHT["soft"]))
        above = -6 if cost == max(levels.values()) else 7  # so that two near each other stay legible
        text = level.mark_text(align="right", dy=above, color=LIGHT["soft"])
        layers.append(text.encode(x=alt.value("width"), text="name:N"))
    return alt.LayerChart(layer=layers, title=title, width=640, height=400)


def clustering(found: Clustering, server: Tensor, costs: Mapping[str, float], title: str) -> alt.HConcatChart:
    """The centres among the server points (both are public by now), the costs, the elbow."""
    middle = found.centers.mean(0)
    axes = torch.linalg.svd(found.centers - middle, full_matrices=False).Vh[:2]
    rows = []
    for name, points in (("server points", server), ("centres", found.centers)):
        places = (points - middle) @ axes.T
        second = places[:, 1] if places.shape[1] > 1 else torch.zeros(len(places))
        rows += [{"kind": name, "x": a, "y": b} for a, b in zip(places[:, 0].tolist(), second.tolist(), strict=True)]
    kinds, below = ["server points", "centres"], alt.Legend(orient="bottom", title=None)
    plane = (
        alt.Chart(alt.InlineData(values=rows), title="Centres and server points, in the plane of the centres' spread")
        .mark_point(filled=True)
        .encode(
            x=alt.X("x:Q", title=None, scale=alt.Scale(zero=False)),
            y=alt.Y("y:Q", title=None, scale=alt.Scale(zero=False)),
            color=alt.Color("kind:N", legend=below, scale=alt.Scale(domain=kinds, range=[LIGHT["s0"], LIGHT["s1"]])),
            shape=alt.Shape("kind:N", legend=below, scale=alt.Scale(domain=kinds, range=["circle", "cross"])),
            size=alt.Size("kind:N", legend=below, scale=alt.Scale(domain=kinds, range=[25, 150])),
            opacity=alt.Opacity("kind:N", legend=below, scale=alt.Scale(domain=kinds, range=[0.4, 1])),
        )
        .properties(width=380, height=320)
    )
    names = list(costs)
    # points and not bars: the costs of good clusterings are near each other, and a bar must begin at 0
    reached = [{"method": name, "cost": cost} for name, cost in costs.items()]
    bars = (
        alt.Chart(alt.InlineData(values=reached), title="Cost per point")
        .mark_point(filled=True, size=90, opacity=1, color=LIGHT["s0"])
        .encode(
            x=alt.X("cost:Q", title=None, scale=alt.Scale(zero=False, padding=20)),
            y=alt.Y("method:N", sort=names, title=None, axis=alt.Axis(grid=True)),
        )
        .properties(width=220, height=320)
    )
    panels: list[alt.Chart | alt.LayerChart] = [plane, bars]
    if found.curve:
        elbow = [{"k": k, "cost": cost} for k, cost in enumerate(found.curve, start=1)]
        line = alt.Chart(alt.InlineData(values=elbow), title="Server cost by k: the elbow").encode(
            x=alt.X("k:Q", axis=alt.Axis(tickMinStep=1)), y=alt.Y("cost:Q", title=None)
        )
        chosen = alt.Chart(alt.InlineData(values=[{"k": found.k}])).mark_rule(strokeDash=[2, 3], color=LIGHT["soft"])
        drawn = line.mark_line(point={"size": 40, "filled": True}, color=LIGHT["s0"])
        panels.append(alt.LayerChart(layer=[drawn, chosen.encode(x="k:Q")], width=280, height=320))
    return alt.hconcat(*panels, title=title)
