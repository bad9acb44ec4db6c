"""The contract between a server and its clients: requests go out, replies come back, and nothing else crosses.

Both are plain values and arrays, so a runtime may carry them as bytes. A request names a task; it holds no code, no
sensitivity, no noise level and no cost: whoever runs the task has these from the recipe and its own installed code.
"""

from __future__ import annotations

import json
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Protocol, get_args

import torch
from torch import Tensor

from unalike.core import wire
from unalike.core.failure import Diverged
from unalike.core.release import FLOATS, KINDS, Partial, Release, Stays, Terms
from unalike.core.roster import Roster
from unalike.core.schema import Schema
from unalike.core.shapes import DryRun
from unalike.core.task import Task

Part = Literal["train", "validation", "test"]
Purpose = Literal["train", "serve", "measure"]


@dataclass(frozen=True)
class ReleaseName:
    """A release as a request names it: its kind and its arrays. All else about it is known at the client."""

    kind: str
    names: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.kind}({', '.join(self.names) or 'all arrays'})"

    @classmethod
    def of(cls, release: Release) -> ReleaseName:
        return cls(release.kind, release.names)


@dataclass(frozen=True)
class Request:
    """One ask, wholly encodable. ``run`` and ``serial`` name it: the same serial never runs twice.

    held: inputs that lie at the clients, by the handle under which an earlier ask left them there (``Stays``).
    named: digests of large shared inputs; a shard that has one from an earlier ask is not sent it again.
    A run "a/3" measures beside run "a": it reads what clients keep for "a", and what it keeps itself is thrown away.
    """

    run: str
    serial: int
    task: str
    ids: Tensor  # [C] int64
    part: Part
    labels: bool  # may the task read labels (of clients that have some)?
    purpose: Purpose
    key: int  # of this ask; a client's draws come from key(this, its id)
    wanted: tuple[ReleaseName, ...]
    shared: Mapping[str, Tensor]  # inputs that are the same for every client
    each: Mapping[str, Tensor]  # inputs [C, ...] that differ
    held: Mapping[str, str] = field(default_factory=dict)
    named: Mapping[str, str] = field(default_factory=dict)

    def head(self) -> Request:
        """The request without the arrays that it names."""
        return replace(self, shared={name: value for name, value in self.shared.items() if name not in self.named})

    def with_arrays(self, store: wire.ArrayStore, sent: Sequence[bytes] = ()) -> Request:
        """A head with its arrays, from those that were sent along or are stored; ``Lacking`` if one is in neither."""
        absent = {name: digest for name, digest in self.named.items() if name not in self.shared}
        if not absent:
            return self
        found = store.take(absent.values(), sent)
        return replace(self, shared={**self.shared, **{name: found[digest] for name, digest in absent.items()}})

    def only(self, rows: Tensor) -> Request:
        """The request as it concerns the clients at these rows."""

        def own(value: Tensor) -> Tensor:  # a row repeated by stride 0 stays one row
            return value[rows] if value.stride(0) else value[:1].expand(len(rows), *value.shape[1:])

        return replace(self, ids=self.ids[rows], each={name: own(value) for name, value in self.each.items()})

    def reply(
        self,
        rows: Tensor | None = None,
        arrays: Sequence[Mapping[str, Tensor]] = (),
        failed: Mapping[int, str] | None = None,
        partials: Mapping[int, Partial] | None = None,
    ) -> Reply:
        """A reply to this request; without rows, nobody answered."""
        answered = torch.zeros(0, dtype=torch.int64) if rows is None else rows
        return Reply(answered, arrays, failed or {}, partials or {}, self.run, self.serial)

    def encode(self) -> bytes:
        values: dict[str, Any] = {
            "run": self.run, "serial": self.serial, "task": self.task, "part": self.part, "labels": self.labels,
            "purpose": self.purpose, "key": self.key, "held": json.dumps(dict(self.held)),
            "named": json.dumps(dict(self.named)),
            "wanted": json.dumps([[one.kind, list(one.names)] for one in self.wanted]),
        }  # fmt: skip
        arrays = {"ids": self.ids}
        arrays |= {f"shared.{name}": value for name, value in self.shared.items()}
        for name, value in self.each.items():  # a row repeated by stride 0 is sent once
            repeated = len(value) > 0 and value.stride(0) == 0
            arrays[f"repeated.{name}" if repeated else f"each.{name}"] = value[0] if repeated else value
        return wire.encode({**values, **arrays})

    @classmethod
    def decode(cls, data: bytes) -> Request:
        message = wire.decode(data)
        types = {"run": str, "serial": int, "task": str, "part": str, "labels": bool, "purpose": str, "key": int}
        values: dict[str, Any] = {name: _plain(message, name, kind) for name, kind in types.items()}
        if values["part"] not in get_args(Part) or values["purpose"] not in get_args(Purpose):
            raise wire.WireError(f"a request for part {values['part']!r}, purpose {values['purpose']!r}")
        if not -(1 << 63) <= values["key"] < 1 << 63:
            raise wire.WireError(f"a request's key is a 64-bit integer, not {values['key']}")
        ids = message.get("ids")
        if not isinstance(ids, Tensor) or ids.dtype != torch.int64 or ids.ndim != 1:
            raise wire.WireError("a request has the ids of its clients, int64 [C]")
        try:
            wanted = tuple(
                ReleaseName(str(kind), tuple(map(str, names))) for kind, names in _json(message, "wanted", list)
            )
            held, named = (
                {str(name): str(value) for name, value in _json(message, group, dict).items()}
                for group in ("held", "named")
            )
        except (TypeError, ValueError) as error:
            raise wire.WireError(f"a request's releases or handles are malformed: {error}") from error
        groups: dict[str, dict[str, Tensor]] = {"shared": {}, "each": {}, "repeated": {}}
        for name, value in message.items():
            group, dot, inner = name.partition(".")
            if dot and group in groups and isinstance(value, Tensor):
                groups[group][inner] = value
        for name, value in groups["each"].items():
            if value.ndim == 0 or len(value) != len(ids):
                raise wire.WireError(f"each({name}) has shape {tuple(value.shape)} for {len(ids)} clients")
        each = {
            **groups["each"],
            **{name: value.expand(len(ids), *value.shape) for name, value in groups["repeated"].items()},
        }
        return cls(**values, ids=ids, wanted=wanted, held=held, named=named, shared=groups["shared"], each=each)


