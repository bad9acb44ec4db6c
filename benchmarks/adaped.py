"""AdaPeD's client-step beside FedAvg's: two gradients and two forward passes beside one gradient.

On one thread, in CPU time, with all clients in one block: what a step costs, not how well several clients share the
cores, nor which blocks are found for each method.
"""

from __future__ import annotations

import time
from functools import partial
from typing import Any

import torch

from benchmarks.report import Row
from benchmarks.rounds import alternate, data, quotients
from benchmarks.workloads import LENET
from unalike import Federation, LocalSGD, Model, State, simulate, train
from unalike.core.method import Method
from unalike.methods.adaped import AdaPeD
from unalike.methods.fedavg import FedAvg
from unalike.networks.architectures import build
from unalike.runtime.shard.recording import AFTER


class Going:
    """Rounds that go on where they were."""

    def __init__(self, method: Method, federation: Federation) -> None:
        self.method, self.federation = method, federation
        self.state: State | None = None

    def __call__(self, rounds: int) -> None:
        self.state = train(self.method, self.federation, rounds, self.state)


def measure(repetitions: int, quick: bool) -> tuple[list[Row], dict[str, Any]]:
    rows, raw = [], {}
    model, cores = Model(build("lenet-5", LENET.shape, LENET.classes)), torch.get_num_threads()
    torch.set_num_threads(1)
    for batch, cohort in ((5, 22), (20, 5)):  # of P3 §4.1 on FEMNIST (ξ = .33) and on MNIST
        clients = data(LENET, torch.full((5 if quick else cohort,), 60))
        local = LocalSGD(steps=10, batch=batch, lr=0.01)
        works = [
            Going(make(model, 1.0, local), simulate(clients, block=len(clients.size))) for make in (AdaPeD, FedAvg)
        ]
        for work in works:
            work(2 if quick else AFTER)
        times = 1 if quick else 3
        taken = alternate(repetitions, *(partial(work, times) for work in works), clock=time.process_time)
        ratio = quotients(*taken)
        rows.append(Row(f"LeNet-5, batch {batch}", "client-step, AdaPeD / FedAvg", ratio, target=("≤", 2.4)))
        raw[f"batch {batch}"] = {"adaped": taken[0], "fedavg": taken[1]}
    torch.set_num_threads(cores)
    return rows, raw
