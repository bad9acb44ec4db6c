"""From a recipe's ``[privacy]`` to a method's fields, and from the ledger to what a run says it has cost.

Client level (``unit = "client"``): every round a Poisson cohort, updates clipped to ``clip``, Gaussian noise on their
sum. Point level (``unit = "point"``): the clients train by DP-SGD with gradients clipped to ``clip``. With ``epsilon``
the noise is found for the planned rounds, and the same ε is the run's budget: no ask that would exceed it is sent. With
``epsilons`` every client has noise and a budget of its own (``declared.py``); one whose budget is spent stops.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from unalike.core.federation import Federation
from unalike.core.method import ClientPrivate, PointPrivate, charged_training
from unalike.core.release import Noise
from unalike.core.roster import Roster
from unalike.learn.scaling import PrivateScaling, too_noisy
from unalike.privacy import Budget, Gaussian, Poisson, calibrate, dpsgd
from unalike.privacy.checks import check_delta
from unalike.privacy.dpsgd import PointPrivacy, Steps
from unalike.runs.errors import FLAG, UserError
from unalike.runs.recipe.hyperparameters import preset_values
from unalike.runs.recipe.recipe import Privacy, Recipe
from unalike.runs.result import OwnBudget
from unalike.runs.result import Privacy as Spent
from unalike.runs.words import guarantees

CLIP = {"client": 0.5, "point": 1.0}  # where a recipe gives ε and no clip
SCALING = 0.2  # of ε, for private statistics of the inputs: costs compose about in squares, so training hardly notices
SEES_SUMS = 'the server sees the sums before they have their noise; trust = "nobody" adds it before they reach it'
_MANY_SIZES = 8  # clients of more different sizes than this share calibrations for rounded steps
_LATE = 1e-6  # chance that some client of a point-level run is drawn more often than planned, which stops the run


def make_private(
    recipe: Recipe,
    method: type,
    arguments: Mapping[str, Any],
    roster: Roster,
    scaling: PrivateScaling | None = None,
) -> tuple[dict[str, Any], Privacy]:
    """Arguments for the method's constructor that make it keep what ``[privacy]`` says, and that section filled in.

    scaling: what the run releases before it trains.
    """
    wanted, once = recipe.privacy, _once(scaling)
    if (wanted.epsilon, wanted.epsilons, wanted.noise_multiplier, wanted.clip) == (None, None, None, None):
        return {}, wanted
    delta = target_delta(recipe, roster)
    try:
        check_delta(delta, None if wanted.accept_delta else units_of(roster, wanted.unit))
    except ValueError as error:
        raise UserError(
            f"privacy.delta: {error} (n counts the {wanted.unit}s of the training population; accept_delta{FLAG} takes "
            "it all the same, and says so beside the ε)",
            "privacy.accept_delta",
        ) from error
    if wanted.noise_multiplier is not None and wanted.clip is None:
        raise UserError("noise without a bound protects nobody: give privacy.clip beside privacy.noise_multiplier")
    clip = wanted.clip or CLIP[wanted.unit]
    promised = wanted.promises
    filled = wanted.model_copy(update={"clip": clip, "delta": delta, "noise": wanted.noise or "system"})
    if scaling is not None:
        filled = filled.model_copy(update={"scaling": wanted.scaling or SCALING})
    if wanted.unit == "client":
        if not isinstance(method, ClientPrivate):
            why = getattr(method, "not_client_private", "it has no release with a clip and noise")
            raise UserError(f"{recipe.method} has no client-level privacy: {why}; fedavg, for example, has it")
        if not promised:
            return {"clip": clip}, wanted  # clipped, and without any promise
        noise = wanted.noise_multiplier
        if wanted.epsilon is not None and noise is None:
            sampling = Poisson(sampling_rate(arguments["cohort"], roster))
            noise = calibrate.noise_multiplier(wanted.epsilon, delta, max(1, recipe.rounds), sampling, once=once)
        assert noise is not None
        return {"clip": clip, "noise": Gaussian(noise)}, filled.model_copy(update={"noise_multiplier": noise})
    if not isinstance(method, PointPrivate):
        raise UserError(f"{recipe.method} has no point-level privacy by DP-SGD at the clients; fedavg has it")
    if not promised:
        raise UserError("privacy.clip alone protects nobody: give privacy.epsilon or privacy.noise_multiplier, too")
    if wanted.noise_multiplier is not None:
        private = PointPrivacy(clip, wanted.noise_multiplier)
    else:
        rounds = participations(arguments["cohort"], roster, recipe.rounds)
        many = len(set(roster.bound.tolist())) > _MANY_SIZES
        epsilon = wanted.epsilon
        if roster.epsilon is not None and arguments.get("least_epsilon"):
            epsilon = float(roster.epsilon.min())
        batches = None if roster.batch is None else tuple(sorted(set(roster.batch.tolist())))
        private = PointPrivacy(clip, None, epsilon, delta, rounds, many, epsilon is None, batches, once)
    return {"local": dataclasses.replace(arguments["local"], private=private)}, filled


def with_preset(recipe: Recipe) -> Recipe:
    """A private recipe with its preset's clip and δ, where it has none of its own."""
    if recipe.preset is None or not recipe.privacy.promises:
        return recipe
    values = preset_values(recipe.method, recipe.preset).get("privacy", {})
    missing = {name: value for name, value in values.items() if getattr(recipe.privacy, name) is None}
    return recipe.model_copy(update={"privacy": recipe.privacy.model_copy(update=missing)})


