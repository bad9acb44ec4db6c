"""Shards that live elsewhere: what every engine needs that carries bytes to and from them.

A worker is a process with a ``Host``, wherever it runs: it loads its clients' rows itself and answers bytes with bytes.
This side has no row. It sends each worker its part of a request, waits, and passes on what comes back. What all clients
of a request share is sent once, and named by its digest afterwards.

A worker that is lost is waited for. It gets its set-up calls again, finds on disk what its clients keep, and is asked
again under the same serial; its journal sees to it that nothing is trained or charged twice.

What carries the bytes is an ``Engine``: a Ray cluster (``runtime/ray.py``) or a network (``runtime/network``).
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent import futures
from concurrent.futures import Future
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal, Protocol

from unalike.core import wire
from unalike.core.request import Program, Reply, Request
from unalike.core.roster import Roster
from unalike.core.schema import Schema
from unalike.runtime.shard.host import Failed, NotReady, OutOfMemory, result, version
from unalike.runtime.shard.journal import unpack
from unalike.runtime.simulate import Drop, Routes

Lost = Literal["again", "failed"]
START = 120.0  # seconds that a worker may take to start, or to come back
TRIES = 3  # times that a worker may be lost in one ask before its clients are given up
TICK = 1.0  # seconds between looks at who is late


class WorkerError(RuntimeError):
    """A worker cannot take part; the message says why and what to do."""


class Unreachable(RuntimeError):
    """A worker has died, or nothing reaches it; what it was asked has no answer."""


class Engine(Protocol):
    """Carries calls to workers, and says nothing about what they mean."""

    count: int

    def name(self, number: int) -> str:
        """What a worker is called in messages."""

    def begin(self, number: int, what: str, *data: Any) -> Future[bytes]:
        """Send a call. A worker does its calls in order. ``Unreachable`` where it is lost before it answers."""

    def share(self, data: bytes) -> Any:
        """Bytes that several workers are going to be sent."""

    def end(self, number: int) -> None:
        """Nobody waits any longer for what this worker was asked; end it, where that can be done from here."""

    def close(self) -> None: ...


@dataclass
class Tally:
    """What one worker has done."""

    worker: int
    clients: int = 0  # that live there
    asks: int = 0
    answered: int = 0  # replies of clients
    failed: int = 0
    seconds: float = 0.0  # at work
    cpu: float = 0.0  # of its processor in these
    waited: float = 0.0  # from a request to its answer, as this side sees it
    last: float = 0.0  # the same, of the last request
    restarts: int = 0
    missed: int = 0  # deadlines
    bytes_down: int = 0
    bytes_up: int = 0

    @property
    def rate(self) -> float:
        """Clients per second of work."""
        return self.answered / self.seconds if self.seconds else 0.0


class Workers:
    """The workers that an engine reaches. They are started once and may serve several runs, one after the other.

    patience: seconds to wait for one that was lost; once it has been given up, ``afterwards`` in each later ask.
    """

    def __init__(self, engine: Engine, patience: float = START, afterwards: float = START) -> None:
        self.engine, self.count, self.patience, self.afterwards = engine, engine.count, patience, afterwards
        self._setup: list[dict[str, tuple[bytes, ...]]] = [{} for _ in range(self.count)]
        # digests of the arrays that each worker was sent since it started
        self.received: list[set[str]] = [set() for _ in range(self.count)]

    def __len__(self) -> int:
        return self.count

    def __enter__(self) -> Workers:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self.engine.close()

    def check(self) -> None:
        """Wait for all workers, and refuse one that would run other code than this process."""
        begun = [self.begin(number, "version") for number in range(self.count)]
        for number, future in enumerate(begun):
            self._check(number, self.wait(number, future, START))

    def processes(self) -> list[int]:
        """The workers' process ids, where they run."""
        return [int(json.loads(found)["pid"]) for found in self.all("version")]

    def _check(self, number: int, answer: bytes) -> None:
        theirs = json.loads(result(answer, self.name(number)))["version"]
        if theirs != version():
            raise WorkerError(
                f"{self.name(number)} has Unalike {theirs}, but this process has {version()}: the same request could "
                "mean something else there. Install the same version everywhere, then run again"
            )

    def name(self, number: int) -> str:
        return self.engine.name(number)

    # One call

    def begin(self, number: int, what: str, *data: Any) -> Future[bytes]:
        """Send a call; ``wait`` for what comes of it."""
        return self.engine.begin(number, what, *data)

    def wait(
        self,
        number: int,
        future: Future[bytes],
        patience: float | None = None,
        tick: Callable[[], None] | None = None,
    ) -> bytes:
        """The answer to a call. ``TimeoutError`` after ``patience`` seconds, ``Unreachable`` if the worker is lost."""
        until = None if patience is None else time.monotonic() + patience
        while True:
            left = TICK if until is None else min(TICK, until - time.monotonic())
            if futures.wait([future], max(0.0, left)).done:
                return future.result()
            if until is not None and time.monotonic() >= until:
                raise TimeoutError(f"{self.name(number)} did not answer within {patience:g} s")
            if tick is not None:
                tick()

    def all(self, what: str, *data: bytes) -> list[bytes]:
        """The same call to all workers at once; one that has died is brought back and asked again."""
        return self.each(what, [data] * self.count)

    def each(self, what: str, data: Sequence[tuple[bytes, ...]]) -> list[bytes]:
        """A call to every worker, each with its own data."""
        begun = [self.begin(number, what, *own) for number, own in enumerate(data)]
        return [self.answer_to(number, what, own, begun[number]) for number, own in enumerate(data)]

    def answer_to(self, number: int, what: str, data: tuple[bytes, ...], future: Future[bytes]) -> bytes:
        """What a call gave that was begun; a worker that is lost is brought back and called again."""
        for _ in range(TRIES):
            try:
                return result(self.wait(number, future), self.name(number))
            except (Unreachable, NotReady):
                self.revive(number)
                future = self.begin(number, what, *data)
        raise WorkerError(f"{self.name(number)} was lost {TRIES} times in a row when it was asked to {what}")

    def later(self, what: str, *data: bytes) -> None:
        """The same call to all workers, without waiting: calls are done in order, and nothing depends on this one."""
        for number in range(self.count):
            self.begin(number, what, *data)

    # Set-up

    def tell(self, what: str, data: Sequence[tuple[bytes, ...]]) -> list[bytes]:
        """A set-up call to every worker; one that starts again gets it again."""
        answers = self.each(what, data)
        for setup, own in zip(self._setup, data, strict=True):
            self._remember(setup, what, own)
        return answers

    @staticmethod
    def _remember(setup: dict[str, tuple[bytes, ...]], what: str, data: tuple[bytes, ...]) -> None:
        order = ("load", "settle", "learn", "use", "plans")
        if what in ("load", "settle"):  # what came after it is about another shard
            for later in order[order.index(what) :]:
                setup.pop(later, None)
        setup[what] = data

    def remember(self, number: int, what: str, *data: bytes) -> None:
        """Keep a set-up call for a worker that starts again."""
        self._remember(self._setup[number], what, data)

    def revive(self, number: int, patience: float | None = None) -> None:
        """Wait until a worker that was lost is back, and tell it what it is. It has forgotten all arrays."""
        self.received[number].clear()
        patience = self.patience if patience is None else patience
        until, last = time.monotonic() + patience, ""
        while time.monotonic() < until:
            try:
                left = max(1.0, until - time.monotonic())
                self._check(number, self.wait(number, self.begin(number, "version"), left))
                for what, data in self._setup[number].items():
                    result(self.wait(number, self.begin(number, what, *data), left), self.name(number))
                return
            except (Unreachable, NotReady, TimeoutError) as error:
                last = str(error)
                time.sleep(0.1)
        raise WorkerError(f"{self.name(number)} was lost and did not come back within {patience:g} s. {last}")


