"""Data for a clustering: the clients' points, and the server's own, which are public."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from unalike.analytics.reading import Groups, Ranges, check_ranges, coordinate_names, read_population
from unalike.core.client import Clients
from unalike.core.request import Part
from unalike.data import DataError, load
from unalike.data.lazy import LazyPopulation
from unalike.data.source import Fill
from unalike.privacy.checks import SettingError

_BLOCK_NUMBERS = 1 << 22  # of one block's largest array: it should stay in the processor's cache
_CONSTANT = 1e-7  # a feature of the server data that varies less than this is left unscaled


class ChosenRows(Protocol):
    """Rows that are read for some clients only."""

    def select(self, positions: Tensor) -> dict[Part, Clients]:
        """The clients at these positions, with their own rows alone."""


@dataclass(frozen=True)
class Points:
    """What is clustered. Features are as in the data: scaling them by the clients' points would have to be paid for."""

    name: str
    clients: Clients
    server: Tensor  # [points, d]; no rows: there is no server data
    columns: Mapping[str, Sequence[str] | None] | None = None  # of a table: what is clustered, text with its values
    ranges: Ranges = field(default_factory=dict)
    fill: Fill | None = None  # what a missing number became

    @property
    def names(self) -> list[str]:
        """What each coordinate of a point is called."""
        if self.columns is None:
            return [f"x{k}" for k in range(self.clients.x.shape[1])]
        return coordinate_names(self.columns)

    def in_units(self, points: Tensor) -> Tensor:
        """Points [n, d] as the data has them, where features were scaled."""
        if self.clients.shift is None or self.clients.scale is None:
            return points
        return points / self.clients.scale + self.clients.shift

    @property
    def total(self) -> int:
        return int(self.clients.size.sum())

    def standardize(self) -> Points:
        """All features shifted and scaled by mean and deviation of the server data; a constant one is only shifted."""
        if len(self.server) == 0:
            raise SettingError(f"{self.name}: features are scaled by the server data, of which there is none")
        mean, deviation = self.server.mean(0), self.server.std(0, correction=0)
        constant = deviation <= _CONSTANT * mean.abs().clamp(min=1.0)
        scale = torch.where(constant, 1.0, 1.0 / deviation.clamp(min=1e-30))
        return replace(
            self, server=(self.server - mean) * scale, clients=replace(self.clients, shift=mean, scale=scale)
        )

    @property
    def block(self) -> int:
        """How many clients to simulate at once, so that their distances to the server points fit into the cache."""
        width = max(self.server.shape[1], len(self.server))
        largest = max(1, int(self.clients.size.max()))
        return max(1, _BLOCK_NUMBERS // (largest * width))


def read_points(data: str, **how: Any) -> Points:
    """Points by the name of a data set or from a file; ``open_points`` explains the arguments."""
    return open_points(data, **how)[0]


def open_points(
    data: str,
    *,
    pieces: bool = False,
    server: Path | None = None,
    server_points: int | None = None,
    none: bool = False,
    clients: int | None = None,
    seed: int = 0,
    standardize: bool = False,
    ranges: Ranges = MappingProxyType({}),
    **options: Any,
) -> tuple[Points, ChosenRows | None]:
    """The points; with ``pieces`` sizes, names and server data alone, and where to have the rows of some clients.

    - ``clients``, ``seed`` and ``options`` of the source, as in ``unalike.data.load``.
    - ``server``: a file of public points with the same features; or ``server_points`` rows are drawn from the clients
      and are then public and nobody's; or there are ``none``. Else they come with the data set.
    - ``standardize``: scale features by the server data.
    - ``ranges``: public ones of some columns, outside which a centre is warned of.
    """
    population, groups, rows = read_population(data, pieces, clients=clients, seed=seed, **options)
    name, everyone, columns = population.name, population.train, population.columns
    if population.kind != "features":
        raise DataError(f"{name}: k-means needs rows of features, but these are {population.kind} data")
    if none and (server is not None or server_points is not None):
        raise SettingError("a clustering without server data takes none; leave the server's points out")
    if server is not None and server_points is not None:
        raise SettingError("the server data is either a file or drawn from the clients; give one of the two")
    drawn = None if server_points is None else _draw_rows(everyone, server_points, seed, name)
    public = _take_rows(name, groups, drawn)
    chosen: ChosenRows | None = rows
    if none:
        points = Points(name, everyone, torch.zeros(0, everyone.x.shape[1]), columns)
    elif server is not None:
        of_nobody: dict[str, Any] = {"partition": "iid", "clients": 1, "test": 0, "unseen": 0, "normalize": False}
        points = Points(name, everyone, load(server, **of_nobody, **options).train.x.to(torch.float32), columns)
    elif drawn is not None:
        points = Points(name, _remove_rows(everyone, drawn), public, columns)
        chosen = None if rows is None else _Thinned(rows, points.clients, drawn)
    elif "server" in population.shared:
        points = Points(name, everyone, population.shared["server"].to(torch.float32))
    else:
        raise SettingError(
            f"{name}: there is no server data, in which FedDP-Init finds the first centres; give a file of public "
            "points, server=..., or make some random points of the clients public, server_points=...; or do without "
            "them: ground=packing"
        )
    points = replace(points, fill=population.fill)
    if ranges:
        check_ranges(name, ranges, points.names)
        points = replace(points, ranges=ranges)
    return points.standardize() if standardize else points, chosen


def _take_rows(name: str, groups: Groups, drawn: Tensor | None) -> Tensor:
    """The rows that are drawn; refuses points that are all the same."""
    first: Tensor | None = None
    alike, begin, found = True, 0, []
    for group in groups:
        x = group["train"].x[group["train"].pool_rows()[0]]
        first = x[0] if first is None else first
        alike = alike and bool((x == first).all())
        if drawn is not None:
            found.append(x[drawn[begin : begin + len(x)]].to(torch.float32))
        begin += len(x)
    if alike:
        raise DataError(f"{name}: all {begin} points are identical; there is nothing to cluster")
    return torch.cat(found) if found else torch.zeros(0)


def _draw_rows(clients: Clients, count: int, seed: int, name: str) -> Tensor:
    """[rows] which of the clients' rows become the server's, in the order of the clients."""
    total = int(clients.size.sum())
    if not 1 <= count < total:
        raise SettingError(f"{name}: {count} server points cannot be drawn from {total} rows; give 1 to {total - 1}")
    drawn = torch.zeros(total, dtype=torch.bool)
    drawn[torch.from_numpy(np.random.default_rng([seed, 6001]).choice(total, count, replace=False))] = True
    return drawn


def _remove_rows(clients: Clients, drawn: Tensor) -> Clients:
    """The clients without the rows that were drawn; one who has none left is left out."""
    rows, owner = clients.pool_rows()
    left = torch.bincount(owner[~drawn], minlength=len(clients))
    some = left > 0
    names = None if clients.names is None else [clients.name(i) for i in some.nonzero().flatten().tolist()]
    blank = clients.x.stride(0) == 0 and len(clients.x) > 1  # the rows are elsewhere
    x = clients.x[:1].expand(int(left.sum()), -1) if blank else clients.x[rows[~drawn]]
    return Clients.from_sizes(x, None, left[some], names=names)


class _Thinned:
    """The clients' rows without those that became the server's."""

    def __init__(self, rows: LazyPopulation, kept: Clients, drawn: Tensor) -> None:
        everyone = rows.facts.train
        owner = everyone.pool_rows()[1]
        self._rows, self._drawn = rows, drawn
        self._who = torch.unique(owner[~drawn])  # in the order of those who are left, where they were
        self._begin = torch.cumsum(everyone.size, 0) - everyone.size
        self._kept = kept

    def select(self, positions: Tensor) -> dict[Part, Clients]:
        whole = self._rows.select(self._who[positions])["train"]
        own, owner = whole.pool_rows()
        place = torch.arange(len(own)) - (torch.cumsum(whole.size, 0) - whole.size)[owner]
        left = ~self._drawn[self._begin[self._who[positions]][owner] + place]
        some = self._kept.select(positions)
        return {"train": replace(some, x=whole.x[own[left]], y=None, start=torch.cumsum(some.size, 0) - some.size)}
