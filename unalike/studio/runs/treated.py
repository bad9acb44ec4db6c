"""How a server treated clients: their weights in the last round, or their clusters (``treated.json``).

It is made from what the server was sent and nothing else, so it is as private as the run.
"""

from __future__ import annotations

import math

from pydantic import BaseModel, model_validator

from unalike.core.method import State, TreatsApart
from unalike.core.roster import Roster


class Treated(BaseModel):
    """Columns of equal length; None: the method has no such thing, or a client has none."""

    names: list[str]
    weight: list[float] | None = None
    cluster: list[int | None] | None = None
    place: list[tuple[float, float] | None] | None = None

    @model_validator(mode="after")
    def _equal_lengths(self) -> Treated:
        for name in ("weight", "cluster", "place"):
            column = getattr(self, name)
            if column is not None and len(column) != len(self.names):
                raise ValueError(f"{name} has {len(column)} entries for {len(self.names)} names")
        return self


def treated(method: TreatsApart, state: State, roster: Roster) -> Treated:
    """What the method tells about clients, by name."""
    told = method.apart(state)
    position = {int(id): number for number, id in enumerate(roster.ids.tolist())}
    found = Treated(names=[roster.name(position[id]) for id in told["ids"].tolist()])
    if "weight" in told:
        found.weight = told["weight"].tolist()
    if "cluster" in told:
        found.cluster = [None if one < 0 else one for one in told["cluster"].tolist()]
    if "place" in told and len(told["place"]) == len(found.names):
        found.place = [(x, y) if math.isfinite(x + y) else None for x, y in told["place"].tolist()]
    return found
