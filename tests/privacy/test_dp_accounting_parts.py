"""The private parts of dp_accounting are what they are taken for, and without them the numbers are the same."""

from __future__ import annotations

from importlib import metadata
from typing import Any

import dp_accounting as dp
import numpy as np
import pytest
from dp_accounting.pld import privacy_loss_distribution

from unalike.privacy import accountant, losses
from unalike.privacy.account import account
from unalike.privacy.dp_accounting_parts import CHECKED, gaussian_pld, hockey_stick, is_checked, self_compose


def test_the_installed_version_is_one_that_was_checked() -> None:
    assert metadata.version("dp-accounting") in CHECKED, (
        "dp_accounting is another version: if the tests of this file pass with it, add it to CHECKED"
    )


@pytest.mark.parametrize("rate", [0.02, 0.5, 1.0])
@pytest.mark.parametrize("z", [0.6, 3.0])
def test_the_loss_distribution_of_a_gaussian_is_that_of_dp_accounting_bit_by_bit(z: float, rate: float) -> None:
    theirs = privacy_loss_distribution.from_gaussian_mechanism(
        z, value_discretization_interval=5e-3, sampling_prob=rate
    )
    ours = gaussian_pld(z, rate, 5e-3)
    assert_same_losses(ours, theirs)
    for count in (2, 100):
        assert_same_losses(self_compose(ours, count), theirs.self_compose(count))


def assert_same_losses(ours: Any, theirs: Any) -> None:
    for way in ("_pmf_remove", "_pmf_add"):
        one, other = (getattr(pld, way).to_dense_pmf() for pld in (ours, theirs))
        assert one._lower_loss == other._lower_loss and one._infinity_mass == other._infinity_mass
        assert np.array_equal(one._probs, other._probs)


def test_the_hockey_stick_divergence_is_that_of_dp_accounting() -> None:
    theirs = privacy_loss_distribution.from_laplace_mechanism(1.0, value_discretization_interval=1e-3)
    at = np.array([-0.5, -1e-4, 0.0, 0.3, 1.0, 50.0])
    assert hockey_stick(theirs, at) == pytest.approx(theirs.get_delta_for_epsilon(list(at)), abs=1e-12)


def test_with_a_version_that_nobody_checked_the_public_way_gives_the_same_epsilon(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sampled = dp.PoissonSampledDpEvent(0.1, dp.ComposedDpEvent([dp.LaplaceDpEvent(2.0), dp.GaussianDpEvent(2.0)]))
    released = account([(sampled, 3), (dp.PoissonSampledDpEvent(0.1, dp.GaussianDpEvent(1.2)), 20)])
    fast = fresh_epsilon(released)
    monkeypatch.setattr("unalike.privacy.dp_accounting_parts.CHECKED", ())
    monkeypatch.setattr("unalike.privacy.dp_accounting_parts.GaussianPrivacyLoss", None)  # it may well be gone
    is_checked.cache_clear()
    try:
        assert not is_checked()
        assert fresh_epsilon(released) == pytest.approx(fast, rel=1e-9)
    finally:
        is_checked.cache_clear()


def fresh_epsilon(released: Any) -> float:
    for remembered in (accountant.epsilon, losses._repeated_pld, losses._single_pld):
        remembered.cache_clear()
    return accountant.epsilon(released, 1e-5, 64)
