"""Audit a recipe's privacy by an attack on the code that would run.

The attacked run is the recipe's method with its clip, noise, sampling rate and number of rounds, on a population made
of canaries. Every canary owns one coordinate of a small model (an embedding table) that no other data moves, and pulls
it as hard as its clip allows. A coin decides whether it takes part. Because the coordinates do not touch each other,
all canaries of a run are independent trials of one and the same question, and one run is worth thousands of runs on
neighbouring data sets. The attacker sees every released sum and tells by it who took part; ``proven_epsilon`` says what
that proves, and the ledger of the attacked run says what was promised.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from unalike import simulate
from unalike.core.client import Clients
from unalike.core.draws import Draws, key
from unalike.core.method import Auditable
from unalike.core.model import Model
from unalike.learn.local import LocalSGD
from unalike.privacy import Gaussian
from unalike.privacy.audit import Proof, Quieter, canaries_for, proven_epsilon
from unalike.privacy.dpsgd import LocalCost, PointPrivacy
from unalike.studio.errors import UserError
from unalike.studio.runs.prepare import Prepared
from unalike.studio.runs.privacy import participations, sampling_rate, training_sizes

SLOTS = 4096  # canaries in one run; more canaries are more runs
_PULL = 1e4  # the target that a canary pulls its coordinate to: far beyond what the clip lets through


@dataclass(frozen=True)
class Audit:
    """What the ledger promises about the attacked runs, and what the attack proves."""

    unit: str
    promised: float  # the ledger's ε
    proof: Proof
    canaries: int
    rounds: int
    cut_noise: float

    @property
    def holds(self) -> bool:
        """Is the promise compatible with the attack?"""
        return self.proof.epsilon <= self.promised


def audit(prepared: Prepared, *, canaries: int | None = None, cut_noise: float = 1.0, seed: int = 0) -> Audit:
    """Attack the recipe's method. ``cut_noise`` below 1 scales the real noise down behind the ledger's back."""
    method = prepared.method
    if not isinstance(method, Auditable):
        raise UserError(f"the audit knows fedavg and its relatives, not {prepared.recipe.method}")
    check_cut(cut_noise)
    if method.noise is not None:
        unit, attack = "client", _attack_clients
    elif method.local.private is not None:
        unit, attack = "point", _attack_points
    else:
        raise UserError("this recipe promises no privacy: give --epsilon or --noise-multiplier with --clip")
    done = [attack(method, prepared, cut_noise, seed)]
    runs = -(-(canaries or canaries_for(done[0].promised)) // SLOTS)
    done += [attack(method, prepared, cut_noise, seed + number) for number in range(1, runs)]
    scores, member = torch.cat([one.scores for one in done]), torch.cat([one.member for one in done])
    proof = proven_epsilon(scores, member, prepared.delta)
    return Audit(unit, max(one.promised for one in done), proof, len(scores), done[0].rounds, cut_noise)


def check_cut(cut_noise: float) -> None:
    """Refuse a factor that would not cut the noise."""
    if not 0 < cut_noise <= 1:
        raise UserError(f"--cut-noise {cut_noise}: expected above 0 and at most 1 (1: the noise as it is)")


@dataclass(frozen=True)
class _Attacked:
    """One attacked run: a score for every canary, whether it took part, and what the run's ledger says."""

    scores: Tensor
    member: Tensor
    promised: float
    rounds: int


def _attack_clients(method: Auditable, prepared: Prepared, cut_noise: float, seed: int) -> _Attacked:
    """Canaries are clients with one sample each, in or out of the population."""
    noise, clip = method.noise, method.clip
    assert isinstance(noise, Gaussian) and clip is not None
    rate = sampling_rate(method.cohort, prepared.roster)
    member = _coins(SLOTS, seed)
    slot = member.nonzero()
    clients = Clients.from_sizes(slot, torch.full((len(slot),), _PULL), torch.ones(len(slot)))
    local = LocalSGD(steps=1, batch=1, lr=1.0)
    attacked = method.attacked(Model(nn.Embedding(SLOTS, 1)), float(rate), local, Quieter(noise, cut_noise))
    federation = simulate(clients, seed, block=256)
    expected, z = rate * len(clients), noise.noise_multiplier
    score = torch.zeros(SLOTS, dtype=torch.float64)
    state, rounds = attacked.start(seed), max(1, prepared.recipe.rounds)
    for number in range(1, rounds + 1):
        after = attacked.round(state, federation.begin_round(number))
        seen = (after.theta - state.theta).to(torch.float64) * expected / clip  # 0 or 1, plus noise of deviation z
        # Log-likelihood ratio of a canary that is drawn at this rate against one that is not there.
        score += torch.log1p(rate * torch.expm1((2 * seen - 1) / (2 * z * z)))
        state = after
    return _Attacked(score, member, federation.ledger.epsilon(prepared.delta), rounds)


def _attack_points(method: Auditable, prepared: Prepared, cut_noise: float, seed: int) -> _Attacked:
    """Canaries are samples of one client, whose batches have the rate and number of the recipe's smallest client."""
    private = method.local.private
    assert private is not None
    steps = method.local.steps_of(min(training_sizes(prepared.roster)))
    z = private.multiplier(steps)
    rounds = participations(method.cohort, prepared.roster, max(1, prepared.recipe.rounds))
    member = _coins(SLOTS, seed)
    slot = member.nonzero()
    clients = Clients.from_sizes(slot, torch.full((len(slot),), _PULL), torch.tensor([len(slot)]))
    batch = max(1, int(steps.rate * len(slot)))  # rounded down: the attacked rate is at most that of the recipe
    local = _Honest(
        steps=steps.count, batch=batch, lr=1.0, private=PointPrivacy(private.clip, cut_noise * z), claimed=z
    )
    attacked = method.attacked(Model(nn.Embedding(SLOTS, 1)), 1, local, None)
    federation = simulate(clients, seed, block=1)
    start = state = attacked.start(seed)
    for number in range(1, rounds + 1):
        state = attacked.round(state, federation.begin_round(number))
    score = (state.theta - start.theta).to(torch.float64)
    return _Attacked(score, member, federation.ledger.epsilon(prepared.delta), rounds)


@dataclass(frozen=True)
class _Honest(LocalSGD):
    """Local training whose cost is that of the ``claimed`` noise, whatever noise it really has."""

    claimed: float = 1.0

    def cost(self, sizes: Tensor) -> LocalCost:
        assert self.private is not None
        promised = replace(self, private=PointPrivacy(self.private.clip, self.claimed))
        return LocalSGD.cost(promised, sizes)


def _coins(count: int, seed: int) -> Tensor:
    return Draws(key(seed, 77)).uniform(count) < 0.5
