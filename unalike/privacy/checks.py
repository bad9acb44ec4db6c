"""Checks of numbers that come from a user: each says what was expected, what came and what to do."""

from __future__ import annotations

import math


class SettingError(ValueError):
    """A setting that cannot be used; the message says what was expected, what came and what to do."""


def check_epsilon(epsilon: float, name: str = "epsilon") -> None:
    """ε must be positive and finite."""
    if not (math.isfinite(epsilon) and epsilon > 0):
        raise SettingError(
            f"{name} must be a finite number above 0, got {epsilon}; "
            "smaller is more private, useful values are about 0.1 to 10; for no privacy at all leave the noise out"
        )


def check_delta(delta: float, population: int | None = None) -> None:
    """δ must be inside (0, 1), and below 1/n if the number n of protected units is known."""
    if not 0 < delta < 1:
        raise SettingError(
            f"delta must be above 0 and below 1, got {delta}; take well below 1 / number of clients, e.g. 1e-5"
        )
    if population is not None and delta >= 1 / population:
        raise SettingError(
            f"delta must be below 1/n = {1 / population:.3g} for n = {population}, got {delta}; 1/n would allow to "
            f"publish somebody's data as it is; take about {1 / population**1.1:.1e}"
        )


def check_positive(number: float, name: str, advice: str) -> None:
    """A scale, bound or sensitivity must be positive and finite."""
    if not (math.isfinite(number) and number > 0):
        raise SettingError(f"{name} must be a finite number above 0, got {number}; {advice}")


def check_at_least(number: int, least: int, name: str, advice: str) -> None:
    """A count must be a whole number of at least ``least``."""
    if type(number) is not int or number < least:
        raise SettingError(f"{name} must be a whole number of at least {least}, got {number!r}; {advice}")
