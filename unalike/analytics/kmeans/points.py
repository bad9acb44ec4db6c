"""Data for a clustering: the clients' points, and the server's own, which are public."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from unalike.core.client import Clients
from unalike.data import DataError, load

_BLOCK_NUMBERS = 1 << 22  # of one block's largest array: it should stay in the processor's cache
_CONSTANT = 1e-7  # a feature of the server data that varies less than this is left unscaled


@dataclass(frozen=True)
class Points:
    """What is clustered. Features are as in the data: scaling them by the clients' points would have to be paid for."""

    name: str
    clients: Clients
    server: Tensor  # [points, d]; no rows: there is no server data
    columns: Mapping[str, Sequence[str] | None] | None = None  # of a table: what is clustered, text with its values

    @property
    def total(self) -> int:
        return int(self.clients.size.sum())

    def standardized(self) -> Points:
        """All features shifted and scaled by mean and deviation of the server data; a constant one is only shifted."""
        if len(self.server) == 0:
            raise DataError(f"{self.name}: features are scaled by the server data, of which there is none")
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


def read_points(
    data: str,
    *,
    server: Path | None = None,
    server_points: int | None = None,
    clients: int | None = None,
    none: bool = False,
    seed: int = 0,
    **options: Any,
) -> Points:
    """Points by the name of a data set or from a file. The server's come with the data set, from a file of the same
    features, or are ``server_points`` rows drawn from the clients, which are then public and nobody's; or there are
    ``none``.
    """
    population = load(data, clients=clients, test=0, unseen=0, normalize=False, seed=seed, **options)
    if population.kind != "features":
        raise DataError(f"{population.name}: k-means needs rows of features, but these are {population.kind} data")
    everyone = population.train
    if bool((everyone.x == everyone.x[0]).all()):
        raise DataError(f"{population.name}: all {len(everyone.x)} points are identical; there is nothing to cluster")
    if none and (server is not None or server_points is not None):
        raise DataError("a clustering without server data takes none; leave the server's points out")
    if none:
        return Points(population.name, everyone, torch.zeros(0, everyone.x.shape[1]), population.columns)
    if server is not None and server_points is not None:
        raise DataError("the server data is either a file or drawn from the clients; give one of the two")
    if server is not None:
        return Points(population.name, everyone, _server_file(server, options), population.columns)
    if server_points is not None:
        return replace(_draw_server(population.name, everyone, server_points, seed), columns=population.columns)
    if "server" not in population.shared:
        raise DataError(
            f"{population.name}: there is no server data, in which FedDP-Init finds the first centres; give a file of "
            "public points with --server FILE, or with --server-points N make N random points of the clients public; "
            "or do without them: --ground packing"
        )
    return Points(population.name, everyone, population.shared["server"].to(torch.float32))


def _server_file(path: Path, options: dict[str, Any]) -> Tensor:
    """Points of a file; who they belong to does not matter."""
    if path.suffix == ".npz":
        with np.load(path, allow_pickle=False) as archive:
            if "x" not in archive.files:
                raise DataError(f"{path}: expected an array 'x' [points, features], found {', '.join(archive.files)}")
            return torch.from_numpy(np.asarray(archive["x"], dtype=np.float32))
    population = load(path, partition="iid", clients=1, test=0, unseen=0, normalize=False, **options)
    return population.train.x.to(torch.float32)


def _draw_server(name: str, clients: Clients, count: int, seed: int) -> Points:
    """Take ``count`` random rows away from the clients; one who has none left is left out."""
    total = int(clients.size.sum())
    if not 1 <= count < total:
        raise DataError(f"{name}: {count} server points cannot be drawn from {total} rows; give 1 to {total - 1}")
    rows, owner = clients.pooled()
    drawn = torch.zeros(total, dtype=torch.bool)
    drawn[torch.from_numpy(np.random.default_rng([seed, 6001]).choice(total, count, replace=False))] = True
    left = torch.bincount(owner[~drawn], minlength=len(clients))
    some = left > 0
    names = None if clients.names is None else [clients.name(i) for i in some.nonzero().flatten().tolist()]
    kept = Clients.from_sizes(clients.x[rows[~drawn]], None, left[some], names=names)
    return Points(name, kept, clients.x[rows[drawn]].to(torch.float32))
