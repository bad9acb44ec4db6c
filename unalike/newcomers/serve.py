"""A newcomer and a finished run: it sends what the method needs and gets a personal model."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from unalike.core.client import Clients
from unalike.core.federation import Federation, QuorumError
from unalike.core.method import MasksClasses, Method, ProtectsNewcomers, TellsDistance
from unalike.core.notes import did_you_mean
from unalike.core.request import Reply, Request
from unalike.networks.heads import class_bias, only_classes
from unalike.newcomers.ledger import row_names
from unalike.newcomers.model import Distance, PersonalModel, unknown_token
from unalike.privacy import BARE, Ledger
from unalike.privacy.checks import check_epsilon
from unalike.privacy.sampling import Local
from unalike.privacy.system import SystemDraws
from unalike.runs.errors import UserError
from unalike.runs.finished import FinishedRun
from unalike.runs.measure import score_newcomers, serves_unlabeled
from unalike.runs.recipe.hyperparameters import serving_unlabeled
from unalike.runs.simulate import simulation
from unalike.runs.words import counted, listed
from unalike.runtime.simulate import Simulation

NOTICEABLE = 0.05  # a loss of accuracy that is worth a note


def serve(
    run: FinishedRun,
    newcomer: Clients,
    name: str,
    *,
    epsilon: float | None = None,
    delta: float | None = None,
    classes: Sequence[str] | None = None,
    left_out: int = 0,
    names: Sequence[str] | None = None,
    expect: bool = True,
) -> PersonalModel:
    """Make a model for one newcomer (T1 Alg. 7, P2 §4 and §7). Nothing of the run changes.

    ``epsilon`` protects each row of the newcomer. A run that was trained with ``newcomer_epsilon`` protects them
    anyway. It is the cost of this call alone; ``ledger.add`` adds the cost of earlier calls on the same rows. The noise
    comes from the operating system: seeded noise would protect a newcomer from nobody who knows the run's seed.
    ``classes``: the names of the classes that the newcomer says it has (T1 B.1.3). Its model predicts no other. The
    newcomer rules the others out by itself, so this is not sent and needs no labels.
    ``left_out``: how many of its rows lack a value. The number n that the noise is made for must not depend on that.
    ``names``: what a ledger calls its rows, ``Newcomer.row_names``; None: no value of them was filled in.
    ``expect``: note what unseen clients of the run score at this ε, measured now.
    """
    method, samples = run.method, int(newcomer.size[0])
    present = None if classes is None else _declared_classes(run, classes, newcomer)
    if present is not None and isinstance(method, MasksClasses):
        method = method.with_masking(False)  # the declared classes take the place of those of its labels
    epsilon, delta = _budget(run, samples, epsilon, delta)
    if not bool(newcomer.labeled.all()) and not serves_unlabeled(method):
        raise UserError(
            f"{run.recipe.method} cannot personalize for a client without labels; give labels, or train with "
            f"a method that needs none: {', '.join(serving_unlabeled())}"
        )
    names = row_names(newcomer.rows(0)[0].numpy()) if names is None else names
    exchange, notes = _exchange(run, method, newcomer, names, delta), list(run.notes)
    if epsilon is not None and exchange.sent:
        private = _protecting(run, method, epsilon, delta, left_out)
        exchange, said = _with_noise(run, private, newcomer, exchange)
        notes += [said, _expectation(run, private, samples, epsilon)] if expect else [said]
    elif epsilon is not None:
        notes.append(f"--epsilon {epsilon:g}: with {run.recipe.method} nothing is sent, so ε = 0 without noise")
    theta = exchange.theta
    if present is not None:
        theta = only_classes(run.method.model, theta, present)
        words = [word for word, there in zip(run.schema.class_labels, present.tolist(), strict=True) if there]
        notes.append(f"the model predicts {listed(words, 10)} only, as was said; that stayed at the client")
    distance = _distance(run, method, exchange)
    if distance is not None and distance.is_unusual:
        notes.insert(0, distance.text)
    model = PersonalModel(
        run=run,
        name=name,
        samples=samples,
        theta=theta.detach(),
        sent=exchange.sent,
        received=exchange.received,
        descriptor=None if exchange.descriptor is None else exchange.descriptor[0],
        ledger=exchange.ledger,
        epsilon=exchange.ledger.worst(delta),
        delta=delta,
        notes=notes,
        rows=exchange.rows,
        distance=distance,
    )
    if not bool(model.answers(newcomer).isfinite().all()):
        raise _overflow(run, newcomer)
    return model


def _budget(run: FinishedRun, samples: int, epsilon: float | None, delta: float | None) -> tuple[float | None, float]:
    """The ε and δ of a newcomer's rows: those of the call, else those of the run."""
    if epsilon is None:
        epsilon = run.newcomer_epsilon
    if epsilon is None and delta is not None:
        raise UserError(f"--delta {delta:g} is for an ε, but no privacy was asked for: add --epsilon, or leave it out")
    delta = run.newcomer_delta(samples, delta)
    if epsilon is not None:
        try:
            check_epsilon(epsilon, "--epsilon")
        except ValueError as error:
            raise UserError(str(error)) from error
    return epsilon, delta


