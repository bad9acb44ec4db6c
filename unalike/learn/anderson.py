"""Anderson acceleration of type II for a fixed-point map u ↦ T(u) (Anderson 1965; Fu et al. 2020).

Of the last τ+1 points u_j and their images T(u_j), the next point is Σ π_j·T(u_j) with the weights that minimise
‖Σ π_j·(u_j − T(u_j))‖ among those that add up to 1. Histories of images and of residuals u_j − T(u_j) lie in the
server's state or at clients.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from unalike.core.checks import at_least
from unalike.core.client import Kept
from unalike.core.vocabulary import Federation, State

_RANK = 1e-12  # directions below this share of the strongest one are rounding


@dataclass(frozen=True)
class Anderson:
    """How a method's points are accelerated; with ``memory=0`` they are not.

    - ``memory``: τ. Acceleration begins when there are τ+1 images, in round τ+2.
    - ``over``: what the weights are made of where every client has a point of its own (FedSplit, FedPi). ``mean``: the
      clients' mean residual, which the server knows. ``gram``: the (τ+1)² matrix of all residuals' inner products,
      summed in a second small ask.
    - ``guard``: take an accelerated step back, and the plain one in its place, when the residual has not shrunk.
    """

    memory: int = 0
    over: Literal["mean", "gram"] = "mean"
    guard: bool = True

    def __post_init__(self) -> None:
        at_least(self, memory=0)

    def start(self) -> dict[str, Tensor]:
        """The state before the first round: images so far, the last good residual, whether it was accelerated."""
        return {"images": torch.zeros(()), "residual": torch.tensor(math.inf), "accelerated": torch.zeros(())}

    def weigh(self, columns: Tensor, state: Mapping[str, Tensor]) -> tuple[Tensor, dict[str, Tensor], dict[str, float]]:
        """The weights of the τ+1 images, oldest first, the next state, and what to tell about it.

        columns: [any, τ+1] the residuals as columns, or any matrix with the same inner products.
        """
        images = state["images"] + 1
        length = torch.linalg.vector_norm(columns[:, -1].double()).to(torch.float32)
        worse = bool(state["accelerated"]) and not bool(length < state["residual"])
        rejected = self.guard and worse
        weights = torch.zeros(self.memory + 1, dtype=torch.float64)
        ready = int(images) > self.memory and not rejected
        if ready:
            weights = weights_of(columns)
        else:
            weights[-2 if rejected else -1] = 1.0  # the plain step: from the last good point, or from this one
        after = {
            "images": images,
            "residual": state["residual"] if rejected else length,
            "accelerated": torch.tensor(float(ready)),
        }
        return weights, after, {"residual": float(length), "accelerated": float(ready), "rejected": float(rejected)}


def weights_of(columns: Tensor) -> Tensor:
    """[k] the π that minimises ‖columns·π‖ with 1ᵀπ = 1, in double precision.

    With π_k = 1 − Σ_{j<k} π_j this is a plain least squares of the columns' differences to the last one. A singular
    value decomposition solves it; where the columns are dependent it takes the shortest solution. (The closed form
    G†1 / 1ᵀG†1 of the literature is wrong for a singular G: there it finds what G† cannot see.)
    """
    r = columns.to(torch.float64)
    differences = r[:, :-1] - r[:, -1:]
    scale = torch.linalg.vector_norm(differences, dim=0)
    scale = torch.where(scale > 0, scale, 1.0)
    left, values, right = torch.linalg.svd(differences / scale, full_matrices=False)
    strong = values > _RANK * values.max() if len(values) else values > 0
    inverse = torch.where(strong, 1 / torch.where(strong, values, 1.0), 0.0)
    first = -(right.T @ (inverse * (left.T @ r[:, -1]))) / scale
    return torch.cat([first, 1 - first.sum().reshape(1)])


def columns_of(gram: Tensor) -> Tensor:
    """A matrix whose columns have these inner products: enough to find the weights by."""
    values, vectors = torch.linalg.eigh(gram.to(torch.float64))
    columns: Tensor = values.clamp(min=0).sqrt()[:, None] * vectors.T
    return columns


def pushed(past: Mapping[str, Tensor] | Kept, image: Tensor, residual: Tensor, length: int) -> dict[str, Tensor]:
    """The last ``length`` images and residuals with these at the end; at first they are all the same."""
    found = {}
    for name, newest in {"images": image, "residuals": residual}.items():
        before: Tensor = past.get(name, newest.expand(length, *newest.shape))
        found[name] = torch.cat([before[1:], newest[None]])
    return found


def remember(state: State, anderson: Anderson, image: Tensor, residual: Tensor) -> State:
    """The state with an image and its residual at the end of the server's history."""
    return state.with_part("history", pushed(state.part("history"), image, residual, anderson.memory + 1))


def weigh(state: State, anderson: Anderson, columns: Tensor, federation: Federation) -> tuple[Tensor, State]:
    """The weights of the images by their residuals, the columns; reports how acceleration goes."""
    weights, after, metrics = anderson.weigh(columns, state.part("anderson"))
    federation.report(**metrics)
    return weights, state.with_part("anderson", after)


def next_point(
    state: State, anderson: Anderson, u: Tensor, image: Tensor, federation: Federation, scale: Tensor | float = 1.0
) -> tuple[Tensor, State]:
    """The point after u: its image, or a combination of the last images. ``scale`` weighs the rows of residuals."""
    if not anderson.memory:
        return image, state
    state = remember(state, anderson, image, u - image)
    weights, state = weigh(state, anderson, (state["history.residuals"] * scale).flatten(1).T, federation)
    return torch.tensordot(weights.to(image.dtype), state["history.images"], 1), state


def client_weights(
    state: State, anderson: Anderson, gamma: float, gram: Tensor | None, federation: Federation
) -> tuple[Tensor, State]:
    """The weights by which each client combines its own last images, the newest of which is T(u) of the last round.

    The mean of all T(u_i) is (1 − γ)·ū + γ·z̄, so the server knows the mean residual without asking. gram: the inner
    products of all residuals, summed, which take its place.
    """
    mean = state.get("mean", state.theta)  # ū of the last round
    if "mean" not in state:  # no client has taken a step
        weights = torch.zeros(anderson.memory + 1, dtype=torch.float64)
        weights[-1] = 1.0
        return weights, state.replace(mean=mean)
    image = (1 - gamma) * mean + gamma * state.theta
    state = remember(state, anderson, image, mean - image)
    columns = state["history.residuals"].T if gram is None else columns_of(gram)
    weights, state = weigh(state, anderson, columns, federation)
    return weights, state.replace(mean=weights.to(mean.dtype) @ state["history.images"])
