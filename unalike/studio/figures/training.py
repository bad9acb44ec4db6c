"""Charts of training and its outcome: lines over rounds, scores client by client, bytes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import altair as alt

from unalike.studio.figures.theme import LIGHT, colour, dash, shape
from unalike.studio.words import counted, size

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

    def scale(self) -> alt.Scale:
        given: dict[str, Any] = {} if self.domain is None else {"domain": list(self.domain)}
        return alt.Scale(type="log" if self.log else "linear", zero=False, nice=not self.places, **given)

    def axis(self) -> alt.Axis:
        given: dict[str, Any] = {"labelExpr": self.label} if self.label else {"format": self.format}
        if self.whole:
            given["tickMinStep"] = 1
        if self.places:
            given["values"] = list(self.places)
        return alt.Axis(**given)

    def x(self, field: str = "x:Q") -> alt.X:
        return alt.X(field, title=self.title or None, scale=self.scale(), axis=self.axis())

    def y(self, field: str = "y:Q") -> alt.Y:
        return alt.Y(field, title=self.title or None, scale=self.scale(), axis=self.axis())


@dataclass(frozen=True)
class Line:
    """One line: whose it is (which gives its colour), its points, and what is said about each."""

    run: int
    label: str
    points: Sequence[tuple[float, float]]
    tips: Sequence[str]
    errors: Sequence[float] = ()  # of each point, drawn as a band; none: no band
    mark: int | None = None  # the shape's number; None: the run's own


@dataclass(frozen=True)
class Scores:
    """One run's scores over the clients of a group; none: not served."""

    run: int
    label: str
    says: str
    scores: Sequence[float]
    mean: float | None
    p10: float | None


def span(values: Sequence[float]) -> tuple[float, float]:
    """The lowest and the highest of the values, apart even if they are all the same."""
    low, high = min(values), max(values)
    largest = max(abs(low), abs(high))
    if high - low > max(1e-9 * largest, 1e-100):
        return low, high
    margin = 0.1 * largest if largest > 1e-100 else 1.0
    return low - margin, high + margin


def lines(drawn: Sequence[Line], x: Axis, y: Axis, *, legend: bool = False) -> alt.LayerChart:
    """Lines with marks; ``legend`` names them below, where their names are not shown elsewhere."""
    path: list[dict[str, Any]] = []
    marks: list[dict[str, Any]] = []
    for line in drawn:
        rows: list[dict[str, Any]] = [
            {"x": at, "y": value, "line": line.label, "tip": tip}
            for (at, value), tip in zip(line.points, line.tips, strict=True)
        ]
        low, high = y.domain or (-math.inf, math.inf)
        for row, error in zip(rows, line.errors, strict=False):
            row |= {"low": max(row["y"] - error, low), "high": min(row["y"] + error, high)}
        path += _evenly(rows, _MOST_POINTS)
        marks += _evenly(rows, _MARKS)
    names = [line.label for line in drawn]
    below = alt.Legend(orient="bottom", title=None, columns=2) if legend else None
    colours = alt.Color("line:N", legend=below, scale=_fixed(names, [colour(line.run) for line in drawn]))
    looks = [line.run if line.mark is None else line.mark for line in drawn]
    base = alt.Chart(_data(path)).encode(x=x.x(), y=y.y(), color=colours)
    dashed = alt.StrokeDash("line:N", legend=below, scale=_fixed(names, [dash(look) for look in looks]))
    layers: list[alt.Chart] = [base.mark_line(strokeWidth=2, strokeJoin="round").encode(strokeDash=dashed)]
    if any(line.errors for line in drawn):
        band = base.mark_area(opacity=0.14).encode(y=y.y("low:Q"), y2="high:Q")
        layers.insert(0, band.transform_filter("isValid(datum.low)"))
    hollow: dict[str, Any] = {"fill": LIGHT["paper"], "fillOpacity": 0.35}  # so that a mark below another one is seen
    points = alt.Chart(_data(marks)).mark_point(size=46, strokeWidth=1.7, opacity=1, aria=True, **hollow)
    layers.append(
        points.encode(
            x=x.x(),
            y=y.y(),
            color=colours,
            shape=alt.Shape("line:N", legend=below, scale=_fixed(names, [shape(look) for look in looks])),
            description="tip:N",
        )
    )
    return alt.LayerChart(layer=layers, width=WIDTH, height=250, autosize=_FIT)


