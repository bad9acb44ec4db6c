"""Hypernetworks: from a client's descriptor v to the parameters θ of its model, for a whole cohort in one pass."""

from __future__ import annotations

import itertools
from typing import Literal

import torch
from torch import Tensor, nn

from unalike.core.model import Model

Size = Literal["S", "M", "L"]
Initial = Literal["near", "pytorch"]  # what h begins with: models near a usual one, or PyTorch's own values
# T1 B.1.5 says 1, 3, 5 and draws one more for M in its Table B.3: it may not count the first layer. P1's Table 4 has 2.
HIDDEN_LAYERS: dict[Size, int] = {"S": 1, "M": 3, "L": 5}

HEAD_SCALE = 0.03  # of the head's first weights: models of different clients start apart by a fifth of a usual weight


class HeLinear(nn.Linear):
    """A layer whose first values keep a ReLU network's variance (He et al. 2015), without bias at first."""

    def reset_parameters(self) -> None:
        nn.init.kaiming_normal_(self.weight, nonlinearity="relu")
        nn.init.zeros_(self.bias)


class Head(nn.Linear):
    """The last layer, with small first weights."""

    def reset_parameters(self) -> None:
        super().reset_parameters()
        with torch.no_grad():
            self.weight.mul_(HEAD_SCALE)


class Narrow(nn.Linear):
    """A linear layer without bias whose first values keep the variance."""

    def reset_parameters(self) -> None:
        nn.init.kaiming_normal_(self.weight, nonlinearity="linear")


class Hypernetwork(nn.Module):
    """h: R^l → R^d (T1 §4.4, B.1.5): hidden layers of ``width`` with ReLU, then one linear head.

    A head for each tensor of the model, as in pFedHN and ODPFL-HN, is the same function. With a ``rank`` the head's
    matrix is a product of two, [d, rank]·[rank, width]: so many directions in which models differ (T1 §7.3).

    The papers leave the first values to PyTorch (``initial="pytorch"``). Then three layers shrink the differences
    between descriptors to a few percent, and a generated model starts as no network would be started. With "near" the
    hidden layers keep the differences, and ``first_values`` lets every client's model start near one usual initial
    model; this learns in far fewer rounds.
    """

    def __init__(
        self,
        descriptor: int,
        parameters: int,
        layers: int = 3,
        width: int = 100,
        initial: Initial = "near",
        rank: int | None = None,
    ) -> None:
        super().__init__()
        hidden, head = (HeLinear, Head) if initial == "near" else (nn.Linear, nn.Linear)
        widths = [descriptor] + [width] * layers
        self.trunk = nn.ModuleList([hidden(a, b) for a, b in itertools.pairwise(widths)])
        self.narrow = nn.Identity() if rank is None else Narrow(width, rank, bias=False)
        self.head = head(rank or width, parameters)

    def forward(self, v: Tensor) -> Tensor:
        """Descriptors [C, l] to models [C, d]."""
        for layer in self.trunk:
            v = layer(v).relu()
        return self.head(self.narrow(v))


def hypernetwork(
    descriptor: int,
    model: Model,
    size: Size = "M",
    layers: int | None = None,
    initial: Initial = "near",
    rank: int | None = None,
) -> Model:
    """The hypernetwork of a size for descriptors of a length and the parameters of ``model``.

    ``layers``: so many hidden layers, in place of the size's number. ``rank``: of the head.
    """
    if size not in HIDDEN_LAYERS:
        raise ValueError(f"hypernetwork size {size!r}; expected S, M or L (1, 3 or 5 hidden layers)")
    if layers is not None and layers < 1:
        raise ValueError(
            f"layers={layers}; expected at least 1 hidden layer, or leave it out for those of size={size!r}"
        )
    if initial not in ("near", "pytorch"):
        raise ValueError(f"initial={initial!r}; expected near or pytorch")
    if rank is not None and rank < 1:
        raise ValueError(f"rank={rank}; expected at least 1, or leave it out for a head of full rank")
    return Model(Hypernetwork(descriptor, model.size, layers or HIDDEN_LAYERS[size], initial=initial, rank=rank))


def first_values(hypernet: Model, model: Model, seed: int, initial: Initial = "near") -> Tensor:
    """η_h before the first round. "near": the head's bias is a fresh θ of the model, and all models start near it."""
    eta = hypernet.init(seed)
    if initial == "near":
        eta[hypernet.span("head.bias")] = model.init(seed)
    return eta


def generate(
    hypernet: Model, eta: Tensor, v: Tensor, shift: Tensor | float = 0.0, scale: Tensor | float = 1.0
) -> Tensor:
    """Models [C, d] for descriptors [C, l], without the means to differentiate."""
    with torch.no_grad():
        return hypernet(eta, (v - shift) * scale)