def private_scaling(recipe: Recipe, roster: Roster) -> PrivateScaling:
    """The noisy statistics that a run scales its inputs by: they alone cost the share of ε that the recipe names."""
    wanted, delta = recipe.privacy, target_delta(recipe, roster)
    epsilon = wanted.epsilon
    if epsilon is None and roster.epsilon is not None and roster.delta is not None:
        epsilon, delta = float(roster.epsilon.min()), float(roster.delta.min())  # everybody's answer has the same noise
    if epsilon is None:
        raise UserError(
            "data.normalize = private scales inputs by noisy statistics of the clients' rows, which a share of ε pays: "
            f"give privacy.epsilon{FLAG}, or leave normalize out where nothing is to be private",
            "privacy.epsilon",
        )
    share = wanted.scaling or SCALING
    noise = Gaussian(calibrate.noise_multiplier(share * epsilon, delta, PrivateScaling.RELEASES))
    scaling = PrivateScaling.of(roster.schema, noise, wanted.unit)
    wrong = too_noisy(scaling, roster)
    if wrong is not None:
        raise UserError(
            f"{wrong} (noise multiplier {noise.noise_multiplier:.3g} in {PrivateScaling.RELEASES} releases, {share:g} "
            f"of ε = {epsilon:g}): give public constants in a schema (data.schema=FILE), a larger share "
            "(privacy.scaling=0.5) or a larger ε; data.normalize=false leaves inputs as they are"
        )
    return scaling


def _once(scaling: PrivateScaling | None) -> tuple[float, ...]:
    """The noise multipliers of what is released before training."""
    return () if scaling is None else (scaling.noise.noise_multiplier,) * scaling.RELEASES


def units_of(roster: Roster, unit: str) -> int:
    """How many units the training population has: its clients, or all points that they train on."""
    return len(roster) if unit == "client" else int(roster.bound.sum())


def target_delta(recipe: Recipe, roster: Roster) -> float:
    """δ: the recipe's, or n^-1.1 for n protected units, the usual choice below one over the population."""
    return recipe.privacy.delta or min(0.5, units_of(roster, recipe.privacy.unit) ** -1.1)


def budget_of(recipe: Recipe, delta: float) -> Budget | None:
    """The run's budget: the ε that the recipe names."""
    return None if recipe.privacy.epsilon is None else Budget(recipe.privacy.epsilon, delta)


def noise_of(recipe: Recipe) -> Noise:
    """Where the draws of a run come from: the operating system, where it promises anything and none is simulated."""
    return "system" if recipe.privacy.promises and recipe.privacy.noise != "simulated" else "seeded"


def sampling_rate(cohort: int | float, roster: Roster) -> float:
    """With which probability a client is in a cohort."""
    available = int(roster.labeled.sum())
    if available == 0:
        raise UserError(f"no training client has labels, so none can be sampled; set labeled{FLAG}", "data.labeled")
    return min(1.0, cohort / available if isinstance(cohort, int) else cohort)


def participations(cohort: int | float, roster: Roster, rounds: int) -> int:
    """In how many rounds a client takes part at most.

    The sampling of clients amplifies nothing for their points, so a client pays for every round that it is drawn in.
    With probability above 1 − 1e-6 no client is drawn more often than this; if one is, the budget stops the run.
    """
    rate, clients = sampling_rate(cohort, roster), len(roster)
    if rate >= 1:
        return max(1, rounds)
    from scipy.stats import binom  # here, because it takes long to import

    return max(1, min(rounds, int(binom.isf(_LATE / clients, rounds, rate)) + 1))


@dataclass(frozen=True)
class Forecast:
    """What a run will cost, before it starts; ``epsilon`` is infinite for a run without noise.

    ``noise`` is the least of any client, over the clip; ``rate`` that of Poisson cohorts, or the least of Poisson
    batches where points are protected. ``epsilon`` is against readers. ``epsilon_server`` is that of the client that is
    drawn most often, ``drawn`` times: the chance that one is drawn more often is below 1e-6.
    ``scaling``: ε of the statistics that inputs are scaled by, alone; it is in ``epsilon``.
    """

    clients: int
    unit: str
    clip: float | None
    noise: float | None
    most_noise: float | None
    rounds: int
    rate: float | None
    most_rate: float | None
    epsilon: float
    delta: float
    accounting: str
    epsilon_server: float = math.inf
    drawn: int | None = None
    trust: str = "server"
    source: str = "system"
    accepted_delta: bool = False
    scaling: float | None = None
    scaling_noise: float | None = None

    def words(self) -> list[str]:
        """What stands beside its ε."""
        server = self.epsilon_server if math.isfinite(self.epsilon_server) else None
        return guarantees(self.epsilon, server, self.source, self.trust, self.accepted_delta)


