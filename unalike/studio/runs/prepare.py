"""From a recipe to what runs: the population, the method and the federation; every default is filled in."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

import torch

from unalike import data
from unalike.core import outside
from unalike.core.federation import Federation
from unalike.core.method import Method
from unalike.core.model import Model
from unalike.core.suggest import nearest
from unalike.data import DataError
from unalike.data.population import Population
from unalike.methods import METHODS
from unalike.methods.problem import Problem
from unalike.networks import architectures
from unalike.runtime.shard.simulator import Simulator
from unalike.studio.errors import UserError
from unalike.studio.recipe import hyperparameters
from unalike.studio.recipe.keys import PARTITION_OPTIONS
from unalike.studio.recipe.recipe import Network, Privacy, Recipe, all_keys
from unalike.studio.runs.privacy import budget_of, make_private, target_delta

FROM_PYTHON = "python:"  # before the name of data that was handed over as an object


@dataclass(frozen=True)
class Prepared:
    """A run that could start: all is loaded, built and checked, and nothing has been written."""

    recipe: Recipe  # every default filled in
    population: Population
    method: Method
    delta: float

    def federation(self, **restored: Any) -> Federation:
        """The seen clients, ready to be asked; ``restored`` are fields from a checkpoint."""
        runtime = self.recipe.runtime
        simulator = Simulator(runtime.block, runtime.threads, runtime.strict, runtime.drop)
        seen = self.population.train.select(self.population.seen)
        budget = budget_of(self.recipe, self.delta)
        return Federation(seen, simulator, self.recipe.seed, runtime.quorum, budget, **restored)


def prepare(recipe: Recipe, population: Population | None = None) -> Prepared:
    """Load the data and build the method; ``population``: the recipe's data, if it is loaded already."""
    if recipe.runtime.threads is not None:
        torch.set_num_threads(recipe.runtime.threads)
    if population is None:
        population = load_data(recipe)
    network = recipe.model.name or architectures.default_for(population.input_shape, population.kind)
    problem = Problem(
        _model(network, recipe, population),
        population.input_shape,
        population.classes,
        len(population.seen),
        population.kind,
    )
    method, resolved, private = build_method(recipe, problem, population)
    recipe = recipe.model_copy(
        update={
            "privacy": private,
            "eval_every": recipe.evaluate_every,
            "model": Network(name=network, options=recipe.model.options),
            "hyperparameters": resolved,
        }
    )
    return Prepared(recipe, population, method, target_delta(recipe, population))


def _model(network: str, recipe: Recipe, population: Population) -> Model:
    shape, outputs, kind = population.input_shape, population.outputs, population.kind
    try:
        return Model(architectures.build(network, shape, outputs, kind, **recipe.model.options))
    except ValueError as error:
        if outside.is_path(network):
            raise  # it may come from the user's own file: the way there matters
        raise UserError(f"model: {error}") from error


def load_data(recipe: Recipe) -> Population:
    """The recipe's population; the same recipe and seed always give the same one."""
    wanted = recipe.data.model_dump(exclude={"name", "options", "seed"})
    name, options = recipe.data.name, recipe.data.options
    if name.startswith(FROM_PYTHON):
        raise UserError(
            f"the data {name.removeprefix(FROM_PYTHON)!r} of this run was given from Python; resume it from Python as "
            "well: unalike.studio.resume(folder, data=population)"
        )
    seed = recipe.seed if recipe.data.seed is None else recipe.data.seed
    try:
        return data.load(name, **wanted, seed=seed, **options)
    except DataError as error:
        raise DataError(_with_flag(str(error))) from error


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


def method_class(name: str) -> type:
    """The class behind a method's name or path."""
    if not outside.is_path(name):
        if name not in METHODS:
            raise UserError(f"no method is called {name!r}{nearest(name, METHODS)}")
        return METHODS[name].make
    found = outside.load(name)
    if not isinstance(found, type):
        raise UserError(f"{name} is no class; a method is a frozen dataclass with start, round and personalize")
    for needed in ("start", "round", "personalize"):
        if not callable(getattr(found, needed, None)):
            raise UserError(f"{name} has no {needed}(...); a method has start, round and personalize")
    return found


def build_method(recipe: Recipe, problem: Problem, population: Population) -> tuple[Method, dict[str, Any], Privacy]:
    """The method, its hyperparameters as plain values, and what its privacy comes to."""
    cls = method_class(recipe.method)
    known = hyperparameters.of_method(cls)
    defaults: Mapping[str, Any] = METHODS[recipe.method].defaults if recipe.method in METHODS else {}
    values = hyperparameters.merged(defaults, recipe.hyperparameters)
    arguments = hyperparameters.read(recipe.method, known, values, elsewhere=all_keys())
    if "cohort" in arguments and "cohort" not in recipe.hyperparameters:
        arguments["cohort"] = _fitting(arguments, population)
    _check_clients(recipe, arguments, population)
    build = getattr(cls, "for_problem", None)
    first = {"problem": problem} if build is not None else {"model": problem.model}
    fields, private = make_private(recipe, cls, arguments, population)
    try:
        method = (build or cls)(**first, **{**arguments, **fields})
    except ValueError as error:
        raise UserError(f"{recipe.method}: {error}") from error
    return cast(Method, method), hyperparameters.plain(known, arguments), private


def _check_clients(recipe: Recipe, arguments: Mapping[str, Any], population: Population) -> None:
    """Are there labels to train with, and clients enough for a cohort? Told before anything is written.

    A method from outside may train without labels.
    """
    labeled, seen = int(population.labeled[population.seen].sum()), len(population.seen)
    if recipe.method in METHODS and recipe.rounds and labeled == 0:
        hidden = bool(population.test.labeled[population.seen].any())
        advice = "use --labeled above 0" if hidden else "name the column that holds them with --label-column"
        raise UserError(f"no training client has labels, and {recipe.method} trains with them: {advice}")
    if "cohort" not in arguments:
        return
    # of a method from outside nobody knows whom it asks
    both = _asks_both(arguments) or recipe.method not in METHODS
    cohort, available = arguments["cohort"], seen if both else labeled
    if (
        isinstance(cohort, int | float)
        and not 0 < (cohort if isinstance(cohort, int) else cohort * available) <= available
    ):
        kind = "training clients" if both else "training clients with labels"
        raise UserError(
            f"cohort = {cohort} (--cohort): there are {available} {kind}; give 1 to {available}, or their share, "
            "above 0 and below 1"
        )


def _asks_both(arguments: Mapping[str, Any]) -> bool:
    """Does the method ask clients without labels, too? FLowDUP says which share of its cohort has them."""
    return "labeled_share" in arguments


def _fitting(arguments: Mapping[str, Any], population: Population) -> Any:
    """A default cohort is no larger than the clients there are (one that is asked for is refused if it is)."""
    labeled = 0 if _asks_both(arguments) else int(population.labeled[population.seen].sum())
    cohort = arguments["cohort"]
    return min(cohort, labeled or len(population.seen)) if isinstance(cohort, int) else cohort


def describe_hyperparameters(name: str) -> dict[str, Any]:
    """A method's hyperparameters with their defaults, as a recipe would spell them."""
    known = hyperparameters.of_method(method_class(name))
    defaults: Mapping[str, Any] = METHODS[name].defaults if name in METHODS else {}
    required = {key: "required" for key, one in known.items() if one.default is dataclasses.MISSING}
    usable = {key: one for key, one in known.items() if key not in required}
    values = hyperparameters.read(name, usable, {k: v for k, v in defaults.items() if k in usable})
    return {**required, **hyperparameters.plain(usable, values)}
