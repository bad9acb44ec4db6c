"""What workers load for a test: the tiny federations that the pipe of tests/runtime knows, by the same modules."""

from __future__ import annotations

import importlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from unalike.runtime.shard.shard import Shard
from unalike.runtime.shard.simulator import Simulator

if TYPE_CHECKING:
    from unalike.runtime.workers import WorkerRuntime, Workers

HERE = f"{__name__}:Tiny"


class Tiny:
    """``problems`` is a module: its ``stored(data, name)`` reads rows, its ``program(name, schema)`` says what clients
    agree to."""

    def __init__(self, settings: str) -> None:
        told = json.loads(settings)
        self.problems, self.data, self.name = (
            importlib.import_module(told["problems"]),
            Path(told["data"]),
            told["name"],
        )

    def about(self) -> bytes:
        return bytes(self.problems.stored(self.data, self.name)[1].encode())

    def shard(self, settings: str, mine: Tensor) -> Shard:
        parts, roster = self.problems.stored(self.data, self.name)
        own = {name: part.select(mine) for name, part in parts.items()}
        return Shard(own, roster.select(mine), self.problems.program(self.name, roster.schema), Simulator(block=4))

    def view(self, what: str) -> bytes:
        return b""


def runtime(workers: Workers, problems: str, name: str, data: Path, folder: Path, **how: Any) -> WorkerRuntime:
    """The clients of a tiny federation, dealt out in turn as the pipe does."""
    from unalike.core.roster import Roster
    from unalike.runtime.workers import start_runtime

    settings = json.dumps({"problems": problems, "data": str(data), "name": name}).encode()
    about = workers.tell("load", [(HERE.encode(), settings)] * len(workers))
    roster = Roster.decode(about[0])
    mine = [torch.arange(number, len(roster), len(workers)) for number in range(len(workers))]
    program = importlib.import_module(problems).program(name, roster.schema)
    return start_runtime(workers, "", mine, str(folder), program, **how)


Found = Mapping[str, Tensor]
