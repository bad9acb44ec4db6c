"""T2 chapter 4: clusters of clients found from private updates, with `unalike.methods.rdpcfl`."""

from __future__ import annotations

from reproductions.item import Item
from reproductions.rdpcfl import accuracy, captions, clusters

ITEMS: tuple[Item, ...] = (*clusters.ITEMS, *captions.ITEMS, *accuracy.ITEMS)
