"""Mixture priors: discrete candidates (P3 Algorithms 1 and 7) and a mixture of Gaussians (Algorithm 4)."""

from __future__ import annotations

import math
import warnings
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from unalike.analytics.estimation.posterior import Family, alone, design, loss_gradient, risk_around
from unalike.analytics.estimation.private import Central, Clustering, Components, moved, share, uses_of
from unalike.analytics.estimation.shared import (
    ABSURD,
    AfterRound,
    Channel,
    EstimationError,
    Estimator,
    Learned,
    check_clients,
    check_components,
    check_positive,
    check_targets,
    features,
    unwatched,
)
from unalike.core.client import Client
from unalike.core.federation import Federation
from unalike.core.release import Each, Mean, Release
from unalike.core.task import Sent, send, task

Kind = Literal["means", "linear"]
_FEWER = "fewer clients differ from one another than there are components: some components are empty"


class Clusters(NamedTuple):
    """What Cluster(θ_1 … θ_m, k) of Algorithms 1, 4 and 7 returns."""

    weights: Tensor  # [k]
    centers: Tensor  # [k, d]
    label: Tensor  # [m]


def cluster(points: Tensor, components: int, seed: int, start: Tensor | None = None) -> Clusters:
    """Lloyd's algorithm, from k-means++ or from the last round's centers."""
    from sklearn.cluster import KMeans
    from sklearn.exceptions import ConvergenceWarning

    begin: Any = "k-means++" if start is None else start.numpy()
    solver = KMeans(components, init=begin, n_init=10 if start is None else 1, random_state=seed)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)  # fewer distinct points than centers: told in a note
        label = torch.from_numpy(solver.fit_predict(points.numpy()).astype(np.int64))
    weights = torch.bincount(label, minlength=components).to(torch.float64) / len(points)
    return Clusters(weights, torch.from_numpy(solver.cluster_centers_).to(torch.float64), label)


