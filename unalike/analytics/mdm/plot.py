"""Pictures of a fitted mixture: true and simulated clients side by side by t-SNE, the components, the likelihood."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from unalike.analytics.mdm.algorithm import Fitted

_COLOURS = {"true": "#2e8b57", "mdm": "#c0392b", "iid": "#2c6fbb"}  # as in T1's figures
_NAMES = {"true": "true clients", "mdm": "simulated by MDM", "iid": "simulated, fully IID"}
_MOST = 400  # clients of each group: more points cannot be told apart, and t-SNE takes long


def map_clients(groups: Mapping[str, NDArray[Any]], seed: int) -> dict[str, NDArray[np.float64]]:
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


def figure(
    fitted: Fitted, groups: Mapping[str, NDArray[Any]], names: Sequence[str] | None, title: str, seed: int
) -> str:
    """One HTML page that needs no network."""
    import plotly.graph_objects as go
    from plotly.colors import qualitative
    from plotly.subplots import make_subplots

    mixture = fitted.mixture
    traced = bool(fitted.log_likelihood)
    cells: list[list[dict[str, int] | None]] = [[{"rowspan": 2}, {}], [None, {}]]
    plot = make_subplots(
        rows=2,
        cols=2,
        specs=cells,
        column_widths=[0.6, 0.4],
        subplot_titles=[
            "Clients by t-SNE of their histograms",
            "Mean share of each category, by component",
            "Log-likelihood per client of each round's cohort" if traced else "No likelihood was released",
        ],
    )
    for group, places in map_clients(groups, seed).items():
        marker = {"color": _COLOURS[group], "size": 5, "opacity": 0.7}
        x, y = places.T.tolist()
        plot.add_trace(go.Scatter(x=x, y=y, mode="markers", marker=marker, name=_NAMES[group]), row=1, col=1)
    labels = list(names) if names is not None else [str(j) for j in range(mixture.categories)]
    for k in range(mixture.components):
        mean = (mixture.alpha[k] / mixture.alpha[k].sum()).tolist()
        called = f"component {k}: weight {float(mixture.tau[k]):.2f}, precision {float(mixture.alpha[k].sum()):.3g}"
        colour = qualitative.Safe[k % len(qualitative.Safe)]
        plot.add_trace(go.Bar(x=labels, y=mean, name=called, marker_color=colour), row=1, col=2)
    if traced:
        rounds = list(range(1, len(fitted.log_likelihood) + 1))
        line = go.Scatter(x=rounds, y=fitted.log_likelihood, mode="lines", line={"color": "#555555"}, showlegend=False)
        plot.add_trace(line, row=2, col=2)
        plot.update_xaxes(title_text="round", row=2, col=2)
    plot.update_xaxes(showticklabels=False, row=1, col=1)
    plot.update_yaxes(showticklabels=False, row=1, col=1)
    plot.update_layout(title=title, template="plotly_white", legend={"orientation": "h", "y": -0.1})
    page: str = plot.to_html(include_plotlyjs=True)
    return page
