"""Local DP-SGD (Abadi et al. 2016): what its steps cost a data point, and the noise for a target.

The steps themselves are in ``learn/dpsgd.py``.

A client takes Poisson batches of its own N points at rate q, clips every point's gradient to C, adds N(0, (z·C)²) to
their sum and divides by the expected batch size q·N. One point, added or removed, is protected. Points of different
clients do not meet, so every client has an ε of its own: ``ledger.record(event, unit="point", clients=[client])``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

from unalike.privacy.account import account
from unalike.privacy.calibrate import least_noise
from unalike.privacy.checks import check_at_least, check_delta, check_epsilon, check_positive
from unalike.privacy.ledger import Charge
from unalike.privacy.mechanisms import Gaussian
from unalike.privacy.sampling import Local

if TYPE_CHECKING:
    from dp_accounting import DpEvent


@dataclass(frozen=True)
class Steps:
    """``count`` steps of DP-SGD with Poisson batches at this rate; rate 1 is the full batch."""

    rate: float
    count: int

    def __post_init__(self) -> None:
        if not 0 < self.rate <= 1:
            raise ValueError(
                f"the batch rate must be above 0 and at most 1, got {self.rate}; give batch size / data size"
            )
        check_at_least(self.count, 1, "count", "give how many steps are taken")

    @classmethod
    def of(cls, batch: int, size: int, count: int) -> Steps:
        """Steps of an expected batch size on a client of ``size`` points (a larger batch is the full batch)."""
        check_at_least(batch, 1, "batch", "give the expected batch size")
        check_at_least(size, 1, "size", "a client without data takes no steps")
        return cls(min(1.0, batch / size), count)

    def round_up(self) -> Steps:
        """The next rate and count of a short list (16 for each doubling): they cost at least as much.

        Clients of a thousand sizes then share a few dozen calibrations; the noise is at most a few per cent too much.
        """
        rate = 2.0 ** (math.ceil(16.0 * math.log2(self.rate)) / 16.0)
        count = math.ceil(2.0 ** (math.ceil(16.0 * math.log2(self.count)) / 16.0))
        return Steps(min(1.0, rate), count)


def event(noise_multiplier: float, *steps: Steps) -> DpEvent:
    """The event of all steps with one noise multiplier, for example full batches first and small ones afterwards."""
    check_positive(noise_multiplier, "noise_multiplier", "it is standard deviation / clip; noise_for(...) finds it")
    import dp_accounting

    gaussian = dp_accounting.GaussianDpEvent(noise_multiplier)
    parts = tuple(
        dp_accounting.SelfComposedDpEvent(dp_accounting.PoissonSampledDpEvent(phase.rate, gaussian), phase.count)
        for phase in steps
    )
    return dp_accounting.ComposedDpEvent(parts)


def epsilon(noise_multiplier: float, *steps: Steps, delta: float, also: Sequence[float] = ()) -> float:
    """ε of one point of a client that takes these steps, with Gaussian sums of the noise multipliers ``also``."""
    from unalike.privacy import accountant

    others = ((Gaussian(other).event(), 1) for other in also)
    return accountant.epsilon(account([(event(noise_multiplier, *steps), 1), *others]), delta)


@lru_cache(maxsize=4096)  # clients alike in size and target share the solution
def noise_for(epsilon: float, delta: float, *steps: Steps, also: tuple[DpEvent, ...] = ()) -> float:
    """The least noise multiplier with which a client's steps (and the events ``also``) stay within its (ε, δ)."""
    others = tuple((other, 1) for other in also)
    return least_noise(lambda z: account([(event(z, *steps), 1), *others]), epsilon, delta)


@dataclass(frozen=True)
class LocalCost:
    """What a task that trains by DP-SGD has cost the points of each client of a cohort.

    A release with ``cost=`` shows only what such a task made, so that it is as private as the training was, and the
    ledger charges every client with its own event.
    """

    events: tuple[DpEvent, ...]  # in cohort order
    clip: float
    noise: tuple[tuple[str, str | float], ...] = (("kind", "DP-SGD"),)  # for the transcript; the kind comes first

    def charges(self, clients: Sequence[int]) -> list[Charge]:
        """One charge for all clients with equal events."""
        if len(clients) != len(self.events):
            raise ValueError(f"the cost is of {len(self.events)} clients, but the cohort has {len(clients)}")
        owners: dict[DpEvent, list[int]] = {}
        for client, its_event in zip(clients, self.events, strict=True):
            owners.setdefault(its_event, []).append(client)
        return [Charge(one, "point", Local(), clients=tuple(who)) for one, who in owners.items()]


@dataclass(frozen=True)
class PointPrivacy:
    """DP-SGD at the clients: every sample's gradient is clipped to ``clip``, and every step has noise.

    The noise is ``noise_multiplier`` · clip for everybody; or, with ``epsilon`` and ``delta``, each client's own, found
    from its number of samples so that ``rounds`` rounds of training cost it no more than that. With ``per_client`` each
    client declares its own (ε, δ). ``batches``: clients declare batch sizes of their own, out of these, ascending.
    ``also``: noise multipliers of Gaussian sums that the run releases besides, once each. Neighbours differ by one
    point that is added or removed; the size N̄ is public.
    """

    clip: float = 1.0
    noise_multiplier: float | None = None
    epsilon: float | None = None
    delta: float | None = None
    rounds: int | None = None
    rounded: bool = False  # calibrate for rounded steps: for clients of very many sizes
    per_client: bool = False
    batches: tuple[int, ...] | None = None
    also: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        check_positive(self.clip, "the clip bound", "give the largest norm that one point's gradient may have")
        if self.noise_multiplier is not None:
            check_positive(self.noise_multiplier, "noise_multiplier", "it is standard deviation / clip")
        elif self.rounds is None or (not self.per_client and (self.epsilon is None or self.delta is None)):
            raise ValueError(
                "DP-SGD needs noise: give noise_multiplier, or rounds and either epsilon and delta or "
                "per_client=True, from which it is found"
            )
        else:
            check_at_least(self.rounds, 1, "rounds", "give in how many rounds a client takes part at most")
        if self.epsilon is not None and self.delta is not None:
            check_epsilon(self.epsilon)
            check_delta(self.delta)
        if self.batches is not None and (self.batches != tuple(sorted(set(self.batches))) or min(self.batches) < 1):
            raise ValueError(f"batches={self.batches}; expected different batch sizes of at least 1, ascending")

    def charged_steps(self, steps: Steps) -> Steps:
        """What a client that takes these steps in a round is charged with."""
        return steps.round_up() if self.rounded else steps

    def multiplier(self, steps: Steps, epsilon: float | None = None, delta: float | None = None) -> float:
        """The noise multiplier of a client that is charged with these steps in every round and declares (ε, δ)."""
        if self.noise_multiplier is not None:
            return self.noise_multiplier
        if not self.per_client:
            epsilon, delta = self.epsilon, self.delta
        if epsilon is None or delta is None or self.rounds is None:
            raise ValueError("every client has its own (ε, δ) here, but this one declares none: see Roster.epsilon")
        others = tuple(Gaussian(z).event() for z in self.also)
        return noise_for(epsilon, delta, Steps(steps.rate, steps.count * self.rounds), also=others)

    def cost(self, events: Sequence[DpEvent]) -> LocalCost:
        """What training has cost the clients of a cohort, by the events of each."""
        z = self.noise_multiplier
        noise = () if z is None else (("noise_multiplier", z),)
        return LocalCost(tuple(events), self.clip, (("kind", "DP-SGD"), *noise))
