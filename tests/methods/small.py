"""Small models and clients for the tests of methods."""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.core.helpers import clients, linear
from unalike import simulate
from unalike.core.client import Clients
from unalike.core.federation import Federation
from unalike.core.method import Method, State
from unalike.core.model import Model
from unalike.learn.local import LocalSGD
from unalike.methods.problem import Problem
from unalike.networks.architectures import build
from unalike.runs.simulate import gather_models

CLASSES, FEATURES = 3, 6
MODEL = Model(build("mlp", (FEATURES,), CLASSES, hidden=(8,)))
PROBLEM = Problem(MODEL, (FEATURES,), CLASSES, 4)
LOCAL = LocalSGD(epochs=2, batch=4, lr=0.3)
WHOLE = LocalSGD(steps=1, batch=None, lr=0.1)


def clients_of(sizes: tuple[int, ...] = (8, 8, 8, 8), seed: int = 0) -> Clients:
    random = torch.Generator().manual_seed(seed)
    x = torch.randn(sum(sizes), FEATURES, generator=random)
    return Clients.from_sizes(x, torch.randint(CLASSES, (sum(sizes),), generator=random), torch.tensor(sizes))


def models(method: Method, state: State, clients: Clients) -> Tensor:
    cohort = simulate(clients).everyone()
    return gather_models(cohort, method.personalize(state, cohort))


class Point(nn.Module):
    """f(θ; x) = θ·x for one number: with the squared loss, a client is a quadratic in θ."""

    def __init__(self) -> None:
        super().__init__()
        self.theta = nn.Parameter(torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.theta


A, C = torch.tensor([0.5, 2.0, 1.0]), torch.tensor([1.0, -2.0, 4.0])  # curvature and minimum of each client's quadratic


def quadratics() -> Clients:
    """a/2·(θ − c)² as the mean of one squared error each: x = √a, y = √a·c."""
    x = A.sqrt()[:, None]
    return Clients.from_sizes(x, (x[:, 0] * C), torch.tensor([1, 1, 1]))


def permuted(model: Model, theta: Tensor, orders: list[Tensor]) -> Tensor:
    """The same function with hidden neurons in another order; a convolution's channel is a block of a linear layer."""
    tensors = {name: value.clone() for name, value in model.tensors(theta).items()}
    names = list(tensors)
    for layer, order in enumerate(orders):
        weight, bias, after = names[2 * layer], names[2 * layer + 1], names[2 * layer + 2]
        tensors[weight], tensors[bias] = tensors[weight][order], tensors[bias][order]
        value = tensors[after]
        blocks = value.reshape(len(value), len(order), -1)[:, order]
        tensors[after] = blocks.reshape(value.shape)
    return model.flatten(tensors)


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def shifted(sizes: list[int], flips: list[int], features: int = 5, round: int = 0) -> Federation:
    """Clients whose labels are (y + flip) mod 2: a concept shift between clusters."""
    x = normal(sum(sizes), features, seed=3).float()
    flip = torch.tensor(flips).repeat_interleave(torch.tensor(sizes))
    y = ((x[:, 0] > 0).long() + flip) % 2
    return simulate(Clients.from_sizes(x, y, torch.tensor(sizes)), seed=1, round=round)


SIZES = (5, 9, 7)
RATES = [1.0, 1 / 2, 1 / 3, 1 / 4]  # of the schedule 1/t


def rows_of(clients: Clients) -> list[tuple[np.ndarray, np.ndarray]]:
    """Inputs and labels of each client, in double precision."""
    found = [clients.rows(i) for i in range(len(clients))]
    return [(x.double().numpy(), y.numpy()) for x, y in found if y is not None]


def cohorts_of(clients: Clients, rounds: int, size: int = 2) -> list[list[int]]:
    """Who takes part in each round of a federation with seed 0."""
    return [simulate(clients, round=t).sample(size, labeled=True).positions.tolist() for t in range(1, rounds + 1)]


def assert_equal(found: Tensor, expected: np.ndarray) -> None:
    torch.testing.assert_close(found.double(), torch.from_numpy(expected), atol=2e-5, rtol=1e-4)


def pooled_step(theta: Tensor, rows: list[int], lr: float) -> Tensor:
    """One step of the model ``linear`` along the gradient of these clients' samples, put together."""
    store, model = clients([3, 10, 1, 6]), linear()
    x = torch.cat([store.rows(i)[0] for i in rows])
    y = torch.cat([store.rows(i)[1] for i in rows])  # type: ignore[misc]
    leaf = theta.clone().requires_grad_(True)
    (gradient,) = torch.autograd.grad(F.cross_entropy(model(leaf, x), y), leaf)
    return theta - lr * gradient
