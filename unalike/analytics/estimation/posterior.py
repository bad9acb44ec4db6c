"""One client's side of personal regression: posteriors given the prior, and what it finds alone.

Written for one client and vectorised by the simulator, so nothing branches on data; padded rows are zero.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from unalike.core.client import Client

Family = Literal["linear", "logistic"]
_RANK = 1e-10  # an eigenvalue below this share of the largest counts as zero
_NEWTON_STEPS = 15
_VAGUE = 100.0  # variance of the prior with which a client that is alone fits a logistic model: separable data diverge


@dataclass(frozen=True)
class Posterior:
    """Of θ_i given the client's data and the prior."""

    theta: Tensor  # [d] its mean (logistic: to the second order of Laplace's approximation)
    risk: Tensor  # trace of its covariance: the expected squared error of the mean (Theorem 6)
    variance: Tensor  # [d] the diagonal of its covariance
    prior_error: Tensor  # expected ‖θ − μ‖²
    noise_error: Tensor  # expected ‖y − Xθ‖²
    log_likelihood: Tensor  # of the data, θ integrated out


def design(client: Client) -> tuple[Tensor, Tensor]:
    """X [capacity, d] and y [capacity] in double precision, zero where padded."""
    if client.full:
        return client.x.to(torch.float64), client.y.to(torch.float64)
    mask = client.mask
    x = torch.where(mask[:, None], client.x.to(torch.float64), 0.0)
    return x, torch.where(mask, client.y.to(torch.float64), 0.0)


def _classes(y: Tensor) -> Tensor:
    """y; NaN, so that its client does not answer, in place of a target that is neither 0 nor 1."""
    return torch.where((y == 0) | (y == 1), y, torch.nan)


def posterior(client: Client, family: Family, mu: Tensor, spread: Tensor, noise: Tensor) -> Posterior:
    """Under the prior N(μ, σθ²·I), with ``spread`` σθ² and, if linear, ``noise`` σx²."""
    return linear_posterior(client, mu, spread, noise) if family == "linear" else logistic_posterior(client, mu, spread)


def linear_posterior(client: Client, mu: Tensor, spread: Tensor, noise: Tensor) -> Posterior:
    """θ̂ = (I/σθ² + XᵀX/σx²)⁻¹(XᵀY/σx² + μ/σθ²) (Theorem 6), by way of whichever Gram matrix is smaller."""
    x, y = design(client)
    rows, d = x.shape
    n = client.n.to(torch.float64)
    r = y - x @ mu
    if rows <= d:  # K = σθ²·XXᵀ + σx²·I, the covariance of y; θ̂ = μ + σθ²·XᵀK⁻¹r. Padding adds σx² to its diagonal.
        identity = torch.eye(rows, dtype=torch.float64)
        factor = torch.linalg.cholesky(spread * (x @ x.T) + noise * identity)
        inverse = torch.cholesky_solve(identity, factor)
        solved = inverse @ r
        theta = mu + spread * (x.T @ solved)
        padding = rows - n
        reach = x * (inverse @ x)
        risk, variance = d * spread - spread.square() * reach.sum(), spread - spread.square() * reach.sum(0)
        fit = noise * n - noise.square() * (torch.diagonal(inverse).sum() - padding / noise)
        log_determinant = 2 * torch.diagonal(factor).log().sum() - padding * torch.log(noise)
        explained = r @ solved
    else:
        identity = torch.eye(d, dtype=torch.float64)
        factor = torch.linalg.cholesky(identity / spread + x.T @ x / noise)
        covariance = torch.cholesky_solve(identity, factor)
        pull = x.T @ r / noise
        theta = mu + covariance @ pull
        variance = torch.diagonal(covariance)
        risk = variance.sum()
        fit = noise * (d - risk / spread)  # trace of X·covariance·Xᵀ
        log_determinant = 2 * torch.diagonal(factor).log().sum() + n * torch.log(noise) + d * torch.log(spread)
        explained = r.square().sum() / noise - pull @ (covariance @ pull)
    error = (y - x @ theta).square().sum() + fit
    likelihood = -0.5 * (n * math.log(2 * math.pi) + log_determinant + explained)
    return Posterior(theta, risk, variance, (theta - mu).square().sum() + risk, error, likelihood)


