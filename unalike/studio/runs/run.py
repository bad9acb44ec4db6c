"""Plans and their runs: train, measure, save as it goes, and go on after a crash as if nothing had happened.

A plan is one run, several seeds, or several methods over the same clients.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import signal
import threading
import time
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, Protocol, runtime_checkable

from unalike.core.federation import Federation, QuorumError
from unalike.core.method import Method, State, TrainsLocally, TreatsApart, next_state, started
from unalike.data.population import Population
from unalike.data.source import Source
from unalike.learn.local import LocalSGD
from unalike.studio.cluster.session import Session
from unalike.studio.errors import Interrupted, UserError
from unalike.studio.recipe.recipe import Data, Plan, Recipe, checked, read_recipe
from unalike.studio.report.page import write_report
from unalike.studio.runs import checkpoint, fingerprint, folder
from unalike.studio.runs.folder import RunFolder, disk_errors_told, read_json, write_json
from unalike.studio.runs.gap import Gap
from unalike.studio.runs.map_data import descriptors, map_data
from unalike.studio.runs.measure import Measured, measure, metric_of, serves_unlabeled
from unalike.studio.runs.prepare import FROM_PYTHON, Given, Prepared, left_out, load_data, prepare
from unalike.studio.runs.privacy import noise_of, spent, spent_by_each
from unalike.studio.runs.progress import Watcher, describe_workers
from unalike.studio.runs.result import ByGroup, Bytes, Privacy, Result, Worker, as_text, table
from unalike.studio.runs.treated import treated

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
    """The data of each run; runs over the same data that follow one another share it.

    Where clients are on the workers of a cluster, these have the data, and are the same for all runs of a command.
    """

    def __init__(self, given: Given | None, session: Session | None = None) -> None:
        self._given = given  # from Python
        self._last: tuple[tuple[Data, int | None], Population] | None = None
        self._session, self._own = session, session is None  # one that was given is not closed
        self._key: bytes | None = None  # of the workers' fingerprints: one for all new runs of a command

    def __enter__(self) -> _Populations:
        return self

    def __exit__(self, *_: object) -> None:
        if self._session is not None and self._own:
            self._session.close()

    def session(self, recipe: Recipe) -> Session | None:
        """The workers, if the recipe wants some."""
        if recipe.runtime.name == "ray" and self._session is None:
            self._session = Session(recipe.runtime)
        return self._session if recipe.runtime.name == "ray" else None

    def of(self, recipe: Recipe, path: Path | None = None) -> Population:
        session = self.session(recipe)
        if session is not None:
            if self._given is not None:
                recipe = recipe.model_copy(update={"data": _named(self._given, recipe)})
            begun = path is not None and (path / folder.CHECKPOINT).exists()
            self._key = fingerprint.key_of(path) if begun or self._key is None else self._key
            return session.load(recipe, self._key)
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
    if out is not None:
        with disk_errors_told(out):
            folder.check_free(out)
    with _Populations(data) as populations:
        return _carried_out(plan, out, populations, watcher)


def _carried_out(plan: Plan, out: Path | None, populations: _Populations, watcher: Watcher | None) -> Comparison:
    planned = plan.with_seeds()
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


def resume_any(
    path: Path, *, data: Given | None = None, watcher: Watcher | None = None, address: str | None = None
) -> Comparison:
    """Go on with a run or a comparison that was stopped, from its folder; one that has ended is only read.

    address: of the cluster on whose workers it goes on, where that is another than before.
    """
    if not path.is_dir():
        raise UserError(f"there is no run folder {path}")
    if not (path / folder.COMPARISON).exists():
        folder.check_run(path)
        recipe = read_recipe(path / folder.RECIPE)
        title, seeds, runs = "", 1, [(folder.label_of(path) or recipe.method.rpartition(":")[2], recipe, path)]
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
    if address is not None:
        runs = [(label, _at(recipe, address), own) for label, recipe, own in runs]
    with _Populations(data) as populations:
        return _run_all(title, runs, seeds, path, populations, watcher, address)


def _at(recipe: Recipe, address: str) -> Recipe:
    """The recipe of a run on a cluster that is elsewhere now."""
    if recipe.runtime.name != "ray":
        raise UserError(f"--address {address}: this run is not one on a cluster's workers; leave it out")
    return recipe.model_copy(update={"runtime": recipe.runtime.model_copy(update={"address": address})})


def _run_all(
    title: str,
    runs: Sequence[tuple[str, Recipe, Path | None]],
    seeds: int,
    out: Path | None,
    populations: _Populations,
    watcher: Watcher | None,
    address: str | None = None,
) -> Comparison:
    """Every run: those that have ended are read, those that were begun go on, the others start. Then their report."""
    results, stop, spoken = [], _Stop(), ""
    missing = None  # the population whose missing clients and rows were told
    for label, recipe, path in runs:
        if stop.by is not None:  # in the last round of the run before
            raise Interrupted(f"all of {spoken}", out, stop.by)
        if path is not None and (path / folder.RESULT).exists():
            results.append(Result.load(path))
            continue
        if path is not None and (path / folder.RECIPE).exists():
            folder.check_format(path)
            recipe = read_recipe(path / folder.RECIPE)  # with the defaults that it was begun with
            recipe = recipe if address is None else _at(recipe, address)
        spoken = label if seeds == 1 else f"{label}, seed {recipe.seed}"
        told = _Told(label, spoken, watcher or Watcher(), out, stop)
        population = populations.of(recipe, path)
        if (absent := left_out(population)) and population is not missing:
            told.watcher.note(f"note: {population.name}: {absent}")
            missing = population
        session = populations.session(recipe)
        results.append(run_recipe(recipe, path, population=population, told=told, session=session))
    if out is not None:
        with disk_errors_told(out):
            paths = [path for _, _, path in runs if path is not None]
            write_report(paths, folder.report_of(out, paths))
    return Comparison(title, [results[begin : begin + seeds] for begin in range(0, len(results), seeds)], out)


def _folder_names(plan: Plan) -> list[str]:
    """A folder's name for each run; runs whose labels differ in signs only are numbered."""
    names: list[str] = []
    for label, recipe in plan.with_seeds():
        name = folder.plain_name(label) + (f"-seed{recipe.seed}" if plan.seeds > 1 else "")
        numbered = (name if number == 1 else f"{name}-{number}" for number in itertools.count(1))
        names.append(next(one for one in numbered if one not in names))
    return names


