"""FedRep against FedAvg, local training, and its two steps written out."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from tests.methods import written
from tests.methods.small import LOCAL, MODEL, RATES, SIZES, assert_equal, clients_of, cohorts_of, models, rows_of
from unalike import Schedule, ServerOptimizer, simulate
from unalike.core.method import train
from unalike.learn.local import LocalSGD
from unalike.methods.fedavg import FedAvg
from unalike.methods.fedrep import FedRep
from unalike.methods.local import Local
from unalike.runs.simulate import gather_models


def test_fedrep_with_an_empty_head_is_fedavg_and_with_an_empty_body_local() -> None:
    clients = clients_of()
    averaging = FedRep(MODEL, 3, LOCAL, head=0, local_head=LocalSGD(steps=0))
    state, wanted = (train(one, simulate(clients), 2) for one in (averaging, FedAvg(MODEL, 3, LOCAL)))
    torch.testing.assert_close(state.body, wanted.theta, atol=1e-6, rtol=0)
    alone, local = FedRep(MODEL, 1.0, LOCAL, head=4, local_head=LOCAL), Local(MODEL, LOCAL)
    found = []
    for method in (alone, local):
        federation = simulate(clients)
        state = train(method, federation, 2)  # type: ignore[arg-type]
        cohort = federation.everyone()
        found.append(gather_models(cohort, method.personalize(state, cohort)))
    torch.testing.assert_close(found[0], found[1], atol=1e-6, rtol=0)


def test_fedreps_head_is_trained_first_and_stays() -> None:
    clients = clients_of((5,))
    step = LocalSGD(steps=1, batch=None, lr=0.5)
    method = FedRep(MODEL, 1, step, local_head=step)
    federation = simulate(clients)
    state = method.start(1)
    after = train(method, federation, 1, state)
    x, y = clients.rows(0)
    body, head = state.body.clone().requires_grad_(), method.first_head.clone().requires_grad_()
    (g,) = torch.autograd.grad(F.cross_entropy(MODEL(torch.cat([body, head]), x), y), head)
    new = (head - 0.5 * g).detach()
    (g,) = torch.autograd.grad(F.cross_entropy(MODEL(torch.cat([body, new]), x), y), body)
    torch.testing.assert_close(after.body, state.body - 0.5 * g, atol=1e-6, rtol=0)
    cohort = federation.everyone()
    torch.testing.assert_close(
        gather_models(cohort, method.personalize(after, cohort))[0], torch.cat([after.body, new])
    )
    sent = {entry.array for entry in federation.transcript.entries}
    assert sent == {"update", "loss"}


def test_fedreps_newcomer_trains_a_head_on_the_final_body() -> None:
    clients = clients_of((5,))
    method = FedRep(MODEL, 1, newcomer=LocalSGD(steps=1, batch=None, lr=0.5))
    state = method.start(1)
    x, y = clients.rows(0)
    head = method.first_head.clone().requires_grad_()
    (g,) = torch.autograd.grad(F.cross_entropy(MODEL(torch.cat([state.body, head]), x), y), head)
    torch.testing.assert_close(models(method, state, clients)[0], torch.cat([state.body, (head - 0.5 * g).detach()]))


def test_wrong_settings_are_refused() -> None:
    with pytest.raises(ValueError, match="expected 0 to 4"):
        FedRep(MODEL, head=5)


def test_rounds_are_those_written_out_in_numpy() -> None:
    """Heads first and kept, bodies averaged; an absentee keeps its head, a client that was never asked trains one."""
    head_lr, body_lr, new_lr, lr, cut = 0.3, 0.5, 0.2, 0.7, 6 * 8 + 8
    clients = clients_of(SIZES)
    method = FedRep(
        MODEL,
        1,
        LocalSGD(steps=1, batch=None, lr=body_lr),
        LocalSGD(steps=2, batch=None, lr=head_lr),
        LocalSGD(steps=3, batch=None, lr=new_lr),
        Schedule("1/t"),
        agreed_seed=4,
        server=ServerOptimizer(lr=lr),
    )
    federation, rows, rounds = simulate(clients), rows_of(clients), cohorts_of(clients, 3, 1)
    assert len({i for cohort in rounds for i in cohort}) == 2  # one is asked twice or more, one never
    state = train(method, federation, 3)
    body, first = method.start(0).body.double().numpy(), MODEL.init(4).double().numpy()[cut:]
    heads: dict[int, np.ndarray] = {}

    def slope(body: np.ndarray, head: np.ndarray, i: int) -> np.ndarray:
        return written.gradient(np.concatenate([body, head]), *rows[i])

    for rate, (i,) in zip(RATES, rounds, strict=False):
        head = heads.get(i, first)
        for _ in range(2):
            head = head - head_lr * rate * slope(body, head, i)[cut:]
        heads[i] = head
        body = body - lr * body_lr * rate * slope(body, head, i)[:cut]
    assert_equal(state.body, body)
    with federation.aside() as aside:
        cohort = aside.everyone()
        found = gather_models(cohort, method.personalize(state, cohort))
    for i in range(3):
        head = heads.get(i, first)
        for _ in range(0 if i in heads else 3):
            head = head - new_lr * slope(body, head, i)[cut:]
        assert_equal(found[i], np.concatenate([body, head]))
