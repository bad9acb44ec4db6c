"""Shards on the workers of a Ray cluster.

A worker is a process (an actor of Ray) with a ``Host``: it loads its clients' rows itself and answers bytes with bytes.
This side has no row. It sends each worker its part of a request, waits, and passes on what comes back. What all clients
of a request share is put into Ray's object store once, and every worker reads it once.

A worker that dies is started again by Ray. It is told once more what it is, finds on disk what its clients keep, and is
asked again under the same serial; its journal sees to it that nothing is trained or charged twice.

Ray runs any code that whoever reaches its ports sends, and listens on every interface: see docs/scale.md on how to keep
a cluster to itself. Only this module imports ray.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # before ray is imported: nothing is reported to anybody
os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")  # its own warning asks for this

os.environ.setdefault("RAY_worker_niceness", "0")  # else workers wait for whatever else the machine has to do

import ray
from ray.exceptions import RayError

from unalike.core import wire
from unalike.core.request import Program, Reply, Request
from unalike.core.roster import Roster
from unalike.core.schema import Schema
from unalike.runtime.routes import Drop, Routes
from unalike.runtime.shard.host import Failed, Host, NotReady, OutOfMemory, result, unpacked, version

Lost = Literal["again", "failed"]
START = 120.0  # seconds that a worker may take to start, or to start again
TRIES = 3  # times that a worker may die in one ask before its clients are given up
TICK = 1.0  # seconds between looks at who is late
INLINE = 1 << 16  # bytes: what is smaller travels with the call, which Ray does up to 100 kB


class WorkerError(RuntimeError):
    """A worker cannot take part; the message says why and what to do."""


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
    """The workers of a cluster. They are started once and may serve several runs, one after the other.

    - ``count``: how many; None: one for each processor of the cluster.
    - ``address``: of a cluster that runs already, as ``ray start`` prints it; None starts one on this machine, for as
      long as this object is open.
    - ``options``: of each worker, for Ray, e.g. ``{"resources": {"hospital": 1}}``.
    """

    def __init__(self, count: int | None = None, address: str | None = None, **options: Any) -> None:
        if count is not None and count < 1:
            raise ValueError(f"workers={count}; expected at least 1")
        cores = os.cpu_count() or 1
        own = {} if address else {"num_cpus": max(count or cores, 1)}
        try:
            ray.init(
                address=address or "local",
                include_dashboard=None if address else False,
                namespace="unalike",
                log_to_driver=False,
                logging_level="error",
                **own,
            )
        except Exception as error:  # Ray raises plain ones, too, where it does not come up in time
            raise WorkerError(f"no Ray cluster can be used ({address or 'on this machine'}): {error}") from error
        self._make = ray.remote(Host).options(
            **{"num_cpus": 1, "max_restarts": -1, "max_task_retries": 0, **options}  # what is asked again, we ask
        )
        self.count = count or max(1, int(ray.cluster_resources().get("CPU", 1)))
        self._actors = [self._make.remote() for _ in range(self.count)]
        self._told: list[dict[str, tuple[bytes, ...]]] = [{} for _ in range(self.count)]
        try:
            self.check()
        except (TimeoutError, RayError) as error:
            self.close()
            raise WorkerError(f"a worker did not start: {error}. The machine may have too much else to do") from error
        except BaseException:
            self.close()
            raise

    def __len__(self) -> int:
        return self.count

    def __enter__(self) -> Workers:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        for actor in self._actors:
            with contextlib.suppress(RayError):
                ray.kill(actor)
        ray.shutdown()

    def check(self) -> None:
        """Wait for all workers, and refuse one that would run other code than this process."""
        futures = [self.begin(number, "version") for number in range(self.count)]
        for number, future in enumerate(futures):
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
        return f"worker {number}"

    # One call

    def begin(self, number: int, what: str, *data: Any) -> Any:
        """Send a call; ``wait`` for what comes of it."""
        return self._actors[number].call.remote(what, *data)

    def wait(
        self, number: int, future: Any, patience: float | None = None, tick: Callable[[], None] | None = None
    ) -> bytes:
        """The answer to a call. ``TimeoutError`` after so many seconds, ``RayError`` if the worker has died."""
        until = None if patience is None else time.monotonic() + patience
        while True:
            left = TICK if until is None else min(TICK, until - time.monotonic())
            ready, _ = ray.wait([future], timeout=max(0.0, left))
            if ready:
                answer: bytes = ray.get(future)
                return answer
            if until is not None and time.monotonic() >= until:
                raise TimeoutError(f"{self.name(number)} did not answer within {patience:g} s")
            if tick is not None:
                tick()

    def all(self, what: str, *data: bytes) -> list[bytes]:
        """The same call to all workers at once; one that has died is brought back and asked again."""
        return self.each(what, [data] * self.count)

    def each(self, what: str, data: Sequence[tuple[bytes, ...]]) -> list[bytes]:
        """A call to every worker, with data of its own."""
        futures = [self.begin(number, what, *own) for number, own in enumerate(data)]
        return [self._result(number, what, own, futures[number]) for number, own in enumerate(data)]

    def _result(self, number: int, what: str, data: tuple[bytes, ...], future: Any) -> bytes:
        for _ in range(TRIES):
            try:
                return result(self.wait(number, future), self.name(number))
            except (RayError, NotReady):
                self.revive(number)
                future = self.begin(number, what, *data)
        raise WorkerError(f"{self.name(number)} has died {TRIES} times in a row when it was asked to {what}")

    def later(self, what: str, *data: bytes) -> None:
        """The same call to all workers, without waiting: calls are done in order, and nothing depends on this one."""
        for number in range(self.count):
            self.begin(number, what, *data)

    # What a worker must know

    def tell(self, what: str, data: Sequence[tuple[bytes, ...]]) -> list[bytes]:
        """A call to every worker that is part of what it is: one that starts again is told the same."""
        answers = self.each(what, data)
        for told, own in zip(self._told, data, strict=True):
            self._remember(told, what, own)
        return answers

    @staticmethod
    def _remember(told: dict[str, tuple[bytes, ...]], what: str, data: tuple[bytes, ...]) -> None:
        order = ("load", "settle", "learn", "use", "plans")
        if what in ("load", "settle"):  # what came after it is about another shard
            for later in order[order.index(what) :]:
                told.pop(later, None)
        told[what] = data

    def remember(self, number: int, what: str, *data: bytes) -> None:
        """To be told to a worker that starts again."""
        self._remember(self._told[number], what, data)

    def revive(self, number: int) -> None:
        """Wait until a worker that died is back, and tell it what it is."""
        until, last = time.monotonic() + START, ""
        while time.monotonic() < until:
            try:
                left = max(1.0, until - time.monotonic())
                self._check(number, self.wait(number, self.begin(number, "version"), left))
                for what, data in self._told[number].items():
                    result(self.wait(number, self.begin(number, what, *data), left), self.name(number))
                return
            except ray.exceptions.ActorDiedError as error:  # Ray has given it up: start one in its place
                last = str(error)
                self._actors[number] = self._make.remote()
            except (RayError, NotReady) as error:
                last = str(error)
                time.sleep(0.1)
        raise WorkerError(f"{self.name(number)} has died and did not come back within {START:g} s. {last}")

    def kill(self, number: int) -> None:
        """End a worker that hangs; Ray starts it again."""
        ray.kill(self._actors[number], no_restart=False)


class RayRuntime:
    """A shard on each worker. Its program is closed: the workers have agreed to it.

    - ``deadline``: seconds that a worker may take for a request. One that takes longer is ended and started again, and
      its clients are failures of that ask.
    - ``lost``: what becomes of the clients of a worker that dies in an ask: they are asked "again" under the same
      serial when it is back, or they are "failed" at once.
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
        self.roster, self.shards = self._routes.roster, self._routes.shards
        self._gone: set[int] = set()  # workers to be brought back before they are asked again
        self.tallies = [Tally(number, len(roster)) for number, roster in enumerate(rosters)]
        # is told whom it waits for, and once all have answered, nobody
        self.waiting: Callable[[list[int], float], None] = lambda late, seconds: None

    def deliver(self, request: Request) -> Iterator[Reply]:
        shared: Any = wire.encode(request.shared) if request.shared else b""
        stored = ray.put(shared) if len(shared) > INLINE else shared
        size, bare = len(shared), replace(request, shared={})
        futures: dict[int, Any] = {}  # of workers that have not been listened to

        def answers(number: int, part: Request) -> Iterator[Reply]:
            data = part.encode()
            if number in self._gone:  # it was given up in an earlier ask
                self._revive(number)
            self.tallies[number].bytes_down += len(data) + size
            futures[number] = self.workers.begin(number, "answer", data, stored)
            return self._replies(number, part, (data, stored), futures)

        begun = time.monotonic()
        yield from self._routes.deliver(bare, answers)
        self.waiting([], time.monotonic() - begun)

    def _replies(self, number: int, part: Request, data: tuple[Any, ...], futures: dict[int, Any]) -> Iterator[Reply]:
        tally, begun = self.tallies[number], time.monotonic()
        tally.asks += 1

        def tick() -> None:
            done, _ = ray.wait(list(futures.values()), num_returns=len(futures), timeout=0)
            late = [one for one, future in futures.items() if future not in done]
            self.waiting(late, time.monotonic() - begun)

        def all_failed(why: str) -> Reply:
            tally.failed += len(part.ids)
            return part.reply(failed=dict.fromkeys(range(len(part.ids)), why))

        try:
            for _ in range(TRIES):
                try:
                    answer = result(
                        self.workers.wait(number, futures[number], self.deadline, tick), self.workers.name(number)
                    )
                    break
                except NotReady:
                    self._revive(number)
                except TimeoutError:
                    tally.missed += 1
                    self.workers.kill(number)
                    self._gone.add(number)
                    yield all_failed(f"its worker did not answer within {self.deadline:g} s")
                    return
                except (RayError, OutOfMemory) as error:
                    if isinstance(error, OutOfMemory):  # a fresh process has all its memory
                        self.workers.kill(number)
                    if self.lost == "failed":
                        self._gone.add(number)
                        yield all_failed(f"its worker was lost in this ask ({type(error).__name__})")
                        return
                    why = "ran out of memory" if isinstance(error, OutOfMemory) else "died"
                    self._revive(number)
                futures[number] = self.workers.begin(number, "answer", *data)
            else:
                yield all_failed(f"its worker {why} {TRIES} times in this ask")
                return
        finally:
            del futures[number]
        frames = unpacked(answer)
        tally.last = time.monotonic() - begun
        tally.waited += tally.last
        about = json.loads(next(frames))
        tally.seconds, tally.cpu = tally.seconds + about["seconds"], tally.cpu + about["cpu"]
        tally.bytes_up += len(answer)
        for frame in frames:
            reply = Reply.decode(frame)
            tally.answered += len(reply.rows)
            tally.failed += len(reply.failed)
            yield reply

    def _revive(self, number: int) -> None:
        self.tallies[number].restarts += 1
        self.workers.revive(number)
        self._gone.discard(number)

    def use(self, schema: Schema) -> None:
        self.workers.tell("use", [(schema.to_json().encode(),)] * len(self.workers))
        self.roster = replace(self.roster, schema=schema)

    def forget(self, run: str, prefix: str = "") -> None:
        self.workers.later("forget", json.dumps([run, prefix]).encode())

    def commit(self, run: str, serial: int) -> list[dict[str, Any]]:
        """The workers save what their clients keep, before the server saves its own state; their plans."""
        found = self.workers.all("commit", json.dumps([run, serial]).encode())
        for number, plans in enumerate(found):
            self.workers.remember(number, "plans", plans)
        return [json.loads(plans) for plans in found]

    def rollback(self, run: str, serial: int, plans: Sequence[Mapping[str, Any]]) -> None:
        """Clients keep again what they kept when the server saved its state after this serial."""
        self.workers.all("rollback", json.dumps([run, serial]).encode())
        self.workers.tell("plans", [(json.dumps(one).encode(),) for one in plans])

    def report(self) -> list[dict[str, Any]]:
        """A line for each worker, as plain values."""
        return [{**asdict(tally), "rate": tally.rate} for tally in self.tallies]


def settled(
    workers: Workers,
    settings: str,
    mine: Sequence[Any],
    folder: str,
    program: Program,
    *,
    lost: Lost = "again",
    seeded: bool = True,
    **how: Any,
) -> RayRuntime:
    """The runtime of workers that have loaded their data: each takes the clients at these positions.

    seeded: all draws come from the seed, so that an ask that was cut off may run again and give the same bytes. Where
    noise is the operating system's it never does: its clients have failed, and are charged.
    """
    again = seeded and lost == "again"
    data = [
        (wire.encode({"settings": settings, "folder": f"{folder}/worker-{number}", "mine": own, "again": again}),)
        for number, own in enumerate(mine)
    ]
    rosters = [Roster.decode(found) for found in workers.tell("settle", data)]
    return RayRuntime(workers, rosters, program, lost=lost, **how)


__all__ = ["Failed", "RayRuntime", "Tally", "WorkerError", "Workers", "settled"]
