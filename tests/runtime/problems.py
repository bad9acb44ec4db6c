"""A tiny federation in a file, and methods for it: what a server and the processes of its shards both know."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from unalike import Client, Each, Federation, LocalSGD, Model, State, send, task, train
from unalike.core.client import Clients
from unalike.core.federation import Cohort, Models
from unalike.core.method import Method, ServesUnlabeled
from unalike.core.request import Part, Program
from unalike.core.roster import Roster
from unalike.core.schema import Schema
from unalike.core.task import Sent
from unalike.data.population import Population
from unalike.deploy.program import program_of
from unalike.learn.anderson import Anderson
from unalike.learn.evaluation import evaluate
from unalike.methods import METHODS
from unalike.methods.adaped import AdaPeD
from unalike.methods.fedavg import FedAvg
from unalike.methods.local import Local
from unalike.methods.odpfl import ODPFL
from unalike.methods.pefll import PeFLL
from unalike.methods.problem import Problem
from unalike.methods.rdpcfl import RDPCFL
from unalike.methods.robust_hdp import RobustHDP
from unalike.methods.splitting import Splitting
from unalike.networks.architectures import build
from unalike.privacy import Gaussian
from unalike.privacy.dpsgd import PointPrivacy
from unalike.runs.recipe.hyperparameters import Hyperparameters

TRAIN = [3, 5, 2, 4, 6, 3, 4, 5]
TEST = [2, 1, 2, 0, 3, 2, 1, 2]  # one client has nothing to be tested on
UNLABELED = [2, 6]
SEEN = 7  # the last client is a newcomer
FEATURES, CLASSES = 4, 3
ROUNDS = 3  # what is kept is read twice


def write(file: Path) -> None:
    """All clients' rows, which only shards read."""
    random = np.random.default_rng(0)
    rows = sum(TRAIN) + sum(TEST)
    x = random.standard_normal((rows, FEATURES)).astype(np.float32)
    y = (x[:, 0] > 0).astype(np.int64) + (x[:, 1] > 0.5)
    np.savez(file, x=x, y=y)


def read(file: Path) -> Population:
    loaded = np.load(file)
    x, y = torch.from_numpy(loaded["x"]), torch.from_numpy(loaded["y"])
    order = torch.arange(len(TRAIN))
    labeled = torch.tensor([client not in UNLABELED for client in order.tolist()])
    sizes = torch.tensor([TRAIN, [0] * len(TRAIN), TEST])
    ends = torch.cumsum(sizes.T.reshape(-1), 0).reshape(-1, 3).T
    parts = [Clients(x, y, ends[i] - sizes[i], sizes[i], labeled, order) for i in range(3)]
    parts[2] = replace(parts[2], labeled=torch.ones_like(labeled))
    return Population("tiny", "features", *parts, order[:SEEN], order[SEEN:], classes=CLASSES)


def stored(file: Path, _: str) -> tuple[Mapping[Part, Clients], Roster]:
    """The rows of any method's clients."""
    population = read(file)
    return population.parts, population.roster()


def program(name: str, schema: Schema) -> Program:
    return program_of(method_of(name), schema)


