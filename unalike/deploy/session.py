"""The driver's side of work on a cluster: workers are started, load the data, get their clients and are asked.

This process never has a row. It knows what a server may know, which the workers tell it.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from unalike.core import outside
from unalike.core.client import Clients
from unalike.core.federation import Federation
from unalike.core.method import Method, TrainsLocally
from unalike.core.release import Noise, Terms
from unalike.core.request import Part
from unalike.data import DataError
from unalike.deploy import plain
from unalike.deploy.program import TaughtProgram, program_of_run
from unalike.deploy.site import SITE, Given, read
from unalike.deploy.sites import Sites
from unalike.learn.local import LocalSGD
from unalike.runs.absent import Absent
from unalike.runs.errors import UserError
from unalike.runs.load import FROM_PYTHON
from unalike.runs.prepare import Prepared
from unalike.runs.privacy import noise_of
from unalike.runs.recipe.recipe import Recipe, Runtime, code_paths
from unalike.runs.simulate import federate, simulate
from unalike.runs.watcher import describe_workers
from unalike.runtime.workers import Failed, WorkerError, WorkerRuntime, Workers, start_runtime

INSTALL = "workers need Ray, which is not installed: pip install 'unalike[cluster]'"


class Session:
    """The workers of one command. Runs or analyses over the same data share what they have loaded."""

    def __init__(self, how: Runtime) -> None:
        self._how = how
        self._loaded: tuple[str, Absent] | None = None
        self._temporary: list[Path] = []
        self.workers = start(how.workers, how.address)

    def close(self) -> None:
        self.workers.close()
        for folder in self._temporary:
            shutil.rmtree(folder, ignore_errors=True)

    def load(self, recipe: Recipe, key: bytes) -> Absent:
        """Have every worker load the recipe's data, and refuse workers that read different data."""
        if recipe.data.name.startswith(FROM_PYTHON):
            raise UserError(
                "workers load their clients' rows themselves, so data that is an object of this process cannot be "
                "used with --runtime ray; write it to a file that all workers can read, and give its path"
            )
        what = recipe.model_dump(mode="json", include={"data", "seed"}) | {"epsilons": recipe.privacy.epsilons}
        name = json.dumps([what, key.hex()])
        if self._loaded is None or self._loaded[0] != name:
            self._loaded = None
            told = recipe_for_workers(recipe)
            settings = {"recipe": told, "key": key.hex(), "code": outside.code_of(code_paths(told))}
            self._loaded = (name, replace(plain.decode(self.load_all(settings)), key=key))
        return self._loaded[1]

    def load_all(self, settings: Mapping[str, Any]) -> bytes:
        """What all workers say alike about the data that these settings name; what is wrong is the user's to know."""
        told = [(SITE.encode(), json.dumps(settings).encode())] * len(self.workers)
        try:
            found = self.workers.tell("load", told)
        except Failed as error:
            raise DataError(str(error)) from error
        for number, other in enumerate(found):
            if other != found[0]:
                raise UserError(
                    f"worker {number} reads other data than worker 0 under the same name: give all workers the same "
                    "file or data folder (UNALIKE_DATA)"
                )
        return found[0]

    def federation(self, prepared: Prepared, out: Path | None, **fields: Any) -> Federation:
        """The training clients of a run, dealt out to the workers, ready to be asked."""
        recipe, population = prepared.recipe, prepared.population
        how = recipe.runtime
        runtime = start_runtime(
            self.workers,
            json.dumps(recipe_for_workers(recipe)),
            deal(work_of(prepared.method, population.train.size), population.seen, len(self.workers)),
            str(self._folder(recipe, out)),
            program_of_run(prepared),
            drop=how.drop,
            deadline=how.deadline,
            lost=how.lost,
            seeded=noise_of(recipe) == "seeded",
        )
        return federate(runtime, population, recipe.seed, quorum=how.quorum, **fields)

    def _folder(self, recipe: Recipe, out: Path | None) -> Path:
        if recipe.runtime.folder is not None:
            return Path(recipe.runtime.folder).expanduser().resolve()
        return self.temporary_folder() if out is None else workers_folder(out).resolve()

    def temporary_folder(self) -> Path:
        """Where workers may save something until the session is closed."""
        self._temporary.append(Path(tempfile.mkdtemp(prefix="unalike-workers-")))
        return self._temporary[-1]

    def read(self, what: str, how: dict[str, Any], noise: Noise) -> Given:
        """What an analysis is about, without rows."""
        given: Given = plain.decode(self.load_all({"what": what, "how": how}))
        return given

    def settle_analysis(self, sizes: Tensor, noise: Noise, block: int | None) -> WorkerRuntime:
        """The clients of an analysis, with these numbers of rows, dealt out to the workers."""
        return start_runtime(
            self.workers,
            json.dumps({"noise": noise, "block": block}),
            deal(1 + sizes, torch.arange(len(sizes)), len(self.workers)),
            str(self.temporary_folder()),
            TaughtProgram(self._teach, Terms(noise)),
            deadline=self._how.deadline,
            seeded=noise == "seeded",
        )

    def _teach(self, algorithms: bytes) -> Sequence[bytes]:
        return self.workers.tell("learn", [(algorithms,)] * len(self.workers))


def workers_folder(out: Path) -> Path:
    """Where in a run's folder the workers save what their clients keep."""
    from unalike.runs.folder import CLIENTS

    return out / CLIENTS / "workers"


