"""Ditto in 25 lines, with nothing but ``import unalike as ua`` (Li et al., ICML 2021, Algorithm 1).

Clients train a common model w and, beside it, a model v of their own that λ/2·‖v − w‖² holds near w.
"""

from dataclasses import dataclass

import unalike as ua


@dataclass(frozen=True)
class Ditto:
    model: ua.Model
    cohort: int | float = 10
    strength: float = 1.0  # λ
    local: ua.LocalSGD = ua.LocalSGD(epochs=1, batch=10, lr=0.05)
    serves_unlabeled = True

    @ua.task
    def fit(self, client, w):
        fitted = self.local(self.model, w, client)
        near_w = ua.penalised(ua.Supervised(self.model), lambda v: self.strength / 2 * (v - w).square().sum())
        v = self.local(near_w, client.kept.get("v", w), client)
        return ua.send(update=fitted - w, keep={"v": v})

    @ua.task(stays="v")
    def own(self, client, w):  # a client that never trained, a newcomer say, has w
        return ua.send(v=client.kept.get("v", w))

    def start(self, seed):
        return ua.State(w=self.model.init(seed))

    def round(self, state, federation):
        cohort = federation.sample(self.cohort, labeled=True)
        replies = cohort.ask(self.fit, w=state.w, into=ua.Mean("update", weight=ua.SIZE))
        return state.replace(w=state.w + replies["update"])

    def personalize(self, state, cohort):
        return cohort.ask(self.own, w=state.w).held("v")


if __name__ == "__main__":
    clients = ua.data.load("digits", partition="pathological", clients=40, unseen=0.25, seed=0)
    federation = ua.simulate(clients, seed=0)
    method = Ditto(ua.Model.named("mlp", clients))
    state = ua.train(method, federation, rounds=20)
    print(ua.evaluate(method, state, clients, federation=federation))
