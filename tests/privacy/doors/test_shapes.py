"""Shapes, types and parts of the data that a hostile server chooses, so that more moves than noise is made for."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.privacy.doors.shards import look_of, private_shard, request
from unalike import Clients, Mean, Model, Sum
from unalike.analytics.kmeans.algorithm import FedDPKMeans
from unalike.analytics.kmeans.budget import KMeansPrivacy
from unalike.core.method import tasks_of
from unalike.core.release import Terms
from unalike.core.request import Program, ReleaseName
from unalike.learn.local import LocalSGD
from unalike.learn.scaling import PrivateScaling
from unalike.methods.adaped import AdaPeD
from unalike.methods.fedavg import FedAvg
from unalike.methods.fedrep import FedRep
from unalike.methods.mr_mtl import MRMTL
from unalike.privacy import Gaussian
from unalike.privacy.dpsgd import PointPrivacy
from unalike.runtime.shard.shard import Refused, Shard
from unalike.runtime.shard.simulator import Simulator

POINTS = Clients.from_sizes(torch.tensor([[1.0, 0.0]] * 6), None, torch.tensor([1, 5]))
KMEANS = FedDPKMeans(k=2, privacy=KMeansPrivacy(epsilon=1e3, delta=1e-6), steps=1)
ONE = torch.tensor(1.0)


def gram(ids: tuple[int, ...], **given: Tensor) -> Tensor:
    shard = private_shard(POINTS, tasks_of(KMEANS))
    shared = {"origin": torch.zeros(2), "radius": ONE, "scale": ONE, **given}
    wanted = ReleaseName.of(Sum("gram"))
    *_, sums = shard.answer(request("FedDPKMeans.outer_product", wanted, ids=ids, shared=shared))
    return sums.partials[0].total


def test_one_point_counts_once() -> None:
    """An origin with a row for each of 1,000 points made 1,000 of the one point of a client; the noise was for one."""
    assert float(gram((0,))[0]) == pytest.approx(1.0, abs=0.2)
    with pytest.raises(Refused, match="does not run on rows of zeros"):
        gram((0,), origin=torch.zeros(1000, 2))


def test_inputs_do_not_tell_how_many_rows_a_client_has() -> None:
    """With an origin of five rows the client answers that has five, and no other."""
    for client in (0, 1):
        with pytest.raises(Refused, match="does not run on rows of zeros"):
            gram((client,), origin=torch.zeros(5, 2))


def test_what_bounds_a_point_is_one_number() -> None:
    for name in ("radius", "scale"):
        with pytest.raises(Refused, match=f"{name} has the shape"):
            gram((0,), **{name: torch.ones(1)})


ROWS = Clients.from_sizes(torch.randn(12, 3), torch.randint(0, 2, (12,)), torch.tensor([4, 8]))
MODEL = Model(nn.Linear(3, 2))
STEPS = LocalSGD(steps=1, batch=2, private=PointPrivacy(clip=1.0, noise_multiplier=1.0))
GIVEN = {"theta": torch.zeros(8), "rate": ONE}


def fit(shard: Shard, method: FedAvg, **changed: Any) -> list[Any]:
    wanted = [ReleaseName.of(one) for one in method.fit.releases()]
    return list(shard.answer(request("FedAvg.fit", *wanted, **{"shared": GIVEN, **changed})))


@pytest.mark.parametrize("kind", [torch.float16, torch.bfloat16])
def test_nothing_is_bounded_in_half_precision(kind: torch.dtype) -> None:
    method = FedAvg(MODEL, cohort=1.0, clip=1.0, noise=Gaussian(1.0))
    with pytest.raises(Refused, match="rate is in half precision"):
        fit(private_shard(ROWS, tasks_of(method)), method, shared={**GIVEN, "rate": ONE.to(kind)})


@pytest.mark.parametrize("private", [True, False])
def test_noise_is_made_for_the_declared_rows_and_not_for_as_many_as_a_test_part_has(private: bool) -> None:
    method = FedAvg(MODEL, cohort=1.0, local=STEPS if private else LocalSGD(), clip=None if private else 1.0)
    method = method if private else replace(method, noise=Gaussian(1.0))
    test = replace(ROWS, start=torch.tensor([0, 0]), size=torch.tensor([12, 12]))
    program = Program(tasks_of(method), terms=Terms("system", "nobody"), private=True)
    shard = Shard({"train": ROWS, "test": test}, ROWS.roster(), program, Simulator(block=4, threads=1))
    assert look_of(fit(shard, method)) == ([0], [])
    with pytest.raises(Refused, match="not for those of test"):
        fit(shard, method, part="test")


def test_a_recipe_says_how_many_share_the_noise_of_a_secure_sum() -> None:
    """Where it does not, a server could count as many clients as it likes, and each would add next to nothing."""
    method = FedAvg(MODEL, cohort=1.0, clip=1.0, noise=Gaussian(1.0), secure=True)
    with pytest.raises(Refused, match="does not say how many clients share the noise"):
        fit(private_shard(ROWS, tasks_of(method)), method)
    program = Program(tasks_of(method), terms=Terms("system", "nobody", cohort=(2, 2)), private=True)
    shard = Shard({"train": ROWS}, ROWS.roster(), program, Simulator(block=4, threads=1))
    assert look_of(fit(shard, method)) == ([0], [])
    assert [one.kind for one in method.fit.releases()] == [Mean.kind]


SCALING = PrivateScaling("features", 1, Gaussian(1e-3), "point")


@pytest.mark.parametrize(
    ("task", "name", "given"),
    [
        ("means", "mean", {"radius": torch.ones(1000)}),
        ("means", "mean", {"center": torch.zeros(1000, 1, 1)}),
        ("counts", "counts", {"center": torch.zeros(1000, 1, 1)}),
    ],
)
def test_statistics_for_scaling_count_a_point_once(task: str, name: str, given: dict[str, Tensor]) -> None:
    """1,000 radii for one feature gave 1,000 means of it, and 1,000 centres counted its points 1,000 times."""
    shard = private_shard(Clients.from_sizes(torch.ones(2, 1), None, torch.tensor([1, 1])), tasks_of(SCALING))
    wanted, usual = ReleaseName.of(Sum(name)), {"center": torch.zeros(1), "usual": ONE}
    honest = usual | ({"radius": torch.ones(1)} if task == "means" else {})
    *_, sums = shard.answer(request(f"PrivateScaling.{task}", wanted, shared=honest))
    assert float(sums.partials[0].total.norm()) == pytest.approx(1.0, abs=0.05)
    with pytest.raises(Refused, match="does not run on rows of zeros"):
        list(shard.answer(request(f"PrivateScaling.{task}", wanted, shared=honest | given)))


@pytest.mark.parametrize(
    ("method", "task"),
    [
        (MRMTL(MODEL, cohort=1.0, local=STEPS), "MRMTL.fit"),
        (FedRep(MODEL, cohort=1.0, local=STEPS, local_head=STEPS, head=1), "FedRep.fit"),
        (AdaPeD(MODEL, cohort=1.0, local=STEPS), "AdaPeD.fit"),
        (AdaPeD(MODEL, cohort=1.0, local=STEPS), "AdaPeD.go_on"),
    ],
)
def test_what_clients_keep_is_not_trained_on_for_nothing(method: Any, task: str) -> None:
    """Asked for no release, each of these went on with DP-SGD from what it keeps; one later ask, charged once, showed
    what twenty had made.
    """
    shard, size = private_shard(ROWS, tasks_of(method)), MODEL.size
    given = {"rate": ONE, "mean": torch.zeros(size), "body": torch.zeros(6), "mu": torch.zeros(size), "psi": ONE}
    known = {one.name for one in shard.program.task(task)._parameters}
    with pytest.raises(Refused, match="draws noise, and what it releases names its cost"):
        list(shard.answer(request(task, shared={name: one for name, one in given.items() if name in known})))
    assert not shard.kept("run").state()


@pytest.mark.parametrize("shape", [(4, 3), (1, 3), (2,)])
def test_inputs_are_scaled_by_feature_and_not_by_row(shape: tuple[int, ...]) -> None:
    """Where a client has four rows it could be read by a scaling of four, and nobody else."""
    shard = private_shard(ROWS, tasks_of(FedAvg(MODEL, cohort=1.0, local=STEPS)))
    schema = shard.roster.schema
    shard.use(replace(schema, shift=torch.zeros(3), scale=torch.ones(1)))
    with pytest.raises(ValueError, match="schema: its shift is of shape"):
        shard.use(replace(schema, shift=torch.zeros(shape), scale=torch.ones(shape)))
