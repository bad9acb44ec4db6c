"""Local training, step by step."""

import itertools

import torch

from tests.core.helpers import clients, linear, population
from tests.methods.small import pooled_step
from unalike import LocalSGD, simulate, train
from unalike.methods.local import Local
from unalike.runs.simulate import gather_models

SIZES = [3, 10, 1, 6]


def test_local_models_go_on_from_round_to_round_and_nothing_leaves_a_client() -> None:
    method = Local(linear(), LocalSGD(epochs=1, batch=None, lr=0.5))
    federation = simulate(clients(SIZES))
    state = train(method, federation, 3)
    cohort = federation.aside().everyone()
    personal = gather_models(cohort, method.personalize(state, cohort))
    expected = method.first
    for _ in range(3):
        expected = pooled_step(expected, [1], 0.5)
    assert torch.allclose(personal[1], expected, atol=1e-5)
    assert federation.traffic.total_up == federation.traffic.total_down == 0 and not federation.transcript.entries
    assert federation.ledger.epsilon(1e-6) == 0


def test_a_newcomer_and_a_client_that_missed_rounds_make_up_for_them() -> None:
    method, asks = Local(linear(), LocalSGD(epochs=1, batch=None, lr=0.5)), itertools.count()
    store = clients(SIZES)
    federation = simulate(population(store, store, seen=3), drop=lambda client, _: client == 1 and next(asks) < 2)
    state = train(method, federation, 4)
    assert dict(zip(state.ids.tolist(), state.calls.tolist(), strict=True)) == {0: 4, 1: 2, 2: 4}
    with federation.aside(federation.runtime.roster) as aside:
        cohort = aside.everyone()
        personal = gather_models(cohort, method.personalize(state, cohort))
    for client in range(4):  # the last one is the newcomer
        expected = method.first
        for _ in range(4):
            expected = pooled_step(expected, [client], 0.5)
        assert torch.allclose(personal[client], expected, atol=1e-5)
