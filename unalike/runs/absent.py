"""A population whose rows are elsewhere: all that a server may know of it, and what a simulation shows besides."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from unalike.core.client import Clients
from unalike.core.request import Part
from unalike.data.population import Population

# Fields of a population that may be sent; the names of rows, for example, may not.
_PUBLIC = (
    *("name", "kind", "seen", "unseen", "classes", "class_names", "dropped", "incomplete", "columns"),
    *("partition", "scaling", "fill", "declared", "pooled", "notes", "network"),
)


@dataclass(frozen=True, eq=False)
class Absent(Population):
    """Its clients have sizes, names and labels or none, but no rows: these are at the workers."""

    key: bytes = b""  # by which the workers made the fingerprint of the rows
    fingerprint: Mapping[str, Any] = field(default_factory=dict)
    nodes: tuple[str, ...] = ()  # of a network, where the rows are; empty: they are a simulation's, at workers
    counts: Tensor | None = None  # label histograms of the clients that are on the map; a simulation's own view

    @classmethod
    def of(cls, population: Population, fingerprint: Mapping[str, Any], counts: Tensor | None) -> Absent:
        """What may be sent: all but the rows, the key, and what only a simulation knows."""
        facts: dict[str, Any] = {name: getattr(population, name) for name in _PUBLIC}
        facts |= {name: without_rows(part) for name, part in population.parts.items()}
        return cls(**facts, fingerprint=dict(fingerprint), counts=counts)


def without_rows(clients: Clients) -> Clients:
    """The same clients, none of whose rows is here, nor what a row weighs."""
    x, y, weight = (None if one is None else one[:0].clone() for one in (clients.x, clients.y, clients.weight))
    assert x is not None
    return replace(clients, x=x, y=y, weight=weight, start=torch.zeros_like(clients.start), known=None)


def select_rows(parts: Mapping[Part, Clients], mine: Tensor) -> dict[Part, Clients]:
    """The clients at these positions with their own rows alone, so that the memory of all others can go."""
    kept: dict[Part, Clients] = {name: part.select(mine) for name, part in parts.items()}
    places = {name: part.pool_rows()[0] for name, part in kept.items()}
    every = torch.cat(list(places.values()))
    train = parts["train"]
    x, y = train.x.index_select(0, every), None if train.y is None else train.y.index_select(0, every)
    known = None if train.known is None else train.known.index_select(0, every)  # which rows have their label
    weight = None if train.weight is None else train.weight.index_select(0, every)
    begin, made = 0, {}
    for name, part in kept.items():
        start = begin + torch.cumsum(part.size, 0) - part.size
        made[name] = replace(part, x=x, y=y, start=start, known=known, weight=weight)
        begin += len(places[name])
    return made
