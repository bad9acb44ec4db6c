"""FedEM against FedAvg and EM written out."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.methods import written
from tests.methods.small import (
    LOCAL,
    MODEL,
    PROBLEM,
    RATES,
    SIZES,
    WHOLE,
    assert_equal,
    clients_of,
    cohorts_of,
    models,
    rows_of,
)
from unalike import Schedule, ServerOptimizer, simulate
from unalike.core.method import train
from unalike.learn.local import LocalSGD
from unalike.methods.fedavg import FedAvg
from unalike.methods.fedem import FedEM
from unalike.runs.simulate import gather_models


def test_fedem_with_one_component_is_fedavg() -> None:
    clients = clients_of((8, 5, 9, 7))
    method = FedEM(PROBLEM, 3, LOCAL, components=1)
    state, wanted = (train(one, simulate(clients), 2) for one in (method, FedAvg(MODEL, 3, LOCAL)))
    torch.testing.assert_close(state.theta[0], wanted.theta, atol=1e-6, rtol=0)


def test_fedem_follows_em_written_out() -> None:
    clients = clients_of((7,))
    method = FedEM(PROBLEM, 1, LocalSGD(steps=1, batch=None, lr=0.5), components=2, weight_steps=1)
    state = method.start(0)
    after = train(method, simulate(clients), 1, state)
    x, y = clients.rows(0)
    theta = state.theta.clone().requires_grad_()
    losses = torch.stack([F.cross_entropy(MODEL(one, x), y, reduction="none") for one in theta])
    q = torch.softmax(-losses, 0).detach()
    (g,) = torch.autograd.grad((q * losses).sum() / 7, theta)
    torch.testing.assert_close(after.theta, state.theta - 0.5 * g, atol=1e-6, rtol=0)
    mixture = models(method, after, clients)[0]  # a newcomer, whose weights start from one half each
    losses = torch.stack([F.cross_entropy(MODEL(one, x), y, reduction="none") for one in after.theta])
    pi = torch.softmax(-losses, 0).mean(1)
    wanted = (pi[:, None, None] * torch.stack([F.softmax(MODEL(one, x), -1) for one in after.theta])).sum(0)
    torch.testing.assert_close(method.model(mixture, x).exp(), wanted, atol=1e-6, rtol=0)
    torch.testing.assert_close(method.model.module(mixture)(x).exp(), wanted, atol=1e-6, rtol=0)


def test_fedem_goes_on_from_the_weights_that_a_client_kept() -> None:
    """Two rounds and the final mixture written out: q weighs the components by π, which is no longer uniform."""
    clients = clients_of((7,))
    method = FedEM(PROBLEM, 1, LocalSGD(steps=1, batch=None, lr=0.5), components=2, weight_steps=2)
    federation = simulate(clients)
    state = train(method, federation, 2)
    x, y = clients.rows(0)
    theta, pi = method.start(0).theta, torch.full((2,), 0.5)

    def shares(losses: Tensor) -> Tensor:
        q = pi[:, None] * torch.exp(-losses)
        return q / q.sum(0)

    for _ in range(2):
        theta.requires_grad_()
        losses = torch.stack([F.cross_entropy(MODEL(one, x), y, reduction="none") for one in theta])
        q = shares(losses).detach()
        pi = q.mean(1)
        theta = (theta - 0.5 * torch.autograd.grad((q * losses).sum() / 7, theta)[0]).detach()
    torch.testing.assert_close(state.theta, theta, atol=1e-6, rtol=0)
    losses = torch.stack([F.cross_entropy(MODEL(one, x), y, reduction="none") for one in theta])
    for _ in range(2):
        pi = shares(losses).mean(1)
    cohort = federation.everyone()
    found = gather_models(cohort, method.personalize(state, cohort))[0].view(2, -1)[:, -1]
    torch.testing.assert_close(found, pi, atol=1e-6, rtol=0)


def test_identical_components_leave_the_weights_as_they_are() -> None:
    clients = clients_of()
    method = FedEM(PROBLEM, 1.0, WHOLE, components=3)
    state = method.start(0).replace(theta=MODEL.init(5).repeat(3, 1))
    weights = models(method, state, clients).view(4, 3, -1)[:, :, -1]
    torch.testing.assert_close(weights, torch.full((4, 3), 1 / 3))


def test_wrong_settings_are_refused() -> None:
    with pytest.raises(ValueError, match="components=0"):
        FedEM(PROBLEM, components=0)


def test_rounds_are_those_written_out_in_numpy() -> None:
    """E-step with the π that a client kept, two weighted steps, the mean of the components by sizes."""
    step, lr, m = 0.8, 0.7, 2
    clients = clients_of(SIZES)
    method = FedEM(
        PROBLEM, 2, LocalSGD(steps=2, batch=None, lr=step), m, 3, Schedule("1/t"), server=ServerOptimizer(lr=lr)
    )
    federation, rows = simulate(clients), rows_of(clients)
    state, theta = train(method, federation, 3), method.start(0).theta.double().numpy()
    pi = np.full((3, m), 1 / m)

    def shares(theta: np.ndarray, i: int, pi: np.ndarray) -> np.ndarray:
        q = pi[:, None] * np.exp([-written.losses(one, *rows[i]) for one in theta])
        return np.asarray(q / q.sum(0))

    for rate, cohort in zip(RATES, cohorts_of(clients, 3), strict=False):
        change = np.zeros_like(theta)
        for i in cohort:
            q, own = shares(theta, i, pi[i]), theta
            for _ in range(2):
                slopes = [written.gradient(one, *rows[i], weights=w / SIZES[i]) for one, w in zip(own, q, strict=True)]
                own = own - step * rate * np.stack(slopes)
            pi[i] = q.mean(1)
            change += SIZES[i] * (own - theta)
        theta = theta + lr * change / sum(SIZES[i] for i in cohort)
    assert_equal(state.theta, theta)
    with federation.aside() as aside:
        everyone = aside.everyone()
        found = gather_models(everyone, method.personalize(state, everyone)).view(3, m, -1)
    for i in range(3):
        for _ in range(3):
            pi[i] = shares(theta, i, pi[i]).mean(1)
        assert_equal(found[i, :, -1], pi[i])
        assert_equal(found[i, :, :-1], theta)
