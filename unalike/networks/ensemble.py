"""Several models as one."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cached_property
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import vmap

from unalike.core.model import Model


class Ensemble(Model):
    """The weighted mean of several models' outputs, or of the probabilities that they give to classes.

    theta holds, member by member, its parameters and then its weight; at least one weight is above 0.
    """

    def __init__(self, member: Model, count: int, mean_of: Literal["outputs", "probabilities"] = "outputs") -> None:
        if count < 1:
            raise ValueError(f"an ensemble needs at least one member, got {count}")
        self.member, self.count, self.mean_of = member, count, mean_of
        self.size = (member.size + 1) * count

    @cached_property
    def digest(self) -> str | None:
        return self.member.digest

    def __call__(self, theta: Tensor, *inputs: Tensor) -> Tensor:
        members, weights = self._parts(theta)
        outputs: Tensor = vmap(lambda own: self.member(own, *inputs))(members)
        return _mean(outputs, weights, self.mean_of)

    def tensors(self, theta: Tensor) -> dict[str, Tensor]:
        """Every member's named tensors, as ``0.NAME``, ``1.NAME``, …, and its weight, as ``0.weight``, …"""
        members, weights = self._parts(theta)
        named = [{**self.member.tensors(own), "weight": one} for own, one in zip(members, weights, strict=True)]
        return {f"{i}.{name}": value for i, own in enumerate(named) for name, value in own.items()}

    def module(self, theta: Tensor) -> nn.Module:
        """An ordinary module with the parameters of the members that have a weight."""
        members, weights = self._parts(theta)
        counts = weights > 0
        return _Mean((self.member.module(own) for own in members[counts]), weights[counts], self.mean_of)

    def _parts(self, theta: Tensor) -> tuple[Tensor, Tensor]:
        """The members' parameters, and their weights."""
        parts = theta.view(self.count, self.member.size + 1)
        return parts[:, :-1], parts[:, -1]

    def __repr__(self) -> str:
        return f"Ensemble of {self.count} × {self.member!r}"


class _Mean(nn.Module):
    """The weighted mean of modules."""

    def __init__(self, members: Iterable[nn.Module], weights: Tensor, mean_of: str) -> None:
        super().__init__()
        self.members, self.mean_of = nn.ModuleList(members), mean_of
        self.register_buffer("weights", weights.clone())

    def forward(self, *inputs: Tensor) -> Tensor:
        weights = self.get_buffer("weights")
        return _mean(torch.stack([member(*inputs) for member in self.members]), weights, self.mean_of)


def _mean(outputs: Tensor, weights: Tensor, mean_of: str) -> Tensor:
    """The mean of outputs [members, ...]; that of probabilities is given as their logarithm."""
    if mean_of == "outputs":
        total: Tensor = torch.tensordot(weights, outputs, 1)
        return total / weights.sum()
    shares = (weights / weights.sum()).clamp(min=1e-30).log()
    return torch.logsumexp(F.log_softmax(outputs, -1) + shares.reshape(-1, *[1] * (outputs.ndim - 1)), 0)
