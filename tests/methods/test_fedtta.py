"""FedTTA: the inner step, the gradient through it, and what it reduces to."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from unalike import simulate
from unalike.core.client import Clients
from unalike.core.method import train
from unalike.core.model import Model
from unalike.learn.local import LocalSGD
from unalike.learn.objective import Batch
from unalike.methods.fedavg import FedAvg
from unalike.methods.fedtta import FedTTA
from unalike.methods.problem import Problem
from unalike.networks.architectures import build
from unalike.runs.simulate import gather_models

SIZES = [7, 12, 5, 9]


def clients_of(sizes: list[int] = SIZES) -> Clients:
    random = torch.Generator().manual_seed(0)
    x = torch.randn(sum(sizes), 6, generator=random)
    return Clients.from_sizes(x, torch.randint(3, (sum(sizes),), generator=random), torch.tensor(sizes))


def problem() -> Problem:
    return Problem(Model(build("mlp", (6,), 3, hidden=(8,))), (6,), 3, 4)


def adaptation(phi: Tensor, logits: Tensor) -> Tensor:
    """φ's network, T1 C.1.2: three hidden layers of 32 with ReLU, and one number."""
    widths = [logits.shape[1], 32, 32, 32, 1]
    for layer, (before, after) in enumerate(itertools.pairwise(widths)):
        weight, bias, phi = phi.split([before * after, after, len(phi) - after * (before + 1)])
        logits = logits @ weight.view(after, before).T + bias
        logits = logits.clamp(min=0) if layer < 3 else logits
    assert not len(phi)
    return logits[:, 0]


def by_hand(method: FedTTA, theta: Tensor, phi: Tensor, x: Tensor, y: Tensor) -> Tensor:
    """The outer loss with ordinary autograd, which builds the graph of the inner gradient."""
    inner = adaptation(phi, method.model(theta, x)).norm()
    (step,) = torch.autograd.grad(inner, theta, create_graph=True)
    return F.cross_entropy(method.model(theta - method.adapt_lr * step, x), y)


def test_round_follows_the_gradient_through_the_inner_step() -> None:
    clients = clients_of()
    method = FedTTA(problem(), cohort=4, local=LocalSGD(steps=1, batch=None, lr=1.0), adapt_lr=0.3)
    state = method.start(0)
    after = train(method, simulate(clients), 1, state)
    theta, phi = state.theta.clone().requires_grad_(), state.phi.clone().requires_grad_()
    total = torch.zeros(())
    for i, size in enumerate(SIZES):
        x, y = clients.rows(i)
        assert y is not None
        total = total + size * by_hand(method, theta, phi, x, y) / sum(SIZES)
    total.backward()  # type: ignore[no-untyped-call]
    assert theta.grad is not None and phi.grad is not None and float(phi.grad.abs().max()) > 1e-4
    torch.testing.assert_close(after.theta, state.theta - theta.grad, atol=1e-6, rtol=0)
    torch.testing.assert_close(after.phi, state.phi - phi.grad, atol=1e-6, rtol=0)


def test_outer_gradient_matches_finite_differences() -> None:
    method = FedTTA(problem(), adapt_lr=0.3)
    x, y = clients_of().rows(1)
    state, batch = method.start(0), Batch(x.double(), y, None)
    params = {"theta": state.theta.double(), "phi": state.phi.double()}
    objective, random = method.objective, torch.Generator().manual_seed(1)
    gradient = torch.func.grad(objective)(params, batch)
    for name, value in params.items():
        way = torch.randn(value.shape, generator=random, dtype=torch.float64)
        up, down = (objective({**params, name: value + h * way}, batch) for h in (1e-6, -1e-6))
        torch.testing.assert_close((up - down) / 2e-6, (gradient[name] * way).sum(), atol=1e-6, rtol=1e-5)


