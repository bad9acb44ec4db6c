"""Cost against privacy: FedDP-KMeans and its baselines over budgets and Lloyd steps (T1 Fig. 6.1, 6.2); pictures."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from unalike.analytics.kmeans.algorithm import Clustering, FedDPKMeans, cost
from unalike.analytics.kmeans.baselines import INITIAL, run_baseline
from unalike.analytics.kmeans.points import Points
from unalike.core.federation import Federation
from unalike.privacy.ledger import Budget

OURS = "FedDP-KMeans"
Federate = Callable[..., Federation]  # where the clients live is the caller's choice: `unalike.simulate`
EPSILONS = {"point": (0.1, 0.2, 0.3, 0.4, 0.65, 1.0, 2.0), "client": (0.25, 0.5, 1.0, 2.0, 4.0, 8.0)}
STEPS = (0, 1, 2)
_COLOURS = {OURS: "#c0392b", "ServerKMeans++": "#2c6fbb", "ServerLloyds": "#2e8b57", "SpherePacking": "#8e6bbf"}


@dataclass(frozen=True)
class Measured:
    """One run: what it cost in privacy (the ledger's ε) and how good the clustering is (cost per point)."""

    method: str
    epsilon: float
    steps: int
    cost: float


def run(name: str, method: FedDPKMeans, points: Points, seed: int, federate: Federate) -> tuple[Federation, Clustering]:
    """One method by name on a federation of its own, whose budget stops it should it ask for more."""
    privacy = method.privacy
    budget = None if privacy is None else Budget(privacy.epsilon, privacy.delta)
    federation = federate(points.clients, seed=seed, block=points.block, threads=1, budget=budget)
    if name == OURS:
        return federation, method.fit(federation, points.server)
    return federation, run_baseline(name, method, federation, points.server)


def sweep(
    method: FedDPKMeans,
    points: Points,
    federate: Federate,
    *,
    methods: Sequence[str] = (OURS, *INITIAL),
    epsilons: Sequence[float],
    steps: Sequence[int] = STEPS,
    seed: int = 0,
    progress: Callable[[str], None] = lambda _: None,
) -> list[Measured]:
    """Run every method with every ε and number of Lloyd steps. ``method`` gives the unit, δ and all else."""
    if method.privacy is None:
        raise ValueError("a sweep over privacy budgets needs a method with privacy=Privacy(...)")
    measured = []
    for name in methods:
        for count in steps:
            # a baseline without a Lloyd step asks nothing of the clients, so all budgets are the same
            free = name != OURS and count == 0
            for epsilon in epsilons[:1] if free else epsilons:
                progress(f"{name}, {count} Lloyd steps, ε = {epsilon:g}")
                tried = replace(method, steps=count, privacy=replace(method.privacy, epsilon=epsilon))
                federation, clustering = run(name, tried, points, seed, federate)
                spent = federation.ledger.epsilon(method.privacy.delta)
                measured.append(Measured(name, spent, count, cost(federation, clustering.centers)))
    return measured


def front(measured: Sequence[Measured], method: str) -> list[Measured]:
    """The runs of one method that no other run of it beats in both ε and cost, by rising ε."""
    best: list[Measured] = []
    for one in sorted((m for m in measured if m.method == method), key=lambda m: (m.epsilon, m.cost)):
        if not best or one.cost < best[-1].cost:
            best.append(one)
    return best


def pareto_page(measured: Sequence[Measured], levels: Mapping[str, float], title: str) -> str:
    """The fronts as one HTML page that needs no network; ``levels`` are methods without privacy, by cost."""
    import plotly.graph_objects as go

    figure = go.Figure()
    for name in dict.fromkeys(m.method for m in measured):
        every = [m for m in measured if m.method == name]
        best = front(measured, name)
        colour = _COLOURS.get(name, "#555555")
        faint = {"color": colour, "opacity": 0.25}
        figure.add_scatter(
            x=[m.epsilon for m in every], y=[m.cost for m in every], mode="markers", marker=faint, showlegend=False
        )
        figure.add_scatter(
            x=[m.epsilon for m in best],
            y=[m.cost for m in best],
            text=[f"{m.steps} Lloyd steps" for m in best],
            mode="lines+markers",
            name=name,
            line={"color": colour},
        )
    for name, level in levels.items():
        figure.add_hline(y=level, line_dash="dot", annotation_text=f"{name} (not private)")
    figure.update_layout(title=title, template="plotly_white")
    figure.update_xaxes(title="ε in total, by the ledger")
    figure.update_yaxes(title="k-means cost per point")
    return str(figure.to_html(include_plotlyjs=True, full_html=True))


def clustering_page(clustering: Clustering, server: Tensor, costs: Mapping[str, float], title: str) -> str:
    """One clustering: the centres among the server points (both are public by now), the costs, the elbow."""
    from plotly.subplots import make_subplots

    middle = clustering.centers.mean(0)
    axes = torch.linalg.svd(clustering.centers - middle, full_matrices=False).Vh[:2]
    curve = clustering.curve
    titles = ["Centres and server points, in the plane of the centres' spread", "Cost per point"]
    columns = 3 if curve else 2
    figure = make_subplots(rows=1, cols=columns, subplot_titles=[*titles, "Server cost by k: the elbow"][:columns])
    groups: list[tuple[str, Tensor, dict[str, Any]]] = [
        ("server points", server, {"color": "#2c6fbb", "size": 5, "opacity": 0.4}),
        ("centres", clustering.centers, {"color": "#c0392b", "size": 12, "symbol": "x"}),
    ]
    for name, points, marker in groups:
        places = (points - middle) @ axes.T
        second = places[:, 1] if places.shape[1] > 1 else torch.zeros(len(places))
        x, y = places[:, 0].tolist(), second.tolist()
        figure.add_scatter(x=x, y=y, mode="markers", name=name, marker=marker, row=1, col=1)
    figure.add_bar(x=list(costs), y=list(costs.values()), showlegend=False, row=1, col=2)
    low, high = min(costs.values()), max(costs.values())
    if high > low:
        figure.update_yaxes(range=[low - 0.2 * (high - low), high + 0.1 * (high - low)], row=1, col=2)
    if curve:
        numbers = list(range(1, len(curve) + 1))
        figure.add_scatter(x=numbers, y=list(curve), mode="lines+markers", showlegend=False, row=1, col=3)
        figure.add_vline(x=clustering.k, line_dash="dot", row=1, col=3)
    figure.update_layout(title=title, template="plotly_white")
    return str(figure.to_html(include_plotlyjs=True, full_html=True))
