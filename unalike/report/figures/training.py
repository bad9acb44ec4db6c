"""Charts of training and its outcome: lines over rounds, scores client by client, bytes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import altair as alt
import numpy as np

from unalike.report.figures.parts import FIT, Rows, as_they_are, chart_of, fixed_scale, sample_evenly
from unalike.report.figures.theme import LIGHT, colour, dash, shape
from unalike.runs.result import Summary
from unalike.runs.words import counted, size

WIDTH = 360  # of a panel, axes included: about the width of a phone, so that letters keep their size there
_MOST_POINTS = 300  # of one line: more cannot be told apart
_MARKS = 12  # on one line, more would hide it
_BINS = 40
BYTES = "format(datum.value, '~s') + 'B'"  # a label of an axis, as Vega writes it


@dataclass(frozen=True)
class Axis:
    """One direction of a chart; ``format`` is d3's, ``label`` an expression of Vega that takes its place."""

    title: str = ""
    format: str = "~g"
    label: str = ""
    log: bool = False
    whole: bool = False  # only whole numbers are labelled
    places: Sequence[float] = ()  # that are labelled; none: round numbers
    domain: tuple[float, float] | None = None

    def x(self) -> alt.X:
        return alt.X("x:Q", **self._looks())

    def y(self, field: str = "y:Q") -> alt.Y:
        return alt.Y(field, **self._looks())

    def _looks(self) -> dict[str, Any]:
        scale: dict[str, Any] = {} if self.domain is None else {"domain": list(self.domain)}
        axis: dict[str, Any] = {"labelExpr": self.label} if self.label else {"format": self.format}
        if self.whole:
            axis["tickMinStep"] = 1
        if self.places:
            axis["values"] = list(self.places)
        kind: Any = "log" if self.log else "linear"
        scaled = alt.Scale(type=kind, zero=False, nice=not self.places, **scale)
        return {"title": self.title or None, "scale": scaled, "axis": alt.Axis(**axis)}


@dataclass(frozen=True)
class Line:
    """One line: whose it is (which gives its colour), its points, and what is said about each."""

    run: int
    label: str
    points: Sequence[tuple[float, float]]
    tips: Sequence[str]
    errors: Sequence[float] = ()  # of each point, shown as a band; none: no band
    mark: int | None = None  # the shape's number; None: the run's own


class Scores(NamedTuple):
    """One run's scores over the clients of a group, and what they come to; None: not served."""

    run: int
    label: str
    scores: Sequence[float]
    summary: Summary | None


def span(values: Sequence[float]) -> tuple[float, float]:
    """The lowest and the highest of the values, apart even if they are all the same."""
    low, high = min(values, default=0.0), max(values, default=0.0)
    largest = max(abs(low), abs(high))
    if high - low > max(1e-9 * largest, 1e-100):
        return low, high
    margin = 0.1 * largest if largest > 1e-100 else 1.0
    return low - margin, high + margin


def lines(shown: Sequence[Line], x: Axis, y: Axis, *, legend: bool = False) -> alt.LayerChart:
    """Lines with marks; ``legend`` names them below, where their names are not shown elsewhere."""
    path, marks = Rows(), Rows()
    for line in shown:
        rows: Rows = [
            {"x": at, "y": value, "line": line.label, "tip": tip}
            for (at, value), tip in zip(line.points, line.tips, strict=True)
        ]
        low, high = y.domain or (-math.inf, math.inf)
        for row, error in zip(rows, line.errors, strict=False):
            row |= {"low": max(row["y"] - error, low), "high": min(row["y"] + error, high)}
        path += sample_evenly(rows, _MOST_POINTS)
        marks += sample_evenly(rows, _MARKS)
    names = [line.label for line in shown]
    below = alt.Legend(orient="bottom", title=None, columns=2) if legend else None
    colours = alt.Color("line:N", legend=below, scale=fixed_scale(names, [colour(line.run) for line in shown]))
    looks = [line.run if line.mark is None else line.mark for line in shown]
    base = chart_of(path).encode(x=x.x(), y=y.y(), color=colours)
    dashed = alt.StrokeDash("line:N", legend=below, scale=fixed_scale(names, [dash(look) for look in looks]))
    layers: list[alt.Chart] = [base.mark_line(strokeWidth=2, strokeJoin="round").encode(strokeDash=dashed)]
    if any(line.errors for line in shown):
        band = base.mark_area(opacity=0.14).encode(y=y.y("low:Q"), y2=alt.Y2("high:Q"))
        layers.insert(0, band.transform_filter("isValid(datum.low)"))
    hollow: dict[str, Any] = {"fill": LIGHT["paper"], "fillOpacity": 0.35}  # so that a mark below another one is seen
    points = chart_of(marks).mark_point(size=46, strokeWidth=1.7, opacity=1, aria=True, **hollow)
    shapes = alt.Shape("line:N", legend=below, scale=fixed_scale(names, [shape(look) for look in looks]))
    layers.append(points.encode(x=x.x(), y=y.y(), color=colours, shape=shapes, description="tip:N"))
    return alt.LayerChart(layer=layers, width=WIDTH, height=250, autosize=FIT)


