"""The audit: it proves what it may, never more, and finds out a cut of the noise."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from scipy.stats import binom

from unalike.privacy.audit import proven_epsilon, upper_bound
from unalike.studio import UserError
from unalike.studio.audit.training import audit
from unalike.studio.recipe.settings import plan_for
from unalike.studio.runs.prepare import Prepared, prepare

SMALL: dict[str, Any] = {"data": "digits", "partition": "iid", "clients": 60, "model": "logistic", "rounds": 4}


def test_clopper_pearson_covers() -> None:
    for count, trials in ((0, 100), (3, 50), (40, 60)):
        rate = upper_bound(count, trials, 0.05)
        assert binom.cdf(count, trials, rate) == pytest.approx(0.05, abs=1e-6)
    assert upper_bound(7, 7, 0.05) == 1.0


def test_randomized_response_proves_its_own_epsilon_and_no_more() -> None:
    generator = torch.Generator().manual_seed(0)
    member = torch.rand(40_000, generator=generator) < 0.5
    truth = math.exp(1.5) / (1 + math.exp(1.5))
    says = torch.where(torch.rand(40_000, generator=generator) < truth, member, ~member)
    proof = proven_epsilon(says.to(torch.float64), member, 1e-6)
    assert 1.35 < proof.epsilon <= 1.5
    assert proof.false_positives == pytest.approx(1 - truth, abs=0.01)


def test_guessing_proves_nothing_and_knowing_proves_the_limit() -> None:
    generator = torch.Generator().manual_seed(1)
    member = torch.rand(4000, generator=generator) < 0.5
    assert proven_epsilon(torch.rand(4000, generator=generator), member, 1e-6).epsilon < 0.3
    known = proven_epsilon(member.to(torch.float64), member, 1e-6)
    assert known.epsilon == known.limit > 5
    with pytest.raises(ValueError, match="expected at least 20 of each"):
        proven_epsilon(torch.zeros(30), torch.zeros(30, dtype=torch.bool), 1e-6)


def private(**settings: Any) -> Prepared:
    return prepare(plan_for(["fedavg"], {**SMALL, **settings}).runs[0][1])


def test_clients_the_promise_holds_and_a_cut_is_found_out() -> None:
    prepared = private(cohort=0.5, noise_multiplier=1.5, clip=0.5, delta=1e-3)
    honest = audit(prepared, canaries=8_000)
    assert honest.unit == "client" and honest.holds
    assert 0.4 * honest.promised < honest.proof.epsilon <= honest.promised  # a weak attack would prove nothing
    cut = audit(prepared, canaries=4_000, cut_noise=0.1)
    assert cut.promised == honest.promised
    assert not cut.holds


def test_points_the_promise_holds_and_a_cut_is_found_out() -> None:
    prepared = private(cohort=1.0, unit="point", noise_multiplier=2.0, clip=1.0, delta=1e-4, rounds=2, batch=20)
    honest = audit(prepared, canaries=8_000)
    assert honest.unit == "point" and honest.holds
    assert 0.3 * honest.promised < honest.proof.epsilon
    assert not audit(prepared, canaries=4_000, cut_noise=0.1).holds


def test_there_must_be_something_to_audit() -> None:
    with pytest.raises(UserError, match="promises no privacy"):
        audit(private(cohort=6))
    with pytest.raises(UserError, match="knows fedavg and its relatives, not local"):
        audit(prepare(plan_for(["local"], SMALL).runs[0][1]))
    with pytest.raises(UserError, match="expected above 0 and at most 1"):
        audit(private(cohort=6, noise_multiplier=1.0, clip=1.0, delta=1e-3), cut_noise=0.0)
