"""Client-level privacy of the methods that serve newcomers without labels: FLowDUP, LD-FedAvg, FedTTA."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import dp_accounting
import pytest
import torch
from torch import nn

from unalike import Clients, LocalSGD, Model, simulate, train
from unalike.core.federation import Federation
from unalike.learn.server import ServerOptimizer
from unalike.methods.fedtta import FedTTA
from unalike.methods.flowdup import FLowDUP
from unalike.methods.ld_fedavg import LDFedAvg
from unalike.methods.problem import Problem
from unalike.privacy import Gaussian

LOCAL = LocalSGD(epochs=1, batch=4, lr=0.05)


def made(name: str, **fields: Any) -> Any:
    model = Model(nn.Sequential(nn.Linear(5, 4), nn.ReLU(), nn.Linear(4, 3)))
    common: dict[str, Any] = {"cohort": 1.0, "local": LOCAL, **fields}
    if name == "fedtta":
        return FedTTA(Problem(model, (5,), 3, 6, "features"), **common)
    if name == "flowdup":
        return FLowDUP(model, dimension=6, features=4, width=3, server=ServerOptimizer(), **common)
    return LDFedAvg(model, dimension=6, **common)


def federation(seed: int = 0) -> Federation:
    generator = torch.Generator().manual_seed(1)
    x, y = torch.randn(48, 5, generator=generator), torch.randint(3, (48,), generator=generator)
    return simulate(Clients.from_sizes(x, y, torch.full((6,), 8)), seed)


@pytest.mark.parametrize("name", ["flowdup", "ld-fedavg", "fedtta"])
def test_with_hardly_any_noise_and_a_long_clip_it_is_the_method_without_privacy(name: str) -> None:
    plain, private = made(name), made(name, clip=1e3, noise=Gaussian(1e-10))
    expected, found = (train(one, federation(), 2, one.start(3)) for one in (plain, private))
    for key, value in expected.items():
        torch.testing.assert_close(found[key], value, atol=2e-4, rtol=1e-3)


@pytest.mark.parametrize("name", ["flowdup", "ld-fedavg", "fedtta"])
def test_all_that_a_client_sends_is_one_array_with_one_clip_and_one_charge(name: str) -> None:
    run = federation()
    method = made(name, clip=0.01, noise=Gaussian(2.0), cohort=0.5)
    state = method.start(0)
    numbers = sum(value.numel() for key, value in state.items() if not key.startswith("server"))
    state = train(method, run, 3, state)
    assert {entry.array for entry in run.transcript.entries} == {"update"}
    assert {math.prod(entry.shape) for entry in run.transcript.entries} == {numbers}
    sampled = dp_accounting.PoissonSampledDpEvent(0.5, dp_accounting.GaussianDpEvent(2.0))
    expected = dp_accounting.pld.PLDAccountant().compose(sampled, 3).get_epsilon(1e-3)
    assert run.ledger.epsilon(1e-3) == pytest.approx(expected, abs=1e-4)
    tiny = replace(method, noise=Gaussian(1e-10), cohort=1.0)
    begun = tiny.start(0)
    replies = federation().everyone().ask(tiny.fit, **_inputs(name, begun))
    assert float(replies["update"].norm()) <= 0.01 + 1e-6  # a mean of clipped vectors
    assert float(replies["update"].norm()) > 0.002


def _inputs(name: str, state: Any) -> dict[str, Any]:
    parts = {"flowdup": ("h1", "hidden", "last", "bias", "prior"), "ld-fedavg": ("v",), "fedtta": ("theta", "phi")}
    rate = {} if name == "flowdup" else {"rate": torch.tensor(1.0)}
    return {**{part: state[part] for part in parts[name]}, **rate}


def test_noise_without_a_clip_is_refused() -> None:
    for name in ("flowdup", "ld-fedavg", "fedtta"):
        with pytest.raises(ValueError, match="need a bound"):
            made(name, noise=Gaussian(1.0))
