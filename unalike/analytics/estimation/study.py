"""Estimate for every client and measure it: one result, curves over ε₀ and bits, and cross-validation.

from unalike.analytics.estimation.study import GaussianMeans, estimate, read_samples
found = estimate(GaussianMeans(), read_samples("gaussian-means"), unalike.simulate)
print(found.estimates.prior, found.estimates.estimate, found.errors)
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from unalike.analytics.estimation.means import BernoulliRates, GaussianMeans
from unalike.analytics.estimation.regression import OneForAll
from unalike.analytics.estimation.samples import (
    Samples,
    block_of,
    check_rows,
    flip_noise,
    folds,
    measure_error,
    range_notes,
    read_samples,
)
from unalike.analytics.estimation.shared import AfterRound, Estimates, EstimationError, Estimator, gain, ignore_round
from unalike.core.federation import Federation
from unalike.core.lazy import pd

__all__ = ["BernoulliRates", "EstimationResult", "GaussianMeans", "cross_validate", "estimate", "read_samples", "sweep"]

Federate = Callable[..., Federation]  # where the clients live is the caller's choice: `unalike.simulate`
EPSILONS = (0.25, 0.5, 1.0, 2.0, 4.0, 8.0)
BITS = (1, 2, 3, 4, 6, 8)
SWEPT = len(EPSILONS) + len(BITS)
REPEATS = 3  # noise draws for a point of a curve


@dataclass(frozen=True)
class EstimationResult:
    """The clients' estimates, what they cost, and how good they are."""

    kind: str
    samples: Samples
    estimates: Estimates
    seed: int
    epsilon: float  # by the ledger; infinite: not private
    delta: float
    bytes_up: int
    bytes_down: int
    seconds: float
    errors: Mapping[str, float]  # "personal", "local" and, of regressions, "fedavg"; empty: nothing to measure by
    theory: Mapping[str, float]  # errors that a theorem states for the prior that was used

    @property
    def gains(self) -> dict[str, float | None]:
        """By what share the personal error is below each of the others."""
        return {
            f"over_{name}": gain(self.errors["personal"], error)
            for name, error in self.errors.items()
            if name != "personal"
        }

    def table(self) -> pd.DataFrame:
        """A row for each client: samples, then coordinate by coordinate what it found alone, its estimate, the
        estimate's standard error and its interval of 95 %."""
        found, clients = self.estimates, self.samples.clients
        low, high = found.interval()
        every = {"local": found.local, "estimate": found.estimate, "standard_error": found.deviation}
        names = self.samples.columns or [str(k) for k in range(found.estimate.shape[1])]
        parts: dict[str, Any] = {"client": [clients.name(int(i)) for i in found.positions]}
        parts["samples"] = clients.size[found.positions]
        for what, values in (every | {"low": low, "high": high}).items():
            for name, column in zip(names, values.T, strict=True):
                parts[what if len(names) == 1 else f"{what}_{name}"] = column
        return pd.DataFrame(parts)

    def values(self) -> dict[str, Any]:
        """All of it as plain values, for JSON."""
        found, samples = self.estimates, self.samples
        private = {"epsilon": self.epsilon, "delta": self.delta, "unit": "client"}
        return {
            "kind": self.kind,
            "data": samples.name,
            "clients": len(samples.clients),
            "dim": found.estimate.shape[1],
            "columns": samples.columns,
            "target": samples.target,
            "seed": self.seed,
            "measure": samples.measure(self.kind),
            "mse": {"personal": None, "local": None, **self.errors},
            "gain": {"over_local": None, **self.gains},
            "prior": dict(found.prior),
            "privacy": None if math.isinf(self.epsilon) else private,
            "bytes": {"up": self.bytes_up, "down": self.bytes_down},
            "seconds": round(self.seconds, 3),
            "notes": [*samples.notes, *found.notes],
            **self.theory,
        }


def estimate(
    estimator: Estimator,
    samples: Samples,
    federate: Federate,
    *,
    seed: int = 0,
    delta: float | None = None,
    one_for_all: OneForAll | None = None,
    after_round: AfterRound = ignore_round,
) -> EstimationResult:
    """Estimate on a federation of these clients and measure the errors.

    ``delta``, at which ε is stated, is n^-1.1 for n clients unless given. ``one_for_all``: one model for all clients,
    which regressions are compared with (FedAvg where it converges, unless given).
    """
    federation = _federate(samples, federate, seed)
    begin = time.perf_counter()
    found = estimator.estimate(federation, after_round)
    seconds = time.perf_counter() - begin
    delta = len(samples.clients) ** -1.1 if delta is None else delta
    epsilon = federation.ledger.epsilon(delta)
    if estimator.loss == "mean":
        found = replace(found, notes=[*found.notes, *range_notes(samples, found, private=math.isfinite(epsilon))])
    errors = _errors(samples, estimator.loss, federation, found)
    if errors and estimator.kind in ("linear", "logistic"):
        with federation.aside() as aside:
            model = (one_for_all or OneForAll(estimator.kind)).fit(aside)  # type: ignore[arg-type]  # a family
        error = measure_error(samples, estimator.loss, federation, model.expand_as(found.estimate), found.positions)
        errors |= {} if error is None else {"fedavg": error}
    return EstimationResult(
        kind=estimator.kind,
        samples=samples,
        estimates=found,
        seed=seed,
        epsilon=epsilon,
        delta=delta,
        bytes_up=federation.traffic.total_up,
        bytes_down=federation.traffic.total_down,
        seconds=seconds,
        errors=errors,
        theory=estimator.theory(federation, found),
    )


