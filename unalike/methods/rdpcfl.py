"""R-DPCFL: clusters of clients, found from updates that each client has made private.

S. Malekmohammadi's thesis, chapter 4, Algorithm 2. Its symbols: M clusters with models θ_m, E rounds, K local epochs,
z_i the noise of client i, b¹ and b^{>1} the batch sizes of the first and of later rounds, π_i the probabilities of its
clusters, R(i) its cluster, MSS and MPO the separation and the overlap of a Gaussian mixture (§4.5.5). IFCA: Ghosh et
al., NeurIPS 2020.
"""

from __future__ import annotations

import math
import warnings
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, ClassVar, Literal, NamedTuple, get_args

import torch
from torch import Tensor
from torch.func import vmap

from unalike.core.client import Client
from unalike.core.federation import Cohort, Federation, Models, each
from unalike.core.method import State
from unalike.core.model import Model
from unalike.core.release import Each, Release, Stays
from unalike.core.roster import Declared
from unalike.core.task import Sent, send, task
from unalike.learn.local import LocalSGD
from unalike.learn.schedules import Schedule
from unalike.privacy import dpsgd
from unalike.privacy.dpsgd import LocalCost, PointPrivacy, Steps
from unalike.privacy.mechanisms import Exponential

if TYPE_CHECKING:
    from unalike.privacy.account import Event

Clustering = Literal["mixture", "selection", "known", "one", "each"]
COMPONENTS = 2  # of the PCA of first updates
STARTS = 10  # of a Gaussian mixture


class Mixture(NamedTuple):
    """A Gaussian mixture of clients' first updates."""

    pi: Tensor  # [C, M]
    mss: float  # the smallest separation ‖μ_i − μ_j‖ / (2·max(σ_i, σ_j)) of two components
    mpo: float  # the largest overlap 1 − erf(separation/√2)
    points: Tensor  # [C, 2] the updates' principal components, on which it was fitted