def scores(drawn: Sequence[Scores], x: Axis, form: Any) -> alt.LayerChart:
    """One histogram for each run, one below the other, with the mean (full line) and the 10th percentile (dashed)."""
    assert x.domain is not None
    low, high = x.domain
    width = (high - low) / _BINS
    bars: list[dict[str, Any]] = []
    rules: list[dict[str, Any]] = []
    words: list[dict[str, Any]] = []
    counts = [_counted(one.scores, low, width) for one in drawn]
    most = max(max(count) for count in counts)
    for i, (one, count) in enumerate(zip(drawn, counts, strict=True)):
        base = len(drawn) - 1 - i
        for number, clients in enumerate(count):
            if clients:
                start = low + number * width
                tip = f"{one.label}\n{form(start)} to {form(start + width)}: {counted(clients, 'client')}"
                tall = max(0.56 * clients / most, 0.02)
                place = {"x": start, "x2": start + width, "y": base, "y2": base + tall}
                bars.append({**place, "colour": colour(one.run), "tip": tip})
        for value, kind in ((one.mean, "mean"), (one.p10, "10th percentile")):
            if value is not None:
                rules.append({"x": value, "y": base, "y2": base + 0.6, "kind": kind})
        words.append({"y": base + 0.66, "name": one.label, "says": one.says, "colour": colour(one.run)})
    y = alt.Y("y:Q", axis=None, scale=alt.Scale(domain=[0, len(drawn)], nice=False))
    raw = alt.Color("colour:N", scale=None)
    text = alt.Chart(_data(words)).encode(y=y)
    dashed = _fixed(["mean", "10th percentile"], [[1, 0], [3, 3]])
    layers = [
        alt.Chart(_data([{"y": row} for row in range(len(drawn))])).mark_rule(color=LIGHT["grid"]).encode(y=y),
        alt.Chart(_data(bars))
        .mark_rect(aria=True, opacity=0.75)
        .encode(x=x.x(), x2="x2:Q", y=y, y2="y2:Q", color=raw, description="tip:N"),
        alt.Chart(_data(rules))
        .mark_rule(color=LIGHT["ink"], strokeWidth=1.8)
        .encode(x=x.x(), y=y, y2="y2:Q", strokeDash=alt.StrokeDash("kind:N", legend=None, scale=dashed)),
        text.mark_text(align="left", baseline="bottom", fontWeight="bold", fontSize=11.5, limit=150).encode(
            x=alt.value(0), text="name:N", color=raw
        ),
        text.mark_text(align="right", baseline="bottom", color=LIGHT["soft"], fontSize=11).encode(
            x=alt.value("width"), text="says:N"
        ),
    ]
    return alt.LayerChart(layer=layers, width=WIDTH, height=30 + 68 * len(drawn), autosize=_FIT)


def traffic(runs: Sequence[tuple[str, float, float]]) -> alt.LayerChart:
    """Bytes that each run sent up and down, on a logarithmic scale; at least one of them sent any."""
    counts = [count for _, up, down in runs for count in (up, down) if count > 0]
    ends = range(math.floor(math.log10(min(counts))), math.ceil(math.log10(max(counts) * 1.01)) + 1)
    axis = Axis(label=BYTES, log=True, places=[10.0**i for i in ends], domain=(10.0 ** ends[0], 10.0 ** ends[-1]))
    rows = alt.Axis(grid=True, labelLimit=130)
    y = alt.Y("run:N", sort=[label for label, _, _ in runs], title=None, axis=rows)
    legend = alt.Legend(orient="bottom", title=None, symbolFillColor=LIGHT["soft"])
    shapes = alt.Shape("way:N", scale=_fixed(["up", "down"], ["triangle-up", "triangle-down"]), legend=legend)
    layers: list[alt.Chart] = []
    for number, (way, apart) in enumerate((("up", -6), ("down", 6))):  # many runs send the same both ways
        found = [(i, label, ways[number]) for i, (label, *ways) in enumerate(runs)]
        sent = [
            {"run": label, "x": count, "way": way, "colour": colour(i), "tip": f"{label}\n{way}: {size(count)}"}
            for i, label, count in found
            if count > 0
        ]
        marks = alt.Chart(_data(sent)).mark_point(filled=True, size=70, opacity=1, aria=True, yOffset=apart)
        raw = alt.Color("colour:N", scale=None)
        layers.append(marks.encode(x=axis.x(), y=y, color=raw, shape=shapes, description="tip:N"))
        nothing = [{"run": label, "says": f"nothing {way}"} for _, label, count in found if count <= 0]
        words = alt.Chart(_data(nothing)).mark_text(align="left", fontSize=11, dx=2, dy=apart, color=LIGHT["faint"])
        layers.append(words.encode(x=alt.value(0), y=y, text="says:N"))
    return alt.LayerChart(layer=layers, width=WIDTH, height=70 + 36 * len(runs), autosize=_FIT)


_FIT = alt.AutoSizeParams(type="fit", contains="padding")


def _data(rows: list[dict[str, Any]]) -> alt.InlineData:
    return alt.InlineData(values=rows)


def _fixed(names: Sequence[str], values: Sequence[Any]) -> alt.Scale:
    return alt.Scale(domain=list(names), range=list(values))


def _evenly(rows: list[dict[str, Any]], most: int) -> list[dict[str, Any]]:
    """At most so many rows, evenly, the first and the last always among them."""
    if len(rows) <= most:
        return rows
    return [rows[round(i * (len(rows) - 1) / (most - 1))] for i in range(most)]


def _counted(values: Sequence[float], low: float, width: float) -> list[int]:
    """Values in each of the bins."""
    counts = [0] * _BINS
    for value in values:
        counts[min(max(int((value - low) / width), 0), _BINS - 1)] += 1
    return counts
