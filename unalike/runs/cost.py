"""What a run will cost in privacy, before it starts and, where clients are protected, before there is any data."""

from __future__ import annotations

import torch

from unalike.core.roster import Roster
from unalike.runs.load import describe_data, load_data
from unalike.runs.prepare import build, prepare
from unalike.runs.privacy import Forecast, forecast, target_delta
from unalike.runs.recipe.recipe import Data, Recipe
from unalike.runs.words import counted


def cost(recipe: Recipe) -> tuple[Forecast, str | None, str]:
    """The forecast, the data that it is for (None: any), and whom it is for, in words.

    How many clients there are is all that client-level privacy depends on. So where the recipe names their number and
    no data, it is planned for so many training clients; else for those that the data gives.
    """
    wanted = recipe.data
    if (
        wanted.clients is None
        or "name" in wanted.model_fields_set
        or wanted.normalize == "private"
        or recipe.privacy.unit == "point"
    ):
        prepared = prepare(recipe)
        found = forecast(prepared.recipe, prepared.method, prepared.roster, prepared.delta, scaling=prepared.scaling)
        whom = f"{counted(found.clients, 'training client')} of {prepared.population.name}"
        unseen = len(prepared.population.unseen)
        notes = [f"{unseen:,} more are unseen"] * bool(unseen) + [describe_data(prepared.population)]
        return found, prepared.population.name, "; ".join([whom, *filter(None, notes)])
    count = _training_clients(wanted)
    labeled = torch.arange(count) < round(wanted.labeled * count)
    schema = load_data(Recipe(method=recipe.method)).schema  # that of the default data: the noise does not depend on it
    roster = Roster(torch.arange(count), torch.ones(count, dtype=torch.int64), labeled, schema)
    recipe, method = build(recipe, roster)
    found = forecast(recipe, method, roster, target_delta(recipe, roster))
    return found, None, f"{counted(count, 'training client')}, whatever their data"


def _training_clients(wanted: Data) -> int:
    """All that the recipe names, but for those that it sets aside as unseen."""
    assert wanted.clients is not None
    if wanted.unseen is None:
        return wanted.clients
    away = len(wanted.unseen) if isinstance(wanted.unseen, list) else wanted.unseen
    return max(1, wanted.clients - (away if isinstance(away, int) else round(away * wanted.clients)))
