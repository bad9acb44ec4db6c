"""The audit: it proves what it may, never more, and finds out a cut of the noise."""

from __future__ import annotations

import math
from typing import Any

import dp_accounting
import numpy as np
import pytest
import torch
from scipy.stats import binom, norm
from torch import Tensor

from unalike.api import UserError
from unalike.audit.tap import Tapped
from unalike.audit.training import AttackedRun, audit, coins, judge, result_of
from unalike.core import release
from unalike.core.client import Client, Clients
from unalike.core.release import Sum
from unalike.core.task import Sent, send, task
from unalike.learn.ghost import GhostNorms
from unalike.privacy import Exponential, Gaussian, RandomizedResponse, accountant
from unalike.privacy.account import account
from unalike.privacy.audit import Quieter, allows, proven_epsilon, proven_noise, upper_bound
from unalike.runs.prepare import Prepared, prepare
from unalike.runs.recipe.settings import plan_for
from unalike.runs.simulate import simulation

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


def noisy_scores(z: float, real: float, rate: float, rounds: int, trials: int = 3000) -> tuple[Tensor, Tensor]:
    """Log-likelihood ratios of canaries in sampled Gaussian sums whose noise is really ``real``."""
    generator = torch.Generator().manual_seed(3)
    member = torch.rand(trials, generator=generator) < 0.5
    drawn = (torch.rand(rounds, trials, generator=generator) < rate) & member
    seen = (drawn + real * torch.randn(rounds, trials, generator=generator)).double()
    return torch.log1p(rate * torch.expm1((2 * seen - 1) / (2 * real**2))).sum(0), member


@pytest.mark.parametrize(("z", "rate", "rounds"), [(2.0, 1.0, 1), (1.0, 0.1, 10)])
def test_a_few_thousand_trials_tell_half_of_the_noise_from_all_of_it(z: float, rate: float, rounds: int) -> None:
    gaussian = dp_accounting.GaussianDpEvent(z)
    event = gaussian if rate == 1 else dp_accounting.PoissonSampledDpEvent(rate, gaussian)
    released = account([(event, rounds)])
    assert 1.0 <= proven_noise(*noisy_scores(z, z, rate, rounds), released) < 2.0
    assert 0.5 <= proven_noise(*noisy_scores(z, z / 2, rate, rounds), released) < 0.75


def test_rates_that_a_gaussian_allows_are_those_of_its_trade_off_curve() -> None:
    """β = Φ(Φ⁻¹(1 − α) − 1/z), by hand."""
    released = account([(dp_accounting.GaussianDpEvent(1.0), 1)])
    for alpha in (0.05, 0.2, 0.5):
        beta = float(norm.cdf(norm.isf(alpha) - 1.0))
        assert allows(released, 1.001 * alpha, 1.001 * beta)
        assert not allows(released, alpha, 0.98 * beta)
        assert not allows(released, 0.98 * beta, alpha)  # the other way round


def test_scaled_accounts_have_noise_times_a_factor() -> None:
    inner = dp_accounting.ComposedDpEvent((dp_accounting.GaussianDpEvent(2.0), dp_accounting.LaplaceDpEvent(3.0)))
    released = account([(dp_accounting.PoissonSampledDpEvent(0.1, inner), 4), (Exponential(0.5).event(), 2)])
    twice = dp_accounting.ComposedDpEvent((dp_accounting.GaussianDpEvent(4.0), dp_accounting.LaplaceDpEvent(6.0)))
    expected = account([(dp_accounting.PoissonSampledDpEvent(0.1, twice), 4), (Exponential(0.25).event(), 2)])
    assert accountant.scale_noise(released, 2.0) == expected
    (answer,) = accountant.scale_noise(account([(RandomizedResponse(1.0, 3).event(), 1)]), 0.5)
    assert answer[0].noise_parameter == pytest.approx(RandomizedResponse(2.0, 3).event().noise_parameter)


CHANCE = 0.85  # one honest audit in twenty finds less than all of the noise, by chance, but hardly one so little


def private(method: str = "fedavg", **settings: Any) -> Prepared:
    return prepare(plan_for([method], {**SMALL, **settings}).runs[0][1])


CLIENTS: dict[str, Any] = {"cohort": 0.5, "noise_multiplier": 1.0, "clip": 0.5, "delta": 1e-3, "rounds": 2}
POINTS: dict[str, Any] = {
    **{"cohort": 1.0, "unit": "point", "noise_multiplier": 1.0, "clip": 1.0, "delta": 1e-4, "rounds": 1, "batch": 12}
}


def test_clients_the_promise_holds_and_half_of_the_noise_is_found_out() -> None:
    prepared = private(**CLIENTS)
    honest = audit(prepared, canaries=2_500)
    assert honest.unit == "client" and honest.proof.noise > CHANCE
    assert 0.3 * honest.promised < honest.proof.best  # a weak attack would prove nothing
    cut = audit(prepared, canaries=1_900, cut_noise=0.5)
    assert cut.promised == honest.promised
    assert not cut.holds and cut.proof.noise < 0.8


def test_points_are_attacked_through_ghost_norms_and_half_of_the_noise_is_found_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls: list[float] = []
    real = GhostNorms.clipped_sum

    def watched(self: GhostNorms, *args: Any, **given: Any) -> Any:
        calls.append(args[-1])
        return real(self, *args, **given)

    monkeypatch.setattr(GhostNorms, "clipped_sum", watched)
    prepared = private(**POINTS)
    honest = audit(prepared, canaries=3_000)
    assert honest.unit == "point" and honest.proof.noise > CHANCE
    assert 0.3 * honest.promised < honest.proof.best
    assert calls.count(1.0) > 1 and set(calls) <= {1.0, 1e-3}  # a probe of the network has a clip of its own
    assert not audit(prepared, canaries=1_000, cut_noise=0.5).holds


