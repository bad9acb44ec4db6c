"""A population whose rows are elsewhere: all that a server may know of it, and what a simulation shows besides."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from unalike.core import wire
from unalike.core.client import Clients
from unalike.core.request import Part
from unalike.data.population import Population

_PLAIN = ("name", "kind", "classes", "incomplete", "partition", "scaling", "network")
_LISTS = ("class_names", "dropped", "pooled")


@dataclass(frozen=True, eq=False)
class Absent(Population):
    """Its clients have sizes, names and labels or none, but no rows: these are at the workers."""

    key: bytes = b""  # by which the workers made the fingerprint of the rows
    fingerprint: Mapping[str, Any] = field(default_factory=dict)
    counts: Tensor | None = None  # label histograms of the clients that are on the map; a simulation's own view


def without_rows(clients: Clients) -> Clients:
    """The same clients, none of whose rows is here."""
    y = None if clients.y is None else clients.y[:0]
    return replace(clients, x=clients.x[:0].clone(), y=y, start=torch.zeros_like(clients.start), known=None)


def emptied(population: Population) -> Population:
    """The population without its rows."""
    parts = {name: without_rows(part) for name, part in population.parts.items()}
    return replace(population, train=parts["train"], validation=parts["validation"], test=parts["test"])


def chosen(parts: Mapping[Part, Clients], mine: Tensor) -> dict[Part, Clients]:
    """The clients at these positions with their own rows alone, so that the memory of all others can go."""
    kept: dict[Part, Clients] = {name: part.select(mine) for name, part in parts.items()}
    places = {name: part.pooled()[0] for name, part in kept.items()}
    every = torch.cat(list(places.values()))
    train = parts["train"]
    x, y = train.x.index_select(0, every), None if train.y is None else train.y.index_select(0, every)
    known = None if train.known is None else train.known.index_select(0, every)  # which rows have their label
    begin, made = 0, {}
    for name, part in kept.items():
        start = begin + torch.cumsum(part.size, 0) - part.size
        made[name] = replace(part, x=x, y=y, start=start, known=known)
        begin += len(places[name])
    return made


def encoded(population: Population, fingerprint: Mapping[str, Any], counts: Tensor | None) -> bytes:
    """All but the rows, to be sent."""
    train, arrays = population.train, dict[str, Tensor]()
    for name, part in population.parts.items():
        arrays |= {f"{name}.size": part.size, f"{name}.labeled": part.labeled}
    arrays |= {"ids": train.ids, "seen": population.seen, "unseen": population.unseen, "x": train.x[:0]}
    arrays |= {} if train.y is None else {"y": train.y[:0]}
    arrays |= {} if train.shift is None or train.scale is None else {"shift": train.shift, "scale": train.scale}
    arrays |= {f"declared.{name}": value for name, value in population.declared.items()}
    arrays |= {} if counts is None else {"counts": counts}
    about: dict[str, Any] = {name: getattr(population, name) for name in _PLAIN}
    about |= {
        name: None if (own := getattr(population, name)) is None else [str(one) for one in own] for name in _LISTS
    }
    about["names"] = None if train.names is None else [str(name) for name in train.names]
    about["columns"] = population.columns and {
        name: None if values is None else [str(one) for one in values] for name, values in population.columns.items()
    }
    about["fingerprint"] = dict(fingerprint)
    return wire.encode({**arrays, "about": json.dumps(about)})


def decoded(data: bytes, key: bytes = b"") -> Absent:
    """The population in these bytes."""
    message = wire.decode(data)
    arrays = {name: value for name, value in message.items() if isinstance(value, Tensor)}
    about: dict[str, Any] = json.loads(str(message["about"]))

    def part(name: str) -> Clients:
        size = arrays[f"{name}.size"]
        return Clients(
            x=arrays["x"],
            y=arrays.get("y"),
            start=torch.zeros_like(size),
            size=size,
            labeled=arrays[f"{name}.labeled"],
            ids=arrays["ids"],
            names=about["names"],
            shift=arrays.get("shift"),
            scale=arrays.get("scale"),
        )

    declared = {name.removeprefix("declared."): arrays[name] for name in arrays if name.startswith("declared.")}
    return Absent(
        train=part("train"),
        validation=part("validation"),
        test=part("test"),
        seen=arrays["seen"],
        unseen=arrays["unseen"],
        declared=declared,
        columns=about["columns"],
        key=key,
        fingerprint=about["fingerprint"],
        counts=arrays.get("counts"),
        **{name: about[name] for name in (*_PLAIN, *_LISTS)},
    )
