"""The two figures that most items have: curves, and accuracies of methods as dots."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import altair as alt

from unalike.report.figures import theme
from unalike.report.figures.file import Figure
from unalike.report.figures.theme import LIGHT

LOG, CLOSE = alt.Scale(type="log"), alt.Scale(zero=False)  # CLOSE: the axis need not begin at zero
ACCURACY = alt.Y("accuracy:Q", title="accuracy (%)", scale=CLOSE)
WHOSE = {"paper": LIGHT["s6"], "Unalike": LIGHT["s0"]}


def curves(
    rows: Sequence[Mapping[str, Any]], x: alt.X, y: alt.Y, by: str, *, title: str = "", dashes: str = ""
) -> Figure:
    """A line for each value of ``by``, and a dash for each value of ``dashes``; points where there are few."""
    plain = [dict(row) for row in rows]
    stroke = alt.Legend(symbolType="stroke", symbolStrokeWidth=2)

    def named(key: str) -> dict[str, Any]:  # one order for both, so that equal legends are one
        return {
            "title": None,
            "scale": alt.Scale(domain=list(dict.fromkeys(row[key] for row in plain))),
            "legend": stroke,
        }

    lines: dict[str, Any] = {"color": alt.Color(f"{by}:N", **named(by))}
    if dashes:
        lines["strokeDash"] = alt.StrokeDash(f"{dashes}:N", **named(dashes))
    chart: alt.Chart = (
        alt.Chart(alt.InlineData(values=plain), title=title)
        .mark_line(point=len(plain) < 100)
        .encode(x=x, y=y, **lines)
        .properties(width=420, height=280)
    )
    return chart


def dots(rows: Sequence[Mapping[str, Any]], order: Sequence[str], title: str = "accuracy (%)") -> Figure:
    """Accuracies of methods; a row has method, accuracy, column (its panel) and whose, by default ours."""
    plain = [{"whose": "Unalike", **row} for row in rows]
    names = list(dict.fromkeys(row["whose"] for row in plain))
    colours = [WHOSE.get(name, theme.colour(number)) for number, name in enumerate(names)]
    legend: dict[str, Any] = {"legend": None} if names == ["Unalike"] else {}
    chart: Figure = (
        alt.Chart(alt.InlineData(values=plain))
        .mark_point(filled=True, size=70, opacity=1)
        .encode(
            x=alt.X("accuracy:Q", title=title, scale=CLOSE),
            y=alt.Y("method:N", sort=list(order), title=None),
            color=alt.Color("whose:N", title=None, scale=alt.Scale(domain=names, range=colours), **legend),
            shape=alt.Shape("whose:N", title=None, scale=alt.Scale(domain=names), **legend),
            facet=alt.Facet("column:N", sort=None, title=None, columns=3),
        )
        .properties(width=220, height=190)
    )
    return chart
