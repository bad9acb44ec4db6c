"""Mistakes of whoever writes a method that would make its \u03b5 untrue; each is refused with advice."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn

from tests.core.helpers import clients
from unalike import Client, Each, Federation, Model, State, send, simulate, task, train
from unalike.core.method import next_state
from unalike.core.release import Release
from unalike.core.task import Sent
from unalike.learn.ghost import GhostNorms
from unalike.learn.local import LocalSGD
from unalike.methods.fedavg import FedAvg
from unalike.privacy.dpsgd import PointPrivacy

NOISY = LocalSGD(steps=1, batch=2, private=PointPrivacy(clip=1.0, noise_multiplier=1.0))


@dataclass(frozen=True)
class Peeks(FedAvg):
    """Its round measures what its clients would send without noise."""

    @task
    def rows(self, client: Client) -> Sent:
        return send(mean=client.mean(client.x))

    def round(self, state: State, federation: Federation) -> State:
        with federation.aside() as aside:
            means = aside.everyone().ask(self.rows)["mean"]
        return state.replace(theta=state.theta + means.sum())


def test_a_round_does_not_measure() -> None:
    federation, method = simulate(clients([4] * 3)), Peeks(Model(nn.Linear(3, 2)), cohort=1.0)
    with pytest.raises(RuntimeError, match="a method's round must not use it"):
        train(method, federation, 1)
    with federation.aside() as aside:  # and between rounds it may
        assert len(aside.everyone().ask(method.rows)["mean"]) == 3
    plain = FedAvg(method.model, cohort=1.0)
    next_state(plain, plain.start(0), federation)
    assert federation.round == 2 and not federation.training


@dataclass(frozen=True)
class SendsRows:
    """Says that DP-SGD has made private what it sends, and sends its rows."""

    local: LocalSGD = NOISY

    @task
    def fit(self, client: Client, scale: Tensor) -> Sent:
        return send(rows=scale * client.x)

    @fit.into
    def into(self) -> list[Release]:
        return [Each("rows", cost=self.local.cost)]


def test_rows_are_not_sent_as_if_dp_sgd_had_made_them() -> None:
    federation = simulate(clients([4] * 3))
    with pytest.raises(ValueError, match="sends 'rows' with a row for each of the client's rows"):
        federation.everyone().ask(SendsRows().fit, scale=1.0)
    assert not federation.ledger.state().get("charges") and federation.traffic.total_up == 0


@dataclass(frozen=True)
class SendsSomeRows(SendsRows):
    """The same with the first two rows, an array of one shape."""

    @task
    def fit(self, client: Client, scale: Tensor) -> Sent:
        return send(rows=scale * client.x[:2])

    @fit.into
    def into(self) -> list[Release]:
        return [Each("rows", cost=self.local.cost)]


def test_an_array_is_not_sent_as_private_by_a_task_that_draws_no_noise() -> None:
    federation = simulate(clients([4] * 3))
    with pytest.raises(ValueError, match=r"sends 'rows' with cost=.* but it draws nothing from client.noise"):
        federation.everyone().ask(SendsSomeRows().fit, scale=1.0)
    assert not federation.ledger.state().get("charges") and federation.traffic.total_up == 0
    train(FedAvg(Model(nn.Linear(3, 2)), cohort=1.0, local=NOISY), simulate(clients([4] * 3)), 1)  # which draws some


class MixesLargeBatches(nn.Module):
    def __init__(self, above: int) -> None:
        super().__init__()
        self.layer, self.above = nn.Linear(3, 2), above

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.layer(x - x.mean(0) if len(x) > self.above else x)
        return result


@pytest.mark.parametrize("above", [1, 2, 3, 7, 20, 100])
def test_ghost_norms_are_not_used_where_only_large_batches_mix_rows(above: int) -> None:
    assert GhostNorms.of(Model(MixesLargeBatches(above)), torch.zeros(2, 3)) is None
    assert GhostNorms.of(Model(MixesLargeBatches(10**6)), torch.zeros(2, 3)) is not None
