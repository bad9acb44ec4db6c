"""Server optimizers: what the server does with the direction that a round gives it.

Pure functions of (theta, direction, moments). ``direction`` points downhill, as the mean client update does, and is
*added*.
The adaptive ones are FedAdam and FedYogi of Reddi et al. (ICLR 2021), and FedAvgM of Hsu et al. (2019).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from unalike.core.checks import at_least, one_of
from unalike.core.method import State


@dataclass(frozen=True)
class ServerOptimizer:
    """θ ← θ + lr · step(direction). ``kind='sgd'`` with lr=1 is plain federated averaging.

    adaptivity is τ of the paper (the ε of Adam). Adam corrects the bias of its moments, as Kingma and Ba do (Reddi et
    al. leave that out), so that the first rounds are not lost. warmup: the rate grows to ``lr`` over so many rounds;
    without that, Adam's first steps move every parameter by the whole rate.
    """

    kind: Literal["sgd", "momentum", "adam", "yogi"] = "sgd"
    lr: float = 1.0
    beta1: float = 0.9
    beta2: float = 0.999
    adaptivity: float = 1e-8
    warmup: int = 1

    def __post_init__(self) -> None:
        one_of(self, "kind")
        if not self.lr > 0 or not 0 <= self.beta1 < 1 or not 0 <= self.beta2 < 1 or not self.adaptivity > 0:
            raise ValueError(f"expected lr > 0, betas in [0, 1) and adaptivity > 0, got {self}")
        at_least(self, warmup=1)

    def start(self, theta: Tensor) -> dict[str, Tensor]:
        """The moments before the first step."""
        clock = {"t": torch.zeros(())}
        if self.kind in ("adam", "yogi"):
            return {"m": torch.zeros_like(theta), "v": torch.zeros_like(theta), **clock}
        return ({"m": torch.zeros_like(theta)} if self.kind == "momentum" else {}) | (clock if self.warmup > 1 else {})

    def step(self, theta: Tensor, direction: Tensor, moments: Mapping[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        """The next theta and moments."""
        clock = {"t": moments["t"] + 1} if "t" in moments else {}
        lr = self.lr * min(1.0, float(clock["t"]) / self.warmup) if clock else self.lr
        if self.kind == "sgd":
            return theta + lr * direction, clock
        if self.kind == "momentum":
            m = self.beta1 * moments["m"] + direction
            return theta + lr * m, {"m": m, **clock}
        # a hypernetwork has ten million parameters: few passes over them, and few temporary copies
        t = clock["t"]
        m = torch.lerp(moments["m"], direction, 1 - self.beta1)
        if self.kind == "adam":
            v = (self.beta2 * moments["v"]).addcmul_(direction, direction, value=1 - self.beta2)
        else:
            square = direction.square()
            v = moments["v"] - (1 - self.beta2) * square * torch.sign(moments["v"] - square)
        scale = (v / (1 - self.beta2**t)).sqrt_().add_(self.adaptivity)
        rate = lr / (1 - self.beta1 ** float(t))
        return torch.addcdiv(theta, m, scale, value=rate), {"m": m, "v": v, **clock}

    def begin(self, state: State, *names: str) -> State:
        """The state with the first moments of these tensors, as ``server.NAME.…``."""
        for name in names:
            state = state.with_part(f"server.{name}", self.start(state[name]))
        return state

    def move(self, state: State, name: str, direction: Tensor) -> State:
        """The state after a step of the named tensor, whose moments ``begin`` put there."""
        value, moments = self.step(state[name], direction, state.part(f"server.{name}"))
        return state.replace(**{name: value}).with_part(f"server.{name}", moments)
