"""Plans and their runs: one run, several seeds, or several methods over the same clients.

What happens in one run is in ``training.py``. A run that was stopped goes on as if it had never been.
"""

from __future__ import annotations

import html
import itertools
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from unalike.data.population import Population
from unalike.runs import fingerprint, folder
from unalike.runs.errors import FLAG, Diverged, Interrupted, Note, UserError, explain_disk_errors
from unalike.runs.folder import read_json, write_json
from unalike.runs.load import Given, describe_data, load_data, name_given_data
from unalike.runs.measure import metric_of
from unalike.runs.prepare import Workers, prepare
from unalike.runs.recipe.recipe import Data, Plan, Recipe, Runtime, check_code, read_run_recipe, to_recipe
from unalike.runs.result import Result, as_text, table
from unalike.runs.training import Context, Stop, train
from unalike.runs.watcher import Watcher


@dataclass(frozen=True)
class Comparison:
    """Results side by side: one group for each method (or label), one result for each seed in it."""

    title: str
    groups: list[list[Any]]  # of ``Result``, or what a caller made of them
    folder: Path | None = None

    def __str__(self) -> str:
        return as_text(table(self.groups, self.title))

    __repr__ = __str__

    def _repr_html_(self) -> str:
        return f"<pre>{html.escape(str(self))}</pre>"

    def __getitem__(self, label: str) -> Any:
        """The (first seed's) result of a method."""
        for group in self.groups:
            if group[0].label == label:
                return group[0]
        raise KeyError(f"no run is called {label!r}; there are: {', '.join(group[0].label for group in self.groups)}")

    @property
    def results(self) -> list[Any]:
        return [result for group in self.groups for result in group]


StartWorkers = Callable[[Runtime], Workers]


class Loader:
    """Loads the data of each run; runs over the same data that follow one another share it.

    Where clients are on workers, these load the data. They are started when the first recipe asks for them.
    """

    def __init__(
        self, given: Given | None = None, workers: Workers | None = None, start: StartWorkers | None = None
    ) -> None:
        self._given, self._workers, self._start = given, workers, start
        self._started = False  # here, so that they are closed here
        self._last: tuple[tuple[Data, int | None], Population] | None = None
        self._key: bytes | None = None  # of the workers' fingerprints: one for all new runs of a command

    def __enter__(self) -> Loader:
        return self

    def __exit__(self, *_: object) -> None:
        if self._workers is not None and self._started:
            self._workers.close()

    def workers(self, recipe: Recipe) -> Workers | None:
        """The workers, if the recipe asks for some."""
        if recipe.runtime.name == "simulate":
            return None
        if self._workers is None:
            if self._start is None:
                raise UserError(
                    f"runtime.name = {recipe.runtime.name!r}: this call runs in one process; use unalike.run"
                )
            self._workers, self._started = self._start(recipe.runtime), True
        return self._workers

    def load(self, recipe: Recipe, path: Path | None = None) -> Population:
        """The population of a recipe whose run is, or is going to be, in this folder."""
        workers = self.workers(recipe)
        if workers is not None:
            if self._given is not None:
                recipe = name_given_data(recipe, self._given)
            resumed = path is not None and (path / folder.CHECKPOINT).exists()
            self._key = (
                fingerprint.key_of(path)
                if resumed or self._key is None or recipe.runtime.name == "network"
                else self._key
            )
            return workers.load(recipe, self._key)
        key = (recipe.data, recipe.seed if recipe.data.seed is None else recipe.data.seed)
        if self._last is None or self._last[0] != key:
            self._last = None  # the old data goes before the new one comes
            self._last = (key, load_data(recipe, self._given))
        return self._last[1]


class _Run(NamedTuple):
    label: str
    recipe: Recipe
    folder: Path | None


def run_plan(
    plan: Plan,
    out: Path | None,
    *,
    data: Given | None = None,
    watcher: Watcher | None = None,
    start_workers: StartWorkers | None = None,
    keep: bool = False,
) -> Comparison:
    """Run all of a plan. A single run has ``out`` to itself; several have a folder each inside it.

    data: what was handed over from Python in place of the data that the plan names. start_workers: starts the workers
    of a cluster, for recipes that ask for some. keep: results without a folder keep their models and data in memory.
    """
    if data is not None:
        plan = plan.model_copy(update={"runs": [(label, name_given_data(one, data)) for label, one in plan.runs]})
    if out is not None:
        with explain_disk_errors(out):
            folder.check_free(out)
    planned = plan.with_seeds()
    with Loader(data, start=start_workers) as loader:
        if len(planned) == 1:
            return _run_all(plan.title, [_Run(*planned[0], out)], 1, out, loader, watcher, keep=keep)
        for _, recipe in plan.runs:  # a mistake in the last run is found before the first one starts
            prepare(recipe, loader.load(recipe))
        names = _folder_names(plan)
        if out is not None:
            with explain_disk_errors(out):
                _create_comparison(out, plan, names)
        paths = [None if out is None else out / name for name in names]
        runs = [_Run(label, recipe, path) for (label, recipe), path in zip(planned, paths, strict=True)]
        return _run_all(plan.title, runs, plan.seeds, out, loader, watcher, keep=keep)


