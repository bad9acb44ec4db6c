"""Models for clients that training has not seen: PeFLL (T1 ch. 4), FLowDUP (T1 ch. 5) and ODPFL-HN (P2)."""

from __future__ import annotations

from reproductions.on_demand import flowdup, odpfl, pefll

ITEMS = (*pefll.ITEMS, *flowdup.ITEMS, *odpfl.ITEMS)
