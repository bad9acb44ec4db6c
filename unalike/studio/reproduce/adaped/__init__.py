"""P3 §4: AdaPeD and the methods that it is compared with, on MNIST and FEMNIST."""

from __future__ import annotations

from unalike.studio.reproduce.adaped import best, privacy, table
from unalike.studio.reproduce.item import Item

ITEMS: tuple[Item, ...] = (*table.ITEMS, *best.ITEMS, *privacy.ITEMS)