@dataclass(frozen=True)
class DiscreteMixture(Estimator):
    """θ_i is one of k candidates μ_l, with probability p_l (P3 §2.3; Algorithm 1 for means, 7 for linear models).

    Known prior: give ``candidates`` [k, d] and ``weights`` [k], and no client sends anything (Theorem 5). Unknown, with
    ``once=False``: in every round a client sends its posterior mean Σ_l α_l·μ_l and the server clusters those, as on
    the page; where candidates overlap, those means draw them together. With ``once`` a client sends its local estimate
    a single time and the server fits the mixture to them by EM (spherical, one variance): less to send, nothing to
    compose, and nearer to the truth.

    ``sigma_x`` is known, as in the paper. With a channel that is not bare, ``bound`` limits the norm of what is sent;
    for means it follows from ``radius`` ≥ ‖μ_l‖ (Lemma 1). (ε0, δ) is for all rounds together.

    ``central``: no client's estimate is seen at all; the server clusters by noisy sums (§2.3.3, ``private.py``), with
    ``rounds`` steps after the last split. With ``once`` each is of local estimates. With ``once=False`` only the first
    is, and the others are steps of Lloyd on posterior means, as the paper has it. These are made of the last
    candidates, so that their noise adds up from round to round.
    """

    components: int
    sigma_x: float
    kind: Kind = "means"
    rounds: int = 10
    once: bool = True
    candidates: Tensor | None = None
    weights: Tensor | None = None
    channel: Channel = Channel()
    radius: float | None = None
    bound: float | None = None
    central: Central | None = None

    def __post_init__(self) -> None:
        check_positive("sigma_x", self.sigma_x)
        check_positive("bound", self.bound)
        if self.central is not None and not self.channel.is_bare:
            raise EstimationError("the noise is either the clients' own (channel) or on their sums (central): give one")
        if self.kind not in ("means", "linear"):
            raise EstimationError(f"kind must be 'means' or 'linear', got {self.kind!r}")
        if self.components < 1 or self.rounds < 1:
            raise EstimationError(f"expected 1 or more components and rounds, got {self.components} and {self.rounds}")
        if (self.candidates is None) != (self.weights is None):
            raise EstimationError("a known prior is candidates and weights together; give both or neither")
        unbounded = self.bound is None and (self.kind == "linear" or self.radius is None)
        if self.candidates is None and not (self.channel.is_bare and self.central is None) and unbounded:
            raise EstimationError(
                "with bits or epsilon a bound must be known: give bound, the largest norm of a client's estimate"
                + (", or radius, that of a candidate" if self.kind == "means" else "")
            )

    @task
    def begin(self, client: Client, unit: Tensor) -> Sent:
        """θ_i⁰: the mean, or least squares of least norm."""
        return send(theta=self._alone(client) / unit)

    @task
    def update(self, client: Client, candidates: Tensor, weights: Tensor, unit: Tensor) -> Sent:
        """Step 6: Σ_l α_l·μ_l with α_l ∝ p_l·exp(−squared error / 2σx²)."""
        theta = self._posterior_mean(client, candidates, weights)
        return send(theta=theta / unit, keep={"estimate": theta, "local": self._alone(client)})

    @begin.into
    @update.into
    def _message(self) -> list[Release]:
        return [self.channel.release("theta", uses=1 if self.once else self.rounds)]

    @task
    def join(self, client: Client, weights: Tensor, centers: Tensor, variance: Tensor, unit: Tensor) -> Sent:
        """The client's share of a private step. Its data say where it belongs, so the variance is not needed."""
        belongs = self._belongs(client, centers * unit, weights)
        return send(share=share(self._alone(client) / unit, torch.zeros((), dtype=torch.float64), belongs))

    @task
    def alternate(self, client: Client, weights: Tensor, centers: Tensor, variance: Tensor, unit: Tensor) -> Sent:
        """The same of a private step of Algorithm 1: its posterior mean counts for the nearest candidate."""
        theta = self._posterior_mean(client, centers * unit, weights) / unit
        nearest = torch.arange(len(centers)) == (theta - centers).square().sum(1).argmin()
        return send(share=share(theta, torch.zeros((), dtype=torch.float64), nearest.to(torch.float64)))

    @join.into
    @alternate.into
    def _share(self) -> list[Release]:
        return [] if self.central is None else [self.central.release(uses_of(self.components, self.rounds))]

    def _alone(self, client: Client) -> Tensor:
        return client.mean(client.x.to(torch.float64)) if self.kind == "means" else alone(client, "linear")

    def _posterior_mean(self, client: Client, candidates: Tensor, weights: Tensor) -> Tensor:
        return self._belongs(client, candidates, weights) @ candidates

    def _belongs(self, client: Client, candidates: Tensor, weights: Tensor) -> Tensor:
        """α_l, how likely each candidate is."""
        if self.kind == "means":  # up to what is the same for every candidate
            error = client.n * (self._alone(client) - candidates).square().sum(1)
        else:
            x, y = design(client)
            error = (x @ candidates.T - y[:, None]).square().sum(0)
        return torch.softmax(torch.log(weights) - error / (2 * self.sigma_x**2), 0)

    def norm_bound(self, clients: int, samples: int, dim: int) -> float | None:
        """4√(dσx²/n) + 2√(log(m²n)·σx²/n) + r (Lemma 1), or as given."""
        if self.bound is not None or self.radius is None:
            return self.bound
        unit = self.sigma_x / math.sqrt(samples)
        return unit * (4 * math.sqrt(dim) + 2 * math.sqrt(math.log(clients**2 * samples))) + self.radius

    def fit(self, federation: Federation, after_round: AfterRound = unwatched) -> Learned:
        """Learn the candidates (unless known), then have every client combine."""
        if self.kind == "linear":
            check_targets(federation.roster)
        dim = features(federation.roster)
        trace: list[float] = []
        if self.candidates is not None and self.weights is not None:
            candidates, weights = self._known(dim)
        else:
            check_components(self.components, check_clients(federation.roster))
            candidates, weights, trace = self._learn(federation, dim, after_round)
        federation.everyone().ask(self.update, into=[], candidates=candidates, weights=weights, unit=1.0)
        notes = [_FEWER] if bool((weights == 0).any()) else []
        prior = {"candidates": candidates.tolist(), "weights": weights.tolist()}
        return Learned(prior, trace, notes)

    def _known(self, dim: int) -> tuple[Tensor, Tensor]:
        assert self.candidates is not None and self.weights is not None
        candidates, weights = self.candidates.to(torch.float64), self.weights.to(torch.float64)
        if candidates.shape != (self.components, dim) or weights.shape != (self.components,):
            raise EstimationError(
                f"expected candidates [{self.components}, {dim}] and weights [{self.components}], got "
                f"{list(candidates.shape)} and {list(weights.shape)}"
            )
        if bool((weights < 0).any()) or abs(float(weights.sum()) - 1) > 1e-6:
            raise EstimationError(f"weights must be probabilities that add up to 1, got {weights.tolist()}")
        return candidates, weights

    def _learn(self, federation: Federation, dim: int, after_round: AfterRound) -> tuple[Tensor, Tensor, list[float]]:
        roster, seed = federation.roster, federation.seed
        bound = self.norm_bound(len(roster), int(roster.bound.min()), dim)
        if self.central is not None:
            assert bound is not None, "checked when it was made"
            return self._privately(federation, dim, bound, after_round)
        unit = torch.tensor(1.0 if bound is None or self.channel.is_bare else bound, dtype=torch.float64)
        theta = federation.everyone().ask(self.begin, unit=unit)["theta"] * unit
        found = cluster(theta, self.components, seed)
        if self.once:
            return spherical_em(theta, found, steps=200)
        after_round(1)
        trace = [_within(theta, found)]
        for number in range(2, self.rounds + 1):
            cohort = federation.everyone()
            replies = cohort.ask(self.update, candidates=found.centers, weights=found.weights, unit=unit)
            theta = replies["theta"] * unit
            found = cluster(theta, self.components, seed, found.centers)
            trace.append(_within(theta, found))
            after_round(number)
        return found.centers, found.weights, trace

    def _privately(
        self, federation: Federation, dim: int, bound: float, after_round: AfterRound
    ) -> tuple[Tensor, Tensor, list[float]]:
        """By noisy sums alone (§2.3.3)."""
        assert self.central is not None
        unit, asked = torch.tensor(bound, dtype=torch.float64), 0
        splits = uses_of(self.components, 0)

        def ask(now: Components) -> Tensor:
            nonlocal asked
            asked += 1
            question = self.join if self.once or asked <= splits + 1 else self.alternate
            found = federation.everyone().ask(question, **now.inputs, unit=unit)["share"]
            if asked > splits:
                after_round(asked - splits)
            return found

        level = self.central.noise(uses_of(self.components, self.rounds)).noise_multiplier
        random = torch.Generator().manual_seed(federation.seed % (1 << 32))
        found = Clustering(ask, self.components, dim, level, random).run(self.rounds)
        return found.centers * unit, found.weights, []


