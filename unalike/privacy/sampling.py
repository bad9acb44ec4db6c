"""How the clients of an ask were chosen, and which change of the data the guarantee is about.

The neighbouring relation fixes the sensitivity. Add or remove one: a unit's share is there or not, so a sum of values
clipped to C moves by C. Replace one: a share turns into any other, so the sum moves by 2C.
"""

from __future__ import annotations

import math
from dataclasses import astuple, dataclass
from typing import Any, Literal

from unalike.privacy.checks import SettingError, check_at_least

Relation = Literal["add_remove", "replace_one"]
_RARELY = 1e-12


class _Chosen:
    relation: Relation | None = None

    def sensitivity(self, clip: float) -> float:
        """How far a sum of shares of norm at most ``clip`` moves between neighbours."""
        return clip if self.relation == "add_remove" else 2.0 * clip


@dataclass(frozen=True)
class Everyone(_Chosen):
    """Every unit takes part, or who takes part is known: no amplification."""

    relation: Relation = "add_remove"

    def __post_init__(self) -> None:
        if self.relation not in ("add_remove", "replace_one"):
            raise ValueError(
                f"relation must be 'add_remove' or 'replace_one', got {self.relation!r}; choose one of them"
            )


@dataclass(frozen=True)
class Poisson(_Chosen):
    """Every unit takes part with probability ``rate``, on its own and unseen: add or remove one.

    The amplification holds only if the cohort's size stays secret too: divide a sum by the *expected* count, and
    release noise also for an empty cohort.
    """

    rate: float

    relation = "add_remove"

    def __post_init__(self) -> None:
        if not (math.isfinite(self.rate) and 0 < self.rate <= 1):
            raise SettingError(
                f"the sampling rate must be above 0 and at most 1, got {self.rate}; give cohort / clients"
            )

    def sizes(self, population: int) -> tuple[int, int]:
        """The fewest and the most of so many units that a sample has, but with probability 2e-12: public numbers."""
        if self.rate == 1:
            return population, population
        from scipy.stats import binom

        low, high = binom.ppf(_RARELY, population, self.rate), binom.isf(_RARELY, population, self.rate)
        return max(0, int(low)), min(population, int(high))


@dataclass(frozen=True)
class FixedSize(_Chosen):
    """``size`` of ``population`` units, drawn without replacement and unseen: replace one."""

    size: int
    population: int

    relation = "replace_one"

    def __post_init__(self) -> None:
        check_at_least(self.size, 1, "the cohort's size", "give how many clients are drawn each round")
        check_at_least(self.population, self.size, "the population", "it cannot be smaller than the cohort")


@dataclass(frozen=True)
class Local(_Chosen):
    """Noise made at the client, whose message is seen as its own: no amplification, and the value is replaced.

    The sensitivity is 2·clip. The guarantee also covers a client whose message is replaced by that of nobody (the zero
    value), so it may stand in a ledger of either relation.
    """


Sampling = Everyone | Poisson | FixedSize | Local
_KINDS: dict[str, type[Sampling]] = {"everyone": Everyone, "poisson": Poisson, "fixed_size": FixedSize, "local": Local}


def encode_sampling(sampling: Sampling) -> list[Any]:
    """The sampling as a plain list."""
    return [next(name for name, kind in _KINDS.items() if type(sampling) is kind), *astuple(sampling)]


def decode_sampling(plain: list[Any]) -> Sampling:
    """The sampling that ``encode_sampling`` wrote."""
    try:
        return _KINDS[plain[0]](*plain[1:])
    except (KeyError, IndexError, TypeError) as error:
        raise ValueError(f"expected a saved sampling, got {plain!r}; the saved ledger is damaged") from error