def logistic_mode(client: Client, mu: Tensor, spread: Tensor) -> Tensor:
    """The θ that minimises the loss of Algorithm 3, by damped Newton steps."""
    x, y = design(client)
    identity = torch.eye(x.shape[1], dtype=torch.float64)
    theta = mu
    for _ in range(_NEWTON_STEPS):
        chance = torch.sigmoid(x @ theta)
        gradient = x.T @ torch.where(client.mask, chance - _classes(y), 0.0) + (theta - mu) / spread
        factor = _curvature(x, chance, spread, identity)
        step = torch.cholesky_solve(gradient[:, None], factor)[:, 0]
        theta = theta - step / (1 + torch.sqrt((gradient * step).sum().clamp(min=0)))
    return theta


def logistic_posterior(client: Client, mu: Tensor, spread: Tensor) -> Posterior:
    """The mode by damped Newton steps, Laplace's approximation around it, and from its skewness the mean.

    The mode itself lies nearer to zero effect than the mean does, and a prior made of modes shrinks.
    """
    x, y = design(client)
    d = x.shape[1]
    identity = torch.eye(d, dtype=torch.float64)
    theta = logistic_mode(client, mu, spread)
    score = x @ theta
    chance = torch.sigmoid(score)
    factor = _curvature(x, chance, spread, identity)
    covariance = torch.cholesky_solve(identity, factor)
    risk = covariance.diagonal().sum()
    skew = chance * (1 - chance) * (1 - 2 * chance) * (x * (x @ covariance)).sum(1)
    loss = torch.where(client.mask, torch.nn.functional.softplus(score) - y * score, 0.0).sum()
    away = (theta - mu).square().sum()
    log_determinant = 2 * torch.diagonal(factor).log().sum() + d * torch.log(spread)
    likelihood = -loss - 0.5 * (away / spread + log_determinant)
    mean = theta - 0.5 * covariance @ (x.T @ skew)
    return Posterior(
        mean, risk, covariance.diagonal(), (mean - mu).square().sum() + risk, torch.zeros_like(risk), likelihood
    )


def _curvature(x: Tensor, chance: Tensor, spread: Tensor, identity: Tensor) -> Tensor:
    factor: Tensor = torch.linalg.cholesky(x.T @ ((chance * (1 - chance))[:, None] * x) + identity / spread)
    return factor


def variance_around(client: Client, theta: Tensor, spread: Tensor, noise: Tensor, family: Family) -> Tensor:
    """[d] diagonal of the posterior covariance around θ, for a prior of this variance."""
    x, _ = design(client)
    identity = torch.eye(x.shape[1], dtype=torch.float64)
    if family == "linear":
        factor = torch.linalg.cholesky(x.T @ x / noise + identity / spread)
    else:
        factor = _curvature(x, torch.sigmoid(x @ theta), spread, identity)
    return torch.cholesky_solve(identity, factor).diagonal()


def fit_alone(client: Client, family: Family) -> Tensor:
    """What a client finds alone: least squares of least norm, also where XᵀX is singular (17); logistic: a mode."""
    x, y = design(client)
    d = x.shape[1]
    if family == "logistic":
        vague = torch.tensor(_VAGUE, dtype=torch.float64)
        return logistic_mode(client, torch.zeros(d, dtype=torch.float64), vague)
    wide = x.shape[0] <= d
    gram = x @ x.T if wide else x.T @ x
    values, vectors = torch.linalg.eigh(gram)
    kept = values > _RANK * values[-1]
    inverse = torch.where(kept, 1 / torch.where(kept, values, 1.0), 0.0)
    target = y if wide else x.T @ y
    solved: Tensor = vectors @ (inverse * (vectors.T @ target))
    return x.T @ solved if wide else solved


def loss_gradient(client: Client, theta: Tensor, family: Family, noise: Tensor) -> Tensor:
    """∇f_i(θ): of the squared error over 2σx², or of the cross entropy, summed over the client's rows."""
    x, y = design(client)
    score = x @ theta
    if family == "linear":
        return x.T @ (score - y) / noise
    return x.T @ torch.where(client.mask, torch.sigmoid(score) - _classes(y), 0.0)
