"""What a run is said to cost before it starts is what it has cost at its end."""

from __future__ import annotations

import pytest

from tests.runs.helpers import SMALL
from unalike.api import run
from unalike.runs.prepare import prepare
from unalike.runs.privacy import forecast, sampling_rate, units_of
from unalike.runs.recipe.settings import plan_for


def test_the_forecast_for_points_is_about_the_rows_that_are_trained_on() -> None:
    settings = {**SMALL, "rounds": 2, "cohort": 1.0, "test": 0.5, "unit": "point", "noise_multiplier": 1.0, "clip": 1.0}
    recipe = plan_for(["fedavg"], settings).runs[0][1]
    prepared = prepare(recipe)
    planned = forecast(prepared.recipe, prepared.method, prepared.roster, prepared.delta)
    spent = run("fedavg", **settings).privacy
    assert spent.unit == planned.unit == "point"
    assert planned.epsilon == pytest.approx(spent.epsilon, rel=1e-3)
    seen = prepared.population.seen
    assert units_of(prepared.roster, "point") == int(prepared.population.train.size[seen].sum())


def test_the_chance_to_be_drawn_is_that_among_clients_with_labels() -> None:
    """A cohort of 2 is drawn of those alone, each with a higher chance, which costs more."""
    settings = {**SMALL, "rounds": 2, "cohort": 2, "labeled": 0.5, "noise_multiplier": 1.0, "clip": 1.0}
    prepared = prepare(plan_for(["fedavg"], settings).runs[0][1])
    labeled = int(prepared.roster.labeled.sum())
    assert 2 < labeled < len(prepared.roster)
    planned = forecast(prepared.recipe, prepared.method, prepared.roster, prepared.delta)
    assert planned.rate == planned.most_rate == 2 / labeled and sampling_rate(0.5, prepared.roster) == 0.5
    spent = run("fedavg", **settings).privacy
    assert planned.epsilon == pytest.approx(spent.epsilon, rel=1e-3)
