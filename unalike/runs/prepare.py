"""From a recipe to what runs: the population, the method and the federation; every default is filled in."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, cast

import torch

from unalike.core import outside
from unalike.core.method import LearnsFromLabels, Method, NeedsRounds
from unalike.core.roster import Roster
from unalike.core.schema import Schema
from unalike.core.vocabulary import Federation, Model
from unalike.data.population import Population
from unalike.data.source import COUNTED, NAMED
from unalike.learn.scaling import PrivateScaling
from unalike.methods.problem import Problem
from unalike.networks import architectures
from unalike.networks.pretrained import PREFIX, find_folder
from unalike.runs.absent import Absent
from unalike.runs.declared import declare
from unalike.runs.errors import FLAG, UserError
from unalike.runs.load import load_data
from unalike.runs.privacy import budget_of, make_private, noise_of, private_scaling, target_delta, with_preset
from unalike.runs.recipe.hyperparameters import Hyperparameters, method_named, plain
from unalike.runs.recipe.recipe import Recipe
from unalike.runs.simulate import simulate
from unalike.runs.words import listed
from unalike.runtime.shard.simulator import find_device


class Workers(Protocol):
    """The workers of a cluster, where a run's clients are on some: ``unalike.deploy.session``."""

    def load(self, recipe: Recipe, key: bytes) -> Population:
        """Have the workers load the recipe's data; the population here has no rows."""

    def federation(self, prepared: Prepared, out: Path | None, **fields: Any) -> Federation:
        """The training clients of a run, ready to be asked; the workers keep in ``out`` what must outlive them."""

    def close(self) -> None: ...


@dataclass(frozen=True)
class Prepared:
    """A run that could start: all is loaded, built and checked, and nothing has been written."""

    recipe: Recipe  # every default filled in
    population: Population  # of the simulation; the method was built without it
    roster: Roster  # of the training clients
    method: Method
    delta: float
    scaling: PrivateScaling | None = None  # of the inputs, by noisy statistics; else by public constants, or none

    def federation(self, workers: Workers | None = None, out: Path | None = None, **fields: Any) -> Federation:
        """The training clients, ready to be asked: here, or on workers, which keep things in ``out``."""
        fields = {"noise": noise_of(self.recipe), "trust": self.recipe.privacy.trust, **fields}
        fields |= {"budget": budget_of(self.recipe, self.delta), "accept_delta": self.recipe.privacy.accept_delta}
        if "schema" not in fields:
            fields["scaling"] = self.scaling
        if workers is not None:
            return workers.federation(self, out, **fields)
        return simulate(self.population, self.recipe.seed, **self.recipe.runtime.simulator_options(), **fields)


def prepare(recipe: Recipe, population: Population | None = None) -> Prepared:
    """Load the data and build the method; ``population``: the recipe's data, if it is loaded already."""
    if recipe.runtime.threads is not None:
        torch.set_num_threads(recipe.runtime.threads)
    find_device(recipe.runtime.device)  # refuses one that is not here
    if recipe.data.schema_ is not None:
        absolute = str(Path(recipe.data.schema_).expanduser().resolve())  # a run can be resumed from anywhere
        recipe = recipe.model_copy(update={"data": recipe.data.model_copy(update={"schema_": absolute})})
    if recipe.model.name is not None and recipe.model.name.startswith(PREFIX):
        try:
            name = f"{PREFIX}{find_folder(recipe.model.name).resolve()}"
        except ValueError as error:
            raise UserError(f"model: {error}") from error
        recipe = recipe.model_copy(update={"model": recipe.model.model_copy(update={"name": name})})
    if population is None:
        population = load_data(recipe)
    if recipe.model.name is None and population.network is not None:
        network = recipe.model.model_copy(update={"name": population.network})
        recipe = recipe.model_copy(update={"model": network})
    if isinstance(population, Absent) and population.nodes:
        runtime = recipe.runtime.model_copy(update={"nodes": list(population.nodes)})
        recipe = recipe.model_copy(update={"runtime": runtime})  # a run goes on with the nodes that it began with
    recipe = with_preset(recipe)
    if recipe.privacy.promises:
        check_public(population, recipe.privacy.unit, recipe.data.schema_)
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
    recipe, schema = with_preset(recipe), roster.schema
    network = recipe.model.name or architectures.default_for(schema.shape, schema.kind)
    model = _model(network, recipe, schema)
    cls, known = method_named(recipe.method).cls, Hyperparameters.of(recipe.method, recipe.preset)
    arguments = _fit_cohort(recipe, cls, known.read(recipe.hyperparameters), roster, labels_hidden)
    if "rounds" in known.hints and "rounds" not in recipe.hyperparameters:  # a method that plans them all ahead
        arguments = {**arguments, "rounds": max(1, recipe.rounds)}
    protecting, privacy = make_private(recipe, cls, arguments, roster, scaling)
    method = _make_method(recipe.method, cls, {**arguments, **protecting}, model, roster)
    if isinstance(method, NeedsRounds) and 0 < recipe.rounds < method.least_rounds:
        raise UserError(
            f"{recipe.method}: rounds = {recipe.rounds}{FLAG}, but anderson.memory looks back so far that nothing "
            f"is accelerated before round {method.least_rounds}; use more rounds or less memory",
            "rounds",
        )
    filled = {
        "privacy": privacy,
        "model": recipe.model.model_copy(update={"name": network, "digest": model.digest}),
        "hyperparameters": plain(arguments),
    }
    return recipe.model_copy(update=filled), method


