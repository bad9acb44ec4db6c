"""Per-FedAvg against the fixed point of quadratics, FedAvg and a step written out."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

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
from unalike.methods.fedavg import FedAvg
from unalike.methods.perfedavg import PerFedAvg


@pytest.mark.parametrize("order, power", [("first", 1), ("exact", 2)])
def test_perfedavg_settles_where_its_gradients_cancel(order: Any, power: int) -> None:
    """∇F_i(w) = (1 − αa)^power · a · (w − c), so the fixed point weighs c by a(1 − αa)^power."""
    method = PerFedAvg(Model(Point()), 3, WHOLE, alpha=0.3, order=order)
    weight = A * (1 - 0.3 * A) ** power
    fixed = ((weight * C).sum() / weight.sum()).reshape(1)
    state = method.start(0).replace(w=fixed)
    torch.testing.assert_close(train(method, simulate(quadratics()), 1, state).w, fixed, atol=1e-6, rtol=0)
    moved = train(method, simulate(quadratics()), 1, state.replace(w=torch.tensor([3.0]))).w
    torch.testing.assert_close(moved, 3 - 0.1 * (weight * (3 - C)).mean().reshape(1), atol=1e-5, rtol=0)
    own = state.w - 0.3 * A * (state.w - C)
    torch.testing.assert_close(models(method, state, quadratics())[:, 0], own, atol=1e-5, rtol=0)


def test_perfedavg_without_a_step_is_fedavg() -> None:
    local = LocalSGD(steps=3, batch=None, lr=0.3)
    method, plain = PerFedAvg(MODEL, 3, local, alpha=0.0), FedAvg(MODEL, 3, local)
    state, wanted = (train(one, simulate(clients_of()), 3) for one in (method, plain))
    torch.testing.assert_close(state.w, wanted.theta, atol=1e-6, rtol=0)


def test_perfedavg_takes_its_two_gradients_on_different_rows() -> None:
    """A step written out with ordinary autograd, on the even and the odd rows of the one batch that there is."""
    clients = clients_of((6,))
    method = PerFedAvg(MODEL, 1, LocalSGD(epochs=1, batch=6, lr=1.0), alpha=0.5, order="exact")
    state = method.start(0)
    after = train(method, simulate(clients), 1, state)
    x, y = clients.rows(0)
    assert y is not None
    halves = []
    for order in torch.cartesian_prod(*[torch.arange(6)] * 3):  # which three rows came at even places?
        if len(set(order.tolist())) == 3 and order.tolist() == sorted(order.tolist()):
            rest = [i for i in range(6) if i not in order.tolist()]
            w = state.w.clone().requires_grad_()
            (g,) = torch.autograd.grad(F.cross_entropy(MODEL(w, x[order]), y[order]), w, create_graph=True)
            loss = F.cross_entropy(MODEL(w - 0.5 * g, x[rest]), y[rest])
            halves.append(state.w - torch.autograd.grad(loss, w)[0])
    gaps = torch.stack([(after.w - one).abs().max() for one in halves])
    assert gaps.min() < 1e-6 < gaps.median()


@pytest.mark.parametrize(
    "changes, text", [({"alpha": -1}, "alpha=-1"), ({"order": "second"}, "expected one of first, exact")]
)
def test_wrong_settings_are_refused(changes: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        PerFedAvg(MODEL, **changes)


@pytest.mark.parametrize("order", ["first", "exact"])
def test_rounds_are_those_written_out_in_numpy(order: Any) -> None:
    """Three clients of unequal size, two a round: w ← w − β_t·∇F_i(w), the mean times the server's rate."""
    beta, alpha, lr = 0.4, 0.3, 0.6
    clients = clients_of(SIZES)
    method = PerFedAvg(
        MODEL,
        2,
        LocalSGD(steps=2, batch=None, lr=beta),
        Schedule("1/t"),
        alpha=alpha,
        order=order,
        adapt_steps=2,
        server=ServerOptimizer(lr=lr),
    )
    state, w = train(method, simulate(clients), 3), method.start(0).w.double().numpy()
    rows = rows_of(clients)

    def slope(w: np.ndarray, i: int) -> np.ndarray:
        outer = written.gradient(w - alpha * written.gradient(w, *rows[i]), *rows[i])
        if order == "first":
            return outer
        # (I − α∇²f(w))·outer, the Hessian's product by central differences
        step = 1e-5
        ahead, behind = (written.gradient(w + sign * step * outer, *rows[i]) for sign in (1, -1))
        return np.asarray(outer - alpha * (ahead - behind) / (2 * step))

    for rate, cohort in zip(RATES, cohorts_of(clients, 3), strict=False):
        changes = []
        for i in cohort:
            own = w
            for _ in range(2):
                own = own - beta * rate * slope(own, i)
            changes.append(own - w)
        w = w + lr * np.mean(changes, axis=0)
    assert_equal(state.w, w)
    for i, found in enumerate(models(method, state, clients)):
        own = w
        for _ in range(2):
            own = own - alpha * written.gradient(own, *rows[i])
        assert_equal(found, own)
