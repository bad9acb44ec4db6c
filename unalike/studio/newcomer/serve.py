"""A newcomer and a finished run: it sends what the method needs and gets a personal model."""

from __future__ import annotations

import importlib.util
import json
import logging
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from unalike.core.client import Clients
from unalike.core.federation import Federation, QuorumError
from unalike.core.method import MasksClasses, Method, ProtectsNewcomers, TellsDistance
from unalike.core.request import Reply, Request
from unalike.core.schema import Schema
from unalike.core.suggest import nearest
from unalike.networks.classes import class_bias, only_classes
from unalike.privacy import BARE, Ledger
from unalike.privacy.checks import check_epsilon
from unalike.privacy.sampling import Local
from unalike.privacy.system import SystemDraws
from unalike.runtime.simulate import Simulation
from unalike.studio.analyses.measures import Newcomers, accuracy_by_size_and_epsilon
from unalike.studio.errors import UserError
from unalike.studio.newcomer.ledger import row_names
from unalike.studio.recipe.hyperparameters import serving_unlabeled
from unalike.studio.runs.finished import FinishedRun
from unalike.studio.runs.measure import serves_unlabeled
from unalike.studio.simulate import simulation
from unalike.studio.words import counted, listed

NOTICEABLE = 0.05  # a loss of accuracy that is told


@dataclass(frozen=True)
class Served:
    """What a newcomer sent and received, and the model that came of it."""

    run: FinishedRun
    name: str
    samples: int
    theta: Tensor
    sent: dict[str, int]  # bytes up, by array; nothing that stays at the client
    received: dict[str, int]  # bytes down, by array
    descriptor: Tensor | None
    ledger: Ledger
    epsilon: float
    delta: float
    notes: list[str] = field(default_factory=list)
    rows: list[str] = field(default_factory=list)  # names of the rows of which something was sent, as in the ledger
    distance: Distance | None = None  # from those who trained, if the method can tell

    @property
    def about(self) -> dict[str, str]:
        """What a file of the model says about it: whose it is, what it reads and what its answers are called."""
        run, schema = self.run, self.run.schema
        about = {
            "run": run.path.resolve().name,
            "method": run.recipe.method,
            "round": str(run.round),
            "client": self.name,
            "input": self.onnx_input,
            "schema": schema.to_json(),
        }
        if schema.columns is not None:
            about["columns"] = json.dumps(list(schema.columns), ensure_ascii=False)
        if schema.classes is not None:
            about["classes"] = json.dumps(schema.classes_named, ensure_ascii=False)
        return about

    def save(self, file: Path) -> None:
        """The model's named tensors, and ``input.shift`` and ``input.scale``: the model reads (x − shift) · scale."""
        model, schema = self.run.method.model, self.run.schema
        tensors = {name: value.contiguous().clone() for name, value in model.tensors(self.theta).items()}
        if schema.shift is not None and schema.scale is not None:
            tensors |= {"input.shift": schema.shift.clone(), "input.scale": schema.scale.clone()}
        file.parent.mkdir(parents=True, exist_ok=True)
        save_file(tensors, file, self.about)

    @property
    def onnx_input(self) -> str:
        """What ``save_onnx``'s graph reads: rows of the type and shape that the run's own data has, not yet scaled."""
        schema = self.run.schema
        return f"{schema.stored} [rows, {', '.join(map(str, schema.shape))}]"

    def save_onnx(self, file: Path) -> None:
        """The same model as an ONNX graph from rows (``onnx_input``) to scores."""
        schema = self.run.schema
        reader = _Reader(self.run.method.model.module(self.theta), schema.shift, schema.scale).eval()
        example = torch.zeros(2, *schema.shape, dtype=schema.dtype)
        file.parent.mkdir(parents=True, exist_ok=True)
        log = logging.getLogger("torch.onnx")
        level = log.level
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of the exporter, about itself; so are those that it logs
            log.setLevel(logging.ERROR)
            try:
                program = torch.onnx.export(
                    reader,
                    (example,),
                    input_names=["x"],
                    output_names=["scores"],
                    dynamic_shapes=({0: torch.export.Dim("rows")},),
                    verbose=False,
                )
                assert program is not None
                program.model.metadata_props.update(self.about)
                program.model.doc_string = (
                    f"The model of client {self.name}, by {self.run.recipe.method} (Unalike). x: {self.onnx_input}, "
                    "not scaled; scores: one for each class, or the predicted number. Columns, classes and schema: see "
                    "the metadata."
                )
                program.save(file, external_data=False)
            finally:
                log.setLevel(level)

    def answers(self, clients: Clients) -> Tensor:
        """What the model says to each row of the only client: a score for each class, or a number [rows, outputs]."""
        outputs = _answers(self.run, self.theta, clients)
        return outputs.reshape(len(outputs), -1)

    def predict(self, clients: Clients) -> list[str]:
        """A class name (or a number, for real targets) for each of the newcomer's rows."""
        return words_for(self.answers(clients), self.run.schema)


