"""pFedHN: a round is a gradient step of h and of the cohort's descriptors; newcomers have theirs optimised."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from motley.federation import Federation
from motley.learn.local import LocalSGD
from motley.learn.server import ServerOptimizer
from motley.method import train
from motley.methods.pfedhn import PFedHN
from motley.runtime.simulate import Simulator
from tests.methods.test_pefll import FULL_STEP, clients_of, problem_of


def test_a_round_is_one_joint_gradient_step() -> None:
    clients, problem = clients_of((6,)), problem_of((6,))
    method = PFedHN(
        problem, cohort=4, local=FULL_STEP, server=ServerOptimizer("sgd", lr=0.3), descriptor=5, descriptor_lr=0.2,
        clip=1e9, lambda_h=0.02,
    )  # fmt: skip
    state = method.start(0)

    def objective(eta: Tensor, v: Tensor) -> Tensor:
        total = 0.02 * eta.square().sum()
        for i, theta in enumerate(method.hypernet(eta, v)):
            x, y = clients.rows(i)
            assert y is not None
            total = total + F.cross_entropy(problem.model(theta, x), y) / 4
        return total

    g_h, g_v = torch.func.grad(objective, (0, 1))(state.hypernet, state.descriptors)
    after = method.round(state, Federation(clients, runtime=Simulator(block=3)).begin_round(1))
    torch.testing.assert_close(after.hypernet, state.hypernet - 0.3 * g_h, atol=1e-6, rtol=0)
    torch.testing.assert_close(after.descriptors, state.descriptors - 0.2 * g_v, atol=1e-6, rtol=0)
    assert float(g_v.abs().max()) > 1e-4


def test_only_the_cohorts_descriptors_move() -> None:
    method = PFedHN(problem_of((6,)), cohort=2, local=FULL_STEP, server=ServerOptimizer("sgd", lr=0.1), descriptor=3)
    before = method.start(0)
    after = method.round(before, Federation(clients_of((6,))).begin_round(1))
    moved = (after.descriptors != before.descriptors).any(1)
    assert int(moved.sum()) == 2


def test_clients_are_found_by_their_id_wherever_they_stand() -> None:
    clients = clients_of((6,))
    method = PFedHN(problem_of((6,)), cohort=2, local=FULL_STEP, descriptor=3)
    state = train(method, Federation(clients), 2)
    everyone = method.personalize(state, Federation(clients).everyone())
    some = method.personalize(state, Federation(clients.select([3, 1])).everyone())
    torch.testing.assert_close(some, everyone[[3, 1]])


def test_a_newcomers_descriptor_is_optimised_and_the_hypernetwork_is_not() -> None:
    clients = clients_of((6,), sizes=[20] * 6)
    problem = problem_of((6,), clients=4)
    local = LocalSGD(steps=5, lr=0.1)
    method = PFedHN(problem, cohort=4, local=local, descriptor=8, newcomer_rounds=15)
    idle = PFedHN(problem, cohort=4, local=local, descriptor=8, newcomer_rounds=0)
    state = train(method, Federation(clients.select(range(4))), 10)
    newcomers = Federation(clients.select([4, 5]))

    def loss(theta: Tensor) -> float:
        total = 0.0
        for row, client in enumerate((4, 5)):
            x, y = clients.rows(client)
            assert y is not None
            total += float(F.cross_entropy(problem.model(theta[row], x), y))
        return total

    assert loss(method.personalize(state, newcomers.everyone())) < loss(idle.personalize(state, newcomers.everyone()))
    other_seed = Federation(clients.select([4, 5]), seed=1)
    assert not torch.equal(
        idle.descriptors(state, other_seed.everyone()), idle.descriptors(state, newcomers.everyone())
    )
    asked = {row["task"] for row in newcomers.transcript.rows()}
    assert asked == {"PFedHN.fit"}


def test_a_federation_of_another_size_is_refused() -> None:
    method = PFedHN(problem_of((6,), clients=9), cohort=2, local=FULL_STEP, descriptor=3)
    with pytest.raises(ValueError, match="built for 9 training clients, but the federation has 4"):
        train(method, Federation(clients_of((6,))), 1)