def run_recipe(
    recipe: Recipe, out: Path | None = None, *, watcher: Watcher | None = None, workers: Workers | None = None
) -> Result:
    """Run one recipe. With ``out`` everything is saved there, and a run that was stopped goes on from its checkpoint.

    workers: some that have been started already, for a recipe that asks for workers.
    """
    label = recipe.method.rpartition(":")[2]
    with Loader(workers=workers) as loader:
        population = loader.load(recipe, out)
        return train(recipe, population, out, Context(label, label, watcher or Watcher(), out), loader.workers(recipe))


def resume(
    path: Path,
    *,
    data: Given | None = None,
    watcher: Watcher | None = None,
    address: str | None = None,
    start_workers: StartWorkers | None = None,
) -> Comparison:
    """Go on with a run or a comparison that was stopped, from its folder; one that has ended is only read.

    address: of the cluster on whose workers it goes on, where that is another than before.
    """
    if not path.is_dir():
        raise UserError(f"there is no run folder {path}")
    if (path / folder.COMPARISON).exists():
        title, seeds, runs = _read_comparison(path)
        for run in runs:
            check_code(run.folder or path, run.recipe.model_dump())
    else:
        folder.check_run(path)
        recipe = read_run_recipe(path)
        title, seeds = "", 1
        label = read_json(path / folder.ABOUT).get("label") or recipe.method.rpartition(":")[2]
        runs = [_Run(label, recipe, path)]
    if address is not None:
        runs = [run._replace(recipe=_at_address(run.recipe, address)) for run in runs]
    with Loader(data, start=start_workers) as loader:
        return _run_all(title, runs, seeds, path, loader, watcher, address)


def _create_comparison(out: Path, plan: Plan, names: Sequence[str]) -> None:
    folder.create(out)
    runs = [
        {"label": label, "folder": name, "recipe": json.loads(recipe.model_dump_json(exclude_none=True))}
        for (label, recipe), name in zip(plan.with_seeds(), names, strict=True)
    ]
    write_json(out / folder.COMPARISON, {"title": plan.title, "seeds": plan.seeds, "runs": runs})


def _read_comparison(path: Path) -> tuple[str, int, list[_Run]]:
    """Its title, how many seeds each method has, and its runs."""
    folders = folder.compared_runs(path)
    planned = read_json(path / folder.COMPARISON)
    try:
        title, seeds = str(planned["title"]), int(planned["seeds"])
        recipes = [to_recipe(one["recipe"], str(path)) for one in planned["runs"]]
        labels = [str(one["label"]) for one in planned["runs"]]
    except (KeyError, TypeError, ValueError) as error:
        raise UserError(f"{path / folder.COMPARISON} is damaged: {type(error).__name__}: {error}") from error
    return title, seeds, [_Run(*one) for one in zip(labels, recipes, folders, strict=True)]


def _at_address(recipe: Recipe, address: str) -> Recipe:
    """The recipe of a run whose cluster has another address now."""
    if recipe.runtime.name != "ray":
        raise UserError(
            f"address {address}{FLAG}: this run is not one on a cluster's workers; leave it out", "runtime.address"
        )
    return recipe.model_copy(update={"runtime": recipe.runtime.model_copy(update={"address": address})})


def _run_all(
    title: str,
    runs: Sequence[_Run],
    seeds: int,
    out: Path | None,
    loader: Loader,
    watcher: Watcher | None,
    address: str | None = None,
    keep: bool = False,
) -> Comparison:
    """Every run: those that have ended are read, those that were stopped go on, the others start."""
    results, stop, name = [], Stop(), ""
    watcher = watcher or Watcher()
    described: Population | None = None  # whose missing clients and rows the user has been shown
    for label, recipe, path in runs:
        if stop.by is not None:  # in the last round of the run before
            raise Interrupted(f"all of {name}", out, stop.by)
        if path is not None and (path / folder.RESULT).exists():
            results.append(Result.load(path))
            continue
        if path is not None and (path / folder.RECIPE).exists():
            folder.check_format(path)
            recipe = read_run_recipe(path)  # with the defaults that it was started with
            recipe = recipe if address is None else _at_address(recipe, address)
        name = label if seeds == 1 else f"{label}, seed {recipe.seed}"
        population = loader.load(recipe, path)
        if (missing := describe_data(population, f"note: {population.name}: ")) and population is not described:
            watcher.note(missing)
            described = population
        context = Context(label, name, watcher, out, stop, keep)
        try:
            results.append(train(recipe, population, path, context, loader.workers(recipe)))
        except Diverged as error:
            if all(result.diverged for result in results) and len(results) + 1 == len(runs):
                raise  # no run has anything to compare
            watcher.note(Note(f"{name}: {error.note}"))
            results.append(Result.of_diverged(recipe, label, population.name, metric_of(population), str(error)))
    return Comparison(title, [results[first : first + seeds] for first in range(0, len(results), seeds)], out)


def _folder_names(plan: Plan) -> list[str]:
    """A folder's name for each run; runs whose labels differ in signs only are numbered."""
    names: list[str] = []
    for label, recipe in plan.with_seeds():
        name = folder.plain_name(label) + (f"-seed{recipe.seed}" if plan.seeds > 1 else "")
        numbered = (name if number == 1 else f"{name}-{number}" for number in itertools.count(1))
        names.append(next(one for one in numbered if one not in names))
    return names