def _is_place(text: str) -> bool:
    return text.isascii() and text.isdecimal() and len(text) <= 4


def _plain(message: Mapping[str, Any], name: str, kind: type) -> Any:
    value = message.get(name)
    if type(value) is not kind:
        raise wire.WireError(f"{name!r} is {value!r}; expected {kind.__name__}")
    return value


def _json(message: Mapping[str, Any], name: str, kind: type) -> Any:
    try:
        value = json.loads(_plain(message, name, str))
    except (ValueError, RecursionError) as error:
        raise wire.WireError(f"{name!r} is not JSON: {error}") from error
    if not isinstance(value, kind):
        raise wire.WireError(f"{name!r} is not a {kind.__name__}")
    return value


@dataclass(frozen=True)
class Reply:
    """What some clients of a request answered: a shard streams any number of these.

    ``arrays`` has one mapping for each release: rows [b, ...] where the server sees each client, else nothing.
    ``partials`` has the shard's part of each sum by the release's place, once, with its last reply.
    ``run`` and ``serial`` are those of the request: a reply that is late, or to another one, is passed over.
    """

    rows: Tensor  # [b] int64: rows of the request whose clients answered
    arrays: Sequence[Mapping[str, Tensor]] = ()
    failed: Mapping[int, str] = field(default_factory=dict)  # row -> reason; a ``Diverged`` stays one over the wire
    partials: Mapping[int, Partial] = field(default_factory=dict)
    run: str = ""
    serial: int = 0
    shard: int = 0  # that sent it; set by the runtime

    def at(self, rows: Tensor) -> Reply:
        """The same reply with the request's rows counted in a larger one; ``WireError`` where there is no such row."""
        beyond = (self.rows < 0) | (self.rows >= len(rows))
        if bool(beyond.any()) or any(not 0 <= row < len(rows) for row in self.failed):
            raise wire.WireError(f"a reply speaks for clients beyond the {len(rows)} that were asked")
        return replace(self, rows=rows[self.rows], failed={int(rows[row]): why for row, why in self.failed.items()})

    def shapes(self) -> list[dict[str, tuple[int, ...]]]:
        """For each release, the shape that one client's arrays have."""
        return [{name: tuple(value.shape[1:]) for name, value in release.items()} for release in self.arrays]

    def encode(self) -> bytes:
        message: dict[str, Tensor | wire.Plain] = {"rows": self.rows, "releases": len(self.arrays)}
        message |= {"run": self.run, "serial": self.serial}
        message["failed"] = json.dumps({str(row): reason for row, reason in self.failed.items()})
        message["diverged"] = json.dumps([row for row, reason in self.failed.items() if isinstance(reason, Diverged)])
        for place, arrays in enumerate(self.arrays):
            message |= {f"{place}.{name}": value for name, value in arrays.items()}
        for place, one in self.partials.items():
            message |= {f"sum.{place}": one.total, f"sum.{place}.weight": one.weight}
            message |= {f"sum.{place}.count": one.count, f"sum.{place}.dtype": one.dtype}
        return wire.encode(message)

    @classmethod
    def decode(cls, data: bytes) -> Reply:
        message = wire.decode(data)
        rows = message.get("rows")
        if not isinstance(rows, Tensor) or rows.dtype != torch.int64 or rows.ndim != 1:
            raise wire.WireError("a reply has the rows that answered, int64 [b]")
        count = _plain(message, "releases", int)
        if not 0 <= count <= wire.MAX_NAMES:
            raise wire.WireError(f"a reply for {count} releases")
        arrays: list[dict[str, Tensor]] = [{} for _ in range(count)]
        partials: dict[int, Partial] = {}
        for name, value in message.items():
            group, _, rest = name.partition(".")
            if not isinstance(value, Tensor) or name == "rows":
                continue
            if group == "sum" and _is_place(rest):
                if value.dtype != torch.float64:
                    raise wire.WireError(f"a partial sum is float64, not {value.dtype}")
                weight, number = _plain(message, f"{name}.weight", float), _plain(message, f"{name}.count", int)
                dtype = _plain(message, f"{name}.dtype", str)
                if dtype not in FLOATS:
                    raise wire.WireError(f"a partial sum of {dtype!r}; expected one of {', '.join(FLOATS)}")
                partials[int(rest)] = Partial(value, weight, number, dtype)
            elif _is_place(group) and int(group) < count and value.ndim and len(value) == len(rows):
                arrays[int(group)][rest] = value
            else:
                raise wire.WireError(f"a reply with an array {name!r} of shape {tuple(value.shape)}")
        try:
            failed = {int(row): str(reason) for row, reason in _json(message, "failed", dict).items()}
            diverged = _json(message, "diverged", list) if "diverged" in message else ()
            failed |= {int(row): Diverged(failed[int(row)]) for row in diverged}
        except (TypeError, ValueError, KeyError, OverflowError) as error:
            raise wire.WireError(f"a reply's failures are by row: {error}") from error
        run, serial = _plain(message, "run", str), _plain(message, "serial", int)
        return cls(rows, arrays, failed, dict(sorted(partials.items())), run, serial)


