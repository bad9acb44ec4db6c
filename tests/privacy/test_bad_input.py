"""What a privacy run refuses: each with a message that says what was expected, and nothing released."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.core.helpers import clients, total
from unalike import Mean, Sum, simulate
from unalike.api import UserError
from unalike.core.request import Reply, Request
from unalike.privacy import Budget, BudgetExceeded, Gaussian, Laplace, Ledger
from unalike.runs.prepare import prepare
from unalike.runs.recipe.settings import plan_for

SMALL = {"data": "digits", "partition": "iid", "clients": 30, "cohort": 6, "model": "logistic", "rounds": 2}


def prepared(**settings: Any) -> Any:
    return prepare(plan_for(["fedavg"], {**SMALL, **settings}).runs[0][1])


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"epsilon": 0.0}, r"privacy.epsilon = 0.0: expected a number above 0"),
        ({"epsilon": -1.0}, r"privacy.epsilon = -1.0: expected a number above 0"),
        ({"epsilon": 1.0, "delta": 1.0}, r"privacy.delta = 1.0: expected a number below 1"),
        ({"epsilon": 1.0, "delta": 0.5}, r"delta must be below 1/n = 0.037 for n = 27, got 0.5.*the clients"),
        ({"epsilon": 1.0, "delta": 1 / 27}, r"delta must be below 1/n = 0.037 for n = 27, got 0.037"),
        ({"epsilon": 1.0, "delta": 0.01, "unit": "point"}, r"delta must be below 1/n = .* for n = \d+, .*the points"),
        ({"noise_multiplier": 1.0}, r"noise without a bound protects nobody: give privacy.clip"),
        ({"noise_multiplier": 1.0, "clip": 0.0}, r"privacy.clip = 0.0: expected a number above 0"),
        ({"clip": 1.0, "unit": "point"}, r"privacy.clip alone protects nobody"),
        ({"epsilon": 1.0, "unit": "house"}, r"privacy.unit = 'house': expected 'client' or 'point'"),
    ],
)
def test_a_recipe_that_cannot_be_kept_is_refused_before_it_starts(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        prepared(**settings)


@pytest.mark.parametrize("unit", ["client", "point"])
def test_a_method_without_private_training_says_so(unit: str) -> None:
    with pytest.raises(UserError, match=f"pfedhn has no {unit}-level privacy.*; fedavg.* has it"):
        prepare(plan_for(["pfedhn"], {**SMALL, "epsilon": 1.0, "delta": 1e-4, "unit": unit}).runs[0][1])


def test_mechanisms_and_releases_refuse_nonsense() -> None:
    for epsilon in (0.0, -1.0, float("nan")):
        with pytest.raises(ValueError, match="epsilon must be a finite number above 0"):
            Laplace(epsilon)
    with pytest.raises(ValueError, match="delta must be above 0 and below 1, got 1"):
        Budget(1.0, 1.0)
    with pytest.raises(ValueError, match="clip=0; expected a number above 0"):
        Sum("total", clip=0, noise=Gaussian(1.0))
    with pytest.raises(ValueError, match="noise without a bound protects nobody"):
        Sum("total", noise=Gaussian(1.0))
    with pytest.raises(ValueError, match="weights from the clients' data break the bound"):
        Mean("total", weight="n", clip=1.0, noise=Gaussian(1.0))


def test_a_budget_that_is_spent_sends_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    spent = Ledger()
    spent.record(Gaussian(1.0).event())
    federation = simulate(clients([3, 3]), budget=Budget(4.0, 1e-5), ledger=spent)
    monkeypatch.setattr(federation.runtime, "deliver", lambda _: pytest.fail("something was sent"))
    with pytest.raises(BudgetExceeded, match=r"4 at δ = 1e-05; 4.377 is spent .* nothing was sent"):
        federation.everyone().ask(total, into=Sum("total", clip=1.0, noise=Gaussian(1.0)))
    with pytest.raises(BudgetExceeded, match="the ask has no noise, so give it a release with clip and noise"):
        federation.everyone().ask(total, into=Sum("total"))
    assert federation.transcript.rows() == []


@pytest.mark.parametrize("noise", [None, Gaussian(1e-9), Laplace(1e9)], ids=["plain", "gaussian", "laplace"])
def test_a_sum_beyond_its_clip_is_left_out_and_told(noise: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Client 1's shard leaves out its own half of the release: it sends a hundred times as much as it may."""
    honest = simulate(clients([3, 4, 5]))
    cheated = simulate(clients([3, 4, 5]), shards=3)
    deliver = cheated.runtime.deliver

    def lying(request: Request) -> Iterator[Reply]:
        for reply in deliver(request):
            sums = {place: replace(one, total=100 * one.total) for place, one in reply.partials.items()}
            yield replace(reply, partials=sums) if reply.shard == 1 else reply

    monkeypatch.setattr(cheated.runtime, "deliver", lying)
    release = Sum("total", clip=1.0, noise=noise)
    replies = cheated.everyone().ask(total, into=release)
    [failure] = replies.failures
    assert failure.client == "1"
    assert "sent a sum of 'total' of norm 100, beyond 1 times its clip 1" in failure.reason
    expected = honest.cohort([0, 2]).ask(total, into=release)["total"]
    assert torch.allclose(replies["total"], expected, atol=1e-4)
    assert replies.answered.tolist() == [0, 2]
