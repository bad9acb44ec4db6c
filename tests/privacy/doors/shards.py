"""A shard of a private run as a hostile server reaches it: a closed program, and requests of the server's making."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from unalike import Clients
from unalike.core.release import Terms, Trust
from unalike.core.request import Program, ReleaseName, Reply, Request
from unalike.core.task import Task
from unalike.runtime.shard.shard import Shard
from unalike.runtime.shard.simulator import Simulator


def private_shard(store: Clients, tasks: Sequence[Task], trust: Trust = "nobody", **more: Any) -> Shard:
    """A shard elsewhere whose clients agreed to these tasks, in a run that states an ε."""
    program = Program(tasks, terms=Terms("system", trust), private=True, **more)
    return Shard({"train": store}, store.roster(), program, Simulator(block=4, threads=1))


def request(task: str, *wanted: ReleaseName, ids: Sequence[int] = (0,), **more: Any) -> Request:
    fields: dict[str, Any] = {
        "run": "run", "serial": 1, "task": task, "ids": torch.tensor(ids), "part": "train", "labels": True,
        "purpose": "train", "key": 5, "wanted": wanted, "shared": {}, "each": {},
    }  # fmt: skip
    return Request(**{**fields, **more})


def look_of(replies: list[Reply]) -> tuple[list[int], list[int]]:
    """All that a server sees of who answered and who failed."""
    return sorted(int(row) for one in replies for row in one.rows), sorted(row for one in replies for row in one.failed)
