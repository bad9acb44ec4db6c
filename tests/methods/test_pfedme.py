"""pFedMe against the fixed point of quadratics."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.methods import written
from tests.methods.small import (
    MODEL,
    RATES,
    SIZES,
    WHOLE,
    A,
    C,
    Point,
    assert_equal,
    clients_of,
    cohorts_of,
    models,
    quadratics,
    rows_of,
)
from unalike import Schedule, ServerOptimizer, simulate
from unalike.core.method import train
from unalike.core.model import Model
from unalike.learn.local import LocalSGD
from unalike.methods.pfedme import PFedMe


def test_pfedme_settles_where_the_envelopes_cancel() -> None:
    """θ̂_i(w) = (a·c + λw)/(a + λ), and the fixed point weighs c by aλ/(a + λ)."""
    lam = 0.7
    method = PFedMe(
        Model(Point()),
        3,
        WHOLE,
        lambda_=lam,
        inner_steps=200,
        inner_lr=0.3,
        personal=LocalSGD(steps=200, batch=None, lr=0.3),
    )
    weight = A * lam / (A + lam)
    fixed = ((weight * C).sum() / weight.sum()).reshape(1)
    state = method.start(0).replace(w=fixed)
    torch.testing.assert_close(train(method, simulate(quadratics()), 1, state).w, fixed, atol=1e-5, rtol=0)
    moved = train(method, simulate(quadratics()), 1, state.replace(w=torch.tensor([3.0]))).w
    torch.testing.assert_close(moved, 3 - 0.1 * (weight * (3 - C)).mean().reshape(1), atol=1e-5, rtol=0)
    own = (A * C + lam * state.w) / (A + lam)
    torch.testing.assert_close(models(method, state, quadratics())[:, 0], own, atol=1e-4, rtol=0)


def test_wrong_settings_are_refused() -> None:
    with pytest.raises(ValueError, match="diverge from 2 on"):
        PFedMe(MODEL, inner_lr=0.2)


def test_rounds_are_those_written_out_in_numpy() -> None:
    """θ̃ by K steps from w on f_i(θ) + λ/2·‖θ − w‖², then w ← w − η_t·λ(w − θ̃); β is the server's rate."""
    eta, lam, inner, beta, k = 0.05, 3.0, 0.12, 0.6, 3
    clients = clients_of(SIZES)
    method = PFedMe(
        MODEL,
        2,
        LocalSGD(steps=2, batch=None, lr=eta),
        lam,
        k,
        inner,
        LocalSGD(steps=4, batch=None, lr=0.1),
        Schedule("1/t"),
        server=ServerOptimizer(lr=beta),
    )
    state, w = train(method, simulate(clients), 3), method.start(0).w.double().numpy()
    rows = rows_of(clients)

    def near(w: np.ndarray, i: int, steps: int, rate: float) -> np.ndarray:
        theta = w
        for _ in range(steps):
            theta = theta - rate * (written.gradient(theta, *rows[i]) + lam * (theta - w))
        return theta

    for rate, cohort in zip(RATES, cohorts_of(clients, 3), strict=False):
        changes = []
        for i in cohort:
            own = w
            for _ in range(2):
                own = own - eta * rate * lam * (own - near(own, i, k, inner))
            changes.append(own - w)
        w = w + beta * np.mean(changes, axis=0)
    assert_equal(state.w, w)
    for i, found in enumerate(models(method, state, clients)):
        assert_equal(found, near(w, i, 4, 0.1))