def forecast(
    recipe: Recipe, method: object, roster: Roster, delta: float, scaling: PrivateScaling | None = None
) -> Forecast:
    """What a prepared run will cost; ``recipe`` has all defaults filled in."""
    once, wanted, rounds = _once(scaling), recipe.privacy, max(1, recipe.rounds)
    unit, clip, accounting, server, drawn = "point", wanted.clip, "PLD", math.inf, None
    noises, rates = list[float](), list[float]()
    if isinstance(method, ClientPrivate) and isinstance(method.noise, Gaussian):
        noises, rates = [method.noise.noise_multiplier], [sampling_rate(method.cohort, roster)]
        found = calibrate.predict_cost(noises[0], rounds, Poisson(rates[0]), delta=delta, once=once)
        unit, epsilon, accounting = "client", found.epsilon, found.method
        if wanted.trust == "nobody":
            drawn = participations(rates[0], roster, rounds)
            server = calibrate.predict_cost(noises[0], drawn, delta=delta, once=once).epsilon
    elif isinstance(method, PointPrivate) and (roster.epsilon is not None or method.local.private is not None):
        rounds = participations(method.cohort, roster, rounds)  # of one client
        if roster.epsilon is not None:
            noises, epsilon = (
                charged_training(method).noise_multipliers(roster.declarations()).tolist(),
                float(roster.epsilon.max()),
            )
        else:
            private, clip = method.local.private, method.local.private.clip
            each = [charged_training(method).steps_of(size) for size in sorted(set(roster.bound.tolist()))]
            noises, rates = [private.multiplier(steps) for steps in each], [steps.rate for steps in each]
            spans = [Steps(steps.rate, steps.count * rounds) for steps in each]
            epsilon = max(
                dpsgd.epsilon(noise, span, delta=delta, also=once) for noise, span in zip(noises, spans, strict=True)
            )
        if scaling is None or wanted.trust == "nobody":
            server = epsilon  # the noise is made at the clients
    else:
        unit, epsilon, accounting = wanted.unit, math.inf, "non-private"
    return Forecast(
        clients=len(roster),
        unit=unit,
        clip=clip,
        noise=min(noises, default=None),
        most_noise=max(noises, default=None),
        rounds=rounds,
        rate=min(rates, default=None),
        most_rate=max(rates, default=None),
        epsilon=epsilon,
        delta=delta,
        accounting=accounting,
        epsilon_server=server,
        drawn=drawn,
        trust=wanted.trust,
        source="simulated" if wanted.noise == "simulated" else "system",
        accepted_delta=delta >= 1 / units_of(roster, unit),
        scaling=None if scaling is None else calibrate.predict_cost(once[0], len(once), delta=delta).epsilon,
        scaling_noise=None if scaling is None else once[0],
    )


def spent_by_each(federation: Federation) -> dict[str, OwnBudget]:
    """By client, where each declares a budget: that, and what the run has cost it."""
    roster, ledger = federation.roster, federation.ledger
    if roster.epsilon is None or roster.delta is None or not federation.serial:
        return {}
    limits = zip(roster.ids.tolist(), roster.epsilon.tolist(), roster.delta.tolist(), strict=True)
    return {
        roster.name(position): OwnBudget(declared=epsilon, spent=ledger.epsilon(delta, client=client), delta=delta)
        for position, (client, epsilon, delta) in enumerate(limits)
    }


def spent(federation: Federation, delta: float, exact: bool = True) -> Spent:
    """What the run has cost so far.

    A run that released anything without noise promises nothing: ``private`` is false and the rest is None. Simulated
    noise protects nobody: ``private`` is false, beside the ε that it stands for.
    ``exact=False`` computes ε on a coarser grid, and only against readers: faster, and a little larger.
    """
    ledger = federation.ledger
    epsilon = ledger.epsilon(delta) if exact else ledger.worst(delta, coarseness=16)
    if math.isinf(epsilon):
        return Spent()
    unit = ledger.unit or "client"
    noise = "system" if federation.noise == "system" else "simulated" if epsilon else None  # ε = 0: there is none
    server = ledger.server_epsilon(delta) if exact else math.inf
    return Spent(
        private=noise != "simulated",
        epsilon=epsilon,
        epsilon_server=server if math.isfinite(server) else None,
        why_server=None if math.isfinite(server) else SEES_SUMS,
        delta=delta,
        accepted_delta=delta >= 1 / units_of(federation.roster, unit),
        unit=unit,
        noise=noise,
        trust=federation.trust,
    )
