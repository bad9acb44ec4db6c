"""Figures of federated k-means: cost against privacy (T1 Fig. 6.1, 6.2), and one clustering."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

import altair as alt
import torch
from torch import Tensor

from unalike.analytics.kmeans.algorithm import Clustering
from unalike.analytics.kmeans.pareto import ParetoResult, front
from unalike.analytics.kmeans.study import KMeansResult, KMeansRun
from unalike.report.figures.parts import Rows, chart_of, fixed_scale, number
from unalike.report.figures.theme import LIGHT
from unalike.runs.words import counted


def chart(done: KMeansResult | ParetoResult) -> alt.LayerChart | alt.HConcatChart:
    """What ``unalike kmeans`` found."""
    if isinstance(done, ParetoResult):
        return pareto(done.runs, done.levels, done.title)
    costs = {one.method: one.cost for one in done.compared}
    return clustering(done.clustering, done.points.server, costs, done.title)


def pareto(measured: Sequence[KMeansRun], levels: Mapping[str, float], title: str) -> alt.LayerChart:
    """The fronts of all methods, faint the runs behind them; ``levels`` are methods without privacy, by cost."""
    names = list(dict.fromkeys(one.method for one in measured))
    best = [one for name in names for one in front(measured, name)]
    # a method that fails at a small ε costs a hundred times as much, and would press all others into one line
    top = 1.5 * statistics.median([one.cost for one in best])
    if beyond := sum(one.cost > top for one in measured):
        title += f" ({counted(beyond, 'run')} above {top:.3g} left out)"
    every, fronts_only = (
        [{"method": one.method, "epsilon": one.epsilon, "cost": one.cost} for one in some if one.cost <= top]
        for some in (measured, best)
    )
    x, y = alt.X(**number("epsilon", "ε in total, by the ledger")), alt.Y(**number("cost", "k-means cost per point"))
    look: dict[str, Any] = {"scale": alt.Scale(domain=names), "legend": alt.Legend(title=None, symbolOpacity=1)}
    method, shape = alt.Color("method:N", **look), alt.Shape("method:N", **look)
    points, fronts = (chart_of(rows).encode(x=x, y=y, color=method) for rows in (every, fronts_only))
    layers: list[alt.Chart] = [
        points.mark_point(filled=True, opacity=0.3, size=40).encode(shape=shape),
        fronts.mark_line(strokeWidth=2),
        fronts.mark_point(filled=True, size=60, opacity=1).encode(shape=shape),
    ]
    for name, cost in levels.items():
        level = chart_of([{"cost": cost, "name": f"{name} (not private)"}]).encode(y=y)
        layers.append(level.mark_rule(strokeDash=[2, 3], color=LIGHT["soft"]))
        above = -6 if cost == max(levels.values()) else 7  # so that two near each other stay legible
        text = level.mark_text(align="right", dy=above, color=LIGHT["soft"])
        layers.append(text.encode(x=alt.value("width"), text="name:N"))
    return alt.LayerChart(layer=layers, title=title, width=640, height=400)


def clustering(found: Clustering, server: Tensor, costs: Mapping[str, float], title: str) -> alt.HConcatChart:
    """The centres among the server points (both are public by now), the costs, the elbow."""
    middle = found.centers.mean(0)
    axes = torch.linalg.svd(found.centers - middle, full_matrices=False).Vh[:2]
    kinds, below = ["server points", "centres"], alt.Legend(orient="bottom", title=None)
    rows: Rows = []
    for kind, points in zip(kinds, (server, found.centers), strict=True):
        places = torch.nn.functional.pad((points - middle) @ axes.T, (0, 2 - len(axes)))
        rows += [{"kind": kind, "x": x, "y": y} for x, y in places.tolist()]
    heading = "Centres and server points, in the plane of the centres' spread"
    plane = chart_of(rows, title=heading, width=380, height=320).mark_point(filled=True)
    plane = plane.encode(
        x=alt.X(**number("x")),
        y=alt.Y(**number("y")),
        color=alt.Color("kind:N", legend=below, scale=fixed_scale(kinds, [LIGHT["s0"], LIGHT["s1"]])),
        shape=alt.Shape("kind:N", legend=below, scale=fixed_scale(kinds, ["circle", "cross"])),
        size=alt.Size("kind:N", legend=below, scale=fixed_scale(kinds, [25, 150])),
        opacity=alt.Opacity("kind:N", legend=below, scale=fixed_scale(kinds, [0.4, 1])),
    )
    # points and not bars: the costs of good clusterings are near each other, and a bar must begin at 0
    reached: Rows = [{"method": name, "cost": cost} for name, cost in costs.items()]
    bars = chart_of(reached, title="Cost per point", width=220, height=320)
    y = alt.Y("method:N", sort=list(costs), title=None, axis=alt.Axis(grid=True))
    bars = bars.mark_point(filled=True, size=90, opacity=1, color=LIGHT["s0"])
    panels: list[alt.Chart | alt.LayerChart] = [plane, bars.encode(x=alt.X(**number("cost", padding=20)), y=y)]
    if found.curve:
        elbow: Rows = [{"k": k, "cost": cost} for k, cost in enumerate(found.curve, start=1)]
        line = chart_of(elbow, title="Server cost by k: the elbow")
        line = line.mark_line(point={"size": 40, "filled": True}, color=LIGHT["s0"])
        line = line.encode(x=alt.X("k:Q", axis=alt.Axis(tickMinStep=1)), y=alt.Y("cost:Q", title=None))
        chosen = chart_of([{"k": found.k}]).mark_rule(strokeDash=[2, 3], color=LIGHT["soft"]).encode(x="k:Q")
        panels.append(alt.LayerChart(layer=[line, chosen], width=280, height=320))
    return alt.hconcat(*panels, title=title)
