"""Learning-rate schedules: the factor by which round t (from 1) multiplies the rate."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from unalike.core.checks import one_of


@dataclass(frozen=True)
class Schedule:
    """constant, 1/t, 1/√t; exponential: decay^⌊(t−1)/period⌋; cosine: 1 to 0 over ``period``.

    1/log(t) is 1/ln(t + e − 1); 1/log10(t) is 1/(1 + log₁₀ t), which Malekmohammadi has for "1/log t".
    Both begin with 1. Halving every T rounds is exponential with decay=0.5 and period=T.
    """

    kind: Literal["constant", "1/t", "1/sqrt(t)", "1/log(t)", "1/log10(t)", "exponential", "cosine"] = "constant"
    decay: float = 0.99
    period: int = 1

    def __post_init__(self) -> None:
        one_of(self, "kind")
        if self.period < 1 or not 0 < self.decay <= 1:
            raise ValueError(f"expected period >= 1 and 0 < decay <= 1, got {self}")

    def __call__(self, t: int) -> float:
        match self.kind:
            case "constant":
                return 1.0
            case "1/t":
                return 1.0 / t
            case "1/sqrt(t)":
                return 1.0 / math.sqrt(t)
            case "1/log(t)":
                return 1.0 / math.log(t + math.e - 1)  # shifted so that the first round has the full rate
            case "1/log10(t)":
                return 1.0 / (1 + math.log10(t))
            case "exponential":
                return float(self.decay ** ((t - 1) // self.period))
            case "cosine":
                return 0.5 * (1 + math.cos(math.pi * min(t - 1, self.period) / self.period))
