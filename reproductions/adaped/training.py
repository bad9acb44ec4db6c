"""Training as in P3 §4.1, on MNIST and FEMNIST."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, cast

from reproductions.item import Numbers, Tick
from reproductions.presets import paper_method
from unalike import data
from unalike.core.federation import QuorumError
from unalike.core.method import Method, State, train
from unalike.core.model import Model
from unalike.data.population import Population
from unalike.learn.evaluation import evaluate
from unalike.learn.local import LocalSGD
from unalike.methods.local import Local
from unalike.methods.problem import Problem
from unalike.networks.architectures import build
from unalike.privacy import Gaussian, Poisson, calibrate
from unalike.runs.simulate import simulate

_STEPS: dict[str, Any] = {"steps": 10, "batch": 1 / 60, "weight_decay": 1e-4}
_LAST = LocalSGD(**{**_STEPS, "steps": 60}, lr=0.05)  # an epoch: what a client does with a final model
_NAMES = {"FedAvg + fine-tuning": "fedavg", "Per-FedAvg": "perfedavg"}  # of the table; all others in lower case
_OPEN: dict[str, dict[str, Any]] = {  # what P3 §4.1, and so its preset, leaves open
    "FedAvg + fine-tuning": {"finetune": _LAST},
    "pFedMe": {"inner_lr": 0.1, "personal": _LAST},
}


def method_of(name: str, problem: Problem, cohort: float, local: LocalSGD | None = None, **own: Any) -> Method:
    """A method of Table 1, or FedEM, with the settings of P3 §4.1 and some of its own."""
    if name == "Local":
        return Local(problem.model, local or LocalSGD(**_STEPS, lr=0.1))
    made: Any = paper_method(_NAMES.get(name, name.lower()), problem, {}, "ozkara2022")
    changes = {**_OPEN.get(name, {}), **own, **({} if local is None else {"local": local})}
    return cast(Method, dataclasses.replace(made, cohort=cohort, **changes))


OPEN = {
    "fine-tuning, and pFedMe's personal model": "60 steps (an epoch) at rate .05, about the last rate of training; not "
    "in the paper, fixed before any run",
    "test rows": "MNIST: its own test rows, dealt out as the training rows; FEMNIST: LEAF's test tenth",
    "writers": "FEMNIST: 198 of our 396 writers, three at random in a client; the paper does not say which",
    "Local": "the steps that a client of the other method has, on average, at a constant rate of .1: those of the "
    "rounds in which it is sampled, or of all rounds where clients go on training (Figure 2)",
    "model of a client that was never sampled": "that of a newcomer: an epoch from the common model",
}


@functools.cache
def _population(name: str, seed: int, clients: int, samples: int | None) -> Population:
    if name == "mnist":
        return data.load("mnist", partition="pathological:3", clients=clients, samples=samples, unseen=0, seed=seed)
    return data.load("femnist", task="digits", partition="natural:3", clients=66, unseen=0, seed=seed)


def trained(
    tick: Tick,
    method: str,
    source: str,
    cohort: float,
    rounds: int,
    seed: int,
    epsilon: float | None = None,
    continued: bool = False,
    clients: int = 50,
    samples: int | None = None,
    noisy_steps: str | None = None,
) -> Numbers:
    """Accuracy of every client's own model, and of the common one where there is one.

    ``continued``: clients train in every round, sampled or not. ``clients`` and their ``samples``: of MNIST.
    ``noisy_steps``: AdaPeD clips and noises every local step, as the paper prints it, in place of the change.
    """
    population = _population(source, seed, clients, samples)
    model = Model(build("lenet-5", (1, 28, 28), 10))
    problem = Problem(model, (1, 28, 28), 10, len(population.seen), "image")
    changes: dict[str, Any] = {}
    if epsilon is not None:
        noise = calibrate.noise_multiplier(epsilon, _delta(population), rounds, Poisson(cohort))
        changes = {"clip": 1.0, "noise": Gaussian(noise)}
    if noisy_steps is not None:
        changes["noisy_steps"] = noisy_steps
    if continued:
        changes["train_unsampled"] = True
    if method == "Local" and not continued:
        rounds = round(rounds * cohort)
    made = method_of(method, problem, cohort, **changes)
    federation = simulate(population, seed, threads=1, noise="seeded")
    psi: list[float] = []

    def after(number: int, state: State) -> None:
        if "psi" in state and number % 6 == 0:
            psi.append(float(state.psi))
        tick(number, rounds)

    state = train(made, federation, rounds, after_round=after)
    own = evaluate(made.model, lambda cohort: made.personalize(state, cohort), federation, federation.roster)
    found = {"accuracy": 100 * own.mean, "worst": 100 * float(own.score.nanquantile(0.0)), "psi": psi}
    common = _common(state)
    if common is not None and method != "FedEM":
        shared = evaluate(model, lambda cohort: state[common].expand(len(cohort), -1), federation, federation.roster)
        found["common"] = 100 * shared.mean
    if epsilon is not None:
        found["spent"] = federation.ledger.epsilon(_delta(population))
    return found


def trained_or_diverged(tick: Tick, **settings: Any) -> Numbers:
    """The same; where updates are not finite, as a rate is too high, no answer is right: ``diverged`` says when."""
    try:
        return trained(tick, **settings)
    except QuorumError as error:
        if not error.diverged:
            raise
        return {"accuracy": 0.0, "worst": 0.0, "psi": [], "diverged": error.failures[0].round}


def _common(state: State) -> str | None:
    """The name of the common model in a state."""
    return next((name for name in ("mu", "w", "theta") if name in state), None)


def _delta(population: Population) -> float:
    return float(len(population.seen) ** -1.1)


def flat(numbers: Numbers) -> dict[str, Any]:
    """The numbers as a line of a table."""
    psi = numbers.get("psi") or [None]
    return {**{name: value for name, value in numbers.items() if name != "psi"}, "last psi": psi[-1]}
