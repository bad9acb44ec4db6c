"""A population: all clients' data, in training, validation and test rows, and in seen and unseen clients."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from torch import Tensor

from unalike.core.client import Clients
from unalike.core.request import Part
from unalike.core.roster import Roster
from unalike.core.schema import Schema, as_words
from unalike.data.source import Array, DataError, Fill, Kind

# How inputs are scaled: not at all, by public constants (``train.shift`` and ``train.scale``), or by the mean and the
# deviation of the training clients' rows, for which ``unalike.simulate`` asks them.
Scaling = Literal["none", "public", "asked", "private"]  # asked in exact sums, or in noisy ones


@dataclass(frozen=True, eq=False)
class Population:
    """The federated data set. ``train``, ``validation`` and ``test`` hold the same clients in the same order.

    Their rows lie in one array, so the three share its memory. ``seen`` clients take part in training, ``unseen`` ones
    arrive afterwards. ``train.labeled`` is False for a client whose labels are hidden or absent; ``test`` keeps the
    labels that exist, because a score needs them.
    """

    name: str
    kind: Kind
    train: Clients
    validation: Clients
    test: Clients
    seen: Tensor  # int64 client positions
    unseen: Tensor
    classes: int | None  # None: targets are numbers, or there are no labels at all
    class_names: Sequence[str] | None = None
    per_client: Mapping[str, Tensor] = field(default_factory=dict)  # [clients, ...]: true parameters, rotation, ...
    shared: Mapping[str, Tensor] = field(default_factory=dict)  # what the server has or knows
    dropped: Sequence[str] = ()  # clients left out because they had too few rows
    incomplete: int = 0  # rows left out for lack of a value
    columns: Mapping[str, Sequence[str] | None] | None = None  # a table's features, text with its values; else None
    partition: str = ""  # how rows came to clients, "natural": as in the source; empty: by a function
    scaling: Scaling = "none"
    fill: Fill | None = None  # what a missing number of a table became
    declared: Mapping[str, Tensor] = field(default_factory=dict)  # of each client, in public: epsilon, delta, batch
    pooled: Sequence[str] = ()  # what was read off the rows of all clients together, so that it is not public
    row_ids: Array | None = None  # [rows of x] what the rows are called in their file; None: they have no names
    column_reports: Sequence[Any] = ()  # what was made of a table's columns (``files.layout.ColumnReport``)
    notes: Sequence[str] = ()  # what was decided about the rows that may not be meant
    network: str | None = None  # the architecture that the data is meant for; None: as its inputs suggest

    def __len__(self) -> int:
        return len(self.train)

    @property
    def parts(self) -> dict[Part, Clients]:
        """The three parts of the clients' data, by name."""
        return {"train": self.train, "validation": self.validation, "test": self.test}

    @property
    def schema(self) -> Schema:
        """What a row looks like."""
        plain = self.train.roster().schema
        columns = None if self.columns is None else {k: as_words(v) for k, v in self.columns.items()}
        return replace(
            plain, kind=self.kind, classes=self.classes, class_names=as_words(self.class_names), columns=columns
        )

    def check(self, schema: Schema) -> None:
        """Refuse a schema that these rows do not fit; how it scales inputs does not matter."""
        own: dict[str, Any] = {"kind": self.kind, "shape": tuple(self.train.x.shape[1:])}
        if own["shape"] == schema.shape:  # rows of another shape may not fit the scaling, either
            said = self.schema
            own |= {what: getattr(said, what) for what in ("stored", "target", "classes", "class_names", "columns")}
        for what, mine in own.items():
            wanted = getattr(schema, what)
            if mine != wanted or (what == "columns" and mine and list(mine) != list(wanted)):
                raise DataError(
                    f"{self.name} does not fit the schema: its {what.replace('_', ' ')} is {mine}, but the schema says "
                    f"{wanted}; give data of that kind, or the schema of this data"
                )

    def using(self, schema: Schema) -> Population:
        """The same rows, scaled as this schema says: that of a run, say, whose clients were asked for it."""
        self.check(schema)
        train, validation, test = (part.using(schema) for part in self.parts.values())
        scaling: Scaling = "none" if schema.shift is None else "public"
        return replace(self, train=train, validation=validation, test=test, scaling=scaling)

    def roster(self) -> Roster:
        """All clients, seen and unseen, as a server knows them."""
        said = self.declared
        return replace(
            self.train.roster(),
            schema=self.schema,
            epsilon=said.get("epsilon"),
            delta=said.get("delta"),
            batch=said.get("batch"),
        )

    @property
    def input_shape(self) -> tuple[int, ...]:
        """The shape of one sample: (channels, height, width), (features,) or (length,)."""
        return tuple(self.train.x.shape[1:])

    @property
    def labeled(self) -> Tensor:
        """[clients] bool: whose labels may be used in training."""
        return self.train.labeled

    @property
    def has_labels(self) -> bool:
        return self.train.y is not None

    @property
    def sizes(self) -> Tensor:
        """[clients] int64: all rows of a client."""
        return self.train.size + self.validation.size + self.test.size

    def histogram(self, part: Clients | None = None) -> Tensor:
        """[clients, classes] int64: how many rows of each class a client has, in one part or (None) altogether."""
        if self.classes is None or self.train.y is None:
            raise ValueError(f"{self.name!r} has no classes, so there is no label histogram")
        total = torch.zeros(len(self), self.classes, dtype=torch.int64)
        known = self.train.known
        for clients in self.parts.values() if part is None else [part]:
            rows, owner = clients.pool_rows()
            if known is not None:
                owner, rows = owner[known[rows]], rows[known[rows]]
            cells = owner * self.classes + self.train.y[rows]
            total += torch.bincount(cells, minlength=total.numel()).view_as(total)
        if self.train.known is None:
            total[~self.test.labeled] = 0  # of a client that came without labels nothing is known
        return total

    def __repr__(self) -> str:
        labels = f"{self.classes} classes" if self.classes else "numeric targets" if self.has_labels else "no labels"
        return (
            f"Population({self.name!r}: {len(self.seen):,} seen and {len(self.unseen):,} unseen clients, "
            f"{int(self.sizes.sum()):,} rows of {self.kind} {self.input_shape}, {labels}, "
            f"{int(self.labeled[self.seen].sum()):,} seen clients labeled)"
        )
