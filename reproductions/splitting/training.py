"""What the figures of T2 chapter 2 have in common: its two convex problems, its methods, and runs of them.

The document's appendix with the settings is lost. Those below are its author's as far as they are known: least squares
with 25 clients of 5000 rows, d = 100, losses that are sums, 605 rounds; logistic regression with 10 clients of 1000
rows, d = 100, a ridge of ‖θ‖²/2mn, 805 rounds.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch

from reproductions.item import Numbers, Tick, Work
from reproductions.splitting.points_at_server import PointsAtServer
from unalike.core.client import Clients
from unalike.core.federation import Federation
from unalike.core.method import State, train
from unalike.core.model import Model
from unalike.data import load
from unalike.data.population import Population
from unalike.learn.evaluation import Scorer, evaluate
from unalike.learn.optimum import Optimum
from unalike.methods.splitting import Splitting
from unalike.networks import architectures
from unalike.runs.recipe.hyperparameters import Hyperparameters, method_named
from unalike.runs.simulate import simulate

LEAST_SQUARES, LOGISTIC = "least-squares", "logistic-regression"
ROUNDS = 605
SEEDS = (0, 1, 2)  # of the least squares


def logistic_rounds(work: Work) -> int:
    """The author has 805."""
    return work.choose("rounds of logistic regression", 805, 150)


_RIDGE = 1e-4  # 1/mn, at each of the ten clients of the logistic regression
_CURVATURE = 500.0  # more than λ_max of a client's Hessian, n·(1 + √(d/n))²/4 = 433
METHODS = {"FedProx": "fedprox", "FedSplit": "fedsplit", "FedPi": "fedpi", "FedRP": "fedrp"}
CHOSEN_HERE = {
    "rows": "a least-squares client's rows [A b] are replaced by the triangle of their QR decomposition: the same f_i",
    "seeds": "each has data of its own; logistic regression, which takes ten times as long, has seed 0 alone",
}
CHOSEN = {
    **CHOSEN_HERE,
    "local solver of the logistic regression": "20 gradient steps of rate 1/(500 + 1/η), where 500 is more than λ_max, "
    "from z̄; the document does not say how it solves for P_i. Least squares are solved exactly",
}


def scheme(name: str, problem: str, eta: float, **more: Any) -> dict[str, Any]:
    """A member of the scheme with proximal maps, on a convex problem where everybody takes part in every round."""
    hyperparameters: dict[str, Any] = {"cohort": 1.0, "losses": "sum", "eta": eta, **more}
    if problem == LOGISTIC:
        local = {"steps": 20, "batch": "none", "lr": 1 / (_CURVATURE + 1 / eta), "weight_decay": _RIDGE}
        hyperparameters["local"] = local | more.get("local", {})
    return {"method": METHODS[name], "hyperparameters": hyperparameters}


def fedavg(problem: str, k: int, eta: float, **more: Any) -> dict[str, Any]:
    """FedAvg as the member (1, 1, 1) with k gradient steps of size η in the place of the proximal map."""
    local = {"steps": k, "batch": "none", "lr": eta, **({"weight_decay": _RIDGE} if problem == LOGISTIC else {})}
    hyperparameters = {"cohort": 1.0, "losses": "sum", "step": "gradient", **more}
    return {"method": "splitting", "hyperparameters": {**hyperparameters, "local": local | more.get("local", {})}}


def usual(label: str, problem: str, eta: float, **more: Any) -> dict[str, Any]:
    """Any of the five methods; FedAvg with five steps of a size of its own."""
    if label == "FedAvg":
        return fedavg(problem, 5, 1e-5 if problem == LEAST_SQUARES else 3e-3, **more)
    return scheme(label, problem, eta, **more)


@lru_cache(maxsize=3)  # several methods are run on one problem after another
def solved(problem: str, seed: int, options: str = "", raw: bool = False) -> tuple[Population | Clients, Optimum]:
    """The clients of a convex problem, and where it is least.

    Unless they are to be ``raw``, a least-squares client's rows [A b] are replaced by the triangle R of their QR
    decomposition. ‖Rx‖ = ‖[A b]x‖ for every x, so f_i is the same function; it has 101 rows in the place of 5000.
    """
    population = load(f"{problem}:{options}" if options else problem, seed=seed, test=0.0, unseen=0.0)
    clients: Population | Clients = population
    if problem == LEAST_SQUARES and not raw:
        clients = _triangles(population.train)
    federation = simulate(clients, seed, block=len(population), threads=1)
    ridge = _RIDGE * len(population) if problem == LOGISTIC else 0.0
    return clients, Optimum.find(federation, math.prod(federation.roster.schema.shape), ridge)


def _triangles(clients: Clients) -> Clients:
    made = []
    for position in range(len(clients)):
        x, y = clients.rows(position)
        assert y is not None
        made.append(torch.linalg.qr(torch.cat([x, y[:, None]], 1).to(torch.float64), mode="r").R)
    rows = torch.cat(made)
    return Clients.from_sizes(rows[:, :-1].contiguous(), rows[:, -1].contiguous(), torch.tensor([len(r) for r in made]))


def convex(
    tick: Tick,
    problem: str,
    method: str,
    hyperparameters: dict[str, Any],
    rounds: int,
    seed: int,
    options: str = "",
    raw: bool = False,
) -> Numbers:
    """Train and measure the gap to the optimum after every round, of z̄ and of the ergodic average where there is one.

    ``options`` of the data, such as ``noise=2``. ``raw``: with the rows as they are, for mini-batches.
    """
    clients, optimum = solved(problem, seed, options, raw)
    federation = simulate(clients, seed, block=len(clients), threads=1)
    learner = made(method, hyperparameters, federation, "linear")
    gaps: list[float] = []
    averages: list[float] = []

    def after(number: int, state: State) -> None:
        gaps.append(optimum.gap(state.theta, federation))
        if "average" in state:
            averages.append(optimum.gap(state.average, federation))
        tick(number, rounds)

    train(learner, federation, rounds, after_round=after)
    return {"gaps": gaps, "averages": averages, "heterogeneity": optimum.heterogeneity}


def network(
    tick: Tick,
    data: str,
    partition: str,
    clients: int,
    samples: int,
    model: str,
    method: str,
    hyperparameters: dict[str, Any],
    rounds: int,
    seed: int,
) -> Numbers:
    """Train a network and measure the loss of z̄ on all training rows after every round; at the end its test accuracy.

    A run that diverges ends there: its loss is infinite from then on.
    """
    population = load(data, partition=partition, clients=clients, samples=samples, test=0.2, unseen=0.0, seed=seed)
    federation = simulate(population, seed, threads=1)
    learner = made(method, hyperparameters, federation, model)
    scorer, roster = Scorer(learner.model), federation.roster
    losses: list[float] = []

    def after(number: int, state: State) -> None:
        with federation.aside() as aside:
            replies = aside.everyone().ask(scorer.score, theta=state.theta)
            weights = replies["rows"] / replies["rows"].sum()
            losses.append(float((weights * replies["loss"]).sum()))
        tick(number, rounds)

    state = learner.start(seed)
    for _ in range(rounds):
        try:
            state = train(learner, federation, 1, state, after)
        except (RuntimeError, ValueError) as error:
            lost = [math.inf] * (rounds - len(losses))
            return {"loss": losses + lost, "accuracy": None, "diverged": f"{type(error).__name__}: {error}"}
    scores = evaluate(learner.model, lambda cohort: learner.personalize(state, cohort), federation, roster)
    return {"loss": losses, "accuracy": scores.mean, "diverged": ""}


def made(method: str, hyperparameters: dict[str, Any], federation: Federation, model: str) -> Splitting:
    """The method as a recipe with these hyperparameters makes it; accelerated points of clients lie at the server."""
    schema = federation.roster.schema
    network = Model(architectures.build(model, schema.shape, schema.outputs, schema.kind))
    learner = method_named(method).cls(model=network, **Hyperparameters.of(method).read(hyperparameters))
    assert isinstance(learner, Splitting)
    return PointsAtServer.of(learner) if learner.anderson.memory and learner.beta != 1 else learner


def rounds_to(gaps: Sequence[float], target: float) -> int:
    """The first round whose gap is at most ``target``; one more than there are if none is."""
    return next((number for number, gap in enumerate(gaps, 1) if gap <= target), len(gaps) + 1)


def worst_step(values: Sequence[float]) -> float:
    """The largest ratio of a value to the one before it: below 1 where they fall."""
    tensor = torch.tensor(values, dtype=torch.float64)
    return float((tensor[1:] / tensor[:-1]).max())


def records(problem: str, line: str, seed: int, found: Numbers) -> list[dict[str, Any]]:
    """A run as rows of a table."""
    averages = found.get("averages") or [None] * len(found["gaps"])
    return [
        {"problem": problem, "line": line, "seed": seed, "round": number, "gap": gap, "average": average}
        for number, (gap, average) in enumerate(zip(found["gaps"], averages, strict=True), 1)
    ]