def _federate(samples: Samples, federate: Federate, seed: int) -> Federation:
    """The clients' federation; rows that are here are checked first (elsewhere they have been)."""
    if len(samples.clients.x):
        check_rows(samples.clients)
    return federate(samples.parts, seed=seed, block=block_of(samples.clients), threads=1)


def _errors(samples: Samples, loss: str, federation: Federation, found: Estimates) -> dict[str, float]:
    """Of the personal estimates, and of what clients find alone; nothing where there is nothing to measure by."""
    both = {"personal": found.estimate, "local": found.local}
    errors = {name: measure_error(samples, loss, federation, one, found.positions) for name, one in both.items()}
    return {name: error for name, error in errors.items() if error is not None}


@dataclass
class Curve:
    """Errors at growing ε₀ or bits; ``theory`` is empty if no theorem states them."""

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
    estimator: GaussianMeans | BernoulliRates,
    samples: Samples,
    seed: int,
    federate: Federate,
    progress: Callable[[int], None] = lambda _: None,
) -> Sweep:
    """MSE against ε₀ and bits (``SWEPT`` points): every point is the mean over a few draws of the noise."""
    if samples.measure() == "none":
        raise EstimationError(
            "a curve needs something to measure by: data with known truth, or test=0.2 to hold rows out"
        )
    by_epsilon, by_bits = Curve(), Curve()
    points = [(by_epsilon, one, estimator.with_messages(epsilon=one)) for one in EPSILONS]
    points += [(by_bits, one, estimator.with_messages(bits=one)) for one in BITS]
    bare = estimate(estimator.with_messages(), samples, federate, seed=seed)
    for number, (curve, value, one) in enumerate(points):
        done = [estimate(one, samples, federate, seed=seed + 1000 * repeat) for repeat in range(REPEATS)]
        curve.at.append(value)
        curve.error.append(float(np.mean([each.errors["personal"] for each in done])))
        curve.theory += [done[-1].theory[name] for name in ("closed_form_mse",) if name in done[-1].theory]
        progress(number)
    return Sweep(by_epsilon, by_bits, bare.errors["local"], bare.errors["personal"])


def cross_validate(
    samples: Samples, estimator: BernoulliRates, seed: int, in_order: bool, federate: Federate
) -> dict[str, Any]:
    """Errors and gain of every fold, and their mean and deviation.

    A sample that was left out differs from its own p by p(1 − p) on average, whatever the estimate. ``of_rate`` is the
    gain without that part: the gain in the error of p itself. Where samples have numbers as labels (a vote share beside
    the winner), ``against_label`` is the gain in the error against the left-out sample's label.
    """
    check_rows(samples.clients, "flips")
    parts = folds(samples.clients, None if in_order else seed)
    noise, rows = flip_noise(samples.clients), []
    labels = samples.clients.y is not None and samples.clients.y.is_floating_point()
    for part in parts:
        federation = _federate(part, federate, seed)
        found = estimator.estimate(federation)
        personal, local = _errors(part, "mean", federation, found).values()
        row = {"personal": personal, "local": local, "gain": gain(personal, local)}
        if local > noise and not in_order:  # a single year has a noise of its own
            row["gain_of_rate"] = gain(personal - noise, local - noise)
        if labels:
            row["gain_against_label"] = gain(*_errors(part, "label", federation, found).values())
        rows.append(row)
    return {
        "kind": "bernoulli",
        "data": samples.name,
        "clients": len(samples.clients),
        "measure": "squared error of the sample left out",
        "noise": noise,
        "folds": rows,
        "gain": {
            "over_local": _mean_std(rows, "gain"),
            "of_rate": _mean_std(rows, "gain_of_rate"),
            "against_label": _mean_std(rows, "gain_against_label"),
        },
        "notes": samples.notes,
    }


def _mean_std(rows: list[dict[str, Any]], name: str) -> dict[str, float] | None:
    values = [row[name] for row in rows if row.get(name) is not None]
    return {"mean": float(np.mean(values)), "std": float(np.std(values))} if values else None
