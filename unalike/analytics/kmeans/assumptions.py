"""The two conditions under which FedDP-KMeans is proven to find Gaussian clusters (T1 §6.4), checked as in D.7.2."""

from __future__ import annotations

import math
from typing import Any


def assumptions(
    *,
    k: int,
    points: int,
    dimension: int,
    epsilon: float,
    radius: float,
    server_points: int,
    deviation: float,
    smallest: float = 1.0,
) -> dict[str, Any]:
    """(1) Δ ≤ k·log²(m)·√d·σ_max/(ε·w_min), and (2) |Q| ≤ ε·m·k·log(m)·σ_max²/Δ², with the constants taken as 1.

    ``points`` is m, ``deviation`` σ_max, ``smallest`` w_min. Where the clusters are not known, D.7.2 takes the root of
    the k-means cost per point for σ_max, which is an upper bound, and 1 for w_min. Without noise ε is infinite: the
    first bound is then 0 and says nothing, as no noise has to be outweighed.
    """
    log = math.log(points)
    most_radius = k * log**2 * math.sqrt(dimension) * deviation / (epsilon * smallest)
    most_points = epsilon * points * k * log * deviation**2 / radius**2
    return {
        "radius": radius,
        "most_radius": most_radius if math.isfinite(epsilon) else None,
        "server_points": server_points,
        "most_server_points": most_points if math.isfinite(epsilon) else None,
        "hold": not math.isfinite(epsilon) or (radius <= most_radius and server_points <= most_points),
    }


def told(found: dict[str, Any]) -> list[str]:
    """The same in words; nothing where there is no noise."""
    if found["most_radius"] is None:
        return []
    signs = ["≤" if found[name] <= found[f"most_{name}"] else "above" for name in ("radius", "server_points")]
    return [
        f"assumptions of the analysis {'hold' if found['hold'] else 'do not hold'} (constants taken as 1; measured in "
        f"simulation): radius {found['radius']:.3g} {signs[0]} {found['most_radius']:.3g}, server points "
        f"{found['server_points']} {signs[1]} {found['most_server_points']:.3g}"
    ]