def _within(points: Tensor, found: Clusters) -> float:
    """Mean squared distance from the own center."""
    return float((points - found.centers[found.label]).square().sum(1).mean())


def spherical_em(points: Tensor, start: Clusters, steps: int) -> tuple[Tensor, Tensor, list[float]]:
    """Centers, weights and the rising log-likelihood of a Gaussian mixture with one variance for all coordinates."""
    centers, weights = start.centers, start.weights
    d = points.shape[1]
    smallest = 1e-9 * max(1e-300, float(points.var(0).mean()))
    variance = max(smallest, _within(points, start) / d)
    trace: list[float] = []
    for _ in range(steps):
        distance = torch.cdist(points, centers).square()
        joint = torch.log(weights) - distance / (2 * variance) - 0.5 * d * math.log(2 * math.pi * variance)
        evidence = torch.logsumexp(joint, 1)
        trace.append(float(evidence.mean()))
        if len(trace) > 1 and trace[-1] - trace[-2] < 1e-9 * abs(trace[-2]):
            break
        responsibility = torch.exp(joint - evidence[:, None])
        mass = responsibility.sum(0)
        weights = mass / len(points)
        centers = torch.where(mass[:, None] > 0, responsibility.T @ points / mass.clamp(min=1e-300)[:, None], centers)
        left = (responsibility * torch.cdist(points, centers).square()).sum() / (d * len(points))
        variance = max(smallest, float(left))
    return centers, weights, trace


