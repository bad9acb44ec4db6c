"""R-DPCFL: clusters of clients, found from updates that each client has made private (T2 chapter 4, Algorithm 2).

Symbols: M clusters with models θ_m, E rounds, K local epochs, z_i the noise of client i, b¹ and b^{>1} the batch sizes
of the first and of later rounds, π_i the probabilities of its clusters, R(i) its cluster, MSS and MPO the separation
and the overlap of a Gaussian mixture (§4.5.5). IFCA: Ghosh et al., NeurIPS 2020.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import ClassVar, Literal

import torch
from torch import Tensor
from torch.func import vmap

from unalike.core.checks import at_least, one_of
from unalike.core.release import Each, Release
from unalike.core.roster import Declarations
from unalike.core.vocabulary import Client, Cohort, Federation, Model, Models, Sent, State, each, send, task
from unalike.learn.local import LocalSGD
from unalike.learn.objective import loss_of
from unalike.learn.schedules import Schedule
from unalike.methods import Presets
from unalike.methods.averaging import ONE_PASS
from unalike.methods.mixture import COMPONENTS, mixture_of
from unalike.methods.phased_budget import PhasedBudget
from unalike.privacy.mechanisms import Exponential

Clustering = Literal["mixture", "selection", "known", "one", "each"]


@dataclass(frozen=True)
class RDPCFL:
    """A model for each cluster of clients; what a client sends is private by DP-SGD (``local.private``).

    - ``clustering``: how clients get a cluster.
      mixture (R-DPCFL): in the first round all clients train θ_init with full batches, and a Gaussian mixture of their
      updates gives π. Until round Ec = ⌊(1 − MPO)·E/2⌋ a client's cluster is drawn from π_i in every round. Then the
      client selects it itself, and then keeps it.
      selection (IFCA): models start unlike each other, and clients select from the first round on.
      known: ``known`` has the cluster of each client of the roster. one: a single model. each: a model for each client.
    - ``selection_rounds``: in how many rounds clients select; E is until the last one (Algorithm 2, lines 18-21).
      None: E/10, and for IFCA without an ε all rounds.
    - ``selection``: the ε of one selection, as a share of the client's own ε (with a fixed noise multiplier: that ε
      itself). z_i pays for first and later rounds and for the selections together.
    - ``clusters``: M; None: the M from 2 to ``most_clusters`` with the largest MSS.
    - ``rounds``: E, which a recipe fills in.
    - ``first_batch``: b¹; None: all of a client's samples, which leaves the least noise in first updates.

    A client without an ε selects the model with the least loss, argmin f_i, as printed. With an ε it selects by the
    exponential mechanism, which needs scores with a bound: how many of its samples each model gets right, or, where
    targets are numbers, for how many of them each model has the least loss. One point moves such a count by 1.

    Neighbours: one point is added or removed, N̄ is public. A newcomer selects by its own labels in the same way,
    without noise; that choice does not leave it.
    """

    model: Model
    cohort: int | float = 1.0
    local: LocalSGD = ONE_PASS
    clustering: Clustering = "mixture"
    clusters: int | None = None
    most_clusters: int = 6
    rounds: int = 50
    selection_rounds: int | None = None
    first_batch: int | None = None
    selection: float = 0.03
    known: tuple[int, ...] = ()
    schedule: Schedule = field(default_factory=Schedule)
    point_private: ClassVar[Literal[True]] = True
    presets: ClassVar[Presets] = {
        "paper": {  # T2 §4.5.2 and Figures 4.3 to 4.5: K, b^{>1}, c and δ
            "local": {"epochs": 1, "batch": 32},
            "privacy": {"clip": 3.0, "delta": 1e-4},
        }
    }
    serves_unlabeled: ClassVar[bool] = False
    asks_unlabeled: ClassVar[bool] = False
    not_client_private: ClassVar[str] = (
        "clients are put into clusters by their own updates, which the server sees by themselves"
    )

    def __post_init__(self) -> None:
        one_of(self, "clustering")
        if self.clustering == "selection" and self.clusters is None:
            raise ValueError("selection (IFCA) begins with M models: give clusters")
        if self.clustering == "selection" and (self.clusters or 1) > 1 and self.model.drawn is not None:
            raise ValueError(
                "selection (IFCA) begins with models that answer differently, and every adapter begins as the network "
                "that it adapts, so that all clients would choose the same; use rdpcfl or fedem"
            )
        at_least(self, clusters=1, most_clusters=2, rounds=1, selection_rounds=1)
        if not 0 < self.selection <= 1:
            raise ValueError(f"selection={self.selection}; expected a share above 0, up to 1")
        _ = self.first_local

    @cached_property
    def first_local(self) -> LocalSGD:
        """Training in the first round, with batches of b¹."""
        private = self.local.private
        private = None if private is None else replace(private, batches=None)
        return replace(self.local, batch=self.first_batch, private=private)

    @property
    def selections(self) -> int:
        """The most rounds in which a client selects its cluster."""
        if self.clustering not in ("mixture", "selection"):
            return 0
        wanted = self.selection_rounds
        if wanted is None:
            every = self.clustering == "selection" and self.local.private is None
            wanted = self.rounds if every else max(1, self.rounds // 10)
        return min(wanted, max(1, self.rounds - (self.clustering == "mixture")))

    @cached_property
    def budget(self) -> PhasedBudget:
        """z_i of each client, which pays for first and later rounds and for the selections together (line 3)."""
        first = self.first_local if self.clustering == "mixture" else None
        return PhasedBudget(first, self.local, self.rounds, self.selections, self.selection)

    # At a client

    @task
    def fit_first(self, client: Client, theta: Tensor, noise: Tensor | None = None) -> Sent:
        """Δθ_i¹: K epochs of DP-SGD with batches of b¹, all samples by default (line 7)."""
        return send(update=self.first_local(self.model, theta, client, noise=noise) - theta)

    @fit_first.into
    def first_update(self) -> list[Release]:
        return [Each("update", cost=None if self.local.private is None else self.budget.first_cost)]

    @fit_first.derive
    def first_noise(self, declared: Declarations) -> dict[str, Tensor]:
        """z_i, from what the client declares."""
        return {} if self.local.private is None else {"noise": self.budget.multipliers(declared)}

    @task
    def fit(self, client: Client, theta: Tensor, rate: Tensor, **private: Tensor) -> Sent:
        """Δθ_i^e: K epochs of DP-SGD with small batches from the model of the client's cluster (line 23)."""
        return send(update=self.local(self.model, theta, client, rate=rate, **private) - theta)

    @fit.into
    def each_update(self) -> list[Release]:
        return [Each("update", cost=None if self.local.private is None else self.budget.later_cost)]

    @fit.derive
    def privacy_inputs(self, declared: Declarations) -> dict[str, Tensor]:
        """z_i, and b_i where clients declare their own."""
        found, private = dict(self.first_noise(declared)), self.local.private
        if private is not None and private.batches is not None and declared.batch is not None:
            found["batch"] = declared.batch
        return found

    def scores(self, client: Client, models: Tensor) -> Tensor:
        """[M] how well each model fits the client: the higher the better. With an ε, one sample moves a score by 1."""
        client = client.with_labels
        y = client.labels()
        outputs = vmap(lambda theta: self.model(theta, client.x))(models)
        losses = vmap(loss_of, (0, None))(outputs, y)
        if self.local.private is None:
            return -client.mean(losses.T)
        best = losses.nan_to_num(nan=torch.inf).argmin(0)
        least = torch.arange(len(models), device=best.device)[:, None] == best
        rows = least if y.is_floating_point() else outputs.argmax(-1) == y
        return client.sum(rows.T.to(torch.float32))

    @task
    def select(self, client: Client, models: Tensor, epsilon: Tensor | None = None) -> Sent:
        """R(i), the model that fits best (line 21), selected privately where there is an ε."""
        scores = self.scores(client, models)
        if epsilon is None:
            return send(cluster=scores.argmax())
        return send(cluster=Exponential(1.0).select(scores, 1.0, client.noise, epsilon))

    @select.into
    def selected_cluster(self) -> list[Release]:
        return [Each("cluster", cost=None if self.local.private is None else self.budget.selection_cost)]

    @select.derive
    def selection_epsilon(self, declared: Declarations) -> dict[str, Tensor]:
        return {} if self.local.private is None else {"epsilon": self.budget.selection_epsilons(declared)}

    @task(stays="theta")
    def personal_model(self, client: Client, models: Tensor, cluster: Tensor) -> Sent:
        """The model of the client's cluster; a client that has none takes the model that fits best."""
        best = torch.where(cluster < 0, self.scores(client, models).argmax(), cluster)
        return send(theta=(torch.arange(len(models), device=best.device) == best).to(models.dtype) @ models)

    # At the server

    def start(self, seed: int) -> State:
        count = self.clusters or 1 if self.clustering == "selection" else 1
        models = torch.stack([self.model.init(seed + 1000 * m) for m in range(count)])
        nobody = torch.zeros(0, dtype=torch.int64)
        return State(models=models, ids=nobody, cluster=nobody, pi=torch.zeros(0, 1, dtype=torch.float64))

    def round(self, state: State, federation: Federation) -> State:
        """``cluster`` of the state has the cluster of each client in ``ids``, −1 where it has none yet."""
        if not len(state.ids):
            if self.clustering == "mixture":
                return self._fit_mixture(state, federation)
            state = self._given_clusters(state, federation)
        cohort = federation.sample(self.cohort, labeled=True).within_budget(self.fit)
        state = self._assign(state, cohort, federation)
        cohort = cohort.only((state.cluster[cohort.positions] >= 0).nonzero().flatten())
        cluster = state.cluster[cohort.positions]
        rate = self.schedule(federation.round)
        replies = cohort.ask(self.fit, theta=each(state.models[cluster]), rate=rate)
        if "update" not in replies:
            return state  # everybody's budget is spent
        updates, cluster = replies["update"], cluster[replies.answered]
        member = torch.nn.functional.one_hot(cluster, len(state.models)).to(updates.dtype)
        means = member.T @ updates / member.sum(0).clamp(min=1)[:, None]
        return state.replace(models=state.models + means)

    def _given_clusters(self, state: State, federation: Federation) -> State:
        """Clusters that no round finds: known, one, each; none yet for IFCA."""
        ids, count = federation.roster.ids, len(federation.roster)
        cluster, models = torch.full((count,), -1), state.models
        if self.clustering == "known":
            if len(self.known) != count:
                raise ValueError(f"known has the clusters of {len(self.known)} clients, but there are {count}")
            cluster = torch.tensor(self.known)
        elif self.clustering == "one":
            cluster = torch.zeros(count, dtype=torch.int64)
        elif self.clustering == "each":
            cluster = torch.arange(count)
        if self.clustering != "selection":
            models = models.expand(int(cluster.max()) + 1, -1).clone()
        pi = torch.full((count, len(models)), 1 / len(models), dtype=torch.float64)
        return state.replace(ids=ids, cluster=cluster, models=models, pi=pi)

    def _fit_mixture(self, state: State, federation: Federation) -> State:
        """The first round (lines 5-14)."""
        cohort = federation.sample(1.0, labeled=True).within_budget(self.fit_first)
        replies = cohort.ask(self.fit_first, theta=state.models[0])
        seed = int(federation.draws().integers(2**31))
        found = mixture_of(replies["update"], self.clusters, self.most_clusters, seed)
        count, m = len(federation.roster), found.pi.shape[1]
        pi = torch.full((count, m), 1 / m, dtype=torch.float64)  # of those who did not answer nothing is known
        pi[cohort.positions[replies.answered]] = found.pi
        place = torch.full((count, COMPONENTS), torch.nan, dtype=torch.float64)
        place[cohort.positions[replies.answered]] = found.points
        federation.report(clusters=m, mss=found.mss, mpo=found.mpo)
        state = state.replace(ids=federation.roster.ids, cluster=torch.full((count,), -1), pi=pi, place=place)
        models = state.models.expand(m, -1).clone()
        return state.replace(models=models, mss=torch.tensor(found.mss), mpo=torch.tensor(found.mpo))

    def _assign(self, state: State, cohort: Cohort, federation: Federation) -> State:
        """The state with R(i) of the cohort in this round."""
        if self.clustering not in ("mixture", "selection"):
            return state
        last_drawn = 0
        if self.clustering == "mixture":
            last_drawn = max(1, math.floor((1 - float(state.mpo)) * self.rounds / 2))  # Ec
        cluster = state.cluster.clone()
        if federation.round <= last_drawn:
            u = federation.draws().uniform(len(cohort)).to(torch.float64)
            passed = state.pi[cohort.positions].cumsum(1) < u[:, None]
            cluster[cohort.positions] = passed.sum(1).clamp(max=state.pi.shape[1] - 1)
            return state.replace(cluster=cluster)
        if federation.round > last_drawn + self.selections:
            unknown = cohort.positions[cluster[cohort.positions] < 0]  # never asked while clients selected
            cluster[unknown] = state.pi[unknown].argmax(1)
            return state.replace(cluster=cluster)
        asked = cohort.within_budget(self.select)
        replies = asked.ask(self.select, models=state.models)
        if "cluster" in replies:
            cluster[asked.positions[replies.answered]] = replies["cluster"].to(torch.int64)
        return state.replace(cluster=cluster)

    def distinctions(self, state: State) -> dict[str, Tensor]:
        places = {"place": state.place} if "place" in state else {}
        return {"ids": state.ids, "cluster": state.cluster, **places}

    def personalize(self, state: State, cohort: Cohort) -> Models:
        known = torch.full((len(cohort),), -1)
        if len(state.ids):
            ids, order = torch.sort(state.ids)
            place = torch.searchsorted(ids, cohort.ids).clamp(max=len(ids) - 1)
            known = torch.where(ids[place] == cohort.ids, state.cluster[order[place]], -1)
        return cohort.ask(self.personal_model, models=state.models, cluster=each(known)).held("theta")
