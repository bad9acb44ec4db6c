"""From a recipe's ``[privacy]`` to a method's fields, and from the ledger to what a run says it has cost.

Client level (``unit = "client"``): every round a Poisson cohort, updates clipped to ``clip``, Gaussian noise on their
sum. Point level (``unit = "point"``): the clients train by DP-SGD with gradients clipped to ``clip``. With ``epsilon``
the noise is found for the planned rounds, and the same ε is the run's budget: no ask that would exceed it is sent.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from scipy.stats import binom

from unalike.core.federation import Federation
from unalike.core.method import ClientPrivate, PointPrivate
from unalike.core.roster import Roster
from unalike.privacy import Budget, Gaussian, Poisson, calibrate, dpsgd
from unalike.privacy.checks import check_delta
from unalike.privacy.dpsgd import PointPrivacy, Steps
from unalike.studio.errors import UserError
from unalike.studio.recipe.recipe import Privacy, Recipe

CLIP = {"client": 0.5, "point": 1.0}  # where a recipe gives ε and no clip
_MANY_SIZES = 8  # clients of more different sizes than this share calibrations for rounded steps
_LATE = 1e-6  # chance that some client of a point-level run is drawn more often than planned, which stops the run


def make_private(
    recipe: Recipe, method: type, arguments: Mapping[str, Any], roster: Roster
) -> tuple[dict[str, Any], Privacy]:
    """Arguments for the method's constructor that make it keep what ``[privacy]`` says, and that section filled in."""
    wanted = recipe.privacy
    if wanted.epsilon is None and wanted.noise_multiplier is None and wanted.clip is None:
        return {}, wanted
    _check(recipe, roster)
    if wanted.unit == "client":
        return _for_clients(recipe, method, arguments, roster)
    return _for_points(recipe, method, arguments, roster)


def _check(recipe: Recipe, roster: Roster) -> None:
    wanted = recipe.privacy
    units = units_of(roster, wanted.unit)
    try:
        check_delta(target_delta(recipe, roster), units)
    except ValueError as error:
        raise UserError(f"privacy.delta: {error} (n counts the {wanted.unit}s of the training population)") from error
    if wanted.noise_multiplier is not None and wanted.clip is None:
        raise UserError("noise without a bound protects nobody: give privacy.clip beside privacy.noise_multiplier")


def _for_clients(
    recipe: Recipe, method: type, arguments: Mapping[str, Any], roster: Roster
) -> tuple[dict[str, Any], Privacy]:
    wanted = recipe.privacy
    if not isinstance(method, ClientPrivate):
        raise UserError(f"{recipe.method} has no client-level privacy by clip and noise; fedavg has it")
    if wanted.epsilon is None and wanted.noise_multiplier is None:
        return {"clip": wanted.clip}, wanted  # clipped, and without any promise
    delta = target_delta(recipe, roster)
    clip, noise = wanted.clip or CLIP["client"], wanted.noise_multiplier
    if noise is None:
        assert wanted.epsilon is not None
        sampling = Poisson(sampling_rate(arguments["cohort"], roster))
        noise = calibrate.noise_multiplier(wanted.epsilon, delta, max(1, recipe.rounds), sampling)
    filled = wanted.model_copy(update={"clip": clip, "noise_multiplier": noise, "delta": delta})
    return {"clip": clip, "noise": Gaussian(noise)}, filled


def _for_points(
    recipe: Recipe, method: type, arguments: Mapping[str, Any], roster: Roster
) -> tuple[dict[str, Any], Privacy]:
    wanted = recipe.privacy
    if not isinstance(method, PointPrivate):
        raise UserError(f"{recipe.method} has no point-level privacy by DP-SGD at the clients; fedavg has it")
    if wanted.epsilon is None and wanted.noise_multiplier is None:
        raise UserError("privacy.clip alone protects nobody: give privacy.epsilon or privacy.noise_multiplier, too")
    delta = target_delta(recipe, roster)
    clip = wanted.clip or CLIP["point"]
    if wanted.noise_multiplier is not None:
        private = PointPrivacy(clip, wanted.noise_multiplier)
    else:
        rounds = participations(arguments["cohort"], roster, recipe.rounds)
        many = len(set(training_sizes(roster))) > _MANY_SIZES
        private = PointPrivacy(clip, None, wanted.epsilon, delta, rounds, rounded=many)
    filled = wanted.model_copy(update={"clip": clip, "delta": delta})
    return {"local": dataclasses.replace(arguments["local"], private=private)}, filled


