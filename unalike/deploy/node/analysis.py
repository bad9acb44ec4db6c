"""An analysis at a site: it reads its own rows, tells what a server may know of them, and is taught algorithms."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import is_dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch

from unalike.analytics.estimation import candidates, means, mixture, posterior, private, regression, shared
from unalike.analytics.kmeans import algorithm, baselines, budget, diameter
from unalike.analytics.kmeans.points import Points
from unalike.analytics.mdm import algorithm as mdm
from unalike.analytics.mdm import privacy as histograms
from unalike.analytics.mdm.study import Histograms
from unalike.core.client import Clients
from unalike.data.source import Names
from unalike.deploy.node.policy import Analysis, Policy
from unalike.deploy.site import READS, Given, read
from unalike.privacy import mechanisms
from unalike.runs.absent import without_rows
from unalike.runtime.shard.shard import Refused

_MODULES = (
    *(algorithm, baselines, budget, diameter, mdm, histograms, mechanisms),
    *(candidates, means, mixture, posterior, private, regression, shared),
)


def _dataclasses(module: ModuleType) -> Iterator[type]:
    for one in vars(module).values():
        if isinstance(one, type) and is_dataclass(one) and one.__module__ == module.__name__:
            yield one


TAUGHT = tuple(one for module in _MODULES for one in _dataclasses(module))  # algorithms, with their settings


def read_own(asked: Analysis, data: Path) -> Given:
    """The site's own clients; of public data that a server has, none."""
    own: dict[str, Any] = {"points": {"server": None, "none": True}, "histograms": {"counts": None}}
    what = READS[asked.method]
    given, _ = read(what, {**asked.how, **own.get(what, {"counts": None}), "data": str(data)})
    if asked.noise == "system" and _categories(given):
        raise Refused(
            "with an ε nothing is told that is found in rows, and the names of categories would be: let columns be "
            "numbers, and give the number of classes"
        )
    return given


def _categories(given: Given) -> bool:
    if isinstance(given, Points):
        return any(values is not None for values in (given.columns or {}).values())
    return bool(given.names) if isinstance(given, Histograms) else any("=" in name for name in given.columns or ())


def told(given: Given, name: str, policy: Policy) -> Given:
    """What the server is told: how many clients there are, and about how large."""
    clients = public(given.clients, name, policy)
    if isinstance(given, Points):
        return replace(given, name="network", clients=clients, server=given.server[:0])
    if isinstance(given, Histograms):
        return replace(given, clients=clients, truth=None, most=_up(given.most, policy))
    held = given.held_out if "measure" in policy.purposes else None
    held = None if held is None else public(held, name, policy)
    return replace(given, clients=clients, truth=None, held_out=held, notes=[], name="network")


def public(clients: Clients, name: str, policy: Policy) -> Clients:
    """A site's clients without rows and under names that say nothing, their sizes rounded up."""
    size, count = _up(clients.size, policy), len(clients)
    names = [name] if count == 1 else [f"{name}/{number}" for number in range(1, count + 1)]
    return replace(without_rows(clients), size=size, names=Names(np.array(names, dtype=str)), ids=torch.arange(count))


def _up(size: Any, policy: Policy) -> Any:
    return -(-size // policy.round_sizes) * policy.round_sizes
