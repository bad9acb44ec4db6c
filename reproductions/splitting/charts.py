"""Curves over rounds, side by side."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import altair as alt

from unalike.report.figures import theme

_MOST = 150  # points of a line: more cannot be told apart
_FLOOR = 1e-24  # below it a gap is rounding


@dataclass(frozen=True)
class Line:
    """A curve over rounds 1, 2, ...; ``dashed`` is drawn in the colour of the solid line of the same name."""

    name: str
    values: Sequence[float]
    dashed: bool = False


def panels(
    title: str, contents: dict[str, list[Line]], y: str, *, log: bool = True, dashed: str = "", columns: int = 3
) -> alt.VConcatChart:
    """One panel for each heading. ``dashed``: what dashed lines are, told in the title."""
    names = list(dict.fromkeys(line.name for lines in contents.values() for line in lines))
    colours = alt.Scale(domain=names, range=[theme.colour(i) for i in range(len(names))])
    legend = alt.Legend(orient="bottom", columns=4, symbolType="stroke", symbolStrokeWidth=2)
    made = [_panel(heading, lines, y, log, colours, legend) for heading, lines in contents.items()]
    rows = [alt.hconcat(*made[i : i + columns]) for i in range(0, len(made), columns)]
    head = alt.TitleParams(title, subtitle=f"dashed: {dashed}") if dashed else alt.TitleParams(title)
    chart: alt.VConcatChart = alt.vconcat(*rows, title=head)
    return chart


def _panel(
    heading: str, lines: list[Line], y: str, log: bool, colours: alt.Scale, legend: alt.Legend
) -> alt.LayerChart | alt.FacetChart:
    layers = []
    for dashed in (False, True):
        rows = [
            {"line": line.name, "round": number, "value": max(value, _FLOOR) if log else value}
            for line in lines
            if line.dashed == dashed
            for number, value in _thinned(line.values)
        ]
        if not rows:
            continue
        scale = alt.Scale(type="log") if log else alt.Scale(zero=False)
        axis = alt.Axis(format=".0e") if log else alt.Axis()
        chart = alt.Chart(alt.InlineData(values=rows), title=heading).mark_line(strokeDash=[5, 3] if dashed else [1, 0])
        layers.append(
            chart.encode(
                x=alt.X("round:Q", title="round"),
                y=alt.Y("value:Q", title=y, scale=scale, axis=axis),
                color=alt.Color("line:N", title=None, scale=colours, legend=legend),
            )
        )
    return alt.layer(*layers).properties(width=270, height=240)


def _thinned(values: Sequence[float]) -> list[tuple[int, float]]:
    """The first rounds, then every so many; what is not finite is left out."""
    step = max(1, math.ceil(len(values) / _MOST))
    return [
        (number, value)
        for number, value in enumerate(values, 1)
        if math.isfinite(value) and (number <= 20 or number % step == 0 or number == len(values))
    ]
