"""Point-level privacy of methods whose clients train a model of their own: the steps are their steps, and all of them
are charged.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.methods.small import MODEL, clients_of
from unalike import simulate
from unalike.core.method import train
from unalike.learn.local import LocalSGD
from unalike.methods import METHODS as NAMED
from unalike.methods.adaped import AdaPeD
from unalike.methods.fedavg import FedAvg
from unalike.methods.fedrep import FedRep
from unalike.methods.pfedme import PFedMe
from unalike.privacy import dpsgd
from unalike.privacy.dpsgd import PointPrivacy, Steps

WHOLE = LocalSGD(steps=3, batch=None, lr=0.3)
SILENT = replace(WHOLE, private=PointPrivacy(1e3, 1e-10))  # nothing is clipped, and the noise is too small to see
Z, BATCH = 1.5, 4


def test_without_clip_and_noise_fedrep_and_pfedme_are_themselves() -> None:
    clients = clients_of((8, 5, 6))
    pairs: list[tuple[Any, str]] = [
        (FedRep(MODEL, 1.0, WHOLE, local_head=replace(WHOLE, steps=2)), "body"),
        (PFedMe(MODEL, 1.0, replace(WHOLE, lr=0.05), lambda_=3.0, inner_steps=4, inner_lr=0.2), "w"),
    ]
    for method, name in pairs:
        private = replace(method, local=replace(SILENT, lr=method.local.lr))
        found, plain = (train(one, simulate(clients), 3)[name] for one in (private, method))
        torch.testing.assert_close(found, plain, atol=1e-5, rtol=1e-4)
        assert float((plain - method.start(0)[name]).norm()) > 0.1


def test_adaped_moves_theta_mu_and_psi_at_once() -> None:
    clients = clients_of((7,))
    method = AdaPeD(MODEL, 1.0, SILENT, mu_lr=0.2, psi_lr=0.1, psi=2.0)
    state = train(method, simulate(clients), 2)
    x, y = clients.rows(0)
    assert y is not None
    theta, mu, psi = method.first, method.first, torch.tensor(2.0)

    def loss(theta: Tensor, mu: Tensor, psi: Tensor) -> Tensor:
        student, teacher = F.log_softmax(MODEL(theta, x), 1), F.log_softmax(MODEL(mu, x), 1)
        apart = F.kl_div(student, teacher, reduction="batchmean", log_target=True)
        return F.cross_entropy(MODEL(theta, x), y) + 0.5 * torch.log(2 * psi) + apart / (2 * psi)

    for number in (1, 2):
        rate = float(method.schedule(number))
        for _ in range(3):
            leaves = [one.detach().requires_grad_() for one in (theta, mu, psi)]
            moves = torch.autograd.grad(loss(*leaves), leaves)
            theta, mu, psi = (
                one - rate * lr * g for one, lr, g in zip((theta, mu, psi), (0.3, 0.2, 0.1), moves, strict=True)
            )
    torch.testing.assert_close(state.mu, mu, atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(state.psi, psi, atol=1e-5, rtol=1e-4)
    assert float((mu - method.first).norm()) > 0.01


NOISY = LocalSGD(steps=2, batch=BATCH, lr=0.1, private=PointPrivacy(1.0, Z))
EPOCHS = replace(NOISY, steps=None, epochs=1)
METHODS: dict[str, tuple[Any, int]] = {  # and its steps of DP-SGD in a round of a client with 8 rows
    "fine-tuning": (FedAvg(MODEL, 1.0, NOISY, finetune=LocalSGD(steps=3)), 2),
    "fedrep": (FedRep(MODEL, 1.0, NOISY, local_head=LocalSGD(steps=5)), 7),
    "fedrep, epochs": (FedRep(MODEL, 1.0, EPOCHS, local_head=LocalSGD(epochs=2, batch=BATCH)), 6),
    "pfedme": (PFedMe(MODEL, 1.0, NOISY, inner_steps=3), 6),
    "adaped": (AdaPeD(MODEL, 1.0, NOISY), 2),
}


@pytest.mark.parametrize("name", METHODS)
def test_every_step_is_charged(name: str) -> None:
    method, steps = METHODS[name]
    federation = simulate(clients_of((8, 8)), noise="system")
    train(method, federation, 3)
    wanted = dpsgd.epsilon(Z, Steps(BATCH / 8, 3 * steps), delta=1e-3)
    assert federation.ledger.epsilon(1e-3) == pytest.approx(wanted, rel=1e-6)
    assert federation.ledger.unit == "point"
    assert {row.array for row in federation.transcript.entries} == {"update"}


@pytest.mark.parametrize("name", METHODS)
def test_what_was_trained_without_noise_is_in_no_later_round(name: str) -> None:
    """A newcomer's own model stays with it and is not protected, so training must not begin with it."""
    method = METHODS[name][0]
    ends = []
    for joins in (False, True):
        federation = simulate(clients_of((8, 8)))
        state = method.start(0)
        with federation.train_in(1):
            federation.sample(1.0)  # so that both runs draw alike
        if joins:
            method.personalize(state, federation.everyone())
        with federation.train_in(2):
            state = method.round(state, federation)
        ends.append(next(iter(state.values())))
    torch.testing.assert_close(ends[0], ends[1], atol=0, rtol=0)


def test_what_could_not_be_charged_is_refused() -> None:
    with pytest.raises(ValueError, match="steps or epochs in both"):
        FedRep(MODEL, 1.0, NOISY, local_head=LocalSGD(epochs=5))
    with pytest.raises(ValueError, match="without momentum"):
        PFedMe(MODEL, 1.0, replace(NOISY, momentum=0.5))
    with pytest.raises(ValueError, match="charges nobody"):
        AdaPeD(MODEL, 1.0, NOISY, train_unsampled=True)


@pytest.mark.parametrize("name", ["fedavg", "fedrep", "pfedme", "adaped", "robust-hdp", "rdpcfl", "splitting"])
def test_a_client_finds_its_own_noise_in_every_method_that_protects_points(name: str) -> None:
    """Two clients declare a small and a large ε: the first has more noise, whatever the method."""
    private = PointPrivacy(1.0, rounds=3, per_client=True)
    local = LocalSGD(steps=2, batch=BATCH, private=private) if name == "pfedme" else replace(EPOCHS, private=private)
    method = NAMED[name].cls(MODEL, local=local)
    budgets = {"epsilon": torch.tensor([0.5, 8.0]).double(), "delta": torch.full((2,), 1e-3).double()}
    roster = replace(clients_of((9, 9)).roster(), **budgets)
    noise = method.fit.derive_inputs(roster, torch.arange(2))["noise"]
    assert noise.shape == (2,) and float(noise[0]) > 2 * float(noise[1]) > 0
