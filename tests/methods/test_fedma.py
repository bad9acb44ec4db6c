"""FedMA against permuted copies of a network and rounds written out."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.methods.small import CLASSES, FEATURES, PROBLEM, clients_of, permuted
from unalike import simulate
from unalike.core.method import train
from unalike.core.model import Model
from unalike.learn.local import LocalSGD
from unalike.methods.fedma import FedMA, matching
from unalike.methods.problem import Problem
from unalike.networks.architectures import build


@pytest.mark.parametrize("name, shape", [("mlp", (6,)), ("lenet", (1, 28, 28))])
def test_fedma_finds_a_network_in_permuted_copies_of_it(name: str, shape: tuple[int, ...]) -> None:
    model = Model(build(name, shape, CLASSES))
    method = FedMA(Problem(model, shape, CLASSES, 3))
    random = torch.Generator().manual_seed(0)
    theta = model.init(0)
    widths = [neurons for _, neurons, _ in method.layers[:-1]]
    copies = [permuted(model, theta, [torch.randperm(n, generator=random) for n in widths]) for _ in range(3)]
    x = torch.randn(5, *shape, generator=random)
    torch.testing.assert_close(model(copies[1], x), model(theta, x), atol=1e-4, rtol=1e-4)
    rest, done = torch.stack(copies), []
    for layer in range(len(widths)):
        matched, rest = method._match(layer, rest)
        done.append(matched.mean(0))
    average = torch.cat([*done, rest.mean(0)])
    torch.testing.assert_close(model(average, x), model(theta, x), atol=1e-4, rtol=1e-4)
    plain = torch.stack(copies).mean(0)
    assert not torch.allclose(model(plain, x), model(theta, x), atol=1e-2)


def test_fedma_without_hidden_layers_averages_classes_by_their_counts() -> None:
    model = Model(build("logistic", (FEATURES,), CLASSES))
    clients = clients_of((5, 9))
    local = LocalSGD(steps=1, batch=None, lr=0.5)
    method = FedMA(Problem(model, (FEATURES,), CLASSES, 2), 1.0, local)
    state = method.start(0)
    after = train(method, simulate(clients), 1, state)
    wanted, counts = torch.zeros(CLASSES, FEATURES + 1), torch.zeros(CLASSES, 1)
    for i in range(2):
        x, y = clients.rows(i)
        assert y is not None
        theta = state.theta.clone().requires_grad_()
        (g,) = torch.autograd.grad(F.cross_entropy(model(theta, x), y), theta)
        own = model.tensors(state.theta - 0.5 * g)
        n = torch.bincount(y, minlength=CLASSES)[:, None].float()
        wanted += n * torch.cat([own["linear.weight"], own["linear.bias"][:, None]], 1)
        counts += n
    found = model.tensors(after.theta)
    together = torch.cat([found["linear.weight"], found["linear.bias"][:, None]], 1)
    torch.testing.assert_close(together, wanted / counts, atol=1e-4, rtol=0)


def test_a_round_of_fedma_matches_freezes_and_trains_the_rest() -> None:
    """Two clients and three hidden neurons, with the matching found among all six orders; the step is long enough that
    another order than the first is the best."""
    model = Model(build("mlp", (FEATURES,), CLASSES, hidden=(3,)))
    clients = clients_of((5, 9))
    method = FedMA(Problem(model, (FEATURES,), CLASSES, 2), 1.0, LocalSGD(steps=1, batch=None, lr=9.0))
    state = method.start(0)
    after = train(method, simulate(clients), 1, state)
    rows = [clients.rows(i) for i in range(2)]
    split = 3 * (FEATURES + 1)

    def trained(theta: Tensor, i: int) -> Tensor:
        theta = theta.clone().requires_grad_()
        return (
            theta - 9.0 * torch.autograd.grad(F.cross_entropy(model(theta, rows[i][0]), rows[i][1]), theta)[0]
        ).detach()

    first, second = (trained(state.theta, i) for i in range(2))
    orders = [torch.tensor(one) for one in itertools.permutations(range(3))]
    same = [permuted(model, second, [order]) for order in orders]
    best = max(range(6), key=lambda one: float(first[:split] @ same[one][:split]))
    assert best != 0
    done = (5 * first[:split] + 9 * same[best][:split]) / 14
    last = [trained(torch.cat([done, rest[split:]]), i)[split:] for i, rest in enumerate((first, same[best]))]
    counts = torch.stack([torch.bincount(y, minlength=CLASSES).float() for _, y in rows if y is not None])
    share = counts / counts.sum(0)
    weights = sum(share[i][:, None] * last[i][: 3 * CLASSES].view(CLASSES, 3) for i in range(2))
    biases = sum(share[i] * last[i][3 * CLASSES :] for i in range(2))
    assert isinstance(weights, Tensor) and isinstance(biases, Tensor)
    torch.testing.assert_close(after.theta, torch.cat([done, weights.flatten(), biases]), atol=1e-4, rtol=1e-4)


def test_matching_undoes_a_permutation_in_spite_of_noise() -> None:
    random = torch.Generator().manual_seed(0)
    neurons = torch.randn(6, 9, generator=random)
    order = torch.randperm(6, generator=random)
    found = matching(torch.stack([neurons, neurons[order] + 0.05 * torch.randn(6, 9, generator=random)]), 2)
    assert torch.equal(order[found[1]], torch.arange(6))


def test_fedma_refuses_networks_that_are_no_chains() -> None:
    with pytest.raises(ValueError, match="use mlp, lenet or cnn"):
        FedMA(Problem(Model(build("resnet20", (3, 32, 32), 10)), (3, 32, 32), 10, 3))


def test_wrong_settings_are_refused() -> None:
    with pytest.raises(ValueError, match="passes=0"):
        FedMA(PROBLEM, passes=0)
