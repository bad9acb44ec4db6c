"""What a recipe would ask of a site, before it joins: what would leave, at which ε, and which rules it meets."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from unalike.core.method import tasks_of
from unalike.core.release import Stays
from unalike.core.request import ReleaseName
from unalike.core.task import Task
from unalike.data import DataError
from unalike.deploy.keys import bundle_of
from unalike.deploy.node.host import charges_of, data_of, facts, local_recipe
from unalike.deploy.node.policy import TOLD, Forbidden, Policy, approved, digest_of
from unalike.deploy.program import program_of_run
from unalike.deploy.sites import join
from unalike.learn.scaling import PrivateScaling
from unalike.privacy.account import BARE
from unalike.privacy.ledger import Charge, Ledger
from unalike.runs.errors import UserError
from unalike.runs.load import load_data
from unalike.runs.prepare import Prepared, prepare
from unalike.runs.recipe.recipe import Recipe


@dataclass(frozen=True)
class Asked:
    """A task that the recipe's method asks for, and what leaves with its answer."""

    task: str
    what: str  # as its paper and code say
    leaves: str
    protected: str
    refused: str = ""  # the rule that it meets


@dataclass(frozen=True)
class Explanation:
    """What a privacy officer signs: a recipe by its digest, and all that it may do here."""

    digest: str
    approved: bool
    clients: int = 0  # of this site
    told: str = ""  # what the server learns before anything is asked
    asked: list[Asked] = field(default_factory=list)
    refusals: list[str] = field(default_factory=list)  # rules that the recipe meets as a whole
    epsilon: float | None = None  # of the run, if each task is asked once in a round; None: it has no noise
    delta: float = 0.0
    most: str = ""  # whatever the server asks


def explain(folder: Path, recipe: Recipe, schema: Path | None, clients: int | None) -> Explanation:
    """Read the site's rows by the recipe and list what it asks. clients: how many the whole network has."""
    policy, network = Policy.read(folder), bundle_of(folder)[0]["network"]
    text = None if schema is None else schema.read_text(encoding="utf-8")
    digest = digest_of(recipe, text)
    found = Explanation(digest, digest in (*approved(folder), *policy.recipes) or not policy.approve)
    refusals = [str(one) for one in policy.refusals(recipe, network)]
    try:
        prepared, own = _prepared(folder, recipe, schema, policy, clients)
    except (UserError, DataError) as error:
        return replace(found, refusals=[*refusals, f"this site cannot do what the recipe asks of its data: {error}"])
    refusals += [str(one) for one in policy.late_refusals(prepared.recipe, len(prepared.population))]
    program = program_of_run(prepared, simulated=False)
    tasks = tasks_of(prepared.method)
    own_tasks = [*tasks, *([] if prepared.scaling is None else tasks_of(prepared.scaling))]
    asked = [one for task in own_tasks for one in _asked(task, policy, own, program.terms)]
    charges: list[Charge] = []
    for task in tasks:
        for release in task.releases():
            charges += _cost(release, prepared, own) * recipe.rounds
    if prepared.scaling is not None:
        charges += [Charge(prepared.scaling.noise.event(), prepared.scaling.unit)] * PrivateScaling.RELEASES
    spent = Ledger()
    spent.charge([one for one in charges if not one.is_bare])
    epsilon = spent.worst(policy.delta) if recipe.privacy.promises else None
    if epsilon is not None and epsilon > (most := min(policy.epsilon_run, policy.epsilon)):
        refusals.append(f"rule epsilon_run: the whole run costs ε = {epsilon:.4g} here, allowed is {most:g}")
    bound = (
        f"ε = {min(policy.epsilon_run, policy.epsilon):g} at δ = {policy.delta:g} by this site's own count"
        if policy.epsilon_run and policy.epsilon
        else f"{policy.asks * (policy.rounds + 1)} asks"
    )
    return replace(
        found,
        clients=own,
        told=f"{own} clients by number, which have labels, and their rows in multiples of {policy.round_sizes}",
        asked=asked,
        refusals=refusals,
        epsilon=epsilon,
        delta=policy.delta,
        most=f"{bound}, {policy.megabytes} MB and {policy.hours:g} hours in this run, whatever the server asks",
    )


def _prepared(
    folder: Path, recipe: Recipe, schema: Path | None, policy: Policy, clients: int | None
) -> tuple[Prepared, int]:
    """The recipe's method for a network of so many clients, made of copies of this site; and how many are here."""
    local = local_recipe(recipe, data_of(folder), schema)
    population = load_data(local)
    own = len(population)
    names = [f"site-{number}" for number in range(max(1, math.ceil((clients or own) / own)))]
    everybody = join([facts(population, name, policy) for name in names], names, recipe)
    return prepare(local, everybody), own


def _asked(task: Task, policy: Policy, clients: int, terms: Any) -> list[Asked]:
    what = " ".join((task.__doc__ or "").split("\n\n")[0].split())
    releases = [one for one in task.releases() if not isinstance(one, Stays)]
    if not releases:
        if terms.system:  # a run with an ε lets nothing out that has no noise
            return [Asked(task.name, what, "nothing; what it makes is kept at the client", "staying there")]
        allowed = f"no noise; individual arrays leave {TOLD[policy.individual]}, sums {TOLD[policy.sums]}"
        return [Asked(task.name, what, "what the server asks for", allowed)]
    found = []
    for release in releases:
        refused, protected = "", False
        try:
            policy.check_task(task.name, "train")
            protected = policy.check_release(release, clients, terms)
        except Forbidden as refusal:
            refused = str(refusal)
        noise = re.sub(r"\d+\.\d{4,}", lambda long: f"{float(long[0]):.4g}", str(release.noise or release.cost))
        found.append(Asked(task.name, what, str(ReleaseName.of(release)), noise if protected else "no noise", refused))
    return found


def _cost(release: Any, prepared: Prepared, clients: int) -> list[Charge]:
    if release.noise is None and release.cost is None:
        return [] if isinstance(release, Stays) else [Charge(BARE)]
    return charges_of(release, prepared.population.roster(), torch.arange(clients))
