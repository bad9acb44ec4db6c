"""An attacker who hears every answer, and clients of its own among those that are asked.

A canary is a client that sends what it wants: nothing at all (it takes no part), or one coordinate of its own, as large
as the release lets through. All else is the code that would run: the method's asks, its sampling of clients, clip,
sums, noise and ledger. Coordinates of different canaries do not touch, so all canaries of a run are independent trials
of one question, and a run is worth as many runs on neighbouring data sets (Steinke, Nasr and Jagielski 2023).

The score of a canary is the exact log-likelihood ratio of all that was heard on its coordinate, with the canary against
without it: no test of these answers is better.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from unalike.core.federation import Input
from unalike.core.release import Each, Release, Sum
from unalike.core.vocabulary import Client, Cohort, Federation, Replies, Sent, Task, each
from unalike.privacy.account import Account, Event, account
from unalike.privacy.ledger import Ledger
from unalike.privacy.mechanisms import AdditiveNoise, Norm
from unalike.privacy.sampling import FixedSize, Local, Poisson, Sampling

_FAR = 1e6  # how far a canary goes beyond a bound: the release has to bring it back
_PLACE, _SIGN = "canary_place", "canary_sign"


@dataclass
class Tapped(Federation):
    """A federation in which clients are canaries: ``sign`` [clients] is 1 where one takes part.

    Where a client is replaced and not left out, the canary of the other data set has sign −1, else 0.
    """

    member: Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.bool))
    observations: list[Observation] = field(default_factory=list)
    private_updates: list[Tensor] = field(default_factory=list)  # what clients sent that had made it private by DP-SGD
    fewest: int = 1 << 30  # numbers in an array that was heard: so many canaries have room beside each other

    def everyone(self) -> Cohort:
        return self._tap(super().everyone())

    def sample(self, *args: Any, **named: Any) -> Cohort:
        return self._tap(super().sample(*args, **named))

    def cohort(self, *args: Any, **named: Any) -> Cohort:
        return self._tap(super().cohort(*args, **named))

    def _tap(self, one: Cohort) -> Cohort:
        fields = {name: value for name, value in vars(one).items() if not name.startswith("_")}
        return _TappedCohort(**fields)


@dataclass(frozen=True)
class Observation:
    """What one release told about some canaries: numbers, and how a canary that takes part moves them."""

    name: str  # of the array
    event: Event  # as the ledger was told
    cohort: str
    sampling: Sampling
    clients: Tensor  # positions of the canaries
    seen: Tensor  # [canaries] in units of the noise's deviation
    shift: float  # of the canary that takes part, in the same unit
    norm: Norm
    replaced: bool


class _TappedCohort(Cohort):
    def ask(self, task: Task, /, into: Release | Sequence[Release] | None = None, **inputs: Input) -> Replies:
        federation = self.federation
        assert isinstance(federation, Tapped)
        chosen = into if into is not None else task.releases()
        asked = [chosen] if not isinstance(chosen, Sequence) else list(chosen)
        releases = [one for one in asked if _is_noisy(one)]
        if not releases:
            replies = super().ask(task, into=into, **inputs)
            federation.private_updates += [replies[one.names[0]].flatten() for one in asked if one.cost is not None]
            return replies
        replaced = self._replaced(releases)
        member = federation.member[self.positions]
        sign = torch.where(member, 1.0, -1.0 if replaced else 0.0)
        planted = _Planted(task, tuple(releases))
        marks: dict[str, Input] = {_PLACE: each(self.positions), _SIGN: each(sign)}
        replies = super().ask(planted, into=into, **inputs, **marks)
        shared = self._inputs(planted, {**inputs, **marks}).shared
        for release in releases:
            if release.names[0] in replies:
                self._listen(release.resolve(shared, self.declarations), replies, replaced)
        return replies

    def _replaced(self, releases: Sequence[Release]) -> bool:
        return any(isinstance(one, Each) for one in releases) or self.sampling.relation == "replace_one"

    def _listen(self, release: Release, replies: Replies, replaced: bool) -> None:
        federation, value = self.federation, replies[release.names[0]].to(torch.float64)
        assert isinstance(federation, Tapped)
        everybody = torch.arange(len(federation.roster))
        if isinstance(release, Each):
            noise, bound = release.noise, release.sensitivity
            assert noise is not None
            scale, shift = 1.0, 1.0  # of a randomizer: its values speak for themselves
            norm: Norm = "l2"
            if isinstance(noise, AdditiveNoise) and isinstance(bound, float | int):
                scale, norm = noise.std(bound), noise.norm
                shift = 0.5 * bound / scale
            seen = value.reshape(len(value), -1)[:, 0] / scale
            rows = self.positions[replies.answered]
            heard = Observation(
                release.names[0], noise.event(), "each", self.sampling, rows, seen, shift, norm, replaced=True
            )
            federation.observations.append(heard)
            return
        assert isinstance(release, Sum) and release.noise is not None
        change = release.change(self.sampling)
        std = release.noise.std(change)
        total = value.flatten() * release.divisor(len(replies.answered), 0.0, self.expected)
        federation.fewest = min(federation.fewest, total.numel())
        own = change / (2.0 if replaced else 1.0) / std
        seen = total[everybody % total.numel()] / std
        kind = release.noise.norm
        what = release.name, release.noise.event(), self.name, self.sampling
        federation.observations.append(Observation(*what, everybody, seen, own, kind, replaced))


def _is_noisy(release: Release) -> bool:
    return isinstance(release, Each | Sum) and release.noise is not None


class _Planted(Task):
    """The task, of which a canary sends what it wants. The task itself runs, so that what it keeps is there."""

    def __init__(self, task: Task, releases: tuple[Release, ...]) -> None:
        super().__init__(task.function, task.owner, vectorised=task.vectorised, into=task._into, derive=task._derive)
        self._releases = releases

    @property
    def pure(self) -> bool:
        return False  # what is planted is no field of the method

    def check_inputs(self, given: set[str]) -> None:
        super().check_inputs(given - {_PLACE, _SIGN})

    def __call__(self, client: Client, **inputs: Any) -> Sent:
        place, sign = inputs.pop(_PLACE), inputs.pop(_SIGN)
        sent = super().__call__(client, **inputs)
        arrays = dict(sent.arrays)
        for release in self._releases:
            name = release.names[0]
            honest = arrays[name]
            numbers = torch.arange(honest.numel()).reshape(honest.shape)
            where = 0 if isinstance(release, Each) else place % honest.numel()
            arrays[name] = (numbers == where).to(honest.dtype) * sign.to(honest.dtype) * _size_of(release, client)
        return Sent(arrays, sent.keep)


def _size_of(release: Release, client: Client) -> float | Tensor:
    """How large a canary makes its coordinate: far beyond the bound, or all that the task promises of one unit."""
    clip, bound = getattr(release, "clip", None), getattr(release, "sensitivity", None)
    if clip is not None:
        return float(_FAR * clip)
    if isinstance(release, Each):
        if bound is None:
            return _FAR  # a randomizer bounds its input by itself
        return 0.5 * (bound(client) if callable(bound) else float(bound))
    if bound is None or callable(bound):
        raise ValueError(f"the audit plants canaries within a clip or a number as sensitivity; {release} has neither")
    return float(bound)


def apart(tapped: Tapped) -> dict[str, tuple[Tensor, Account]]:
    """For each released array, where there are several, the scores by that alone, and what the ledger says of it."""
    names = list(dict.fromkeys(one.name for one in tapped.observations))
    found = {}
    for name in names if len(names) > 1 else ():
        heard, spent = [one for one in tapped.observations if one.name == name], Ledger()
        for one in heard:
            where: dict[str, Any] = {"sampling": one.sampling, "cohort": one.cohort}
            spent.record(one.event, **(where if one.cohort != "each" else {"sampling": Local(), "clients": (0,)}))
        found[name] = scores(heard, len(tapped.roster)), account([(spent.event(client=0), 1)])
    return found


def scores(heard: Sequence[Observation], count: int) -> Tensor:
    """[count] log-likelihood ratio of what was heard, for each canary's taking part."""
    cohorts: dict[str, list[Observation]] = {}
    for one in heard:
        cohorts.setdefault(one.cohort, []).append(one)
    total = torch.zeros(count, dtype=torch.float64)
    for asked in cohorts.values():
        present, other = torch.zeros(count, dtype=torch.float64), torch.zeros(count, dtype=torch.float64)
        for one in asked:
            present[one.clients] += _ratio(one.seen, one.shift, one.norm)
            if one.replaced:
                other[one.clients] += _ratio(one.seen, -one.shift, one.norm)
        rate = torch.tensor(_rate(asked[0].sampling) if asked[0].cohort != "each" else 1.0, dtype=torch.float64)
        total += sampled_ratio(present, rate) - (sampled_ratio(other, rate) if asked[0].replaced else 0.0)
    return total


def _ratio(seen: Tensor, shift: float, norm: Norm) -> Tensor:
    """log of the noise's density at seen − shift over that at seen; deviation 1."""
    if norm == "l2":
        return shift * seen - 0.5 * shift**2
    return math.sqrt(2.0) * (seen.abs() - (seen - shift).abs())


def sampled_ratio(ratio: Tensor, rate: Tensor) -> Tensor:
    """log(1 − q + q·e^ratio): the canary takes part only if it is drawn."""
    return torch.logaddexp(torch.log1p(-rate), torch.log(rate) + ratio) if rate < 1 else ratio


def _rate(sampling: Sampling) -> float:
    match sampling:
        case Poisson(rate):
            return float(rate)
        case FixedSize(size, population):
            return size / population
    return 1.0
