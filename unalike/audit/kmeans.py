"""Audit FedDP-KMeans by an attack on its own ``fit``.

The population is made so that one run holds many independent trials. There are as many clusters, server points and
dimensions as canaries, and canary i lies on axis i, far outside the radius Δ: after clipping it changes the Gram
matrix, the weight of server point i, and the sum and count of cluster i, each by all that the noise was made for, and
nothing of what another canary changes. A coin decides whether it takes part. Other points, the same in every run, keep
the centres near their axes while Lloyd steps are taken.

The attacker hears every question and every noisy answer, and knows all points that are not canaries. Its score for a
canary is the exact log-likelihood ratio of all answers, with the canary against without it: no test is better.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from unalike.analytics.kmeans.algorithm import FedDPKMeans
from unalike.analytics.kmeans.budget import KMeansPrivacy, StepNoise
from unalike.audit.training import AttackedRun, Audit, check_cut, coins, judge
from unalike.core.client import Clients
from unalike.core.federation import Cohort, Federation, Input, Replies
from unalike.core.release import Each, Release, Sum, Trust
from unalike.core.task import Task
from unalike.privacy.account import Account, account
from unalike.privacy.audit import Quieter
from unalike.privacy.ledger import Ledger
from unalike.privacy.sampling import Sampling
from unalike.runs.simulate import simulation

_SLOTS = 64  # canaries in one run
_FEW_SLOTS = 32  # where thousands of other clients have to be asked as well
_FAR = 100.0  # norm of a canary, in radii: clipping must bring it back
_TYPICAL = 0.9  # norm of all other points, in radii; the bounds on a client follow from it, and a canary is above them
_CLIENTS = 4  # that hold the points, where points are protected
_FAST: Any = {"block": 4096, "threads": 1}
_STEADY = 10.0  # other points in a cluster, over the noise of its sums and counts: its centre stays where it is


def audit_kmeans(
    privacy: KMeansPrivacy,
    *,
    steps: int = 0,
    canaries: int | None = None,
    cut_noise: float = 1.0,
    seed: int = 0,
    trust: Trust = "server",
    progress: Callable[[int], None] | None = None,
) -> Audit:
    """Attack FedDP-Init and ``steps`` of FedDP-Lloyds with this budget.

    ``cut_noise`` below 1 scales the real noise of all answers down behind the ledger's back.
    """
    check_cut(cut_noise)
    slots = _FEW_SLOTS if steps and privacy.unit == "client" else _SLOTS
    method = FedDPKMeans(k=slots, privacy=privacy, steps=steps, radius=1.0, center=False, client_points=1, starts=1)
    known, canary = _TYPICAL * torch.eye(slots).repeat(_others(method), 1), _FAR * torch.eye(slots)
    noise = {name: None if one is None else Quieter(one, cut_noise) for name, one in vars(method.plan).items()}
    attacked = replace(method, noise=StepNoise(**noise))
    done = 0

    def run(number: int) -> AttackedRun:
        nonlocal done
        done += 1
        if progress is not None:
            progress(done)
        took_part = coins(slots, number)
        clients = _clients(torch.cat([known, canary[took_part]]), privacy)
        federation = _Tapped(simulation(clients, **_FAST), number, noise="system", trust=trust)
        attacked.fit(federation, _TYPICAL * torch.eye(slots))
        assert federation.observations, "an attacker who hears nothing proves nothing"
        score = _scores(federation.observations, _clients(known, privacy), canary)
        apart = {name: (one, _spent(federation.observations, name)) for name, one in score.items()}
        together = torch.stack(list(score.values())).sum(0)
        return AttackedRun(together, took_part, account([(federation.ledger.event(), 1)]), apart)

    return judge(privacy.unit, run, privacy.delta, canaries, cut_noise, seed, steps)


def _others(method: FedDPKMeans) -> int:
    """How many points other than canaries a cluster needs."""
    if method.steps == 0:
        return 2  # the centres are the server points and nothing can move them
    plan = method.plan
    assert plan.sums is not None and plan.counts is not None
    return math.ceil(_STEADY * max(plan.sums.std(1.0), plan.counts.std(1.0)))


def _clients(points: Tensor, privacy: KMeansPrivacy) -> Clients:
    """A few clients with all points; where clients are protected, one for each point."""
    count = len(points) if privacy.unit == "client" else _CLIENTS
    sizes = torch.full((count,), len(points) // count)
    sizes[-1] += len(points) - int(sizes.sum())
    return Clients.from_sizes(points, None, sizes)


@dataclass(frozen=True)
class _Observation:
    """One ask as the server sees it."""

    task: Task
    inputs: Mapping[str, Input]
    releases: list[Sum]  # as they were known at both sides
    replies: Replies
    sampling: Sampling


@dataclass
class _Tapped(Federation):
    """A federation that remembers every question and answer."""

    observations: list[_Observation] = field(default_factory=list)

    def everyone(self) -> Cohort:
        one = super().everyone()
        return _TappedCohort(self, one.positions, one.sampling, one.expected, one.name)


class _TappedCohort(Cohort):
    def ask(self, task: Task, /, into: Release | Sequence[Release] | None = None, **inputs: Input) -> Replies:
        replies = super().ask(task, into=into, **inputs)
        shared = self._inputs(task, inputs).shared
        releases = [one.resolve(shared, self.declarations) for one in task.releases() if isinstance(one, Sum)]
        assert isinstance(self.federation, _Tapped) and into is None
        self.federation.observations.append(_Observation(task, inputs, releases, replies, self.sampling))
        return replies


def _spent(observations: list[_Observation], name: str) -> Account:
    """What the ledger says of one array."""
    spent = Ledger()
    for one in observations:
        for release in one.releases:
            if release.name == name and release.noise is not None:
                spent.record(release.noise.event(), unit=release.unit, sampling=one.sampling)
    return account([(spent.event(), 1)])


def _scores(observations: list[_Observation], rest: Clients, canary: Tensor) -> dict[str, Tensor]:
    """By array: [canaries] log-likelihood ratio of all answers, for each canary's presence against its absence."""
    single = Clients.from_sizes(canary, None, torch.ones(len(canary)))
    known, alone = (Federation(simulation(one, **_FAST), purpose="measure").everyone() for one in (rest, single))
    score: dict[str, Tensor] = {}
    for one in observations:
        # Clients of one point have counts that are as long in L1 as in L2, so that bounds without noise are the same.
        without = known.ask(one.task, into=[Sum(each.name, clip=each.clip) for each in one.releases], **one.inputs)
        shares = alone.ask(one.task, into=[Each(each.name, clip=each.clip) for each in one.releases], **one.inputs)
        for release in one.releases:
            assert release.noise is not None
            std = release.noise.std(release.change(one.sampling))
            seen = (one.replies[release.name].double() - without[release.name].double()).flatten()
            share = shares[release.name].double().flatten(1)  # [canaries, numbers]
            if release.noise.norm == "l2":
                ratio = (share @ seen - 0.5 * share.square().sum(1)) / std**2
            else:
                ratio = math.sqrt(2.0) * (seen.abs() - (seen - share).abs()).sum(1) / std
            score[release.name] = score.get(release.name, torch.zeros(())) + ratio
    return score