def recipe_for_workers(recipe: Recipe) -> dict[str, Any]:
    """A recipe as plain values, its code that of the files which the user trusts in place of those that it names."""
    values = recipe.model_dump(mode="json", exclude_none=True)
    values["method"] = outside.trusted_path(recipe.method)
    if "model" in values and "name" in values["model"]:
        values["model"]["name"] = outside.trusted_path(values["model"]["name"])
    return values


def start(count: int | None, address: str | None) -> Workers:
    """Workers of the cluster at an address, or on this machine."""
    try:
        from unalike.runtime.ray import start_workers
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] != "ray":
            raise
        raise UserError(INSTALL) from error
    try:
        return start_workers(count, address, [SITE])
    except WorkerError as error:
        raise UserError(str(error)) from error


def work_of(method: Method, rows: Tensor) -> Tensor:
    """[clients] how much a client has to compute in a round: the rows that its local training goes through."""
    local = method.local if isinstance(method, TrainsLocally) else None
    if isinstance(local, LocalSGD) and local.steps is not None:
        return 1 + rows.clamp(max=local.batch) if local.batch else 1 + rows
    return 1 + rows


def deal(cost: Tensor, seen: Tensor, workers: int) -> list[Tensor]:
    """Positions for each worker, ascending: the dearest clients first, to and fro, so that all have as much to do.

    Training clients are dealt out before the others, who are only served and measured.
    """
    if workers > len(cost):
        raise UserError(f"{workers} workers (--workers) for {len(cost)} clients: give at most as many as clients")
    away = torch.ones(len(cost), dtype=torch.bool)
    away[seen] = False
    order = torch.argsort(cost, descending=True, stable=True)
    order = torch.cat([order[~away[order]], order[away[order]]])
    turn, place = torch.arange(len(order)) // workers, torch.arange(len(order)) % workers
    worker = torch.where(turn % 2 == 0, place, workers - 1 - place)
    return [order[worker == number].sort().values for number in range(workers)]


# Where the clients of an analysis are: in this process, or on workers. These get the class of an algorithm and its
# fields, of which they make the tasks with their own installed code; this process gets the data without rows.

_COUNTED = ("asks", "answered", "failed", "seconds", "waited", "rate", "bytes_down", "bytes_up")  # of a worker's work


class Here:
    """All clients are in this process."""

    away = False  # their rows are here

    def __init__(self, noise: Noise) -> None:
        self.federate = partial(simulate, noise=noise)

    def read(self, what: str, **how: Any) -> Any:
        """The points, histograms or samples that plain settings name."""
        return read(what, how)[0]

    def watch(self, tell: Callable[[str], None]) -> None:
        """Have a line told about the workers while they work: their rates, and who is late."""

    def summary(self) -> dict[str, Any]:
        """What each worker has done, under "workers"; nothing where there is none."""
        return {}

    def close(self) -> None: ...


class Away:
    """The clients are on workers, or at sites. Several federations share them, one set of rows for all."""

    away = True

    def __init__(self, noise: Noise, where: Session | Sites) -> None:
        self._noise, self._session = noise, where
        self._runtime: tuple[tuple[int | None, Noise], WorkerRuntime] | None = None  # with its block and noise
        self._sizes = torch.zeros(0)
        self._runs = 0
        self._tell: Callable[[str], None] = lambda text: None

    def read(self, what: str, **how: Any) -> Any:
        given = self._session.read(what, how, self._noise)
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
            made = self._session.settle_analysis(self._sizes, noise, block)
            if self._runtime is not None:
                made.tallies = self._runtime[1].tallies  # the same workers go on
            made.waiting = self._tell_late
            self._runtime = (block, noise), made
        runtime = self._runtime[1]
        self._runs += 1
        roster = runtime.roster.select(torch.searchsorted(runtime.roster.ids, clients.ids))
        return Federation(runtime, seed, roster, run=f"run-{self._runs}", noise=noise, **fields)

    def watch(self, tell: Callable[[str], None]) -> None:
        self._tell = tell

    def _tell_late(self, late: Sequence[int], seconds: float) -> None:
        self._tell(describe_workers(self._report(), late, seconds))

    def summary(self) -> dict[str, Any]:
        """With the system's noise not what they answered: it tells how large secret cohorts were."""
        hidden = _COUNTED if self._noise == "system" else ()
        return {"workers": [{k: v for k, v in one.items() if k not in hidden} for one in self._report()]}

    def _report(self) -> Sequence[Mapping[str, Any]]:
        return [] if self._runtime is None else self._runtime[1].report()

    def close(self) -> None:
        self._session.close()


Place = Here | Away


def place(
    noise: Noise,
    runtime: str | None = None,
    workers: int | None = None,
    address: str | None = None,
    deadline: float | None = None,
    network: str | None = None,
) -> Place:
    """Where flags say that clients are."""
    if runtime not in (None, "simulate", "ray", "network"):
        raise UserError(f"--runtime {runtime}: expected simulate, ray or network")
    if (runtime == "network") != (network is not None) or (runtime == "network" and address is not None):
        raise UserError("a network is named by its hub's folder: --runtime network --network DIR, without --address")
    if workers is not None and workers < 1:
        raise UserError(f"--workers {workers}: expected at least 1")
    if deadline is not None and not deadline > 0:
        raise UserError(f"--deadline {deadline:g}: expected seconds above 0")
    if runtime == "network":
        return Away(noise, Sites(Runtime(name="network", network=network, workers=workers, deadline=deadline)))
    if runtime == "ray":
        return Away(noise, Session(Runtime(name="ray", workers=workers, address=address, deadline=deadline)))
    if (workers, address, deadline) != (None, None, None):
        raise UserError("--workers, --address and --deadline are about workers: add --runtime ray, or network")
    return Here(noise)
