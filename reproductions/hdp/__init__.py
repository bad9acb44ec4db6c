"""T2 chapter 3: clients with noise of their own, and Robust-HDP, with `unalike.methods.robust_hdp`."""

from __future__ import annotations

from reproductions.hdp import accuracy, noise
from reproductions.item import Item

ITEMS: tuple[Item, ...] = (*noise.ITEMS, *accuracy.ITEMS)
