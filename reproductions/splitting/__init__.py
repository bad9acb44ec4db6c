"""T2 chapter 2: federated learning as operator splitting, with the methods of `unalike.methods.splitting`."""

from __future__ import annotations

from reproductions.item import Item
from reproductions.splitting import acceleration, averaging, heterogeneity, participation, projections, steps

ITEMS: tuple[Item, ...] = (
    *projections.ITEMS,
    *averaging.ITEMS,
    *steps.ITEMS,
    *heterogeneity.ITEMS,
    *acceleration.ITEMS,
    *participation.ITEMS,
)
