"""Regressions with a mixture of Gaussians as prior (P3 §3.3, Algorithm 4), and how a server clusters estimates."""

from __future__ import annotations

import math
import warnings
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from unalike.analytics.estimation.posterior import Family, design, fit_alone, loss_gradient, variance_around
from unalike.analytics.estimation.private import Central, client_share, count_releases
from unalike.analytics.estimation.shared import (
    ABSURD,
    AfterRound,
    EstimationError,
    Estimator,
    PriorFit,
    check_roster,
    ignore_round,
)
from unalike.core.checks import above, at_least, one_of
from unalike.core.release import Each, Mean, Release
from unalike.core.vocabulary import Client, Federation, Sent, Task, send, task

Solver = Literal["clusters", "gd"]
FEWER = "fewer clients differ from one another than there are components: some components are empty"


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
        warnings.simplefilter("ignore", ConvergenceWarning)  # fewer distinct points than centers: a note says so
        label = torch.from_numpy(solver.fit_predict(points.numpy()).astype(np.int64))
    weights = torch.bincount(label, minlength=components).to(torch.float64) / len(points)
    return Clusters(weights, torch.from_numpy(solver.cluster_centers_).to(torch.float64), label)


@dataclass(frozen=True)
class MixturePrior(Estimator):
    """θ_i ~ Σ_l p_l·N(μ_l, σ_l²·I) for linear or logistic models (Algorithm 4).

    In every round a client takes ``local_steps`` gradient steps on f_i(θ) − log Σ_l p_l·N(θ; μ_l, σ_l²·I) and sends
    θ_i; the server clusters them. (22) prints the regulariser without its minus signs and with md in place of d; here
    it is the negative log-prior that (12) asks for. ``lr`` None: 1 / (a bound of the client's curvature).

    The spread of modes around their center shrinks from round to round, until σ_l vanishes. So a client also sends
    the trace of its posterior covariance, and σ_l² is made of both; ``corrected=False`` leaves that out, as printed.

    ``solver="gd"`` alternates gradient steps in the place of clustering, as Algorithms 2 and 3 do (§3.3): a client
    also moves μ_l, σ_l² and log p_l along the gradient of the negative log-prior, at rates ``lr_mean`` (None: σ_l²),
    ``lr_variance`` (2σ_l⁴/d) and 1, and the server takes the mean. No σ_l² falls below a millionth of its start.

    ``central``: the server sees noisy sums in place of the θ_i (§3.3 "Adding DP"; ``private.py``), of models no longer
    than ``bound``: first of what clients find alone, then one in each round.
    """

    components: int
    family: Family = "logistic"
    sigma_x: float | None = None
    rounds: int = 20
    local_steps: int = 20
    lr: float | None = None
    solver: Solver = "clusters"
    lr_mean: float | None = None
    lr_variance: float | None = None
    corrected: bool = True
    central: Central | None = None
    bound: float | None = None

    @property
    def kind(self) -> str:
        return self.family

    def __post_init__(self) -> None:
        above(self, sigma_x=0, lr=0, lr_mean=0, lr_variance=0, bound=0)
        at_least(self, components=1, rounds=1, local_steps=1)
        one_of(self, "family", "solver")
        if self.central is not None and self.solver == "gd":
            raise EstimationError("private sums go with solver 'clusters': gradients have no bound")
        if self.central is not None and self.bound is None:
            raise EstimationError("private sums need bound, the largest norm of a client's model, as a public number")
        if self.family == "linear" and self.sigma_x is None:
            raise EstimationError("a linear model with a mixture prior needs sigma_x, the deviation of its noise")

    @task
    def begin(self, client: Client) -> Sent:
        """θ_i⁰ is what the client finds alone."""
        theta = fit_alone(client, self.family)
        return send(theta=theta, keep={"estimate": theta, "local": theta})

    @begin.into
    def _first(self) -> list[Release]:
        return [Each("theta")]

    @task
    def join(self, client: Client, weights: Tensor, centers: Tensor, variance: Tensor, unit: Tensor) -> Sent:
        """The client's share of a private clustering step, by what it finds alone."""
        theta = fit_alone(client, self.family)
        belongs = responsibilities(theta / unit, weights, centers, variance.expand(len(weights)))
        return send(share=client_share(theta / unit, belongs), keep={"estimate": theta, "local": theta})

    @task
    def descend_privately(
        self, client: Client, weights: Tensor, centers: Tensor, variance: Tensor, unit: Tensor
    ) -> Sent:
        """The same steps as ``descend``; what leaves the client is its share of the next components."""
        variances = variance.expand(len(weights))
        theta, variance = self._descend(client, weights, centers * unit, variances * unit**2)
        belongs = responsibilities(theta / unit, weights, centers, variances)
        share = client_share(theta / unit, belongs, variance.sum() / unit**2 if self.corrected else 0.0)
        return send(share=share, keep={"estimate": theta, "deviation": variance.sqrt()})

    @join.into
    @descend_privately.into
    def _share(self) -> list[Release]:
        return [] if self.central is None else [self.central.release(count_releases(self.components, 1 + self.rounds))]

    @task
    def descend(self, client: Client, weights: Tensor, centers: Tensor, variances: Tensor) -> Sent:
        """Step 6 of Algorithm 4, ``local_steps`` times."""
        theta, variance = self._descend(client, weights, centers, variances)
        return send(theta=theta, risk=variance.sum(), keep={"estimate": theta, "deviation": variance.sqrt()})

    @task
    def alternate(self, client: Client, weights: Tensor, centers: Tensor, variances: Tensor) -> Sent:
        """The same steps, then one on this client's versions of log p, μ and σ²."""
        theta, variance = self._descend(client, weights, centers, variances)
        d, away = theta.numel(), centers - theta
        likely = responsibilities(theta, weights, centers, variances)
        square = away.square().sum(1) + (variance.sum() if self.corrected else 0.0)
        mean_rate = variances if self.lr_mean is None else self.lr_mean
        variance_rate = 2 * variances.square() / d if self.lr_variance is None else self.lr_variance
        slope = likely * (d / (2 * variances) - square / (2 * variances.square()))
        moved_centers = centers - (mean_rate * likely / variances)[:, None] * away
        step = {"log_weights": weights.clamp(min=1e-12).log() - (weights - likely), "centers": moved_centers}
        return send(
            **step, variances=variances - variance_rate * slope, keep={"estimate": theta, "deviation": variance.sqrt()}
        )

    @alternate.into
    def _steps(self) -> list[Release]:
        return [Mean("log_weights"), Mean("centers"), Mean("variances")]

    def _descend(self, client: Client, weights: Tensor, centers: Tensor, variances: Tensor) -> tuple[Tensor, Tensor]:
        """The client's model after its steps, and the diagonal of its posterior covariance."""
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
        return theta, variance_around(client, theta, 1 / (likely / variances).sum(), noise, self.family)

    @descend.into
    def _models(self) -> list[Release]:
        return [Each("theta", "risk") if self.corrected else Each("theta")]

    def fit(self, federation: Federation, after_round: AfterRound = ignore_round) -> PriorFit:
        """``rounds`` of client steps and clustering at the server."""
        dim = check_roster(federation.roster, self.family, clients=2, components=self.components)
        if self.central is not None:
            return self._privately(federation, dim, self.central, after_round)
        theta = federation.everyone().ask(self.begin)["theta"]
        found = cluster(theta, self.components, federation.seed)
        variances = self._variances(theta, found, 0.0)
        least = 1e-6 * variances
        for number in range(1, self.rounds + 1):
            cohort = federation.everyone()
            inputs: dict[str, Any] = {"weights": found.weights, "centers": found.centers, "variances": variances}
            if self.solver == "gd":
                replies = cohort.ask(self.alternate, **inputs)
                found = found._replace(weights=replies["log_weights"].softmax(0), centers=replies["centers"])
                variances = replies["variances"].clamp(min=least)
                if not float(found.centers.abs().max() + variances.max()) < ABSURD:  # also NaN
                    raise EstimationError(f"gradient descent diverged in round {number}; lower lr_mean or lr_variance")
            else:
                replies = cohort.ask(self.descend, **inputs)
                found = cluster(replies["theta"], self.components, federation.seed, found.centers)
                variances = self._variances(replies["theta"], found, replies["risk"] if self.corrected else 0.0)
            after_round(number)
        notes = [FEWER] if bool((found.weights == 0).any()) else []
        return PriorFit(_prior(found.weights, found.centers, variances), notes=notes)

    def _privately(self, federation: Federation, dim: int, central: Central, after_round: AfterRound) -> PriorFit:
        assert self.bound is not None, "checked when it was made"

        def question(number: int) -> Task:
            return self.join if number <= 1 else self.descend_privately

        def after_step(number: int) -> None:
            if number > 1:
                after_round(number - 1)

        last = 1 + self.rounds
        now = central.learn(federation, question, self.components, dim, self.bound, last, after_step)
        variances = (now.variance * self.bound**2).expand(self.components)
        return PriorFit(_prior(now.weights, now.centers * self.bound, variances))

    def _variances(self, theta: Tensor, found: Clusters, risk: Tensor | float) -> Tensor:
        """[k] variance of a coordinate around the own center; at least a millionth of the whole, so none vanishes."""
        squares = (theta - found.centers[found.label]).square().sum(1) + risk
        size = torch.bincount(found.label, minlength=self.components).clamp(min=1)
        total = torch.zeros(self.components, dtype=torch.float64).index_add_(0, found.label, squares)
        smallest = max(1e-12, 1e-6 * float(theta.var(0).mean()))
        return (total / (size * theta.shape[1])).clamp(min=smallest)


def _prior(weights: Tensor, centers: Tensor, variances: Tensor) -> dict[str, list[Any]]:
    """As plain values."""
    return {"weights": weights.tolist(), "centers": centers.tolist(), "sigma_theta": variances.sqrt().tolist()}


def responsibilities(theta: Tensor, weights: Tensor, centers: Tensor, variances: Tensor) -> Tensor:
    """[k] probability that θ is of each component."""
    distance = (theta - centers).square().sum(1)
    scale = 0.5 * theta.numel() * torch.log(2 * math.pi * variances)
    return torch.softmax(torch.log(weights) - distance / (2 * variances) - scale, 0)


def negative_log_prior_gradient(theta: Tensor, weights: Tensor, centers: Tensor, variances: Tensor) -> Tensor:
    """∇θ of −log Σ_l p_l·N(θ; μ_l, σ_l²·I)."""
    pull = responsibilities(theta, weights, centers, variances) / variances
    return (pull[:, None] * (theta - centers)).sum(0)
