"""PeFLL and ODPFL-HN under client-level privacy: the noisy mean is that of the clients' own clipped joint gradients."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.methods.small import MODEL, PROBLEM, clients_of
from unalike import Clients, LocalSGD, simulate, train
from unalike.core.method import State
from unalike.learn.server import ServerOptimizer
from unalike.methods.fedavg import FedAvg
from unalike.methods.odpfl import ODPFL
from unalike.methods.pefll import PeFLL
from unalike.privacy import Gaussian

HARDLY = Gaussian(1e-9)
STEP = LocalSGD(steps=1, batch=None, lr=1.0)
Describe = Callable[[Tensor, Tensor, Tensor], Tensor]  # η, x, y


def pefll(**changes: object) -> tuple[PeFLL, str, Describe]:
    method = PeFLL(
        PROBLEM, cohort=1.0, local=STEP, server=ServerOptimizer("sgd", lr=0.3), descriptor=5, describe_rows=None,
        lambda_h=0.02, lambda_v=0.03, labels="linear", clip=100.0, noise=HARDLY, rank=4, **changes,  # type: ignore[arg-type]
    )  # fmt: skip
    return method, "embedding", lambda eta, x, y: method.embedding(eta, x, y).mean(0)


def odpfl(**changes: object) -> tuple[ODPFL, str, Describe]:
    method = ODPFL(
        PROBLEM, cohort=1.0, local=STEP, server=ServerOptimizer("sgd", lr=0.3), descriptor=5,
        lambda_h=0.02, lambda_g=0.03, clip=100.0, noise=HARDLY, rank=4, **changes,  # type: ignore[arg-type]
    )  # fmt: skip
    return method, "encoder", lambda eta, x, y: method.network(eta, x, torch.ones(len(x), dtype=torch.bool))


def gradients(method: PeFLL | ODPFL, state: State, name: str, describe: Describe, clients: Clients) -> Tensor:
    """[C, p_h + p] of each client's loss at its own model, by autograd through both networks at once."""
    rows = []
    for i in range(len(clients)):
        x, y = clients.rows(i)
        assert y is not None

        def loss(eta_h: Tensor, eta: Tensor, x: Tensor = x, y: Tensor = y) -> Tensor:
            p = method.hypernet.tensors(eta_h)
            z = (describe(eta, x, y) - state.shift) * state.scale
            for layer in range(len([one for one in p if one.startswith("trunk") and one.endswith("weight")])):
                z = (p[f"trunk.{layer}.weight"] @ z + p[f"trunk.{layer}.bias"]).relu()
            theta = p["head.weight"] @ (p["narrow.weight"] @ z) + p["head.bias"]
            return F.cross_entropy(MODEL(theta, x), y)

        rows.append(torch.cat(torch.func.grad(loss, (0, 1))(state.hypernet, state[name])))
    return torch.stack(rows)


def begun(method: PeFLL | ODPFL) -> State:
    return method.start(0).replace(shift=torch.full((5,), 0.1), scale=torch.tensor(1.7))


@pytest.mark.parametrize("make", [pefll, odpfl])
@pytest.mark.parametrize("block", [1, 3, 4])
def test_a_private_round_is_a_step_along_the_mean_of_clipped_joint_gradients(
    make: Callable[..., tuple[PeFLL | ODPFL, str, Describe]], block: int
) -> None:
    clients = clients_of((7, 12, 5, 9))
    method, name, describe = make()
    state = begun(method)
    each = gradients(method, state, name, describe, clients)
    lengths = torch.linalg.vector_norm(each, dim=1)
    for bound in (100.0, float(lengths.median()) * 1.01):  # nobody is clipped; two are
        clipped = each * (bound / lengths).clamp(max=1)[:, None]
        g_h, g = clipped.mean(0).split([state.hypernet.numel(), state[name].numel()])
        federation = simulate(clients, block=block)
        after = train(replace(method, clip=bound), federation, 1, state)
        torch.testing.assert_close(after.hypernet, state.hypernet * (1 - 0.6 * 0.02) - 0.3 * g_h, atol=1e-5, rtol=0)
        torch.testing.assert_close(after[name], state[name] * (1 - 0.6 * 0.03) - 0.3 * g, atol=1e-5, rtol=0)
        assert {row["array"] for row in federation.transcript.rows()} == {"gradient"}  # no descriptor, update or loss
        assert "loss" not in federation.metrics and not len(after["remembered.ids"])
    assert float(lengths.max()) > 1.1 * float(lengths.median()) > 0.01


@pytest.mark.parametrize("make", [pefll, odpfl])
def test_the_first_private_round_normalises_by_noisy_moments_and_does_not_train(
    make: Callable[..., tuple[PeFLL | ODPFL, str, Describe]],
) -> None:
    clients = clients_of((7, 12, 5, 9))
    method, name, describe = make()
    start = method.start(0)
    v = torch.stack([describe(start[name], *clients.rows(i)) for i in range(4)])  # type: ignore[arg-type]
    v = v / torch.linalg.vector_norm(v, dim=1, keepdim=True).clamp(min=1)
    federation = simulate(clients)
    after = train(method, federation, 1, start)
    torch.testing.assert_close(after.shift, v.mean(0), atol=1e-5, rtol=0)
    spread = max(0.02, float((v - v.mean(0)).square().mean().sqrt()))
    assert float(after.scale) == pytest.approx(1 / spread, rel=1e-2)
    assert torch.equal(after.hypernet, start.hypernet) and torch.equal(after[name], start[name])
    assert [(row["array"], row["seen_as"]) for row in federation.transcript.rows()] == [("moments", "mean")]
    noisy = replace(method, noise=Gaussian(2.0))
    found = [train(noisy, simulate(clients, seed=seed), 1, start).shift - v.mean(0) for seed in range(200)]
    assert float(torch.stack(found).std()) == pytest.approx(math.sqrt(2) * 2.0 / 4, rel=0.1)  # v is 1/√2 of the array


def test_every_round_is_charged_once_for_a_poisson_cohort() -> None:
    method = replace(pefll()[0], cohort=0.5, noise=Gaussian(1.3))
    federation = simulate(clients_of((8,) * 12), seed=2)
    train(method, federation, 3)
    assert federation.ledger.unit == "client"
    assert federation.ledger.epsilon(1e-2) == pytest.approx(epsilon_of_fedavg(3), rel=1e-6)


def epsilon_of_fedavg(rounds: int) -> float:
    """The ε of as many noisy means of FedAvg."""
    federation = simulate(clients_of((8,) * 12), seed=2)
    train(FedAvg(MODEL, cohort=0.5, local=STEP, clip=1.0, noise=Gaussian(1.3)), federation, rounds)
    return federation.ledger.epsilon(1e-2)


def test_noise_and_two_phases_do_not_go_together() -> None:
    with pytest.raises(ValueError, match="in two_phase the server learns a descriptor of each client"):
        odpfl(two_phase=3)
