"""Run an estimator on a problem and measure it: the result as plain values, over ε₀ and bits, and cross-validated."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from unalike.analytics.estimation.means import BernoulliRates, gaussian_mse
from unalike.analytics.estimation.posterior import Family
from unalike.analytics.estimation.problem import (
    Problem,
    Score,
    block_of,
    check_finite,
    check_flips,
    flip_noise,
    folds,
    score_means,
    score_models,
)
from unalike.analytics.estimation.regression import OneForAll, expected_mse
from unalike.analytics.estimation.shared import Estimates, EstimationError, Estimator, gain
from unalike.core.federation import Federation

Federate = Callable[..., Federation]  # where the clients live is the caller's choice: `unalike.simulate`
EPSILONS = (0.25, 0.5, 1.0, 2.0, 4.0, 8.0)
BITS = (1, 2, 3, 4, 6, 8)
SWEPT = len(EPSILONS) + len(BITS)
REPEATS = 3  # noise draws for a point of a curve
Maker = Callable[..., Estimator]  # (bits=None, epsilon=None): its messages travel in bits, or with noise


@dataclass(frozen=True)
class Done:
    """Estimates, the federation that made them, and the seconds it took."""

    found: Estimates
    federation: Federation
    seconds: float


def run(problem: Problem, estimate: Callable[[Federation], Estimates], seed: int, federate: Federate) -> Done:
    """Estimate on a federation of the problem's clients, whose rows are checked first (elsewhere they have been)."""
    if len(problem.clients.x):
        check_finite(problem.clients)
    federation = federate(problem.parts, seed=seed, block=block_of(problem.clients), threads=1)
    begin = time.perf_counter()
    found = estimate(federation)
    return Done(found, federation, time.perf_counter() - begin)


def summary(
    kind: str, data: str, problem: Problem, done: Done, score: Score | None, seed: int, delta: float
) -> dict[str, Any]:
    """The result as plain values."""
    found, federation = done.found, done.federation
    personal, local = (None, None) if score is None else _errors(score, found)
    epsilon = federation.ledger.epsilon(delta)
    return {
        "kind": kind,
        "data": data,
        "clients": len(problem.clients),
        "dim": found.estimate.shape[1],
        "seed": seed,
        "measure": problem.measure,
        "mse": {"personal": personal, "local": local},
        "gain": {"over_local": None if personal is None or local is None else gain(personal, local)},
        "prior": dict(found.prior),
        "privacy": None if math.isinf(epsilon) else {"epsilon": epsilon, "delta": delta, "unit": "client"},
        "bytes": {"up": federation.traffic.total_up, "down": federation.traffic.total_down},
        "seconds": round(done.seconds, 3),
        "notes": [*problem.notes, *found.notes],
    }


def _errors(score: Score, found: Estimates) -> tuple[float, float]:
    """Of the personal estimates, and of what clients find alone."""
    return score(found.estimate, found.positions), score(found.local, found.positions)


def closed_form_mse(problem: Problem, found: Estimates) -> float:
    """What theory says of Gaussian means with the prior that was used, for clients of the average size."""
    size = problem.clients.size.double().mean().item()
    deviations = (found.prior[name] for name in ("sigma_theta", "sigma_x", "sigma_q"))
    return gaussian_mse(found.estimate.shape[1], size, len(problem.clients), *deviations)


def regression_summary(
    family: Family,
    data: str,
    problem: Problem,
    done: Done,
    seed: int,
    delta: float,
    fedavg: tuple[int | None, float],
    known_prior: bool,
) -> dict[str, Any]:
    """``summary``, and beside it one model for all by FedAvg with these rounds (None: until it converges) and rate.

    Where the prior is known, also the error that is expected by Theorem 6.
    """
    score = score_models(problem, family, done.federation)
    result = summary(family, data, problem, done, score, seed, delta)
    if problem.truth is None and family == "logistic" and score is not None:
        result["measure"] = "log loss of held-out samples"
    if score is not None:
        with done.federation.aside() as aside:
            model = OneForAll(family, *fedavg).fit(aside)
        error = score(model.expand_as(done.found.estimate), done.found.positions)
        result["mse"]["fedavg"] = error
        result["gain"]["over_fedavg"] = gain(result["mse"]["personal"], error)
    if known_prior:
        result["expected_mse"] = expected_mse(done.federation)
    return result


