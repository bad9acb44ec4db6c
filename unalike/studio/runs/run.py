"""Runs: train, measure, save as it goes, and go on after a crash as if nothing had happened."""

from __future__ import annotations

import contextlib
import math
import signal
import threading
import time
import types
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from unalike.core.federation import Federation, QuorumError
from unalike.core.method import Method, State, train
from unalike.data.population import Population
from unalike.learn.local import LocalSGD
from unalike.runtime.shard.simulator import Simulator
from unalike.studio.errors import Interrupted, UserError
from unalike.studio.recipe.recipe import Recipe, read_recipe
from unalike.studio.runs import checkpoint, folder
from unalike.studio.runs.checkpoint import Checkpoint
from unalike.studio.runs.folder import RunFolder, disk_errors_told
from unalike.studio.runs.measure import GROUPS, Measurement, measure, metric_of, serves_unlabeled
from unalike.studio.runs.prepare import Prepared, prepare
from unalike.studio.runs.privacy import spent
from unalike.studio.runs.progress import Quiet, Watcher
from unalike.studio.runs.result import Result

MAP_CLIENTS = 5000  # at most so many clients are in the file for the report's map


def execute(
    recipe: Recipe,
    out: Path | None = None,
    *,
    label: str = "",
    spoken: str = "",
    population: Population | None = None,
    watcher: Watcher | None = None,
) -> Result:
    """Run a recipe; with ``out`` everything is saved there, and the run can be resumed.

    label: the run's name in tables; spoken: its name while it runs; population: its data, if loaded already.
    """
    prepared = prepare(recipe, population)
    run = _Run(prepared, label or recipe.method, spoken or label or recipe.method, watcher or Quiet())
    if out is None:
        return run.go(None, None)
    fresh = folder.create(out, prepared.recipe)
    with disk_errors_told(out), fresh:
        return run.go(fresh, None)


def resume_run(
    path: Path,
    *,
    label: str = "",
    spoken: str = "",
    population: Population | None = None,
    watcher: Watcher | None = None,
) -> Result:
    """Go on with a run from its checkpoint; a finished run only gives its result."""
    if not (path / folder.RECIPE).is_file():
        raise UserError(f"{path} is no run folder: it has no {folder.RECIPE}")
    if (path / folder.RESULT).exists():
        return Result.load(path)
    recipe = read_recipe(path / folder.RECIPE)
    saved = checkpoint.load(path)
    label = label or recipe.method.rpartition(":")[2]
    run = _Run(prepare(recipe, population), label, spoken or label, watcher or Quiet())
    with disk_errors_told(path), RunFolder(path) as files:
        run.failures = sum(
            int(record["failures"]) for record in files.keep_metrics(0 if saved is None else saved.round)
        )
        return run.go(files, saved)


