"""Clients: the columnar store that holds all of them, and the view of one that a task is given."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from unalike.core.draws import Draws, key
from unalike.core.dropout import Masks
from unalike.core.roster import Roster
from unalike.core.schema import SCALING, Schema, Target
from unalike.privacy.mechanisms import DrawsLike
from unalike.privacy.system import SystemDraws


class NoLabels(ValueError):
    """A task read ``client.y`` of a client that has no labels."""


@dataclass(frozen=True)
class Clients:
    """Many clients' samples in one array; a client is the rows ``start .. start + size``.

    A million clients cost these few arrays and no Python object each. Training, validation and test parts of the same
    clients are three ``Clients`` over the same ``x`` and ``y`` with other ``start`` and ``size``.
    """

    x: Tensor  # [rows, ...]; images as uint8 [rows, channels, height, width], tokens as int64, features as float32
    y: Tensor | None  # [rows] classes as integers (tasks get int64) or targets as float32; None: no labels
    start: Tensor  # [clients] int64: first row
    size: Tensor  # [clients] int64: number of rows
    labeled: Tensor  # [clients] bool: may a task read this client's labels?
    ids: Tensor  # [clients] int64: the client's number in the population; all its random draws depend on it
    names: Sequence[str] | None = None  # by id; None: a client is called by its number
    shift: Tensor | None = None  # inputs reach the model as (x - shift) * scale, computed block by block
    scale: Tensor | None = None
    known: Tensor | None = None  # [rows] bool: which rows of labeled clients have their label; None: all of them
    gaps: bool = False  # inputs may be missing (NaN): they count as ``shift``, so that a model gets 0 for them
    target_center: float | None = None  # numbers to predict reach a task as (y - center) / deviation
    target_deviation: float | None = None
    weight: Tensor | None = None  # [rows] float32: how much each row counts in local training; None: all the same

    @classmethod
    def from_sizes(
        cls,
        x: Tensor,
        y: Tensor | None,
        sizes: Tensor,
        *,
        labeled: Tensor | None = None,
        names: Sequence[str] | None = None,
        shift: Tensor | None = None,
        scale: Tensor | None = None,
        known: Tensor | None = None,
    ) -> Clients:
        """Clients whose rows follow one another: the first ``sizes[0]`` rows belong to client 0, and so on.

        ``known``: which rows have their label; a client without any is one without labels.
        """
        sizes = sizes.to(torch.int64)
        if int(sizes.sum()) != len(x):
            raise ValueError(f"the client sizes add up to {int(sizes.sum())}, but there are {len(x)} rows")
        if y is not None and len(y) != len(x):
            raise ValueError(f"{len(x)} rows of inputs but {len(y)} labels")
        if known is not None and (y is None or known.shape != y.shape or known.dtype != torch.bool):
            raise ValueError("known marks the labels that are present: expected a bool array of the shape of y")
        count = len(sizes)
        if labeled is None:
            labeled = torch.full((count,), y is not None)
        start = torch.cumsum(sizes, 0) - sizes
        made = cls(x, y, start, sizes, labeled, torch.arange(count), names, shift, scale, known)
        return made if known is None else replace(made, labeled=labeled & (made.label_counts() > 0))

    def __len__(self) -> int:
        return len(self.start)

    def select(self, which: Tensor | Sequence[int]) -> Clients:
        """Some of the clients, by position; they keep their ids, and no sample is copied."""
        index = torch.as_tensor(which, dtype=torch.int64)
        return replace(
            self, start=self.start[index], size=self.size[index], labeled=self.labeled[index], ids=self.ids[index]
        )

    def using(self, schema: Schema) -> Clients:
        """The same rows, whose inputs and targets are scaled as a schema says."""
        return replace(self, **{name: getattr(schema, name) for name in SCALING})

    def without_labels(self) -> Clients:
        """The same clients with their labels out of every task's reach."""
        return replace(self, labeled=torch.zeros_like(self.labeled))

    def label_counts(self) -> Tensor:
        """[clients] int64: how many rows of each client have a label, if it is a labeled one."""
        if self.known is None:
            return torch.where(self.labeled, self.size, 0)
        before = torch.cat([torch.zeros(1, dtype=torch.int64), torch.cumsum(self.known, 0)])
        return torch.where(self.labeled, before[self.start + self.size] - before[self.start], 0)

    def roster(self) -> Roster:
        """Who these clients are, for a server; each declares the number of its rows."""
        stored = str(self.x.dtype).removeprefix("torch.")
        target: Target = "none" if self.y is None else "number" if self.y.is_floating_point() else "class"
        scaling = {name: getattr(self, name) for name in (*SCALING, "gaps")}
        schema = Schema(tuple(self.x.shape[1:]), stored=stored, target=target, **scaling)
        return Roster(self.ids, self.size, self.labeled, schema, self.names)

    def name(self, position: int) -> str:
        number = int(self.ids[position])
        return str(number) if self.names is None else str(self.names[number])

    def rows(self, position: int) -> tuple[Tensor, Tensor | None]:
        """One client's raw inputs and labels (also when no task may read them: this is the simulation's own view)."""
        part = slice(int(self.start[position]), int(self.start[position] + self.size[position]))
        return self.x[part], None if self.y is None else self.y[part]

    def inputs(self, position: int) -> Tensor:
        """[n, ...] one client's rows as a model reads them, in their own order; see ``block``."""
        return self._scaled(self.rows(position)[0].clone())

    def _scaled(self, x: Tensor) -> Tensor:
        """Inputs as a model reads them; a float ``x`` is changed in place."""
        if self.shift is not None or x.dtype == torch.uint8:
            x = x.to(torch.float32)
        if self.shift is not None and self.scale is not None:
            x.sub_(self.shift).mul_(self.scale)
            if self.gaps:
                x.nan_to_num_(nan=0.0)
        return x

    def pool_rows(self) -> tuple[Tensor, Tensor]:
        """[samples] the numbers of all clients' rows, one client after the other, and whose they are (positions)."""
        owner = torch.repeat_interleave(torch.arange(len(self)), self.size)
        before = torch.cumsum(self.size, 0) - self.size
        return torch.arange(len(owner)) + (self.start - before)[owner], owner

    def block(self, which: Tensor, least: int = 1, tame: bool = False) -> Block:
        """The clients at these positions, padded to the largest of them (padding repeats a client's first row).

        least: the smallest number of rows to pad to. tame: numbers that are not finite, or beyond 1e6, are replaced.
        One such row would make NaN of all that its client sends, and so take the other rows away with it. If one of the
        clients is labeled in part, those of its rows that have a label come first: what
        is said of single rows is computed from ``inputs``, never from a block.
        """
        size, labeled = self.size[which], self.labeled[which]
        capacity = max(least, int(size.max()))
        position = torch.arange(capacity)
        full = bool((size == capacity).all())
        rows = self.start[which, None] + (position if full else torch.where(position < size[:, None], position, 0))
        rows = rows if full else rows.clamp_(max=max(0, len(self.x) - 1))
        taught: Tensor | None = None
        if self.known is not None and bool(labeled.any()):
            own = position < size[:, None]
            there = self.known[rows] & own
            taught = torch.where(labeled, there.sum(1), size)
            if bool((taught == size).all()):
                taught = None
            else:
                last = 2 - there.to(torch.int64) - own.to(torch.int64)  # labeled rows are 0, others 1, padding 2
                rows = rows.gather(1, torch.argsort(last, dim=1, stable=True))
        flat = rows.reshape(-1)
        x = self.x.index_select(0, flat).reshape(*rows.shape, *self.x.shape[1:])  # far faster than x[rows]
        x = self._scaled(x)
        y = None if self.y is None else self.y.index_select(0, flat).reshape(*rows.shape, *self.y.shape[1:])
        if y is not None and self.target_center is not None and self.target_deviation is not None:
            y = y.sub(self.target_center).div_(self.target_deviation)
        if tame:
            x = _tame(x, keep_gaps=self.gaps)
            y = None if y is None else _tame(y)
        return Block(
            x=x,
            y=y if y is None or y.is_floating_point() else y.to(torch.int64),
            n=size,
            labeled=labeled,
            ids=self.ids[which],
            all_labeled=bool(labeled.all()) and self.y is not None,
            full=full,
            taught=taught,
            tame=tame,
            weight=None if self.weight is None else self.weight.index_select(0, flat).reshape(rows.shape),
        )