MODEL = Model(build("mlp", (FEATURES,), CLASSES, hidden=(5,)))
PROBLEM = Problem(MODEL, (FEATURES,), CLASSES, SEEN)
STEPS = LocalSGD(steps=2, batch=3, lr=0.1)
NOISY = replace(STEPS, private=PointPrivacy(0.5, 1.0))
ALL: dict[str, Any] = {"cohort": 4, "local": LocalSGD(epochs=1, batch=3, lr=0.1)}
CHANGES: dict[str, dict[str, Any]] = {
    "fedavg-finetune": {"finetune": STEPS},
    "fedrep": {"local_head": STEPS, "newcomer": STEPS},
    "pfedme": {"personal": STEPS},
    "rdpcfl": {"rounds": ROUNDS},
    "ifca": {"clusters": 2, "rounds": ROUNDS},
    "knnper": {"rows": 8, "neighbours": (1, 2)},
    "pfedhn": {"newcomer_rounds": 2},
    "odpfl": {"size": "S"},
    "flowdup": {"cohort": 5, "labeled_share": 0.6, "dimension": 6, "features": 4, "width": 3},
    "ld-fedavg": {"dimension": 6},
}
VARIANTS: dict[str, Callable[[], Method]] = {
    "fedavg, client-level noise": lambda: FedAvg(MODEL, **ALL, clip=0.05, noise=Gaussian(0.5)),
    "fedavg, point-level noise": lambda: FedAvg(MODEL, 4, NOISY, clip=0.05),
    "robust-hdp, point-level noise": lambda: RobustHDP(MODEL, 4, NOISY, rows=9),
    "rdpcfl, point-level noise": lambda: RDPCFL(MODEL, 5, NOISY, clusters=2, rounds=3),
    "fedavg, secure": lambda: FedAvg(MODEL, **ALL, clip=0.05, secure=True),
    "fedavg, secure and noisy": lambda: FedAvg(MODEL, 1.0, STEPS, clip=0.05, noise=Gaussian(0.5), secure=True),
    "adaped, client-level noise": lambda: AdaPeD(MODEL, **ALL, clip=1e-3, noise=Gaussian(0.5)),
    "fedprox, adaptive": lambda: Splitting(MODEL, **ALL, mu=1.0, mu_step=0.1, absentees="left-out"),
    "fedpi, client-level noise": lambda: Splitting(MODEL, 2, 2, 0.5, **ALL, clip=0.05, noise=Gaussian(0.5)),
    "fedsplit, secure": lambda: Splitting(MODEL, 2, 2, **ALL, clip=0.05, secure=True),
    "fedpi, accelerated": lambda: Splitting(MODEL, 2, 2, 0.5, **ALL, warm="last", anderson=Anderson(1, "gram")),
    "pefll, masked labels": lambda: PeFLL(PROBLEM, **ALL, mask_labels=True),
    "odpfl, two phases": lambda: ODPFL(PROBLEM, **ALL, size="S", two_phase=2, rows=4),
    "odpfl, private newcomers": lambda: ODPFL(PROBLEM, **ALL, size="S", encoder="sphere", newcomer_epsilon=1.0),
}
_PROTECTED = ", secure and noisy"
# every other method that can: its noise under masks
PROTECTED = [
    f"{name}{_PROTECTED}"
    for name, entry in METHODS.items()
    if {"noise", "secure"} <= {one.name for one in dataclasses.fields(entry.cls)}
    and entry.cls not in (FedAvg, Splitting)
]


def method_of(name: str) -> Method:
    """A method by the name it has in ``METHODS``, or one of the variants here, in a size that takes no time."""
    if name in VARIANTS:
        return VARIANTS[name]()
    if name in BAD:
        return BAD[name]()
    if name.endswith(_PROTECTED):
        plain: Any = method_of(name.removesuffix(_PROTECTED))
        protected: Method = replace(plain, cohort=1.0, clip=0.05, noise=Gaussian(0.5), secure=True)
        return protected
    entry = METHODS[name]
    usual = Hyperparameters.of(name).defaults
    known = {one.name for one in dataclasses.fields(entry.cls)}
    given = {"model": MODEL, "problem": PROBLEM, **ALL}
    fields = {**usual, **{k: v for k, v in given.items() if k in known}, **CHANGES.get(name, {})}
    method: Method = entry.cls(**fields)
    return method


def served(method: Method, roster: Roster) -> Roster:
    """The clients that the method can serve."""
    unlabeled = isinstance(method, ServesUnlabeled) and method.serves_unlabeled
    return roster if unlabeled else roster.select(roster.labeled.nonzero().flatten())


def outcome(method: Method, federation: Federation) -> dict[str, Tensor]:
    """All that a server has in the end: its state, and how good the models of seen and unseen clients are."""
    state = train(method, federation, ROUNDS)
    roster = served(method, federation.runtime.roster)
    scores = evaluate(method.model, lambda cohort: method.personalize(state, cohort), federation, roster)
    return {**state, "score of each": scores.score, "loss of each": scores.loss}


# Methods that do what no method may


@dataclass(frozen=True)
class Reads(FedAvg):
    """Its server looks at rows."""

    def round(self, state: State, federation: Federation) -> State:
        rows = federation.runtime.shards[0].parts["train"].x  # type: ignore[attr-defined]
        return super().round(state.replace(theta=state.theta + rows.mean()), federation)


@dataclass(frozen=True)
class Sends(FedAvg):
    """Its clients send rows."""

    @task
    def first(self, client: Client) -> Sent:
        return send(row=client.x[0])

    def round(self, state: State, federation: Federation) -> State:
        federation.sample(4, labeled=True).ask(self.first)
        return super().round(state, federation)


@dataclass(frozen=True)
class Brings(Local):
    """Its clients' own models come to the server."""

    @task
    def show(self, client: Client) -> Sent:
        return send(theta=client.kept.get("theta", self.first))

    def personalize(self, state: State, cohort: Cohort) -> Models:
        super().personalize(state, cohort)
        return cohort.ask(self.show, into=Each("theta"))["theta"]


BAD: dict[str, Callable[[], Method]] = {
    "reads": lambda: Reads(MODEL, **ALL),
    "sends": lambda: Sends(MODEL, **ALL),
    "brings": lambda: Brings(MODEL, ALL["local"]),
}
