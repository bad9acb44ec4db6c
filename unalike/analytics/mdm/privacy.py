"""The noise that an MDM run needs to stay within (ε, δ): all its releases are counted before the first is made.

It protects a client, by noise on every sum, or one row of a client, by noise on its histogram. Noise on sums would not
do for a row, which may move its client to another component.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from unalike.analytics.mdm.algorithm import MDM
from unalike.analytics.mdm.counts import histogram_clients
from unalike.core.client import Clients
from unalike.core.release import Each, Release
from unalike.core.vocabulary import Client, Federation, Sent, send, task
from unalike.data.partition.mixture import MDMError
from unalike.privacy.account import Account, account, combine
from unalike.privacy.calibrate import least_noise
from unalike.privacy.ledger import Ledger
from unalike.privacy.mechanisms import Gaussian, Laplace
from unalike.privacy.sampling import Poisson


def noise_for_budget(
    settings: MDM, clients: int, candidates: Sequence[int], epsilon: float, delta: float, validated: bool
) -> Gaussian:
    """The least Gaussian noise for fitting all candidate numbers of components, at once, among ``clients`` clients.

    ``validated``: the candidates are compared on other clients, one more release. It is added up with the rest, as the
    ledger does, although no client is in both. With local noise a client answers one round, two releases at most.
    """
    if settings.local:
        return Gaussian(least_noise(lambda z: account([(Gaussian(z).event(), 2)]), epsilon, delta))
    wanted = settings.cohort if isinstance(settings.cohort, int) else settings.cohort * clients
    if not wanted > 0:
        raise MDMError(f"cohort={settings.cohort}; expected a number of clients or a share above 0")
    sampling = Poisson(min(1.0, wanted / clients))

    def one_cohort(z: float, releases: int) -> Ledger:
        ledger = Ledger()
        for _ in range(releases):
            ledger.record(Gaussian(z).event(), sampling=sampling, cohort=0)
        return ledger

    def released(z: float) -> Account:
        total: Account = account([(one_cohort(z, 2).event(), settings.rounds)])
        asks = 2 if settings.start == "concentration" and max(candidates) > 1 else 1
        total = combine(total, account([(one_cohort(z, asks).event(), 1)]))
        return combine(total, account([(Gaussian(z).event(), 1)])) if validated else total

    return Gaussian(least_noise(released, epsilon, delta))


@dataclass(frozen=True)
class NoisyHistograms:
    """Example-level privacy: every client sends its histogram once, with Laplace noise of its own.

    A row more or less changes one count by 1, so each row has ``epsilon``-DP, whoever sees the message and whatever is
    computed from it afterwards.
    """

    epsilon: float

    @task
    def histogram(self, client: Client) -> Sent:
        """The client's counts."""
        return send(histogram=client.x[0].to(torch.float64))

    @histogram.into
    def _noisy(self) -> list[Release]:
        return [Each("histogram", noise=Laplace(self.epsilon), sensitivity=1.0, unit="point")]

    def gather(self, federation: Federation) -> Clients:
        """Clients with histograms that are histograms again, and safe to use for anything."""
        return histogram_clients(round_counts(federation.everyone().ask(self.histogram)["histogram"]))


def round_counts(noisy: Tensor) -> Tensor:
    """The nearest counts from 0 on with the same total (at least 1), row by row, rounded.

    Cutting off at 0 alone would add half of the noise to every empty category, and make all clients look alike.
    """
    total = noisy.sum(1, keepdim=True).clamp(min=1.0)
    falling = noisy.sort(1, descending=True).values
    excess = (falling.cumsum(1) - total) / torch.arange(1, noisy.shape[1] + 1)
    last = (falling > excess).sum(1, keepdim=True) - 1  # the projection onto a simplex (Duchi et al. 2008)
    counts = (noisy - excess.gather(1, last)).clamp(min=0).round().long()
    empty = (counts.sum(1) == 0).nonzero().flatten()
    counts[empty, noisy[empty].argmax(1)] = 1
    return counts
