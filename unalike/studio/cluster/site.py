"""What a worker puts together: it loads a recipe's data itself, keeps its own clients' rows and builds their shard.

Only strings come in: the recipe, by which the installed code makes the method and the program that the clients agree
to. No code and no object travels.
"""

from __future__ import annotations

import json
import math
from dataclasses import replace

import torch
from torch import Tensor

from unalike.core.client import Clients
from unalike.core.request import Part, Program
from unalike.core.terms import Terms
from unalike.data.build import LaidOut
from unalike.data.population import Population
from unalike.runtime.shard.shard import Shard
from unalike.runtime.shard.simulator import Simulator
from unalike.studio.cluster.absent import emptied, encoded
from unalike.studio.program import program_of
from unalike.studio.recipe.recipe import Recipe, checked
from unalike.studio.runs import fingerprint
from unalike.studio.runs.declared import column_of, declare
from unalike.studio.runs.map_data import MOST_CLIENTS
from unalike.studio.runs.prepare import Prepared, data_in_pieces, prepare
from unalike.studio.runs.privacy import noise_of, target_delta

_PIECE = 1 << 12  # rows that are read at once for their digest
TRAINING = f"{__name__}:Training"  # as a driver names it


class Training:
    """The clients of a recipe. Inputs are put together for its own clients alone, and the rest of the source let go."""

    def __init__(self, settings: str) -> None:
        told = json.loads(settings)
        self._recipe, self._key = checked(told["recipe"], "the recipe of this run"), bytes.fromhex(told["key"])
        self._laid_out: LaidOut | None = data_in_pieces(self._recipe)
        self._mine: Tensor | None = None
        self._parts: dict[Part, Clients] = {}
        population = self._declared(self._laid_out.facts)
        self._facts = emptied(population)
        counted = population.classes is not None and population.has_labels
        counts = _on_the_map(population).histogram() if counted else None
        digests = fingerprint.of(population, self._key, self._laid_out.pieces(_PIECE))
        self._about = encoded(population, digests, counts)

    def _declared(self, population: Population) -> Population:
        recipe = self._recipe
        if column_of(recipe) is None:
            return population
        seen = population.roster().select(population.seen)  # each client's ε is a column of the rows
        return declare(recipe, population, target_delta(recipe, seen))

    def about(self) -> bytes:
        return self._about

    def shard(self, settings: str, mine: Tensor) -> Shard:
        recipe = checked(json.loads(settings), "the recipe of this run")
        prepared = prepare(recipe, self._facts)
        if self._mine is None or not torch.equal(self._mine, mine):
            self._parts = {}  # of other clients
            laid_out = self._laid_out or data_in_pieces(self._recipe)
            self._parts, self._mine, self._laid_out = laid_out.chosen(mine), mine, None
        program = agreed_program(prepared)
        roster = prepared.population.roster().select(mine)
        return Shard(self._parts, roster, program, simulator(recipe))

    def learn(self, what: bytes) -> Program:
        raise ValueError("the program of a run is that of its recipe")

    def view(self, what: str) -> bytes:
        raise ValueError(f"nothing here is called {what!r}")


def _on_the_map(population: Population) -> Population:
    """Those of the clients that a map of them shows."""
    some = torch.arange(0, len(population), max(1, math.ceil(len(population) / MOST_CLIENTS)))
    train, validation, test = (part.select(some) for part in population.parts.values())
    return replace(population, train=train, validation=validation, test=test)


def agreed_program(prepared: Prepared) -> Program:
    """What both sides know from the recipe: the tasks that clients run, and where the noise comes from."""
    terms = Terms(noise_of(prepared.recipe), prepared.recipe.privacy.trust)
    return program_of(prepared.method, prepared.roster.schema, terms=terms, simulated=True, scaling=prepared.scaling)


def simulator(recipe: Recipe) -> Simulator:
    how = recipe.runtime
    return Simulator(how.block, how.threads, how.device)
