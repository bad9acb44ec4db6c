"""Personal regressions with a Gaussian prior (P3 §3.1–3.2, Algorithms 2 and 3, Theorem 6)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from unalike.analytics.estimation.posterior import Family, design, fit_alone, loss_gradient, posterior, variance_around
from unalike.analytics.estimation.shared import (
    ABSURD,
    AfterRound,
    Channel,
    Estimates,
    EstimationError,
    Estimator,
    PriorFit,
    check_roster,
    ignore_round,
)
from unalike.core.checks import above, at_least, one_of
from unalike.core.release import Mean, Release, Sum
from unalike.core.vocabulary import Client, Federation, Sent, send, task

Solver = Literal["em", "gd"]
_SMALLEST = 1e-10  # of a variance, as a share of where it starts: likelihoods of clients that are all alike have no top
_ALIKE = "the clients' models do not differ more than chance explains: everybody's estimate is nearly the common model"


@dataclass(frozen=True)
class GaussianPrior(Estimator):
    """θ_i ~ N(μ, σθ²·I); y = ⟨θ_i, x⟩ + N(0, σx²) (linear) or y ~ Bernoulli(σ(⟨θ_i, x⟩)) (logistic).

    Known prior (``mu``, ``sigma_theta`` and, if linear, ``sigma_x``): a client needs nobody, and linear estimates are
    Theorem 6's posterior means. Unknown, by ``solver``:

    - "em": every round a client sends the posterior mean of θ_i, its expected squared distance from μ, and the expected
      squared error; their means are the next prior. For linear models this is the EM algorithm, so the likelihood
      rises in every round; the logistic posterior is Laplace's approximation.
    - "gd": Algorithms 2 and 3 as on the page: gradient steps on θ_i (kept), μ, σθ² and σx² of the joint objective
      (19). That has no minimum, since σθ → 0 with all θ_i = μ lowers it for ever; ``floor`` bounds the variances.

    ``channel`` in k bits or with local noise sends the posterior means alone, ``rounds`` times, each coordinate within
    ``bound``; the deviations must then be given, and (ε0, δ) is for all rounds together.
    """

    family: Family = "linear"
    mu: float | None = None
    sigma_theta: float | None = None
    sigma_x: float | None = None
    solver: Solver = "em"
    rounds: int = 100
    tolerance: float = 1e-6  # em: stop when the log-likelihood per client rises less, relatively
    lr: float = 1e-3  # gd: of θ
    lr_mean: float = 1e-3  # gd: of μ
    lr_variance: float = 1e-7  # gd: of σθ² and σx²
    floor: float = 1e-4  # gd: of σθ² and σx²
    channel: Channel = Channel()
    bound: float | None = None

    @property
    def kind(self) -> str:
        return self.family

    def theory(self, federation: Federation, found: Estimates) -> dict[str, float]:
        """Where the prior is known, the error that Theorem 6 expects."""
        return {} if self.mu is None else {"expected_mse": expected_mse(federation)}

    def __post_init__(self) -> None:
        above(self, sigma_theta=0, sigma_x=0, lr=0, lr_mean=0, lr_variance=0, floor=0, bound=0)
        at_least(self, rounds=1)
        one_of(self, "family", "solver")
        deviations = self.sigma_theta is not None and (self.sigma_x is not None or self.family == "logistic")
        if self.mu is not None and not deviations:
            raise EstimationError("a known prior is mu, sigma_theta and (if linear) sigma_x together; or give no mu")
        if not self.channel.is_bare and self.mu is None:
            if not deviations or self.bound is None:
                raise EstimationError(
                    "with bits or epsilon only the mean is learned: give sigma_theta, (if linear) sigma_x, and bound, "
                    "the largest magnitude of a coefficient"
                )
            if self.solver == "gd":
                raise EstimationError("bits and epsilon go with solver 'em', whose messages are bounded")

    # The clients' side

    @task
    def scales(self, client: Client) -> Sent:
        """Second moments of targets and inputs, to start from."""
        x, y = design(client)
        return send(scales=torch.stack([y.square().sum(), x.square().sum(), client.n.to(torch.float64)]))

    @task
    def expect(self, client: Client, mu: Tensor, spread: Tensor, noise: Tensor) -> Sent:
        """E-step: what the next prior is made of."""
        found = posterior(client, self.family, mu, spread, noise)
        numbers = [found.prior_error, found.noise_error, client.n.to(torch.float64), found.log_likelihood]
        unit = self.channel.unit(self.bound, mu.numel())
        return send(theta=found.theta / unit, statistic=torch.cat([found.theta, torch.stack(numbers)]))

    @expect.into
    def _statistics(self) -> list[Release]:
        return [Mean("statistic")] if self.channel.is_bare else [self.channel.release("theta", uses=self.rounds)]

    @task
    def begin(self, client: Client) -> Sent:
        """Algorithms 2 and 3 start from what a client finds alone."""
        return send(keep={"theta": fit_alone(client, self.family)})

    @task
    def descend(self, client: Client, mu: Tensor, spread: Tensor, noise: Tensor) -> Sent:
        """One step of Algorithm 2 (linear) or 3 (logistic) on θ_i, and this client's versions of μ, σθ² and σx²."""
        theta = client.kept.get("theta", mu)
        away = mu - theta
        gradient = loss_gradient(client, theta, self.family, noise) - away / spread
        new_mu = mu - self.lr_mean * away / spread
        d, n = mu.numel(), client.n
        new_spread = spread - self.lr_variance * (d / (2 * spread) - away.square().sum() / (2 * spread.square()))
        new_noise = noise
        if self.family == "linear":
            x, y = design(client)
            error = (y - x @ theta).square().sum()
            new_noise = noise - self.lr_variance * (n / (2 * noise) - error / (2 * noise.square()))
        step = torch.cat([new_mu, torch.stack([new_spread, new_noise])])
        return send(step=step, keep={"theta": theta - self.lr * gradient})

    @task
    def combine(self, client: Client, mu: Tensor, spread: Tensor, noise: Tensor) -> Sent:
        """The posterior mean under the learned prior; it stays here."""
        found = posterior(client, self.family, mu, spread, noise)
        own = {"local": fit_alone(client, self.family), "deviation": found.variance.sqrt()}
        return send(keep={"estimate": found.theta, "risk": found.risk.reshape(1), **own})

    @task
    def keep_last(self, client: Client, mu: Tensor, spread: Tensor, noise: Tensor) -> Sent:
        """Algorithms 2 and 3 end with the θ_i that the clients keep."""
        theta = client.kept.get("theta", mu)
        deviation = variance_around(client, theta, spread, noise, self.family).sqrt()
        return send(keep={"estimate": theta, "local": fit_alone(client, self.family), "deviation": deviation})

    # The server's side

    def fit(self, federation: Federation, after_round: AfterRound = ignore_round) -> PriorFit:
        """Learn the prior in ``rounds`` asks (none if it is known), then have every client combine."""
        dim = check_roster(federation.roster, self.family, clients=2 if self.mu is None else 1)
        mu = torch.full((dim,), self.mu or 0.0, dtype=torch.float64)
        trace: list[float] = []
        if self.mu is None:
            mu, spread, noise = self._learn(federation, mu, trace, after_round)
        else:
            spread, noise = self._start(federation)
        cohort = federation.everyone()
        last = self.keep_last if self.mu is None and self.solver == "gd" else self.combine
        cohort.ask(last, into=[], mu=mu, spread=_double(spread), noise=_double(noise))
        notes = [_ALIKE] if spread < 1e-6 * max(1e-300, float(mu.square().mean())) else []
        if len(trace) == self.rounds > 1 and not self._converged(trace):
            notes.append(
                f"EM has not converged in {self.rounds} rounds: the log-likelihood still rises by "
                f"{abs(trace[-1] / trace[-2] - 1):.2g} of itself in a round; more rounds and columns of like scale help"
            )
        prior: dict[str, Any] = {"mu": mu.tolist(), "sigma_theta": math.sqrt(spread)}
        if self.family == "linear":
            prior["sigma_x"] = math.sqrt(noise)
        return PriorFit(prior, trace, notes)

    def _start(self, federation: Federation) -> tuple[float, float]:
        """σθ² and σx² as given, or such that both explain half of the targets' variance."""
        if self.sigma_theta is not None and (self.sigma_x is not None or self.family == "logistic"):
            return self.sigma_theta**2, (self.sigma_x or 1.0) ** 2
        target, inputs, samples = federation.everyone().ask(self.scales, into=Sum("scales"))["scales"].tolist()
        if inputs == 0 or (target == 0 and self.family == "linear"):
            raise EstimationError("all inputs or all targets are 0, so there is nothing to regress")
        power = target if self.family == "linear" else samples  # logits of order 1
        noise = 0.5 * target / samples if self.sigma_x is None else self.sigma_x**2
        spread = 0.5 * power / inputs if self.sigma_theta is None else self.sigma_theta**2
        return float(spread), float(noise) if self.family == "linear" else 1.0

    def _learn(
        self, federation: Federation, mu: Tensor, trace: list[float], after_round: AfterRound
    ) -> tuple[Tensor, float, float]:
        """μ, σθ² and σx² by EM or gradient descent; through a channel that is not bare, μ alone."""
        dim, (spread, noise) = len(mu), self._start(federation)
        least_spread, least_noise = _SMALLEST * spread, _SMALLEST * noise
        if self.solver == "gd":
            least_spread = least_noise = self.floor
            federation.everyone().ask(self.begin, into=[])
        for number in range(1, self.rounds + 1):
            inputs: dict[str, Any] = {"mu": mu, "spread": _double(spread), "noise": _double(noise)}
            cohort = federation.everyone()
            new_spread, new_noise = spread, noise
            if not self.channel.is_bare:
                mu = cohort.ask(self.expect, **inputs)["theta"].mean(0) * self.channel.unit(self.bound, dim)
            elif self.solver == "gd":
                step = cohort.ask(self.descend, into=Mean("step"), **inputs)["step"]
                mu, (new_spread, new_noise) = step[:dim], step[dim:].tolist()
            else:
                statistic = cohort.ask(self.expect, **inputs)["statistic"]
                prior_error, noise_error, samples, likelihood = statistic[dim:].tolist()
                moved = float((statistic[:dim] - mu).square().sum())
                mu, new_spread, new_noise = statistic[:dim], (prior_error - moved) / dim, noise_error / samples
                trace.append(likelihood)
            if self.sigma_theta is None:
                spread = max(least_spread, new_spread)
            if self.family == "linear" and self.sigma_x is None:
                noise = max(least_noise, new_noise)
            if not float(mu.abs().max()) + spread + noise < ABSURD:  # also NaN
                raise EstimationError(f"gradient descent diverged in round {number}; lower lr, lr_mean or lr_variance")
            after_round(number)
            if self._converged(trace):
                break
        return mu, spread, noise

    def _converged(self, trace: Sequence[float]) -> bool:
        return len(trace) > 1 and abs(trace[-1] - trace[-2]) <= self.tolerance * (abs(trace[-2]) + 1e-12)


