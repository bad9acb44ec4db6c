"""Generalization bounds as a diagnostic (T1 Theorems 3, 4 and 8): what each of their terms comes to for a finished run.

Posteriors are Gaussians of variance α around what was learned, so a KL divergence is ‖η − η₀‖²/2α, where η₀ is the mean
of the prior: 0 as in the theorems, or the first values of training, which no client's data have touched either. Losses
are errors (0 or 1). Expectations over the posterior are means over a few draws. For networks of usual sizes the totals
are far above 1 and promise nothing; the terms still show which part of a run is large. For a finished run:

    python -m reproductions.bounds RUN [--json]
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, Protocol, runtime_checkable

import torch
import typer
from rich.table import Table
from torch import Tensor

from unalike.commands.console import say
from unalike.core.federation import Cohort, Models
from unalike.core.method import Describes, DescribesData, Method, State
from unalike.core.model import Model
from unalike.learn.evaluation import evaluate
from unalike.report.analyses.measures import DoesNotApply, descriptors_of
from unalike.runs.errors import UserError
from unalike.runs.finished import FinishedRun
from unalike.runs.simulate import simulate

Prior = Literal["zero", "initial"]
PRIORS: tuple[Prior, ...] = ("zero", "initial")


@runtime_checkable
class LearnsToLearn(Method, DescribesData, Protocol):
    """Makes a model of a descriptor, both by networks that it learned (T1 Theorem 3)."""

    @property
    def hypernet(self) -> Model: ...

    def models(self, state: State, v: Tensor) -> Tensor: ...

    def learned(self) -> Mapping[str, str]:
        """The networks by which newcomers are served: where the state has their parameters, and where it began."""


@runtime_checkable
class LearnsSubspace(Method, Describes, Protocol):
    """Makes v of unlabeled rows by a network, near a learned prior mean (T1 Theorem 4)."""

    @property
    def lift(self) -> Callable[[Tensor], Tensor]: ...

    def v_of(self, psi: Mapping[str, Tensor], r: Tensor) -> Tensor: ...


@dataclass(frozen=True)
class Bound:
    """error ≤ ``empirical`` + ``between`` + ``within`` with probability 1 − δ; 1 or more promises nothing."""

    theorem: str
    prior: Prior
    empirical: float  # on the training rows of those who trained with labels
    between: float  # what is lost from these clients to others
    within: float  # what is lost from a client's rows to its other data
    parts: Mapping[str, float]  # the KL divergences and logarithms under the roots

    @property
    def total(self) -> float:
        return self.empirical + self.between + self.within

    @property
    def vacuous(self) -> bool:
        return self.total >= 1


@dataclass(frozen=True)
class Drawn:
    """One draw from the posterior: the error on training rows, and the KL divergence of all clients' models."""

    empirical: float
    kl_models: float


def divergence(mean: Tensor, prior: Tensor | float, alpha: float) -> float:
    """KL(N(mean, α·Id) ‖ N(prior, α·Id)) = ‖mean − prior‖²/2α."""
    return float((mean.to(torch.float64) - prior).square().sum()) / (2 * alpha)


def learning_to_learn(
    prior: Prior, draws: Sequence[Drawn], kl_networks: float, clients: int, rows: int, delta: float
) -> Bound:
    """T1 Theorem 8 with losses up to 1, which gives Theorem 3 with log(4√n/δ) where that prints log(2√n/δ)."""
    log_clients = math.log(4 * math.sqrt(clients) / delta)
    between = math.sqrt((kl_networks + log_clients) / (2 * clients))
    parts = {"KL of the networks": kl_networks, "log(4√n/δ)": log_clients}
    return _bound("Theorem 8 (3)", prior, draws, between, parts, clients * rows, delta)


