"""MR-MTL against its update written out."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from tests.methods import small, written
from tests.methods.small import RATES, SIZES, assert_equal, clients_of, cohorts_of, normal, rows_of, shifted
from unalike import Clients, LocalSGD, Model, Schedule, simulate, train
from unalike.methods.mr_mtl import MRMTL
from unalike.networks.architectures import build
from unalike.runs.simulate import gather_models

MODEL = Model(build("logistic", (5,), 2))


def test_mr_mtl_is_its_update_written_out() -> None:
    federation = shifted([6, 9], [0, 1])
    x = normal(15, 5, seed=3).float()
    y = ((x[:, 0] > 0).long() + torch.tensor([0] * 6 + [1] * 9)) % 2
    local = LocalSGD(steps=2, epochs=None, batch=None, lr=0.3)
    state = train(MRMTL(MODEL, local=local, strength=0.7), federation, 2)
    mean = MODEL.init(1)
    own = [mean, mean]
    for _ in range(2):
        after = []
        for w, rows in zip(own, (slice(0, 6), slice(6, 15)), strict=True):
            for _ in range(2):
                w = w.detach().requires_grad_()
                loss = torch.nn.functional.cross_entropy(MODEL(w, x[rows]), y[rows])
                (gradient,) = torch.autograd.grad(loss, w)
                w = w.detach() - 0.3 * (gradient + 0.7 * (w.detach() - mean))
            after.append(w)
        own, mean = after, torch.stack(after).mean(0)
    assert torch.allclose(state.mean, mean, atol=1e-6)
    with federation.aside() as aside:
        cohort = aside.everyone()
        assert torch.allclose(
            gather_models(cohort, MRMTL(MODEL).personalize(state, cohort)), torch.stack(own), atol=1e-6
        )


@pytest.mark.long
def test_it_ends_at_the_multi_task_optimum_of_a_known_covariance() -> None:
    """Ozkara et al. §3.6: Σ_i f_i(θ_i) + ½ tr(Θᵀ Σ⁻¹ Θ), whose Σ makes all pairs of clients equally close.

    Least squares on clients of unlike sizes; the precision Σ⁻¹ = λ(I − 11ᵀ/n) is put into one linear system.
    """
    random = torch.Generator().manual_seed(4)
    sizes, strength = [5, 9, 7], 0.5
    x, y = torch.randn(21, 3, generator=random), torch.randn(21, generator=random)
    store = Clients.from_sizes(x, y, torch.tensor(sizes))
    local = LocalSGD(steps=1, batch=None, lr=0.2)
    method = MRMTL(Model(nn.Linear(3, 1)), 1.0, local, strength=strength)
    federation = simulate(store)
    state = train(method, federation, 800)
    everyone = federation.everyone()
    found = gather_models(everyone, method.personalize(state, everyone))
    precision = strength * (torch.eye(3) - torch.ones(3, 3) / 3)
    system, right = torch.kron(precision, torch.eye(4)), torch.zeros(12)
    for i, n in enumerate(sizes):
        rows, targets = store.rows(i)
        assert targets is not None
        inputs = torch.cat([rows, torch.ones(n, 1)], 1)  # weight and bias
        system[4 * i : 4 * i + 4, 4 * i : 4 * i + 4] += inputs.T @ inputs / n
        right[4 * i : 4 * i + 4] = inputs.T @ targets / n
    wanted = torch.linalg.solve(system, right).reshape(3, 4)
    torch.testing.assert_close(found, wanted, atol=1e-4, rtol=1e-3)
    assert float((wanted[0] - wanted[1]).norm()) > 0.1


def test_an_absentee_keeps_its_model_and_a_newcomer_has_the_mean() -> None:
    """Written out in NumPy: one of three clients a round, whose change alone moves w̄."""
    lr, strength = 0.4, 0.6
    clients = clients_of(SIZES)
    method = MRMTL(small.MODEL, 1, LocalSGD(steps=2, batch=None, lr=lr), strength, Schedule("1/t"))
    federation, rows, rounds = simulate(clients), rows_of(clients), cohorts_of(clients, 3, 1)
    state, mean = train(method, federation, 3), method.start(0).mean.double().numpy()
    own: dict[int, np.ndarray] = {}
    for rate, (i,) in zip(RATES, rounds, strict=False):
        w = own.get(i, mean)
        for _ in range(2):
            w = w - lr * rate * (written.gradient(w, *rows[i]) + strength * (w - mean))
        own[i] = w
        mean = w
    assert 0 < len(own) < 3
    assert_equal(state.mean, mean)
    with federation.aside() as aside:
        cohort = aside.everyone()
        found = gather_models(cohort, method.personalize(state, cohort))
    for i in range(3):
        assert_equal(found[i], own.get(i, mean))
