"""How every figure looks: one palette for light and one for dark, marks that differ in shape as well as in colour.

A chart is drawn in the colours of ``LIGHT``. For a page that may be read in the dark, ``file.inline`` turns each into
the CSS variable of its name, which has the colour of ``DARK`` there; so no two names of ``LIGHT`` share a colour.
``s0`` … ``s7`` are for runs and methods (after Okabe and Ito, so that colour-blind readers tell them apart), ``q0`` …
``q6`` for low to high scores.
"""

from __future__ import annotations

from typing import Any

LIGHT = {
    "paper": "#fcfbf9", "ink": "#1c2128", "soft": "#5a6472", "faint": "#8a929d", "rule": "#e3e0da", "grid": "#ebe8e2",
    "s0": "#0b66b0", "s1": "#cf5806", "s2": "#08835f", "s3": "#a5408a",
    "s4": "#876600", "s5": "#2b8fb8", "s6": "#56606e", "s7": "#7c3a1c",
    "q0": "#5b1650", "q1": "#8c2a62", "q2": "#bb4a6a", "q3": "#dc7878",
    "q4": "#eda58f", "q5": "#f5cdb0", "q6": "#faecd8",
}  # fmt: skip
DARK = {
    "paper": "#13161a", "ink": "#e9e7e2", "soft": "#a5adb8", "faint": "#7c8591", "rule": "#2b3139", "grid": "#252a31",
    "s0": "#62b2f5", "s1": "#ff9d5c", "s2": "#45cf9f", "s3": "#e892cb",
    "s4": "#dfc04d", "s5": "#8fd6f2", "s6": "#b4bdca", "s7": "#d59f80",
    "q0": "#ffd3c2", "q1": "#ffa9a3", "q2": "#f07f93", "q3": "#c75a86",
    "q4": "#94407a", "q5": "#663067", "q6": "#41264d",
}  # fmt: skip

_SHAPES = ("circle", "square", "triangle-up", "diamond", "cross", "triangle-down", "triangle-left", "triangle-right")
_DASHES = ([1, 0], [8, 3], [3, 2], [8, 3, 2, 3], [12, 3])
_GLYPHS = "●■▲◆✚▼◀▶"  # the same shapes in a line of text
COLOURS = len(_SHAPES)
STEPS = 7  # of the scale of scores
GROUP_SHAPES = {"seen": "circle", "unseen": "diamond", "unlabeled": "triangle-up"}
GROUP_GLYPHS = {"seen": "●", "unseen": "◆", "unlabeled": "▲"}


def colour(number: int) -> str:
    """The colour of a run or a method."""
    return LIGHT[f"s{number % COLOURS}"]


def shape(number: int) -> str:
    """Its mark, so that colour is never the only difference."""
    return _SHAPES[number % COLOURS]


def glyph(number: int) -> str:
    """Its mark in a line of text."""
    return _GLYPHS[number % COLOURS]


def dash(number: int) -> list[int]:
    """How its line is drawn, so that both of two lines in the same place are seen."""
    return _DASHES[number % len(_DASHES)]


_TEXT: dict[str, Any] = {"labelColor": LIGHT["soft"], "titleColor": LIGHT["soft"], "titleFontWeight": "normal"}
_TEXT |= {"labelFontSize": 11, "titleFontSize": 11, "aria": False}
CONFIG: dict[str, Any] = {
    "background": "transparent",
    "font": "sans-serif",
    "view": {"stroke": None},
    "axis": {
        **_TEXT,
        "gridColor": LIGHT["grid"],
        "domain": False,
        "ticks": False,
        "labelPadding": 6,
        "tickCount": 5,
        "labelOverlap": True,
    },
    "axisX": {"grid": False},
    "legend": {**_TEXT, "labelLimit": 300, "symbolBaseStrokeColor": LIGHT["soft"]},
    "title": {"color": LIGHT["ink"], "fontSize": 13, "anchor": "start", "subtitleColor": LIGHT["soft"]},
    "concat": {"spacing": 28},
    # Only a mark with a ``description`` says something of its own; a screen reader would get lost in all the others.
    "mark": {"aria": False},
    "range": {"category": [LIGHT[f"s{i}"] for i in range(COLOURS)], "symbol": list(_SHAPES)},
}
