"""Where the clients of an analysis are: in this process, or on the workers of a cluster.

On workers each reads and checks the data and keeps the rows of its own clients. This process gets the same ``Points``,
``Histograms`` or ``Problem`` without rows. A worker is told what to compute by plain values: the class of an algorithm
and its fields, of which it makes the tasks with its own installed code.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from unalike.analytics.estimation.problem import Problem, check_rows, problem_in_pieces, read_counts, read_problem
from unalike.analytics.estimation.regression import read_risk
from unalike.analytics.estimation.shared import read_estimate
from unalike.analytics.kmeans.algorithm import squared_distances
from unalike.analytics.kmeans.points import ChosenRows, Points, points_in_pieces, read_points
from unalike.analytics.mdm.algorithm import MDM
from unalike.analytics.mdm.study import Histograms, histograms, histograms_in
from unalike.core.client import Clients
from unalike.core.federation import Federation
from unalike.core.method import tasks_of
from unalike.core.release import Release
from unalike.core.request import Part, Program
from unalike.core.secure import EXCHANGES
from unalike.core.task import Task
from unalike.core.terms import Noise, Terms
from unalike.runtime.shard.shard import Shard
from unalike.runtime.shard.simulator import Simulator
from unalike.studio.cluster import plain, session
from unalike.studio.cluster.absent import chosen, without_rows
from unalike.studio.errors import UserError
from unalike.studio.runs.progress import describe_workers
from unalike.studio.simulate import simulate

if TYPE_CHECKING:
    from unalike.runtime.ray import RayRuntime

ANALYSIS = f"{__name__}:Analysis"  # as a driver names it
Given = Points | Histograms | Problem
Read = tuple[Given, ChosenRows | None]  # and where its rows are, unless it has them

_COUNTED = ("asks", "answered", "failed", "seconds", "waited", "rate", "bytes_down", "bytes_up")  # of a worker's work
_MEASURED = (squared_distances, read_estimate, read_risk)  # a simulation's own view
_SEEN = {task.function for task in (*_MEASURED, MDM.validation)}


# Reading, where the rows are: all of them, or with the rows of those clients alone for whom they are wanted


def _points(how: dict[str, Any], pieces: bool) -> Read:
    standardize, server = how.pop("standardize"), how.pop("server")
    how["server"] = None if server is None else Path(server)
    points, rows = points_in_pieces(**how) if pieces else (read_points(**how), None)
    return points.standardized() if standardize else points, rows


def _histograms(how: dict[str, Any], pieces: bool) -> Read:
    counts = how.pop("counts")
    return histograms(**how, pieces=pieces) if counts is None else histograms_in(counts), None


def _problem(how: dict[str, Any], pieces: bool) -> Read:
    counts = how.pop("counts")
    if counts is None:
        return problem_in_pieces(**how) if pieces else (read_problem(**how), None)
    problem = Problem(read_counts(Path(counts)))
    check_rows(problem.clients, how["check"])
    return problem, None


_READERS: dict[str, Callable[[dict[str, Any], bool], Read]] = {
    "points": _points,
    "histograms": _histograms,
    "problem": _problem,
}


class Place(Protocol):
    """Where the clients of an analysis are."""

    away: bool  # their rows are not in this process

    def read(self, what: str, **how: Any) -> Any:
        """The points, histograms or problem that plain settings name."""

    def federate(self, data: Clients | Mapping[Part, Clients], seed: int = 0, **fields: Any) -> Federation:
        """A federation of these clients; the arguments are those of ``unalike.simulate``."""

    def watch(self, tell: Callable[[str], None]) -> None:
        """Have workers told in a line, while they work: their rates, and who is late."""

    def told(self) -> dict[str, Any]:
        """What each worker has done, under "workers"; nothing where there is none."""

    def close(self) -> None: ...


class Here:
    """All clients are in this process."""

    away = False

    def __init__(self, noise: Noise) -> None:
        self.federate = partial(simulate, noise=noise)

    def read(self, what: str, **how: Any) -> Any:
        return _READERS[what](how, False)[0]

    def watch(self, tell: Callable[[str], None]) -> None: ...

    def told(self) -> dict[str, Any]:
        return {}

    def close(self) -> None: ...


class Away:
    """The clients are on workers. Several federations share them, one set of rows for all."""

    away = True

    def __init__(
        self, noise: Noise, workers: int | None = None, address: str | None = None, deadline: float | None = None
    ) -> None:
        self._noise, self._deadline = noise, deadline
        self._folder = Path(tempfile.mkdtemp(prefix="unalike-workers-"))
        self._runtime: tuple[tuple[int | None, Noise], RayRuntime] | None = None  # with its block and noise
        self._sizes = torch.zeros(0)
        self._runs = 0
        self._tell: Callable[[str], None] = lambda text: None
        self._workers = session.start(workers, address)

    def watch(self, tell: Callable[[str], None]) -> None:
        self._tell = tell

    def told(self) -> dict[str, Any]:
        """With the system's noise not what they answered: it tells how large secret cohorts were."""
        hidden = _COUNTED if self._noise == "system" else ()
        return {"workers": [{k: v for k, v in one.items() if k not in hidden} for one in self._report()]}

    def _report(self) -> Sequence[Mapping[str, Any]]:
        return [] if self._runtime is None else self._runtime[1].report()

    def _late(self, late: Sequence[int], seconds: float) -> None:
        self._tell(describe_workers(self._report(), late, seconds))

    def close(self) -> None:
        self._workers.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    def read(self, what: str, **how: Any) -> Any:
        settings = json.dumps({"what": what, "how": how})
        about = session.told(self._workers, ANALYSIS, settings)
        if any(other != about[0] for other in about):
            raise UserError("the workers read different data under the same name: give all the same file or folder")
        given = plain.decoded(about[0])
        self._sizes = given.clients.size
        return given

    def federate(
        self,
        data: Clients | Mapping[Part, Clients],
        seed: int = 0,
        *,
        block: int | None = None,
        threads: int | None = None,
        noise: Noise | None = None,
        **fields: Any,
    ) -> Federation:
        noise = noise or self._noise
        clients = data if isinstance(data, Clients) else data["train"]
        if len(clients.x):  # what clients have sent to the server, say: then they are here
            return simulate(data, seed, block=block, threads=threads, noise=noise, **fields)
        if self._runtime is None or self._runtime[0] != (block, noise):
            self._runtime = (block, noise), self._settled(block, noise)
        runtime = self._runtime[1]
        self._runs += 1
        roster = runtime.roster.select(torch.searchsorted(runtime.roster.ids, clients.ids))
        return Federation(runtime, seed, roster, run=f"run-{self._runs}", noise=noise, **fields)

    def _settled(self, block: int | None, noise: Noise) -> RayRuntime:
        from unalike.runtime.ray import settled

        mine = session.deal(1 + self._sizes, torch.arange(len(self._sizes)), len(self._workers))
        tell, before = self._workers.tell, self._runtime
        program = Taught(lambda data: tell("learn", [(data,)] * len(self._workers)), Terms(noise))
        made = settled(
            self._workers,
            json.dumps({"noise": noise, "block": block}),
            mine,
            str(self._folder / str(self._runs)),
            program,
            deadline=self._deadline,
            seeded=noise == "seeded",
        )
        if before is not None:
            made.tallies = before[1].tallies  # the same clients, asked otherwise
        made.waiting = self._late
        return made


