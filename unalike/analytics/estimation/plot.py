"""Pictures of personal estimates: error against ε0 and bits, and against what a client finds alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

_LOCAL, _OURS, _BARE, _THEORY = "#7f8c8d", "#2c6fbb", "#2e8b57", "#c0392b"
_MOST = 2000  # clients in a picture: more points cannot be told apart


@dataclass
class Curve:
    """Errors at growing ε0 or bits."""

    at: list[float] = field(default_factory=list)
    error: list[float] = field(default_factory=list)
    theory: list[float] = field(default_factory=list)


def sweep_page(title: str, by_epsilon: Curve, by_bits: Curve, local: float, bare: float, delta: str) -> str:
    """MSE against the privacy parameter and against the bits of a message, between the local and the bare one."""
    import plotly.graph_objects as go
    from plotly.subplots import make_subplots

    plot = make_subplots(
        rows=1, cols=2, shared_yaxes=True, subplot_titles=[f"Locally private{delta}", "Rounded to k bits, not private"]
    )
    for column, (curve, name) in enumerate(((by_epsilon, "ε₀ of a client"), (by_bits, "bits of a number")), start=1):
        first = column == 1
        lines: list[tuple[str, list[float], str, str, str | None]] = [
            ("personal estimate", curve.error, _OURS, "lines+markers", None)
        ]
        if curve.theory:
            lines.append(("Theorem 2", curve.theory, _THEORY, "lines", "dot"))
        lines.append(("what a client finds alone", [local] * len(curve.at), _LOCAL, "lines", "dash"))
        lines.append(("personal, message as it is", [bare] * len(curve.at), _BARE, "lines", "dash"))
        for label, values, colour, mode, dash in lines:
            trace = go.Scatter(
                x=curve.at, y=values, mode=mode, name=label, showlegend=first, line={"color": colour, "dash": dash}
            )
            plot.add_trace(trace, row=1, col=column)
        plot.update_xaxes(title_text=name, type="log" if first else "linear", row=1, col=column)
    plot.update_yaxes(title_text="mean squared error", row=1, col=1)
    return _page(plot, title)


def result_page(
    title: str,
    errors: Mapping[str, float],
    estimate: Tensor,
    local: Tensor,
    truth: Tensor | None,
    trace: Sequence[float],
    trace_name: str,
) -> str:
    """The error of each way of estimating, the clients one by one, and the course of the rounds."""
    import plotly.graph_objects as go
    from plotly.subplots import make_subplots

    across = "truth" if truth is not None else "what a client finds alone"
    titles = ["Mean error", f"First coordinate: estimate against {across}", trace_name if trace else ""]
    plot = make_subplots(rows=1, cols=3 if trace else 2, subplot_titles=titles[: 3 if trace else 2])
    colours = {"personal": _OURS, "local": _LOCAL, "fedavg": _THEORY}
    bars = go.Bar(
        x=list(errors), y=list(errors.values()), marker_color=[colours.get(n, _BARE) for n in errors], showlegend=False
    )
    plot.add_trace(bars, row=1, col=1)
    horizontal = (local if truth is None else truth.reshape(estimate.shape))[:_MOST, 0].tolist()
    groups = {"personal": estimate} if truth is None else {"local": local, "personal": estimate}
    for name, values in groups.items():
        marker = {"color": colours[name], "size": 4, "opacity": 0.5}
        points = go.Scatter(x=horizontal, y=values[:_MOST, 0].tolist(), mode="markers", marker=marker, name=name)
        plot.add_trace(points, row=1, col=2)
    if trace:
        line = go.Scatter(x=list(range(1, len(trace) + 1)), y=list(trace), line={"color": _OURS}, showlegend=False)
        plot.add_trace(line, row=1, col=3)
        plot.update_xaxes(title_text="round", row=1, col=3)
    return _page(plot, title)


def _page(plot: Any, title: str) -> str:
    plot.update_layout(title=title, template="plotly_white", legend={"orientation": "h", "y": -0.15})
    page: str = plot.to_html(include_plotlyjs=True)  # the page needs no network
    return page
