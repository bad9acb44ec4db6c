"""T2 Figure 2.1: projection and reflection."""

from __future__ import annotations

from typing import Any

import altair as alt
import numpy as np

from reproductions.item import Found, Item, Numbers, Tick, Work, claim
from unalike.data.source import Array
from unalike.report.figures.theme import LIGHT

_NORMAL, _OFFSET = np.array([0.6, 0.8]), 0.5  # the half-plane a·x ≤ b
_NEAREST = "excess over the nearest of 40,401 points of the set"
_MIRROR = "half-plane: distance from the mirror image 2(b − a·v)a + v"
_SHRINKS = "largest ‖R(v) − R(w)‖ / ‖v − w‖"


def _onto_disc(w: Array) -> Array:
    found: Array = w / np.maximum(1, np.linalg.norm(w, axis=-1, keepdims=True))
    return found


def _onto_half_plane(w: Array) -> Array:
    found: Array = w - np.maximum(0, w @ _NORMAL - _OFFSET)[..., None] * _NORMAL
    return found


_SETS = {"disc": _onto_disc, "half-plane": _onto_half_plane}


def _projections(tick: Tick, points: int, seed: int) -> Numbers:
    """Random points, their projections and reflections, and how far both are from what they should be."""
    rng = np.random.default_rng(seed)
    w = 2 * rng.standard_normal((points, 2))
    side = np.linspace(-4, 4, 201)
    grid = np.stack(np.meshgrid(side, side), -1).reshape(-1, 2)
    table, excess, shrinks = [], [], []
    for name, project in _SETS.items():
        inside = grid[(grid**2).sum(1) <= 1] if name == "disc" else grid[grid @ _NORMAL <= _OFFSET]
        P = project(w)
        R = 2 * P - w
        nearest = np.array([np.linalg.norm(inside - point, axis=1).min() for point in w])
        excess.append((np.linalg.norm(P - w, axis=1) - nearest).max())
        shrinks.append((np.linalg.norm(R[1:] - R[:-1], axis=1) / np.linalg.norm(w[1:] - w[:-1], axis=1)).max())
        table += [{"set": name, "w": w[i].tolist(), "P": P[i].tolist(), "R": R[i].tolist()} for i in range(points)]
        tick(len(table), len(_SETS) * points)
    outside = w[w @ _NORMAL > _OFFSET]
    mirror = outside + 2 * (_OFFSET - outside @ _NORMAL)[:, None] * _NORMAL
    off = np.abs(2 * _onto_half_plane(outside) - outside - mirror).max()
    return {"table": table, "excess": float(max(excess)), "mirror": float(off), "shrinks": float(max(shrinks))}


def _figure_2_1(work: Work) -> Found:
    found = work.part("projections", _projections, points=60, seed=0)
    rows = [
        {"set": row["set"], **{f"{name}_{axis}": row[name][k] for name in "wPR" for k, axis in enumerate("xy")}}
        for row in found["table"]
    ]
    values = {_NEAREST: [found["excess"]], _MIRROR: [found["mirror"]], _SHRINKS: [found["shrinks"]]}
    return Found(values, rows, _arrows([rows[i] for start in (0, 60) for i in range(start, start + 12)]))


def _arrows(rows: list[dict[str, Any]]) -> alt.HConcatChart:
    """From each point through its projection to its reflection."""
    angle = np.linspace(0, 2 * np.pi, 73)
    along = np.array([-_NORMAL[1], _NORMAL[0]])
    borders = {
        "disc": np.stack([np.cos(angle), np.sin(angle)], 1),
        "half-plane": np.stack([_OFFSET * _NORMAL - 4 * along, _OFFSET * _NORMAL + 4 * along]),
    }
    panels = []
    domain = alt.Scale(domain=[-4, 4], clamp=True)
    for name, border in borders.items():
        mine = [row for row in rows if row["set"] == name]
        edge = [{"x": float(x), "y": float(y), "order": i} for i, (x, y) in enumerate(border)]
        x, y = alt.X("x:Q", title=None, scale=domain), alt.Y("y:Q", title=None, scale=domain)
        line = alt.Chart(alt.InlineData(values=edge), title=name).mark_line(color=LIGHT["ink"]).encode(
            x=x, y=y, order="order:Q"
        )  # fmt: skip
        points = [
            {"x": row[f"{at}_x"], "y": row[f"{at}_y"], "what": what}
            for row in mine
            for at, what in (("w", "w"), ("P", "P(w)"), ("R", "R(w) = 2P(w) − w"))
        ]
        ends = [{"x": r["w_x"], "y": r["w_y"], "x2": r["R_x"], "y2": r["R_y"]} for r in mine]
        paths = alt.Chart(alt.InlineData(values=ends)).mark_rule(color=LIGHT["faint"], strokeDash=[3, 2]).encode(
            x=x, y=y, x2="x2:Q", y2="y2:Q"
        )  # fmt: skip
        marks = (
            alt.Chart(alt.InlineData(values=points))
            .mark_point(filled=True, size=45, opacity=1)
            .encode(x=x, y=y, color=alt.Color("what:N", title=None), shape=alt.Shape("what:N", title=None))
        )
        panels.append(alt.layer(paths, line, marks).properties(width=300, height=300))
    chart: alt.HConcatChart = alt.hconcat(*panels, title="Projection and reflection")
    return chart


_ROUNDING = "rounding in double precision"
ITEMS = (
    Item(
        id="t2-figure-2.1",
        title="Projection P_C and reflection R_C = 2P_C − I",
        claim="If f is the indicator of a closed set C, its proximal map is the Euclidean projection on C, and its "
        "reflector is the reflection at C.",
        two_cores="yes",
        rows=(
            claim(
                _NEAREST,
                "P(w) is the point of C nearest to w",
                "rounding: no point of the grid is nearer",
                high=1e-12,
                exact=True,
            ),
            claim(_MIRROR, "R(v) is the reflection of v", _ROUNDING, high=1e-12, exact=True),
            claim(_SHRINKS, "a reflector is nonexpansive", _ROUNDING, high=1 + 1e-12, exact=True),
        ),
        compute=_figure_2_1,
        settings={"sets": "the unit disc and the half-plane .6x + .8y ≤ .5: the drawing has no scale"},
    ),
)