@dataclass(frozen=True)
class _Exchange:
    """What went to and fro between a newcomer and the run, and the model that came of it."""

    theta: Tensor  # [d]
    arrays: dict[str, Tensor]  # that the newcomer sent
    sent: dict[str, int]  # bytes of each
    received: dict[str, int]
    ledger: Ledger
    rows: list[str] = field(default_factory=list)

    @property
    def descriptor(self) -> Tensor | None:
        return self.arrays.get("descriptor")


class _Listener:
    """A newcomer's runtime that remembers what it sends."""

    def __init__(self, home: Simulation) -> None:
        self._home = home
        self.sent: dict[str, Tensor] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._home, name)

    def deliver(self, request: Request) -> Iterator[Reply]:
        for reply in self._home.deliver(request):
            for arrays in reply.arrays:
                self.sent |= arrays
            yield reply


def _exchange(run: FinishedRun, method: Method, newcomer: Clients, names: Sequence[str], delta: float) -> _Exchange:
    """Personalize without noise."""
    home = simulation(newcomer)
    listener = _Listener(home)
    federation = Federation(listener, run.recipe.seed, purpose="serve")
    cohort = federation.everyone()
    plain = method.with_protection(None, delta) if isinstance(method, ProtectsNewcomers) else method
    try:
        models = plain.personalize(run.state, cohort)
    except QuorumError as error:
        if error.diverged:
            raise _overflow(run, newcomer) from error
        if run.schema.kind == "tokens" and any("IndexError" in failure.reason for failure in error.failures):
            raise unknown_token(newcomer) from error
        raise
    theta = models if isinstance(models, Tensor) else home.look(federation.run, models.handle, cohort.ids)
    sent, received = dict(federation.traffic.up), dict(federation.traffic.down)
    if isinstance(models, Tensor):  # the server made the model; else the client did, of what it received
        received["theta"] = received.get("theta", 0) + theta[0].numel() * 4
    if not sent:
        return _Exchange(theta[0], listener.sent, sent, received, federation.ledger)
    ledger = Ledger()
    ledger.record(BARE, unit="point", sampling=Local(), newcomers=names)
    return _Exchange(theta[0], listener.sent, sent, received, ledger, list(names))


def _with_noise(
    run: FinishedRun, method: ProtectsNewcomers, newcomer: Clients, exchange: _Exchange
) -> tuple[_Exchange, str]:
    """The exchange in which the noisy descriptor is all that leaves the client; and how large the noise is."""
    noise, sensitivity = method.protection, method.sensitivity(int(newcomer.size[0]))
    assert noise is not None and sensitivity is not None and exchange.descriptor is not None
    descriptor = noise.add(exchange.descriptor, sensitivity, SystemDraws())
    ledger = Ledger()
    ledger.record(noise.event(), unit="point", sampling=Local(), newcomers=exchange.rows)
    theta = method.models(run.state, descriptor)[0]
    if isinstance(method, MasksClasses) and method.mask_labels:
        theta = only_classes(run.method.model, theta, _classes_of(newcomer, run.schema.classes))
    arrays = {**exchange.arrays, "descriptor": descriptor}
    std = noise.std(sensitivity)
    said = f"the noise on each number of the descriptor has standard deviation {std:.3g}, and the descriptor is at most"
    drowned = ": hardly anything of the data is left in it. Give more samples, or a larger ε" if std > 1 else ""
    return replace(exchange, theta=theta, arrays=arrays, ledger=ledger), f"{said} 1 long{drowned}"


def _distance(run: FinishedRun, method: Method, exchange: _Exchange) -> Distance | None:
    """How far the newcomer is from the training clients; None if the method cannot tell."""
    if not isinstance(method, TellsDistance) or not exchange.arrays:
        return None
    found = method.nearest(run.state, exchange.arrays)
    if found is None:
        return None
    nearest, among = found
    return Distance(float(nearest[0]), float(among.median()), float(among.max()))


def _overflow(run: FinishedRun, newcomer: Clients) -> UserError:
    came, schema = max(-float(newcomer.x.min()), float(newcomer.x.max())), run.schema
    trained = ""
    if schema.shift is not None and schema.scale is not None:
        trained = f", those of training {float((schema.shift.abs() + 1 / schema.scale).max()):.3g} or less as a rule"
    return UserError(
        f"the network overflows on the newcomer's rows: its numbers become infinite or NaN. The rows hold values up to "
        f"{came:g} in size{trained}: give them on the same scale as in training. If they are, training at the newcomer "
        "diverged: train the run with a smaller learning rate"
    )