def check_public(population: Population, unit: str, schema: str | None = None) -> None:
    """Refuse a private run that would use numbers or words of all clients' rows together, which no noise protects.

    schema: the file of one that was given.
    """
    if population.fill == "client" and unit == "point":
        raise UserError(
            "missing = client fills a gap by the mean of the client's other rows, so that one row changes others, and "
            f"noise for a single row does not protect it: say missing = mean{FLAG}, with public constants in a schema "
            f"or with data.normalize=private, or protect whole clients: unit = client{FLAG}",
            "data.options.missing",
            "privacy.unit",
        )
    if population.train.weight is not None and unit == "point":
        raise UserError(
            f"DP-SGD counts all rows the same: leave weight_column{FLAG} and class_weights{FLAG} out, or protect whole "
            f"clients: unit = client{FLAG}",
            *("data.options.weight_column", "data.class_weights", "privacy.unit"),
        )
    asked = population.scaling == "asked"
    found = [*population.pooled, *(["the scaling of the inputs"] if asked else [])]
    if not found:
        return
    edit = "put public numbers in its center and deviation and remove its note"
    if schema is not None and asked:
        start = f"{schema} was given, but it still has its note: {edit}"
    else:
        start = (
            "give a public schema: set data.schema=FILE (`unalike data DATASET --schema FILE`, in Python "
            f"unalike.data.write_schema, writes one to start from{f'; {edit}' * asked})"
        )
    instead = {
        NAMED: f"name the classes, class_names{FLAG}",
        COUNTED: "say how many classes there are, set data.options.classes=NUMBER",
        "the scaling of the inputs": "have noisy statistics for a share of ε, set data.normalize=private (set "
        "data.normalize=false leaves the inputs as they are)",
    }
    advice = "; or " + ", and ".join(instead[one] for one in found) if set(found) <= set(instead) else ""
    raise UserError(
        f"a run with an ε uses nothing of the clients' rows but what noise protects, and {listed(found)} would come "
        f"from the rows of all clients: {start}{advice}",
        "data.options.classes",
    )


def _model(network: str, recipe: Recipe, schema: Schema) -> Model:
    given = outside.load(network) if outside.is_path(network) else None
    if isinstance(given, Model) and recipe.model.trainable is not None:
        raise UserError(
            f"{network} is a Model already: say trainable= where it is made, and leave model.trainable out{FLAG}",
            "model.trainable",
        )
    try:
        if isinstance(given, Model):
            model = given
        else:
            module = architectures.build(network, schema.shape, schema.outputs, schema.kind, **recipe.model.options)
            model = Model(module, recipe.model.trainable)
    except ValueError as error:
        if outside.is_path(network) and recipe.model.trainable is None:
            raise  # it may come from the user's own file: the way there matters
        raise UserError(f"model: {error}") from error
    if recipe.model.digest not in (None, model.digest):
        raise UserError(
            f"model: what is frozen of {network} has the digest {model.digest}, but the recipe says "
            f"{recipe.model.digest}: bring back the pretrained network that the run began with"
        )
    return model


def _fit_cohort(
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
        setting = "data.labeled" if labels_hidden else "data.options.label_column"
        advice = "give more clients their labels" if labels_hidden else "name the column that holds them"
        raise UserError(f"no training client has labels, and {recipe.method} trains with them: {advice}{FLAG}", setting)
    cohort = arguments.get("cohort")
    if not isinstance(cohort, int | float):
        return arguments
    if isinstance(cohort, int) and "cohort" not in recipe.hyperparameters:
        cohort = min(cohort, seen if both else labeled or seen)
    available, kind = (labeled, "training clients with labels") if known and not both else (seen, "training clients")
    if not 0 < (cohort if isinstance(cohort, int) else cohort * available) <= available:
        raise UserError(
            f"cohort = {cohort}{FLAG}: there are {available} {kind}; give 1 to {available}, or their share, "
            "above 0 and below 1",
            "hyperparameters.cohort",
        )
    return {**arguments, "cohort": cohort}


def _make_method(name: str, cls: type, arguments: Mapping[str, Any], model: Model, roster: Roster) -> Method:
    schema = roster.schema
    given = {"model": model, "problem": Problem(model, schema.shape, schema.classes, len(roster), schema.kind)}
    wanted = {field.name: given[field.name] for field in dataclasses.fields(cls) if field.name in given}
    try:
        return cast(Method, cls(**wanted, **arguments))
    except ValueError as error:
        raise UserError(f"{name}: {error}") from error