class Program:
    """The tasks that a shard may run, and what each of them may let out.

    A shard elsewhere has a closed program, made from the recipe by its own installed code: it refuses all else. In this
    process a program is open: an ask teaches it the task, the releases that it is about and the terms.

    ``private``: the run states an ε, so a closed program lets nothing out without noise, whatever the server asks for:
    neither scores nor sums. ``exchanges`` of a secure sum are masked, and may. ``measured``: where the clients
    are a simulation's, the tasks by which whoever measures sees more.
    """

    def __init__(
        self,
        tasks: Sequence[Task] = (),
        *,
        open: bool = False,
        terms: Terms = Terms(),
        exchanges: Sequence[Task] = (),
        private: bool = False,
        measured: Sequence[Task] = (),
    ) -> None:
        tasks = [*tasks, *exchanges]
        self.open, self.terms, self._private = open, terms, private
        self._measured = {task.name for task in measured}
        self._exchanges = {task.name for task in exchanges}
        self._tasks = {task.name: task for task in tasks}
        if len(self._tasks) < len(tasks):
            twice = sorted({task.name for task in tasks if self._tasks[task.name] is not task})
            raise ValueError(f"two tasks of a program have one name: {', '.join(twice)}; a request could not tell them")
        self._taught: dict[str, Sequence[Release]] = {}
        self.dry_runs: dict[Hashable, DryRun | None] = {}  # by kind of ask

    def teach(self, task: Task, releases: Sequence[Release], terms: Terms = Terms()) -> None:
        """Make an ask known; a closed program only checks that it knows the task and has agreed to the terms."""
        if self.open:
            self._tasks[task.name], self._taught[task.name], self.terms = task, releases, terms
        elif any(one.noise is not None for one in releases) and not self.terms.cover(terms):
            raise ValueError(f"the clients agreed to {self.terms}, but here are {terms}; use one recipe on both sides")
        elif task.name not in self._tasks:
            known = ", ".join(sorted(self._tasks))
            raise ValueError(f"{task.name} is not in the program that the clients agreed to; it has {known}")

    def task(self, name: str) -> Task:
        if name not in self._tasks:
            raise wire.WireError(f"no task {name!r} is in the program that this shard agreed to")
        return self._tasks[name]

    def is_exchange(self, name: str) -> bool:
        """Is it an exchange of a secure sum?"""
        return name in self._exchanges

    def releases(self, request: Request) -> list[Release]:
        """The releases that a request names, with their bounds and noise as this side knows them."""
        task = self.task(request.task)
        if len(set(request.wanted)) < len(request.wanted):
            raise wire.WireError(f"{request.task} was asked for one release twice, which would give it two noises")
        known = self._taught.get(request.task) or task.releases()
        found = []
        for one in request.wanted:
            match = next((release for release in known if ReleaseName.of(release) == one), None)
            if match is None and known:
                declared = ", ".join(map(str, map(ReleaseName.of, known)))
                raise wire.WireError(f"{request.task} lets out {declared}, but was asked for {one}")
            if match is None and one.kind == Stays.kind and self.hides(request):
                raise wire.WireError(f"the run states an ε, and {request.task} does not declare that {one}")
            found.append(match or _plain_release(one))
        bare = [one for one in found if not isinstance(one, Stays) and one.noise is None and one.cost is None]
        if bare and self.hides(request):
            raise wire.WireError(
                f"the run states an ε, and {request.task} was asked for {ReleaseName.of(bare[0])} without noise: "
                "nothing is sent"
            )
        if request.purpose == "measure" and self.hides(request):
            raise wire.WireError(f"the run states an ε, and {request.task} is not among its measurements")
        return found

    def hides(self, request: Request) -> bool:
        """Must nothing that one client changes show in the replies, not even that its task failed?

        So it is in a run that states an ε. In this process it also holds of asks that release nothing.
        """
        if request.task in self._exchanges:
            return False
        if self.open:
            return self.terms.system and request.purpose != "measure" and _releases_nothing(request.wanted)
        return self._private and not (request.purpose == "measure" and request.task in self._measured)


