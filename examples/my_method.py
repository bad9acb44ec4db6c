"""A method of your own, outside the package: FedRep in 60 lines (Collins et al., ICML 2021).

The clients share a representation, and each keeps its own head. Try it:
unalike run examples/my_method.py:FedRep --data digits --partition pathological --rounds 20
"""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from unalike import SIZE, Client, Cohort, Federation, LocalSGD, Mean, Model, State, send, task
from unalike.core.federation import Models
from unalike.core.task import Sent
from unalike.learn.objective import Objective, Supervised


@dataclass(frozen=True)
class FedRep:
    model: Model
    cohort: int | float = 10
    head: LocalSGD = field(default_factory=lambda: LocalSGD(epochs=5, batch=10, lr=0.05))
    body: LocalSGD = field(default_factory=lambda: LocalSGD(epochs=1, batch=10, lr=0.05))
    serves_unlabeled = False

    def is_head(self) -> Tensor:
        """1 for the parameters of the last layer, which stay at the client; 0 for the shared ones."""
        layer = list(self.model.shapes)[-1].rsplit(".", 1)[0]
        return torch.cat([torch.full((s.numel(),), float(n.startswith(layer))) for n, s in self.model.shapes.items()])

    def only(self, part: Tensor, fixed: Tensor) -> Objective:
        """The loss as a function of some parameters, the others held at ``fixed``."""
        return Supervised(self.model).at(lambda theta: torch.where(part > 0, theta, fixed))

    def mine(self, client: Client, theta: Tensor, head: Tensor) -> Tensor:
        """Train the head on the shared representation, starting from the head the client kept."""
        start = torch.where(head > 0, client.kept.get("theta", theta), theta)
        return self.head(self.only(head, theta), start, client)

    @task
    def fit(self, client: Client, theta: Tensor, head: Tensor) -> Sent:
        mine = self.mine(client, theta, head)
        fitted = self.body(self.only(1 - head, mine), mine, client)
        return send(update=fitted - mine, keep={"theta": mine})

    @task(stays="theta")
    def own(self, client: Client, theta: Tensor, head: Tensor) -> Sent:
        return send(theta=self.mine(client, theta, head))

    def start(self, seed: int) -> State:
        return State(theta=self.model.init(seed))

    def round(self, state: State, federation: Federation) -> State:
        cohort = federation.sample(self.cohort, labeled=True)
        replies = cohort.ask(self.fit, theta=state.theta, head=self.is_head(), into=Mean("update", weight=SIZE))
        return state.replace(theta=state.theta + replies["update"])

    def personalize(self, state: State, cohort: Cohort) -> Models:
        return cohort.ask(self.own, theta=state.theta, head=self.is_head()).held("theta")