@dataclass
class _Run:
    prepared: Prepared
    label: str
    spoken: str
    watcher: Watcher
    failures: int = 0
    measured: tuple[int, Measurement] | None = None  # after which round, and the scores
    _began: float = field(default_factory=time.perf_counter)

    def go(self, files: RunFolder | None, saved: Checkpoint | None) -> Result:
        recipe, method = self.prepared.recipe, self.prepared.method
        federation = self.prepared.federation(**({} if saved is None else saved.restored()))
        if saved is not None:
            self._began -= saved.seconds
            if isinstance(federation.runtime, Simulator):
                federation.runtime.use_plans(saved.plans)
        self.watcher.begin(self.spoken, recipe.rounds, federation.round, metric_of(self.prepared.population))
        idle = _idle(method) if recipe.rounds else "rounds = 0 (--rounds)"
        if idle:
            self.watcher.note(f"{self.spoken}: nothing is trained: {idle}")
        try:
            with _stop_signals(self.watcher) as stop:
                state = saved.state if saved is not None else method.start(federation.seed)

                def after_round(number: int, state: State) -> None:
                    self._after_round(number, state, federation, files, stop.is_set())

                state = train(method, federation, recipe.rounds - federation.round, state, after_round)
            return self._finish(state, federation, files)
        except QuorumError as error:
            if not error.failures or not all("not finite" in failure.reason for failure in error.failures):
                raise
            first = error.failures[0]
            raise UserError(
                f"training diverged in round {first.round}: {len(error.failures)} clients have numbers that are not "
                f"finite; try a smaller learning rate (--lr)\nThe first: {first}"
            ) from error
        finally:
            self.watcher.end()

    def seconds(self) -> float:
        return time.perf_counter() - self._began

    def _after_round(
        self, number: int, state: State, federation: Federation, files: RunFolder | None, stop: bool
    ) -> None:
        recipe = self.prepared.recipe
        self.failures += len(federation.failures)
        record = self._record(number, state, federation, number % recipe.evaluate_every == 0 or number == recipe.rounds)
        if files is not None:
            files.add_metrics(record)
            if number % recipe.checkpoint_every == 0 or number == recipe.rounds or stop:
                files.sync_metrics()
                Checkpoint.of(federation, state, self.seconds()).save(files.path)
        self.watcher.round(record)
        if stop and number < recipe.rounds:
            raise Interrupted(number, recipe.rounds, None if files is None else str(files.path))

    def _record(self, number: int, state: State, federation: Federation, evaluated: bool) -> dict[str, Any]:
        """One line of the metrics; bytes and seconds are totals since the start of the run."""
        record: dict[str, Any] = {
            "round": number,
            "seconds": round(self.seconds(), 3),
            "loss": None,
            **{name: value if math.isfinite(value) else None for name, value in federation.metrics.items()},
            "bytes_up": federation.traffic.total_up,
            "bytes_down": federation.traffic.total_down,
            "failures": len(federation.failures),
        }
        record["epsilon"] = spent(federation, self.prepared.delta, exact=evaluated)["epsilon"]
        if evaluated:
            measured = self._measure(number, state, federation)
            record |= {group: None if one is None else one.summary() for group, one in measured.items()}
        return record

    def _measure(self, number: int, state: State, federation: Federation) -> Measurement:
        if self.measured is None or self.measured[0] != number:
            self.measured = (number, measure(self.prepared.method, state, federation, self.prepared.population))
        return self.measured[1]

    def _finish(self, state: State, federation: Federation, files: RunFolder | None) -> Result:
        recipe, population = self.prepared.recipe, self.prepared.population
        measured = self._measure(federation.round, state, federation)
        result = Result(
            method=recipe.method,
            label=self.label,
            data=population.name,
            partition=recipe.data.partition or population.partition,
            clients=len(population),
            unseen=len(population.unseen),
            seed=recipe.seed,
            rounds=recipe.rounds,
            seconds=round(self.seconds(), 3),
            metric=metric_of(population),
            scored=f"the models that `personalize` gives after round {federation.round}, on each client's test rows "
            "(simulation only: no score leaves a client, and none is in ε)",
            accuracy={group: None if (one := measured[group]) is None else one.summary() for group in GROUPS},
            serves_unlabeled=serves_unlabeled(self.prepared.method),
            bytes={"up": federation.traffic.total_up, "down": federation.traffic.total_down},
            privacy=spent(federation, self.prepared.delta),
            expected=recipe.expected.model_dump(),
            failures=self.failures,
            folder=None if files is None else files.path,
        )
        if files is not None:
            if federation.round == 0:  # no round was asked for: the start is all there is
                files.add_metrics(self._record(0, state, federation, True))
            files.sync_metrics()
            Checkpoint.of(federation, state, self.seconds()).save(files.path)
            rows = [row for one in measured.values() if one is not None for row in one.rows()]
            folder.write_table(files.path / folder.CLIENTS, rows)
            known = _descriptors(self.prepared.method, state, federation, population)
            folder.write_json(files.path / folder.CLIENT_MAP, client_map(population, known))
            folder.write_json(files.path / folder.TRANSCRIPT, federation.transcript.rows())
            folder.write_json(files.path / folder.LEDGER, federation.ledger.state())
            folder.write_json(files.path / folder.RESULT, result.to_json())  # last: it says that the run is whole
        return result


def _descriptors(method: Method, state: State, federation: Federation, population: Population) -> Tensor | None:
    """Every client's descriptor, if the method computes them from data (PeFLL, ODPFL-HN); for the map alone."""
    if not hasattr(method, "introduce") or not hasattr(method, "descriptors") or federation.round == 0:
        return None
    clients = population.train
    if not (bool(clients.labeled.all()) or serves_unlabeled(method)) or len(clients) > MAP_CLIENTS:
        return None
    found: Tensor = method.descriptors(state, federation.aside(clients).everyone())
    return found if len(found) == len(clients) else None


def client_map(population: Population, descriptors: Tensor | None = None) -> dict[str, Any]:
    """What the report draws its map of clients from; of a very large population, every so many-th client."""
    step = max(1, math.ceil(len(population) / MAP_CLIENTS))
    chosen = range(0, len(population), step)
    unseen = set(population.unseen.tolist())
    counted = population.classes is not None and population.has_labels
    return {
        "names": [population.train.name(i) for i in chosen],
        "group": ["unseen" if i in unseen else "seen" for i in chosen],
        "n": population.sizes[::step].tolist(),
        "label_histogram": population.histogram()[::step].tolist() if counted else None,
        "descriptor": None if descriptors is None else descriptors[::step].tolist(),
        "class_names": None if population.class_names is None else [str(name) for name in population.class_names],
    }


def _idle(method: Method) -> str:
    """Why local training changes nothing; empty if it does something."""
    local = getattr(method, "local", None)
    if not isinstance(local, LocalSGD):
        return ""
    rates = list(local.lr.values()) if isinstance(local.lr, Mapping) else [local.lr]
    if not any(rates):
        return "local.lr = 0 (--lr)"
    if local.steps is not None:
        return "" if local.steps else "local.steps = 0 (--local-steps)"
    return "" if local.epochs else "local.epochs = 0 (--local-epochs)"


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