def words_for(answers: Tensor, schema: Schema) -> list[str]:
    """What is predicted, in words: the class of the largest score, or the number."""
    if schema.classes is None:
        return [f"{value:.9g}" for value in answers[:, 0].tolist()]
    return [schema.classes_named[place] for place in answers.argmax(1).tolist()]


class _Reader(nn.Module):
    """A model with the normalisation of its inputs before it."""

    def __init__(self, model: nn.Module, shift: Tensor | None, scale: Tensor | None) -> None:
        super().__init__()
        self.model, self._shift, self._scale = model, shift, scale

    def forward(self, x: Tensor) -> Tensor:
        if self._shift is not None and self._scale is not None:
            x = (x.to(torch.float32) - self._shift) * self._scale
        elif x.dtype == torch.uint8:
            x = x.to(torch.float32)
        scores: Tensor = self.model(x)
        return scores


def onnx_is_there() -> bool:
    """Is the extra installed that ONNX files need?"""
    return all(importlib.util.find_spec(name) is not None for name in ("onnx", "onnxscript"))


@dataclass(frozen=True)
class Distance:
    """How far a newcomer is from the nearest training client, beside how far these are from one another.

    The further away, the less is known of how good its model is (P2 Theorem 1).
    """

    nearest: float
    usual: float  # half of the training clients have another one within this
    largest: float  # and all of them within this

    @property
    def unlike(self) -> bool:
        """Is it further away than any training client is from the next?"""
        return self.nearest > self.largest

    @property
    def told(self) -> str:
        here = f"the nearest training client is at a distance of {self.nearest:.3g} by what was sent"
        among = f"half of them have another within {self.usual:.3g}, and all within {self.largest:.3g}"
        if not self.unlike:
            return f"{here}; {among}"
        return (
            f"{here}; {among}: these data are unlike those of training, so the model may be worse than its run's scores"
        )


class _Listener:
    """A newcomer's runtime, which remembers what it sends, above all its descriptor."""

    def __init__(self, home: Simulation) -> None:
        self._home = home
        self.descriptor: Tensor | None = None
        self.sent: dict[str, Tensor] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._home, name)

    def deliver(self, request: Request) -> Iterator[Reply]:
        for reply in self._home.deliver(request):
            for arrays in reply.arrays:
                self.descriptor = arrays.get("descriptor", self.descriptor)
                self.sent |= arrays
            yield reply


