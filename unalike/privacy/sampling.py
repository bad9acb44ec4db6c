"""How the clients of an ask were chosen, and which change of the data the guarantee is about.

The neighbouring relation fixes the sensitivity. Add or remove one: a unit's share is there or not, so a sum of values
clipped to C moves by C. Replace one: a share turns into any other, so the sum moves by 2C.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

from unalike.privacy.checks import check_at_least

Relation = Literal["add_remove", "replace_one"]


@dataclass(frozen=True)
class Everyone:
    """Every unit takes part, or who takes part is known: no amplification."""

    relation: Relation = "add_remove"

    def __post_init__(self) -> None:
        if self.relation not in ("add_remove", "replace_one"):
            raise ValueError(
                f"relation must be 'add_remove' or 'replace_one', got {self.relation!r}; choose one of them"
            )

    def sensitivity(self, clip: float) -> float:
        """How far a sum of shares of norm at most ``clip`` moves between neighbours."""
        return clip if self.relation == "add_remove" else 2.0 * clip


@dataclass(frozen=True)
class Poisson:
    """Every unit takes part with probability ``rate``, on its own and unseen: add or remove one.

    The amplification holds only if the cohort's size stays secret too: divide a sum by the *expected* count, and
    release noise also for an empty cohort.
    """

    rate: float

    def __post_init__(self) -> None:
        if not (math.isfinite(self.rate) and 0 < self.rate <= 1):
            raise ValueError(f"the sampling rate must be above 0 and at most 1, got {self.rate}; give cohort / clients")

    @property
    def relation(self) -> Relation:
        """Always add or remove one."""
        return "add_remove"

    def sensitivity(self, clip: float) -> float:
        """How far a sum of shares of norm at most ``clip`` moves between neighbours."""
        return clip


@dataclass(frozen=True)
class FixedSize:
    """``size`` of ``population`` units, drawn without replacement and unseen: replace one."""

    size: int
    population: int

    def __post_init__(self) -> None:
        check_at_least(self.size, 1, "the cohort's size", "give how many clients are drawn each round")
        check_at_least(self.population, self.size, "the population", "it cannot be smaller than the cohort")

    @property
    def relation(self) -> Relation:
        """Always replace one."""
        return "replace_one"

    def sensitivity(self, clip: float) -> float:
        """How far a sum of shares of norm at most ``clip`` moves between neighbours."""
        return 2.0 * clip


@dataclass(frozen=True)
class Local:
    """Noise made at the client, whose message is seen as its own: no amplification, and the value is replaced.

    The sensitivity is 2·clip. The guarantee also covers a client whose message is replaced by that of nobody (the zero
    value), so it may stand in a ledger of either relation.
    """

    @property
    def relation(self) -> None:
        """Fits both relations."""
        return None

    def sensitivity(self, clip: float) -> float:
        """How far one value of norm at most ``clip`` can move."""
        return 2.0 * clip


Sampling = Everyone | Poisson | FixedSize | Local


def encode_sampling(sampling: Sampling) -> list[Any]:
    """The sampling as a plain list."""
    match sampling:
        case Everyone(relation):
            return ["everyone", relation]
        case Poisson(rate):
            return ["poisson", rate]
        case FixedSize(size, population):
            return ["fixed_size", size, population]
        case Local():
            return ["local"]


def decode_sampling(plain: list[Any]) -> Sampling:
    """The sampling that ``encode_sampling`` wrote."""
    match plain:
        case ["everyone", relation]:
            return Everyone(relation)
        case ["poisson", rate]:
            return Poisson(rate)
        case ["fixed_size", size, population]:
            return FixedSize(size, population)
        case ["local"]:
            return Local()
        case _:
            raise ValueError(f"expected a saved sampling, got {plain!r}; the saved ledger is damaged")
