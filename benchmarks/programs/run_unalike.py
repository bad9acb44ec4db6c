"""Unalike's FedAvg or PeFLL, as a user would run it; also that of an earlier version, so it uses what all have."""

from __future__ import annotations

import sys

import torch
from common import Pace, read

from unalike import Clients, Model, simulate
from unalike.core.method import Method, State, train
from unalike.learn.local import LocalSGD
from unalike.methods.fedavg import FedAvg
from unalike.methods.pefll import PeFLL
from unalike.methods.problem import Problem
from unalike.networks.architectures import build


def main(folder: str) -> None:
    work = read(folder)
    clients = Clients.from_sizes(
        work.x, work.y, torch.tensor(work.ends).diff(prepend=torch.zeros(1, dtype=torch.int64))
    )
    model = Model(build(work.network, work.shape, work.classes))
    method: Method = FedAvg(model, cohort=work.cohort, local=LocalSGD(epochs=1, batch=work.batch, lr=work.lr))
    if work.pefll_steps:
        problem = Problem(model, work.shape, work.classes, work.clients, "image")
        local = LocalSGD(steps=work.pefll_steps, batch=work.batch, lr=work.lr, momentum=0.9)
        method = PeFLL(problem, cohort=work.cohort, local=local)
    pace = Pace(threads=[torch.get_num_threads()])  # the simulator chooses for itself

    class Done(Exception):
        pass

    def after_round(number: int, state: State) -> None:
        if not pace.round_done():
            raise Done

    try:
        train(method, simulate(clients, block=work.block), 1_000_000, after_round=after_round)
    except Done:
        return


if __name__ == "__main__":
    main(sys.argv[1])