_LARGEST = 1e6  # of an input or target that is released with protection


def _tame(values: Tensor, keep_gaps: bool = False) -> Tensor:
    if not values.is_floating_point() or values.numel() == 0:
        return values
    least, most = torch.aminmax(values)  # one pass that writes nothing; NaN is neither
    if bool((least >= -_LARGEST) & (most <= _LARGEST)):
        return values
    return values.nan_to_num(torch.nan if keep_gaps else 0.0, 0.0, 0.0).clamp(-_LARGEST, _LARGEST)


@dataclass(frozen=True)
class Block:
    """A few clients stacked: what the simulator hands to one vectorised call of a task."""

    x: Tensor  # [clients, capacity, ...]
    y: Tensor | None  # [clients, capacity]
    n: Tensor  # [clients]
    labeled: Tensor  # [clients]
    ids: Tensor  # [clients]
    all_labeled: bool  # known before the vectorised call, because a task must not branch on data
    full: bool  # no client of the block is padded
    taught: Tensor | None = None  # [clients] how many rows of each have a label, the first ones; None: all rows
    tame: bool = False  # numbers that are not finite are replaced row by row
    weight: Tensor | None = None  # [clients, capacity]; None: all rows count the same

    def columns(self, key_of_ask: Tensor, bounds: Tensor) -> dict[str, Tensor]:
        """All that differs from client to client: row i of every array makes the i-th client."""
        columns = {"x": self.x, "n": self.n, "labeled": self.labeled, "bound": bounds, "key": key(key_of_ask, self.ids)}
        more = {"taught": self.taught, "weight": self.weight, "y": self.y}
        return columns | {name: one for name, one in more.items() if one is not None}

    def client(self, columns: Mapping[str, Tensor], kept: Kept, system: bool = False) -> Client:
        """The client of a row of ``columns``; ``system``: its noise comes from the operating system."""
        return Client(
            columns["x"],
            columns.get("y"),
            columns["n"],
            columns["labeled"],
            columns["bound"],
            self.all_labeled,
            self.full,
            kept,
            Draws(columns["key"]),
            SystemDraws(columns["key"]) if system else Draws(columns["key"], 2),
            columns.get("taught"),
            self.tame,
            columns.get("weight"),
        )


