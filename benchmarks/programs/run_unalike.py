"""Unalike's FedAvg, as a user would run it."""

from __future__ import annotations

import sys

import torch
from common import Pace, read

from unalike import Clients, Model, simulate
from unalike.core.method import State, train
from unalike.learn.local import LocalSGD
from unalike.methods.fedavg import FedAvg
from unalike.networks.architectures import build


def main(folder: str) -> None:
    work = read(folder)
    clients = Clients.from_sizes(
        work.x, work.y, torch.tensor(work.ends).diff(prepend=torch.zeros(1, dtype=torch.int64))
    )
    model = Model(build(work.network, work.shape, work.classes))
    method = FedAvg(model, cohort=work.cohort, local=LocalSGD(epochs=1, batch=work.batch, lr=work.lr))
    pace = Pace(threads=[torch.get_num_threads()])  # the simulator chooses for itself

    class Done(Exception):
        pass

    def after_round(number: int, state: State) -> None:
        if not pace.round_done():
            raise Done

    try:
        train(method, simulate(clients), 1_000_000, after_round=after_round)
    except Done:
        return


if __name__ == "__main__":
    main(sys.argv[1])
