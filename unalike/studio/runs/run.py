"""Plans and their runs: train, measure, save as it goes, and go on after a crash as if nothing had happened.

A plan is one run, several seeds, or several methods over the same clients.
"""

from __future__ import annotations

import contextlib
import json
import math
import signal
import threading
import time
import types
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from unalike.core.federation import Federation, QuorumError
from unalike.core.method import Method, State, TrainsLocally
from unalike.data.population import Population
from unalike.data.source import Source
from unalike.learn.local import LocalSGD
from unalike.studio.errors import Interrupted, UserError
from unalike.studio.recipe.recipe import Data, Plan, Recipe, checked, read_recipe
from unalike.studio.report.page import write_report
from unalike.studio.runs import checkpoint, fingerprint, folder
from unalike.studio.runs.client_map import client_map, descriptors
from unalike.studio.runs.folder import RunFolder, disk_errors_told, read_json, write_json
from unalike.studio.runs.measure import Measured, measure, metric_of, serves_unlabeled
from unalike.studio.runs.prepare import FROM_PYTHON, Given, Prepared, load_data, prepare
from unalike.studio.runs.privacy import spent
from unalike.studio.runs.progress import Quiet, Watcher
from unalike.studio.runs.result import ByGroup, Bytes, Privacy, Result, as_text, table

RUNAWAY = 1e4  # a training loss above it is told: cross-entropy of a sane model is below 100


@dataclass(frozen=True)
class Comparison:
    """Results side by side: one group for each method (or label), one result for each seed in it."""

    title: str
    groups: list[list[Result]]
    folder: Path | None = None

    def __str__(self) -> str:
        return as_text(table(self.groups, self.title))

    def __getitem__(self, label: str) -> Result:
        """The (first seed's) result of a method."""
        for group in self.groups:
            if group[0].label == label:
                return group[0]
        raise KeyError(f"no run is called {label!r}; there are: {', '.join(group[0].label for group in self.groups)}")

    @property
    def results(self) -> list[Result]:
        return [result for group in self.groups for result in group]


class _Populations:
    """The data of each run; runs over the same data that follow one another share it."""

    def __init__(self, given: Given | None) -> None:
        self._given = given  # from Python
        self._last: tuple[tuple[Data, int | None], Population] | None = None

    def of(self, recipe: Recipe) -> Population:
        key = (recipe.data, recipe.seed if recipe.data.seed is None else recipe.data.seed)
        if self._last is None or self._last[0] != key:
            self._last = None  # the old data goes before the new one comes
            self._last = (key, load_data(recipe, self._given))
        return self._last[1]


def carry_out(plan: Plan, out: Path | None, *, data: Given | None = None, watcher: Watcher | None = None) -> Comparison:
    """Run all of a plan. A single run has ``out`` to itself; several have a folder each inside it.

    data: what was handed over from Python in place of the data that the plan names.
    """
    if data is not None:
        named = [(label, recipe.model_copy(update={"data": _named(data, recipe)})) for label, recipe in plan.runs]
        plan = plan.model_copy(update={"runs": named})
    populations, planned = _Populations(data), plan.with_seeds()
    if out is not None:
        with disk_errors_told(out):
            folder.check_free(out)
    if len(planned) == 1:
        return _run_all(plan.title, [(*planned[0], out)], 1, out, populations, watcher)
    for _, recipe in plan.runs:  # a mistake in the last run is told before the first one starts
        prepare(recipe, populations.of(recipe))
    names = _folder_names(plan)
    if out is not None:
        with disk_errors_told(out):
            folder.create(out)
            written = [
                {"label": label, "folder": name, "recipe": json.loads(recipe.model_dump_json(exclude_none=True))}
                for (label, recipe), name in zip(planned, names, strict=True)
            ]
            write_json(out / folder.COMPARISON, {"title": plan.title, "seeds": plan.seeds, "runs": written})
    runs = [(*one, None if out is None else out / name) for one, name in zip(planned, names, strict=True)]
    return _run_all(plan.title, runs, plan.seeds, out, populations, watcher)


def _named(data: Given, recipe: Recipe) -> Data:
    """What a recipe says about data from Python: all that decides how it is dealt out, if it is not dealt out yet."""
    if isinstance(data, Population):
        return Data(name=FROM_PYTHON + data.name)
    return recipe.data.model_copy(update={"name": FROM_PYTHON + (data.name if isinstance(data, Source) else "table")})


