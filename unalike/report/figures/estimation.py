"""Figures of personal estimates: error against ε₀ and bits, and against what a client finds alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import altair as alt

from unalike.analytics.estimation.study import EstimationResult, Sweep
from unalike.report.figures.parts import Rows, chart_of, course, fixed_scale, number
from unalike.report.figures.theme import LIGHT

_MOST = 2000  # clients in a picture: more points cannot be told apart
_LINES = {  # colour and dash
    "personal estimate": (LIGHT["s0"], [1, 0]),
    "Theorem 2": (LIGHT["s1"], [2, 2]),
    "what a client finds alone": (LIGHT["s6"], [8, 4]),
    "personal, message as it is": (LIGHT["s2"], [5, 2]),
}
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
        rows: Rows = [
            {"line": line, "at": at, "error": error}
            for line, errors in values.items()
            for at, error in zip(curve.at, errors, strict=False)  # not every estimator has a theorem
        ]
        shown = [line for line in _LINES if values[line]]
        colours, dashes = (fixed_scale(shown, [_LINES[line][i] for line in shown]) for i in (0, 1))
        base = chart_of(rows, title=heading).encode(
            x=alt.X("at:Q", title=name, scale=scale, axis=alt.Axis(values=curve.at)),
            y=alt.Y("error:Q", title="mean squared error"),
            color=alt.Color("line:N", title=None, scale=colours, legend=below),
        )
        lines = base.mark_line().encode(strokeDash=alt.StrokeDash("line:N", title=None, scale=dashes, legend=below))
        marks = base.mark_point(filled=True, size=50, opacity=1).transform_filter(f"datum.line == '{shown[0]}'")
        panels.append(alt.layer(lines, marks).properties(width=380, height=320))
    chart: alt.HConcatChart = alt.hconcat(*panels, title=title).resolve_scale(y="shared")
    return chart


def estimates(result: EstimationResult, sweeps: Sequence[alt.HConcatChart] = ()) -> alt.VConcatChart:
    """The error of each way of estimating, the clients one by one, and the course of the rounds; below it ``sweeps``.

    A bar at an estimate is its interval of 95 %.
    """
    found, samples = result.estimates, result.samples
    estimate, local, trace = found.estimate, found.local, found.trace
    truth = None if samples.truth is None else samples.truth[found.positions]
    ways = fixed_scale(list(_WAYS), list(_WAYS.values()))
    errors: Rows = [{"way": way, "error": error} for way, error in result.errors.items()]
    bars = chart_of(errors, title="Mean error", width=200, height=320).mark_bar()
    bars = bars.encode(
        x=alt.X("way:N", sort=[row["way"] for row in errors], title=None, axis=alt.Axis(labelAngle=0)),
        y=alt.Y("error:Q", title=None),
        color=alt.Color("way:N", scale=ways, legend=None),
    )
    across = "truth" if truth is not None else "what a client finds alone"
    horizontal = (local if truth is None else truth.reshape(estimate.shape))[:_MOST, 0].tolist()
    groups = {"personal": estimate} if truth is None else {"local": local, "personal": estimate}
    rows: Rows = [
        {"way": way, "x": x, "y": y}
        for way, values in groups.items()
        for x, y in zip(horizontal, values[:_MOST, 0].tolist(), strict=True)
    ]
    below = alt.Legend(values=list(groups), orient="bottom", symbolOpacity=1)
    shapes = fixed_scale(list(_WAYS), ["circle", "triangle-up", "square"])
    points = chart_of(rows, title=f"First coordinate: estimate against {across}", width=360, height=320)
    points = points.mark_point(filled=True, size=18, opacity=0.45).encode(
        x=alt.X(**number("x", across)),
        y=alt.Y(**number("y", "estimate")),
        color=alt.Color("way:N", scale=ways, title=None, legend=below),
        shape=alt.Shape("way:N", scale=shapes, title=None, legend=below),
    )
    low, high = (one[:_MOST, 0].tolist() for one in found.interval())
    ends: Rows = [{"x": x, "low": a, "high": b} for x, a, b in zip(horizontal, low, high, strict=True)]
    spread = chart_of(ends).mark_rule(opacity=0.15, color=LIGHT["s0"]).encode(x="x:Q", y="low:Q", y2="high:Q")
    panels: list[Any] = [*([bars] if errors else []), alt.layer(spread, points)]
    if trace:
        falls = result.kind == "mixture" and trace[-1] >= 0
        heading = "Distance within clusters" if falls else "Log-likelihood per client"
        panels.append(course(trace, heading, LIGHT["s0"], width=300, height=320))
    title = f"{samples.name}: {result.kind}"
    first = alt.hconcat(*panels, title=title).resolve_scale(color="independent")
    chart: alt.VConcatChart = alt.vconcat(first, *sweeps).resolve_scale(color="independent")
    return chart
