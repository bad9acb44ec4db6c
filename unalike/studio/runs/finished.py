"""A run that has been trained, opened again to serve newcomers or to be analysed."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from unalike.core.method import Method, ProtectsNewcomers, State
from unalike.data.population import Population
from unalike.data.sources.catalog import CATALOG
from unalike.studio.errors import UserError
from unalike.studio.recipe.recipe import read_recipe
from unalike.studio.runs import checkpoint, folder
from unalike.studio.runs.prepare import Prepared, load_data, prepare


@dataclass(frozen=True)
class FinishedRun:
    """A run that can serve newcomers."""

    path: Path
    prepared: Prepared
    state: State
    round: int

    @classmethod
    def open(cls, path: Path) -> FinishedRun:
        folder.check_run(path)
        saved = checkpoint.load(path)
        if saved is None or saved.round == 0:
            raise UserError(f"{path} has not been trained yet; go on with: unalike resume {path}")
        recipe = read_recipe(path / folder.RECIPE)
        population = load_data(recipe).using(folder.load_roster(path).schema)
        return cls(path, prepare(recipe, population), saved.state, saved.round)

    @property
    def method(self) -> Method:
        return self.prepared.method

    @property
    def population(self) -> Population:
        return self.prepared.population

    @property
    def named_data(self) -> bool:
        """Was the run trained on one of the data sets that come with Unalike, not on somebody's own file?"""
        return self.prepared.recipe.data.name.partition(":")[0].strip() in CATALOG

    @property
    def file_options(self) -> dict[str, Any]:
        """How the run's own file was read; nothing for a named data set. What it held, the population tells."""
        if self.named_data:
            return {}
        options = self.prepared.recipe.data.options
        return {key: value for key, value in options.items() if key not in ("kind", "classes", "task")}

    @property
    def notes(self) -> list[str]:
        """What to know about a run that was stopped."""
        rounds = self.prepared.recipe.rounds
        if self.round >= rounds:
            return []
        return [f"the run stopped at round {self.round} of {rounds}; it goes on with: unalike resume {self.path}"]

    @property
    def newcomer_epsilon(self) -> float | None:
        """ε that the run protects each row of a newcomer by, if it was trained to."""
        return self.method.newcomer_epsilon if isinstance(self.method, ProtectsNewcomers) else None

    def newcomer_delta(self, samples: int, asked: float | None = None) -> float:
        """δ for each of a newcomer's n rows: as asked, if below 1/n; else n^-1.1, at most 0.01 and the run's own."""
        usual: float = min(0.01, samples**-1.1)
        if asked is None and isinstance(self.method, ProtectsNewcomers) and self.newcomer_epsilon is not None:
            return min(self.method.newcomer_delta, usual)
        if asked is None:
            return usual
        if not 0 < asked < 1 / samples:
            raise UserError(
                f"--delta {asked:g}: expected a number above 0 and below 1/n = {1 / samples:.3g} for the newcomer's "
                f"n = {samples} rows, because 1/n would allow to publish a row as it is; leave it out, or take about "
                f"{usual:.1e}"
            )
        return asked