def units_of(roster: Roster, unit: str) -> int:
    """How many units the training population has: its clients, or all their points."""
    if unit == "client":
        return len(roster)
    return sum(training_sizes(roster))


def training_sizes(roster: Roster) -> list[int]:
    """How many points each training client trains on: its test rows are never asked for anything."""
    sizes: list[int] = roster.bound.tolist()
    return sizes


def target_delta(recipe: Recipe, roster: Roster) -> float:
    """δ: the recipe's, or n^-1.1 for n protected units, the usual choice below one over the population."""
    return recipe.privacy.delta or min(0.5, units_of(roster, recipe.privacy.unit) ** -1.1)


def budget_of(recipe: Recipe, delta: float) -> Budget | None:
    """The run's budget: the ε that the recipe names."""
    return None if recipe.privacy.epsilon is None else Budget(recipe.privacy.epsilon, delta)


def sampling_rate(cohort: int | float, roster: Roster) -> float:
    """With which probability a client is in a cohort."""
    available = int(roster.labeled.sum())
    if available == 0:
        raise UserError("no training client has labels, so none can be sampled; use --labeled above 0")
    return min(1.0, cohort / available if isinstance(cohort, int) else cohort)


def participations(cohort: int | float, roster: Roster, rounds: int) -> int:
    """In how many rounds a client takes part at most.

    The sampling of clients amplifies nothing for their points, so a client pays for every round that it is drawn in.
    With probability above 1 − 1e-6 no client is drawn more often than this; if one is, the budget stops the run.
    """
    rate, clients = sampling_rate(cohort, roster), len(roster)
    if rate >= 1:
        return max(1, rounds)
    return max(1, min(rounds, int(binom.isf(_LATE / clients, rounds, rate)) + 1))


@dataclass(frozen=True)
class Forecast:
    """What a run will cost, before it starts; ``epsilon`` is infinite for a run without noise."""

    unit: str
    clip: float | None
    noise: str
    rounds: int
    sampling: str
    epsilon: float
    delta: float
    method: str


def forecast(recipe: Recipe, method: object, roster: Roster, delta: float) -> Forecast:
    """ε of a prepared run (``recipe`` with all defaults filled in)."""
    rounds, clip = max(1, recipe.rounds), recipe.privacy.clip
    if isinstance(method, ClientPrivate) and isinstance(method.noise, Gaussian):
        rate = sampling_rate(method.cohort, roster)
        plan = calibrate.plan(method.noise.noise_multiplier, rounds, Poisson(rate), delta=delta)
        how, noise = f"Poisson cohorts, rate {rate:.4g}", f"{method.noise.noise_multiplier:.4f}"
        return Forecast("client", clip, noise, rounds, how, plan.epsilon, delta, plan.method)
    sizes = sorted(set(training_sizes(roster)))
    done = [method.dp_sgd(size) for size in sizes] if isinstance(method, PointPrivate) else []
    private = [one for one in done if one is not None]
    if isinstance(method, PointPrivate) and private:
        times = participations(method.cohort, roster, rounds)
        scales = [point.multiplier(steps) for point, steps in private]
        costs = [
            dpsgd.epsilon(scale, Steps(steps.rate, steps.count * times), delta=delta)
            for scale, (_, steps) in zip(scales, private, strict=True)
        ]
        least, most = min(scales), max(scales)
        noise = f"{least:.4f}" if least == most else f"{least:.4f} to {most:.4f}, by client"
        rates = [steps.rate for _, steps in private]
        how = f"Poisson batches, rates {min(rates):.4g} to {max(rates):.4g}"
        return Forecast("point", private[0][0].clip, noise, times, how, max(costs), delta, "PLD")
    return Forecast(recipe.privacy.unit, clip, "none", rounds, "–", math.inf, delta, "non-private")


def spent(federation: Federation, delta: float, exact: bool = True) -> dict[str, Any]:
    """What the run has cost so far: ``{private, epsilon, delta, unit}``.

    A run that released anything without noise promises nothing: ``private`` is false and the other three are null.
    ``exact=False`` computes ε on a coarser grid: faster, and a little larger.
    """
    ledger = federation.ledger
    epsilon = ledger.epsilon(delta) if exact else ledger.worst(delta, coarseness=16)
    if math.isinf(epsilon):
        return {"private": False, "epsilon": None, "delta": None, "unit": None}
    return {"private": True, "epsilon": epsilon, "delta": delta, "unit": ledger.unit or "client"}
