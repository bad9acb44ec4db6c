"""The roster: all that a server may know about clients, and public. It holds no row of data."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from unalike.core import wire
from unalike.core.schema import Schema


@dataclass(frozen=True)
class Roster:
    """Who there is. A million clients cost these few arrays.

    ``bound`` is N̄, a declared upper bound on a client's training rows, which is checked where the client joins. In a
    simulation it is the number of rows itself, unless the user declares another.
    """

    ids: Tensor  # [clients] int64: all draws of a client depend on its id
    bound: Tensor  # [clients] int64
    labeled: Tensor  # [clients] bool: who has labels
    schema: Schema
    names: Sequence[str] | None = None  # by id; None: a client is called by its number

    def __post_init__(self) -> None:
        if len(self.ids) == 0:
            raise ValueError("a federation needs at least one client; none was given")
        empty = (self.bound < 1).nonzero().flatten()
        if len(empty):
            names = ", ".join(self.name(i) for i in empty[:5].tolist())
            raise ValueError(f"{len(empty)} clients have no samples ({names}, ...); leave them out of the federation")
        if len(torch.unique(self.ids)) != len(self.ids):
            raise ValueError("two clients of the roster have the same id; every client is in it once")

    def __len__(self) -> int:
        return len(self.ids)

    def name(self, position: int) -> str:
        number = int(self.ids[position])
        return str(number) if self.names is None else str(self.names[number])

    def select(self, which: Tensor | Sequence[int]) -> Roster:
        """Some of the clients, by position; they keep their ids."""
        index = torch.as_tensor(which, dtype=torch.int64)
        return replace(self, ids=self.ids[index], bound=self.bound[index], labeled=self.labeled[index])

    def encode(self) -> bytes:
        names = None if self.names is None else json.dumps([self.name(i) for i in range(len(self))])
        arrays = {"ids": self.ids, "bound": self.bound, "labeled": self.labeled}
        return wire.encode({**arrays, "schema": self.schema.to_json(), "names": names})

    @classmethod
    def decode(cls, data: bytes) -> Roster:
        """The roster in these bytes; its names are those of its own clients."""
        message = wire.decode(data)
        ids, bound, labeled = (message.get(name) for name in ("ids", "bound", "labeled"))
        schema, names = message.get("schema"), message.get("names")
        if not (isinstance(ids, Tensor) and isinstance(bound, Tensor) and isinstance(labeled, Tensor)):
            raise wire.WireError("a roster has the arrays ids, bound and labeled")
        if (ids.dtype, bound.dtype, labeled.dtype) != (torch.int64, torch.int64, torch.bool):
            raise wire.WireError("a roster's ids and bound are int64 and labeled is bool")
        if ids.ndim != 1 or not ids.shape == bound.shape == labeled.shape or not isinstance(schema, str):
            raise wire.WireError("a roster's arrays are of one length, and it has a schema")
        try:
            listed = None if names is None else json.loads(str(names))
            if listed is not None and not (isinstance(listed, list) and all(isinstance(one, str) for one in listed)):
                raise wire.WireError("a roster's names are a list of words")
            known = None if listed is None else _Names(dict(zip(ids.tolist(), listed, strict=True)))
            return cls(ids, bound, labeled, Schema.from_json(schema), known)
        except wire.WireError:
            raise
        except (ValueError, RecursionError) as error:
            raise wire.WireError(f"not a roster: {error}") from error

    @staticmethod
    def joined(parts: Sequence[Roster]) -> Roster:
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
            names = _Names({int(p.ids[i]): p.name(i) for p in parts for i in range(len(p))})
        bound, labeled = (torch.cat([getattr(part, name) for part in parts])[order] for name in ("bound", "labeled"))
        return Roster(ids, bound, labeled, first.schema, names)


class _Names(Sequence[str]):
    """Names by id, for ids that are not 0, 1, 2, …"""

    def __init__(self, known: dict[int, str]) -> None:
        self._known = known

    def __getitem__(self, number: int) -> str:  # type: ignore[override]  # no slices: ids are no positions
        return self._known[number]

    def __len__(self) -> int:
        return len(self._known)
