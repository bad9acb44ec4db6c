"""What left the clients, ask by ask, and how many bytes it took: the record that a privacy officer reads."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, is_dataclass
from typing import Any

Facts = tuple[tuple[str, Any], ...]  # names with plain values; the first is ("kind", ...)


def facts(value: object) -> Facts:
    """A mechanism or a way of sampling as the transcript records it: its kind and its parameters."""
    fields = asdict(value) if is_dataclass(value) and not isinstance(value, type) else {}
    plain = [(name, item) for name, item in fields.items() if isinstance(item, bool | int | float | str)]
    return (("kind", type(value).__name__), *plain)


@dataclass(frozen=True)
class Disclosure:
    """One array of one ask: everything that the server, or a reader of the wire, saw of it."""

    task: str
    array: str
    shape: tuple[int, ...]
    seen_as: str  # "individual", "sum", "mean", "secure sum", ...
    unit: str | None = None
    clip: float | None = None
    noise: Facts | str | None = None  # a string in the folders of older versions
    sampling: Facts | str | None = None
    note: str | None = None  # e.g. "simulation only", "seeded noise"
    bits: int | None = None  # of each number in a client's message; None: those of its type
    trust: str | None = None  # who had to be trusted with it before noise was added: "server" or "nobody"

    def row(self) -> dict[str, Any]:
        """As plain values."""
        plain = {
            name: dict(value) if name in ("noise", "sampling") and isinstance(value, tuple) else value
            for name, value in vars(self).items()
        }
        return {**plain, "shape": list(self.shape)}

    @classmethod
    def from_row(cls, row: Mapping[str, Any]) -> Disclosure:
        named: dict[str, Any] = {
            name: tuple(value.items()) if isinstance(value, dict) else value for name, value in row.items()
        }
        return cls(**{**named, "shape": tuple(row["shape"])})


_COUNTERS = ("first", "last", "times", "replies", "bytes")


@dataclass
class Transcript:
    """What a run disclosed; an array asked for in the same way in another round only raises the counters."""

    entries: dict[Disclosure, dict[str, int]] = field(default_factory=dict)

    def add(self, entry: Disclosure, round: int, clients: int, size: int) -> None:
        """Record that this many clients sent the array in this round, in ``size`` bytes."""
        line = self.entries.setdefault(entry, {"first": round, "last": round, "times": 0, "replies": 0, "bytes": 0})
        line["last"] = round
        line["times"] += 1
        line["replies"] += clients
        line["bytes"] += size

    def rows(self) -> list[dict[str, Any]]:
        """The transcript as plain rows, in the order in which each kind of array was first asked for."""
        return [entry.row() | line for entry, line in self.entries.items()]

    @classmethod
    def from_rows(cls, rows: list[dict[str, Any]]) -> Transcript:
        return cls(
            {
                Disclosure.from_row({name: value for name, value in row.items() if name not in _COUNTERS}): {
                    name: int(row[name]) for name in _COUNTERS
                }
                for row in rows
            }
        )


@dataclass
class Traffic:
    """Bytes sent up (from clients) and down (to clients), by array name."""

    up: Counter[str] = field(default_factory=Counter)
    down: Counter[str] = field(default_factory=Counter)

    @property
    def total_up(self) -> int:
        return self.up.total()

    @property
    def total_down(self) -> int:
        return self.down.total()

    def state(self) -> dict[str, dict[str, int]]:
        """As plain values, for a checkpoint."""
        return {"up": dict(self.up), "down": dict(self.down)}

    @classmethod
    def from_state(cls, state: Mapping[str, Mapping[str, int]]) -> Traffic:
        return cls(Counter(state["up"]), Counter(state["down"]))
