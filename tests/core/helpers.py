"""Small clients and tasks that several tests use."""

from typing import Any

import torch
from torch import Tensor, nn

from unalike import Client, Clients, Federation, Model, Simulator, send, task
from unalike.core.request import Program
from unalike.core.task import Sent
from unalike.data.population import Population
from unalike.runtime.shard.kept import KeptStore
from unalike.runtime.shard.shard import Shard
from unalike.runtime.simulate import Simulation


def clients(sizes: list[int], features: int = 3, classes: int = 2, seed: int = 0) -> Clients:
    """Clients of these sizes with random features and labels."""
    generator = torch.Generator().manual_seed(seed)
    rows = sum(sizes)
    x = torch.randn(rows, features, generator=generator)
    y = torch.randint(0, classes, (rows,), generator=generator)
    return Clients.from_sizes(x, y, torch.tensor(sizes))


def population(train: Clients, test: Clients, seen: int | None = None) -> Population:
    """These clients with other rows to be tested on; the first ``seen`` of them take part in training."""
    order = torch.arange(len(train))
    count = len(train) if seen is None else seen
    nothing = train.select(order)
    nothing.size.zero_()
    return Population("made", "features", train, nothing, test, order[:count], order[count:], classes=None)


def simulation(store: Clients, simulator: Simulator, **options: Any) -> Simulation:
    """One shard of these clients with a simulator of the test's own."""
    program = Program(open=True)
    return Simulation([Shard({"train": store}, store.roster(), program, simulator)], program, **options)


def kept(federation: Federation) -> KeptStore:
    """What the clients keep for a run that has one shard."""
    assert isinstance(federation.runtime, Simulation)
    (shard,) = federation.runtime.shards
    return shard.kept(federation.run)


def linear(features: int = 3, classes: int = 2) -> Model:
    return Model(nn.Linear(features, classes))


@task
def total(client: Client) -> Sent:
    """The sum of the client's features, and how many rows it has."""
    return send(total=client.sum(client.x), n=client.n.to(torch.float32))


@task
def scaled(client: Client, factor: Tensor, shift: float = 0.0) -> Sent:
    return send(value=factor * client.mean(client.x) + shift)
