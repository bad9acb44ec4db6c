"""What the report draws its map of clients from: their sizes, labels and descriptors."""

from __future__ import annotations

import math
from typing import Any

from torch import Tensor

from unalike.core.federation import Federation
from unalike.core.method import DescribesData, Method, State
from unalike.data.population import Population
from unalike.studio.runs.measure import serves_unlabeled

MOST_CLIENTS = 5000


def client_map(population: Population, descriptors: Tensor | None = None) -> dict[str, Any]:
    """Columns of equal length; of a very large population, every so many-th client."""
    step = max(1, math.ceil(len(population) / MOST_CLIENTS))
    chosen = range(0, len(population), step)
    unseen = set(population.unseen.tolist())
    counted = population.classes is not None and population.has_labels
    return {
        "names": [population.train.name(i) for i in chosen],
        "group": ["unseen" if i in unseen else "seen" for i in chosen],
        "n": population.sizes[::step].tolist(),
        "label_histogram": population.histogram()[::step].tolist() if counted else None,
        "descriptor": None if descriptors is None else descriptors[::step].tolist(),
        "class_names": None if population.class_names is None else [str(name) for name in population.class_names],
    }


def descriptors(method: Method, state: State, federation: Federation, population: Population) -> Tensor | None:
    """Every client's descriptor, if the method reads them off the data (PeFLL, ODPFL-HN)."""
    if not isinstance(method, DescribesData) or federation.round == 0:
        return None
    clients = population.train
    if not (bool(clients.labeled.all()) or serves_unlabeled(method)) or len(clients) > MOST_CLIENTS:
        return None
    with federation.aside(federation.runtime.roster) as own:
        found = method.descriptors(state, own.everyone())
    return found if len(found) == len(clients) else None