def _releases_nothing(wanted: Sequence[ReleaseName]) -> bool:
    return all(one.kind == Stays.kind for one in wanted)


def _plain_release(wanted: ReleaseName) -> Release:
    """The release of this kind and these arrays, with nothing else to it."""
    if wanted.kind not in KINDS:
        raise wire.WireError(f"no release is called {wanted.kind!r}; there are {', '.join(KINDS)}")
    try:
        made = KINDS[wanted.kind](*wanted.names)
    except (TypeError, ValueError) as error:
        raise wire.WireError(f"no plain release is {wanted}: {error}") from error
    if ReleaseName.of(made) != wanted:
        raise wire.WireError(f"no plain release is {wanted}; it would be {ReleaseName.of(made)}")
    return made


class Runtime(Protocol):
    """Brings requests to where the clients live, and streams what they say."""

    @property
    def roster(self) -> Roster: ...

    @property
    def program(self) -> Program: ...

    @property
    def shard_count(self) -> int:
        """How many shards add noise where each of them does."""

    def deliver(self, request: Request) -> Iterator[Reply]: ...

    def use(self, schema: Schema) -> None:
        """Clients read their rows by this schema from now on."""

    def forget(self, run: str, prefix: str = "") -> None:
        """What clients keep for this run, under names that begin so, is not needed any more."""