def test_no_inner_step_is_fedavg() -> None:
    clients, local = clients_of(), LocalSGD(epochs=2, batch=4, lr=0.3)
    method, plain = FedTTA(problem(), cohort=3, local=local, adapt_lr=0.0), FedAvg(problem().model, 3, local)
    state, wanted = train(method, simulate(clients), 3), train(plain, simulate(clients), 3)
    torch.testing.assert_close(state.theta, wanted.theta, atol=1e-6, rtol=0)


@pytest.mark.parametrize("block", [1, 4])
def test_newcomers_take_the_step_of_a_training_batch(block: int) -> None:
    """All rows, in any order and without labels; the norm is that of ``batch`` rows where there are more."""
    clients = clients_of()
    method = FedTTA(problem(), local=LocalSGD(batch=9), adapt_lr=0.3)
    state = method.start(0)
    cohort = simulate(clients.without_labels(), block=block).everyone()
    models = gather_models(cohort, method.personalize(state, cohort))
    for i, size in enumerate(SIZES):
        theta, x = state.theta.clone().requires_grad_(), clients.rows(i)[0]
        outputs = method.adaptation(state.phi, method.model(theta, x.flip(0)))
        inner = outputs.square().mean().sqrt() * min(9, size) ** 0.5
        (step,) = torch.autograd.grad(inner, theta)
        torch.testing.assert_close(models[i], state.theta - 0.3 * step, atol=1e-6, rtol=0)


def test_partial_batches_do_not_depend_on_the_block() -> None:
    method = FedTTA(problem(), cohort=4, local=LocalSGD(epochs=1, batch=4, lr=0.2), adapt_lr=0.1)
    wanted = train(method, simulate(clients_of(), block=1), 2)
    found = train(method, simulate(clients_of(), block=4), 2)
    torch.testing.assert_close(found.theta, wanted.theta, atol=1e-6, rtol=0)


def test_a_negative_rate_is_refused() -> None:
    with pytest.raises(ValueError, match="adapt_lr=-1"):
        replace(FedTTA(problem()), adapt_lr=-1)


@pytest.mark.parametrize("name, side", [("small-cnn", 8), ("lenet", 16), ("cnn", 28)])
def test_convolutional_networks_are_trained_for_a_block_of_clients_as_for_each(name: str, side: int) -> None:
    """Warnings are errors here, so that one of them, "cannot be vectorised", does not pass."""
    random = torch.Generator().manual_seed(0)
    x, y = torch.randn(12, 1, side, side, generator=random), torch.randint(3, (12,), generator=random)
    clients = Clients.from_sizes(x, y, torch.tensor([4, 4, 4]))
    images = Problem(Model(build(name, (1, side, side), 3)), (1, side, side), 3, 3)
    method = FedTTA(images, cohort=3, local=LocalSGD(steps=1, batch=None, lr=1.0), adapt_lr=0.3)
    together, singly = (train(method, simulate(clients, block=block), 1, method.start(0)) for block in (3, 1))
    torch.testing.assert_close(together.theta, singly.theta, atol=1e-6, rtol=0)


def test_secure_sums_give_the_same_round() -> None:
    """Of equally large clients: a masked mean has no weights."""
    clients = clients_of([6] * 4)
    plain = FedTTA(problem(), cohort=4, local=LocalSGD(steps=1, batch=None, lr=0.1))
    masked = replace(plain, secure=True, clip=50.0)
    federation = simulate(clients)
    after = train(masked, federation, 1, masked.start(0))
    expected = train(plain, simulate(clients), 1, plain.start(0))
    torch.testing.assert_close(after.theta, expected.theta, rtol=1e-3, atol=1e-5)
    torch.testing.assert_close(after.phi, expected.phi, rtol=1e-3, atol=1e-5)
    assert {(row["array"], row["seen_as"]) for row in federation.transcript.rows()} == {("update", "secure mean")}
    with pytest.raises(ValueError, match="secure sums need a bound"):
        replace(plain, secure=True)
