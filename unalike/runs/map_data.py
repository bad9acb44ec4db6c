"""What a run's folder says about single clients: the map of ``simulation/map.json``, and ``treated.json``.

The map is a simulation's own view; ``unalike.report.figures.clients.client_map`` draws it. How a server treated clients
is made from what the server was sent and nothing else, so it is as private as the run.
"""

from __future__ import annotations

import math
from typing import Any, Self

import numpy as np
from pydantic import BaseModel, model_validator
from torch import Tensor

from unalike.core.federation import Federation
from unalike.core.method import DescribesData, DistinguishesClients, Method, State
from unalike.core.roster import Roster
from unalike.data.population import Population
from unalike.runs.absent import Absent
from unalike.runs.measure import serves_unlabeled

MOST_CLIENTS = 5000  # on the map


class Columns(BaseModel):
    """Columns of equal length, with an entry for each name."""

    names: list[str]

    @model_validator(mode="after")
    def _equal_lengths(self) -> Self:
        for name, column in self:
            if isinstance(column, list) and name != "class_names" and len(column) != len(self.names):
                raise ValueError(f"{name} has {len(column)} entries for {len(self.names)} names")
        return self


class MapData(Columns):
    """``simulation/map.json``. Without label histograms and descriptors there is no map."""

    group: list[str]
    n: list[int]
    label_histogram: list[list[float]] | None = None
    descriptor: list[list[float]] | None = None
    class_names: list[str] | None = None

    @model_validator(mode="after")
    def _rows_of_equal_length(self) -> Self:
        for name in ("label_histogram", "descriptor"):
            if len({len(row) for row in getattr(self, name) or ()}) > 1:
                raise ValueError(f"the rows of {name} differ in length")
        return self


def map_data(population: Population, descriptors: Tensor | None = None) -> dict[str, Any]:
    """The columns of ``MapData``, to be written; of a very large population only every k-th client is in them."""
    step = max(1, math.ceil(len(population) / MOST_CLIENTS))
    chosen = range(0, len(population), step)
    unseen = set(population.unseen.tolist())
    counted = population.classes is not None and population.has_labels
    counts = (
        population.counts if isinstance(population, Absent) else population.histogram()[::step] if counted else None
    )
    return {
        "names": [population.train.name(i) for i in chosen],
        "group": ["unseen" if i in unseen else "seen" for i in chosen],
        "n": population.sizes[::step].tolist(),
        "label_histogram": None if counts is None else counts.tolist(),
        "descriptor": None if descriptors is None else descriptors[::step].tolist(),
        "class_names": None if population.class_names is None else [str(name) for name in population.class_names],
    }


def descriptors(method: Method, state: State, federation: Federation, population: Population) -> Tensor | None:
    """Every client's descriptor, if the method reads them off the data (PeFLL, ODPFL-HN)."""
    if not isinstance(method, DescribesData) or federation.round == 0:
        return None
    if isinstance(population, Absent) and population.nodes:  # sites show this to nobody
        return None
    clients = population.train
    if not (bool(clients.labeled.all()) or serves_unlabeled(method)) or len(clients) > MOST_CLIENTS:
        return None
    with federation.aside(federation.runtime.roster) as own:
        found = method.descriptors(state, own.everyone())
    return found if len(found) == len(clients) else None


def plane(rows: np.ndarray) -> np.ndarray:
    """[clients, 2] first two principal components, with a fixed sign so that equal data gives an equal picture."""
    centred = rows - rows.mean(0)
    _, _, axes = np.linalg.svd(centred, full_matrices=False)
    axes = np.vstack([axes, np.zeros((2, rows.shape[1]))])[:2]
    strongest = axes[np.arange(2), np.abs(axes).argmax(1)]
    return np.asarray(centred @ (axes * np.where(strongest < 0, -1.0, 1.0)[:, None]).T)


class Treatment(Columns):
    """``treated.json``: clients' weights in the last round, or their clusters.

    A column is None where the method has no such thing, an entry where a client has none.
    """

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
