"""T2 chapter 2: federated learning as operator splitting, with the methods of `unalike.methods.splitting`."""

from __future__ import annotations

from unalike.studio.reproduce.item import Item
from unalike.studio.reproduce.splitting import acceleration, averaging, heterogeneity, participation, projections, steps

ITEMS: tuple[Item, ...] = (
    *projections.ITEMS,
    *averaging.ITEMS,
    *steps.ITEMS,
    *heterogeneity.ITEMS,
    *acceleration.ITEMS,
    *participation.ITEMS,
)