def _scored(problem: Problem, done: Done) -> tuple[float, float]:
    """Errors of estimated means, of a problem that can be measured."""
    score = score_means(problem, done.federation)
    assert score is not None
    return _errors(score, done.found)


@dataclass
class Curve:
    """Errors at growing ε₀ or bits; ``theory`` is empty if no theorem says them."""

    at: list[float] = field(default_factory=list)
    error: list[float] = field(default_factory=list)
    theory: list[float] = field(default_factory=list)


@dataclass(frozen=True)
class Sweep:
    """Errors over ε₀ and over bits, between those of clients alone and of messages as they are."""

    by_epsilon: Curve
    by_bits: Curve
    local: float
    bare: float


def sweep(
    made: Maker,
    problem: Problem,
    seed: int,
    federate: Federate,
    closed_form: Callable[[Problem, Estimates], float] | None = None,
    progress: Callable[[int], None] = lambda _: None,
) -> Sweep:
    """MSE against ε₀ and bits (``SWEPT`` points): every point the mean over a few draws of the noise."""
    if problem.measure == "none":
        raise EstimationError(
            "a curve needs something to measure by: data with known truth, or --test 0.2 to hold rows out"
        )
    by_epsilon, by_bits = Curve(), Curve()
    points: list[tuple[Curve, float, Estimator]] = [(by_epsilon, e, made(epsilon=e)) for e in EPSILONS]
    points += [(by_bits, b, made(bits=b)) for b in BITS]
    bare = run(problem, made().estimate, seed, federate)
    for number, (curve, value, estimator) in enumerate(points):
        errors = []
        for repeat in range(REPEATS):
            done = run(problem, estimator.estimate, seed + 1000 * repeat, federate)
            errors.append(_scored(problem, done)[0])
        curve.at.append(value)
        curve.error.append(float(np.mean(errors)))
        if closed_form is not None:
            curve.theory.append(closed_form(problem, done.found))
        progress(number)
    personal, local = _scored(problem, bare)
    return Sweep(by_epsilon, by_bits, local, personal)


def cross_validated(
    data: str, problem: Problem, estimator: BernoulliRates, seed: int, in_order: bool, federate: Federate
) -> dict[str, Any]:
    """Errors and gain of every fold, and their mean and deviation.

    A sample that was left out differs from its own p by p(1 − p) on average, whatever the estimate. ``of_rate`` is the
    gain without that part: the gain in the error of p itself. Where samples have numbers as labels (a vote share beside
    the winner), ``against_label`` is the gain in the error against the left-out sample's label.
    """
    check_flips(problem.clients)
    rows = []
    noise: float | None = None
    labels = problem.clients.y is not None and problem.clients.y.is_floating_point()
    for part in folds(problem.clients, None if in_order else seed):
        noise = flip_noise(problem.clients) if noise is None else noise
        found = run(part, estimator.estimate, seed, federate).found
        score = score_means(part)
        assert score is not None
        personal, local = _errors(score, found)
        row = {"personal": personal, "local": local, "gain": gain(personal, local)}
        if local > noise and not in_order:  # a single year has a noise of its own
            row["gain_of_rate"] = gain(personal - noise, local - noise)
        if labels:
            by_label = score_models(part, "label")
            assert by_label is not None
            row["gain_against_label"] = gain(*_errors(by_label, found))
        rows.append(row)
    return {
        "kind": "bernoulli",
        "data": data,
        "clients": len(problem.clients),
        "measure": "squared error of the sample left out",
        "noise": noise,
        "folds": rows,
        "gain": {
            "over_local": _mean_std(rows, "gain"),
            "of_rate": _mean_std(rows, "gain_of_rate"),
            "against_label": _mean_std(rows, "gain_against_label"),
        },
        "notes": problem.notes,
    }


def _mean_std(rows: list[dict[str, Any]], name: str) -> dict[str, float] | None:
    values = [row[name] for row in rows if row.get(name) is not None]
    return {"mean": float(np.mean(values)), "std": float(np.std(values))} if values else None
