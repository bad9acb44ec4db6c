"""Audit the private analyses that ask clients in the same way as training does: MDM and personalized estimation.

Canaries are clients that send what they want (``tap.py``), among nobody else. In MDM each has a number of its own in
every sum. An estimate's messages are noised by their clients: every client is a trial by itself.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from unalike.analytics.estimation.means import BernoulliRates, GaussianMeans
from unalike.analytics.estimation.shared import Channel
from unalike.analytics.mdm.algorithm import MDM
from unalike.analytics.mdm.counts import histogram_clients
from unalike.analytics.mdm.privacy import noise_for_budget
from unalike.audit.tap import Tapped
from unalike.audit.training import AttackedRun, Audit, check_cut, coins, judge, result_of
from unalike.core.client import Clients
from unalike.core.release import Each, Trust
from unalike.privacy.audit import Quieter, Truer
from unalike.runs.simulate import simulation

_FAST: Any = {"block": 256, "threads": 1}
_SLOTS = 513  # canaries in a run of MDM: its smallest sum has a number for each
_ROUNDS = 20  # of MDM that are attacked, at most
_CLIENTS = 4_000  # of an estimate


def audit_mdm(
    epsilon: float,
    delta: float,
    *,
    rounds: int = _ROUNDS,
    rate: float = 0.2,
    trust: Trust = "server",
    canaries: int | None = None,
    cut_noise: float = 1.0,
    seed: int = 0,
) -> Audit:
    """Attack a fit of one component with noise for this ε and δ: Poisson cohorts at this rate, all sums together."""
    check_cut(cut_noise)
    taken = min(rounds, _ROUNDS)
    settings = MDM(_SLOTS, largest=4 * _SLOTS, components=1, rounds=taken, cohort=rate, size_bins=_SLOTS - 1)
    noise = noise_for_budget(settings, 10 * _SLOTS, [1], epsilon, delta, validated=False)
    attacked = replace(settings, noise=Quieter(noise, cut_noise))
    histograms = histogram_clients(torch.randint(0, 4, (_SLOTS, _SLOTS), generator=torch.Generator().manual_seed(seed)))

    def run(number: int) -> AttackedRun:
        tapped = Tapped(
            simulation(histograms, **_FAST), number, member=coins(_SLOTS, number), noise="system", trust=trust
        )
        attacked.fit(tapped)
        return result_of(tapped)

    return judge("client", run, delta, canaries, cut_noise, seed, taken, rounds)


def audit_estimate(
    kind: str, epsilon: float, delta: float, *, canaries: int | None = None, cut_noise: float = 1.0, seed: int = 0
) -> Audit:
    """Attack the messages of ``gaussian`` means (Gaussian noise) or ``bernoulli`` rates (randomized response)."""
    check_cut(cut_noise)
    make: dict[str, Callable[[], Any]] = {
        "gaussian": lambda: GaussianMeans(
            sigma_theta=1.0, sigma_x=1.0, radius=1.0, channel=_Channel(None, epsilon, delta, cut=cut_noise)
        ),
        "bernoulli": lambda: _Rates(epsilon=epsilon, cut=cut_noise),
    }
    estimator = make[kind]()

    def run(number: int) -> AttackedRun:
        x = torch.zeros(2 * _CLIENTS, 1)
        clients = Clients.from_sizes(x, None, torch.full((_CLIENTS,), 2))
        tapped = Tapped(simulation(clients, **_FAST), number, member=coins(_CLIENTS, number), noise="system")
        estimator.fit(tapped)
        return result_of(tapped)

    return judge("client", run, delta, canaries, cut_noise, seed, 1)


@dataclass(frozen=True)
class _Channel(Channel):
    """Whose real noise is ``cut`` of what it says."""

    cut: float = 1.0

    def release(self, name: str, uses: int = 1) -> Each:
        return Each(name, clip=1.0, noise=Quieter(self.noise(uses), self.cut))


@dataclass(frozen=True)
class _Rates(BernoulliRates):
    """Whose real ε is 1/``cut`` of what it says."""

    cut: float = 1.0

    @property
    def _message(self) -> Truer:
        assert self.epsilon is not None
        return Truer(self.epsilon, cut=self.cut)
