"""pFedHN: a round is a gradient step of h and of the cohort's descriptors; newcomers have theirs optimised."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.methods.test_pefll import FULL_STEP, clients_of, problem_of
from unalike import simulate
from unalike.core.method import train
from unalike.learn.local import LocalSGD
from unalike.learn.server import ServerOptimizer
from unalike.methods.pfedhn import PFedHN

KINDS: tuple[Literal["sgd", "momentum", "adam", "yogi"], ...] = ("sgd", "momentum", "adam", "yogi")


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
    after = train(method, simulate(clients, block=3), 1, state)
    torch.testing.assert_close(after.hypernet, state.hypernet - 0.3 * g_h, atol=1e-6, rtol=0)
    torch.testing.assert_close(after.descriptors, state.descriptors - 0.2 * g_v, atol=1e-6, rtol=0)
    assert float(g_v.abs().max()) > 1e-4


@pytest.mark.parametrize("failure", ["silent", "not finite"])
def test_the_gradient_is_that_of_the_mean_over_the_clients_that_answered(failure: str) -> None:
    clients, problem = clients_of((6,)), problem_of((6,))
    method = PFedHN(
        problem, cohort=4, local=FULL_STEP, server=ServerOptimizer("sgd", lr=0.3), descriptor=5, descriptor_lr=0.2,
        clip=1e9, lambda_h=0,
    )  # fmt: skip
    state = method.start(0)

    def objective(eta: Tensor, v: Tensor) -> Tensor:
        """Of clients 0, 1 and 3."""
        total = torch.zeros(())
        for i in (0, 1, 3):
            x, y = clients.rows(i)
            assert y is not None
            total = total + F.cross_entropy(problem.model(method.hypernet(eta, v[i : i + 1])[0], x), y) / 3
        return total

    loss = objective(state.hypernet, state.descriptors)
    g_h, g_v = torch.func.grad(objective, (0, 1))(state.hypernet, state.descriptors)
    poisoned = clients.x.clone()
    poisoned[int(clients.start[2])] = torch.inf
    federation = simulate(
        clients if failure == "silent" else replace(clients, x=poisoned),
        block=3,
        drop=lambda client, _: failure == "silent" and client == 2,
    )
    after = train(method, federation, 1, state)
    assert [(failure.client, failure.task) for failure in federation.failures] == [("2", "PFedHN.fit")]
    torch.testing.assert_close(after.hypernet, state.hypernet - 0.3 * g_h, atol=1e-6, rtol=0)
    torch.testing.assert_close(after.descriptors, state.descriptors - 0.2 * g_v, atol=1e-6, rtol=0)
    assert torch.equal(after.descriptors[2], state.descriptors[2]) and float(g_h.abs().max()) > 1e-4
    assert federation.metrics["loss"] == pytest.approx(float(loss), rel=1e-5)


@pytest.mark.parametrize("server", [PFedHN.server, *(ServerOptimizer(kind, lr=0.1) for kind in KINDS)])
def test_only_the_descriptors_of_clients_that_answer_move(server: ServerOptimizer) -> None:
    """Also in the second round, when an absent client's row has momentum from the first."""
    clients = clients_of((6,))
    method = PFedHN(problem_of((6,)), cohort=4, local=FULL_STEP, server=server, descriptor=3)
    before = train(method, simulate(clients), 1)
    without_2 = simulate(clients, drop=lambda client, _: client == 2, round=1)
    after = train(method, without_2, 1, before)
    table = [name for name in before if "descriptors" in name and before[name].ndim == 2]
    for name in table:
        assert (after[name] != before[name]).any(1).tolist() == [True, True, False, True], name
    later = train(replace(method, cohort=2), simulate(clients, round=2), 1, after)
    for name in table:
        assert int((later[name] != after[name]).any(1).sum()) == 2, name


def test_clients_are_found_by_their_id_wherever_they_stand() -> None:
    clients = clients_of((6,))
    method = PFedHN(problem_of((6,)), cohort=2, local=FULL_STEP, descriptor=3)
    state = train(method, simulate(clients), 2)
    everyone = method.personalize(state, simulate(clients).everyone())
    some = method.personalize(state, simulate(clients.select([3, 1])).everyone())
    torch.testing.assert_close(some, everyone[[3, 1]])


def test_a_newcomers_descriptor_is_optimised_and_the_hypernetwork_is_not() -> None:
    clients = clients_of((6,), sizes=[20] * 6)
    problem = problem_of((6,), clients=4)
    local = LocalSGD(steps=5, lr=0.1)
    method = PFedHN(problem, cohort=4, local=local, descriptor=8, newcomer_rounds=15)
    idle = PFedHN(problem, cohort=4, local=local, descriptor=8, newcomer_rounds=0)
    state = train(method, simulate(clients.select(range(4))), 10)
    newcomers = simulate(clients.select([4, 5]))

    def loss(theta: Tensor) -> float:
        total = 0.0
        for row, client in enumerate((4, 5)):
            x, y = clients.rows(client)
            assert y is not None
            total += float(F.cross_entropy(problem.model(theta[row], x), y))
        return total

    assert loss(method.personalize(state, newcomers.everyone())) < loss(idle.personalize(state, newcomers.everyone()))
    other_seed = simulate(clients.select([4, 5]), seed=1)
    assert not torch.equal(
        idle.descriptors(state, other_seed.everyone()), idle.descriptors(state, newcomers.everyone())
    )
    asked = {row["task"] for row in newcomers.transcript.rows()}
    assert asked == {"PFedHN.fit"}


def test_a_federation_of_another_size_is_refused() -> None:
    method = PFedHN(problem_of((6,), clients=9), cohort=2, local=FULL_STEP, descriptor=3)
    with pytest.raises(ValueError, match="built for 9 training clients, but the federation has 4"):
        train(method, simulate(clients_of((6,))), 1)


def test_a_newcomers_descriptor_moves_by_its_own_rate() -> None:
    """Adam's first step is the rate in every coordinate, so rates of .1 and .3 end .2 apart."""
    clients = clients_of((6,))
    method = PFedHN(problem_of((6,)), local=FULL_STEP, descriptor=3, newcomer_rounds=1, newcomer_lr=0.1)
    state = method.start(0)  # nobody is known yet
    found = [one.descriptors(state, simulate(clients).everyone()) for one in (method, replace(method, newcomer_lr=0.3))]
    torch.testing.assert_close((found[0] - found[1]).abs(), torch.full((4, 3), 0.2), atol=1e-3, rtol=0)
