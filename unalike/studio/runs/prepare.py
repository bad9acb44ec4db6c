"""From a recipe to what runs: the population, the method and the federation; every default is filled in."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol, TypeVar, cast

import pandas as pd
import torch

from unalike import data
from unalike.core import outside
from unalike.core.federation import Federation
from unalike.core.method import LearnsFromLabels, Method, NeedsRounds
from unalike.core.model import Model
from unalike.core.roster import Roster
from unalike.core.schema import Schema
from unalike.data import DataError
from unalike.data.build import LaidOut
from unalike.data.population import Population
from unalike.data.source import COUNTED, FILLED, Source
from unalike.learn.scaling import PrivateScaling
from unalike.methods.problem import Problem
from unalike.networks import architectures
from unalike.runtime.shard.simulator import found_device
from unalike.studio.errors import UserError
from unalike.studio.recipe.hyperparameters import Hyperparameters, method_named, plain
from unalike.studio.recipe.keys import PARTITION_OPTIONS
from unalike.studio.recipe.recipe import Network, Recipe
from unalike.studio.runs.declared import column_of, declare
from unalike.studio.runs.privacy import budget_of, make_private, noise_of, private_scaling, target_delta
from unalike.studio.simulate import simulate
from unalike.studio.words import counted, listed

FROM_PYTHON = "python:"  # before the name of data that was handed over as an object
Given = Population | Source | pd.DataFrame  # data that is handed over as an object
Loaded = TypeVar("Loaded", Population, LaidOut)


class Elsewhere(Protocol):
    """Where the clients of a run are, if not in this process: ``unalike.studio.cluster.session``."""

    def federation(self, prepared: Prepared, out: Path | None, **fields: Any) -> Federation: ...


@dataclass(frozen=True)
class Prepared:
    """A run that could start: all is loaded, built and checked, and nothing has been written."""

    recipe: Recipe  # every default filled in
    population: Population  # of the simulation; the method was built without it
    roster: Roster  # of the training clients
    method: Method
    delta: float
    scaling: PrivateScaling | None = None  # of the inputs, by noisy statistics; else by public constants, or none

    def federation(self, session: Elsewhere | None = None, out: Path | None = None, **fields: Any) -> Federation:
        """The training clients, ready to be asked: here, or on the workers of a session, who keep things in ``out``."""
        fields = {"noise": noise_of(self.recipe), "trust": self.recipe.privacy.trust, **fields}
        fields |= {"budget": budget_of(self.recipe, self.delta), "accept_delta": self.recipe.privacy.accept_delta}
        if "schema" not in fields:
            fields["scaling"] = self.scaling
        if session is not None:
            return session.federation(self, out, **fields)
        return simulate(self.population, self.recipe.seed, **self.recipe.runtime.simulated(), **fields)


def prepare(recipe: Recipe, population: Population | None = None) -> Prepared:
    """Load the data and build the method; ``population``: the recipe's data, if it is loaded already."""
    if recipe.runtime.threads is not None:
        torch.set_num_threads(recipe.runtime.threads)
    found_device(recipe.runtime.device)  # refuses one that is not here
    if recipe.data.schema_ is not None:
        absolute = str(Path(recipe.data.schema_).expanduser().resolve())  # a run can be resumed from anywhere
        recipe = recipe.model_copy(update={"data": recipe.data.model_copy(update={"schema_": absolute})})
    if population is None:
        population = load_data(recipe)
    if recipe.model.name is None and population.network is not None:
        network = Network(name=population.network, options=recipe.model.options)
        recipe = recipe.model_copy(update={"model": network})
    if recipe.privacy.promises:
        _check_public(population)
    population = declare(recipe, population, target_delta(recipe, population.roster().select(population.seen)))
    roster = population.roster().select(population.seen)
    scaling = private_scaling(recipe, roster) if population.scaling == "private" else None
    hidden = bool(population.test.labeled[population.seen].any())
    recipe, method = build(recipe, roster, labels_hidden=hidden, scaling=scaling)
    return Prepared(recipe, population, roster, method, target_delta(recipe, roster), scaling)


def build(
    recipe: Recipe, roster: Roster, labels_hidden: bool = False, scaling: PrivateScaling | None = None
) -> tuple[Recipe, Method]:
    """The method of a recipe, and the recipe with every default filled in, from what a server may know: the roster.

    labels_hidden: labels exist that training may not use, which a message then says. scaling: what is paid besides.
    """
    schema = roster.schema
    network = recipe.model.name or architectures.default_for(schema.shape, schema.kind)
    model = _model(network, recipe, schema)
    cls, known = method_named(recipe.method).make, Hyperparameters.of(recipe.method, recipe.preset)
    arguments = _fitted(recipe, cls, known.read(recipe.hyperparameters), roster, labels_hidden)
    if "rounds" in known.hints and "rounds" not in recipe.hyperparameters:  # a method that plans them all ahead
        arguments = {**arguments, "rounds": max(1, recipe.rounds)}
    protecting, privacy = make_private(recipe, cls, arguments, roster, scaling)
    method = _built(recipe.method, cls, {**arguments, **protecting}, model, roster)
    if isinstance(method, NeedsRounds) and 0 < recipe.rounds < method.least_rounds:
        raise UserError(
            f"{recipe.method}: rounds = {recipe.rounds} (--rounds), but anderson.memory looks back so far that nothing "
            f"is accelerated before round {method.least_rounds}; use more rounds or less memory"
        )
    filled = {
        "privacy": privacy,
        "eval_every": recipe.evaluate_every,
        "model": Network(name=network, options=recipe.model.options),
        "hyperparameters": plain(arguments),
    }
    return recipe.model_copy(update=filled), method