def place(
    noise: Noise,
    runtime: str | None = None,
    workers: int | None = None,
    address: str | None = None,
    deadline: float | None = None,
) -> Place:
    """Where flags say that clients are."""
    if runtime not in (None, "simulate", "ray"):
        raise UserError(f"--runtime {runtime}: expected simulate or ray")
    if runtime == "ray":
        return Away(noise, workers, address, deadline)
    if (workers, address, deadline) != (None, None, None):
        raise UserError("--workers, --address and --deadline are about workers: add --runtime ray")
    return Here(noise)


class Taught(Program):
    """The program of workers, as this process knows it: before an ask of an algorithm that they do not know they are
    told its class and settings."""

    def __init__(self, tell: Callable[[bytes], object], terms: Terms) -> None:
        super().__init__(_MEASURED, terms=terms, exchanges=EXCHANGES)
        self._tell, self._last = tell, object()
        self._owners: dict[str, object] = {}  # by class: one of its settings is known at a time

    def teach(self, task: Task, releases: Sequence[Release], terms: Terms = Terms()) -> None:
        if task.owner is not None and task.owner is not self._last:
            self._learn(task.owner)
        super().teach(task, releases, terms)

    def _learn(self, owner: object) -> None:
        before = plain.encoded(list(self._owners.values()))
        self._owners[type(owner).__name__] = self._last = owner
        data = plain.encoded(list(self._owners.values()))
        if data != before:
            self._tasks |= {one.name: one for one in tasks_of(owner)}
            self.shapes.clear()  # of tasks of the same names with other settings
            self._tell(data)


class Analysis:
    """The clients of an analysis at a worker, with the rows of its own clients alone."""

    def __init__(self, settings: str) -> None:
        self._settings = settings
        self._read: Read | None = self._reading()
        self._given = _emptied(self._read[0])
        self._about = plain.encoded(self._given)
        self._parts: Mapping[Part, Clients] = {}
        self._mine: Tensor | None = None
        self._terms = Terms()

    def _reading(self) -> Read:
        asked = json.loads(self._settings)
        return _READERS[asked["what"]](asked["how"], True)

    def about(self) -> bytes:
        return self._about

    def shard(self, settings: str, mine: Tensor) -> Shard:
        asked = json.loads(settings)
        if self._mine is None or not torch.equal(self._mine, mine):
            self._parts = {}  # of other clients
            given, rows = self._read or self._reading()
            own = chosen(_parts(given), mine) if rows is None else rows.chosen(mine)
            self._parts = {name: _with_rows(part.select(mine), own[name]) for name, part in _parts(self._given).items()}
            self._mine, self._read = mine, None  # all else may go
        self._terms = Terms(asked["noise"])
        return Shard(self._parts, self._parts["train"].roster(), self._program(), Simulator(asked["block"], 1))

    def learn(self, what: bytes) -> Program:
        """The program of some algorithms, given by their classes and settings."""
        return self._program(task for owner in plain.decoded(what) for task in tasks_of(owner))

    def _program(self, tasks: Iterable[Task] = ()) -> Program:
        """Where there is an ε, nothing leaves a shard without noise but what a simulation measures."""
        tasks = [*tasks, *_MEASURED]
        return Program(
            tasks,
            terms=self._terms,
            exchanges=EXCHANGES,
            private=self._terms.system,
            measured=[task for task in tasks if task.function in _SEEN],
        )

    def view(self, what: str) -> bytes:
        raise ValueError(f"nothing here is called {what!r}")


def _parts(given: Given) -> Mapping[Part, Clients]:
    if isinstance(given, Problem):
        return given.parts
    return {"train": given.clients}


def _with_rows(clients: Clients, own: Clients) -> Clients:
    return replace(clients, x=own.x, y=own.y, start=own.start, known=own.known)


def _emptied(given: Given) -> Given:
    """The same without rows, as a server may know it."""
    clients = without_rows(given.clients)
    if isinstance(given, Problem) and given.held_out is not None:
        return replace(given, clients=clients, held_out=without_rows(given.held_out))
    return replace(given, clients=clients)