@dataclass(frozen=True)
class Kept:
    """What one client kept from earlier tasks; ``get`` gives the default to a client that has kept nothing yet."""

    values: Mapping[str, Tensor] = field(default_factory=dict)
    present: Mapping[str, Tensor] = field(default_factory=dict)

    def get(self, name: str, default: Tensor) -> Tensor:
        if name not in self.values:
            return default
        return torch.where(self.present[name], self.values[name], default)


@dataclass(eq=False)
class Client:
    """One client as a task sees it: its data, its kept state, its own random draws, and nothing else.

    Inside the simulator the same object stands for a whole block (its tensors are vmapped), so rows beyond ``n`` are
    padding: ``mean`` and ``sum`` leave them out, and ``mask`` marks the others.
    """

    x: Tensor
    _y: Tensor | None
    n: Tensor
    labeled: Tensor
    bound: Tensor  # N̄, the size that the client declared: public, and at least n
    _all_labeled: bool
    full: bool
    kept: Kept
    draws: Draws
    noise: DrawsLike  # for noise that protects: seeded in simulation, else the operating system's
    _taught: Tensor | None = None  # how many rows have a label, the first ones; None: all rows
    _tame: bool = False  # replace what is not finite row by row
    weight: Tensor | None = None  # [capacity] how much each row counts in local training; None: all the same

    def __post_init__(self) -> None:
        self.masks = Masks(self.draws.fork(3))  # of dropout; apart, so that they change no other draw
        self.capacity = self.x.shape[0]

    @property
    def y(self) -> Tensor:
        """The labels. A task that also serves unlabeled clients uses ``labels(default)`` and ``labeled`` instead."""
        if self._y is None or not self._all_labeled:
            raise NoLabels("the task reads labels, but the client has none; sample clients with labeled=True")
        if self._taught is not None:
            raise NoLabels(
                "the task reads the labels of all rows, but some rows have none; it can read those of "
                "client.with_labels, or labels(default) where client.known marks those that are present"
            )
        return self._y

    @property
    def with_labels(self) -> Client:
        """The client as it would be without its rows that lack a label; itself if no row does."""
        if self._taught is None:
            return self
        client = copy(self)
        client.n, client.full, client._taught = self._taught, False, None
        return client

    @property
    def partly_labeled(self) -> bool:
        """May rows of a client that has labels lack theirs? Known before the vectorised call."""
        return self._taught is not None

    @property
    def known(self) -> Tensor:
        """[capacity] True for the client's own rows that have a label."""
        return self.with_labels.mask & self.labeled

    def labels(self, default: int = 0) -> Tensor:
        """The labels, or ``default`` for every row that has none (``known`` marks the others)."""
        if self._y is None:
            return torch.full((self.capacity,), default, device=self.n.device)
        there = self.labeled if self._taught is None else self.known
        return torch.where(there, self._y, torch.full_like(self._y, default))

    @property
    def mask(self) -> Tensor:
        """[capacity] True for the client's own rows, False for padding."""
        return torch.arange(self.capacity, device=self.n.device) < self.n

    def sum(self, values: Tensor) -> Tensor:
        """Sum over the client's rows, padding left out."""
        if values.shape[0] != self.capacity:  # a hostile server's input may have broadcast against the rows
            raise ValueError(f"a sum over {self.capacity} rows of values of shape {tuple(values.shape)}")
        values = self.tame(values)
        if self.full:
            return values.sum(0)
        mask = self.mask.reshape(-1, *[1] * (values.ndim - 1))
        return torch.where(mask, values, 0).sum(0)

    def tame(self, values: Tensor) -> Tensor:
        """The values [capacity, ...] of the client's rows with 0 for what is not finite, where the client is protected.

        A row that becomes NaN must not take the client's other rows out of a sum with it.
        """
        return values.nan_to_num(0.0, 0.0, 0.0) if self._tame and values.is_floating_point() else values

    def mean(self, values: Tensor) -> Tensor:
        """Mean over the client's rows, padding left out."""
        return self.sum(values) / self.n
