"""What a worker puts together: it loads the data itself, keeps its own clients' rows and builds their shard.

Only strings come in: a recipe, or what an analysis reads. By them the installed code makes the method and the program
that the clients agree to. No code and no object travels.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from unalike.analytics.estimation.samples import Samples, check_rows, open_samples, read_counts
from unalike.analytics.kmeans.points import ChosenRows, Points, open_points
from unalike.analytics.mdm.study import Histograms, read_counts_file, read_histograms
from unalike.core import outside
from unalike.core.client import Clients
from unalike.core.release import Terms
from unalike.core.request import Part, Program
from unalike.data.lazy import LazyPopulation
from unalike.data.partition.features import Feature
from unalike.data.population import Population
from unalike.deploy import plain
from unalike.deploy.program import program_of_analysis, program_of_run
from unalike.runs import fingerprint
from unalike.runs.absent import Absent, select_rows, without_rows
from unalike.runs.declared import column_of, declare
from unalike.runs.load import data_in_pieces
from unalike.runs.map_data import MOST_CLIENTS
from unalike.runs.prepare import prepare
from unalike.runs.privacy import target_delta
from unalike.runs.recipe.recipe import to_recipe
from unalike.runtime.shard.shard import Shard
from unalike.runtime.shard.simulator import Simulator

_PIECE = 1 << 12  # rows that are read at once for their digest
SITE = f"{__name__}:Site"  # as a driver names it

Parts = Mapping[Part, Clients]
Given = Points | Histograms | Samples
GIVEN = (Points, Histograms, Samples, Clients, Feature)  # of what is told about clients
READS = {"kmeans": "points", "mdm": "histograms", "estimate": "samples"}
Reading = tuple[Given, ChosenRows | None]  # and where the rows are, unless it has them


class Site:
    """A worker's clients. Their rows are read once, as long as a new shard is of the same clients."""

    def __init__(self, settings: str) -> None:
        asked = json.loads(settings)
        self._data = _RecipeData(asked) if "recipe" in asked else _AnalysisData(asked)
        self._mine: Tensor | None = None
        self._parts: Parts = {}

    def about(self) -> bytes:
        return self._data.about

    def shard(self, settings: str, mine: Tensor) -> Shard:
        if self._mine is None or not torch.equal(self._mine, mine):
            self._parts = {}  # of other clients
            self._parts, self._mine = self._data.take(mine), mine
        return self._data.shard(json.loads(settings), self._parts, mine)

    def learn(self, what: bytes) -> Program:
        return self._data.learn(what)

    def view(self, what: str) -> bytes:
        raise ValueError(f"nothing here is called {what!r}")


class _RecipeData:
    """The clients of a recipe."""

    def __init__(self, asked: Mapping[str, Any]) -> None:
        for file, digest in asked["code"].items():  # before any of it runs
            if file.endswith(".py") and outside.code_digest(file) != digest:
                raise ValueError(f"{file} is not here as it was where the run started; give all workers the same file")
        self._recipe, key = to_recipe(asked["recipe"], "the recipe of this run"), bytes.fromhex(asked["key"])
        lazy = data_in_pieces(self._recipe)
        population = self._declared(lazy.facts)
        counted = population.classes is not None and population.has_labels
        counts = _on_the_map(population).histogram() if counted else None
        self._lazy: LazyPopulation | None = lazy
        digests = fingerprint.of(population, key, lazy.pieces(_PIECE))
        self._facts = Absent.of(population, digests, counts)
        self.about = plain.encode(self._facts)

    def _declared(self, population: Population) -> Population:
        recipe = self._recipe
        if column_of(recipe) is None:
            return population
        seen = population.roster().select(population.seen)  # each client's ε is a column of the rows
        return declare(recipe, population, target_delta(recipe, seen))

    def take(self, mine: Tensor) -> Parts:
        lazy, self._lazy = self._lazy or data_in_pieces(self._recipe), None
        return lazy.select(mine)

    def shard(self, settings: Mapping[str, Any], parts: Parts, mine: Tensor) -> Shard:
        recipe = to_recipe(dict(settings), "the recipe of this run")
        prepared, how = prepare(recipe, self._facts), recipe.runtime
        roster = prepared.population.roster().select(mine)
        return Shard(parts, roster, program_of_run(prepared), Simulator(how.block, how.threads, how.device))

    def learn(self, what: bytes) -> Program:
        raise ValueError("the program of a run is that of its recipe")


def _on_the_map(population: Population) -> Population:
    """Those of the clients that a map of them shows."""
    some = torch.arange(0, len(population), max(1, math.ceil(len(population) / MOST_CLIENTS)))
    train, validation, test = (part.select(some) for part in population.parts.values())
    return replace(population, train=train, validation=validation, test=test)


class _AnalysisData:
    """The clients of an analysis."""

    def __init__(self, asked: Mapping[str, Any]) -> None:
        self._what, self._how = asked["what"], asked["how"]
        reading = read(self._what, self._how, pieces=True)
        self._reading: Reading | None = reading
        self._given, self._terms = _without_rows(reading[0]), Terms()
        self.about = plain.encode(self._given)

    def take(self, mine: Tensor) -> Parts:
        (given, rows), self._reading = self._reading or read(self._what, self._how, pieces=True), None
        own = select_rows(parts_of(given), mine) if rows is None else rows.select(mine)
        return {name: _with_rows(part.select(mine), own[name]) for name, part in parts_of(self._given).items()}

    def shard(self, settings: Mapping[str, Any], parts: Parts, mine: Tensor) -> Shard:
        self._terms = Terms(settings["noise"])
        program = program_of_analysis(self._terms)
        return Shard(parts, parts["train"].roster(), program, Simulator(settings["block"], 1))

    def learn(self, what: bytes) -> Program:
        """The program of some algorithms, given by their classes and settings."""
        return program_of_analysis(self._terms, plain.decode(what))


def parts_of(given: Given) -> Parts:
    return given.parts if isinstance(given, Samples) else {"train": given.clients}


def _with_rows(clients: Clients, own: Clients) -> Clients:
    return replace(clients, x=own.x, y=own.y, start=own.start, known=own.known, weight=own.weight)


def _without_rows(given: Given) -> Given:
    """The same, as a server may know it."""
    clients = without_rows(given.clients)
    if isinstance(given, Samples) and given.held_out is not None:
        return replace(given, clients=clients, held_out=without_rows(given.held_out))
    return replace(given, clients=clients)


# Reading what an analysis is about: all of it, or in pieces, so that a worker keeps the rows of its own clients alone


def read(what: str, how: dict[str, Any], pieces: bool = False) -> Reading:
    """The points, histograms or samples that plain settings name."""
    return _READERS[what](dict(how), pieces)


def _points(how: dict[str, Any], pieces: bool) -> Reading:
    server = how.pop("server")
    return open_points(**how, server=None if server is None else Path(server), pieces=pieces)


def _histograms(how: dict[str, Any], pieces: bool) -> Reading:
    counts = how.pop("counts")
    return read_histograms(**how, pieces=pieces) if counts is None else read_counts_file(counts), None


def _samples(how: dict[str, Any], pieces: bool) -> Reading:
    counts = how.pop("counts")
    if counts is None:
        return open_samples(**how, pieces=pieces)
    samples = Samples(read_counts(Path(counts)), name=counts)
    check_rows(samples.clients, how["check"])
    return samples, None


_READERS: dict[str, Callable[[dict[str, Any], bool], Reading]] = {
    "points": _points,
    "histograms": _histograms,
    "samples": _samples,
}
