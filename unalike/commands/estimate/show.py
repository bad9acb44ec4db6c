"""What the commands of ``unalike estimate`` share: running, measuring, sweeping, printing."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import typer
from rich.progress import Progress
from rich.table import Table

from unalike import simulate
from unalike.analytics.estimation.means import BernoulliRates
from unalike.analytics.estimation.plot import Curve, result_page, sweep_page
from unalike.analytics.estimation.problem import (
    Problem,
    Score,
    block_of,
    flip_noise,
    folds,
    score_by_label,
    score_means,
    write_estimates,
)
from unalike.analytics.estimation.shared import Estimates, gain
from unalike.commands.options import printed, progress_console
from unalike.core.federation import Federation
from unalike.studio.errors import UserError
from unalike.studio.runs.folder import disk_errors_told, write_whole

EPSILONS = (0.25, 0.5, 1.0, 2.0, 4.0, 8.0)
BITS = (1, 2, 3, 4, 6, 8)
REPEATS = 3  # noise draws for a point of a curve
FIRST = 5  # clients whose estimates are printed


class Estimator(Protocol):
    """Gaussian means and Bernoulli rates: one message, one answer."""

    def estimate(self, federation: Federation) -> Estimates: ...


class Maker(Protocol):
    """Makes an estimator whose messages travel in so many bits, or with so much noise."""

    def __call__(self, bits: int | None = None, epsilon: float | None = None) -> Estimator: ...


@contextmanager
def told() -> Iterator[None]:
    """What is wrong with data or settings is said in a sentence."""
    try:
        yield
    except ValueError as error:
        raise UserError(str(error)) from error


def check_free(*files: Path | None) -> None:
    """Nothing is overwritten."""
    for file in files:
        if file is not None and file.exists():
            raise UserError(f"{file} exists already, and nothing is overwritten: choose another file")


@contextmanager
def progress(total: int, silent: bool, what: str = "rounds") -> Iterator[Callable[[int], None]]:
    """A bar on stderr."""
    with Progress(console=progress_console(), transient=True, disable=silent) as bar:
        work = bar.add_task(what, total=total)
        yield lambda _: bar.advance(work)


def run(
    problem: Problem, estimate: Callable[[Federation], Estimates], seed: int
) -> tuple[Estimates, Federation, float]:
    """Estimates, the federation that made them, and the seconds it took."""
    federation = simulate(problem.clients, seed=seed, block=block_of(problem.clients), threads=1)
    begin = time.perf_counter()
    found = estimate(federation)
    return found, federation, time.perf_counter() - begin


def summary(
    kind: str,
    data: str,
    problem: Problem,
    found: Estimates,
    federation: Federation,
    score: Score | None,
    seconds: float,
    seed: int,
    delta: float,
) -> dict[str, Any]:
    """The result as plain values."""
    errors = (
        {"personal": None, "local": None}
        if score is None
        else {
            "personal": score(found.estimate, found.positions),
            "local": score(found.local, found.positions),
        }
    )
    gains = None if score is None else gain(errors["personal"] or 0.0, errors["local"] or 0.0)
    epsilon = federation.ledger.epsilon(delta)
    return {
        "kind": kind,
        "data": data,
        "clients": len(problem.clients),
        "dim": found.estimate.shape[1],
        "seed": seed,
        "measure": problem.measure,
        "mse": errors,
        "gain": {"over_local": gains},
        "prior": dict(found.prior),
        "privacy": None if math.isinf(epsilon) else {"epsilon": epsilon, "delta": delta, "unit": "client"},
        "bytes": {"up": federation.traffic.total_up, "down": federation.traffic.total_down},
        "seconds": round(seconds, 3),
        "notes": [*problem.notes, *found.notes],
    }


def write_sweep(
    file: Path,
    title: str,
    made: Maker,
    problem: Problem,
    score: Score | None,
    seed: int,
    silent: bool,
    delta: str,
    closed_form: Callable[[Estimates], float] | None = None,
) -> None:
    """The page of MSE against ε₀ and bits: every point the mean over a few draws of the noise."""
    if score is None:
        raise UserError("a curve needs something to measure by: data with known truth, or --test 0.2 to hold rows out")
    curves = {"epsilon": Curve(), "bits": Curve()}
    plan: list[tuple[str, float]] = [("epsilon", e) for e in EPSILONS] + [("bits", b) for b in BITS]
    with progress(len(plan), silent, "sweep") as advance:
        bare, _, _ = run(problem, made().estimate, seed)
        for number, (name, value) in enumerate(plan):
            estimator = made(epsilon=value) if name == "epsilon" else made(bits=int(value))
            errors = []
            for repeat in range(REPEATS):
                found, _, _ = run(problem, estimator.estimate, seed + 1000 * repeat)
                errors.append(score(found.estimate, found.positions))
            curves[name].at.append(value)
            curves[name].error.append(float(np.mean(errors)))
            if closed_form is not None:
                curves[name].theory.append(closed_form(found))
            advance(number)
    local, best = score(bare.local, bare.positions), score(bare.estimate, bare.positions)
    _save(file, sweep_page(title, curves["epsilon"], curves["bits"], local, best, delta))
    if not silent:
        printed().print(f"figures: {file}", markup=False, soft_wrap=True)


def cross_validated(
    data: str, problem: Problem, estimator: BernoulliRates, seed: int, in_order: bool
) -> dict[str, Any]:
    """Errors and gain of every fold, and their mean and deviation.

    A sample that was left out differs from its own p by p(1 − p) on average, whatever the estimate. ``of_rate`` is the
    gain without that part: the gain in the error of p itself. Where samples have numbers as labels (a vote share beside
    the winner), ``against_label`` is the gain in the error against the left-out sample's label.
    """
    rows = []
    noise: float | None = None
    labels = problem.clients.y is not None and problem.clients.y.is_floating_point()
    for part in folds(problem.clients, None if in_order else seed):
        noise = flip_noise(problem.clients) if noise is None else noise
        found, _, _ = run(part, estimator.estimate, seed)
        score = score_means(part)
        assert score is not None
        personal, local = score(found.estimate, found.positions), score(found.local, found.positions)
        row = {"personal": personal, "local": local, "gain": gain(personal, local)}
        if local > noise and not in_order:  # a single year has a noise of its own
            row["gain_of_rate"] = gain(personal - noise, local - noise)
        if labels:
            error = score_by_label(part)
            row["gain_against_label"] = gain(
                error(found.estimate, found.positions), error(found.local, found.positions)
            )
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


def finish(
    result: dict[str, Any],
    problem: Problem,
    found: Estimates,
    out: Path | None,
    as_json: bool,
    plot: Path | None = None,
    measuring: str = "--test 0.2 holds some out",
) -> None:
    """Write what was asked for, and print the result. ``measuring``: how it could be measured if it was not."""
    if out is not None:
        with disk_errors_told(out.parent):
            write_estimates(out, problem.clients, found)
    if plot is not None:
        truth = None if problem.truth is None else problem.truth[found.positions]
        errors = {name: error for name, error in result["mse"].items() if error is not None}
        name = "Distance within clusters" if result["kind"] == "mixture" else "Log-likelihood per client"
        if result["kind"] == "mixture" and found.trace and found.trace[-1] < 0:
            name = "Log-likelihood per client"
        title = f"{result['data']}: {result['kind']}"
        _save(plot, result_page(title, errors, found.estimate, found.local, truth, found.trace, name))
    if as_json:
        typer.echo(json.dumps(result))
        return
    console = printed()
    dim = "1 coordinate" if result["dim"] == 1 else f"{result['dim']} coordinates"
    lines = [f"{result['data']}: {result['clients']:,} clients, {dim}, {result['seconds']:.2f} s"]
    if result["mse"]["personal"] is None:
        lines.append(f"no truth is known and no rows were held out, so nothing was measured ({measuring})")
    for name, error in result["mse"].items():
        if error is not None:
            lines.append(f"  {name:9} {error:.6g}   ({result['measure']})")
    for name, value in result["gain"].items():
        if value is not None:
            lines.append(f"gain {name.replace('_', ' ')}: {100 * value:.1f} %")
    for name in ("closed_form_mse", "expected_mse"):
        if name in result:
            lines.append(f"{name.replace('_', ' ')}: {result[name]:.6g}")
    privacy = result["privacy"]
    if privacy is None:
        lines.append("not private: the server saw messages as they are or rounded")
    elif privacy["epsilon"] == 0:
        lines.append("nothing left the clients: the prior is known")
    else:
        lines.append(f"ε = {privacy['epsilon']:.4g} at δ = {privacy['delta']:.3g} for each client, by its own noise")
    lines.append(f"prior: {', '.join(f'{name} = {_short(value)}' for name, value in result['prior'].items())}")
    for line in [*lines, *(f"note: {note}" for note in result["notes"])]:
        console.print(line, markup=False, soft_wrap=True)
    console.print(_first_estimates(problem, found))
    if out is None:
        console.print("--out FILE.csv writes the estimates of all clients, all coordinates", style="dim")
    for what, file in (("estimates", out), ("figures", plot)):
        if file is not None:
            console.print(f"{what}: {file}", markup=False, soft_wrap=True)


def _first_estimates(problem: Problem, found: Estimates) -> Table:
    """What a few clients found alone, and their estimates."""
    dim = found.estimate.shape[1]
    title = "the first clients" if dim == 1 else f"the first clients, coordinate 0 of {dim}"
    table = Table("client", "samples", "local", "estimate", title=title, title_justify="left")
    for row, position in enumerate(found.positions[:FIRST].tolist()):
        local, personal = float(found.local[row, 0]), float(found.estimate[row, 0])
        samples = str(int(problem.clients.size[position]))
        table.add_row(problem.clients.name(position), samples, f"{local:.4g}", f"{personal:.4g}")
    return table


def _short(value: Any) -> str:
    """A number of the prior; of a long list its first ones."""
    if isinstance(value, list | tuple):
        inner = ", ".join(map(_short, value[:4]))
        return f"[{inner}, ... {len(value)} in all]" if len(value) > 4 else f"[{inner}]"
    return "infinite" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value)


def print_folds(result: dict[str, Any]) -> None:
    """One line for each sample left out, then the mean."""
    console = printed()
    for number, row in enumerate(result["folds"], start=1):
        share = "-" if row["gain"] is None else f"{100 * row['gain']:.1f} %"
        console.print(f"sample {number} left out: personal {row['personal']:.5f}, local {row['local']:.5f}, {share}")
    measures = {
        "over_local": "gain over local",
        "of_rate": "gain in the error of the rate itself",
        "against_label": "gain in the error against the left-out sample's label",
    }
    for name, what in measures.items():
        if result["gain"][name] is not None:
            mean, std = (100 * result["gain"][name][key] for key in ("mean", "std"))
            console.print(f"{what}: {mean:.1f} ± {std:.1f} %")


def _save(file: Path, page: str) -> None:
    with disk_errors_told(file.parent):
        write_whole(file, page.encode())
