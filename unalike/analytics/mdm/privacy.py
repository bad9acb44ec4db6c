"""The noise that an MDM run needs to stay within (ε, δ): all its releases are counted before the first is made."""

from __future__ import annotations

from collections.abc import Sequence

from unalike.analytics.mdm.algorithm import MDM
from unalike.data.partition.mixture import MDMError
from unalike.privacy.account import Account, account, combine
from unalike.privacy.calibrate import least_noise
from unalike.privacy.ledger import Ledger
from unalike.privacy.mechanisms import Gaussian
from unalike.privacy.sampling import Poisson


def noise_for_budget(
    settings: MDM, clients: int, candidates: Sequence[int], epsilon: float, delta: float, validated: bool
) -> Gaussian:
    """The least Gaussian noise for fitting every candidate number of components among ``clients`` clients.

    ``validated``: the candidates are compared on other clients, one more release. It is added up with the rest, as the
    ledger does, although no client is in both.
    """
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
        total: Account = account([(one_cohort(z, 2).event(), settings.rounds * len(candidates))])
        for components in candidates:
            asks = 2 if settings.start == "concentration" and components > 1 else 1
            total = combine(total, account([(one_cohort(z, asks).event(), 1)]))
        return combine(total, account([(Gaussian(z).event(), 1)])) if validated else total

    return Gaussian(least_noise(released, epsilon, delta))
