"""Audit a recipe's privacy by an attack on the code that would run.

Client level: the method's own rounds, with its clip, noise and sampling rate, on clients that are canaries
(``tap.py``). Point level: DP-SGD inside of the method's own rounds, on one client whose rows are canaries. Each owns
one weight of a small model that no other row moves, and pulls it as hard as the clip allows. The model is one layer
whose gradients are clipped in the way that those of the recipe's own model are: by ghost norms for a linear layer or a
convolution, or one by one.

A long run is shortened: fewer rounds, and at point level one step a round, which the attacker sees by itself. The ε
that is compared is then that of the shortened run, by its own ledger.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

import torch
from torch import Tensor, nn

from unalike.audit.tap import Tapped, apart, sampled_ratio, scores
from unalike.core.client import Clients
from unalike.core.draws import Draws, key
from unalike.core.method import Auditable, ClientPrivate, PointPrivate, charged_training
from unalike.core.model import Model
from unalike.core.schema import Schema
from unalike.learn.ghost import GhostNorms
from unalike.learn.local import LocalSGD
from unalike.learn.schedules import Schedule
from unalike.privacy import accountant
from unalike.privacy.account import Account, account
from unalike.privacy.audit import Proof, Quieter, canaries_for, proven_epsilon, proven_noise
from unalike.privacy.dpsgd import PointPrivacy
from unalike.runs.errors import FLAG, UserError
from unalike.runs.prepare import Prepared
from unalike.runs.privacy import noise_of, participations, sampling_rate
from unalike.runs.simulate import simulation

SLOTS = 2048  # canaries in one run, if its arrays have room for so many; more canaries are more runs
_POINTS = 1024  # likewise, rows of a client
_ROUNDS = 50  # that are attacked, at most
_FEWEST = 5  # that are attacked in any case: one alone tells little of a client that is drawn seldom
_SECONDS = 60.0  # that the rounds of all attacked runs may take, about
_PULL = 1e4  # the target that a row pulls its weight to: far beyond what the clip lets through
_COARSE = 8  # grid of losses, for an ε that need not be exact to the last digit
_BLOCK = 64  # canaries that are computed at once
_ERROR = 0.05  # the chance that an honest run is told to be broken by one of its arrays
_ROWS = 2  # of a canary that is a client; they only let the method's tasks run


@dataclass(frozen=True)
class Apart:
    """What an attack on one released array alone proves; all arrays together are told with 95 % confidence."""

    promised: float  # the ledger's ε of this array
    noise: float  # the real noise is at most this share of what the ledger was told
    epsilon: float  # at least this, if only the noise may be wrong


@dataclass(frozen=True)
class Audit:
    """What the ledger promises about the attacked runs, and what the attack proves."""

    unit: str
    promised: float  # the ledger's ε of the attacked run
    proof: Proof
    canaries: int
    rounds: int
    cut_noise: float
    of_rounds: int | None = None  # of the run that was shortened
    apart: Mapping[str, Apart] = field(default_factory=dict)  # each released array by itself, where there are several

    @property
    def holds(self) -> bool:
        """Is the promise compatible with the attack?"""
        together = self.proof.epsilon <= self.promised and self.proof.noise >= 1.0
        return together and all(one.noise >= 1.0 for one in self.apart.values())


@dataclass(frozen=True)
class AttackedRun:
    """One attacked run: a score for every canary, whether it took part, and what the run released."""

    scores: Tensor
    member: Tensor
    released: Account
    apart: Mapping[str, tuple[Tensor, Account]] = field(default_factory=dict)  # the same for each array by itself


def audit(prepared: Prepared, *, canaries: int | None = None, cut_noise: float = 1.0, seed: int = 0) -> Audit:
    """Attack the recipe's method. ``cut_noise`` below 1 scales the real noise down behind the ledger's back."""
    method = prepared.method
    check_cut(cut_noise)
    if isinstance(method, ClientPrivate) and method.noise is not None:
        planned = max(1, prepared.recipe.rounds)
        slots, rounds = _probe(method, prepared, planned)
        run = _client_run(method, prepared, cut_noise, slots, rounds)
        return judge("client", run, prepared.delta, canaries, cut_noise, seed, rounds, planned)
    if isinstance(method, PointPrivate) and method.local.private is not None:
        steps = charged_training(method).steps_of(int(prepared.roster.bound.min()))
        planned = participations(method.cohort, prepared.roster, max(1, prepared.recipe.rounds)) * steps.count
        rounds = min(planned, _ROUNDS)
        run = _point_run(method, prepared, cut_noise, rounds)
        return judge("point", run, prepared.delta, canaries, cut_noise, seed, rounds, planned)
    if isinstance(method, ClientPrivate | PointPrivate):
        keys = ("privacy.epsilon", "privacy.noise_multiplier", "privacy.clip")
        raise UserError(
            f"this recipe promises no privacy: give epsilon{FLAG}, or noise_multiplier{FLAG} with clip{FLAG}", *keys
        )
    raise UserError(
        f"{prepared.recipe.method} has no private form by clip and noise or DP-SGD, so there is nothing to audit"
    )


def check_cut(cut_noise: float) -> None:
    """Refuse a factor that would not cut the noise."""
    if not 0 < cut_noise <= 1:
        told = f"cut_noise = {cut_noise}{FLAG}: expected above 0 and at most 1 (1: the noise as it is)"
        raise UserError(told, "cut-noise")


def judge(
    unit: str,
    run: Callable[[int], AttackedRun],
    delta: float,
    canaries: int | None,
    cut_noise: float,
    seed: int,
    rounds: int,
    planned: int | None = None,
) -> Audit:
    """Attack runs until there are enough canaries, and say what their scores prove."""
    done = [run(seed)]
    released = done[0].released
    promised = accountant.epsilon(released, delta)
    wanted = canaries or canaries_for(promised)
    while sum(len(one.scores) for one in done) < wanted:
        done.append(run(seed + len(done)))
    found, member = torch.cat([one.scores for one in done]), torch.cat([one.member for one in done])
    proof = proven_epsilon(found, member, delta)
    noise = proven_noise(found, member, released)
    assumed = accountant.attainable_epsilon(accountant.scale_noise(released, noise), delta, _COARSE)
    proof = replace(proof, noise=noise, assumed=assumed)
    shortened = planned if planned is not None and planned > rounds else None
    apart = {}
    for name, (_, own) in done[0].apart.items():
        by_itself = torch.cat([one.apart[name][0] for one in done])
        least = proven_noise(by_itself, member, own, 1.0 - _ERROR / len(done[0].apart))
        proven = accountant.attainable_epsilon(accountant.scale_noise(own, least), delta, _COARSE)
        apart[name] = Apart(accountant.epsilon(own, delta), least, proven)
    return Audit(unit, promised, proof, len(found), rounds, cut_noise, shortened, apart)


def coins(count: int, seed: int) -> Tensor:
    """Who takes part."""
    return Draws(key(seed, 77)).uniform(count) < 0.5


# Clients


def _client_run(
    method: Any, prepared: Prepared, cut_noise: float, slots: int, rounds: int
) -> Callable[[int], AttackedRun]:
    attacked = _with_one_step(replace(method, noise=Quieter(method.noise, cut_noise), cohort=_rate(method, prepared)))

    def run(seed: int) -> AttackedRun:
        tapped = _canaries(prepared, slots, seed)
        state = attacked.start(seed)
        for number in range(1, rounds + 1):
            state = attacked.round(state, tapped.begin_round(number))
        return result_of(tapped)

    return run


def result_of(tapped: Tapped) -> AttackedRun:
    """The scores of a run that was listened to; of one client, where each was charged on its own."""
    assert tapped.observations, "an attacker who hears nothing proves nothing"
    own = tapped.ledger.event(client=int(tapped.roster.ids[0]))
    heard = scores(tapped.observations, len(tapped.roster))
    return AttackedRun(heard, tapped.member, account([(own, 1)]), apart(tapped))


def _rate(method: Any, prepared: Prepared) -> float:
    return float(sampling_rate(method.cohort, prepared.roster))


def _probe(method: Any, prepared: Prepared, planned: int) -> tuple[int, int]:
    """How many canaries have room in the method's arrays, and how many rounds there is time for."""
    tapped = _canaries(prepared, 64, seed=0)
    probe = _with_one_step(replace(method, cohort=1.0))
    state = probe.round(probe.start(0), tapped.begin_round(1))
    begin = time.process_time()  # not by the clock: what else this machine does must not shorten the attack
    probe.round(state, tapped.begin_round(2))
    slots = min(SLOTS, tapped.fewest)
    if slots < 64:
        raise UserError(
            f"{prepared.recipe.method} releases arrays of {slots} numbers, too few for many canaries at once; audit it "
            "with a larger model"
        )
    each_round = (time.process_time() - begin) * max(1.0, _rate(method, prepared) * slots / 64)
    return slots, max(min(planned, _FEWEST), min(planned, _ROUNDS, int(_SECONDS / 2 / each_round)))