@dataclass
class _Stop:
    """Whether a run was asked to stop, and by which signal."""

    by: int | None = None


class _Told(NamedTuple):
    """What a run says, to whom, and who may stop it."""

    label: str  # in tables
    spoken: str  # while it runs
    watcher: Watcher
    folder: Path | None  # to resume: of the whole comparison, where the run is part of one
    stop: _Stop


def run_recipe(
    recipe: Recipe,
    out: Path | None = None,
    *,
    population: Population | None = None,
    told: _Told | None = None,
    session: Session | None = None,
) -> Result:
    """Run a recipe. With ``out`` everything is saved there, and a run that was begun there goes on from its checkpoint.

    population: its data, if loaded already; session: the workers that have loaded it.
    """
    if population is None:
        with _Populations(None, session) as populations:
            found = populations.of(recipe, out)
            return run_recipe(recipe, out, population=found, told=told, session=populations.session(recipe))
    if told is None:
        told = _told(recipe, out, Watcher())
    if out is not None and (out / folder.CHECKPOINT).exists():
        fingerprint.check(out, population)
    prepared = prepare(recipe, population)
    if out is None:
        return _train(prepared, None, told, session)
    with disk_errors_told(told.folder or out):
        new = not (out / folder.RECIPE).exists()
        if new:
            folder.create(out, prepared.recipe, told.label)
        with RunFolder(out, new, private=recipe.privacy.promises) as files:
            return _train(prepared, files, told, session)


def _told(recipe: Recipe, out: Path | None, watcher: Watcher) -> _Told:
    label = recipe.method.rpartition(":")[2]
    return _Told(label, label, watcher, out, _Stop())


def run_with(recipe: Recipe, out: Path | None, watcher: Watcher, session: Session | None = None) -> Result:
    """``run_recipe`` for one who watches, on workers that are there already (None: as the recipe says)."""
    return run_recipe(recipe, out, told=_told(recipe, out, watcher), session=session)


