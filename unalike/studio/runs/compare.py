"""Plans: one run, several seeds, or several methods over the same clients; all can be resumed."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from unalike.data.population import Population
from unalike.studio.errors import UserError
from unalike.studio.recipe.recipe import Data, Plan, Recipe, checked
from unalike.studio.report.page import write_report
from unalike.studio.runs import folder
from unalike.studio.runs.folder import disk_errors_told, read_json, write_json
from unalike.studio.runs.prepare import FROM_PYTHON, load_data, prepare
from unalike.studio.runs.progress import Watcher
from unalike.studio.runs.result import Result, as_text, table
from unalike.studio.runs.run import execute, resume_run


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

    def __init__(self, given: Population | None) -> None:
        self._given = given
        self._last: tuple[tuple[Data, int | None], Population] | None = None

    def of(self, recipe: Recipe) -> Population:
        if self._given is not None:
            return self._given
        key = (recipe.data, recipe.seed if recipe.data.seed is None else recipe.data.seed)
        if self._last is None or self._last[0] != key:
            self._last = None  # the old data goes before the new one comes
            self._last = (key, load_data(recipe))
        return self._last[1]


def carry_out(
    plan: Plan, out: Path | None, *, population: Population | None = None, watcher: Watcher | None = None
) -> Comparison:
    """Run all of a plan. A single run has ``out`` to itself; several have a folder each inside it."""
    if population is not None:
        handed_over = {"data": Data(name=FROM_PYTHON + population.name)}
        plan = plan.model_copy(
            update={"runs": [(label, recipe.model_copy(update=handed_over)) for label, recipe in plan.runs]}
        )
    populations = _Populations(population)
    runs = plan.with_seeds()
    if len(runs) == 1:
        label, recipe = runs[0]
        result = execute(recipe, out, label=label, population=population, watcher=watcher)
        comparison = Comparison(plan.title, [[result]], out)
    else:
        for _, recipe in plan.runs:  # a mistake in the last run is told before the first one starts
            prepare(recipe, populations.of(recipe))
        names = _folder_names(plan)
        if out is not None:
            with disk_errors_told(out):
                folder.claim(out)
                write_json(out / folder.COMPARISON, _planned(plan, names))
        comparison = _go_on(plan.title, plan.seeds, runs, names, out, populations, watcher)
    _report(comparison)
    return comparison


def resume_any(path: Path, *, population: Population | None = None, watcher: Watcher | None = None) -> Comparison:
    """Go on with a run or a comparison that was stopped, from its folder."""
    if not path.is_dir():
        raise UserError(f"there is no run folder {path}")
    if (path / folder.COMPARISON).exists():
        planned = read_json(path / folder.COMPARISON)
        try:
            title, seeds = str(planned["title"]), int(planned["seeds"])
            runs = [(str(one["label"]), checked(one["recipe"], str(path))) for one in planned["runs"]]
            names = [str(one["folder"]) for one in planned["runs"]]
        except (KeyError, TypeError, ValueError) as error:
            raise UserError(f"{path / folder.COMPARISON} is damaged: {type(error).__name__}: {error}") from error
        comparison = _go_on(title, seeds, runs, names, path, _Populations(population), watcher)
    else:
        comparison = Comparison("", [[resume_run(path, population=population, watcher=watcher)]], path)
    _report(comparison)
    return comparison


def _go_on(
    title: str,
    seeds: int,
    runs: Sequence[tuple[str, Recipe]],
    names: Sequence[str],
    out: Path | None,
    populations: _Populations,
    watcher: Watcher | None,
) -> Comparison:
    """Every run of a comparison: those that are done are read, those that were begun go on, the others start."""
    results = []
    for (label, recipe), name in zip(runs, names, strict=True):
        spoken = label if seeds == 1 else f"{label}, seed {recipe.seed}"
        path = None if out is None else out / name
        if path is not None and (path / folder.RESULT).exists():
            result = Result.load(path)
        elif path is not None and (path / folder.RECIPE).exists():
            data = populations.of(recipe)
            result = resume_run(path, label=label, spoken=spoken, population=data, watcher=watcher)
        else:
            data = populations.of(recipe)
            result = execute(recipe, path, label=label, spoken=spoken, population=data, watcher=watcher)
        results.append(result)
    groups = [results[begin : begin + seeds] for begin in range(0, len(results), seeds)]
    return Comparison(title, groups, out)


def _folder_names(plan: Plan) -> list[str]:
    several = plan.seeds > 1
    names = []
    for label, recipe in plan.with_seeds():
        name = "".join(letter if letter.isalnum() or letter in "-_." else "-" for letter in label)
        names.append(f"{name}-seed{recipe.seed}" if several else name)
    if len(set(names)) < len(names):
        raise UserError(f"two runs would share a folder ({', '.join(sorted(names))}); give them clearer labels")
    return names


def _planned(plan: Plan, names: Sequence[str]) -> dict[str, Any]:
    runs = [
        {"label": label, "folder": name, "recipe": json.loads(recipe.model_dump_json(exclude_none=True))}
        for (label, recipe), name in zip(plan.with_seeds(), names, strict=True)
    ]
    return {"title": plan.title, "seeds": plan.seeds, "runs": runs}


def _report(comparison: Comparison) -> None:
    if comparison.folder is not None:
        folders = [result.folder for result in comparison.results if result.folder is not None]
        with disk_errors_told(comparison.folder):
            write_report(folders, comparison.folder / folder.REPORT)
