"""FedDP-KMeans beside the optimum and its baselines.

from unalike.analytics.kmeans.study import FedDPKMeans, cluster, read_points
found = cluster(FedDPKMeans(k=10), read_points("gaussian-mixture"), unalike.simulate)
print(found.centers, found.cost, found.optimal_cost)
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from unalike.analytics.kmeans.algorithm import Clustering, FedDPKMeans
from unalike.analytics.kmeans.baselines import INITIAL, KFed, optimal, pooled_points, run_baseline
from unalike.analytics.kmeans.client import cost, nearest_center
from unalike.analytics.kmeans.points import Points, read_points
from unalike.analytics.reading import FILLED
from unalike.core.federation import Federation
from unalike.core.lazy import pd
from unalike.privacy.checks import SettingError
from unalike.privacy.ledger import Budget

_UNLIKE = 30  # times as large a deviation of one column as of another is told

__all__ = ["FedDPKMeans", "KMeansResult", "KMeansRun", "cluster", "read_points", "run"]

OURS = "FedDP-KMeans"
Federate = Callable[..., Federation]  # where the clients live is the caller's choice: `unalike.simulate`
Progress = Callable[[str], None]  # is called with what is computed next


@dataclass(frozen=True)
class KMeansRun:
    """One run: what it cost in privacy (the ledger's ε) and how good the clustering is (cost per point)."""

    method: str
    epsilon: float  # infinite: it is not private
    steps: int | None
    cost: float
    split: tuple[float, ...] | None = None  # shares of ε_init, where they were varied
    centers: Tensor | None = field(default=None, repr=False, compare=False)

    def values(self) -> dict[str, Any]:
        """As plain values, for JSON."""
        plain = {name: getattr(self, name) for name in ("method", "epsilon", "steps", "cost", "split")}
        return {**plain, "epsilon": finite(self.epsilon)}


@dataclass(frozen=True)
class KMeansResult:
    """One clustering, what it cost, and the costs that it is to be compared with."""

    method: FedDPKMeans
    points: Points
    seed: int
    clustering: Clustering
    cost: float  # per point
    epsilon: float  # by the ledger; infinite: it is not private
    accounting: str
    seconds: float
    cpu_seconds: float  # what it would take on a machine that does nothing else
    bytes_up: int
    bytes_down: int
    transcript: list[dict[str, Any]]
    optimal_cost: float | None = None
    baselines: tuple[KMeansRun, ...] = ()

    @property
    def centers(self) -> Tensor:
        return self.clustering.centers

    def table(self) -> pd.DataFrame:
        """A row for each cluster: its noisy size, its centre in the data's units by column, and for a private centre
        the deviation that noise alone gives each coordinate."""
        found, names, scale = self.clustering, self.points.names, self.points.clients.scale
        table = pd.DataFrame(self.points.in_units(self.centers).tolist(), columns=names)
        if found.sizes is not None:
            table.insert(0, "size", found.sizes.tolist())
        if found.errors is not None and self.method.privacy is not None:
            errors = found.errors[:, None] / (torch.ones(len(names)) if scale is None else scale)
            table[[f"noise_{name}" for name in names]] = errors.tolist()
        table.insert(0, "cluster", range(found.k))
        return table

    @property
    def notes(self) -> list[str]:
        """Warnings about columns of unlike scale, and about centres outside the public range of their column."""
        found, centers, server = [], self.points.in_units(self.centers), self.points.server
        if self.points.clients.scale is None and len(server) > 1 and self.points.columns is not None:
            spread = [(one, name) for one, name in zip(server.std(0).tolist(), self.points.names, strict=True) if one]
            (least, small), (most, large) = min(spread, default=(1, "")), max(spread, default=(1, ""))
            if most > _UNLIKE * least:
                found.append(
                    f"{large} varies {most / least:,.0f} times as much as {small}, so clusters hardly depend on the "
                    "latter; say standardize, if they should"
                )
        for name, (low, high) in self.points.ranges.items():
            for k, value in enumerate(centers[:, self.points.names.index(name)].tolist()):
                if not low <= value <= high:
                    where = f"its range, {low:g} to {high:g}"
                    found.append(f"the centre of cluster {k} has {name} = {value:.4g}, which lies outside {where}")
        return found

    def assignments(self) -> pd.DataFrame:
        """A row for each point: its client, its number at the client (from 0) and its cluster, as clients know it."""
        clients = self.points.clients
        rows, owner = clients.pool_rows()
        points = pooled_points(clients)
        number = torch.arange(len(rows)) - (torch.cumsum(clients.size, 0) - clients.size)[owner]
        middle = self.centers.mean(0)
        names = [clients.name(i) for i in range(len(clients))]
        columns = {"client": [names[i] for i in owner.tolist()], "row": number.tolist()}
        return pd.DataFrame({**columns, "cluster": nearest_center(points - middle, self.centers - middle).tolist()})

    @property
    def gap(self) -> float | None:
        """By what share the cost is above the optimum's."""
        if self.optimal_cost is None:
            return None
        return self.cost / self.optimal_cost - 1 if self.optimal_cost > 0 else 0.0

    @property
    def compared(self) -> list[KMeansRun]:
        """This clustering, the optimum and the baselines, as far as they were run."""
        ours = KMeansRun(OURS, self.epsilon, self.method.steps, self.cost)
        optimum = [] if self.optimal_cost is None else [KMeansRun("Optimal", math.inf, None, self.optimal_cost)]
        return [ours, *optimum, *self.baselines]

    @property
    def title(self) -> str:
        """A heading for a figure."""
        epsilon = "∞" if math.isinf(self.epsilon) else f"{self.epsilon:.4g}"
        return f"{self.points.name}: k = {self.clustering.k}, ε = {epsilon}"

    @property
    def assumptions(self) -> dict[str, Any] | None:
        """Whether the conditions of the analysis hold; None without server data."""
        points, privacy = self.points, self.method.privacy
        if len(points.server) == 0:
            return None
        return check_assumptions(
            k=self.clustering.k,
            points=points.total,
            dimension=points.server.shape[1],
            epsilon=math.inf if privacy is None else privacy.epsilon,
            radius=self.clustering.radius,
            server_points=len(points.server),
            deviation=math.sqrt(self.cost),
        )

    def values(self) -> dict[str, Any]:
        """All of it as plain values, for JSON."""
        found = self.clustering
        values: dict[str, Any] = {
            **describe(self.method, self.points, self.seed),
            "k": found.k,
            "sizes": None if found.sizes is None else found.sizes.tolist(),
            "centers": self.points.in_units(self.centers).tolist(),
            "columns": self.points.names,
            "notes": self.notes,
            "radius": round(found.radius, 4),
            "server_points_used": found.server_points,
            "cost": None if math.isnan(self.cost) else self.cost,
            "optimal_cost": self.optimal_cost,
            "gap": self.gap,
            "epsilon": finite(self.epsilon),
            "accounting": self.accounting,
            "seconds": round(self.seconds, 3),
            "cpu_seconds": round(self.cpu_seconds, 3),
            "bytes": {"up": self.bytes_up, "down": self.bytes_down},
            "transcript": self.transcript,
        }
        if found.curve:
            values["elbow"] = list(found.curve)
        if self.assumptions is not None:
            values["assumptions"] = self.assumptions
        if self.baselines:
            values["baselines"] = [one.values() for one in self.baselines]
        return values


def run(name: str, method: FedDPKMeans, points: Points, seed: int, federate: Federate) -> tuple[Federation, Clustering]:
    """One method by name on a federation of its own, whose budget stops it should it ask for more than was planned."""
    privacy = method.privacy if method.noise is None else None
    if method.privacy is not None and method.privacy.unit == "point" and points.fill == "client":
        raise SettingError(FILLED)
    budget = None if privacy is None else Budget(privacy.epsilon, privacy.delta)
    federation = federate(points.clients, seed=seed, block=points.block, threads=1, budget=budget)
    if name == OURS:
        return federation, method.fit(federation, points.server if len(points.server) else None)
    return federation, run_baseline(name, method, federation, points.server)


def measure(name: str, method: FedDPKMeans, points: Points, seed: int, federate: Federate) -> KMeansRun:
    """The same with its ε and cost."""
    federation, found = run(name, method, points, seed, federate)
    reached = cost(federation, found.centers)
    return KMeansRun(name, _spent(federation, method), method.steps, reached, centers=found.centers)


def cluster(
    method: FedDPKMeans,
    points: Points,
    federate: Federate,
    *,
    seed: int = 0,
    starts: int = 10,
    baselines: bool = False,
    progress: Progress = lambda _: None,
) -> KMeansResult:
    """Cluster the points. ``starts``: of the non-private optimum; 0 leaves it out. ``baselines``: run them, too."""
    import sklearn.cluster  # noqa: F401  # it takes a second, which is not the clustering's

    if baselines and len(points.server) == 0:
        raise SettingError("the baselines start from server data, of which there is none; leave them out")

    progress(OURS)
    begin, begin_cpu = time.perf_counter(), time.process_time()
    federation, found = run(OURS, method, points, seed, federate)
    seconds, cpu_seconds = time.perf_counter() - begin, time.process_time() - begin_cpu
    result = KMeansResult(
        method=method,
        points=points,
        seed=seed,
        clustering=found,
        cost=cost(federation, found.centers),
        epsilon=_spent(federation, method),
        accounting=federation.ledger.method,
        seconds=seconds,
        cpu_seconds=cpu_seconds,
        bytes_up=federation.traffic.total_up,
        bytes_down=federation.traffic.total_down,
        transcript=federation.transcript.rows(),
    )
    near = [found.centers]
    levels = measure_without_privacy(found.k, points, federate, seed, starts, baselines, near, progress)
    runs = []
    if baselines:
        stepping = replace(method, k=found.k, steps=max(1, method.steps))  # with no step none would ask the clients
        for name in INITIAL:
            progress(name)
            runs.append(measure(name, stepping, points, seed, federate))
        runs.append(KMeansRun("k-FED", math.inf, None, levels["k-FED"]))
    return replace(result, optimal_cost=levels.get("Optimal"), baselines=tuple(runs))


def measure_without_privacy(
    k: int,
    points: Points,
    federate: Federate,
    seed: int,
    starts: int,
    k_fed: bool,
    near: Sequence[Tensor],
    progress: Progress,
) -> dict[str, float]:
    """Costs of methods without privacy: the optimum, from ``starts`` and from ``near``, unless 0; and ``k_fed``."""
    levels: dict[str, float] = {}
    if not starts and not k_fed:
        return levels
    federation = federate(points.clients, seed=seed, block=points.block, threads=1, noise="seeded")  # there is none
    if starts:
        progress("the optimum, pooled and without privacy")
        levels["Optimal"] = cost(federation, optimal(points.clients, k, starts, seed, near))
    if k_fed:
        progress("k-FED, without privacy")
        levels["k-FED"] = cost(federation, KFed(k).fit(federation))
    return levels


def describe(method: FedDPKMeans, points: Points, seed: int) -> dict[str, Any]:
    """The settings of a run and the size of its data, as plain values."""
    privacy, columns = method.privacy, points.columns  # a column of text has a feature for each of its values
    features = columns and [name if text is None else f"{name} ({len(text)} values)" for name, text in columns.items()]
    sizes = {"clients": len(points.clients), "points": points.total, "dimension": points.clients.x.shape[1]}
    settings = ("k", "steps", "center", "sample", "secure", "ground", "margin")
    return {
        **{"data": points.name, "seed": seed, **sizes, "features": features, "server_points": len(points.server)},
        **{name: getattr(method, name) for name in settings},
        "unit": privacy and privacy.unit,
        "delta": privacy and privacy.delta,
        "budget": privacy and privacy.epsilon,
        "split": privacy and privacy.proportions.given,
    }


def _spent(federation: Federation, method: FedDPKMeans) -> float:
    """ε so far."""
    return math.inf if method.privacy is None else federation.ledger.epsilon(method.privacy.delta)


def finite(epsilon: float) -> float | None:
    """ε for JSON, which has no infinity."""
    return epsilon if math.isfinite(epsilon) else None


def check_assumptions(
    *, k: int, points: int, dimension: int, epsilon: float, radius: float, server_points: int, deviation: float
) -> dict[str, Any]:
    """The conditions of T1 §6.4, as checked in D.7.2: (1) Δ ≤ k·log²(m)·√d·σ_max/(ε·w_min), and (2) |Q| ≤
    ε·m·k·log(m)·σ_max²/Δ², with the constants taken as 1.

    ``points`` is m, ``deviation`` σ_max. Where the clusters are not known, D.7.2 takes the root of the k-means cost per
    point for σ_max, which is an upper bound, and 1 for w_min. Without noise ε is infinite: the first bound is then 0
    and says nothing, as no noise has to be outweighed.
    """
    log, noisy = math.log(points), math.isfinite(epsilon)
    most_radius = k * log**2 * math.sqrt(dimension) * deviation / epsilon
    most_points = epsilon * points * k * log * deviation**2 / radius**2
    return {
        "radius": radius,
        "most_radius": most_radius if noisy else None,
        "server_points": server_points,
        "most_server_points": most_points if noisy else None,
        "hold": not noisy or (radius <= most_radius and server_points <= most_points),
    }


def describe_assumptions(found: dict[str, Any]) -> list[str]:
    """The same in words; nothing where there is no noise."""
    if found["most_radius"] is None:
        return []
    signs = ["≤" if found[name] <= found[f"most_{name}"] else "above" for name in ("radius", "server_points")]
    return [
        f"assumptions of the analysis {'hold' if found['hold'] else 'do not hold'} (constants taken as 1; measured in "
        f"simulation): radius {found['radius']:.3g} {signs[0]} {found['most_radius']:.3g}, server points "
        f"{found['server_points']} {signs[1]} {found['most_server_points']:.3g}"
    ]
