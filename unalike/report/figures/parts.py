"""What several figures have in common: rows, scales, and a few marks or clients of many."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

import altair as alt

T = TypeVar("T")
Rows = list[dict[str, Any]]
FIT = alt.AutoSizeParams(type="fit", contains="padding")  # a chart's width and height are those of the whole


def chart_of(rows: Rows, **properties: Any) -> alt.Chart:
    """A chart of these rows, with a title, a width and a height, for example."""
    return alt.Chart(alt.InlineData(values=rows), **properties)


def fixed_scale(names: Sequence[str], values: Sequence[Any]) -> alt.Scale:
    """Each name has its own colour, shape or dash."""
    return alt.Scale(domain=list(names), range=list(values))


def as_they_are(*channels: str) -> dict[str, Any]:
    """Encodings by the columns of these names, which hold colours or shapes themselves."""
    return {name: getattr(alt, name.capitalize())(f"{name}:N", scale=None) for name in channels}


def number(field: str, title: str | None = None, **scale: Any) -> dict[str, Any]:
    """A direction in which 0 has no meaning of its own."""
    return {"shorthand": f"{field}:Q", "title": title, "scale": alt.Scale(zero=False, **scale)}


def course(values: Sequence[float], title: str, colour: str, **properties: Any) -> alt.Chart:
    """A value of each round."""
    rows = [{"round": i, "value": value} for i, value in enumerate(values, start=1)]
    line: alt.Chart = chart_of(rows, title=title, **properties).mark_line(color=colour)
    line = line.encode(x=alt.X("round:Q", axis=alt.Axis(tickMinStep=1)), y=alt.Y(**number("value")))
    return line


def sample_evenly(items: Sequence[T], most: int) -> list[T]:
    """At most ``most`` of the items, evenly spaced; the first and the last are always among them."""
    if len(items) <= most:
        return list(items)
    return [items[round(i * (len(items) - 1) / (most - 1))] for i in range(most)]
