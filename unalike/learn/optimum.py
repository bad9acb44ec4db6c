"""The convex problems of Malekmohammadi (thesis, ch. 2): their minimum, the gap to it, and how unlike the clients are.

It takes everybody's data to know a minimum, so all of this is a simulation's own view: it measures, and is charged to
no ledger. The losses are those of the model `linear`, F(θ) = Σ_i f_i(θ) with the sum f_i of client i's losses.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from unalike.core.release import Each, Mean, Sum
from unalike.core.vocabulary import Client, Cohort, Federation, Sent, send, task

_NEWTON = 50  # steps at most; a dozen are enough


@dataclass(frozen=True)
class Losses:
    """f_i(θ) and its derivatives at one client: least squares, or the logistic loss of two classes."""

    @task
    def derivatives(self, client: Client, theta: Tensor) -> Sent:
        """f_i, its gradient and its Hessian; how steep it is (‖∇f_i‖²), and its largest curvature."""
        client = client.with_labels
        x = client.x.flatten(1).to(torch.float64) * client.mask[:, None]
        scores = x @ theta
        if client.y.is_floating_point():
            error = torch.where(client.mask, scores - client.y, 0)
            value, slope, bend = error.square().sum() / 2, error, client.mask.to(torch.float64)
        else:
            share = scores.sigmoid()
            losses = F.softplus(scores) - client.y * scores
            value, slope = torch.where(client.mask, losses, 0).sum(), share - client.y
            bend = share * (1 - share)
        gradient, hessian = x.T @ slope, x.T @ (bend[:, None] * x)
        steep, curvature = gradient.square().sum(), torch.linalg.eigvalsh(hessian)[-1]
        return send(value=value, gradient=gradient, hessian=hessian, steep=steep, curvature=curvature)

    @task
    def value(self, client: Client, theta: Tensor) -> Sent:
        client = client.with_labels
        scores = client.x.flatten(1).to(torch.float64) @ theta
        return send(value=client.sum(F.softplus(scores) - client.y * scores))


@dataclass(frozen=True)
class Optimum:
    """Where F(θ) + ridge·‖θ‖²/2 is least."""

    theta: Tensor  # θ*
    value: float
    hessian: Tensor  # at θ*
    heterogeneity: float  # H
    curvature: float  # the largest eigenvalue of a client's Hessian at θ*
    clients: int
    ridge: float
    quadratic: bool

    @classmethod
    def find(cls, federation: Federation, dim: int, ridge: float = 0.0) -> Optimum:
        """By Newton's method over the federation's clients with labels; a least squares takes one step.

        H = (1/m)·Σ ‖∇f_i(θ*)‖² of Khaled et al. (2020), for least squares with the gradient of ‖Aθ − b‖², twice that
        of f_i, which is what the thesis's figures show.
        """
        quadratic = federation.roster.schema.target == "number"
        theta = torch.zeros(dim, dtype=torch.float64)
        with federation.aside() as aside:
            cohort = _labeled(aside)
            for step in range(_NEWTON):
                summed = cohort.ask(_LOSSES.derivatives, into=[Sum("gradient"), Sum("hessian"), *_MORE], theta=theta)
                hessian = summed["hessian"] + ridge * torch.eye(dim, dtype=torch.float64)
                move = torch.linalg.lstsq(hessian, summed["gradient"] + ridge * theta, driver="gelsd").solution
                if step and bool(move.norm() <= 1e-13 * theta.norm()):
                    break
                theta = theta - move
        curvature, m = float(summed["curvature"].max()), len(cohort)
        value = float(summed["value"]) + ridge / 2 * float(theta.square().sum())
        H = float(summed["steep"]) * (4 if quadratic else 1)
        return cls(theta, value, hessian, H, curvature, m, ridge, quadratic)

    def gap(self, theta: Tensor, federation: Federation) -> float:
        """F(θ) − F(θ*): for least squares ½eᵀQe with e = θ − θ*, summed over clients; else the mean over clients.

        (So the thesis has it. As a difference of sums, the gap of a least squares would show rounding only.)
        """
        theta = theta.to(torch.float64)
        error = theta - self.theta
        if self.quadratic:
            return float(error @ self.hessian @ error) / 2
        with federation.aside() as aside:
            total = float(_labeled(aside).ask(_LOSSES.value, into=Sum("value"), theta=theta)["value"])
        return (total + self.ridge / 2 * float(theta.square().sum()) - self.value) / self.clients


_LOSSES = Losses()
_MORE = (Sum("value"), Mean("steep"), Each("curvature"))


def _labeled(federation: Federation) -> Cohort:
    return federation.cohort(federation.roster.labeled.nonzero().flatten())
