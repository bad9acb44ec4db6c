"""Flower's FedAvg on its simulation runtime (Ray), a core for each client that runs.

Start this only where the network is nothing but loopback: Ray listens on every interface.
"""

from __future__ import annotations

import os
import sys

import torch
import torch.nn.functional as F
from common import Pace, network, read
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from flwr.simulation import run_simulation

FOLDER = sys.argv[1]
client_app, server_app = ClientApp(), ServerApp()


@client_app.train()
def train(message: Message, context: Context) -> Message:
    torch.set_num_threads(1)
    work = read(FOLDER)
    model = network(work)
    model.load_state_dict(message.content["arrays"].to_torch_state_dict())
    x, y = work.client(int(context.node_config["partition-id"]))
    optimizer = torch.optim.SGD(model.parameters(), lr=work.lr)
    for rows in torch.randperm(len(x)).split(work.batch):
        optimizer.zero_grad()
        F.cross_entropy(model(x[rows]), y[rows]).backward()
        optimizer.step()
    metrics = MetricRecord({"num-examples": len(x)})
    return Message(
        content=RecordDict({"arrays": ArrayRecord(model.state_dict()), "metrics": metrics}), reply_to=message
    )


@server_app.main()
def serve(grid: Grid, context: Context) -> None:
    work = read(FOLDER)
    pace: Pace | None = None

    def after_round(number: int, arrays: ArrayRecord) -> MetricRecord:
        nonlocal pace
        if number == 0:  # Flower also calls this before the first round
            pace = Pace(threads=[torch.get_num_threads()])
        elif pace is not None and not pace.round_done():
            os._exit(0)  # Flower has no way to end a run early; its processes end with their namespace
        return MetricRecord()

    strategy = FedAvg(
        fraction_train=work.cohort / work.clients,
        fraction_evaluate=0.0,
        min_train_nodes=work.cohort,
        min_available_nodes=work.clients,
    )
    strategy.start(grid, ArrayRecord(network(work).state_dict()), num_rounds=1_000_000, evaluate_fn=after_round)


if __name__ == "__main__":
    run_simulation(
        server_app,
        client_app,
        num_supernodes=read(FOLDER).clients,
        backend_config={"client_resources": {"num_cpus": 1, "num_gpus": 0.0}},
    )
