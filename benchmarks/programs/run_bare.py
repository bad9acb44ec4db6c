"""The plainest simulation there is: one model, one optimizer, client after client, in PyTorch alone."""

from __future__ import annotations

import sys

import numpy as np
import torch
import torch.nn.functional as F
from common import Pace, network, read


def main(folder: str) -> None:
    work = read(folder)
    model = network(work)
    rng = np.random.default_rng(0)
    parameters = list(model.parameters())
    pace = Pace()
    while True:
        start = [p.detach().clone() for p in parameters]
        total = [torch.zeros_like(p) for p in start]
        for position in rng.choice(work.clients, work.cohort, replace=False):
            x, y = work.client(int(position))
            optimizer = torch.optim.SGD(parameters, lr=work.lr)
            for rows in torch.randperm(len(x)).split(work.batch):
                optimizer.zero_grad()
                F.cross_entropy(model(x[rows]), y[rows]).backward()
                optimizer.step()
            with torch.no_grad():
                for sum_, parameter, begin in zip(total, parameters, start, strict=True):
                    sum_ += parameter - begin
                    parameter.copy_(begin)
        with torch.no_grad():
            for sum_, parameter in zip(total, parameters, strict=True):
                parameter += sum_ / work.cohort
        if not pace.round_done():
            return


if __name__ == "__main__":
    main(sys.argv[1])
