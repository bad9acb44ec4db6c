"""How points move in operator splitting, and what a client keeps of its own (T2 eq. 2.15-2.17)."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from unalike.core.client import Client
from unalike.learn.anderson import pushed
from unalike.learn.schedules import Schedule


@dataclass(frozen=True)
class Schedules:
    """By round, the factors of α, β, γ and of the local rate. ``local=None``: the factor of η."""

    alpha: Schedule = field(default_factory=Schedule)
    beta: Schedule = field(default_factory=Schedule)
    gamma: Schedule = field(default_factory=Schedule)
    local: Schedule | None = None


@dataclass(frozen=True)
class Relaxation:
    """α, β and γ with their schedules, for points that are accelerated with a memory of τ rounds.

    ``coefficients``, which a round sends where there are schedules, are α_t, β_{t−1} and γ_{t−1}.
    """

    alpha: float
    beta: float
    gamma: float
    schedules: Schedules
    memory: int

    @property
    def common(self) -> bool:
        """Is u_i the same at all clients, as β_t = 1 makes it?"""
        return self.beta == 1 and self.schedules.beta == Schedule()

    @property
    def relaxes(self) -> bool:
        """Is γ_t below 1?"""
        return self.gamma != 1 or self.schedules.gamma != Schedule()

    def gamma_of(self, number: int) -> float:
        """γ_t."""
        return self.gamma * self.schedules.gamma(number)

    def coefficients(self, number: int) -> Tensor | None:
        factors, last = self.schedules, max(1, number - 1)
        if factors == Schedules(local=factors.local):
            return None
        found = [self.alpha * factors.alpha(number), self.beta * factors.beta(last), self.gamma_of(last)]
        return torch.tensor(found, dtype=torch.float64)

    def image(self, u: Tensor, z: Tensor, center: Tensor, coefficients: Tensor | None = None) -> Tensor:
        """(2.16) and (2.17): T(u), the image of the last point."""
        beta, gamma = (self.beta, self.gamma) if coefficients is None else coefficients[1:]
        return (1 - gamma) * u + gamma * ((1 - beta) * z + beta * center)

    def last(self, client: Client, center: Tensor) -> tuple[Tensor, Tensor]:
        """The client's last u and z; z̄ for both where there is none."""
        z = client.kept.get("z", center)
        return z + client.kept.get("u", torch.zeros_like(z)), z

    def history(self, client: Client, center: Tensor, coefficients: Tensor | None) -> dict[str, Tensor]:
        """The last τ+1 images and residuals, oldest first, the newest of which z̄ has just made known."""
        u, z = self.last(client, center)
        image = self.image(u, z, center, coefficients)
        return pushed(client.kept, image, u - image, self.memory + 1)


def point_at_server(client: Client, center: Tensor, first: Tensor | None, counted: Tensor | None) -> Tensor:
    """The client's z as the server has it: an answer that did not arrive is not in it, and a client joins at z̄."""
    z = client.kept.get("z", center if first is None else first)
    if counted is None:
        return z
    lost = client.kept.get("at", counted) > counted  # it was asked later than the server has heard of it
    z = torch.where(lost, z + client.kept.get("back", torch.zeros_like(z)), z)
    return torch.where(counted > 0, z, center)


def mean_of_latest(
    theta: Tensor, center: Tensor, update: Tensor, came: Tensor, counted: Tensor, weights: Tensor
) -> Tensor:
    """z̄ with the latest z of absentees in it, from the mean ``update`` of those who ``came`` (positions).

    counted: for each client the last round in which its z came, 0 if it never did. Who joins has sent z − ``center``.
    """
    joined = weights[came[counted[came] == 0]].sum()
    share = weights[came].sum() * update.to(torch.float64) + joined * (center - theta).to(torch.float64)
    everybody = weights[counted.index_fill(0, came, 1) > 0].sum()
    return (theta + share / everybody).to(theta.dtype)
