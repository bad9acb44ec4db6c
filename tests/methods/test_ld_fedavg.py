"""LD-FedAvg: FedAvg where P is the identity, inside P's subspace elsewhere."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from tests.methods.test_flowdup import FULL_STEP, clients_of, mlp
from unalike import simulate, train
from unalike.learn.local import LocalSGD
from unalike.methods.fedavg import FedAvg
from unalike.methods.ld_fedavg import LDFedAvg


def test_ld_fedavg_in_the_whole_space_is_fedavg() -> None:
    clients, local = clients_of(), LocalSGD(epochs=2, batch=4, lr=0.3)
    low = LDFedAvg(mlp(), cohort=3, local=local, subspace="identity", agreed_seed=5)
    full = FedAvg(low.model, cohort=3, local=local)
    federation, other = simulate(clients), simulate(clients)
    state, wanted = train(low, federation, 3), train(full, other, 3, full.start(5))
    torch.testing.assert_close(low.personalize(state, federation.everyone())[0], wanted.theta, atol=1e-6, rtol=0)


def test_ld_fedavg_stays_in_its_subspace() -> None:
    low = LDFedAvg(mlp(), cohort=4, local=LocalSGD(lr=0.3), dimension=9)
    federation = simulate(clients_of())
    theta = low.personalize(train(low, federation, 2), federation.everyone())[0]
    p = torch.func.vmap(low.lift.p)(torch.eye(9)).T
    moved = theta - low.lift.theta0
    inside = p @ torch.linalg.lstsq(p, moved[:, None]).solution[:, 0]
    torch.testing.assert_close(inside, moved, atol=1e-6, rtol=0)
    assert float(moved.norm()) > 1e-2


def test_ld_fedavg_by_secure_sums() -> None:
    """Of equally large clients: a masked mean has no weights."""
    clients = clients_of([8] * 4)
    plain = LDFedAvg(mlp(), cohort=4, local=FULL_STEP, dimension=9)
    masked = replace(plain, secure=True, clip=100.0)
    federation = simulate(clients)
    after = train(masked, federation, 1)
    torch.testing.assert_close(after.v, train(plain, simulate(clients), 1).v)
    assert {(row["array"], row["seen_as"]) for row in federation.transcript.rows()} == {("update", "secure mean")}


@pytest.mark.parametrize(("scaled", "factor"), [(True, (6 * 8 + 8 + 8 * 3 + 3) / 9), (False, 1.0)])
def test_its_step_on_v_is_a_gradient_step_d_over_k_times_as_long_unless_as_printed(scaled: bool, factor: float) -> None:
    clients, local = clients_of([8]), LocalSGD(steps=1, batch=None, lr=0.01)
    method = LDFedAvg(mlp(), cohort=1, local=local, dimension=9, scale_rate=scaled)
    x, y = clients.rows(0)
    p = torch.func.vmap(method.lift.p)(torch.eye(9)).T  # [d, k]
    theta = method.lift.theta0.clone().requires_grad_(True)
    F.cross_entropy(method.model(theta, x), y).backward()
    wanted = -0.01 * factor * p.T @ theta.grad
    torch.testing.assert_close(train(method, simulate(clients), 1).v, wanted, atol=1e-7, rtol=1e-5)
