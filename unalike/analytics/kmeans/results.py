"""A clustering beside the optimum and the baselines, and fronts of cost against ε: all as plain values.

from unalike.analytics.kmeans.results import cluster
done = cluster(FedDPKMeans(k=10), read_points("gaussian-mixture"), unalike.simulate)
print(done.values["cost"], done.values["optimal_cost"])
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any

from unalike.analytics.kmeans.algorithm import Clustering, FedDPKMeans, cost
from unalike.analytics.kmeans.baselines import INITIAL, KFed, optimal
from unalike.analytics.kmeans.points import Points
from unalike.analytics.kmeans.study import (
    EPSILONS,
    OURS,
    Federate,
    Measured,
    front,
    run,
    sweep,
)
from unalike.core.federation import Federation

Progress = Callable[[str], None]
"""Is told what is computed next."""


@dataclass(frozen=True)
class Clustered:
    """One clustering, and the costs that it is to be compared with."""

    values: dict[str, Any]
    clustering: Clustering
    points: Points
    costs: dict[str, float]

    @property
    def title(self) -> str:
        epsilon = self.values["epsilon"]
        return f"{self.points.name}: k = {self.clustering.k}, ε = {'∞' if epsilon is None else f'{epsilon:.4g}'}"


@dataclass(frozen=True)
class Fronts:
    """Runs over budgets and Lloyd steps; ``levels`` are the costs of methods without privacy."""

    values: dict[str, Any]
    measured: list[Measured]
    levels: dict[str, float]
    title: str


def cluster(
    method: FedDPKMeans,
    points: Points,
    federate: Federate,
    *,
    seed: int = 0,
    baselines: bool = False,
    starts: int = 5,
    progress: Progress = lambda _: None,
) -> Clustered:
    """Cluster the points; ``starts`` of the non-private optimum, 0 to leave it out; ``baselines``: run them, too."""
    import sklearn.cluster  # noqa: F401  # it takes a second, which is not the clustering's

    progress(OURS)
    begin, begin_cpu = time.perf_counter(), time.process_time()
    federation, found = run(OURS, method, points, seed, federate)
    seconds, cpu_seconds = time.perf_counter() - begin, time.process_time() - begin_cpu
    ours = cost(federation, found.centers)
    values: dict[str, Any] = {
        **_about(method, points, seed),
        "k": found.k,
        "radius": round(found.radius, 4),
        "server_points_used": found.server_points,
        "cost": ours,
        "optimal_cost": None,
        "gap": None,
        "epsilon": _spent(federation, method),
        "accounting": federation.ledger.method,
        "seconds": round(seconds, 3),
        "cpu_seconds": round(cpu_seconds, 3),  # what it would take on a machine that does nothing else
        "bytes": {"up": federation.traffic.total_up, "down": federation.traffic.total_down},
        "transcript": federation.transcript.rows(),
    }
    if found.curve:
        values["elbow"] = list(found.curve)
    costs = {OURS: ours}
    if starts:
        progress("the optimum, pooled and without privacy")
        best = optimal(points.clients, found.k, starts, seed, near=found.centers)
        costs["Optimal"] = values["optimal_cost"] = cost(federation, best)
        values["gap"] = ours / costs["Optimal"] - 1 if costs["Optimal"] > 0 else 0.0
    if baselines:
        values["baselines"] = _baselines(method, found.k, points, federate, seed, progress)
        costs |= {row["method"]: row["cost"] for row in values["baselines"]}
    return Clustered(values, found, points, costs)


def _baselines(
    method: FedDPKMeans, k: int, points: Points, federate: Federate, seed: int, progress: Progress
) -> list[dict[str, Any]]:
    """The baselines with at least one Lloyd step (with none they would not look at the clients), and k-FED."""
    rows: list[dict[str, Any]] = []
    stepping = replace(method, k=k, steps=max(1, method.steps))
    for name in INITIAL:
        progress(name)
        federation, found = run(name, stepping, points, seed, federate)
        spent = _spent(federation, method)
        rows.append(
            {"method": name, "steps": stepping.steps, "cost": cost(federation, found.centers), "epsilon": spent}
        )
    k_fed_cost = _k_fed_cost(points, k, federate, seed, progress)
    rows.append({"method": "k-FED", "steps": None, "cost": k_fed_cost, "epsilon": None})
    return rows


def fronts(
    method: FedDPKMeans,
    points: Points,
    federate: Federate,
    *,
    seed: int = 0,
    baselines: bool = False,
    starts: int = 5,
    progress: Progress = lambda _: None,
) -> Fronts:
    """Pareto fronts of cost and ε, up to the method's own ε."""
    if method.privacy is None or method.k is None:
        raise ValueError(
            "fronts are of one k, over budgets up to the method's ε: give k=10 and privacy=Privacy(epsilon=2)"
        )
    most = method.privacy.epsilon
    epsilons = sorted({e for e in EPSILONS[method.privacy.unit] if e < most} | {most})
    names = (OURS, *INITIAL) if baselines else (OURS,)
    measured = sweep(method, points, federate, methods=names, epsilons=epsilons, seed=seed, progress=progress)
    levels: dict[str, float] = {}
    if starts:
        progress("the optimum, pooled and without privacy")
        federation = federate(points.clients, seed=seed, block=points.block, threads=1)
        levels["Optimal"] = cost(federation, optimal(points.clients, method.k, starts, seed))
    if baselines:
        levels["k-FED"] = _k_fed_cost(points, method.k, federate, seed, progress)
    values = {
        **_about(method, points, seed),
        "optimal_cost": levels.get("Optimal"),
        "k_fed_cost": levels.get("k-FED"),
        "fronts": {name: [asdict(one) for one in front(measured, name)] for name in names},
        "runs": [asdict(one) for one in measured],
    }
    title = f"{points.name}: cost against ε, {method.privacy.unit}-level, δ = {method.privacy.delta:g}"
    return Fronts(values, measured, levels, title)


def _k_fed_cost(points: Points, k: int, federate: Federate, seed: int, progress: Progress) -> float:
    progress("k-FED, without privacy")
    federation = federate(points.clients, seed=seed, block=points.block, threads=1)
    return cost(federation, KFed(k).fit(federation))


def _about(method: FedDPKMeans, points: Points, seed: int) -> dict[str, Any]:
    privacy = method.privacy
    return {
        "data": points.name,
        "seed": seed,
        "k": method.k,
        "clients": len(points.clients),
        "points": points.total,
        "dimension": points.server.shape[1],
        "features": _features(points),
        "server_points": len(points.server),
        "steps": method.steps,
        "center": method.center,
        "unit": None if privacy is None else privacy.unit,
        "delta": None if privacy is None else privacy.delta,
        "budget": None if privacy is None else privacy.epsilon,
        "split": None if privacy is None else asdict(privacy.proportions),
    }


def _features(points: Points) -> list[str] | None:
    """The columns of a table that are clustered; one of text has a feature for each value. None: no table."""
    if points.columns is None:
        return None
    return [name if text is None else f"{name} ({len(text)} values)" for name, text in points.columns.items()]


def _spent(federation: Federation, method: FedDPKMeans) -> float | None:
    """ε so far, None for infinity (which JSON does not have)."""
    spent = math.inf if method.privacy is None else federation.ledger.epsilon(method.privacy.delta)
    return spent if math.isfinite(spent) else None
