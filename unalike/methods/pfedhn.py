"""pFedHN: a hypernetwork with a learned descriptor for every training client (Shamsian et al., ICML 2021; T1 B.1.2)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from unalike.core.checks import at_least
from unalike.core.draws import Draws, key
from unalike.core.vocabulary import Client, Cohort, Federation, Sent, State, send, task
from unalike.learn.server import ServerOptimizer
from unalike.methods import Presets
from unalike.methods.generated import GeneratedModels
from unalike.networks.hypernet import generate

_TABLE, _NEWCOMERS = 1, 2  # domains of the seed


@dataclass(frozen=True)
class PFedHN(GeneratedModels):
    """θ_i = h(v_i) with v_i learned by the server beside h, so a newcomer must have its own optimised over rounds.

    In a round only the v_i of clients that answered move, with any server optimizer: the others' v and moments rest (an
    adaptive optimizer corrects its bias by the rounds of all). A training client that never answered has a random v.

    - ``descriptor_lr``: the step of the v_i.
    - ``newcomer_rounds``: exchanges in which a newcomer's v, random at first, is optimised with h fixed, by
      ``newcomer_lr``; an evaluation of unseen clients takes as long, so evaluate seldom.
    - ``weight_decay``: of h and v, added to their gradients.

    The defaults are PeFLL's, for comparisons with it; the cohort of ``--preset paper`` stays 5 where the authors take
    one client a step.
    """

    descriptor_lr: float = 1e-2
    newcomer_rounds: int = 20
    newcomer_lr: float = 0.1
    weight_decay: float = 0.0
    presets: ClassVar[Presets] = {
        "paper": {  # the defaults of the authors' code
            "layers": 4,
            "initial": "pytorch",
            "server": {"kind": "momentum", "lr": 1e-2, "beta1": 0.9, "warmup": 1},
            "descriptor_lr": 1e-2,
            "lambda_h": 0.0,
            "weight_decay": 1e-3,
            "local": {"steps": 50, "epochs": "none", "batch": 64, "lr": 5e-3, "momentum": 0.9, "clip": 50.0},
        }
    }
    not_client_private: ClassVar[str] = "the server learns a descriptor of each client by that client's own update"
    serves_unlabeled: ClassVar[bool] = False  # a newcomer's descriptor is learned from its labels

    def __post_init__(self) -> None:
        at_least(self, newcomer_rounds=0)
        _ = self.hypernet

    @task
    def fit(self, client: Client, theta: Tensor) -> Sent:
        """Local SGD from the generated model; sends Δθ."""
        fitted, loss = self.local.train(self.model, theta, client)
        return send(update=fitted - theta, loss=loss)

    def start(self, seed: int) -> State:
        table = Draws(key(seed, _TABLE)).normal(self.problem.clients, self.length)
        state = State(hypernet=self.first_hypernet(seed), descriptors=table, **no_ids(self.problem.clients))
        return self.server.begin(state, "hypernet", "descriptors")

    def round(self, state: State, federation: Federation) -> State:
        return self.step(state, federation)[0]

    def step(self, state: State, federation: Federation) -> tuple[State, Cohort]:
        """A round, and those of its cohort who answered."""
        state = with_ids(state, federation)
        cohort = federation.sample(self.cohort, labeled=True)
        rows, _ = rows_of(state, cohort)
        v = state.descriptors[rows]
        g_h, g_v, fitted = self.exchange(state, cohort, v, self.fit)
        federation.report(loss=fitted["loss"])
        g_table = torch.zeros_like(state.descriptors).index_copy_(0, rows, g_v)
        gradients = {"hypernet": g_h, "descriptors": g_table}
        decay, rates = {"hypernet": self.lambda_h}, {"descriptors": self.descriptor_lr}
        after = self.descend(state, gradients, decay, rates, weight_decay=self.weight_decay)
        return only_rows(rows[fitted.answered], state, after), cohort.only(fitted.answered)

    def personalize(self, state: State, cohort: Cohort) -> Tensor:
        return generate(self.hypernet, state.hypernet, self.descriptors(state, cohort))

    def descriptors(self, state: State, cohort: Cohort) -> Tensor:
        """The clients' descriptors [C, l]: learned in training, or optimised now for a newcomer."""
        rows, known = rows_of(state, cohort)
        v = state.descriptors[rows].clone()
        new = (~known).nonzero().flatten()
        if len(new):
            v[new] = self._new_descriptors(state, cohort.only(new))
        return v

    def _new_descriptors(self, state: State, cohort: Cohort) -> Tensor:
        """v of newcomers: random, then moved by the same exchange as in training, h unchanged (T1 B.1.2)."""
        keys = key(cohort.federation.seed, _NEWCOMERS, cohort.ids)
        v = torch.stack([Draws(one).normal(self.length) for one in keys])
        optimizer = ServerOptimizer("adam", lr=self.newcomer_lr)
        moments = optimizer.start(v)
        for _ in range(self.newcomer_rounds):
            _, g_v, _ = self.exchange(state, cohort, v, self.fit)
            v, moments = optimizer.step(v, -g_v, moments)
        return v


# A table with a row for every training client, found by the client's id


def no_ids(clients: int) -> dict[str, Tensor]:
    """State for a table whose clients are not known yet."""
    return {"ids": torch.full((clients,), -1)}


def with_ids(state: State, federation: Federation) -> State:
    """The state with the federation's client ids as the table's rows; they are set once, in the first round."""
    ids = federation.roster.ids
    if bool((state.ids >= 0).any()):
        return state
    if len(ids) != len(state.ids):
        raise ValueError(
            f"the method was built for {len(state.ids)} training clients, but the federation has {len(ids)}; "
            "give the problem the right number"
        )
    return state.replace(ids=ids.clone())


def rows_of(state: State, cohort: Cohort) -> tuple[Tensor, Tensor]:
    """The table's row of each client of the cohort (0 for a newcomer), and whether the client has one."""
    ids = cohort.ids
    same = ids[:, None] == state.ids
    return same.to(torch.int64).argmax(1), same.any(1)


def only_rows(rows: Tensor, before: State, after: State) -> State:
    """``after`` in these rows of the descriptors and of their moments, and ``before`` in all others."""
    names = [name for name in after if name.startswith("server.descriptors.") and after[name].ndim == 2]
    return after.replace(
        **{name: before[name].index_copy(0, rows, after[name][rows]) for name in ("descriptors", *names)}
    )
