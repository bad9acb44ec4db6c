"""What all measured programs share: the workload, the network in plain PyTorch, and the pace of the measurement.

A program is started in the virtual environment of what it measures, so it imports nothing but PyTorch and NumPy here.
It reads a workload (JSON beside arrays), warms up, says that it is ready, and then runs rounds whenever it is told to.
So several programs can stay alive and take turns.
"""

from __future__ import annotations

import functools
import json
import os
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class Workload:
    """FedAvg: every client of a cohort trains for one epoch; the server takes the mean of the updates. Or PeFLL."""

    name: str
    network: str  # "mlp" or "lenet"
    shape: tuple[int, ...]  # of one sample
    classes: int
    cohort: int
    batch: int
    lr: float
    pefll_steps: int  # of a client in a round of PeFLL; 0: FedAvg
    block: int | None  # clients in a block of Unalike; None: it measures what is fastest
    ends: list[int]  # [clients]: a client's rows end before this one and begin at its predecessor's end
    x: Tensor
    y: Tensor

    @property
    def clients(self) -> int:
        return len(self.ends)

    def client(self, position: int) -> tuple[Tensor, Tensor]:
        begin, end = self.ends[position - 1] if position else 0, self.ends[position]
        return self.x[begin:end], self.y[begin:end]


@functools.cache
def read(folder: str) -> Workload:
    """The workload kept in a folder; read once in a process."""
    settings: dict[str, Any] = json.loads((Path(folder) / "workload.json").read_text())
    arrays = {name: np.load(Path(folder) / f"{name}.npy") for name in ("x", "y", "sizes")}
    x, y = torch.from_numpy(arrays["x"]), torch.from_numpy(arrays["y"])
    settings["shape"] = tuple(settings["shape"])
    return Workload(**settings, ends=np.cumsum(arrays["sizes"]).tolist(), x=x, y=y)


class MLP(nn.Module):
    def __init__(self, shape: tuple[int, ...], classes: int) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(shape[0], 64), nn.Linear(64, classes)

    def forward(self, x: Tensor) -> Tensor:
        scores: Tensor = self.fc2(self.fc1(x).relu())
        return scores


class LeNet(nn.Module):
    def __init__(self, shape: tuple[int, ...], classes: int) -> None:
        super().__init__()
        side = ((shape[1] - 4) // 2 - 4) // 2
        self.conv1, self.conv2 = nn.Conv2d(shape[0], 16, 5), nn.Conv2d(16, 32, 5)
        self.fc1, self.fc2, self.fc3 = nn.Linear(32 * side * side, 120), nn.Linear(120, 84), nn.Linear(84, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = F.max_pool2d(self.conv1(x), 2).relu()
        x = F.max_pool2d(self.conv2(x), 2).relu()
        scores: Tensor = self.fc3(self.fc2(self.fc1(x.flatten(1)).relu()).relu())
        return scores


def network(workload: Workload) -> nn.Module:
    torch.manual_seed(0)
    return {"mlp": MLP, "lenet": LeNet}[workload.network](workload.shape, workload.classes)


class Pace:
    """Called after every round. Tries thread counts first, keeps the best, then runs as many rounds as it is told.

    On standard output: a line ``{"threads": ...}`` when ready, then for each order a line ``{"seconds": [...], "cpu":
    [...]}``, by the clock and of this process. On standard input: a number of rounds a line; the end of input ends the
    program.
    """

    def __init__(self, threads: list[int] | None = None) -> None:
        self._output = os.fdopen(os.dup(1), "w")
        os.dup2(2, 1)  # whatever a framework prints goes to the error stream
        given = os.environ.get("OMP_NUM_THREADS")
        counts = threads or ([int(given)] if given else sorted({1, os.cpu_count() or 1}))
        self._trials = [(counts[0], False), *((count, True) for count in counts)]  # the first round only warms up
        self._taken: dict[int, float] = {}
        self._seconds: list[float] = []
        self._cpu: list[float] = []
        self._wanted = 0
        self._ready = False
        self._set_threads()
        self._begin, self._cpu_begin = time.perf_counter(), time.process_time()

    def _set_threads(self) -> None:
        if self._trials:
            torch.set_num_threads(self._trials[0][0])
        elif self._taken:
            torch.set_num_threads(min(self._taken, key=lambda count: self._taken[count]))

    def round_done(self) -> bool:
        """True: run another round. False: nothing more is wanted."""
        seconds, cpu = time.perf_counter() - self._begin, time.process_time() - self._cpu_begin
        if self._trials:
            count, timed = self._trials.pop(0)
            if timed:
                self._taken[count] = seconds
            self._set_threads()
        elif self._ready:
            self._seconds.append(seconds)
            self._cpu.append(cpu)
        if not self._trials and not self._ready:
            self._ready = True
            self._say({"threads": torch.get_num_threads()})
        elif self._ready and len(self._seconds) == self._wanted:
            self._say({"seconds": self._seconds, "cpu": self._cpu})
        if self._ready and len(self._seconds) == self._wanted:
            order = sys.stdin.readline().strip()
            if not order:
                return False
            self._seconds, self._cpu, self._wanted = [], [], int(order)
        self._begin, self._cpu_begin = time.perf_counter(), time.process_time()
        return True

    def _say(self, message: dict[str, Any]) -> None:
        self._output.write(json.dumps(message) + "\n")
        self._output.flush()
