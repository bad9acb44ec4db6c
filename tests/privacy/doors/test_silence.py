"""An ask that releases nothing does not tell whether its task failed, which would tell how large a number is."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn

from tests.privacy.doors.shards import look_of, private_shard, request
from unalike import Client, Clients, Model, Stays, simulate
from unalike.core import wire
from unalike.core.method import tasks_of
from unalike.core.request import ReleaseName
from unalike.core.task import Sent, send, task
from unalike.learn.evaluation import Scorer
from unalike.runtime.shard.shard import PrivateFailure, Refused

pytestmark = pytest.mark.filterwarnings("ignore::unalike.runtime.shard.shard.PrivateFailure")
LOSS = ReleaseName.of(Stays("loss"))


def one_row(value: float) -> Clients:
    return Clients.from_sizes(torch.tensor([[value, 0.0]]), torch.tensor([0]), torch.tensor([1]))


def scorer() -> Scorer:
    return Scorer(Model(nn.Linear(2, 2)))


def heavy(threshold: float) -> Tensor:
    """Weights under which the loss is finite just for |x| below the threshold."""
    theta = torch.zeros(6)
    theta[0] = torch.finfo(torch.float32).max / threshold
    return theta


def test_weights_of_float_max_do_not_tell_a_cell_of_a_table() -> None:
    for wanted in ((), (LOSS,)):
        seen = []
        for cell in (0.5, 2.0, 1e30):
            shard = private_shard(one_row(cell), tasks_of(scorer()))
            asked = request("Scorer.score", *wanted, each={"theta": heavy(1.0)[None]})
            try:
                seen.append(look_of(list(shard.answer(asked))))
            except (wire.WireError, Refused) as error:
                seen.append(str(error))  # type: ignore[arg-type]
        assert seen[0] == seen[1] == seen[2]


@dataclass(frozen=True)
class Picky:
    @task(stays="theta")
    def adapt(self, client: Client, limit: Tensor) -> Sent:
        return send(theta=torch.where(client.x.amax() > limit, torch.nan, client.x.amax())[None])

    @task
    def free(self, client: Client) -> Sent:
        return send(theta=client.x.amax()[None])

    @task(stays="theta")
    def needs_more(self, client: Client) -> Sent:
        return send(theta=client.kept.values["earlier"])


def test_a_client_that_fails_looks_like_one_that_does_not() -> None:
    stays = ReleaseName.of(Stays("theta"))
    for cell in (0.5, 2.0):
        shard = private_shard(one_row(cell), tasks_of(Picky()))
        asked = request("Picky.adapt", stays, shared={"limit": torch.tensor(1.0)})
        assert look_of(list(shard.answer(asked))) == ([0], [])
        held = shard.look("run", "1.theta", torch.tensor([0]))  # there is something for a later ask, too
        assert held.tolist() == [[0.5 if cell < 1 else 0.0]]


def test_what_a_task_does_not_declare_does_not_stay() -> None:
    shard = private_shard(one_row(1.0), tasks_of(Picky()))
    with pytest.raises(wire.WireError, match=r"Picky.free does not declare that stays\(theta\)"):
        list(shard.answer(request("Picky.free", ReleaseName.of(Stays("theta")))))


def test_a_task_that_would_leave_nothing_where_it_fails_is_refused_before_it_runs() -> None:
    shard = private_shard(one_row(1.0), tasks_of(Picky()))
    with pytest.raises(Refused, match="does not run on rows of zeros"):
        list(shard.answer(request("Picky.needs_more", ReleaseName.of(Stays("theta")))))


def test_the_server_of_a_simulation_with_an_epsilon_is_not_told_either() -> None:
    federation = simulate(one_row(2.0), noise="system")
    with pytest.warns(PrivateFailure):
        replies = federation.everyone().ask(Picky().adapt, limit=1.0)
    assert replies.answered.tolist() == [0] and not replies.failures and not federation.failures
    open_about_it = simulate(Clients.from_sizes(torch.tensor([[2.0], [0.5]]), None, torch.tensor([1, 1])))
    assert len(open_about_it.everyone().ask(Picky().adapt, limit=1.0).failures) == 1  # without an ε they are data