def serve(
    run: FinishedRun,
    newcomer: Clients,
    name: str,
    *,
    epsilon: float | None = None,
    delta: float | None = None,
    classes: Sequence[str] | None = None,
    left_out: int = 0,
    expect: bool = True,
) -> Served:
    """A model for one newcomer (T1 Alg. 7, P2 §4 and §7). Nothing of the run changes.

    ``epsilon`` protects each of its rows; a run that was trained with ``newcomer_epsilon`` protects them anyway. It is
    the cost of this call alone; ``ledger.enter`` adds it to what earlier calls on the same rows have cost. The
    noise is the operating system's: seeded noise would protect a newcomer from nobody who knows the run's seed.
    ``classes``: those that it says it has, by name (T1 B.1.3). Its model never predicts another; it rules them out for
    itself, so this is not sent and needs no labels.
    ``left_out``: how many of its rows lack a value; the number n that the noise is made for must not depend on that.
    ``expect``: note what unseen clients of the run score at this ε, measured now.
    """
    method, samples = run.method, int(newcomer.size[0])
    declared = None if classes is None else _declared(run, classes, newcomer)
    if declared is not None and isinstance(method, MasksClasses):
        method = method.masking(False)  # what it says takes the place of what its labels say
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
    if not bool(newcomer.labeled.all()) and not serves_unlabeled(method):
        raise UserError(
            f"{run.recipe.method} cannot personalize for a client without labels; give labels, or train with "
            f"a method that needs none: {', '.join(serving_unlabeled())}"
        )
    home = simulation(newcomer)
    listener = _Listener(home)
    federation = Federation(listener, run.recipe.seed, purpose="serve")
    cohort = federation.everyone()
    plain = method.protecting(None, delta) if isinstance(method, ProtectsNewcomers) else method
    try:
        models = plain.personalize(run.state, cohort)
    except QuorumError as error:
        if all("not finite" in failure.reason for failure in error.failures):
            raise _overflow(run, newcomer) from error
        if run.schema.kind == "tokens" and any("IndexError" in failure.reason for failure in error.failures):
            raise _unknown_token(newcomer) from error
        raise
    theta = models if isinstance(models, Tensor) else home.look(federation.run, models.handle, cohort.ids)
    ledger, notes, descriptor = federation.ledger, list(run.notes), listener.descriptor
    rows: list[str] = []
    if epsilon is not None and federation.traffic.up:
        private = _protecting(run, method, epsilon, delta, left_out)
        noise, sensitivity = private.noise, private.sensitivity(samples)
        assert noise is not None and sensitivity is not None and descriptor is not None
        descriptor = noise.add(descriptor, sensitivity, SystemDraws())
        ledger, rows = Ledger(), row_names(newcomer)  # what leaves the client is the noisy descriptor alone
        ledger.record(noise.event(), unit="point", sampling=Local(), newcomers=rows)
        theta = private.models(run.state, descriptor)
        if isinstance(method, MasksClasses) and method.mask_labels:
            theta = only_classes(run.method.model, theta[0], _own_classes(newcomer, run.schema.classes))[None]
        notes.append(_noise_told(noise.std(sensitivity)))
        if expect:
            notes.append(_expectation(run, private, samples, epsilon))
    elif federation.traffic.up:
        ledger, rows = Ledger(), row_names(newcomer)
        ledger.record(BARE, unit="point", sampling=Local(), newcomers=rows)
    elif epsilon is not None:
        notes.append(f"--epsilon {epsilon:g}: with {run.recipe.method} nothing is sent, so ε = 0 without noise")
    if declared is not None:
        theta = only_classes(run.method.model, theta[0], declared)[None]
        words = [word for word, there in zip(run.schema.classes_named, declared.tolist(), strict=True) if there]
        notes.append(f"the model predicts {listed(words, 10)} only, as was said; that stayed at the client")
    distance = None
    if isinstance(method, TellsDistance) and listener.sent:
        private_or_not = {} if descriptor is None else {"descriptor": descriptor}
        distance = _distance(method.nearest(run.state, {**listener.sent, **private_or_not}))
        if distance is not None and distance.unlike:
            notes.insert(0, distance.told)
    if not bool(_answers(run, theta[0], newcomer).isfinite().all()):
        raise _overflow(run, newcomer)
    received = dict(federation.traffic.down)
    if isinstance(models, Tensor):  # the server made the model; else the client did, of what it received
        received["theta"] = received.get("theta", 0) + theta[0].numel() * 4
    return Served(
        run=run,
        name=name,
        samples=samples,
        theta=theta[0].detach(),
        sent=dict(federation.traffic.up),
        received=received,
        descriptor=None if descriptor is None else descriptor[0],
        ledger=ledger,
        epsilon=ledger.worst(delta),
        delta=delta,
        notes=notes,
        rows=rows,
        distance=distance,
    )


def _distance(found: tuple[Tensor, Tensor] | None) -> Distance | None:
    if found is None:
        return None
    nearest, among = found
    return Distance(float(nearest[0]), float(among.median()), float(among.max()))


