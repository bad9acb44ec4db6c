"""A run that has been trained, opened again to serve clients or to be analysed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from unalike.core.federation import Federation
from unalike.core.lazy import pd
from unalike.core.method import Method, ProtectsNewcomers, State
from unalike.core.roster import Roster
from unalike.core.schema import Schema
from unalike.data import DataError
from unalike.data.sources.catalog import CATALOG
from unalike.runs import checkpoint, folder
from unalike.runs.errors import FLAG, UserError
from unalike.runs.prepare import Prepared, build, prepare
from unalike.runs.recipe.recipe import Recipe, read_run_recipe
from unalike.runtime.simulate import Simulation


@dataclass(frozen=True)
class FinishedRun:
    """A run as its folder tells it. It needs no data: a folder serves clients wherever it is copied to."""

    path: Path
    recipe: Recipe
    roster: Roster  # of the training clients
    method: Method
    state: State
    round: int  # whose models are served, and on which draws depend
    kept: Mapping[str, Tensor]  # by the training clients, as far as it lies in the folder
    lacks_kept: bool = False  # clients kept something that does not
    trained: int = 0  # rounds; more than ``round`` where the best round was selected

    @classmethod
    def open(cls, path: Path) -> FinishedRun:
        folder.check_run(path)
        saved = checkpoint.load(path)
        if saved is None and (path / folder.RESULT).is_file():
            raise folder.incomplete(path, folder.CHECKPOINT)
        if saved is None or saved.round == 0:
            raise UserError(f"{path} has no checkpoint of a finished round yet; go on with: unalike resume {path}")
        roster = folder.load_roster(path)
        recipe, method = build(read_run_recipe(path), roster)
        elsewhere = saved.about.kept or recipe.runtime.folder is not None
        lacks = elsewhere and not saved.kept
        served = saved.round if saved.about.served_round is None else saved.about.served_round
        return cls(path, recipe, roster, method, saved.state, served, saved.kept, lacks, saved.round)

    @classmethod
    def in_memory(cls, prepared: Prepared, state: State, federation: Federation, round: int) -> FinishedRun:
        """A run of this process that was not written anywhere."""
        kept = federation.runtime.kept(federation.run) if isinstance(federation.runtime, Simulation) else {}
        path, recipe, roster = Path("this run"), prepared.recipe, federation.roster
        made = cls(path, recipe, roster, prepared.method, state, round, kept, trained=federation.round)
        population = prepared.population.using(federation.roster.schema)
        made.__dict__["prepared"] = replace(prepared, population=population)
        return made

    @property
    def schema(self) -> Schema:
        """How rows are read."""
        return self.roster.schema

    @cached_property
    def prepared(self) -> Prepared:
        """The run as a simulation, its data loaded: for analyses, which look at rows that no server has."""
        name = self.recipe.data.name
        try:
            prepared = prepare(self.recipe)
        except (UserError, DataError, OSError) as error:
            raise UserError(
                f"an analysis of {self.path} needs the data that it was trained on, {name}, and they cannot be loaded "
                f"here: {error}. Analyse the run where they are; `unalike personalize` and `unalike predict` do not "
                "need them"
            ) from error
        now = prepared.roster
        if not (torch.equal(now.ids, self.roster.ids) and torch.equal(now.bound, self.roster.bound)):
            raise UserError(
                f"an analysis of {self.path} needs the data that it was trained on, but {name} has changed since: its "
                f"training clients are not those of {folder.ROSTER}. Bring the old data back, or train the run again"
            )
        return replace(prepared, population=prepared.population.using(self.schema))

    @property
    def named_data(self) -> bool:
        """Was the run trained on one of the data sets that come with Unalike, not on somebody's own file?"""
        return self.recipe.data.name.partition(":")[0].strip() in CATALOG

    @property
    def file_options(self) -> dict[str, Any]:
        """How the run's own file was read; nothing for a named data set. What it held, the schema tells."""
        return {} if self.named_data else dict(self.recipe.data.options)

    @property
    def notes(self) -> list[str]:
        """What to know about a run that was stopped."""
        rounds = self.recipe.rounds
        if self.trained >= rounds:
            return []
        return [f"the run stopped at round {self.trained} of {rounds}; it goes on with: unalike resume {self.path}"]

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
                f"delta = {asked:g}{FLAG}: expected a number above 0 and below 1/n = {1 / samples:.3g} for the "
                f"newcomer's n = {samples} rows, because 1/n would allow to publish a row as it is; leave it out, or "
                f"take about {usual:.1e}",
                "privacy.delta",
            )
        return asked


class Memory(NamedTuple):
    """What a result offers in Python of a run that was not written."""

    run: FinishedRun
    rounds: list[dict[str, Any]]  # as in metrics.jsonl
    clients: list[dict[str, Any]]  # as in scores.csv
    predictions: pd.DataFrame  # as in predictions.csv
    baseline: pd.DataFrame  # as in baseline.csv
