"""Calibration and DP-SGD: the noise found costs the target, no more, and hardly less."""

from __future__ import annotations

import math

import dp_accounting as dp
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from unalike.core.draws import Draws, key
from unalike.learn import dpsgd as private_steps
from unalike.learn.ghost import clip_factors
from unalike.privacy import Everyone, FixedSize, Gaussian, Laplace, Ledger, Poisson, Sampling, calibrate, dpsgd
from unalike.privacy.dpsgd import Steps

DELTA = 1e-5


@pytest.mark.parametrize("sampling", [Everyone(), Poisson(0.05), FixedSize(50, 1000)], ids=["all", "poisson", "fixed"])
def test_least_noise_meets_the_target_from_the_private_side(sampling: Sampling) -> None:
    z = calibrate.noise_multiplier(1.0, DELTA, 40, sampling)
    planned = calibrate.predict_cost(z, 40, sampling, delta=DELTA)
    assert planned.epsilon <= 1.0
    assert planned.epsilon == pytest.approx(1.0, abs=1e-3)


def test_full_participation_has_a_closed_form() -> None:
    z = calibrate.noise_multiplier(2.0, DELTA, 25)
    assert z == pytest.approx(5.0 * Gaussian.for_budget(2.0, DELTA).noise_multiplier, rel=2e-4)


def test_plan_equals_what_the_ledger_says_after_the_run() -> None:
    ledger = Ledger()
    for cohort in range(12):
        ledger.record(Gaussian(2.0).event(), sampling=Poisson(0.1), cohort=cohort)
        ledger.record(Gaussian(9.0).event(), sampling=Poisson(0.1), cohort=cohort)
    planned = calibrate.predict_cost(2.0, 12, Poisson(0.1), delta=DELTA, also=[Gaussian(9.0).event()])
    assert planned.epsilon == ledger.epsilon(DELTA)
    assert planned.method == "PLD"


def test_a_target_that_other_releases_use_up_is_refused() -> None:
    with pytest.raises(ValueError, match=r"even with unlimited noise .* more than the target 0.5"):
        calibrate.noise_multiplier(0.5, DELTA, 3, Everyone(), also=(Laplace(0.4).event(),))


@pytest.mark.parametrize(("epsilon", "delta", "rounds"), [(0.0, DELTA, 3), (1.0, 1.0, 3), (1.0, DELTA, 0)])
def test_nonsense_is_refused(epsilon: float, delta: float, rounds: int) -> None:
    with pytest.raises(ValueError, match="must be"):
        calibrate.noise_multiplier(epsilon, delta, rounds)


def test_local_training_equals_dp_accounting_per_client() -> None:
    accountant = dp.pld.PLDAccountant()
    accountant.compose(dp.GaussianDpEvent(4.0), 2)
    accountant.compose(dp.PoissonSampledDpEvent(0.1, dp.GaussianDpEvent(4.0)), 50)
    steps = Steps(1.0, 2), Steps.of(20, 200, 50)
    expected = accountant.get_epsilon(DELTA - 50 * 2e-12)  # each Poisson batch may be cut, with that probability
    assert dpsgd.epsilon(4.0, *steps, delta=DELTA) == pytest.approx(expected, abs=1e-6)
    ledger = Ledger()
    ledger.record(dpsgd.event(4.0, *steps), unit="point", clients=[7])
    assert ledger.epsilon(DELTA, client=7) == pytest.approx(expected, abs=1e-6)
    assert ledger.epsilon(DELTA, client=8) == 0.0


def test_every_client_gets_the_noise_for_its_own_target() -> None:
    steps = Steps(1.0, 2), Steps.of(32, 320, 30)
    noises = [dpsgd.noise_for(epsilon, DELTA, *steps) for epsilon in (0.5, 1.0)]
    assert noises[0] > noises[1]
    for epsilon, z in zip((0.5, 1.0), noises, strict=True):
        assert epsilon - 2e-3 < dpsgd.epsilon(z, *steps, delta=DELTA) <= epsilon
    selecting = dpsgd.noise_for(1.0, DELTA, *steps, also=(Gaussian(8.0).event(),))
    assert selecting > noises[1]


@given(
    st.lists(st.lists(st.floats(-(2.0**60), 2.0**60, width=32), min_size=3, max_size=3), min_size=1, max_size=6),
    st.floats(1e-3, 1e3),
)
@example([[0.0, 0.0, 1.0]], 299.375)
def test_every_row_is_clipped_on_its_own(rows: list[list[float]], bound: float) -> None:
    gradients = torch.tensor(rows)
    clipped = gradients * clip_factors(torch.linalg.vector_norm(gradients, dim=-1), bound)[:, None]
    assert bool((torch.linalg.vector_norm(clipped.double(), dim=-1) <= bound).all())
    small = torch.linalg.vector_norm(gradients, dim=-1) <= 0.999 * bound
    assert torch.equal(clipped[small], gradients[small])


def test_private_gradient_is_clipped_sum_plus_noise_over_the_expected_batch() -> None:
    gradients = torch.tensor([[3.0, 4.0], [0.3, 0.4], [30.0, 40.0], [math.nan, 1.0]])
    taken = torch.tensor([True, True, False, True])
    total = private_steps.clipped_sum(gradients, taken, 1.0)
    still = private_steps.noisy(total, 1.0, 1e-9, Draws(key(1)), rows=4) / 2.0
    torch.testing.assert_close(still, torch.tensor([0.45, 0.6]), atol=1e-4, rtol=0.0)

    def once(client: torch.Tensor) -> torch.Tensor:
        total = private_steps.clipped_sum(torch.zeros(4, 50), taken, 1.5)
        return private_steps.noisy(total, 1.5, 2.0, Draws(key(2, client)), rows=4) / 4.0

    noise = torch.func.vmap(once)(torch.arange(2000))
    assert float(noise.var()) == pytest.approx((1.5 * 2.0 / 4.0) ** 2, rel=0.03)


def test_an_impossible_batch_is_refused() -> None:
    with pytest.raises(ValueError, match=r"rate must be above 0 and at most 1, got 1\.5"):
        Steps(1.5, 1)
    with pytest.raises(ValueError, match="size must be a whole number of at least 1, got 0"):
        Steps.of(10, 0, 5)
    assert Steps.of(10, 4, 5).rate == 1.0