def transductive(
    prior: Prior, draws: Sequence[Drawn], kl_networks: float, labeled: int, clients: int, rows: int, delta: float
) -> Bound:
    """T1 Theorem 4, with c₁ = log(2t/δ), t = 3·log(n_L)·√(n_L(1 − n_L/n)), and c₂ = log(8mn/δ) + 1.

    Half of δ for each of its two parts, so 2t/δ where (C.6) prints t/δ. If all clients have labels, there are none to
    generalize to, and the first term is 0. A t below 1, of one or two labeled clients, is taken as 1.
    """
    unlabeled = 1 - labeled / clients
    t = max(1.0, 3 * math.log(labeled) * math.sqrt(labeled * unlabeled))
    log_clients = math.log(2 * t / delta)
    between = math.sqrt(unlabeled * (kl_networks + log_clients) / (2 * labeled))
    parts = {"KL of the networks": kl_networks, "log(2t/δ)": log_clients}
    return _bound("Theorem 4", prior, draws, between, parts, clients * rows, delta)


def _bound(
    theorem: str,
    prior: Prior,
    draws: Sequence[Drawn],
    between: float,
    parts: Mapping[str, float],
    rows: int,
    delta: float,
) -> Bound:
    """With the last term, which both theorems share, over all clients' ``rows`` together."""
    log_rows = math.log(8 * rows / delta) + 1
    within = _mean([math.sqrt((one.kl_models + log_rows) / (2 * rows)) for one in draws])
    kl_models = _mean([one.kl_models for one in draws])
    parts = {**parts, "KL of the models": kl_models, "log(8mn/δ) + 1": log_rows}
    return Bound(theorem, prior, _mean([one.empirical for one in draws]), between, within, parts)


def bounds_of(run: FinishedRun, *, alpha: float = 1e-6, delta: float = 0.05, draws: int = 3) -> list[Bound]:
    """The bounds for a run of PeFLL, ODPFL-HN or FLowDUP, with either prior. Simulation only, as all analyses.

    ``alpha``: the variance of all posteriors and priors. The theorems have m rows at every client; here it is the
    fewest that one has. What PeFLL and ODPFL-HN fix before the first round, the scale of descriptors, is not covered.
    """
    for name, value, most in (("alpha", alpha, math.inf), ("delta", delta, 1.0)):
        if not 0 < value < most:
            raise ValueError(f"{name}={value}; expected a number above 0" + (" and below 1" if most == 1 else ""))
    whole = run.prepared.population
    if whole.classes is None:
        raise DoesNotApply("the theorems bound losses from 0 to 1, such as errors, and here targets are numbers")
    method = run.method
    if isinstance(method, LearnsToLearn):
        return [_learning_to_learn(run, method, prior, alpha, delta, draws) for prior in PRIORS]
    if isinstance(method, LearnsSubspace):
        return [_transductive(run, method, prior, alpha, delta, draws) for prior in PRIORS]
    raise DoesNotApply(f"{run.recipe.method} has no bound here; pefll, odpfl and flowdup have")


def _learning_to_learn(
    run: FinishedRun, method: LearnsToLearn, prior: Prior, alpha: float, delta: float, draws: int
) -> Bound:
    state, before = run.state, method.start(run.recipe.seed)
    places = method.learned()
    firsts: Mapping[str, Any] = {place: before[name] if prior == "initial" else 0.0 for place, name in places.items()}
    kl_networks = sum(divergence(state[place], firsts[place], alpha) for place in places)
    middle: Tensor | float = 0.0  # of the prior of all models: none, or what h first makes of a descriptor of zeros
    if prior == "initial":
        with torch.no_grad():
            middle = method.hypernet(before["hypernet"], torch.zeros(1, len(state["shift"])))[0]
    seen, found = _labeled(run), list[Drawn]()
    for draw in range(draws):
        random = torch.Generator().manual_seed(draw)
        moved = state.replace(**{place: _around(state[place], alpha, random) for place in places})
        spent: list[float] = []

        def models(cohort: Cohort, moved: State = moved, spent: list[float] = spent, by: Any = random) -> Models:
            theta = method.models(moved, method.descriptors(moved, cohort)).detach()
            spent.extend(divergence(one, middle, alpha) for one in theta)
            return _around(theta, alpha, by)

        found.append(Drawn(_error(run, method, seen, models), sum(spent)))
    return learning_to_learn(prior, found, kl_networks, len(seen), _fewest(run, seen), delta)