def _train(prepared: Prepared, files: RunFolder | None, told: _Told, session: Session | None = None) -> Result:
    """All rounds that are left of a run, and its result."""
    recipe, method, population = prepared.recipe, prepared.method, prepared.population
    watcher, spoken, clock, failures = told.watcher, told.spoken, _Clock(), 0
    saved = None if files is None else checkpoint.load(files.path)
    charged: dict[str, Any] = {}
    if files is not None and noise_of(recipe) == "system":  # what is asked before there is a checkpoint counts, too
        charged = {"journal": checkpoint.journal(files.path), **checkpoint.recalled(files.path)}
    if files is None or saved is None:
        federation = prepared.federation(session, None if files is None else files.path, **charged)
        state = started(method, federation.seed)
    else:
        federation = prepared.federation(session, files.path, schema=folder.load_roster(files.path).schema)
        saved.restore(federation)
        for name, value in charged.items():
            setattr(federation, name, value)
        state = saved.state
        clock = _Clock(saved.seconds, saved.measuring)
    if files is not None:
        failures = sum(int(record["failures"]) for record in files.keep_metrics(federation.round))
        if saved is None:  # the checkpoint comes last: where there is one, nobody is asked for scaling again
            fingerprint.save(files.path, population)
            folder.save_roster(files.path, federation.roster)
            checkpoint.save(files.path, state, federation)
    measured: list[Measured] | None = None
    gap = Gap(method, federation)
    on_workers = federation.runtime if isinstance(federation.runtime, HasWorkers) else None
    if on_workers is not None:
        on_workers.waiting = partial(_tell_workers, watcher, on_workers)
    runaway: int | None = None  # the first round of a loss that nobody can want
    begun: float | None = None  # the first loss of squares, which may begin above any bound

    watcher.begin(spoken, recipe.rounds, federation.round, metric_of(population))
    idle = _idle(method) if recipe.rounds else "rounds = 0 (--rounds)"
    if idle:
        watcher.note(f"{spoken}: nothing is trained: {idle}")
    try:
        with _divergence_told(gap):
            with _stop_signals(watcher, told.stop):
                for number in range(federation.round + 1, recipe.rounds + 1):
                    state = next_state(method, state, federation.begin_round(number))

                    last = number == recipe.rounds
                    found: dict[str, Any] = {}
                    if last or number % recipe.evaluate_every == 0:
                        with clock.measuring():
                            measured = measure(method, state, federation, population, newcomers=last)
                            found = {**_finite(gap.measured(state)), **_by_group(measured).model_dump()}
                    record = _record(federation, prepared.delta, clock, exact=bool(found))
                    failures += len(federation.failures)
                    stopping = told.stop.by is not None
                    if files is not None:
                        files.add_metrics(record, found)
                        if last or stopping or number % recipe.checkpoint_every == 0:
                            files.sync_metrics()
                            checkpoint.save(files.path, state, federation, **clock.read())
                    if on_workers is not None:
                        _tell_workers(watcher, on_workers)
                    watcher.round({**record, **found})
                    if begun is None and federation.roster.schema.target == "number":
                        begun = record["loss"]
                    if runaway is None and (record["loss"] or 0) > max(RUNAWAY, begun or 0):
                        runaway = number
                        watcher.note(
                            f"{spoken}: the loss is {record['loss']:.3g} in round {number}: training runs away; try a "
                            "smaller learning rate (--lr)"
                        )
                    if stopping and not last:
                        of = f" of {spoken}" if files is not None and told.folder != files.path else ""
                        raise Interrupted(f"round {number} of {recipe.rounds}{of}", told.folder, told.stop.by)
            if measured is None:  # no round was left
                with clock.measuring():
                    measured = measure(method, state, federation, population)
    finally:
        watcher.end()

    result = Result(
        method=recipe.method,
        label=told.label,
        data=population.name,
        partition=recipe.data.partition or population.partition,
        clients=len(population),
        unseen=len(population.unseen),
        seed=recipe.seed,
        rounds=recipe.rounds,
        **clock.read(),
        metric=metric_of(population),
        scored=f"the models that `personalize` gives after round {federation.round}, on each client's test rows "
        "(simulation only: no score leaves a client, and none is in ε)",
        accuracy=_by_group(measured),
        scores=folder.ACCURACY if recipe.privacy.promises else None,
        serves_unlabeled=serves_unlabeled(method),
        bytes=Bytes(up=federation.traffic.total_up, down=federation.traffic.total_down),
        privacy=Privacy(**spent(federation, prepared.delta), clients=spent_by_each(federation)),
        expected=recipe.expected.model_dump(),
        failures=failures,
        workers=[] if on_workers is None else [Worker(**one) for one in on_workers.report()],
        folder=None if files is None else files.path,
    )
    if files is not None:
        if federation.round == 0:  # no round was asked for: the start is all there is
            files.add_metrics(_record(federation, prepared.delta, clock, exact=True), _by_group(measured).model_dump())
        files.sync_metrics()
        _write_outcome(files.path, prepared, state, federation, measured, result)
    return result


