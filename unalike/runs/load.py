"""The data of a recipe, whole or in pieces; and what is missing in it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TypeAlias, TypeVar

from unalike import data
from unalike.core.lazy import pd
from unalike.core.notes import join_notes
from unalike.data.lazy import LazyPopulation
from unalike.data.population import Population
from unalike.data.source import Source
from unalike.runs.declared import column_of
from unalike.runs.errors import FLAG, Note, UserError
from unalike.runs.recipe.recipe import Data, Recipe
from unalike.runs.words import counted, listed

FROM_PYTHON = "python:"  # before the name of data that is an object of this process
Given: TypeAlias = "Population | Source | pd.DataFrame"  # data that is an object of this process
Loaded = TypeVar("Loaded", Population, LazyPopulation)


def name_given_data(recipe: Recipe, given: Given) -> Recipe:
    """The recipe with the name of data from Python; it keeps how rows are dealt out, if they are not dealt out yet."""
    if isinstance(given, Population):
        return recipe.model_copy(update={"data": Data(name=FROM_PYTHON + given.name)})
    name = FROM_PYTHON + (given.name if isinstance(given, Source) else "table")
    return recipe.model_copy(update={"data": recipe.data.model_copy(update={"name": name})})


def load_data(recipe: Recipe, given: Given | None = None) -> Population:
    """The recipe's population; the same recipe and seed always give the same one.

    given: data that was handed over from Python; the recipe says how it is dealt out, unless it is a population.
    """
    if isinstance(given, Population):
        return given
    if given is None and recipe.data.name.startswith(FROM_PYTHON):
        raise UserError(
            f"the data {recipe.data.name.removeprefix(FROM_PYTHON)!r} of this run was given from Python; resume it "
            "from Python as well: unalike.resume(folder, data=...)"
        )
    if isinstance(given, Source) and given.client is None and recipe.data.partition is None:
        raise UserError(
            f"{given.name}: nothing says which client a row belongs to; give client ids, (x, y, client), or deal the "
            "rows out with a partition, e.g. partition='iid'"
        )
    return _deal_out(recipe, partial(data.load, recipe.data.name if given is None else given))


def data_in_pieces(recipe: Recipe) -> LazyPopulation:
    """The recipe's data before inputs are put together, for those who need the rows of some clients alone."""
    return _deal_out(recipe, partial(data.load_lazily, recipe.data.name))


def _deal_out(recipe: Recipe, load: Callable[..., Loaded]) -> Loaded:
    wanted = recipe.data.model_dump(exclude={"name", "options", "seed"})
    options = dict(recipe.data.options)
    if (column := column_of(recipe)) is not None:
        options["epsilon_column"] = column  # which is no feature
    seed = recipe.seed if recipe.data.seed is None else recipe.data.seed
    return load(**wanted, seed=seed, **options)


def describe_data(population: Population, before: str = "") -> Note | None:
    """What was decided about a population, and which clients and rows are missing; None if there is nothing to say."""
    reasons = list(population.notes)
    numbers = population.schema.target == "number" and population.train.target_center is None
    if numbers and population.scaling in ("public", "private"):
        reasons.append(
            "the numbers to predict are used as they are; where they are far from 0 to 1, training needs their "
            "target_center and target_deviation in a public schema"
        )
    if population.incomplete:
        reasons += [f"left out for lack of a value: {counted(population.incomplete, 'row')}"]
    if population.dropped:
        missing = len(population.dropped)
        all_ = counted(missing + len(population), "client")
        who = "" if population.partition != "natural" else f": {listed(list(population.dropped), 5)}"
        reasons.append(f"{missing:,} of {all_} have too few rows to train and test on and are left out{who}")
        if population.partition != "natural":  # such a client has the rows that it has
            reasons.append(Note(f"with fewer clients{FLAG} each has more rows", "data.clients"))
    return join_notes("", [before, join_notes("; ", reasons)]) if reasons else None
