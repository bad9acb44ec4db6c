"""Cost against privacy: FedDP-KMeans and its baselines over budgets and Lloyd steps (T1 Fig. 6.1, 6.2)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from unalike.analytics.kmeans.algorithm import Clustering, FedDPKMeans, cost
from unalike.analytics.kmeans.baselines import INITIAL, run_baseline
from unalike.analytics.kmeans.points import Points
from unalike.core.federation import Federation
from unalike.privacy.ledger import Budget

OURS = "FedDP-KMeans"
Federate = Callable[..., Federation]  # where the clients live is the caller's choice: `unalike.simulate`
EPSILONS = {"point": (0.1, 0.2, 0.3, 0.4, 0.65, 1.0, 2.0), "client": (0.25, 0.5, 1.0, 2.0, 4.0, 8.0)}
STEPS = (0, 1, 2)


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
