"""Numbers and lists in words."""

from __future__ import annotations

import math

import pytest

from unalike.runs.words import counted, duration, epsilon, listed, share, size


@pytest.mark.parametrize(
    ("count", "says"),
    [(0, "0 B"), (999, "999 B"), (999.6, "1 kB"), (4_300_000, "4.3 MB"), (1.23e10, "12.3 GB"), (5e15, "5,000 TB")],
)
def test_sizes_have_three_digits_and_a_unit(count: float, says: str) -> None:
    assert size(count) == says


@pytest.mark.parametrize(
    ("seconds", "says"), [(4.21, "4.2 s"), (59.99, "1 min 0 s"), (200, "3 min 20 s"), (7500, "2 h 5 min"), (None, "—")]
)
def test_durations_are_told_as_by_a_clock(seconds: float | None, says: str) -> None:
    assert duration(seconds) == says


def test_epsilon_is_infinite_where_nothing_is_guaranteed() -> None:
    assert [epsilon(value) for value in (0.0, 1.2345, math.inf, None)] == ["0", "1.23", "∞", "∞"]


def test_counts_and_lists_are_grammatical() -> None:
    assert [counted(n, "client") for n in (0, 1, 3000)] == ["0 clients", "1 client", "3,000 clients"]
    assert counted(2, "reply", "replies") == "2 replies"
    assert listed(["a"]) == "a" and listed(["a", "b", "c"]) == "a, b and c" and listed([]) == "none"
    assert listed(list("abcde"), 3) == "a, b and 3 others"
    assert share(0.9312) == "93.1%"