def resume_any(path: Path, *, data: Given | None = None, watcher: Watcher | None = None) -> Comparison:
    """Go on with a run or a comparison that was stopped, from its folder; one that has ended is only read."""
    if not path.is_dir():
        raise UserError(f"there is no run folder {path}")
    if not (path / folder.COMPARISON).exists():
        folder.check_run(path)
        recipe = read_recipe(path / folder.RECIPE)
        title, seeds, runs = "", 1, [(recipe.method.rpartition(":")[2], recipe, path)]
    else:
        folders = folder.compared_runs(path)
        planned = read_json(path / folder.COMPARISON)
        try:
            title, seeds = str(planned["title"]), int(planned["seeds"])
            recipes = [checked(one["recipe"], str(path)) for one in planned["runs"]]
            labels = [str(one["label"]) for one in planned["runs"]]
        except (KeyError, TypeError, ValueError) as error:
            raise UserError(f"{path / folder.COMPARISON} is damaged: {type(error).__name__}: {error}") from error
        runs = list(zip(labels, recipes, folders, strict=True))
    return _run_all(title, runs, seeds, path, _Populations(data), watcher)


def _run_all(
    title: str,
    runs: Sequence[tuple[str, Recipe, Path | None]],
    seeds: int,
    out: Path | None,
    populations: _Populations,
    watcher: Watcher | None,
) -> Comparison:
    """Every run: those that have ended are read, those that were begun go on, the others start. Then their report."""
    results = []
    for label, recipe, path in runs:
        if path is not None and (path / folder.RESULT).exists():
            results.append(Result.load(path))
            continue
        if path is not None and (path / folder.RECIPE).exists():
            folder.check_format(path)
            recipe = read_recipe(path / folder.RECIPE)  # with the defaults that it was begun with
        spoken = label if seeds == 1 else f"{label}, seed {recipe.seed}"
        population = populations.of(recipe)
        results.append(run_recipe(recipe, path, label=label, spoken=spoken, population=population, watcher=watcher))
    if out is not None:
        with disk_errors_told(out):
            write_report([path for _, _, path in runs if path is not None], out / folder.REPORT)
    return Comparison(title, [results[begin : begin + seeds] for begin in range(0, len(results), seeds)], out)


def _folder_names(plan: Plan) -> list[str]:
    several = plan.seeds > 1
    names = []
    for label, recipe in plan.with_seeds():
        name = "".join(letter if letter.isalnum() or letter in "-_." else "-" for letter in label)
        names.append(f"{name}-seed{recipe.seed}" if several else name)
    if len(set(names)) < len(names):
        raise UserError(f"two runs would share a folder ({', '.join(sorted(names))}); give them clearer labels")
    return names


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
    if population is None:
        population = load_data(recipe)
    if out is not None and (out / folder.CHECKPOINT).exists():
        fingerprint.check(out, population)
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
    began, failures = time.perf_counter(), 0
    saved = None if files is None else checkpoint.load(files.path)
    if files is None or saved is None:
        federation = prepared.federation()
        state = method.start(federation.seed)
    else:
        federation = prepared.federation(schema=folder.load_roster(files.path).schema)
        saved.restore(federation)
        state = saved.state
        began -= saved.seconds
    if files is not None:
        failures = sum(int(record["failures"]) for record in files.keep_metrics(federation.round))
        if saved is None:
            _write_beginning(files.path, population, state, federation)
    measured: list[Measured] | None = None
    runaway: int | None = None  # the first round of a loss that nobody can want

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
                    if runaway is None and (record["loss"] or 0) > RUNAWAY:
                        runaway = number
                        watcher.note(
                            f"{spoken}: the loss is {record['loss']:.3g} in round {number}: training runs away; try a "
                            "smaller learning rate (--lr)"
                        )
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


def _write_beginning(path: Path, population: Population, state: State, federation: Federation) -> None:
    """What a run begins with. The checkpoint comes last: where there is one, nobody is asked for scaling again."""
    fingerprint.save(path, population)
    folder.save_roster(path, federation.roster)
    checkpoint.save(path, state, federation, seconds=0.0)


def _write_outcome(
    path: Path, prepared: Prepared, state: State, federation: Federation, measured: Sequence[Measured], result: Result
) -> None:
    """The files of a finished run; ``result.json`` comes last, because it says that the run is whole."""
    method, population = prepared.method, prepared.population
    (path / folder.SIMULATION).mkdir(exist_ok=True)
    folder.write_table(path / folder.SCORES, [row for one in measured for row in one.rows()])
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
