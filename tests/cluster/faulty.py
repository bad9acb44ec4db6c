"""Clients whose worker does what a test wants it to, once: a file in the folder of the test says what and where."""

from __future__ import annotations

import json
import os
import resource
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from unalike.core.client import Client, Clients
from unalike.core.release import Release, Sum
from unalike.core.request import Program, Reply, Request
from unalike.core.task import Sent, send, task
from unalike.privacy import Gaussian
from unalike.runtime.shard.kept import KeptStore
from unalike.runtime.shard.shard import Shard
from unalike.runtime.shard.simulator import Simulator

if TYPE_CHECKING:
    from unalike.runtime.workers import WorkerRuntime, Workers

HERE = f"{__name__}:Site"
CLIENTS = 6
MEMORY, DISK = resource.RLIMIT_AS, resource.RLIMIT_FSIZE


@dataclass(frozen=True)
class Counting:
    """Every client counts how often it was asked, and shows the sum of it under noise that costs something."""

    @task
    def count(self, client: Client, step: Tensor) -> Sent:
        now = client.kept.get("count", torch.zeros(())) + step
        return send(count=now, keep={"count": now})

    @count.into
    def sums(self) -> list[Release]:
        return [Sum("count", clip=100.0, noise=Gaussian(1e-9))]


class Faulty(Shard):
    """A shard that notes each training in a file, and fails as a file says, once (or as often as that says)."""

    folder: Path

    def answer(self, request: Request, kept: KeptStore | None = None) -> Iterator[Reply]:
        resource.setrlimit(DISK, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        number = int(request.ids[0]) % 2
        fault = self._fault(number)
        if fault == "hangs":
            time.sleep(600)
        if fault == "memory":
            used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
            resource.setrlimit(MEMORY, (used + (64 << 20), resource.RLIM_INFINITY))
            try:
                torch.ones(1 << 28)
            finally:
                resource.setrlimit(MEMORY, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        yield from super().answer(request, kept)
        with (self.folder / "trained").open("a") as notes:
            notes.write(f"{request.serial} {number}\n")
        if fault == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if fault == "disk":  # no file may grow: the kernel refuses to write the reply
            resource.setrlimit(DISK, (0, resource.RLIM_INFINITY))

    def _fault(self, number: int) -> str:
        file = self.folder / f"fault-{number}"
        if not file.exists():
            return ""
        what, times = file.read_text().split()
        file.unlink() if int(times) == 1 else file.write_text(f"{what} {int(times) - 1}")
        return what


class Site:
    def __init__(self, settings: str) -> None:
        self.folder = Path(json.loads(settings)["folder"])

    def about(self) -> bytes:
        return everybody().roster().encode()

    def shard(self, settings: str, mine: Tensor) -> Shard:
        people = everybody().select(mine)
        made = Faulty({"train": people}, people.roster(), Program([Counting().count]), Simulator(block=4))
        made.folder = self.folder
        return made

    def view(self, what: str) -> bytes:
        return b""


def everybody() -> Clients:
    return Clients.from_sizes(torch.zeros(CLIENTS, 1), None, torch.ones(CLIENTS, dtype=torch.int64))


def runtime(workers: Workers, folder: Path, *, seeded: bool = True, **how: object) -> WorkerRuntime:
    from unalike.runtime.workers import start_runtime

    settings = json.dumps({"folder": str(folder)}).encode()
    workers.tell("load", [(HERE.encode(), settings)] * 2)
    mine = [torch.arange(number, CLIENTS, 2) for number in range(2)]
    program = Program([Counting().count])
    return start_runtime(workers, "", mine, str(folder / "kept"), program, seeded=seeded, **how)  # type: ignore[arg-type]


def trained(folder: Path) -> list[str]:
    """Which serial was trained at which worker, as often as it was."""
    return sorted((folder / "trained").read_text().split("\n")[:-1])
