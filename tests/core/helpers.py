"""Small clients and tasks that several tests use."""

import torch
from torch import Tensor, nn

from unalike import Client, Clients, Model, send, task
from unalike.core.task import Sent


def clients(sizes: list[int], features: int = 3, classes: int = 2, seed: int = 0) -> Clients:
    """Clients of these sizes with random features and labels."""
    generator = torch.Generator().manual_seed(seed)
    rows = sum(sizes)
    x = torch.randn(rows, features, generator=generator)
    y = torch.randint(0, classes, (rows,), generator=generator)
    return Clients.from_sizes(x, y, torch.tensor(sizes))


def linear(features: int = 3, classes: int = 2) -> Model:
    return Model(nn.Linear(features, classes))


@task
def total(client: Client) -> Sent:
    """The sum of the client's features, and how many rows it has."""
    return send(total=client.sum(client.x), n=client.n.to(torch.float32))


@task
def scaled(client: Client, factor: Tensor, shift: float = 0.0) -> Sent:
    return send(value=factor * client.mean(client.x) + shift)
