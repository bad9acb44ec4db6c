"""T2 chapter 4: clusters of clients found from private updates, with `unalike.methods.rdpcfl`."""

from __future__ import annotations

from unalike.studio.reproduce.item import Item
from unalike.studio.reproduce.rdpcfl import accuracy, clusters

ITEMS: tuple[Item, ...] = (*clusters.ITEMS, *accuracy.ITEMS)