def _transductive(
    run: FinishedRun, method: LearnsSubspace, prior: Prior, alpha: float, delta: float, draws: int
) -> Bound:
    names = ("h1", "hidden", "last", "bias")
    state, before = run.state, method.start(run.recipe.seed)
    kl_networks = sum(divergence(state[name], before[name] if prior == "initial" else 0.0, alpha) for name in names)
    psi_r = state["prior"]
    kl_prior = divergence(psi_r, 0.0, alpha)  # which is also what it began with
    seen = run.prepared.population.seen
    labeled, found = _labeled(run), list[Drawn]()
    for draw in range(draws):
        random = torch.Generator().manual_seed(draw)
        moved = state.replace(**{name: _around(state[name], alpha, random) for name in names})
        psi = {name: moved[name] for name in names}
        clients = run.prepared.population.train.select(seen)
        r = descriptors_of(method, moved, run.prepared.federation(round=run.round), clients)
        v = torch.stack([method.v_of(psi, one) for one in r])
        # E over ψ_r' of ‖v − ψ_r'‖² is ‖v − ψ_r‖² + kα
        kl = sum(divergence(one, psi_r, alpha) + one.numel() / 2 for one in v) + kl_prior
        place = {int(client): row for row, client in enumerate(clients.ids.tolist())}

        def models(cohort: Cohort, v: Tensor = v, place: Mapping[int, int] = place, by: Any = random) -> Models:
            mine = v[[place[int(client)] for client in cohort.ids]]
            return torch.stack([method.lift(_around(one, alpha, by)) for one in mine])

        found.append(Drawn(_error(run, method, labeled, models), kl))
    return transductive(prior, found, kl_networks, len(labeled), len(seen), _fewest(run, seen), delta)


def _labeled(run: FinishedRun) -> Tensor:
    """Positions of the training clients with labels."""
    population = run.prepared.population
    return population.seen[population.train.labeled[population.seen]]


def _fewest(run: FinishedRun, which: Tensor) -> int:
    return int(run.prepared.population.train.size[which].min())


def _error(run: FinishedRun, method: Method, which: Tensor, models: Callable[[Cohort], Models]) -> float:
    """The mean over clients of the share of their own training rows that their models get wrong."""
    clients = run.prepared.population.train.select(which)
    federation = run.prepared.federation(round=run.round)
    theirs = simulate({"train": clients, "test": clients}, federation.seed, round=run.round)
    return 1 - evaluate(method.model, models, theirs, theirs.roster).mean


def _around(mean: Tensor, alpha: float, random: torch.Generator) -> Tensor:
    """A draw from N(mean, α·Id)."""
    return mean + math.sqrt(alpha) * torch.randn(mean.shape, generator=random, dtype=mean.dtype)


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)


def show(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="The folder of a finished run.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON and nothing else.")] = False,
) -> None:
    """Print the bounds of a run, term by term."""
    finished = FinishedRun.open(run)
    try:
        found = bounds_of(finished)
    except DoesNotApply as error:
        raise UserError(f"the bounds do not apply: {error}") from error
    if as_json:
        typer.echo(json.dumps([asdict(one) | {"total": one.total, "vacuous": one.vacuous} for one in found], indent=2))
        return
    table = Table("prior", "training error", "between clients", "within a client", "total", title_justify="left")
    table.title = f"{finished.recipe.method}, round {finished.round}: {found[0].theorem} of Scott 2026"
    for one in found:
        middle = {"zero": "around 0", "initial": "around the first values"}[one.prior]
        table.add_row(middle, *(f"{value:.4g}" for value in (one.empirical, one.between, one.within, one.total)))
    say(table)
    for one in found:
        parts = ", ".join(f"{name} = {value:.4g}" for name, value in one.parts.items())
        verdict = "1 or more, so it promises nothing" if one.vacuous else "below 1"
        say(f"prior {one.prior}: {parts}. The total is {verdict}.")


app = typer.Typer()
app.command()(show)

if __name__ == "__main__":
    app()
