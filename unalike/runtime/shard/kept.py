"""What a shard's clients keep between tasks: columnar, and nothing is stored for a client that never kept anything."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from unalike.core.client import Kept

HELD = "held."  # arrays that a later ask may take as inputs
SECRET = "secure."  # of a secure sum


class _Column:
    """One kept array of all clients that have one: rows in order of first arrival, doubled in size when full."""

    def __init__(self, shape: torch.Size, dtype: torch.dtype) -> None:
        self.row_of: dict[int, int] = {}
        self.values = torch.zeros((4, *shape), dtype=dtype)

    def write(self, ids: list[int], values: Tensor) -> None:
        rows = [self.row_of.setdefault(client, len(self.row_of)) for client in ids]
        if len(self.row_of) > len(self.values):
            rows_now = max(len(self.row_of), 2 * len(self.values))
            grown = torch.zeros((rows_now, *self.values.shape[1:]), dtype=values.dtype)
            grown[: len(self.values)] = self.values
            self.values = grown
        self.values[rows] = values

    def read(self, ids: list[int]) -> tuple[Tensor, Tensor]:
        rows = [self.row_of.get(client, -1) for client in ids]
        present = torch.tensor([row >= 0 for row in rows])
        return self.values[[max(row, 0) for row in rows]], present


class KeptStore:
    """Kept state by client id. A store made with a parent reads through to it and never writes to it.

    secrets: does it read what clients keep for a secure sum through to the parent, too? A run beside another does not.
    """

    def __init__(self, parent: KeptStore | None = None, *, secrets: bool = True) -> None:
        self._columns: dict[str, _Column] = {}
        self._parent, self._secrets = parent, secrets

    def write(self, ids: Tensor, values: Mapping[str, Tensor]) -> None:
        for name, value in values.items():
            column = self._columns.get(name)
            if column is None:
                column = self._columns[name] = _Column(value.shape[1:], value.dtype)
            if value.shape[1:] != column.values.shape[1:]:
                expected, came = tuple(column.values.shape[1:]), tuple(value.shape[1:])
                raise ValueError(f"kept {name!r} has shape {expected}, but a task now keeps it with shape {came}")
            column.write(ids.tolist(), value)

    def read(self, ids: Tensor) -> Kept:
        """The clients' kept arrays, stacked [b, ...], with a flag [b] for each."""
        below = Kept() if self._parent is None else self._parent.read(ids)
        values, present = dict(below.values), dict(below.present)
        for name in [name for name in values if name.startswith(SECRET) and not self._secrets]:
            del values[name], present[name]
        for name, column in self._columns.items():
            if name.startswith(HELD):
                continue  # read by its handle alone
            value, there = column.read(ids.tolist())
            if name in values:
                value = torch.where(there.reshape(-1, *[1] * (value.ndim - 1)), value, values[name])
                there = there | present[name]
            values[name], present[name] = value, there
        return Kept(values, present)

    def drop(self, prefix: str) -> None:
        """Forget every array whose name begins so, of all clients."""
        self._columns = {name: column for name, column in self._columns.items() if not name.startswith(prefix)}

    def absorb(self, other: KeptStore) -> None:
        """Take over what another store holds, secrets and handles included."""
        for name, column in other._columns.items():
            ids = torch.tensor(list(column.row_of), dtype=torch.int64)
            self.write(ids, {name: column.values[: len(ids)]})

    def column(self, name: str, ids: Tensor) -> tuple[Tensor, Tensor] | None:
        """One array of these clients [b, ...], and which of them have it [b]."""
        return self._columns[name].read(ids.tolist()) if name in self._columns else None

    def state(self, handles: bool = False) -> dict[str, Tensor]:
        """Named tensors to save, without the secrets of a secure sum, which live in memory only.

        handles: also what a later ask may take, which a shard that starts again must have.
        """
        state = {}
        for name, column in self._columns.items():
            if name.startswith(SECRET) or (name.startswith(HELD) and not handles):
                continue
            state[f"{name}.ids"] = torch.tensor(list(column.row_of), dtype=torch.int64)
            state[f"{name}.values"] = column.values[: len(column.row_of)].clone()
        return state

    @classmethod
    def from_state(cls, state: Mapping[str, Tensor]) -> KeptStore:
        store = cls()
        for name in sorted({key.rsplit(".", 1)[0] for key in state}):
            store.write(state[f"{name}.ids"], {name: state[f"{name}.values"]})
        return store