@runtime_checkable
class HasWorkers(Protocol):
    """A runtime that can tell how each of its workers is doing."""

    waiting: Callable[[list[int], float], None]

    def report(self) -> list[dict[str, Any]]: ...


def _tell_workers(watcher: Watcher, runtime: HasWorkers, late: Sequence[int] = (), seconds: float = 0.0) -> None:
    watcher.workers(describe_workers(runtime.report(), late, seconds))


class _Clock:
    """How long a run has trained, and how long its models were measured besides; it goes on after a resume."""

    def __init__(self, seconds: float = 0.0, measuring: float = 0.0) -> None:
        self._began, self._measuring = time.perf_counter() - seconds - measuring, measuring

    @contextlib.contextmanager
    def measuring(self) -> Iterator[None]:
        begin = time.perf_counter()
        yield
        self._measuring += time.perf_counter() - begin

    def read(self) -> dict[str, float]:
        trained = time.perf_counter() - self._began - self._measuring
        return {"seconds": round(trained, 3), "measuring": round(self._measuring, 3)}


def _record(federation: Federation, delta: float, clock: _Clock, exact: bool) -> dict[str, Any]:
    """What a server knows after a round; bytes and seconds are totals since the start of the run."""
    return {
        "round": federation.round,
        **clock.read(),
        "loss": None,
        **_finite(federation.metrics),
        "bytes_up": federation.traffic.total_up,
        "bytes_down": federation.traffic.total_down,
        "failures": len(federation.failures),
        **_so_far(federation, delta, exact),
    }


def _finite(metrics: Mapping[str, float]) -> dict[str, float | None]:
    return {name: value if math.isfinite(value) else None for name, value in metrics.items()}


def _so_far(federation: Federation, delta: float, exact: bool) -> dict[str, Any]:
    found = spent(federation, delta, exact)
    return {"private": found["private"], "epsilon": found["epsilon"], "noise": found.get("noise")}


def _by_group(measured: Sequence[Measured]) -> ByGroup:
    return ByGroup(**{one.group: one.summary() for one in measured})


def _write_outcome(
    path: Path, prepared: Prepared, state: State, federation: Federation, measured: Sequence[Measured], result: Result
) -> None:
    """The files of a finished run; ``result.json`` comes last, because it says that the run is whole."""
    method, population = prepared.method, prepared.population
    (path / folder.SIMULATION).mkdir(exist_ok=True)
    folder.write_table(path / folder.SCORES, [row for one in measured for row in one.rows()])
    known = descriptors(method, state, federation, population)
    checkpoint.save(path, state, federation, result.seconds, result.measuring)  # with all plans that the run has used
    folder.write_json(path / folder.CLIENT_MAP, map_data(population, known))
    if isinstance(method, TreatsApart):
        folder.write_json(path / folder.TREATED, treated(method, state, federation.roster).model_dump())
    folder.write_json(path / folder.TRANSCRIPT, federation.transcript.rows())
    folder.write_json(path / folder.LEDGER, federation.ledger.state())
    result.save(path)
    (path / folder.JOURNAL).unlink(missing_ok=True)


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
def _divergence_told(gap: Gap) -> Iterator[None]:
    """Say what to do where clients failed because their numbers ran away."""
    try:
        yield
    except QuorumError as error:
        if not error.failures or not all("not finite" in failure.reason for failure in error.failures):
            raise
        first = error.failures[0]
        raise UserError(
            f"training diverged in round {first.round}: {len(error.failures)} clients have numbers that are not "
            f"finite; {gap.why_diverged() or 'try a smaller learning rate (--lr)'}\nThe first: {first}"
        ) from error


@contextlib.contextmanager
def _stop_signals(watcher: Watcher, stop: _Stop) -> Iterator[None]:
    """Ctrl-C and SIGTERM let the round finish, because half a round cannot be saved; a second one does not wait."""
    if threading.current_thread() is not threading.main_thread():
        yield  # only the main thread may set handlers
        return

    def ask_to_stop(number: int, _: types.FrameType | None) -> None:
        if stop.by is not None:
            raise KeyboardInterrupt
        stop.by = number
        again = "press Ctrl-C again" if number == signal.SIGINT else "send SIGTERM again"
        watcher.note(f"stopping after this round; {again} to stop at once")

    before = {number: signal.signal(number, ask_to_stop) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