def _declared_classes(run: FinishedRun, classes: Sequence[str], newcomer: Clients) -> Tensor:
    """[classes] which of them the newcomer says it has; refused where its labels say otherwise."""
    known = run.schema.class_labels
    place = {str(number): number for number in range(len(known))} if run.named_data else {}
    place |= {word: number for number, word in enumerate(known)}
    if not known:
        raise UserError("--classes: the run predicts numbers, so there are no classes to choose; leave it out")
    if not classes:
        raise UserError(f"--classes: name at least one of the classes, {listed(list(known), 10)}")
    for word in classes:
        if word not in place:
            raise UserError(f"--classes: {word!r} is no class of the run{did_you_mean(word, known)}")
    present = torch.zeros(len(known), dtype=torch.bool)
    present[[place[word] for word in classes]] = True
    try:
        class_bias(run.method.model, len(known))
    except ValueError as error:
        raise UserError(f"--classes: {error}; leave it out, or train with another --model or method") from error
    if bool(newcomer.labeled.all()):
        others = _classes_of(newcomer, len(known)) & ~present
        if bool(others.any()):
            first = known[int(others.nonzero()[0])]
            raise UserError(f"--classes {','.join(classes)}: but a row is labeled {first!r}; name it, too")
    return present


def _classes_of(newcomer: Clients, classes: int | None) -> Tensor:
    """[classes] which of them the newcomer's labels hold."""
    y = newcomer.rows(0)[1]
    assert y is not None and classes is not None
    there = y if newcomer.known is None else y[newcomer.known]
    return torch.bincount(there.to(torch.int64), minlength=classes) > 0


def _protecting(run: FinishedRun, method: Method, epsilon: float, delta: float, left_out: int) -> ProtectsNewcomers:
    """The run's method with noise on a newcomer's descriptor."""
    if not isinstance(method, ProtectsNewcomers) or method.sensitivity(1) is None:
        raise UserError(
            f"--epsilon needs descriptors whose sensitivity is known; {run.recipe.method} of this run has "
            "none. Train with: unalike run odpfl --set encoder=sphere, or: unalike run pefll --set sphere=true"
        )
    if left_out:
        raise UserError(
            f"ε = {epsilon:g} is promised for a number of rows that does not depend on what they hold, but "
            f"{counted(left_out, 'row')} would be left out for lack of a value. Fill them in, or remove them from the "
            "file; numbers are filled by the run's means with --missing mean, and labels are not "
            "needed with --unlabeled"
        )
    return method.with_protection(epsilon, delta)


def _expectation(run: FinishedRun, method: ProtectsNewcomers, samples: int, epsilon: float) -> str:
    """What unseen clients of the run score with no more samples and the same ε, measured now (P2 Fig. 5)."""
    unknown = "so nobody knows what accuracy to expect at this ε"
    try:
        whole = run.prepared.population
    except UserError:
        return f"the data that the run was trained on are not here to test, {unknown}"
    able = whole.unseen[(whole.test.labeled & (whole.test.size > 0) & (whole.train.size > 0))[whole.unseen]]
    if len(able) == 0:
        return f"the run has no unseen clients with labels to test, {unknown}"
    train, test = whole.train.select(able), whole.test.select(able)
    tested = train.size.clamp(max=samples)
    train, federation = replace(train, size=tested), run.prepared.federation()

    def mean(of: Method) -> float:
        return score_newcomers(of, run.state, train, test, federation, labels=not serves_unlabeled(of)).mean

    noisy = mean(method.with_protection(epsilon, method.newcomer_delta))
    exact = mean(method.with_protection(None, method.newcomer_delta))
    if math.isnan(noisy + exact):
        return f"none of the run's unseen clients could be scored, {unknown}"
    low, high = int(tested.min()), int(tested.max())
    size = counted(high, "sample") if low == high else f"{low} to {high} samples"
    found = f"the unseen clients of this run, with {size} each, score {noisy:.3f} at ε = {epsilon:g}"
    if exact - noisy <= NOTICEABLE:
        return f"{found}, and {exact:.3f} without noise"
    if samples > high:
        return (
            f"{found}, and {exact:.3f} without noise. The noise falls as 1/samples: that on your {samples} is at least "
            f"{samples / high:.2g} times smaller than theirs, so expect more than the first figure"
        )
    verdict = f"{size} {'is' if high == 1 else 'are'} too few for this ε"
    return (
        f"{found}, but {exact:.3f} without noise: {verdict}. The noise falls as 1/samples: give more samples, or a "
        "larger ε"
    )
