"""Figures of a fitted mixture: true and simulated clients side by side by t-SNE, the components, the likelihood."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import altair as alt
import numpy as np
from numpy.typing import NDArray

from unalike.analytics.mdm.study import MixtureResult
from unalike.report.figures.parts import Rows, chart_of, course
from unalike.report.figures.theme import LIGHT

_NAMES = {"true": "true clients", "mdm": "simulated by MDM", "iid": "simulated, fully IID"}
_MOST = 400  # clients of each group: more points cannot be told apart, and t-SNE takes long


def mixture(result: MixtureResult, title: str) -> alt.HConcatChart:
    """Clients of each group on one plane; beside it what each component is like, and the rounds' likelihood."""
    fitted, groups = result.fit, result.groups
    places = _plane(groups, result.seed).items()
    rows = [{"group": _NAMES[group], "x": float(x), "y": float(y)} for group, own in places for x, y in own]
    look: dict[str, Any] = {
        "scale": alt.Scale(domain=[_NAMES[group] for group in groups]),
        "legend": alt.Legend(orient="bottom", title=None, symbolOpacity=1),
    }
    plane = chart_of(rows, title="Clients by t-SNE of their histograms", width=480, height=460)
    plane = plane.mark_point(filled=True, size=28, opacity=0.6).encode(
        x=alt.X("x:Q", axis=None),
        y=alt.Y("y:Q", axis=None),
        color=alt.Color("group:N", **look),
        shape=alt.Shape("group:N", **look),
    )
    found = fitted.mixture
    labels = [str(name) for name in result.histograms.names or range(found.categories)]
    means: Rows = []
    called = []
    for k in range(found.components):
        precision = float(found.alpha[k].sum())
        called.append(f"component {k}: weight {float(found.tau[k]):.2f}, precision {precision:.3g}")
        pairs = zip(labels, (found.alpha[k] / precision).tolist(), strict=True)
        means += [{"category": name, "share": value, "component": called[k]} for name, value in pairs]
    bars = chart_of(means, title="Mean share of each category, by component", width=400, height=190).mark_bar()
    right = [
        bars.encode(
            x=alt.X("category:N", sort=labels, title=None, axis=alt.Axis(labelAngle=0)),
            xOffset=alt.XOffset("component:N", sort=called),
            y=alt.Y("share:Q", title=None, axis=alt.Axis(format="~%")),
            color=alt.Color("component:N", sort=called, title=None, legend=alt.Legend(orient="bottom", columns=1)),
        )
    ]
    if fitted.log_likelihood:
        heading = "Log-likelihood per client of each round's cohort"
        right.append(course(fitted.log_likelihood, heading, LIGHT["s6"], width=400, height=150))
    apart: dict[str, Any] = {"color": "independent", "shape": "independent"}
    chart: alt.HConcatChart = alt.hconcat(plane, alt.vconcat(*right), title=title).resolve_scale(**apart)
    return chart


def _plane(groups: Mapping[str, NDArray[Any]], seed: int) -> dict[str, NDArray[np.float64]]:
    """Two-dimensional places [n, 2] of all clients by t-SNE of their normalised histograms, by group."""
    from sklearn.manifold import TSNE

    shown = {name: counts[:_MOST] / counts[:_MOST].sum(1, keepdims=True) for name, counts in groups.items()}
    points = np.concatenate(list(shown.values()))
    perplexity = min(30.0, (len(points) - 1) / 3)
    # Spread out by a hair: t-SNE fails on clients that are all exactly alike.
    points = points + np.random.default_rng(seed).normal(0.0, 1e-6, points.shape)
    places = TSNE(perplexity=perplexity, init="random", random_state=seed).fit_transform(points)
    cuts = np.cumsum([len(part) for part in shown.values()])[:-1]
    return dict(zip(shown, np.split(places.astype(np.float64), cuts), strict=True))
