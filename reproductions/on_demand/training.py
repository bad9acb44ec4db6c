"""A method by its name with its paper's settings, trained on CIFAR-10 and scored on training clients and newcomers."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any, cast

from torch import Tensor

from reproductions.item import Numbers, Tick, Work
from reproductions.presets import paper_method
from unalike import data
from unalike.core.federation import Federation
from unalike.core.method import Method, State, train
from unalike.core.model import Model
from unalike.data.population import Population
from unalike.learn.evaluation import evaluate
from unalike.methods.problem import Problem
from unalike.networks.architectures import build
from unalike.report.figures.parts import sample_evenly
from unalike.runs.simulate import simulate

SCORED = 20  # training clients that a scaled run scores: some methods train a model for each of them


def size(work: Work) -> dict[str, Any]:
    """LeNet, all rows and ten newcomers of 100 clients as in the papers, or less."""
    network = work.choose("network", "LeNet", "an MLP of 49,338 parameters")
    rows = work.choose("rows of a client to train on", 500, 150)
    newcomers = work.choose("newcomers of 100 clients", "10", "20 newcomers")
    small = {"samples": 180, "newcomers": 20, "hidden": 16}  # so that hundreds of rounds take minutes
    return {} if (network, rows, newcomers) == ("LeNet", 500, "10") else small


@functools.cache
def cifar(partition: str, seed: int, samples: int | None, newcomers: int) -> Population:
    """100 clients of whom the last ones are unseen; test rows are CIFAR-10's own."""
    unseen = range(100 - newcomers, 100)
    return data.load("cifar-10", partition=partition, clients=100, samples=samples, unseen=unseen, seed=seed)


def trained(
    tick: Tick,
    method: str,
    partition: str,
    rounds: int,
    seed: int,
    scored: int | None = None,
    unlabeled: bool = False,
    changes: Mapping[str, Any] | None = None,
    choices: Sequence[str] = (),
    samples: int | None = None,
    newcomers: int = 10,
    hidden: int | None = None,
) -> Numbers:
    """Accuracies (%) of training clients and of newcomers, and each newcomer's.

    ``scored``: so many training clients; 0: none. ``unlabeled``: newcomers show no labels. ``choices``: of a method
    that lends models, newcomers' accuracies for each choice after the same training. ``hidden``: an MLP so wide.
    """
    population = cifar(partition, seed, samples, newcomers)
    options: dict[str, Any] = {"name": "mlp", "hidden": (hidden,)} if hidden else {"name": "lenet"}
    model = Model(build(input_shape=(3, 32, 32), classes=10, **options))
    made = paper_method(method, Problem(model, (3, 32, 32), 10, len(population.seen), "image"), changes or {})
    federation = simulate(population, seed, threads=1)
    state = train(made, federation, rounds, after_round=lambda number, _: tick(number, rounds))
    variants = {choice: dataclasses.replace(cast(Any, made), choice=choice) for choice in choices} or {"": made}
    found: Numbers = {}
    for choice, variant in variants.items():
        score = functools.partial(scores, variant, state, federation)
        prefix = f"{choice}: " if choice else ""
        unseen = score(population.unseen, labels=not unlabeled)
        found[f"{prefix}unseen"] = float(unseen.mean())
        found[f"{prefix}each unseen"] = unseen.tolist()
        if scored != 0:
            some = sample_evenly(range(len(population.seen)), scored or len(population.seen))
            found[f"{prefix}seen"] = float(score(population.seen[some], labels=True).mean())
    return found


def scores(method: Method, state: State, federation: Federation, which: Tensor, *, labels: bool) -> Tensor:
    """[clients] the accuracy of each of these clients (%)."""
    roster = federation.runtime.roster.select(which)
    personalize = functools.partial(method.personalize, state)
    return 100 * evaluate(method.model, personalize, federation, roster, labels=labels).score.nan_to_num(nan=0.0)
