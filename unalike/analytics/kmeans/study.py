"""FedDP-KMeans beside the optimum and its baselines, and cost against privacy (T1 Fig. 6.1, 6.2): all as plain values.

from unalike.analytics.kmeans.study import cluster
done = cluster(FedDPKMeans(k=10), read_points("gaussian-mixture"), unalike.simulate)
print(done.values["cost"], done.values["optimal_cost"])
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from unalike.analytics.kmeans.algorithm import Clustering, FedDPKMeans, cost
from unalike.analytics.kmeans.assumptions import assumptions
from unalike.analytics.kmeans.baselines import INITIAL, KFed, optimal, run_baseline
from unalike.analytics.kmeans.budget import Split, mechanisms
from unalike.analytics.kmeans.points import Points
from unalike.core.federation import Federation
from unalike.privacy.ledger import Budget

OURS = "FedDP-KMeans"
Federate = Callable[..., Federation]  # where the clients live is the caller's choice: `unalike.simulate`
EPSILONS = {"point": (0.1, 0.2, 0.3, 0.4, 0.65, 1.0, 2.0), "client": (0.25, 0.5, 1.0, 2.0, 4.0, 8.0)}
STEPS = (0, 1, 2)
Progress = Callable[[str], None]  # is told what is computed next


@dataclass(frozen=True)
class Measured:
    """One run: what it cost in privacy (the ledger's ε) and how good the clustering is (cost per point)."""

    method: str
    epsilon: float
    steps: int
    cost: float
    split: tuple[float, ...] | None = None  # shares of ε_init, where they were varied


def run(name: str, method: FedDPKMeans, points: Points, seed: int, federate: Federate) -> tuple[Federation, Clustering]:
    """One method by name on a federation of its own, whose budget stops it should it ask for more than was planned."""
    privacy = method.privacy if method.noise is None else None
    budget = None if privacy is None else Budget(privacy.epsilon, privacy.delta)
    federation = federate(points.clients, seed=seed, block=points.block, threads=1, budget=budget)
    if name == OURS:
        return federation, method.fit(federation, points.server if len(points.server) else None)
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
    progress: Progress = lambda _: None,
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


def explore(
    method: FedDPKMeans,
    points: Points,
    federate: Federate,
    *,
    settings: int,
    seeds: int = 1,
    least: float = 0.1,
    seed: int = 0,
    progress: Progress = lambda _: None,
) -> list[Measured]:
    """Runs of FedDP-KMeans at random ε_i and numbers of Lloyd steps, as T1's Pareto fronts are made (§6.5).

    Of each setting ε_init lies between ``least`` and four times the method's ε, evenly in logarithms, its four shares
    are anything above 2 %, and T is one of 0, 1 and 2. The ledger says what it comes to; those above the method's ε are
    left out. The cost is the mean over ``seeds``.
    """
    privacy = method.privacy
    if privacy is None:
        raise ValueError("settings are explored up to a method's ε: give privacy=Privacy(...)")
    random = np.random.default_rng([seed, 6003])
    measured: list[Measured] = []
    while len(measured) < settings:
        whole = float(np.exp(random.uniform(math.log(least), math.log(4.0 * privacy.epsilon))))
        shares = 0.02 + 0.92 * random.dirichlet(np.ones(4))
        tried = replace(method, steps=int(random.choice(STEPS)))
        queries = {"histograms": tried.histograms, "refinements": tried.refinements}
        split = Split(*(float(share) for share in shares))
        noise = mechanisms(replace(privacy, split=split), whole, initialize=True, **queries)
        tried, costs, spent = replace(tried, noise=noise), [], math.inf
        progress(f"setting {len(measured) + 1} of {settings}: ε_init = {whole:.3g}, {tried.steps} Lloyd steps")
        for number in range(seeds):
            federation, found = run(OURS, tried, points, seed + number, federate)
            spent = federation.ledger.epsilon(privacy.delta) if number == 0 else spent
            if spent > privacy.epsilon:
                break
            costs.append(cost(federation, found.centers))
        if costs:
            measured.append(Measured(OURS, spent, tried.steps, float(np.mean(costs)), tuple(shares.tolist())))
    return measured


def on_front(best: Sequence[Measured]) -> dict[str, Any]:
    """What the runs on a front have in common: the mean share of each step, as T1 Tables D.2 and D.3 have it, and which
    part of them took 0, 1 and 2 Lloyd steps (Tables D.4 and D.5).
    """
    splits = np.array([one.split for one in best if one.split is not None])
    shares = dict(zip(Split.__dataclass_fields__, splits.mean(0).tolist(), strict=True))
    steps = {str(count): sum(one.steps == count for one in best) / len(best) for count in STEPS}
    return {"runs": len(best), "shares": shares, "lloyd_steps": steps}


def front(measured: Sequence[Measured], method: str) -> list[Measured]:
    """The runs of one method that no other run of it beats in both ε and cost, by rising ε."""
    best: list[Measured] = []
    for one in sorted((m for m in measured if m.method == method), key=lambda m: (m.epsilon, m.cost)):
        if not best or one.cost < best[-1].cost:
            best.append(one)
    return best


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
    if len(points.server):
        values["assumptions"] = assumptions(
            k=found.k,
            points=points.total,
            dimension=points.server.shape[1],
            epsilon=method.privacy.epsilon if method.privacy is not None else math.inf,
            radius=found.radius,
            server_points=len(points.server),
            deviation=math.sqrt(ours),
        )
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
    if len(points.server) == 0:
        raise ValueError("the baselines start from server data, of which there is none; leave them out")
    stepping = replace(method, k=k, steps=max(1, method.steps))
    for name in INITIAL:
        progress(name)
        federation, found = run(name, stepping, points, seed, federate)
        spent = _spent(federation, method)
        rows.append(
            {"method": name, "steps": stepping.steps, "cost": cost(federation, found.centers), "epsilon": spent}
        )
    progress("k-FED, without privacy")
    federation = federate(points.clients, seed=seed, block=points.block, threads=1, noise="seeded")  # it has none
    rows.append({"method": "k-FED", "steps": None, "cost": cost(federation, KFed(k).fit(federation)), "epsilon": None})
    return rows


def fronts(
    method: FedDPKMeans,
    points: Points,
    federate: Federate,
    *,
    seed: int = 0,
    baselines: bool = False,
    starts: int = 5,
    explored: int = 0,
    seeds: int = 1,
    progress: Progress = lambda _: None,
) -> Fronts:
    """Pareto fronts of cost and ε, up to the method's own ε; with ``explored``, over so many random budget splits."""
    if method.privacy is None or method.k is None:
        raise ValueError(
            "fronts are of one k, over budgets up to the method's ε: give k=10 and privacy=Privacy(epsilon=2)"
        )
    most = method.privacy.epsilon
    epsilons = sorted({e for e in EPSILONS[method.privacy.unit] if e < most} | {most})
    names = (OURS, *INITIAL) if baselines else (OURS,)
    swept = tuple(name for name in names if name != OURS or not explored)
    measured = sweep(method, points, federate, methods=swept, epsilons=epsilons, seed=seed, progress=progress)
    if explored:
        measured = [
            *explore(method, points, federate, settings=explored, seeds=seeds, seed=seed, progress=progress),
            *measured,
        ]
    levels: dict[str, float] = {}
    federation = federate(points.clients, seed=seed, block=points.block, threads=1, noise="seeded")  # there is none
    if starts:
        progress("the optimum, pooled and without privacy")
        levels["Optimal"] = cost(federation, optimal(points.clients, method.k, starts, seed))
    if baselines:
        progress("k-FED, without privacy")
        levels["k-FED"] = cost(federation, KFed(method.k).fit(federation))
    values = {
        **_about(method, points, seed),
        "optimal_cost": levels.get("Optimal"),
        "k_fed_cost": levels.get("k-FED"),
        "fronts": {name: [asdict(one) for one in front(measured, name)] for name in names},
        "runs": [asdict(one) for one in measured],
        "on_front": on_front(front(measured, OURS)) if explored else None,
    }
    title = f"{points.name}: cost against ε, {method.privacy.unit}-level, δ = {method.privacy.delta:g}"
    return Fronts(values, measured, levels, title)


def _about(method: FedDPKMeans, points: Points, seed: int) -> dict[str, Any]:
    privacy, columns = method.privacy, points.columns  # a column of text has a feature for each of its values
    return {
        "data": points.name,
        "seed": seed,
        "k": method.k,
        "clients": len(points.clients),
        "points": points.total,
        "dimension": points.clients.x.shape[1],
        "features": columns
        and [name if text is None else f"{name} ({len(text)} values)" for name, text in columns.items()],
        "server_points": len(points.server),
        "steps": method.steps,
        "center": method.center,
        "sample": method.sample,
        "secure": method.secure,
        "ground": method.ground,
        "unit": privacy and privacy.unit,
        "delta": privacy and privacy.delta,
        "budget": privacy and privacy.epsilon,
        "split": privacy and asdict(privacy.proportions),
    }


def _spent(federation: Federation, method: FedDPKMeans) -> float | None:
    """ε so far, None for infinity (which JSON does not have)."""
    spent = math.inf if method.privacy is None else federation.ledger.epsilon(method.privacy.delta)
    return spent if math.isfinite(spent) else None
