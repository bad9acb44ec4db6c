"""A method of your own, outside the package: FedRep in 60 lines (Collins et al., ICML 2021).

The clients share a representation, and each keeps its own head. Try it:
unalike run examples/my_method.py:FedRep --data digits --partition pathological --rounds 20
"""

from dataclasses import dataclass, field

import torch
from torch import Tensor

import unalike as ua


@dataclass(frozen=True)
class FedRep:
    model: ua.Model
    cohort: int | float = 10
    head: ua.LocalSGD = field(default_factory=lambda: ua.LocalSGD(epochs=5, batch=10, lr=0.05))
    body: ua.LocalSGD = field(default_factory=lambda: ua.LocalSGD(epochs=1, batch=10, lr=0.05))
    serves_unlabeled = False

    def is_head(self) -> Tensor:
        """1 for the parameters of the last layer, which stay at the client; 0 for the shared ones."""
        layer = list(self.model.shapes)[-1].rsplit(".", 1)[0]
        return torch.cat([torch.full((s.numel(),), float(n.startswith(layer))) for n, s in self.model.shapes.items()])

    def only(self, part: Tensor, fixed: Tensor) -> ua.Objective:
        """The loss as a function of some parameters, the others held at ``fixed``."""
        return ua.Supervised(self.model).at(lambda theta: torch.where(part > 0, theta, fixed))

    def mine(self, client: ua.Client, theta: Tensor, head: Tensor) -> Tensor:
        """Train the head on the shared representation, starting from the head the client kept."""
        start = torch.where(head > 0, client.kept.get("theta", theta), theta)
        return self.head(self.only(head, theta), start, client)

    @ua.task
    def fit(self, client: ua.Client, theta: Tensor, head: Tensor) -> ua.Sent:
        mine = self.mine(client, theta, head)
        fitted = self.body(self.only(1 - head, mine), mine, client)
        return ua.send(update=fitted - mine, keep={"theta": mine})

    @ua.task(stays="theta")
    def own(self, client: ua.Client, theta: Tensor, head: Tensor) -> ua.Sent:
        return ua.send(theta=self.mine(client, theta, head))

    def start(self, seed: int) -> ua.State:
        return ua.State(theta=self.model.init(seed))

    def round(self, state: ua.State, federation: ua.Federation) -> ua.State:
        cohort = federation.sample(self.cohort, labeled=True)
        replies = cohort.ask(self.fit, theta=state.theta, head=self.is_head(), into=ua.Mean("update", weight=ua.SIZE))
        return state.replace(theta=state.theta + replies["update"])

    def personalize(self, state: ua.State, cohort: ua.Cohort) -> ua.Models:
        return cohort.ask(self.own, theta=state.theta, head=self.is_head()).held("theta")
