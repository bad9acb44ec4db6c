"""Figures of personal estimates: error against ε₀ and bits, and against what a client finds alone."""

from __future__ import annotations

from typing import Any

import altair as alt

from unalike.analytics.estimation.problem import Problem
from unalike.analytics.estimation.shared import Estimates
from unalike.analytics.estimation.study import Sweep
from unalike.studio.figures.theme import LIGHT

_MOST = 2000  # clients in a picture: more points cannot be told apart
_LINES = ["personal estimate", "Theorem 2", "what a client finds alone", "personal, message as it is"]
_COLOURS = [LIGHT["s0"], LIGHT["s1"], LIGHT["s6"], LIGHT["s2"]]
_WAYS = {"personal": LIGHT["s0"], "local": LIGHT["s6"], "fedavg": LIGHT["s1"]}


def sweep(title: str, swept: Sweep, delta: str) -> alt.HConcatChart:
    """MSE against ε₀ (``delta`` is added to its heading) and against bits, between the local and the bare one."""
    panels = []
    below = alt.Legend(orient="bottom", columns=2, symbolType="stroke", symbolSize=400, symbolStrokeWidth=2)
    for curve, name, heading, scale in (
        (swept.by_epsilon, "ε₀ of a client", f"Locally private{delta}", alt.Scale(type="log")),
        (swept.by_bits, "bits of a number", "Rounded to k bits, not private", alt.Scale(zero=False)),
    ):
        levels = ([value] * len(curve.at) for value in (swept.local, swept.bare))
        values = dict(zip(_LINES, (curve.error, curve.theory, *levels), strict=True))
        rows = [
            {"line": line, "at": at, "error": error}
            for line, errors in values.items()
            for at, error in zip(curve.at, errors, strict=False)  # not every estimator has a theorem
        ]
        shown = [line for line in _LINES if values[line]]
        colours = alt.Scale(domain=shown, range=[_COLOURS[_LINES.index(line)] for line in shown])
        dashes = [[1, 0], [2, 2], [8, 4], [5, 2]]
        base = alt.Chart(alt.InlineData(values=rows), title=heading).encode(
            x=alt.X("at:Q", title=name, scale=scale, axis=alt.Axis(values=curve.at)),
            y=alt.Y("error:Q", title="mean squared error"),
            color=alt.Color("line:N", title=None, scale=colours, legend=below),
        )
        dashed = alt.Scale(domain=shown, range=[dashes[_LINES.index(line)] for line in shown])
        lines = base.mark_line().encode(strokeDash=alt.StrokeDash("line:N", title=None, scale=dashed, legend=below))
        marks = base.mark_point(filled=True, size=50, opacity=1).transform_filter(f"datum.line == '{_LINES[0]}'")
        panels.append(alt.layer(lines, marks).properties(width=380, height=320))
    chart: alt.HConcatChart = alt.hconcat(*panels, title=title).resolve_scale(y="shared")
    return chart


def estimates(result: dict[str, Any], problem: Problem, found: Estimates) -> alt.HConcatChart:
    """The error of each way of estimating, the clients one by one, and the course of the rounds.

    ``result`` as from ``unalike.analytics.estimation.study.summary``.
    """
    estimate, local, trace = found.estimate, found.local, found.trace
    truth = None if problem.truth is None else problem.truth[found.positions]
    errors = {name: error for name, error in result["mse"].items() if error is not None}
    falls = result["kind"] == "mixture" and not (trace and trace[-1] < 0)
    trace_name = "Distance within clusters" if falls else "Log-likelihood per client"
    title = f"{result['data']}: {result['kind']}"
    ways = alt.Scale(domain=list(_WAYS), range=list(_WAYS.values()))
    heights = [{"way": way, "error": error} for way, error in errors.items()]
    bars = (
        alt.Chart(alt.InlineData(values=heights), title="Mean error")
        .mark_bar()
        .encode(
            x=alt.X("way:N", sort=list(errors), title=None, axis=alt.Axis(labelAngle=0)),
            y=alt.Y("error:Q", title=None),
            color=alt.Color("way:N", scale=ways, legend=None),
        )
    )
    across = "truth" if truth is not None else "what a client finds alone"
    horizontal = (local if truth is None else truth.reshape(estimate.shape))[:_MOST, 0].tolist()
    groups = {"personal": estimate} if truth is None else {"local": local, "personal": estimate}
    rows = [
        {"way": way, "x": x, "y": y}
        for way, values in groups.items()
        for x, y in zip(horizontal, values[:_MOST, 0].tolist(), strict=True)
    ]
    below = alt.Legend(values=list(groups), orient="bottom", symbolOpacity=1)
    shapes = alt.Scale(domain=list(_WAYS), range=["circle", "triangle-up", "square"])
    points = (
        alt.Chart(alt.InlineData(values=rows), title=f"First coordinate: estimate against {across}")
        .mark_point(filled=True, size=18, opacity=0.45)
        .encode(
            x=alt.X("x:Q", title=across, scale=alt.Scale(zero=False)),
            y=alt.Y("y:Q", title="estimate", scale=alt.Scale(zero=False)),
            color=alt.Color("way:N", scale=ways, title=None, legend=below),
            shape=alt.Shape("way:N", scale=shapes, title=None, legend=below),
        )
    )
    panels = [bars.properties(width=200, height=320), points.properties(width=360, height=320)]
    if trace:
        course = [{"round": i, "value": value} for i, value in enumerate(trace, start=1)]
        line = alt.Chart(alt.InlineData(values=course), title=trace_name, width=300, height=320)
        y = alt.Y("value:Q", title=None, scale=alt.Scale(zero=False))
        x = alt.X("round:Q", axis=alt.Axis(tickMinStep=1))
        panels.append(line.mark_line(color=LIGHT["s0"]).encode(x=x, y=y))
    chart: alt.HConcatChart = alt.hconcat(*panels, title=title).resolve_scale(color="independent")
    return chart
