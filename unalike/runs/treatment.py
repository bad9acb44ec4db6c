"""How a server treated clients: their weights in the last round, or their clusters (``treated.json``).

It is made from what the server was sent and nothing else, so it is as private as the run.
"""

from __future__ import annotations

import math

from unalike.core.method import DistinguishesClients, State
from unalike.core.roster import Roster
from unalike.runs.map_data import Columns


class Treatment(Columns):
    """A column is None where the method has no such thing, an entry where a client has none."""

    weight: list[float] | None = None
    cluster: list[int | None] | None = None
    place: list[tuple[float, float] | None] | None = None


def treatment(method: DistinguishesClients, state: State, roster: Roster) -> Treatment:
    """What the method says about clients, by name."""
    columns = method.distinctions(state)
    position = {int(id): number for number, id in enumerate(roster.ids.tolist())}
    found = Treatment(names=[roster.name(position[id]) for id in columns["ids"].tolist()])
    if "weight" in columns:
        found.weight = columns["weight"].tolist()
    if "cluster" in columns:
        found.cluster = [None if one < 0 else one for one in columns["cluster"].tolist()]
    if "place" in columns and len(columns["place"]) == len(found.names):
        found.place = [(x, y) if math.isfinite(x + y) else None for x, y in columns["place"].tolist()]
    return found