def scores(shown: Sequence[Scores], x: Axis, form: Any, tail: str = "10th percentile") -> alt.LayerChart:
    """One histogram for each run, one below the other, with the mean (full line) and the ``tail`` (dashed)."""
    bars, rules, words = Rows(), Rows(), Rows()
    counts = [np.histogram(one.scores, bins=_BINS, range=x.domain)[0].tolist() for one in shown]
    edges = np.histogram_bin_edges([], bins=_BINS, range=x.domain).tolist()
    most = max(map(max, counts))
    for base, one, count in zip(reversed(range(len(shown))), shown, counts, strict=True):
        for clients, start, end in zip(count, edges, edges[1:], strict=False):
            tip = f"{one.label}\n{form(start)} to {form(end)}: {counted(clients, 'client')}"
            top = base + max(0.56 * clients / most, 0.02)
            if clients:
                bars.append({"x": start, "x2": end, "y": base, "y2": top, "color": colour(one.run), "tip": tip})
        says = "not served"
        if one.summary is not None:
            marks = {"mean": one.summary.mean, tail: one.summary.p10}
            rules += [{"x": value, "y": base, "y2": base + 0.6, "kind": kind} for kind, value in marks.items()]
            says = ", ".join(f"{form(value)} {kind}" for kind, value in marks.items())
        words.append({"y": base + 0.66, "name": one.label, "says": says, "color": colour(one.run)})
    y = alt.Y("y:Q", axis=None, scale=alt.Scale(domain=[0, len(shown)], nice=False))
    ends, raw = {"x": x.x(), "y": y, "y2": "y2:Q"}, as_they_are("color")
    dashed = alt.StrokeDash("kind:N", legend=None, scale=fixed_scale(["mean", tail], [[1, 0], [3, 3]]))
    text, floor = chart_of(words).encode(y=y), chart_of([{"y": row} for row in range(len(shown))])
    bold = text.mark_text(align="left", baseline="bottom", fontWeight="bold", fontSize=11.5, limit=150)
    plain = text.mark_text(align="right", baseline="bottom", color=LIGHT["soft"], fontSize=11)
    layers = [
        floor.mark_rule(color=LIGHT["grid"]).encode(y=y),
        chart_of(bars).mark_rect(aria=True, opacity=0.75).encode(**ends, x2="x2:Q", description="tip:N", **raw),
        chart_of(rules).mark_rule(color=LIGHT["ink"], strokeWidth=1.8).encode(**ends, strokeDash=dashed),
        bold.encode(x=alt.value(0), text="name:N", **raw),
        plain.encode(x=alt.value("width"), text="says:N"),
    ]
    return alt.LayerChart(layer=layers, width=WIDTH, height=30 + 68 * len(shown), autosize=FIT)


def traffic(runs: Sequence[tuple[str, float, float]]) -> alt.LayerChart:
    """Bytes that each run sent up and down, on a logarithmic scale; at least one of them sent any."""
    rows: Rows = [
        {"run": label, "x": count, "way": way, "color": colour(i), "tip": f"{label}\n{way}: {size(count)}"}
        for i, (label, *counts) in enumerate(runs)
        for way, count in zip(("up", "down"), counts, strict=True)
    ]
    sent = [row for row in rows if row["x"] > 0]
    nothing = [{**row, "says": f"nothing {row['way']}"} for row in rows if row["x"] <= 0]
    counts = [row["x"] for row in sent]
    ends = range(math.floor(math.log10(min(counts))), math.ceil(math.log10(max(counts) * 1.01)) + 1)
    axis = Axis(label=BYTES, log=True, places=[10.0**i for i in ends], domain=(10.0 ** ends[0], 10.0 ** ends[-1]))
    labels = alt.Axis(grid=True, labelLimit=130)
    y = alt.Y("run:N", sort=[label for label, *_ in runs], title=None, axis=labels)
    apart = alt.YOffset("way:N", sort=["up", "down"])  # many runs send the same both ways
    legend = alt.Legend(orient="bottom", title=None, symbolFillColor=LIGHT["soft"])
    shapes = alt.Shape("way:N", scale=fixed_scale(["up", "down"], ["triangle-up", "triangle-down"]), legend=legend)
    marks = chart_of(sent).mark_point(filled=True, size=70, opacity=1, aria=True)
    marks = marks.encode(x=axis.x(), y=y, yOffset=apart, shape=shapes, description="tip:N", **as_they_are("color"))
    words = chart_of(nothing).mark_text(align="left", fontSize=11, dx=2, color=LIGHT["faint"])
    words = words.encode(x=alt.value(0), y=y, yOffset=apart, text="says:N")
    return alt.LayerChart(layer=[marks, words], width=WIDTH, height=70 + 36 * len(runs), autosize=FIT)