@dataclass(frozen=True)
class MixturePrior(Estimator):
    """θ_i ~ Σ_l p_l·N(μ_l, σ_l²·I) for linear or logistic models (Algorithm 4).

    In every round a client takes ``local_steps`` gradient steps on f_i(θ) − log Σ_l p_l·N(θ; μ_l, σ_l²·I) and sends
    θ_i; the server clusters them. (22) prints the regulariser without its minus signs and with md in place of d; here
    it is the negative log-prior that (12) asks for. ``lr`` None: 1 / (a bound of the client's curvature).

    The spread of modes around their center shrinks from round to round, until σ_l vanishes. So a client also sends
    the trace of its posterior covariance, and σ_l² is made of both; ``corrected=False`` leaves that out, as printed.

    ``solver="gd"`` alternates gradient steps in the place of clustering, as Algorithms 2 and 3 do (§3.3): a client
    also moves μ_l, σ_l² and log p_l along the gradient of the negative log-prior at its new θ_i, at rates ``lr_mean``,
    ``lr_variance`` and 1, and the server takes the mean of what they send. Rates of None are σ_l² and 2σ_l⁴/d.
    ``corrected`` adds the same trace to the squared distance. No σ_l² becomes smaller than a millionth of its start.

    ``central``: the server sees noisy sums in place of the θ_i (§3.3 "Adding DP"; ``private.py``), of models no longer
    than ``bound``: first of what clients find alone, then one in each round.
    """

    components: int
    family: Family = "logistic"
    sigma_x: float | None = None
    rounds: int = 20
    local_steps: int = 20
    lr: float | None = None
    solver: Literal["clusters", "gd"] = "clusters"
    lr_mean: float | None = None
    lr_variance: float | None = None
    corrected: bool = True
    central: Central | None = None
    bound: float | None = None

    def __post_init__(self) -> None:
        check_positive("sigma_x", self.sigma_x)
        for name in ("lr", "lr_mean", "lr_variance", "bound"):
            check_positive(name, getattr(self, name))
        if self.solver not in ("clusters", "gd"):
            raise EstimationError(f"expected clusters or gd as solver, got {self.solver!r}")
        if self.central is not None and self.solver == "gd":
            raise EstimationError("private sums go with solver 'clusters': gradients have no bound")
        if self.central is not None and self.bound is None:
            raise EstimationError("private sums need bound, the largest norm of a client's model, as a public number")
        if self.family not in ("linear", "logistic"):
            raise EstimationError(f"family must be 'linear' or 'logistic', got {self.family!r}")
        if self.family == "linear" and self.sigma_x is None:
            raise EstimationError("a linear model with a mixture prior needs sigma_x, the deviation of its noise")
        if self.components < 1 or self.rounds < 1 or self.local_steps < 1:
            raise EstimationError("components, rounds and local_steps must each be at least 1")

    @task
    def begin(self, client: Client) -> Sent:
        """θ_i⁰ is what the client finds alone."""
        theta = alone(client, self.family)
        return send(theta=theta, keep={"estimate": theta, "local": theta})

    @begin.into
    def _first(self) -> list[Release]:
        return [Each("theta")]

    @task
    def join(self, client: Client, weights: Tensor, centers: Tensor, variance: Tensor, unit: Tensor) -> Sent:
        """The client's share of a private clustering step, by what it finds alone."""
        theta = alone(client, self.family)
        belongs = responsibilities(theta / unit, weights, centers, variance.expand(len(weights)))
        zero = torch.zeros((), dtype=torch.float64)
        return send(share=share(theta / unit, zero, belongs), keep={"estimate": theta, "local": theta})

    @task
    def descend_privately(
        self, client: Client, weights: Tensor, centers: Tensor, variance: Tensor, unit: Tensor
    ) -> Sent:
        """The same steps as ``descend``; what leaves the client is its share of the next components."""
        variances = variance.expand(len(weights))
        theta, risk = self._descended(client, weights, centers * unit, variances * unit**2)
        belongs = responsibilities(theta / unit, weights, centers, variances)
        risk = risk / unit**2 if self.corrected else torch.zeros_like(risk)
        return send(share=share(theta / unit, risk, belongs), keep={"estimate": theta})

    @join.into
    @descend_privately.into
    def _share(self) -> list[Release]:
        return [] if self.central is None else [self.central.release(self._uses)]

    @property
    def _uses(self) -> int:
        return uses_of(self.components, 1) + self.rounds

    @task
    def descend(self, client: Client, weights: Tensor, centers: Tensor, variances: Tensor) -> Sent:
        """Step 6 of Algorithm 4, ``local_steps`` times."""
        theta, risk = self._descended(client, weights, centers, variances)
        return send(theta=theta, risk=risk, keep={"estimate": theta})

    @task
    def alternate(self, client: Client, weights: Tensor, centers: Tensor, variances: Tensor) -> Sent:
        """The same steps, then one on this client's versions of log p, μ and σ²."""
        theta, risk = self._descended(client, weights, centers, variances)
        d, away = theta.numel(), centers - theta
        likely = responsibilities(theta, weights, centers, variances)
        square = away.square().sum(1) + (risk if self.corrected else 0.0)
        mean_rate = variances if self.lr_mean is None else self.lr_mean
        variance_rate = 2 * variances.square() / d if self.lr_variance is None else self.lr_variance
        slope = likely * (d / (2 * variances) - square / (2 * variances.square()))
        moved_centers = centers - (mean_rate * likely / variances)[:, None] * away
        step = {"log_weights": weights.clamp(min=1e-12).log() - (weights - likely), "centers": moved_centers}
        return send(**step, variances=variances - variance_rate * slope, keep={"estimate": theta})

    @alternate.into
    def _steps(self) -> list[Release]:
        return [Mean("log_weights"), Mean("centers"), Mean("variances")]

    def _descended(self, client: Client, weights: Tensor, centers: Tensor, variances: Tensor) -> tuple[Tensor, Tensor]:
        """The client's model after its steps, and the trace of its posterior covariance."""
        theta = client.kept.get("estimate", centers[0])
        noise = torch.tensor((self.sigma_x or 1.0) ** 2, dtype=torch.float64)
        x, _ = design(client)
        gram = x @ x.T if x.shape[0] <= x.shape[1] else x.T @ x
        steepest = gram.square().sum().sqrt() / (noise if self.family == "linear" else 4.0) + 1 / variances.min()
        lr = 1 / steepest if self.lr is None else torch.tensor(self.lr, dtype=torch.float64)
        for _ in range(self.local_steps):
            pull = negative_log_prior_gradient(theta, weights, centers, variances)
            theta = theta - lr * (loss_gradient(client, theta, self.family, noise) + pull)
        likely = responsibilities(theta, weights, centers, variances)
        return theta, risk_around(client, theta, 1 / (likely / variances).sum(), noise, self.family)

    @descend.into
    def _sent(self) -> list[Release]:
        return [Each("theta", "risk") if self.corrected else Each("theta")]

    def fit(self, federation: Federation, after_round: AfterRound = unwatched) -> Learned:
        """``rounds`` of client steps and clustering at the server."""
        check_targets(federation.roster)
        check_components(self.components, check_clients(federation.roster))
        if self.central is not None:
            return self._privately(federation, after_round)
        theta = federation.everyone().ask(self.begin)["theta"]
        found = cluster(theta, self.components, federation.seed)
        variances = self._variances(theta, found, torch.zeros(len(theta), dtype=torch.float64))
        least = 1e-6 * variances
        for number in range(1, self.rounds + 1):
            cohort = federation.everyone()
            if self.solver == "gd":
                inputs: dict[str, Any] = {"weights": found.weights, "centers": found.centers, "variances": variances}
                replies = cohort.ask(self.alternate, **inputs)
                found = found._replace(weights=replies["log_weights"].softmax(0), centers=replies["centers"])
                variances = replies["variances"].clamp(min=least)
                if not float(found.centers.abs().max() + variances.max()) < ABSURD:  # also NaN
                    raise EstimationError(f"gradient descent diverged in round {number}; lower lr_mean or lr_variance")
                after_round(number)
                continue
            replies = cohort.ask(self.descend, weights=found.weights, centers=found.centers, variances=variances)
            theta = replies["theta"]
            found = cluster(theta, self.components, federation.seed, found.centers)
            risk = replies["risk"] if self.corrected else torch.zeros(len(theta), dtype=torch.float64)
            variances = self._variances(theta, found, risk)
            after_round(number)
        notes = [_FEWER] if bool((found.weights == 0).any()) else []
        prior = {
            "weights": found.weights.tolist(),
            "centers": found.centers.tolist(),
            "sigma_theta": variances.sqrt().tolist(),
        }
        return Learned(prior, notes=notes)

    def _privately(self, federation: Federation, after_round: AfterRound) -> Learned:
        assert self.central is not None
        unit = torch.tensor(self.bound, dtype=torch.float64)
        level = self.central.noise(self._uses).noise_multiplier
        random = torch.Generator().manual_seed(federation.seed % (1 << 32))

        def begin(now: Components) -> Tensor:
            return federation.everyone().ask(self.join, **now.inputs, unit=unit)["share"]

        now = Clustering(begin, self.components, features(federation.roster), level, random).run(1)
        for number in range(1, self.rounds + 1):
            total = federation.everyone().ask(self.descend_privately, **now.inputs, unit=unit)["share"]
            now = moved(total, now, level)
            after_round(number)
        prior = {
            "weights": now.weights.tolist(),
            "centers": (now.centers * unit).tolist(),
            "sigma_theta": [float(now.variance.sqrt() * unit)] * self.components,
        }
        return Learned(prior)

    def _variances(self, theta: Tensor, found: Clusters, risk: Tensor) -> Tensor:
        """[k] variance of a coordinate around the own center; at least a millionth of the whole, so none vanishes."""
        squares = (theta - found.centers[found.label]).square().sum(1) + risk
        size = torch.bincount(found.label, minlength=self.components).clamp(min=1)
        total = torch.zeros(self.components, dtype=torch.float64).index_add_(0, found.label, squares)
        smallest = max(1e-12, 1e-6 * float(theta.var(0).mean()))
        return (total / (size * theta.shape[1])).clamp(min=smallest)


def responsibilities(theta: Tensor, weights: Tensor, centers: Tensor, variances: Tensor) -> Tensor:
    """[k] probability that θ is of each component."""
    distance = (theta - centers).square().sum(1)
    scale = 0.5 * theta.numel() * torch.log(2 * math.pi * variances)
    return torch.softmax(torch.log(weights) - distance / (2 * variances) - scale, 0)


def negative_log_prior_gradient(theta: Tensor, weights: Tensor, centers: Tensor, variances: Tensor) -> Tensor:
    """∇θ of −log Σ_l p_l·N(θ; μ_l, σ_l²·I)."""
    pull = responsibilities(theta, weights, centers, variances) / variances
    return (pull[:, None] * (theta - centers)).sum(0)
