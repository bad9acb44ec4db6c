"""Runs: train, measure, save as it goes, and go on after a crash as if nothing had happened."""

from __future__ import annotations

import contextlib
import math
import signal
import threading
import time
import types
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from unalike.core.federation import Federation, QuorumError
from unalike.core.method import Method, State, TrainsLocally
from unalike.data.population import Population
from unalike.learn.local import LocalSGD
from unalike.studio.errors import Interrupted, UserError
from unalike.studio.recipe.recipe import Recipe
from unalike.studio.runs import checkpoint, folder
from unalike.studio.runs.client_map import client_map, descriptors
from unalike.studio.runs.folder import RunFolder, disk_errors_told
from unalike.studio.runs.measure import Measured, measure, metric_of, serves_unlabeled
from unalike.studio.runs.prepare import Prepared, prepare
from unalike.studio.runs.privacy import spent
from unalike.studio.runs.progress import Quiet, Watcher
from unalike.studio.runs.result import ByGroup, Bytes, Privacy, Result


def run_recipe(
    recipe: Recipe,
    out: Path | None = None,
    *,
    label: str = "",
    spoken: str = "",
    population: Population | None = None,
    watcher: Watcher | None = None,
) -> Result:
    """Run a recipe. With ``out`` everything is saved there, and a run that was begun there goes on from its checkpoint.

    label: the run's name in tables; spoken: its name while it runs; population: its data, if loaded already.
    """
    prepared = prepare(recipe, population)
    label = label or recipe.method.rpartition(":")[2]
    if out is None:
        return _train(prepared, None, label, spoken or label, watcher or Quiet())
    with disk_errors_told(out):
        if not (out / folder.RECIPE).exists():
            folder.create(out, prepared.recipe)
        with RunFolder(out) as files:
            return _train(prepared, files, label, spoken or label, watcher or Quiet())


def _train(prepared: Prepared, files: RunFolder | None, label: str, spoken: str, watcher: Watcher) -> Result:
    """All rounds that are left of a run, and its result."""
    recipe, method, population = prepared.recipe, prepared.method, prepared.population
    federation, began, failures = prepared.federation(), time.perf_counter(), 0
    saved = None if files is None else checkpoint.load(files.path)
    if saved is not None:
        saved.restore(federation)
        began -= saved.seconds
    elif files is not None:
        folder.save_roster(files.path, federation.roster)
    if files is not None:
        failures = sum(int(record["failures"]) for record in files.keep_metrics(federation.round))
    state = method.start(federation.seed) if saved is None else saved.state
    measured: list[Measured] | None = None

    watcher.begin(spoken, recipe.rounds, federation.round, metric_of(population))
    idle = _idle(method) if recipe.rounds else "rounds = 0 (--rounds)"
    if idle:
        watcher.note(f"{spoken}: nothing is trained: {idle}")
    try:
        with _divergence_told():
            with _stop_signals(watcher) as stop:
                for number in range(federation.round + 1, recipe.rounds + 1):
                    state = method.round(state, federation.begin_round(number))

                    last = number == recipe.rounds
                    evaluated = last or number % recipe.evaluate_every == 0
                    measured = measure(method, state, federation, population) if evaluated else None
                    record = _record(federation, prepared.delta, time.perf_counter() - began, measured)
                    failures += len(federation.failures)
                    stopping = stop.is_set()
                    if files is not None:
                        files.add_metrics(record)
                        if last or stopping or number % recipe.checkpoint_every == 0:
                            files.sync_metrics()
                            checkpoint.save(files.path, state, federation, record["seconds"])
                    watcher.round(record)
                    if stopping and not last:
                        raise Interrupted(number, recipe.rounds, None if files is None else str(files.path))
            if measured is None:  # no round was left
                measured = measure(method, state, federation, population)
    finally:
        watcher.end()

    seconds = time.perf_counter() - began
    result = Result(
        method=recipe.method,
        label=label,
        data=population.name,
        partition=recipe.data.partition or population.partition,
        clients=len(population),
        unseen=len(population.unseen),
        seed=recipe.seed,
        rounds=recipe.rounds,
        seconds=round(seconds, 3),
        metric=metric_of(population),
        scored=f"the models that `personalize` gives after round {federation.round}, on each client's test rows "
        "(simulation only: no score leaves a client, and none is in ε)",
        accuracy=_by_group(measured),
        serves_unlabeled=serves_unlabeled(method),
        bytes=Bytes(up=federation.traffic.total_up, down=federation.traffic.total_down),
        privacy=Privacy(**spent(federation, prepared.delta)),
        expected=recipe.expected.model_dump(),
        failures=failures,
        folder=None if files is None else files.path,
    )
    if files is not None:
        if federation.round == 0:  # no round was asked for: the start is all there is
            files.add_metrics(_record(federation, prepared.delta, seconds, measured))
        files.sync_metrics()
        _write_outcome(files.path, prepared, state, federation, measured, result)
    return result