@dataclass(frozen=True)
class _Ask:
    """One worker's part of a request, encoded, and the arrays that it names."""

    part: Request
    data: bytes
    arrays: Mapping[str, tuple[int, Any]]


class WorkerRuntime:
    """A shard on each worker. Its program is closed: the workers have agreed to it.

    - ``deadline``: seconds that a worker may take for a request. One that takes longer is ended and started again, and
      its clients are failures of that ask.
    - ``lost``: what becomes of the clients of a worker that dies in an ask: they are asked "again" under the same
      serial when it is back, or they are "failed" at once. If it does not come back, they are failures of this ask and
      of all others until it does.
    """

    def __init__(
        self,
        workers: Workers,
        rosters: Sequence[Roster],
        program: Program,
        *,
        drop: Drop = 0.0,
        deadline: float | None = None,
        lost: Lost = "again",
    ) -> None:
        self.workers, self.program, self.deadline, self.lost = workers, program, deadline, lost
        self._routes = Routes(rosters, drop)
        self.roster, self.shard_count = self._routes.roster, self._routes.shards
        for received in workers.received:  # workers that were settled anew begin without arrays
            received.clear()
        self._gone: set[int] = set()  # workers to be brought back before they are asked again
        self._missed: dict[int, tuple[str, bytes]] = {}  # the last commit, of workers that were gone then
        self.tallies = [Tally(number, len(roster)) for number, roster in enumerate(rosters)]
        # called with the workers it waits for, and with none once all have answered
        self.waiting: Callable[[list[int], float], None] = lambda late, seconds: None

    def deliver(self, request: Request) -> Iterator[Reply]:
        begun: dict[int, Future[bytes]] = {}  # of workers that have not been listened to
        stored: dict[str, tuple[int, Any]] = {}  # arrays by digest: bytes, and what the engine sends
        for name, digest in request.named.items():
            data = wire.encode({"": request.shared[name]})
            stored[digest] = len(data), self.workers.engine.share(data)

        def answers(number: int, part: Request) -> Iterator[Reply]:
            if number in self._gone:  # it was given up in an earlier ask
                try:
                    self._revive(number, self.workers.afterwards)
                except WorkerError as error:
                    tally = self.tallies[number]
                    tally.asks, tally.failed = tally.asks + 1, tally.failed + len(part.ids)
                    return iter([part.reply(failed=dict.fromkeys(range(len(part.ids)), str(error)))])
            ask = _Ask(part, part.encode(), stored)
            missing = [one for one in stored if one not in self.workers.received[number]]
            begun[number] = self._begin(number, ask, missing)
            return self._replies(number, ask, begun)

        start = time.monotonic()
        yield from self._routes.deliver(request.head(), answers)
        self.waiting([], time.monotonic() - start)

    def _begin(self, number: int, ask: _Ask, missing: Sequence[str]) -> Future[bytes]:
        """Send a worker its part of an ask, with the arrays that it lacks."""
        self.tallies[number].bytes_down += len(ask.data) + sum(ask.arrays[one][0] for one in missing)
        self.workers.received[number] |= set(ask.arrays)
        return self.workers.begin(number, "answer", ask.data, *(ask.arrays[one][1] for one in missing))

    def _replies(self, number: int, ask: _Ask, begun: dict[int, Future[bytes]]) -> Iterator[Reply]:
        tally, start = self.tallies[number], time.monotonic()
        tally.asks += 1
        answer = self._answer(number, ask, begun)
        tally.last = time.monotonic() - start
        tally.waited += tally.last
        if isinstance(answer, bytes):
            tally.bytes_up += len(answer)
            try:
                about, *frames = unpack(answer)
                seconds, cpu = (float(json.loads(about)[name]) for name in ("seconds", "cpu"))
                replies = [Reply.decode(frame) for frame in frames]
                tally.seconds, tally.cpu = tally.seconds + seconds, tally.cpu + cpu
            except (ValueError, TypeError, KeyError) as error:  # costs its own clients and nobody else's
                answer = f"its worker sent nonsense: {error}"
        if isinstance(answer, str):
            replies = [ask.part.reply(failed=dict.fromkeys(range(len(ask.part.ids)), answer))]
        for reply in replies:
            tally.answered += len(reply.rows)
            tally.failed += len(reply.failed)
            yield reply

    def _answer(self, number: int, ask: _Ask, begun: dict[int, Future[bytes]]) -> bytes | str:
        """What a worker answers; why it does not, where it is lost."""
        start, why = time.monotonic(), "was not ready"

        def tick() -> None:
            late = [one for one, future in begun.items() if not future.done()]
            self.waiting(late, time.monotonic() - start)

        try:
            for _ in range(TRIES):
                try:
                    return self._wait(number, ask, begun, tick)
                except wire.Lacking:
                    why = "lacked arrays that it had just been sent"
                except NotReady:
                    self._revive(number)
                except TimeoutError:
                    self.tallies[number].missed += 1
                    self.workers.engine.end(number)
                    self._gone.add(number)
                    return f"its worker did not answer within {self.deadline:g} s"
                except (Unreachable, OutOfMemory) as error:
                    if isinstance(error, OutOfMemory):  # a fresh process has all its memory
                        self.workers.engine.end(number)
                    if self.lost == "failed":
                        self._gone.add(number)
                        return f"its worker was lost in this ask ({type(error).__name__})"
                    why = "ran out of memory" if isinstance(error, OutOfMemory) else "died"
                    self._revive(number)
                begun[number] = self._begin(number, ask, list(ask.arrays))
            return f"its worker {why} {TRIES} times in this ask"
        except WorkerError as error:  # it does not come back
            self._gone.add(number)
            return str(error)
        finally:
            del begun[number]

    def _wait(self, number: int, ask: _Ask, begun: dict[int, Future[bytes]], tick: Callable[[], None]) -> bytes:
        """Wait for a worker's answer; one that has forgotten some arrays gets all of them again."""
        name = self.workers.name(number)
        try:
            return result(self.workers.wait(number, begun[number], self.deadline, tick), name)
        except wire.Lacking:
            begun[number] = self._begin(number, ask, list(ask.arrays))
            return result(self.workers.wait(number, begun[number], self.deadline, tick), name)

    def _revive(self, number: int, patience: float | None = None) -> None:
        self.workers.revive(number, patience)
        self.tallies[number].restarts += 1
        if number in self._missed:
            what, data = self._missed[number]
            name = self.workers.name(number)
            result(self.workers.wait(number, self.workers.begin(number, what, data), self.workers.patience), name)
            del self._missed[number]
        self._gone.discard(number)

    def use(self, schema: Schema) -> None:
        self.workers.tell("use", [(schema.to_json().encode(),)] * len(self.workers))
        self.roster = replace(self.roster, schema=schema)

    def forget(self, run: str, prefix: str = "") -> None:
        self.workers.later("forget", json.dumps([run, prefix]).encode())

    def commit(self, run: str, serial: int) -> list[dict[str, Any]]:
        """The workers save what their clients keep, before the server saves its own state; their plans.

        One that is gone saves it when it is back, before it is asked anything else.
        """
        data, plans = json.dumps([run, serial]).encode(), [b"{}"] * len(self.workers)
        begun = {
            number: self.workers.begin(number, "commit", data)
            for number in range(len(self.workers))
            if number not in self._gone
        }
        for number, future in begun.items():
            try:
                plans[number] = self.workers.answer_to(number, "commit", (data,), future)
                self.workers.remember(number, "plans", plans[number])
            except WorkerError:
                self._gone.add(number)
        self._missed |= dict.fromkeys(self._gone, ("commit", data))
        return [json.loads(one) for one in plans]

    def rollback(self, run: str, serial: int, plans: Sequence[Mapping[str, Any]]) -> None:
        """Clients keep again what they kept when the server saved its state after this serial."""
        self.workers.all("rollback", json.dumps([run, serial]).encode())
        self.workers.tell("plans", [(json.dumps(one).encode(),) for one in plans])

    def report(self) -> list[dict[str, Any]]:
        """A line for each worker, as plain values."""
        names = [self.workers.name(tally.worker) for tally in self.tallies]
        return [
            {**asdict(tally), "name": name, "rate": tally.rate} for name, tally in zip(names, self.tallies, strict=True)
        ]


def start_runtime(
    workers: Workers,
    settings: str,
    mine: Sequence[Any],
    folder: str,
    program: Program,
    *,
    lost: Lost = "again",
    seeded: bool = True,
    **how: Any,
) -> WorkerRuntime:
    """The runtime of workers that have loaded their data: each takes the clients at these positions.

    seeded: all draws come from the seed, so that an ask that was cut off may run again and give the same bytes. Where
    noise is the operating system's it never does: its clients have failed, and are charged.
    """
    again = seeded and lost == "again"
    data = [
        wire.encode({"settings": settings, "folder": f"{folder}/worker-{number}", "mine": own, "again": again})
        for number, own in enumerate(mine)
    ]
    return settled(workers, data, program, lost=lost, **how)


def settled(workers: Workers, data: Sequence[bytes], program: Program, **how: Any) -> WorkerRuntime:
    """The runtime of workers, each of which makes its shard of its own data here."""
    rosters = [Roster.decode(found) for found in workers.tell("settle", [(own,) for own in data])]
    return WorkerRuntime(workers, rosters, program, **how)


__all__ = ["Failed", "Tally", "Unreachable", "WorkerError", "WorkerRuntime", "Workers", "settled", "start_runtime"]
