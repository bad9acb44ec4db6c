"""Server optimizers against torch.optim, and schedules against their formulas."""

import math
from typing import Literal

import pytest
import torch

from unalike.learn.schedules import Schedule
from unalike.learn.server import ServerOptimizer


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (ServerOptimizer("sgd", lr=0.5), lambda p: torch.optim.SGD(p, lr=0.5)),
        (ServerOptimizer("momentum", lr=0.5), lambda p: torch.optim.SGD(p, lr=0.5, momentum=0.9)),
        (ServerOptimizer("adam", lr=0.1), lambda p: torch.optim.Adam(p, lr=0.1)),
    ],
)
def test_steps_equal_torch_optimizers(ours: ServerOptimizer, theirs: type) -> None:
    theta = torch.tensor([1.0, -2.0, 3.0])
    parameter = torch.nn.Parameter(theta.clone())
    optimizer = theirs([parameter])
    moments = ours.start(theta)
    for step in range(5):
        gradient = torch.tensor([0.3, -0.1, 0.02]) * (step + 1) + theta
        parameter.grad = gradient.clone()
        optimizer.step()
        theta, moments = ours.step(theta, -gradient, moments)
        assert torch.allclose(theta, parameter.detach(), atol=1e-6)


@pytest.mark.parametrize("kind", ["sgd", "momentum", "adam", "yogi"])
def test_the_rate_grows_over_the_warmup(kind: Literal["sgd", "momentum", "adam", "yogi"]) -> None:
    plain, slow = ServerOptimizer(kind, lr=0.4, beta1=0.0), ServerOptimizer(kind, lr=0.4, beta1=0.0, warmup=4)
    theta, moments, others = torch.zeros(2), plain.start(torch.zeros(2)), slow.start(torch.zeros(2))
    for factor in (0.25, 0.5, 0.75, 1.0, 1.0):
        whole, moments = plain.step(theta, torch.tensor([1.0, -2.0]), moments)
        part, others = slow.step(theta, torch.tensor([1.0, -2.0]), others)
        assert torch.allclose(part, factor * whole)


def test_yogi_changes_its_second_moment_additively() -> None:
    optimizer = ServerOptimizer("yogi", lr=0.1)
    theta = torch.zeros(1)
    theta, moments = optimizer.step(theta, torch.tensor([2.0]), optimizer.start(theta))
    assert float(moments["v"]) == pytest.approx(0.001 * 4)
    _, moments = optimizer.step(theta, torch.tensor([0.01]), moments)
    assert float(moments["v"]) == pytest.approx(0.004 - 0.001 * 0.0001)


def test_schedules() -> None:
    assert [Schedule("1/t")(t) for t in (1, 2, 4)] == [1, 0.5, 0.25]
    assert Schedule("1/sqrt(t)")(4) == 0.5
    assert Schedule("1/log(t)")(1) == 1.0 and Schedule("1/log(t)")(100) == pytest.approx(1 / math.log(99 + math.e))
    assert [Schedule("1/log10(t)")(t) for t in (1, 10, 1000)] == pytest.approx([1, 0.5, 0.25])
    assert [Schedule("exponential", decay=0.5, period=2)(t) for t in range(1, 6)] == [1, 1, 0.5, 0.5, 0.25]
    assert Schedule("cosine", period=10)(1) == 1 and Schedule("cosine", period=10)(11) == pytest.approx(0)


def test_nonsense_is_refused() -> None:
    with pytest.raises(ValueError, match="expected one of sgd, momentum, adam, yogi"):
        ServerOptimizer("lamb")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="warmup=0; expected 1 or more"):
        ServerOptimizer(warmup=0)
    with pytest.raises(ValueError, match="expected one of constant"):
        Schedule("linear")  # type: ignore[arg-type]