def _canaries(prepared: Prepared, slots: int, seed: int) -> Tapped:
    """A federation of canaries; each has a few rows of the recipe's data, so that the method's tasks can run."""
    part = prepared.population.train.select(prepared.population.seen)
    with_labels = part.select(part.labeled.nonzero().flatten())
    size = min(_ROWS, int(with_labels.size.min()))
    start = with_labels.start[torch.arange(slots) % len(with_labels)]
    sizes, ids = torch.full((slots,), size), torch.arange(slots)
    clients = replace(part, start=start, size=sizes, labeled=torch.ones(slots, dtype=torch.bool), ids=ids, names=None)
    terms: dict[str, Any] = {"noise": noise_of(prepared.recipe), "trust": prepared.recipe.privacy.trust}
    return Tapped(simulation(clients, block=_BLOCK, threads=1), seed, member=coins(slots, seed), **terms)


def _with_one_step(method: Any) -> Any:
    """The method with a single step of local training: a canary does not send what it trained."""
    made = {}
    for one in fields(method):
        value = getattr(method, one.name)
        if one.init and isinstance(value, LocalSGD):
            made[one.name] = replace(value, steps=1, epochs=None)
    return replace(method, **made)


# Points


def _point_run(method: Any, prepared: Prepared, cut_noise: float, rounds: int) -> Callable[[int], AttackedRun]:
    """Rows of one client, in batches of the rate that those of the recipe's smallest client have."""
    private = method.local.private
    steps = charged_training(method).steps_of(int(prepared.roster.bound.min()))
    z = private.multiplier(steps)
    model, inputs = _one_weight_each(method.model, prepared.roster.schema)

    def run(seed: int) -> AttackedRun:
        member = coins(_POINTS, seed)
        rows = member.nonzero().flatten()
        x = inputs[rows]
        clients = Clients.from_sizes(x, torch.full((len(rows),), _PULL), torch.tensor([len(rows)]))
        batch = max(1, int(steps.rate * len(rows)))  # rounded down: the attacked rate is at most that of the recipe
        local = LocalSGD(steps=1, batch=batch, lr=1.0, private=PointPrivacy(private.clip, cut_noise * z))
        attacked = _on_model(method, model, local)
        tapped = Tapped(simulation(clients, block=1), seed, noise=noise_of(prepared.recipe))
        state = attacked.start(seed)
        for number in range(1, rounds + 1):
            state = attacked.round(state, tapped.begin_round(number))
        assert len(tapped.private_updates) == rounds, "an attacker who hears nothing proves nothing"
        if tapped.private_updates[0].numel() != _POINTS:
            raise UserError(
                f"{prepared.recipe.method} sends no mean of gradients, which is all that the audit can attack "
                "at point level; that of fedavg goes through the same steps of DP-SGD"
            )
        rate = torch.tensor(batch / len(rows), dtype=torch.float64)
        seen = torch.stack(tapped.private_updates).to(torch.float64) * batch / private.clip  # 0 or 1, plus noise
        score = sampled_ratio((2 * seen - 1) / (2 * (cut_noise * z) ** 2), rate).sum(0)
        spent = account([(tapped.ledger.event(client=0), 1)])
        # The ledger knows of the cut here, because a client's noise and its cost are one number: the claim does not.
        return AttackedRun(score, member, accountant.scale_noise(spent, 1 / cut_noise) if cut_noise < 1 else spent)

    return run


