"""P3 §4: AdaPeD and the methods that it is compared with, on MNIST and FEMNIST."""

from __future__ import annotations

from reproductions.adaped import best, privacy, rates, table
from reproductions.item import Item

ITEMS: tuple[Item, ...] = (*table.ITEMS, *best.ITEMS, *rates.ITEMS, *privacy.ITEMS)