def _check_public(population: Population) -> None:
    """Refuse a private run that would use numbers or words of all clients' rows together, which no noise protects."""
    found = [*population.pooled, *(["the scaling of the inputs"] if population.scaling == "asked" else [])]
    if not found:
        return
    only_scaling = not population.pooled
    advice = (
        ", or have noisy statistics for a share of ε: --set data.normalize=private, or leave the inputs as they are: "
        "--set data.normalize=false"
        if only_scaling
        else ""
    )
    raise UserError(
        f"a run with an ε uses nothing of the clients' rows but what noise protects, and {listed(found)} would come "
        f"from the rows of all clients: give a public schema, --set data.schema=FILE (`unalike data DATASET --schema "
        f"FILE` writes one to start from{'; add shift and scale' if population.scaling == 'asked' else ''}){advice}"
        + ("; missing values: --set data.options.missing=drop" if FILLED in population.pooled else "")
        + ("; or say how many classes there are: --set data.options.classes=NUMBER" if COUNTED in found else "")
    )


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
    return _dealt(recipe, partial(data.load, recipe.data.name if given is None else given))


def data_in_pieces(recipe: Recipe) -> LaidOut:
    """The recipe's data before inputs are put together, for who needs those of some clients alone."""
    return _dealt(recipe, partial(data.in_pieces, recipe.data.name))


def _dealt(recipe: Recipe, load: Callable[..., Loaded]) -> Loaded:
    """What comes of the recipe's way to deal rows out."""
    wanted = recipe.data.model_dump(exclude={"name", "options", "seed"})
    options = dict(recipe.data.options)
    if (column := column_of(recipe)) is not None:
        options["epsilon_column"] = column  # which is no feature
    seed = recipe.seed if recipe.data.seed is None else recipe.data.seed
    try:
        return load(**wanted, seed=seed, **options)
    except DataError as error:
        raise DataError(_with_flag(str(error))) from error


def left_out(population: Population) -> str:
    """Which clients and rows are missing in a population, and why; empty if none are."""
    told = []
    if population.incomplete:
        told.append(f"left out for lack of a value: {counted(population.incomplete, 'row')}")
    if population.dropped:
        missing = len(population.dropped)
        all_ = counted(missing + len(population), "client")
        told.append(f"{missing:,} of {all_} have too few rows to train and test on and are left out")
        if population.partition != "natural":  # such a client has the rows that it has
            told.append("with fewer clients (--clients) each has more rows")
    return "; ".join(told)


def _with_flag(message: str) -> str:
    """What is wrong with a partition's option, with the flag that sets it."""
    what, has, known = message.partition("; it has ")
    for flag, (_, option) in PARTITION_OPTIONS.items():
        if message.startswith(f"{option} must "):
            return f"--{flag} ({option}){message.removeprefix(option)}"
        if flag != option:
            what = what.replace(f"has no option {option!r}", f"has no option {option!r} (--{flag})")
        known = known.replace(option, f"{option} (--{flag})", 1)
    return what + has + known


def _model(network: str, recipe: Recipe, schema: Schema) -> Model:
    try:
        return Model(architectures.build(network, schema.shape, schema.outputs, schema.kind, **recipe.model.options))
    except ValueError as error:
        if outside.is_path(network):
            raise  # it may come from the user's own file: the way there matters
        raise UserError(f"model: {error}") from error


def _fitted(
    recipe: Recipe, cls: type, arguments: dict[str, Any], roster: Roster, labels_hidden: bool
) -> dict[str, Any]:
    """The arguments with a cohort that there are clients for.

    A default is cut to the clients that there are; a cohort that was asked for, or a lack of labels, is refused before
    anything is written. Of a method that does not say whom it asks, nothing is known that could be refused.
    """
    seen, labeled = len(roster), int(roster.labeled.sum())
    known = isinstance(cls, LearnsFromLabels)
    both = isinstance(cls, LearnsFromLabels) and cls.asks_unlabeled
    if known and recipe.rounds and labeled == 0:
        advice = "use --labeled above 0" if labels_hidden else "name the column that holds them with --label-column"
        raise UserError(f"no training client has labels, and {recipe.method} trains with them: {advice}")
    cohort = arguments.get("cohort")
    if not isinstance(cohort, int | float):
        return arguments
    if isinstance(cohort, int) and "cohort" not in recipe.hyperparameters:
        cohort = min(cohort, seen if both else labeled or seen)
    available, kind = (labeled, "training clients with labels") if known and not both else (seen, "training clients")
    if not 0 < (cohort if isinstance(cohort, int) else cohort * available) <= available:
        raise UserError(
            f"cohort = {cohort} (--cohort): there are {available} {kind}; give 1 to {available}, or their share, "
            "above 0 and below 1"
        )
    return {**arguments, "cohort": cohort}


def _built(name: str, cls: type, arguments: Mapping[str, Any], model: Model, roster: Roster) -> Method:
    schema = roster.schema
    given = {"model": model, "problem": Problem(model, schema.shape, schema.classes, len(roster), schema.kind)}
    wanted = {field.name: given[field.name] for field in dataclasses.fields(cls) if field.name in given}
    try:
        return cast(Method, cls(**wanted, **arguments))
    except ValueError as error:
        raise UserError(f"{name}: {error}") from error
