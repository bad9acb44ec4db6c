"""Means or linear models that are one of a few candidates (P3 §2.3, Algorithms 1 and 7)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from unalike.analytics.estimation.mixture import FEWER, Clusters, cluster
from unalike.analytics.estimation.posterior import design, fit_alone
from unalike.analytics.estimation.private import Central, client_share, count_releases
from unalike.analytics.estimation.shared import (
    AfterRound,
    Channel,
    EstimationError,
    Estimator,
    PriorFit,
    check_roster,
    ignore_round,
)
from unalike.core.checks import above, at_least, one_of
from unalike.core.release import Release
from unalike.core.vocabulary import Client, Federation, Sent, Task, send, task

MixedModel = Literal["means", "linear"]


@dataclass(frozen=True)
class DiscreteMixture(Estimator):
    """θ_i is one of k candidates μ_l, with probability p_l (P3 §2.3; Algorithm 1 for means, 7 for linear models).

    Known prior: give ``candidates`` [k, d] and ``weights`` [k], and no client sends anything (Theorem 5). Unknown, with
    ``once=False``: in every round a client sends its posterior mean Σ_l α_l·μ_l and the server clusters those, as on
    the page; where candidates overlap, those means draw them together. With ``once`` a client sends its local estimate
    a single time and the server fits a spherical mixture to them by EM, which ends nearer to the truth.

    With a channel that is not bare, ``bound`` limits the norm of what is sent; for means it follows from ``radius`` ≥
    ‖μ_l‖ (Lemma 1). (ε0, δ) is for all rounds together. ``central``: the server clusters by noisy sums alone (§2.3.3,
    ``private.py``), ``rounds`` times after the last split; with ``once=False`` the sums after the first are of
    posterior means, made of the last candidates, so that their noise adds up from round to round.
    """

    components: int
    sigma_x: float
    model: MixedModel = "means"
    rounds: int = 10
    once: bool = True
    candidates: Tensor | None = None
    weights: Tensor | None = None
    channel: Channel = Channel()
    radius: float | None = None
    bound: float | None = None
    central: Central | None = None
    kind = "mixture"

    @property
    def loss(self) -> str:
        return "mean" if self.model == "means" else "linear"

    def __post_init__(self) -> None:
        above(self, sigma_x=0, bound=0)
        at_least(self, components=1, rounds=1)
        one_of(self, "model")
        if self.central is not None and not self.channel.is_bare:
            raise EstimationError("the noise is either the clients' own (channel) or on their sums (central): give one")
        if (self.candidates is None) != (self.weights is None):
            raise EstimationError("a known prior is candidates and weights together; give both or neither")
        unbounded = self.bound is None and (self.model == "linear" or self.radius is None)
        if self.candidates is None and not (self.channel.is_bare and self.central is None) and unbounded:
            raise EstimationError(
                "with bits or epsilon a bound must be known: give bound, the largest norm of a client's estimate"
                + (", or radius, that of a candidate" if self.model == "means" else "")
            )

    @task
    def begin(self, client: Client, unit: Tensor) -> Sent:
        """θ_i⁰: the mean, or least squares of least norm."""
        return send(theta=self._alone(client) / unit)

    @task
    def update(self, client: Client, candidates: Tensor, weights: Tensor, unit: Tensor) -> Sent:
        """Step 6: Σ_l α_l·μ_l with α_l ∝ p_l·exp(−squared error / 2σx²)."""
        likely = self._belongs(client, candidates, weights)
        theta = likely @ candidates
        deviation = (likely @ (candidates - theta).square()).sqrt()
        return send(theta=theta / unit, keep={"estimate": theta, "local": self._alone(client), "deviation": deviation})

    @begin.into
    @update.into
    def _message(self) -> list[Release]:
        return [self.channel.release("theta", uses=1 if self.once else self.rounds)]

    @task
    def join(self, client: Client, weights: Tensor, centers: Tensor, variance: Tensor, unit: Tensor) -> Sent:
        """The client's share of a private step. Its data say where it belongs, so the variance is not needed."""
        belongs = self._belongs(client, centers * unit, weights)
        return send(share=client_share(self._alone(client) / unit, belongs))

    @task
    def alternate(self, client: Client, weights: Tensor, centers: Tensor, variance: Tensor, unit: Tensor) -> Sent:
        """The same of a private step of Algorithm 1: its posterior mean counts for the nearest candidate."""
        theta = self._belongs(client, centers * unit, weights) @ centers
        nearest = torch.arange(len(centers)) == (theta - centers).square().sum(1).argmin()
        return send(share=client_share(theta, nearest.to(torch.float64)))

    @join.into
    @alternate.into
    def _share(self) -> list[Release]:
        return [] if self.central is None else [self.central.release(count_releases(self.components, self.rounds))]

    def _alone(self, client: Client) -> Tensor:
        return client.mean(client.x.to(torch.float64)) if self.model == "means" else fit_alone(client, "linear")

    def _belongs(self, client: Client, candidates: Tensor, weights: Tensor) -> Tensor:
        """α_l, how likely each candidate is."""
        if self.model == "means":  # up to what is the same for every candidate
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

    def fit(self, federation: Federation, after_round: AfterRound = ignore_round) -> PriorFit:
        """Learn the candidates (unless known), then have every client combine."""
        unknown, family = self.candidates is None, "linear" if self.model == "linear" else None
        needed = {"clients": 2, "components": self.components} if unknown else {}
        dim = check_roster(federation.roster, family, **needed)
        trace: list[float] = []
        if self.candidates is not None and self.weights is not None:
            candidates, weights = self._check_candidates(dim)
        else:
            candidates, weights, trace = self._learn(federation, dim, after_round)
        federation.everyone().ask(self.update, into=[], candidates=candidates, weights=weights, unit=1.0)
        notes = [FEWER] if bool((weights == 0).any()) else []
        prior = {"candidates": candidates.tolist(), "weights": weights.tolist()}
        return PriorFit(prior, trace, notes)

    def _check_candidates(self, dim: int) -> tuple[Tensor, Tensor]:
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

            def question(number: int) -> Task:  # the first step after the last split is of local estimates, too
                return self.join if self.once or number <= 1 else self.alternate

            noisy = self.central.learn(federation, question, self.components, dim, bound, self.rounds, after_round)
            return noisy.centers * bound, noisy.weights, []
        unit = torch.tensor(1.0 if bound is None or self.channel.is_bare else bound, dtype=torch.float64)
        theta = federation.everyone().ask(self.begin, unit=unit)["theta"] * unit
        found = cluster(theta, self.components, seed)
        if self.once:
            return spherical_em(theta, found, steps=200)
        after_round(1)
        trace = [spread_within(theta, found)]
        for number in range(2, self.rounds + 1):
            cohort = federation.everyone()
            replies = cohort.ask(self.update, candidates=found.centers, weights=found.weights, unit=unit)
            theta = replies["theta"] * unit
            found = cluster(theta, self.components, seed, found.centers)
            trace.append(spread_within(theta, found))
            after_round(number)
        return found.centers, found.weights, trace


def spread_within(points: Tensor, found: Clusters) -> float:
    """Mean squared distance from the own center."""
    return float((points - found.centers[found.label]).square().sum(1).mean())


def spherical_em(points: Tensor, start: Clusters, steps: int) -> tuple[Tensor, Tensor, list[float]]:
    """Centers, weights and the rising log-likelihood of a Gaussian mixture with one variance for all coordinates."""
    centers, weights = start.centers, start.weights
    d = points.shape[1]
    smallest = 1e-9 * max(1e-300, float(points.var(0).mean()))
    variance = max(smallest, spread_within(points, start) / d)
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
