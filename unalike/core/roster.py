"""The roster: all that a server may know about clients, and public. It holds no row of data."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from unalike.core import wire
from unalike.core.notes import printable
from unalike.core.schema import Schema

MOST_ROWS = 1 << 27  # of one client: noise is calibrated to this number, and a declared one must not stop everybody


@dataclass(frozen=True)
class Declarations:
    """What some clients say about themselves, in public: the columns of a roster that a client's noise depends on."""

    bound: Tensor  # [clients] int64: N̄
    epsilon: Tensor | None = None  # [clients] float64
    delta: Tensor | None = None  # [clients] float64
    batch: Tensor | None = None  # [clients] int64


@dataclass(frozen=True)
class Roster:
    """Who there is. A million clients cost these few arrays.

    ``bound`` is N̄, a declared upper bound on a client's training rows, which is checked where the client joins. In a
    simulation it is the number of rows itself, unless the user declares another. Clients may declare more: the privacy
    budget (``epsilon``, ``delta``) that each grants its points for the whole run, and its own batch size.
    """

    ids: Tensor  # [clients] int64: all draws of a client depend on its id
    bound: Tensor  # [clients] int64
    labeled: Tensor  # [clients] bool: who has labels
    schema: Schema
    names: Sequence[str] | Mapping[int, str] | None = None  # by id; None: a client is called by its number
    epsilon: Tensor | None = None  # [clients] float64, with delta
    delta: Tensor | None = None  # [clients] float64
    batch: Tensor | None = None  # [clients] int64

    def __post_init__(self) -> None:
        if len(self.ids) == 0:
            raise ValueError("a federation needs at least one client; none was given")
        empty = (self.bound < 1).nonzero().flatten()
        if len(empty):
            names = ", ".join(self.name(i) for i in empty[:5].tolist())
            raise ValueError(f"{len(empty)} clients have no samples ({names}, ...); leave them out of the federation")
        large = (self.bound > MOST_ROWS).nonzero().flatten()
        if len(large):
            name, rows = self.name(int(large[0])), int(self.bound[large[0]])
            raise ValueError(f"client {name} declares up to {rows:,} rows; the most are {MOST_ROWS:,}")
        if len(torch.unique(self.ids)) != len(self.ids):
            raise ValueError("two clients of the roster have the same id; every client is in it once")
        for name, (dtype, low, high) in _OPTIONAL.items():
            value = getattr(self, name)
            if value is not None and not (
                value.shape == self.ids.shape and value.dtype == dtype and bool(((value > low) & (value < high)).all())
            ):
                raise ValueError(f"{name} has a number between {low:g} and {high:g} for every client, as {dtype}")
        if (self.epsilon is None) != (self.delta is None):
            raise ValueError("a budget is an epsilon and a delta; clients declare both or neither")

    def __len__(self) -> int:
        return len(self.ids)

    def name(self, position: int) -> str:
        number = int(self.ids[position])
        if self.names is None:
            return str(number)
        return printable(str(self.names[number]))

    def select(self, which: Tensor | Sequence[int]) -> Roster:
        """Some of the clients, by position; they keep their ids."""
        index = torch.as_tensor(which, dtype=torch.int64)
        chosen: dict[str, Any] = {name: value[index] for name, value in self._arrays().items()}
        return replace(self, **chosen)

    def declarations(self, which: Tensor | None = None) -> Declarations:
        """What the clients at these positions (None: all) declare."""
        chosen = slice(None) if which is None else which
        optional = {name: None if (all_ := getattr(self, name)) is None else all_[chosen] for name in _OPTIONAL}
        return Declarations(self.bound[chosen], **optional)

    def _arrays(self) -> dict[str, Tensor]:
        """All that is a number for each client."""
        optional = {name: value for name in _OPTIONAL if (value := getattr(self, name)) is not None}
        return {"ids": self.ids, "bound": self.bound, "labeled": self.labeled, **optional}

    def encode(self) -> bytes:
        names = None if self.names is None else json.dumps([self.name(i) for i in range(len(self))])
        return wire.encode({**self._arrays(), "schema": self.schema.to_json(), "names": names})

    @classmethod
    def decode(cls, data: bytes) -> Roster:
        """The roster in these bytes; its names are those of its own clients."""
        message = wire.decode(data)
        types = {"ids": torch.int64, "bound": torch.int64, "labeled": torch.bool}
        arrays: dict[str, Tensor] = {}
        for name in (*types, *_OPTIONAL):
            value = message.get(name)
            if isinstance(value, Tensor) and value.dtype == types.get(name, value.dtype):
                arrays[name] = value
            elif value is not None or name in types:
                raise wire.WireError(f"a roster's {name} is an array{f' of {types[name]}' if name in types else ''}")
        schema, names = message.get("schema"), message.get("names")
        if arrays["ids"].ndim != 1 or len({arrays[name].shape for name in types}) > 1 or not isinstance(schema, str):
            raise wire.WireError("a roster's arrays are of one length, and it has a schema")
        try:
            listed = None if names is None else json.loads(str(names))
            if listed is not None and not (isinstance(listed, list) and all(isinstance(one, str) for one in listed)):
                raise ValueError("its names are no list of words")
            known = None if listed is None else dict(zip(arrays["ids"].tolist(), listed, strict=True))
            return cls(**arrays, schema=Schema.from_json(schema), names=known)
        except (ValueError, RecursionError) as error:
            raise wire.WireError(f"not a roster: {error}") from error

    @staticmethod
    def join(parts: Sequence[Roster]) -> Roster:
        """The rosters of several shards as one; ``ValueError`` where two have the same client or unlike schemas."""
        first = parts[0]
        for other in parts[1:]:
            if other.schema != first.schema:
                raise ValueError("two shards read their rows by different schemas; give both the same one")
        ids = torch.cat([part.ids for part in parts])
        ids, order = torch.sort(ids)
        twice = ids[1:][ids.diff() == 0]
        if len(twice):
            raise ValueError(f"client {int(twice[0])} is in two shards; every client lives in one")
        names = None
        if first.names is not None:
            names = {int(p.ids[i]): p.name(i) for p in parts for i in range(len(p))}
        arrays = [part._arrays() for part in parts]
        if any(one.keys() != arrays[0].keys() for one in arrays):
            raise ValueError("the clients of some shards declare a budget or a batch size, those of others do not")
        whole: dict[str, Any] = {name: torch.cat([one[name] for one in arrays])[order] for name in arrays[0]}
        return replace(first, names=names, **whole)


_OPTIONAL = {  # dtype and open interval
    "epsilon": (torch.float64, 0.0, math.inf),
    "delta": (torch.float64, 0.0, 1.0),
    "batch": (torch.int64, 0, math.inf),
}