def test_a_clip_that_is_forgotten_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    prepared = private(**CLIENTS)
    monkeypatch.setattr(release, "clipped", lambda value, bound, norm="l2": value / 2e5)  # 5 clips of a canary
    assert not audit(prepared, canaries=600).holds


def test_whoever_is_trusted_the_noise_is_attacked() -> None:
    prepared = private(**CLIENTS, trust="nobody")
    assert not audit(prepared, canaries=600, cut_noise=0.5).holds


def test_there_must_be_something_to_audit() -> None:
    with pytest.raises(UserError, match="promises no privacy"):
        audit(private(cohort=6))
    with pytest.raises(UserError, match="local has no private form"):
        audit(prepare(plan_for(["local"], SMALL).runs[0][1]))
    with pytest.raises(UserError, match="expected above 0 and at most 1"):
        audit(private(cohort=6, noise_multiplier=1.0, clip=1.0, delta=1e-3), cut_noise=0.0)


def test_the_clip_of_a_convolution_is_attacked_too(monkeypatch: pytest.MonkeyPatch) -> None:
    kernels: list[Any] = []
    real = GhostNorms.clipped_sum

    def watched(self: GhostNorms, *args: Any, **given: Any) -> Any:
        kernels.extend(layer.kernel for layer in self._layers if args[-1] == 1.0)
        return real(self, *args, **given)

    monkeypatch.setattr(GhostNorms, "clipped_sum", watched)
    assert not audit(private(**{**POINTS, "model": "small-cnn"}), canaries=1_000, cut_noise=0.5).holds
    assert kernels and None not in kernels


class Asks:
    """Asks for numbers of which each client may move one."""

    @task
    def update(self, client: Client) -> Sent:
        return send(update=torch.zeros(512))


@pytest.mark.parametrize("cut", [1.0, 0.5])
def test_cohorts_of_a_fixed_size_are_attacked_where_a_client_is_replaced(cut: float) -> None:
    clients = Clients.from_sizes(torch.zeros(512, 1), None, torch.ones(512))
    noisy = Sum("update", clip=1.0, noise=Quieter(Gaussian(1.0), cut))

    def run(number: int) -> AttackedRun:
        tapped = Tapped(simulation(clients, block=256, threads=1), number, member=coins(512, number), noise="system")
        for turn in range(1, 5):
            tapped.begin_round(turn).sample(256).ask(Asks().update, into=noisy)
        return result_of(tapped)

    found = judge("client", run, 1e-4, 2_048, cut, 0, 4)
    assert (found.proof.noise > CHANCE) == (cut == 1.0) and found.holds == (cut == 1.0)
    assert found.proof.best > 1.0


@pytest.mark.parametrize(("rate", "z"), [(1.0, 1.0), (0.25, 0.7)])
def test_what_a_replaced_client_of_a_fixed_cohort_gives_away(rate: float, z: float) -> None:
    """δ by hand: the integral of p − e^ε·q where that is above 0."""
    event = dp_accounting.SampledWithoutReplacementDpEvent(100, int(100 * rate), dp_accounting.GaussianDpEvent(z))
    released = account([(event, 1)])
    x = np.linspace(-20.0, 20.0, 200_001)
    p, q = ((1 - rate) * norm.pdf(x, 0, z) + rate * norm.pdf(x, mean, z) for mean in (0.5, -0.5))
    at = np.array([0.0, 0.3, 1.0, 2.0])
    expected = [np.maximum(p - math.exp(eps) * q, 0.0).sum() * (x[1] - x[0]) for eps in at]
    assert accountant.deltas(released, at) == pytest.approx(expected, rel=1e-3, abs=1e-6)
    found = accountant.attainable_epsilon(released, 1e-3)
    assert np.maximum(p - math.exp(found) * q, 0.0).sum() * (x[1] - x[0]) == pytest.approx(1e-3, rel=1e-2)
    assert found <= accountant.epsilon(released, 1e-3) * (1 + 1e-6)


class AsksTwice:
    """Two sums, of which one has much more noise than the other."""

    @task
    def both(self, client: Client) -> Sent:
        return send(loud=torch.zeros(512), quiet=torch.zeros(512))


@pytest.mark.parametrize("cut", [1.0, 0.1])
def test_a_release_whose_noise_hides_behind_that_of_another_is_found(cut: float) -> None:
    """One of two sums has a tenth of its noise; among what the other gives away this hardly counts."""
    clients = Clients.from_sizes(torch.zeros(512, 1), None, torch.ones(512))
    into = [Sum("loud", clip=1.0, noise=Quieter(Gaussian(8.0), cut)), Sum("quiet", clip=1.0, noise=Gaussian(0.5))]

    def run(number: int) -> AttackedRun:
        tapped = Tapped(simulation(clients, block=256, threads=1), number, member=coins(512, number), noise="system")
        for turn in range(1, 3):
            tapped.begin_round(turn).everyone().ask(AsksTwice().both, into=into)
        return result_of(tapped)

    found = judge("client", run, 1e-4, 2_048, cut, 0, 2)
    assert found.proof.noise > CHANCE  # together nothing is noticed
    assert found.apart["quiet"].noise > CHANCE and found.holds == (cut == 1.0)
    loud = found.apart["loud"]
    gaussian = account([(dp_accounting.GaussianDpEvent(8.0), 2)])
    assert loud.promised == pytest.approx(accountant.epsilon(gaussian, 1e-4))
    if cut < 1:
        assert loud.noise < 0.2 and loud.epsilon > 4 * loud.promised
    else:
        assert loud.noise > CHANCE
