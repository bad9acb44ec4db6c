"""Hypernetworks: from a client's descriptor v to the parameters θ of its model, for a whole cohort in one pass."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor, nn
from torch.func import vjp

from motley.model import Model

Size = Literal["S", "M", "L"]
HIDDEN_LAYERS: dict[Size, int] = {"S": 1, "M": 3, "L": 5}  # T1 B.1.5

Pull = Callable[[Tensor], tuple[Tensor, Tensor]]  # cotangents of θ [C, d] to gradients of (η_h, v)


class Hypernetwork(nn.Module):
    """h: R^l → R^d (T1 Table B.3): hidden layers of ``width`` with ReLU, then one linear head.

    A linear head for each tensor of the model, as in pFedHN and ODPFL-HN, is the same function: the heads lie side by
    side in one matrix, and PyTorch's initial values depend on a head's input alone.
    """

    def __init__(self, descriptor: int, parameters: int, layers: int = 3, width: int = 100) -> None:
        super().__init__()
        widths = [descriptor] + [width] * layers
        self.trunk = nn.ModuleList([nn.Linear(a, b) for a, b in itertools.pairwise(widths)])
        self.head = nn.Linear(width, parameters)

    def forward(self, v: Tensor) -> Tensor:
        """Descriptors [C, l] to models [C, d]."""
        for layer in self.trunk:
            v = layer(v).relu()
        theta: Tensor = self.head(v)
        return theta


def hypernetwork(descriptor: int, model: Model, size: Size = "M") -> Model:
    """The hypernetwork of a size for descriptors of a length and the parameters of ``model``."""
    if size not in HIDDEN_LAYERS:
        raise ValueError(f"hypernetwork size {size!r}; expected S, M or L (1, 3 or 5 hidden layers)")
    return Model(Hypernetwork(descriptor, model.size, HIDDEN_LAYERS[size]))


def generate(
    hypernet: Model, eta: Tensor, v: Tensor, shift: Tensor | float = 0.0, scale: Tensor | float = 1.0
) -> Tensor:
    """Models [C, d] for descriptors [C, l], without the means to differentiate."""
    with torch.no_grad():
        return hypernet(eta, (v - shift) * scale)


def generate_with_pull(
    hypernet: Model, eta: Tensor, v: Tensor, shift: Tensor | float = 0.0, scale: Tensor | float = 1.0
) -> tuple[Tensor, Pull]:
    """Models [C, d], and the function that takes a cotangent for each of them back to gradients of (η_h [p], v [C, l]).

    The gradient of η_h is summed over the clients, that of v is each client's own.
    """
    theta, back = vjp(lambda eta, v: hypernet(eta, (v - shift) * scale), eta, v)[:2]

    def pull(cotangents: Tensor) -> tuple[Tensor, Tensor]:
        g_eta, g_v = back(cotangents)
        return g_eta, g_v

    return theta, pull