@dataclass(frozen=True)
class RDPCFL:
    """A model for each cluster of clients; what a client sends is private by DP-SGD (``local.private``).

    - ``clustering``: how clients come to clusters.
      mixture (R-DPCFL): in the first round everybody trains θ_init with full batches, and a Gaussian mixture of these
      updates gives π. Until round Ec = ⌊(1 − MPO)·E/2⌋ a client's cluster is drawn from π_i in every round, then the
      client itself selects it for E/10 rounds, then it stays.
      selection (IFCA): models start unlike each other, clients select from the first round on, and stay after E/10.
      known: ``known`` tells the cluster of each client of the roster. one: a single model. each: no two share one.
    - ``clusters``: M; None: the M from 2 to ``most_clusters`` with the largest MSS.
    - ``rounds``: E, which a recipe fills in.
    - ``first_batch``: b¹; None: all of a client's samples, which leaves the least noise in first updates.
    - ``selection``: the ε of one selection, as a share of the client's own ε (with a fixed noise multiplier: that ε
      itself). A selection is the exponential mechanism on counts of correct predictions, which one point moves by 1;
      Malekmohammadi selects by loss, which has no bound. z_i pays for first and later rounds and selections together.

    Neighbours: one point is added or removed, N̄ is public. A newcomer takes the model that is right most often on its
    own labels; that choice does not leave it.
    """

    model: Model
    cohort: int | float = 1.0
    local: LocalSGD = field(default_factory=LocalSGD)
    clustering: Clustering = "mixture"
    clusters: int | None = None
    most_clusters: int = 6
    rounds: int = 50
    first_batch: int | None = None
    selection: float = 0.03
    known: tuple[int, ...] = ()
    schedule: Schedule = field(default_factory=Schedule)
    serves_unlabeled: ClassVar[bool] = False
    asks_unlabeled: ClassVar[bool] = False
    not_client_private: ClassVar[str] = (
        "clients are put into clusters by their own updates, which the server sees by themselves"
    )

    def __post_init__(self) -> None:
        if self.clustering not in get_args(Clustering):
            raise ValueError(f"clustering={self.clustering!r}; expected one of {', '.join(get_args(Clustering))}")
        if self.clustering == "selection" and self.clusters is None:
            raise ValueError("selection (IFCA) begins with M models: give clusters")
        if (self.clusters or 1) < 1 or self.most_clusters < 2 or self.rounds < 1 or not 0 < self.selection <= 1:
            raise ValueError(
                f"clusters={self.clusters}, most_clusters={self.most_clusters}, rounds={self.rounds}, selection="
                f"{self.selection}; expected at least 1, 2 and 1, and a share above 0 up to 1"
            )
        _ = self.first

    @cached_property
    def first(self) -> LocalSGD:
        """Training in the first round, with batches of b¹."""
        private = self.local.private
        private = None if private is None else replace(private, batches=None)
        return replace(self.local, batch=self.first_batch, private=private)

    @property
    def selections(self) -> int:
        """In how many rounds a client selects its cluster."""
        return max(1, self.rounds // 10) if self.clustering in ("mixture", "selection") else 0

    def dp_sgd(self, size: int) -> tuple[PointPrivacy, Steps] | None:
        return None if self.local.private is None else (self.local.private, self.local.steps_of(size))

    # What a client's noise is made from (line 3)

    def _selection(self, epsilon: float | None) -> float:
        """ε of one selection."""
        return self.selection * (1.0 if epsilon is None else epsilon)

    def plans(self, declared: Declared) -> list[tuple[float, Steps, Steps, float]]:
        """For each client z_i, the steps of the first and of a later round, and the ε of a selection."""
        private = self.local.private
        assert private is not None
        count = len(declared.bound)
        batches = [None] * count if private.batches is None or declared.batch is None else declared.batch.tolist()
        epsilons, deltas = [private.epsilon] * count, [private.delta] * count
        if private.own and declared.epsilon is not None and declared.delta is not None:
            epsilons, deltas = declared.epsilon.tolist(), declared.delta.tolist()
        times = private.rounds or self.rounds
        found = []
        for size, batch, epsilon, delta in zip(declared.bound.tolist(), batches, epsilons, deltas, strict=True):
            first, later = self.first.steps_of(size), self.local.steps_of(size, batch)
            chosen = self._selection(epsilon)
            z = private.noise_multiplier
            if z is None:
                if epsilon is None or delta is None:
                    raise ValueError("every client has its own (ε, δ) here, but this one declares none")
                early = self.clustering == "mixture"
                phases = [Steps(later.rate, later.count * max(1, times - early)), *([first] if early else [])]
                also = (Exponential(chosen).event(),) * self.selections
                z = dpsgd.noise_for(epsilon, delta, *phases, also=also)
            found.append((z, first, later, chosen))
        return found

    def _cost(self, events: list[Event]) -> LocalCost:
        assert self.local.private is not None
        return LocalCost(tuple(events), self.local.private.clip, str(self.local.private))

    def first_cost(self, declared: Declared) -> LocalCost:
        return self._cost([dpsgd.event(z, first) for z, first, _, _ in self.plans(declared)])

    def later_cost(self, declared: Declared) -> LocalCost:
        return self._cost([dpsgd.event(z, later) for z, _, later, _ in self.plans(declared)])

    def selection_cost(self, declared: Declared) -> LocalCost:
        chosen = [Exponential(one).event() for _, _, _, one in self.plans(declared)]
        return LocalCost(tuple(chosen), 1.0, "exponential mechanism")

    # At a client

    @task
    def begin(self, client: Client, theta: Tensor, noise: Tensor | None = None) -> Sent:
        """Δθ_i¹: K epochs of DP-SGD with batches of b¹, all samples by default (line 7)."""
        return send(update=self.first(self.model, theta, client, noise=noise) - theta)

    @begin.into
    def first_update(self) -> list[Release]:
        return [Each("update", cost=None if self.local.private is None else self.first_cost)]

    @begin.derive
    def first_noise(self, declared: Declared) -> dict[str, Tensor]:
        """z_i, from what the client declares."""
        return {} if self.local.private is None else {"noise": torch.tensor([one[0] for one in self.plans(declared)])}

    @task
    def fit(
        self, client: Client, theta: Tensor, rate: Tensor, noise: Tensor | None = None, batch: Tensor | None = None
    ) -> Sent:
        """Δθ_i^e: K epochs of DP-SGD with small batches from the model of the client's cluster (line 23)."""
        return send(update=self.local(self.model, theta, client, rate=rate, noise=noise, batch=batch) - theta)

    @fit.into
    def each_update(self) -> list[Release]:
        return [Each("update", cost=None if self.local.private is None else self.later_cost)]

    @fit.derive
    def own(self, declared: Declared) -> dict[str, Tensor]:
        """z_i, and b_i where clients declare their own."""
        found = dict(self.first_noise(declared))
        if self.local.private is not None and self.local.private.batches is not None and declared.batch is not None:
            found["batch"] = declared.batch
        return found

    def correct(self, client: Client, models: Tensor) -> Tensor:
        """[M] how many of the client's samples each model gets right."""
        client = client.with_labels
        y = client.labels()
        if y.is_floating_point():
            raise ValueError("a cluster is selected by counts of correct predictions, but targets here are numbers")

        def right(theta: Tensor) -> Tensor:
            return client.sum((self.model(theta, client.x).argmax(-1) == y).to(torch.float32))

        found: Tensor = vmap(right)(models)
        return found

    @task
    def choose(self, client: Client, models: Tensor, epsilon: Tensor | None = None) -> Sent:
        """R(i): the model that is right most often (line 21), selected privately."""
        counts = self.correct(client, models)
        if epsilon is None:
            return send(cluster=counts.argmax())
        return send(cluster=Exponential(1.0).select(counts, 1.0, client.noise, epsilon))

    @choose.into
    def choice(self) -> list[Release]:
        return [Each("cluster", cost=None if self.local.private is None else self.selection_cost)]

    @choose.derive
    def own_epsilon(self, declared: Declared) -> dict[str, Tensor]:
        if self.local.private is None:
            return {}
        return {"epsilon": torch.tensor([one[3] for one in self.plans(declared)], dtype=torch.float64)}

    @task
    def take(self, client: Client, models: Tensor, cluster: Tensor) -> Sent:
        """The model of the client's cluster; who has none takes the one that is right most often."""
        best = torch.where(cluster < 0, self.correct(client, models).argmax(), cluster)
        return send(theta=(torch.arange(len(models), device=best.device) == best).to(models.dtype) @ models)

    @take.into
    def stays(self) -> list[Release]:
        return [Stays("theta")]

    # At the server

    def start(self, seed: int) -> State:
        count = self.clusters or 1 if self.clustering == "selection" else 1
        models = torch.stack([self.model.init(seed + 1000 * m) for m in range(count)])
        nobody = torch.zeros(0, dtype=torch.int64)
        return State(models=models, ids=nobody, cluster=nobody, pi=torch.zeros(0, 1, dtype=torch.float64))

    def round(self, state: State, federation: Federation) -> State:
        """``cluster`` of the state tells that of each client in ``ids``, −1 where it has none yet."""
        if not len(state.ids):
            state = self._begun(state, federation)
            if self.clustering == "mixture":
                return state
        cohort = federation.sample(self.cohort, labeled=True).within_budget(self.fit)
        state = self._assigned(state, cohort, federation)
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

    def _begun(self, state: State, federation: Federation) -> State:
        """Clusters before the first of the later rounds."""
        ids, count = federation.roster.ids, len(federation.roster)
        cluster, models = torch.full((count,), -1), state.models
        if self.clustering == "known":
            if len(self.known) != count:
                raise ValueError(f"known has the clusters of {len(self.known)} clients, but there are {count}")
            cluster = torch.tensor(self.known)
        elif self.clustering in ("one", "each"):
            cluster = torch.zeros(count, dtype=torch.int64) if self.clustering == "one" else torch.arange(count)
        elif self.clustering == "mixture":
            return self._mixed(state, federation)
        if self.clustering != "selection":
            models = models.expand(int(cluster.max()) + 1, -1).clone()
        pi = torch.full((count, len(models)), 1 / len(models), dtype=torch.float64)
        return state.replace(ids=ids, cluster=cluster, models=models, pi=pi)

    def _mixed(self, state: State, federation: Federation) -> State:
        """The first round (lines 5-14)."""
        cohort = federation.sample(1.0, labeled=True).within_budget(self.begin)
        replies = cohort.ask(self.begin, theta=state.models[0])
        seed = int(federation.draws().integers(2**31))
        found = mixture_of(replies["update"], self.clusters, self.most_clusters, seed)
        count, m = len(federation.roster), found.pi.shape[1]
        pi = torch.full((count, m), 1 / m, dtype=torch.float64)  # of those who did not answer nothing is known
        pi[cohort.positions[replies.answered]] = found.pi
        place = torch.full((count, COMPONENTS), torch.nan, dtype=torch.float64)
        place[cohort.positions[replies.answered]] = found.points
        federation.report(clusters=m, mss=found.mss, mpo=found.mpo)
        return state.replace(
            ids=federation.roster.ids,
            models=state.models.expand(m, -1).clone(),
            pi=pi,
            place=place,
            cluster=torch.full((count,), -1),
            mss=torch.tensor(found.mss),
            mpo=torch.tensor(found.mpo),
        )

    def _assigned(self, state: State, cohort: Cohort, federation: Federation) -> State:
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
        asked = cohort.within_budget(self.choose)
        replies = asked.ask(self.choose, models=state.models)
        if "cluster" in replies:
            cluster[asked.positions[replies.answered]] = replies["cluster"].to(torch.int64)
        return state.replace(cluster=cluster)

    def apart(self, state: State) -> dict[str, Tensor]:
        places = {"place": state.place} if "place" in state else {}
        return {"ids": state.ids, "cluster": state.cluster, **places}

    def personalize(self, state: State, cohort: Cohort) -> Models:
        known = torch.full((len(cohort),), -1)
        if len(state.ids):
            ids, order = torch.sort(state.ids)
            place = torch.searchsorted(ids, cohort.ids).clamp(max=len(ids) - 1)
            known = torch.where(ids[place] == cohort.ids, state.cluster[order[place]], -1)
        return cohort.ask(self.take, models=state.models, cluster=each(known)).held("theta")


def mixture_of(updates: Tensor, clusters: int | None, most: int, seed: int) -> Mixture:
    """The Gaussian mixture of updates [C, p] with M components, or with the M of the largest MSS (lines 9-11)."""
    count = len(updates)
    if min(count, clusters or 2) == 1:
        alone = torch.ones(count, 1, dtype=torch.float64)
        return Mixture(alone, math.inf, 0.0, torch.zeros(count, COMPONENTS, dtype=torch.float64))
    points = principal(updates)
    sizes = range(2, min(most, count) + 1) if clusters is None else [min(clusters, count)]
    return max((_mixture(points, m, seed) for m in sizes), key=lambda one: one.mss)


def principal(updates: Tensor) -> Tensor:
    """[C, 2] the first principal components of updates, over their own spread; PCA is fitted to what it is applied to.

    From the Gram matrix [C, C], because a model has far more parameters than there are clients.
    """
    centred = updates.to(torch.float64) - updates.to(torch.float64).mean(0)
    squares, vectors = torch.linalg.eigh(centred @ centred.T)
    points = vectors[:, -COMPONENTS:].flip(1) * squares[-COMPONENTS:].flip(0).clamp(min=0).sqrt()
    points = points * points.gather(0, points.abs().argmax(0, keepdim=True)).sign()  # a sign that no rounding changes
    scaled: Tensor = points / points.std(correction=0).clamp(min=1e-300)
    return scaled


def _mixture(points: Tensor, count: int, seed: int) -> Mixture:
    from sklearn.exceptions import ConvergenceWarning
    from sklearn.mixture import GaussianMixture

    fitted = GaussianMixture(
        count, covariance_type="spherical", init_params="k-means++", n_init=STARTS, random_state=seed
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)  # the best of several starts counts
        pi = torch.from_numpy(fitted.fit(points.numpy()).predict_proba(points.numpy()))
    mu, sigma = torch.from_numpy(fitted.means_), torch.from_numpy(fitted.covariances_).sqrt()
    pi = pi[:, mu[:, 0].argsort()]  # several starts end alike but for the order, and rounding chooses among them
    i, j = torch.triu_indices(count, count, 1)
    separation = float(((mu[i] - mu[j]).norm(dim=1) / (2 * torch.maximum(sigma[i], sigma[j]))).min())
    return Mixture(pi, separation, 1 - math.erf(separation / math.sqrt(2)), points)
