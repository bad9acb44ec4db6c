"""A few of many, evenly chosen: clients to measure, marks to draw."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

T = TypeVar("T")


def sample_evenly(items: Sequence[T], most: int) -> list[T]:
    """At most ``most`` of the items, evenly spaced; the first and the last are always among them."""
    if len(items) <= most:
        return list(items)
    return [items[round(i * (len(items) - 1) / (most - 1))] for i in range(most)]
