"""Plans: one run, several seeds, or several methods over the same clients; all can be resumed."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from unalike.data.population import Population
from unalike.data.source import Source
from unalike.studio.errors import UserError
from unalike.studio.recipe.recipe import Data, Plan, Recipe, checked, read_recipe
from unalike.studio.report.page import write_report
from unalike.studio.runs import folder
from unalike.studio.runs.folder import disk_errors_told, read_json, write_json
from unalike.studio.runs.prepare import FROM_PYTHON, Given, load_data, prepare
from unalike.studio.runs.progress import Watcher
from unalike.studio.runs.result import Result, as_text, table
from unalike.studio.runs.run import run_recipe


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
