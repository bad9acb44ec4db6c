"""What left the clients, ask by ask, and how many bytes it took: the record that a privacy officer reads."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(frozen=True)
class Entry:
    """One array of one ask: all that the server, or anybody on the wire, got to see of it."""

    task: str
    array: str
    shape: tuple[int, ...]
    seen_as: str  # "individual", "sum", "mean", "secure sum", ...
    unit: str | None = None
    clip: float | None = None
    noise: str | None = None
    sampling: str | None = None
    note: str | None = None  # e.g. "simulation only", "seeded noise"
    trust: str | None = None  # who had to be trusted with it as it was before the noise: "server" or "nobody"


@dataclass
class Transcript:
    """Entries of a run: the same array asked in the same way in another round only raises the entry's counters."""

    entries: dict[Entry, dict[str, int]] = field(default_factory=dict)

    def add(self, entry: Entry, round: int, clients: int, size: int) -> None:
        """So many clients have sent this in a round, in so many bytes."""
        line = self.entries.setdefault(entry, {"first": round, "last": round, "times": 0, "replies": 0, "bytes": 0})
        line["last"] = round
        line["times"] += 1
        line["replies"] += clients
        line["bytes"] += size

    def rows(self) -> list[dict[str, Any]]:
        """The transcript as plain rows, in the order in which each kind of array was first asked for."""
        return [{**asdict(entry), "shape": list(entry.shape), **line} for entry, line in self.entries.items()]

    @classmethod
    def from_rows(cls, rows: list[dict[str, Any]]) -> Transcript:
        entries = {}
        counters = ("first", "last", "times", "replies", "bytes")
        for row in rows:
            named = {name: value for name, value in row.items() if name not in counters}
            entry = Entry(**{**named, "shape": tuple(row["shape"])})
            entries[entry] = {name: int(row[name]) for name in counters}
        return cls(entries)


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
