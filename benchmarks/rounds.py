"""Rounds of FedAvg to be timed, and works that take turns."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
from torch import Tensor

from benchmarks.report import Ratio
from benchmarks.workloads import Shared
from unalike import Clients, Federation, LocalSGD, Model, State, train
from unalike.methods.fedavg import FedAvg
from unalike.networks.architectures import build
from unalike.runs.simulate import simulation

Work = Callable[[], object]


def alternate(repetitions: int, *works: Work, clock: Callable[[], float] = time.perf_counter) -> list[list[float]]:
    """Seconds of each work in each repetition; they take turns, after one turn to warm up that does not count.

    ``clock``: ``time.process_time`` for works on one thread, which stands still while another program is at work.
    """
    seconds: list[list[float]] = [[] for _ in works]
    for repetition in range(repetitions + 1):
        for work, taken in zip(works, seconds, strict=True):
            begin = clock()
            work()
            if repetition:
                taken.append(clock() - begin)
    return seconds


def quotients(above: list[float], below: list[float], scale: float = 1.0) -> Ratio:
    return Ratio.of([scale * a / b for a, b in zip(above, below, strict=True)])


def data(shared: Shared, sizes: Tensor) -> Clients:
    generator = torch.Generator().manual_seed(0)
    rows = int(sizes.sum())
    x = torch.randn(rows, *shared.shape, generator=generator)
    return Clients.from_sizes(x, torch.randint(shared.classes, (rows,), generator=generator), sizes)


class Rounds:
    """FedAvg that goes on where it was; every client of the data takes part in every round unless a cohort is given."""

    def __init__(self, shared: Shared, clients: Clients, cohort: int | None = None) -> None:
        self.model = Model(build(shared.network, shared.shape, shared.classes))
        local = LocalSGD(epochs=1, batch=shared.batch, lr=shared.lr)
        self.method = FedAvg(self.model, cohort=cohort or len(clients), local=local)
        runtime = simulation(clients)
        self.simulator = runtime.shards[0].simulator
        self.federation = Federation(runtime)
        self.state: State | None = None
        self(2)

    def __call__(self, rounds: int = 1) -> None:
        self.state = train(self.method, self.federation, rounds, self.state)