def _record(
    federation: Federation, delta: float, seconds: float, measured: Sequence[Measured] | None
) -> dict[str, Any]:
    """One line of the metrics; bytes and seconds are totals since the start of the run."""
    return {
        "round": federation.round,
        "seconds": round(seconds, 3),
        "loss": None,
        **{name: value if math.isfinite(value) else None for name, value in federation.metrics.items()},
        "bytes_up": federation.traffic.total_up,
        "bytes_down": federation.traffic.total_down,
        "failures": len(federation.failures),
        "epsilon": spent(federation, delta, exact=measured is not None)["epsilon"],
        **({} if measured is None else _by_group(measured).model_dump()),
    }


def _by_group(measured: Sequence[Measured]) -> ByGroup:
    return ByGroup(**{one.group: one.summary() for one in measured})


def _write_outcome(
    path: Path, prepared: Prepared, state: State, federation: Federation, measured: Sequence[Measured], result: Result
) -> None:
    """The files of a finished run; ``result.json`` comes last, because it says that the run is whole."""
    method, population = prepared.method, prepared.population
    folder.write_table(path / folder.CLIENTS, [row for one in measured for row in one.rows()])
    known = descriptors(method, state, federation, population)
    checkpoint.save(path, state, federation, result.seconds)  # with all plans that the run has used
    folder.write_json(path / folder.CLIENT_MAP, client_map(population, known))
    folder.write_json(path / folder.TRANSCRIPT, federation.transcript.rows())
    folder.write_json(path / folder.LEDGER, federation.ledger.state())
    folder.write_json(path / folder.RESULT, result.to_json())


def _idle(method: Method) -> str:
    """Why local training changes nothing; empty if it does something."""
    local = method.local if isinstance(method, TrainsLocally) else None
    if not isinstance(local, LocalSGD):
        return ""
    rates = list(local.lr.values()) if isinstance(local.lr, Mapping) else [local.lr]
    if not any(rates):
        return "local.lr = 0 (--lr)"
    if local.steps is not None:
        return "" if local.steps else "local.steps = 0 (--local-steps)"
    return "" if local.epochs else "local.epochs = 0 (--local-epochs)"


@contextlib.contextmanager
def _divergence_told() -> Iterator[None]:
    """Say what to do where clients failed because their numbers ran away."""
    try:
        yield
    except QuorumError as error:
        if not error.failures or not all("not finite" in failure.reason for failure in error.failures):
            raise
        first = error.failures[0]
        raise UserError(
            f"training diverged in round {first.round}: {len(error.failures)} clients have numbers that are not "
            f"finite; try a smaller learning rate (--lr)\nThe first: {first}"
        ) from error


@contextlib.contextmanager
def _stop_signals(watcher: Watcher) -> Iterator[threading.Event]:
    """Ctrl-C lets the round finish, because half a round cannot be saved; a second Ctrl-C does not wait."""
    stop = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield stop  # only the main thread may set handlers
        return

    def ask_to_stop(number: int, _: types.FrameType | None) -> None:
        if stop.is_set():
            raise KeyboardInterrupt
        stop.set()
        watcher.note("stopping after this round; press Ctrl-C again to stop at once")

    before = {number: signal.signal(number, ask_to_stop) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
