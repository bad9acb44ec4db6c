"""Requests that a hostile server makes up: bounds, inputs and releases that do not fit each other."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.privacy.doors.shards import look_of, private_shard, request
from unalike import Client, Clients, Model, Stays, Sum, simulate
from unalike.analytics.kmeans.algorithm import FedDPKMeans
from unalike.analytics.kmeans.budget import KMeansPrivacy
from unalike.analytics.kmeans.client import clipped_points
from unalike.core import wire
from unalike.core.client import Block, Kept
from unalike.core.failure import Diverged
from unalike.core.method import tasks_of
from unalike.core.release import Each, Release
from unalike.core.request import ReleaseName
from unalike.core.task import Sent, send, task
from unalike.learn.local import LocalSGD
from unalike.methods.fedavg import FedAvg
from unalike.methods.odpfl import ODPFL
from unalike.methods.problem import Problem
from unalike.privacy import Gaussian
from unalike.privacy.dpsgd import PointPrivacy
from unalike.runtime.shard.shard import Refused


@dataclass(frozen=True)
class Clipping:
    """Sums rows clipped to ``radius``; the noise is scaled to the same input."""

    @task
    def sums(self, client: Client, radius: Tensor, stretch: Tensor) -> Sent:
        rows = client.x * torch.exp(client.x.abs() * stretch)
        length = torch.linalg.vector_norm(rows, dim=1, keepdim=True)
        return send(total=client.sum(rows * torch.clamp(radius / length.clamp(min=1e-30), max=1.0)))

    @sums.into
    def into(self) -> list[Release]:
        def change(inputs: Any) -> float:
            return float(inputs["radius"])

        return [Sum("total", noise=Gaussian(1e-3), sensitivity=change, unit="point")]


TOTAL = ReleaseName.of(Sum("total"))
ROWS = Clients.from_sizes(torch.tensor([[3.0, 0.0], [0.5, 0.0], [0.5, 0.0]]), None, torch.tensor([3]))
GIVEN = {"radius": torch.tensor(1.0), "stretch": torch.tensor(0.0)}


def ask(**changed: Any) -> list[Any]:
    return list(private_shard(ROWS, tasks_of(Clipping())).answer(request("Clipping.sums", TOTAL, **changed)))


def test_noise_and_clip_have_one_radius() -> None:
    twice = {"each": {"radius": torch.tensor([1e6])}}
    with pytest.raises(Refused, match="one input in two ways: radius, radius"):
        ask(shared={**GIVEN, "radius": torch.tensor(1e-6)}, **twice)
    only_each = {name: value for name, value in GIVEN.items() if name != "radius"}
    with pytest.raises(Refused, match="give no bound for its noise"):
        ask(shared=only_each, **twice)
    with pytest.raises(Refused, match="give no bound for its noise"):
        ask(shared={**GIVEN, "radius": torch.tensor(0.0)})


@pytest.mark.parametrize("name", ["radius", "stretch"])
@pytest.mark.parametrize("value", [torch.inf, torch.nan])
def test_inputs_that_are_not_finite_are_refused_whatever_the_data(name: str, value: float) -> None:
    (reply,) = ask(shared={**GIVEN, name: torch.tensor(value)})
    assert look_of([reply]) == ([], [0])
    assert isinstance(reply.failed[0], Diverged) and f"{name!r} is not finite" in reply.failed[0]


def test_one_row_that_overflows_leaves_the_others_in_the_sum() -> None:
    """exp(3·40) is infinite in float32 and exp(0.5·40) is not: only the first row is lost."""
    partial = ask(shared={**GIVEN, "stretch": torch.tensor(40.0)})[-1].partials[0]
    assert partial.total[0] == pytest.approx(2.0, abs=0.05)


def test_points_that_anchors_move_beyond_all_numbers_are_lost_one_by_one() -> None:
    points = torch.tensor([[1e6, 0.0], [0.1, 0.2]])
    block: Block = Clients.from_sizes(points, None, torch.tensor([2])).block(torch.arange(1), tame=True)
    columns = block.columns(torch.tensor(1), torch.tensor([2]))
    client = block.client({name: value[0] for name, value in columns.items()}, Kept())
    anchors = torch.tensor([[0.0, 0.0], [2e6, 0.0]])
    moves = torch.tensor([[0.0, 0.0], [3.4e38, 3.4e38]])
    clipped = clipped_points(client, torch.full((2,), -3e38), torch.tensor(1.0), torch.stack([anchors, moves]))
    assert bool(torch.isfinite(clipped).all())


@pytest.mark.parametrize(
    ("name", "value"), [("radius", 1e-45), ("radius", 1e30), ("scale", 1e-38), ("scale", 1e38), ("scale", -1.0)]
)
def test_points_are_not_clipped_where_rounding_moves_a_sum_further_than_the_noise_is_made_for(
    name: str, value: float
) -> None:
    """At a radius of 1e-45 each coordinate of a clipped point is rounded up to it, so a point in 100 dimensions is ten
    times as long; and at a scale of 1e-38 a fourth row makes an infinity of a count, which takes away all the others.
    """
    method = FedDPKMeans(k=2, privacy=KMeansPrivacy(epsilon=1.0, delta=1e-6))
    given = {"origin": torch.zeros(2), "radius": torch.tensor(1.0), "scale": torch.tensor(1.0)}
    wanted = ReleaseName.of(Sum("gram"))
    shard = private_shard(ROWS, tasks_of(method))
    (reply, sums) = shard.answer(request("FedDPKMeans.outer_product", wanted, shared=given))
    assert look_of([reply]) == ([0], []) and sums.partials
    with pytest.raises(Refused, match=f"give no bound for its noise.*{name}="):
        list(shard.answer(request("FedDPKMeans.outer_product", wanted, shared={**given, name: torch.tensor(value)})))


def test_a_secure_sum_takes_its_noise_from_the_inputs_where_clients_share_it() -> None:
    """Its clients need the bound in numbers, as a shard does."""

    def change(inputs: Any) -> float:
        return float(inputs["radius"])

    @dataclass(frozen=True)
    class Secure(Clipping):
        sums = task(Clipping.sums.function)

        @sums.into
        def secure(self) -> list[Release]:
            total = Sum("total", clip=9.0, noise=Gaussian(1e-3), sensitivity=change, unit="point", secure=True)
            return [total]

    store = Clients.from_sizes(ROWS.x[:1].repeat(4, 1), None, torch.ones(4))
    replies = simulate(store, trust="nobody").everyone().ask(Secure().sums, **GIVEN)
    assert replies["total"].tolist() == pytest.approx([4.0, 0.0], abs=0.1)


def test_a_release_that_is_named_many_times_is_refused() -> None:
    program = private_shard(ROWS, tasks_of(Clipping())).program
    assert len(program.releases(request("Clipping.sums", TOTAL))) == 1
    with pytest.raises(wire.WireError, match="one release twice"):
        program.releases(request("Clipping.sums", *[TOTAL] * 500))


def test_a_deployed_private_program_measures_nothing() -> None:
    """Measurements are not in the journal, so each would draw fresh noise on the same sum."""
    shard = private_shard(ROWS, tasks_of(Clipping()))
    with pytest.raises(wire.WireError, match="not among its measurements"):
        list(shard.answer(request("Clipping.sums", TOTAL, purpose="measure", shared=GIVEN)))


def test_dp_sgd_does_not_start_from_what_a_client_holds_bare() -> None:
    """``adapt`` leaves θ = θ₀ + XᵀX/n at the client; private training from that θ with weight decay would show it."""
    store = Clients.from_sizes(torch.randn(12, 3), torch.randint(0, 2, (12,)), torch.tensor([6, 6]))
    local = LocalSGD(steps=1, batch=2, private=PointPrivacy(clip=1.0, noise_multiplier=1.0))
    method = FedAvg(Model(nn.Linear(3, 2)), cohort=1.0, local=local, finetune=LocalSGD(steps=1, batch=2))
    shard = private_shard(store, tasks_of(method), trust="server")
    stays = request("FedAvg.adapt", ReleaseName.of(Stays("theta")), shared={"theta": torch.zeros(8)})
    assert look_of(list(shard.answer(stays))) == ([0], [])
    wanted = [ReleaseName.of(one) for one in method.fit.releases()]
    with pytest.raises(ValueError, match="lies at the clients and follows from their points"):
        list(
            shard.answer(
                request("FedAvg.fit", *wanted, serial=2, shared={"rate": torch.tensor(1.0)}, held={"theta": "1.theta"})
            )
        )

    federation = simulate(store)
    held = federation.everyone().ask(method.adapt, theta=torch.zeros(8)).held("theta")
    with pytest.raises(ValueError, match="lies at the clients and follows from their points"):
        federation.everyone().ask(method.fit, theta=held, rate=1.0)


def test_what_one_client_sends_alone_is_not_noised_for_less_than_its_clip() -> None:
    with pytest.raises(ValueError, match="sensitivity=1e-06"):
        Each("value", clip=1.0, sensitivity=1e-6, noise=Gaussian(1.0))


def test_one_sample_that_an_encoder_makes_nan_takes_no_other_out_of_a_private_descriptor() -> None:
    """The encoder comes from the server. Noise is made for a descriptor that one of n samples moves by 2/n."""
    problem = Problem(Model(nn.Linear(3, 2)), (3,), 2, 4)
    method = ODPFL(problem, encoder="sphere", descriptor=3, newcomer_epsilon=1e6, newcomer_delta=0.1)
    encoder = method.network.init(0)
    encoder[0] = 3e38  # a sample whose first number is ten overflows, one that has none there does not
    rows = torch.tensor([[0.0, 0.1, 0.2]] * 8)
    spoilt = torch.cat([rows[:7], torch.full((1, 3), 10.0)])
    seen = []
    for x in (rows, spoilt):
        store = Clients.from_sizes(x, None, torch.tensor([8]))
        shard = private_shard(store, tasks_of(method))
        (reply,) = shard.answer(
            request("ODPFL.introduce", ReleaseName("each", ("descriptor",)), shared={"encoder": encoder})
        )
        seen.append(reply.arrays[0]["descriptor"][0])
    assert float(torch.linalg.vector_norm(seen[0])) == pytest.approx(1.0, abs=0.02)
    assert float(torch.linalg.vector_norm(seen[0] - seen[1])) == pytest.approx(1 / 8, abs=0.02)
