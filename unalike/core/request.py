"""The contract between a federation and its runtimes: a request goes out, batches of replies stream back."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from torch import Tensor

from unalike.core.client import Clients
from unalike.core.kept import KeptStore
from unalike.core.release import Release
from unalike.core.task import Task, frozen


@dataclass(frozen=True)
class Request:
    """One ask, for the clients at ``positions`` of ``clients``."""

    task: Task
    clients: Clients
    positions: Tensor  # [C] positions in `clients`
    shared: Mapping[str, Tensor]  # inputs that are the same for every client
    each: Mapping[str, Tensor]  # inputs [C, ...] that differ
    releases: Sequence[Release]  # their client halves run at the client
    key: Tensor  # of this ask; a client's draws come from key(this, its id)
    kept: KeptStore
    measuring: bool = False  # asked to measure in simulation: no drop-out is rehearsed

    @property
    def pure(self) -> bool:
        """Is all that happens at a client a function of what it is given? Then it may run in any thread."""
        return self.task.pure and all(one.noise is None or frozen(one.noise) for one in self.releases)


@dataclass(frozen=True)
class Failure:
    """A client that did not answer, or answered nonsense: data for the server, never silence."""

    client: str
    task: str
    round: int
    reason: str

    def __str__(self) -> str:
        return f"client {self.client}, round {self.round}, task {self.task}: {self.reason}"


@dataclass(frozen=True)
class Batch:
    """Some clients' replies: row i of every array is from the client at ``rows[i]`` of the request."""

    rows: Tensor  # [b] rows of the request's `positions`
    arrays: Sequence[Mapping[str, Tensor]]  # one mapping for each release, arrays [b, ...]
    failed: Mapping[int, str] = field(default_factory=dict)  # row -> reason

    def shapes(self) -> list[dict[str, tuple[int, ...]]]:
        """For each release, the shape that one client's arrays have."""
        return [{name: tuple(value.shape[1:]) for name, value in release.items()} for release in self.arrays]


def alike(batches: Iterable[Batch]) -> Iterator[Batch]:
    """The batches; one whose arrays differ in name or shape from the first one's is a failure of its clients."""
    expected: list[dict[str, tuple[int, ...]]] | None = None
    for batch in batches:
        shapes = batch.shapes()
        if len(batch.rows) and expected is None:
            expected = shapes
        if len(batch.rows) and shapes != expected:
            reason = f"sent arrays of shapes {shapes}, but others sent {expected}"
            yield Batch(batch.rows[:0], [], {**batch.failed, **dict.fromkeys(batch.rows.tolist(), reason)})
        else:
            yield batch


class Runtime(Protocol):
    """Delivers a request and streams the replies."""

    def deliver(self, request: Request) -> Iterator[Batch]: ...
