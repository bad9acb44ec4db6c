"""The driver's side of runs on a cluster: workers are started, load the data, get their clients and are asked.

This process never has a row. It knows what a server may know, which the workers tell it (``Absent``).
"""

from __future__ import annotations

import json
import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from unalike.core.federation import Federation
from unalike.core.method import Method, TrainsLocally
from unalike.data import DataError
from unalike.learn.local import LocalSGD
from unalike.studio.cluster.absent import Absent, decoded
from unalike.studio.cluster.site import TRAINING, agreed_program
from unalike.studio.errors import UserError
from unalike.studio.recipe.recipe import Recipe, Runtime
from unalike.studio.runs.prepare import FROM_PYTHON, Prepared
from unalike.studio.runs.privacy import noise_of
from unalike.studio.simulate import federated

if TYPE_CHECKING:
    from unalike.runtime.ray import Workers

INSTALL = "workers need Ray, which is not installed: pip install 'unalike[cluster]'"


class Session:
    """The workers of one command; several runs over the same data share what they have loaded."""

    def __init__(self, how: Runtime) -> None:
        self._how = how
        self._workers = start(how.workers, how.address)
        self._loaded: tuple[str, Absent] | None = None
        self._temporary: list[Path] = []

    def close(self) -> None:
        self._workers.close()
        for folder in self._temporary:
            shutil.rmtree(folder, ignore_errors=True)

    @property
    def workers(self) -> Workers:
        return self._workers

    def load(self, recipe: Recipe, key: bytes) -> Absent:
        """Have every worker load the recipe's data, and refuse workers that read different data."""
        if recipe.data.name.startswith(FROM_PYTHON):
            raise UserError(
                "workers load their clients' rows themselves, so data that is an object of this process cannot be "
                "used with --runtime ray; write it to a file that all workers can read, and give its path"
            )
        what = recipe.model_dump(mode="json", include={"data", "seed"}) | {"epsilons": recipe.privacy.epsilons}
        settings = json.dumps({"recipe": recipe.model_dump(mode="json", exclude_none=True), "key": key.hex()})
        name = json.dumps([what, key.hex()])
        if self._loaded is None or self._loaded[0] != name:
            self._loaded = None
            about = told(self._workers, TRAINING, settings)
            self._loaded = (name, agreed([decoded(one, key) for one in about]))
        return self._loaded[1]

    def federation(self, prepared: Prepared, out: Path | None, **fields: Any) -> Federation:
        """The training clients of a run, dealt out to the workers, ready to be asked."""
        from unalike.runtime.ray import settled

        recipe, population = prepared.recipe, prepared.population
        how, folder = recipe.runtime, self._folder(recipe, out)
        runtime = settled(
            self._workers,
            json.dumps(recipe.model_dump(mode="json", exclude_none=True)),
            deal(work(prepared.method, population.train.size), population.seen, len(self._workers)),
            str(folder),
            agreed_program(prepared),
            drop=how.drop,
            deadline=how.deadline,
            lost=how.lost,
            seeded=noise_of(recipe) == "seeded",
        )
        return federated(runtime, population, recipe.seed, quorum=how.quorum, **fields)

    def _folder(self, recipe: Recipe, out: Path | None) -> Path:
        if recipe.runtime.folder is not None:
            return Path(recipe.runtime.folder).expanduser().resolve()
        if out is not None:
            return workers_folder(out).resolve()
        self._temporary.append(Path(tempfile.mkdtemp(prefix="unalike-workers-")))
        return self._temporary[-1]


def workers_folder(out: Path) -> Path:
    """Where in a run's folder the workers save what their clients keep."""
    from unalike.studio.runs.folder import CLIENTS

    return out / CLIENTS / "workers"


def start(count: int | None, address: str | None) -> Workers:
    """Workers of the cluster at an address, or on this machine."""
    try:
        from unalike.runtime.ray import WorkerError, Workers
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] != "ray":
            raise
        raise UserError(INSTALL) from error
    try:
        return Workers(count, address)
    except WorkerError as error:
        raise UserError(str(error)) from error


def told(workers: Workers, site: str, settings: str) -> list[bytes]:
    """What all workers say about the data that these settings name; what is wrong with it is the user's to know."""
    from unalike.runtime.ray import Failed

    try:
        return workers.tell("load", [(site.encode(), settings.encode())] * len(workers))
    except Failed as error:
        raise DataError(str(error)) from error


def agreed(found: list[Absent]) -> Absent:
    """What all workers say alike about their data."""
    for number, other in enumerate(found):
        if dict(other.fingerprint) != dict(found[0].fingerprint):
            raise UserError(
                f"worker {number} reads other data than worker 0 under the same name, {found[0].name}: give all "
                "workers the same file or data folder (UNALIKE_DATA)"
            )
    return found[0]


def work(method: Method, rows: Tensor) -> Tensor:
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
