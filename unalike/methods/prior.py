"""Personal models under a prior that is learned with them: Gaussian, Laplace, or a mixture of Gaussians (P3 §3).

Σ_i f_i(θ_i) + R({θ_i}; Γ) is minimised over the models θ_i and the prior's parameters Γ in turns, (12) and (22).
Symbols: μ_l centres, σ_l² variances of a coordinate, p_l weights; for the Laplace prior μ and b.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal

import torch
from torch import Tensor
from torch.func import grad_and_value

from unalike.core.checks import above, at_least, one_of
from unalike.core.vocabulary import Client, Cohort, Federation, Models, Sent, State, send, task
from unalike.learn.local import LocalSGD
from unalike.learn.objective import Batch, InTurns, Moves, Supervised
from unalike.learn.schedules import Schedule
from unalike.methods.averaging import ProtectedMean, mean
from unalike.methods.newcomers import NOBODY, PersonalModels, one_rate, with_answered

_EMPTY = 1e-3  # a component with a smaller share of the cohort stays as it is


def responsibilities(theta: Tensor, weights: Tensor, centers: Tensor, scale: Tensor) -> Tensor:
    """[k] ln of p_l·N(θ; μ_l, σ_l²·I)."""
    size = 0.5 * theta.numel() * torch.log(2 * math.pi * scale.square())
    return torch.log(weights) - size - (theta - centers).square().sum(1) / (2 * scale.square())


@dataclass(frozen=True)
class LearnedPrior(ProtectedMean, PersonalModels):
    """A client's loss is its mean loss plus R(θ)/n: the n-th part of −ln of the prior's density at its model.

    The model stays with its client. What is summed is what the next Γ needs. *gaussian* and *mixture*: how likely the
    client is of each component, that times θ − μ_l, and times ‖θ − μ_l‖²/d; the server takes a step of EM. *laplace*:
    sign(θ − μ) and ‖θ − μ‖₁/d; the server moves μ by b times the mean sign, which comes to rest at the median.
    The paper clusters the models themselves (Algorithm 4), for which the server would have to see them; and (22) prints
    the mixture's R without its minus sign.

    Where σ is small and rows are few, R/n is far steeper than f, and the paper's gradient step at a rate η that suits f
    overshoots the prior's centre by more in every step. So the rate is at most 1/λ, with λ = strength/n · Σ_l r_l/σ_l²
    the curvature of R/n at responsibilities r (momentum comes on top); minima of f + R/n stay where they are. The
    Laplace prior's pull takes a coordinate to μ and not beyond, so R is rounded off within η·strength/(n·b) of μ.

    ``strength`` multiplies R; 1 is (12). ``scale`` is the first σ or b and ``floor`` the least: the best joint one is
    0, with all models alike. A newcomer starts from the mean centre. The other fields are those of ``ProtectedMean``
    and ``PersonalModels``. For a prior with a covariance between clients (§3.6) see ``mr-mtl``.
    """

    cohort: int | float = 10
    local: LocalSGD = field(default_factory=LocalSGD)
    prior: Literal["gaussian", "laplace", "mixture"] = "mixture"
    components: int = 2
    strength: float = 1.0
    scale: float = 0.1
    floor: float = 0.01
    schedule: Schedule = field(default_factory=Schedule)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_privacy(self.local)
        one_of(self, "prior")
        at_least(self, components=1)
        above(self, strength=0, scale=0, floor=0)
        one_rate(self.local)

    @cached_property
    def first(self) -> Tensor:
        """[k, d] the centres before the first round: one model, and for several components a little beside it."""
        count = self.components if self.prior == "mixture" else 1
        theta = self.model.init(self.agreed_seed)
        random = torch.Generator().manual_seed(self.agreed_seed)
        aside = self.floor * torch.randn(count, len(theta), generator=random)
        return theta + (aside if count > 1 else 0.0 * aside)

    # The clients' side

    def penalty(self, theta: Tensor, weights: Tensor, centers: Tensor, scale: Tensor) -> Tensor:
        """R of one model: −ln of the prior's density."""
        if self.prior == "laplace":
            b = scale[0]
            return (theta - centers[0]).abs().sum() / b + theta.numel() * torch.log(2 * b)
        return -torch.logsumexp(responsibilities(theta, weights, centers, scale), 0)

    def _train(
        self, client: Client, start: Tensor, gamma: dict[str, Tensor], local: LocalSGD, rate: Tensor | float = 1.0
    ) -> tuple[Tensor, Tensor]:
        """The client's model after local steps on its loss plus R/n, and the mean of both."""
        share, eta = self.strength / client.n.clamp(min=1), torch.as_tensor(one_rate(local) * rate)
        of_data = grad_and_value(Supervised(self.model))

        def moves(params: dict[str, Tensor], batch: Batch) -> Moves:
            theta = params["theta"]
            gradient, loss = of_data(theta, batch)
            yield {"theta": self.direction(gradient, theta, share, eta, gamma)}
            return loss + share * self.penalty(theta, **gamma)

        after, loss = local.minimise(InTurns(moves), {"theta": start}, client, labels=True, rate=rate)
        assert isinstance(after, dict)
        return after["theta"], loss

    def direction(
        self, gradient: Tensor, theta: Tensor, share: Tensor, eta: Tensor, gamma: Mapping[str, Tensor]
    ) -> Tensor:
        """The gradient of f, with that of R·share, such that a step at the rate η does not overshoot the prior."""
        centers, scale = gamma["centers"], gamma["scale"]
        away = theta - centers
        if self.prior == "laplace":
            most = share / scale[0]
            return gradient + torch.clamp(away[0] / eta.clamp(min=1e-30), -most, most)
        precise = share * torch.softmax(responsibilities(theta, **gamma), 0) / scale.square()
        return (gradient + precise @ away) / (eta * precise.sum()).clamp(min=1.0)

    @task
    def fit(self, client: Client, weights: Tensor, centers: Tensor, scale: Tensor, rate: Tensor) -> Sent:
        """Local SGD on the client's own model; sends its share of the next Γ."""
        gamma = {"weights": weights, "centers": centers, "scale": scale}
        start = client.kept.get("theta", weights @ centers)
        theta, loss = self._train(client, start, gamma, self.local, rate)
        return send(update=self.share(theta, **gamma).flatten(), loss=loss, keep={"theta": theta})

    def share(self, theta: Tensor, weights: Tensor, centers: Tensor, scale: Tensor) -> Tensor:
        """[k, d + 2]: what moves a centre, what its spread is made of, and how much the client counts."""
        away = theta - centers
        one = torch.ones(len(centers), 1, dtype=theta.dtype)
        if self.prior == "laplace":
            return torch.cat([away.sign(), away.abs().mean(1, keepdim=True), one], 1)
        belongs = torch.softmax(responsibilities(theta, weights, centers, scale), 0)[:, None]
        return belongs * torch.cat([away, away.square().mean(1, keepdim=True), one], 1)

    fit.into(mean)

    @task
    def join(self, client: Client, weights: Tensor, centers: Tensor, scale: Tensor) -> Sent:
        """The model of a newcomer; a client that has one keeps it."""
        gamma, local = {"weights": weights, "centers": centers, "scale": scale}, self.local.repeat(self.newcomer_rounds)
        theta, _ = self._train(client, weights @ centers, gamma, local)
        return send(keep={"theta": client.kept.get("theta", theta)})

    # The server's side

    def start(self, seed: int) -> State:
        count = len(self.first)
        weights, scale = torch.full((count,), 1 / count), torch.full((count,), self.scale)
        return State(weights=weights, centers=self.first, scale=scale, ids=NOBODY)

    def round(self, state: State, federation: Federation) -> State:
        cohort = self.sample(federation, self.cohort)
        gamma: dict[str, Any] = {name: state[name] for name in ("weights", "centers", "scale")}
        replies = cohort.ask(self.fit, **gamma, rate=self.schedule(federation.round))
        state = with_answered(state, cohort, replies)
        if "loss" in replies:
            federation.report(loss=replies["loss"])
        if "update" not in replies:
            return state
        return state.replace(**self.next_prior(replies["update"].reshape(len(state.centers), -1), **gamma))

    def next_prior(self, mean: Tensor, weights: Tensor, centers: Tensor, scale: Tensor) -> dict[str, Tensor]:
        """The next Γ from the mean share [k, d + 2]."""
        step, spread, count = mean[:, :-2], mean[:, -2], mean[:, -1]
        if self.prior == "laplace":
            b = spread.clamp(min=self.floor)
            return {"weights": weights, "centers": centers + scale[:, None] * step, "scale": b}
        filled = count > _EMPTY
        size = count.clamp(min=_EMPTY)
        shift = torch.where(filled[:, None], step / size[:, None], 0.0)
        variance = (spread / size - shift.square().mean(1)).clamp(min=self.floor**2)
        return {
            "weights": size / size.sum(),
            "centers": centers + shift,
            "scale": torch.where(filled, variance.sqrt(), scale),
        }

    def personalize(self, state: State, cohort: Cohort) -> Models:
        gamma = {name: state[name] for name in ("weights", "centers", "scale")}
        return self.own_models(state, cohort, self.join, state.weights @ state.centers, **gamma)