def _double(value: float) -> Tensor:
    return torch.tensor(value, dtype=torch.float64)


@task
def read_risk(client: Client, missing: Tensor) -> Sent:
    """For measuring in simulation."""
    return send(risk=client.kept.get("risk", missing))


def expected_mse(federation: Federation) -> float:
    """Mean over clients of Theorem 6's tr (I/σθ² + XᵀX/σx²)⁻¹ (16) under the prior that was used."""
    missing = torch.full((1,), torch.nan, dtype=torch.float64)
    with federation.aside() as own:
        return float(own.everyone().ask(read_risk, missing=missing)["risk"].mean())


# One model for all, as a baseline


@dataclass(frozen=True)
class OneForAll:
    """FedAvg's model: where it converges to, or after ``rounds`` rounds of one local step from zero.

    For measuring in simulation: fit it to ``federation.aside()``.
    """

    family: Family
    rounds: int | None = None  # None: until it has converged
    lr: float = 0.1

    @task
    def curvature(self, client: Client, theta: Tensor) -> Sent:
        """Gradient and Hessian of the client's loss."""
        x, _ = design(client)
        chance = torch.sigmoid(x @ theta)
        weight = torch.ones_like(chance) if self.family == "linear" else chance * (1 - chance)
        return send(gradient=self._gradient(client, theta), hessian=x.T @ (weight[:, None] * x))

    @task
    def one_step(self, client: Client, theta: Tensor) -> Sent:
        """One full-batch step of FedAvg on the client's mean loss."""
        return send(update=-self.lr * self._gradient(client, theta) / client.n)

    def _gradient(self, client: Client, theta: Tensor) -> Tensor:
        return loss_gradient(client, theta, self.family, torch.ones((), dtype=torch.float64))

    def fit(self, federation: Federation) -> Tensor:
        """The model [d]."""
        theta = torch.zeros(check_roster(federation.roster, self.family), dtype=torch.float64)
        if self.rounds is not None:
            for _ in range(self.rounds):
                theta = theta + federation.everyone().ask(self.one_step, into=Mean("update"), theta=theta)["update"]
            return theta
        for _ in range(1 if self.family == "linear" else 15):
            sums = federation.everyone().ask(self.curvature, into=[Sum("gradient"), Sum("hessian")], theta=theta)
            gradient = sums["gradient"]
            solved = torch.linalg.lstsq(sums["hessian"], gradient[:, None], driver="gelsd")  # it may be singular
            step = solved.solution[:, 0]
            decrement = math.sqrt(max(0.0, float(gradient @ step) / len(federation.roster)))
            theta = theta - (step if self.family == "linear" else step / (1 + decrement))
        return theta