def _answers(run: FinishedRun, theta: Tensor, clients: Clients) -> Tensor:
    """What a model says to each row of the only client."""
    x = clients.block(torch.arange(1)).x[0]
    try:
        return torch.cat([run.method.model(theta.detach(), x[i : i + 1024]) for i in range(0, len(x), 1024)])
    except IndexError as error:
        if run.schema.kind != "tokens":
            raise
        raise _unknown_token(clients) from error


def _unknown_token(newcomer: Clients) -> UserError:
    return UserError(
        f"the rows hold tokens from {int(newcomer.x.min())} to {int(newcomer.x.max())}, and the run's network does not "
        "know all of them; number the tokens as in training"
    )


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


def _declared(run: FinishedRun, classes: Sequence[str], newcomer: Clients) -> Tensor:
    """[classes] which of them the newcomer says it has; refused where its labels say otherwise."""
    known = run.schema.classes_named
    place = {str(number): number for number in range(len(known))} if run.named_data else {}
    place |= {word: number for number, word in enumerate(known)}
    if not known:
        raise UserError("--classes: the run predicts numbers, so there are no classes to choose; leave it out")
    if not classes:
        raise UserError(f"--classes: name at least one of the classes, {listed(list(known), 10)}")
    for word in classes:
        if word not in place:
            raise UserError(f"--classes: {word!r} is no class of the run{nearest(word, known)}")
    present = torch.zeros(len(known), dtype=torch.bool)
    present[[place[word] for word in classes]] = True
    try:
        class_bias(run.method.model, len(known))
    except ValueError as error:
        raise UserError(f"--classes: {error}; leave it out, or train with another --model or method") from error
    if bool(newcomer.labeled.all()):
        others = _own_classes(newcomer, len(known)) & ~present
        if bool(others.any()):
            first = known[int(others.nonzero()[0])]
            raise UserError(f"--classes {','.join(classes)}: but a row is labeled {first!r}; name it, too")
    return present


def _own_classes(newcomer: Clients, classes: int | None) -> Tensor:
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
            "file; numbers are filled by the run's means with --set data.options.missing=mean, and labels are not "
            "needed with --unlabeled"
        )
    return method.protecting(epsilon, delta)


def _noise_told(std: float) -> str:
    """How large the noise is, beside a descriptor in the unit ball."""
    told = f"the noise on each number of the descriptor has standard deviation {std:.3g}, and the descriptor is at most"
    drowned = ": hardly anything of the data is left in it. Give more samples, or a larger ε" if std > 1 else ""
    return f"{told} 1 long{drowned}"


def _expectation(run: FinishedRun, method: ProtectsNewcomers, samples: int, epsilon: float) -> str:
    """What unseen clients of the run score with no more samples and the same ε, measured now (P2 Fig. 5)."""
    unknown = "so nobody knows what accuracy to expect at this ε"
    try:
        whole = run.prepared.population
    except UserError:
        return f"the data that the run was trained on are not here to test, {unknown}"
    able = whole.test.labeled & (whole.test.size > 0) & (whole.train.size > 0)
    newcomers = Newcomers.unseen(replace(whole, unseen=whole.unseen[able[whole.unseen]]))
    if len(newcomers) == 0:
        return f"the run has no unseen clients with labels to test, {unknown}"
    tested = newcomers.train.size.clamp(max=samples)
    federation = run.prepared.federation()
    curves = accuracy_by_size_and_epsilon(
        method, run.state, federation, newcomers, [samples], [epsilon, None], lambda _: method.newcomer_delta
    )
    noisy, exact = curves[epsilon][0].mean, curves[None][0].mean
    low, high = int(tested.min()), int(tested.max())
    size = counted(high, "sample") if low == high else f"{low} to {high} samples"
    told = f"the unseen clients of this run, with {size} each, score {noisy:.3f} at ε = {epsilon:g}"
    if exact - noisy <= NOTICEABLE:
        return f"{told}, and {exact:.3f} without noise"
    if samples > high:
        return (
            f"{told}, and {exact:.3f} without noise. The noise falls as 1/samples: that on your {samples} is at least "
            f"{samples / high:.2g} times smaller than theirs, so expect more than the first figure"
        )
    verdict = f"{size} {'is' if high == 1 else 'are'} too few for this ε"
    return (
        f"{told}, but {exact:.3f} without noise: {verdict}. The noise falls as 1/samples: give more samples, or a "
        "larger ε"
    )
