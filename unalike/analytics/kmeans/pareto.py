"""Cost against privacy: runs over budgets and Lloyd steps, and the best of them (T1 Fig. 6.1, 6.2; §6.5)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from unalike.analytics.kmeans.algorithm import FedDPKMeans
from unalike.analytics.kmeans.baselines import INITIAL
from unalike.analytics.kmeans.budget import BudgetSplit, KMeansPrivacy, mechanisms
from unalike.analytics.kmeans.points import Points
from unalike.analytics.kmeans.study import (
    OURS,
    Federate,
    KMeansRun,
    Progress,
    describe,
    measure,
    measure_without_privacy,
)
from unalike.privacy.checks import SettingError

EPSILONS = {"point": (0.1, 0.2, 0.3, 0.4, 0.65, 1.0, 2.0), "client": (0.25, 0.5, 1.0, 2.0, 4.0, 8.0)}
STEPS = (0, 1, 2)
_NEAR = 3  # clusterings from which the optimum is started as well


@dataclass(frozen=True)
class ParetoResult:
    """Runs over budgets and Lloyd steps; ``levels`` are the costs of methods without privacy."""

    method: FedDPKMeans
    points: Points
    seed: int
    methods: tuple[str, ...]
    runs: list[KMeansRun]
    levels: dict[str, float]
    explored: bool  # the splits of ε were varied

    @property
    def fronts(self) -> dict[str, list[KMeansRun]]:
        """By method, the runs that no other run of it beats."""
        return {name: front(self.runs, name) for name in self.methods}

    @property
    def compared(self) -> list[KMeansRun]:
        """The fronts, and the methods without privacy."""
        levels = [KMeansRun(name, math.inf, None, cost) for name, cost in self.levels.items()]
        return [one for best in self.fronts.values() for one in best] + levels

    @property
    def title(self) -> str:
        """A heading for a figure."""
        privacy = _privacy_of(self.method)
        return f"{self.points.name}: cost against ε, {privacy.unit}-level, δ = {privacy.delta:g}"

    def values(self) -> dict[str, Any]:
        """All of it as plain values, for JSON."""
        return {
            **describe(self.method, self.points, self.seed),
            "optimal_cost": self.levels.get("Optimal"),
            "k_fed_cost": self.levels.get("k-FED"),
            "fronts": {name: [one.values() for one in best] for name, best in self.fronts.items()},
            "runs": [one.values() for one in self.runs],
            "on_front": shares_on_front(self.fronts[OURS]) if self.explored else None,
        }


def _privacy_of(method: FedDPKMeans) -> KMeansPrivacy:
    if method.privacy is None:
        raise SettingError("budgets go up to the method's ε: give privacy=KMeansPrivacy(epsilon=2)")
    return method.privacy


def fronts(
    method: FedDPKMeans,
    points: Points,
    federate: Federate,
    *,
    seed: int = 0,
    baselines: bool = False,
    starts: int = 10,
    explored: int = 0,
    seeds: int = 1,
    progress: Progress = lambda _: None,
) -> ParetoResult:
    """Pareto fronts of cost and ε, up to the method's own ε; with ``explored``, over that many random budget splits."""
    if method.k is None:
        raise SettingError("fronts are of one k, not of one that each run chooses: give k=10")
    privacy = _privacy_of(method)
    epsilons = sorted({e for e in EPSILONS[privacy.unit] if e < privacy.epsilon} | {privacy.epsilon})
    names = (OURS, *INITIAL) if baselines else (OURS,)
    swept_names = tuple(name for name in names if name != OURS or not explored)
    measured = sweep(method, points, federate, methods=swept_names, epsilons=epsilons, seed=seed, progress=progress)
    if explored:
        how: dict[str, Any] = {"settings": explored, "seeds": seeds, "seed": seed, "progress": progress}
        measured = explore(method, points, federate, **how) + measured
    best = [one.centers for one in sorted(measured, key=lambda one: one.cost) if one.centers is not None]
    levels = measure_without_privacy(method.k, points, federate, seed, starts, baselines, best[:_NEAR], progress)
    return ParetoResult(method, points, seed, names, measured, levels, explored > 0)


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
) -> list[KMeansRun]:
    """Run every method with every ε and number of Lloyd steps. ``method`` gives the unit, δ and all else."""
    privacy, measured = _privacy_of(method), []
    for name in methods:
        for count in steps:
            # a baseline without a Lloyd step asks nothing of the clients, so all budgets are the same
            free = name != OURS and count == 0
            for epsilon in epsilons[:1] if free else epsilons:
                progress(f"{name}, {count} Lloyd steps, ε = {epsilon:g}")
                tried = replace(method, steps=count, privacy=replace(privacy, epsilon=epsilon))
                measured.append(measure(name, tried, points, seed, federate))
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
) -> list[KMeansRun]:
    """Runs of FedDP-KMeans at random ε_i and numbers of Lloyd steps, as T1's Pareto fronts are made (§6.5).

    Of each setting ε_init lies between ``least`` and four times the method's ε, evenly in logarithms, its four shares
    are anything above 2 %, and T is one of 0, 1 and 2. ε₄, of the sums and of the counts of all Lloyd steps, are each
    2 % to all of ε_init. The ledger says what it comes to; settings above the method's ε are left out. The cost is the
    mean over ``seeds``.
    """
    privacy, random = _privacy_of(method), np.random.default_rng([seed, 6003])
    measured: list[KMeansRun] = []
    while len(measured) < settings:
        whole = float(np.exp(random.uniform(math.log(least), math.log(4.0 * privacy.epsilon))))
        shares = 0.02 + 0.92 * random.dirichlet(np.ones(4))
        tried, lloyd = replace(method, steps=int(random.choice(STEPS))), random.uniform(0.02, 1.0, 2)
        drawn = tuple(float(share) for share in (*shares, *(lloyd if tried.steps else ())))
        split = BudgetSplit(*drawn)
        queries = {"histograms": tried.histograms, "steps": tried.steps}
        noise = mechanisms(replace(privacy, split=split), whole, initialize=True, **queries)
        tried, runs = replace(tried, noise=noise), []
        progress(f"setting {len(measured) + 1} of {settings}: ε_init = {whole:.3g}, {tried.steps} Lloyd steps")
        for number in range(seeds):
            runs.append(measure(OURS, tried, points, seed + number, federate))
            if runs[0].epsilon > privacy.epsilon:
                break
        else:
            mean = float(np.mean([one.cost for one in runs]))
            measured.append(replace(runs[-1], epsilon=runs[0].epsilon, cost=mean, split=drawn))
    return measured


def shares_on_front(best: Sequence[KMeansRun]) -> dict[str, Any]:
    """What the runs on a front have in common: the mean share of each step, as T1 Tables D.2 and D.3 have it, and which
    part of them took 0, 1 and 2 Lloyd steps (Tables D.4 and D.5).
    """
    names = list(BudgetSplit.__dataclass_fields__)
    splits = [dict(zip(names, one.split, strict=False)) for one in best if one.split is not None]
    names = [name for name in names if any(name in one for one in splits)]
    shares = {name: float(np.mean([one[name] for one in splits if name in one])) for name in names}
    steps = {str(count): sum(one.steps == count for one in best) / len(best) for count in STEPS}
    return {"runs": len(best), "shares": shares, "lloyd_steps": steps}


def front(measured: Sequence[KMeansRun], method: str) -> list[KMeansRun]:
    """The runs of one method that no other run of it beats in both ε and cost, by rising ε."""
    best: list[KMeansRun] = []
    for one in sorted((m for m in measured if m.method == method), key=lambda m: (m.epsilon, m.cost)):
        if not best or one.cost < best[-1].cost:
            best.append(one)
    return best
