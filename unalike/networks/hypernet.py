"""Hypernetworks: from a client's descriptor v to the parameters θ of its model, for a whole cohort in one pass."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Literal

import torch
from torch import Tensor, nn
from torch.func import vjp

from unalike.core.method import State
from unalike.core.model import Model
from unalike.learn.server import ServerOptimizer

Size = Literal["S", "M", "L"]
Initial = Literal["near", "pytorch"]  # what h begins with: models near a usual one, or PyTorch's own values
# T1 B.1.5 says 1, 3, 5 and draws one more for M in its Table B.3: it may not count the first layer. P1's Table 4 has 2.
HIDDEN_LAYERS: dict[Size, int] = {"S": 1, "M": 3, "L": 5}

Pull = Callable[[Tensor], tuple[Tensor, Tensor]]  # cotangents of θ [C, d] to gradients of (η_h, v)


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


class Hypernetwork(nn.Module):
    """h: R^l → R^d (T1 §4.4, B.1.5): hidden layers of ``width`` with ReLU, then one linear head.

    A linear head for each tensor of the model, as in pFedHN and ODPFL-HN, is the same function: the heads lie side by
    side in one matrix.

    The papers leave the first values to PyTorch (``initial="pytorch"``). Then three layers shrink the differences
    between descriptors to a few percent, and a generated model starts as no network would be started. With "near" the
    hidden layers keep the differences, and ``first_values`` lets every client's model start near one usual initial
    model; this learns in far fewer rounds.
    """

    def __init__(
        self, descriptor: int, parameters: int, layers: int = 3, width: int = 100, initial: Initial = "near"
    ) -> None:
        super().__init__()
        hidden, head = (HeLinear, Head) if initial == "near" else (nn.Linear, nn.Linear)
        widths = [descriptor] + [width] * layers
        self.trunk = nn.ModuleList([hidden(a, b) for a, b in itertools.pairwise(widths)])
        self.head = head(width, parameters)

    def forward(self, v: Tensor) -> Tensor:
        """Descriptors [C, l] to models [C, d]."""
        for layer in self.trunk:
            v = layer(v).relu()
        theta: Tensor = self.head(v)
        return theta


def hypernetwork(
    descriptor: int, model: Model, size: Size = "M", layers: int | None = None, initial: Initial = "near"
) -> Model:
    """The hypernetwork of a size for descriptors of a length and the parameters of ``model``.

    ``layers``: so many hidden layers, in place of the size's number.
    """
    if size not in HIDDEN_LAYERS:
        raise ValueError(f"hypernetwork size {size!r}; expected S, M or L (1, 3 or 5 hidden layers)")
    if layers is not None and layers < 1:
        raise ValueError(
            f"layers={layers}; expected at least 1 hidden layer, or leave it out for those of size={size!r}"
        )
    if initial not in ("near", "pytorch"):
        raise ValueError(f"initial={initial!r}; expected near or pytorch")
    return Model(Hypernetwork(descriptor, model.size, layers or HIDDEN_LAYERS[size], initial=initial))


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


def descend(
    state: State,
    gradients: Mapping[str, Tensor],
    server: ServerOptimizer,
    clip: float,
    decay: Mapping[str, float],
    rates: Mapping[str, float] | None = None,
    *,
    beta: float | None = None,
    weight_decay: float = 0.0,
) -> State:
    """A step of the named networks down their gradients, clipped together to the norm ``clip``.

    The gradient of λ‖η‖² enters as decay, η ← (1 − 2βλ)η (T1 Alg. 8, lines 17-18), with the network's step size as β,
    for which with plain SGD it is the same as adding it, or with another ``beta``. ``weight_decay``: w·η is added to
    every clipped gradient, and so to momentum, as PyTorch's SGD does. ``rates`` gives a network a step size of its
    own. Moments are kept in the state as ``server.NAME.…``; ``begin`` makes them.
    """
    norm = math.hypot(*(float(torch.linalg.vector_norm(gradient)) for gradient in gradients.values()))
    factor = -min(1.0, clip / max(norm, 1e-12))
    for name, gradient in gradients.items():
        optimizer = replace(server, lr=(rates or {}).get(name, server.lr))
        kept = 1 - 2 * (optimizer.lr if beta is None else beta) * decay.get(name, 0.0)
        direction = gradient * factor if weight_decay == 0 else gradient * factor - weight_decay * state[name]
        eta = state[name] if kept == 1 else state[name] * kept
        eta, moments = optimizer.step(eta, direction, state.part(f"server.{name}"))
        state = state.replace(**{name: eta}).with_part(f"server.{name}", moments)
    return state


def begin(state: State, server: ServerOptimizer, *names: str) -> State:
    """The state with the optimizer's first moments for these networks."""
    for name in names:
        state = state.with_part(f"server.{name}", server.start(state[name]))
    return state
