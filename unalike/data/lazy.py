"""A population whose inputs are still in their source, and are read for the clients that are asked for."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from unalike.core.client import Clients
from unalike.core.request import Part
from unalike.data.partition.assignment import Assignment, rotate_clients
from unalike.data.population import Population
from unalike.data.rows import fill_gaps, gather, in_file
from unalike.data.source import Array, DataError, Names, Source


class LazyPopulation:
    """Rows dealt out to clients, whose inputs are still in the source; ``select`` reads those of some clients.

    ``facts`` is the population with all that is known but the inputs; its ``x`` is one row of zeros for all.
    """

    def __init__(
        self,
        source: Source,
        assigned: Assignment,
        train_sizes: Array,
        kept: Array,
        facts: Population,
        turned: tuple[Array, Sequence[float]] | None,
    ) -> None:
        self.source, self.facts = source, facts
        self._rows, self._sizes, self._kept, self._turned = assigned.rows, assigned.sizes, kept, turned
        self._train_sizes, self._names = train_sizes, assigned.names
        self._start = np.cumsum(assigned.sizes) - assigned.sizes

    @property
    def mapped(self) -> bool:
        """Are the inputs in a file, so that those of others need no memory?"""
        return in_file(self.source.x) is not None

    def population(self, overwrite: bool = False) -> Population:
        """The population with everybody's inputs; ``overwrite``: those of the source may be changed."""
        whole = torch.from_numpy(self._inputs(np.arange(len(self._sizes)), self._rows, overwrite))
        train, validation, test = (replace(part, x=whole) for part in self.facts.parts.values())
        return replace(self.facts, train=train, validation=validation, test=test)

    def select(self, positions: Tensor) -> dict[Part, Clients]:
        """The clients at these positions, with their own rows alone."""
        clients = self._kept[positions.numpy()]
        places = self._places(clients)
        x, index = torch.from_numpy(self._inputs(clients, self._source_rows(places))), torch.from_numpy(places)
        own = torch.from_numpy(np.cumsum(self._sizes[clients]) - self._sizes[clients] - self._start[clients])
        made: dict[Part, Clients] = {}
        for name, part in self.facts.parts.items():
            some = part.select(positions)
            columns = {key: getattr(part, key) for key in ("y", "known", "weight")}
            own_columns: dict[str, Any] = {key: one if one is None else one[index] for key, one in columns.items()}
            made[name] = replace(some, x=x, start=some.start + own, **own_columns)
        return made

    def groups(self, rows: int) -> Iterator[dict[Part, Clients]]:
        """All clients in their order, some at a time with their own rows alone, about so many."""
        for first, last in _cut(self._sizes[self._kept], rows):
            yield self.select(torch.arange(first, last))

    def pieces(self, rows: int) -> Iterator[Array]:
        """All inputs in their order, those of some clients at a time, about so many rows."""
        for first, last in _cut(self._sizes, rows):
            clients = np.arange(first, last)
            yield self._inputs(clients, self._source_rows(self._places(clients)))

    def _source_rows(self, places: Array) -> Array:
        return places if self._rows is None else self._rows[places]

    def _places(self, clients: Array) -> Array:
        """Where the rows of these clients are in the order of all."""
        sizes = self._sizes[clients]
        before = np.cumsum(sizes) - sizes
        places: Array = np.arange(int(sizes.sum())) + np.repeat(self._start[clients] - before, sizes)
        return places

    def _fill(self, x: Array, clients: Array) -> None:
        """Fill the gaps in these clients' rows by the means of their training rows."""
        left = fill_gaps(x, self._sizes[clients], self._train_sizes[clients])
        if left.any() and not self.facts.train.gaps:
            client, feature = (int(place) for place in np.argwhere(left)[0])
            names = self._names or Names(np.arange(len(self._sizes)))
            raise DataError(
                f"{self.source.name}: client {names[int(clients[client])]} has no value of feature {feature + 1} in "
                f"its training rows, so that missing='client' has nothing to fill its gaps with; scale the inputs "
                f"(normalize), so that they count as the mean, or leave such rows out with missing='drop'"
            )

    def _inputs(self, clients: Array, rows: Array | None, overwrite: bool = False) -> Array:
        """These rows of the source, which are all rows of these clients, as a task gets them."""
        x = gather(self.source.name, self.source.x, rows, self.source.kind, overwrite, self.source.fill is not None)
        if x is self.source.x and not overwrite and (self.source.fill == "client" or self._turned is not None):
            x = x.copy()
        if self.source.fill == "client":
            self._fill(x, clients)
        if self._turned is not None:
            which, angles = self._turned
            rotate_clients(x, self._sizes[clients], which[clients], angles)
        return x


def _cut(sizes: Array, rows: int) -> Iterator[tuple[int, int]]:
    """Ranges of clients that hold about so many rows together, or one client."""
    ends, first = np.cumsum(sizes), 0
    while first < len(ends):
        before = 0 if first == 0 else ends[first - 1]
        last = max(first + 1, int(np.searchsorted(ends, before + rows, side="right")))
        yield first, last
        first = last