def _on_model(method: Any, model: Model, local: LocalSGD) -> Any:
    """The same rounds on another model: what the server makes of the updates is not attacked, and kept simple."""
    if isinstance(method, Auditable):
        return method.for_audit(model, 1, local, None)
    plain = {"weights": "uniform", "clustering": "known", "clusters": 1, "known": (0,), "schedule": Schedule()}
    plain |= {"head": 0, "lambda_": 1.0, "inner_lr": 1.0, "inner_steps": 1}
    known = {one.name for one in fields(method)}
    return replace(
        method, model=model, cohort=1, local=local, **{name: value for name, value in plain.items() if name in known}
    )


def _one_weight_each(model: Model, schema: Schema) -> tuple[Model, Tensor]:
    """A model in which every row has a weight of its own, clipped in the way that the given one is; and its rows."""
    read = torch.float32 if schema.dtype == torch.uint8 else schema.dtype  # as a task reads it
    if GhostNorms.of(model, torch.zeros(2, *schema.shape, dtype=read)) is None:
        return Model(nn.Embedding(_POINTS, 1)), torch.arange(_POINTS)[:, None]
    if any(len(shape) == 4 for shape in model.shapes.values()):  # a convolution's gradients are made
        return Model(nn.Conv2d(_POINTS, 1, 1, bias=False)), torch.eye(_POINTS)[:, :, None, None]
    return Model(nn.Linear(_POINTS, 1, bias=False)), torch.eye(_POINTS)
