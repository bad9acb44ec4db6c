"""A newcomer and a finished run: it sends what the method needs and gets a personal model."""

from __future__ import annotations

import importlib.util
import logging
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from unalike.core.client import Clients
from unalike.core.federation import Federation, QuorumError
from unalike.core.method import Method, State
from unalike.core.request import Request
from unalike.data.population import Population
from unalike.data.sources.catalog import CATALOG
from unalike.methods import METHODS
from unalike.methods.odpfl import ODPFL, SENSITIVITY
from unalike.privacy import BARE, Ledger
from unalike.privacy.checks import check_epsilon
from unalike.privacy.sampling import Local
from unalike.privacy.system import SystemDraws
from unalike.runtime.shard.simulator import Simulator
from unalike.runtime.shard.work import Batch
from unalike.studio.analyses.figures import Newcomers, accuracy_by_size_and_epsilon
from unalike.studio.errors import UserError
from unalike.studio.newcomer.ledger import row_names
from unalike.studio.recipe.recipe import read_recipe
from unalike.studio.runs import checkpoint, folder
from unalike.studio.runs.measure import serves_unlabeled
from unalike.studio.runs.prepare import Prepared, prepare

NOTICEABLE = 0.05  # a loss of accuracy that is told


@dataclass(frozen=True)
class FinishedRun:
    """A run that can serve newcomers."""

    path: Path
    prepared: Prepared
    state: State
    round: int

    @classmethod
    def open(cls, path: Path) -> FinishedRun:
        if not (path / folder.RECIPE).is_file():
            raise UserError(
                f"{path} is no run folder: it has no {folder.RECIPE}; give one that `unalike run` wrote (its --out)"
            )
        saved = checkpoint.load(path)
        if saved is None or saved.round == 0:
            raise UserError(f"{path} has not been trained yet; go on with: unalike resume {path}")
        return cls(path, prepare(read_recipe(path / folder.RECIPE)), saved.state, saved.round)

    @property
    def method(self) -> Method:
        return self.prepared.method

    @property
    def population(self) -> Population:
        return self.prepared.population

    @property
    def named_data(self) -> bool:
        """Was the run trained on one of the data sets that come with Unalike, not on somebody's own file?"""
        return self.prepared.recipe.data.name.partition(":")[0].strip() in CATALOG

    @property
    def file_options(self) -> dict[str, Any]:
        """How the run's own file was read; nothing for a named data set. What it held, the population tells."""
        data = self.prepared.recipe.data
        if self.named_data:
            return {}
        return {key: value for key, value in data.options.items() if key not in ("kind", "classes", "task")}

    @property
    def notes(self) -> list[str]:
        """What to know about a run that was stopped."""
        rounds = self.prepared.recipe.rounds
        if self.round >= rounds:
            return []
        return [f"the run stopped at round {self.round} of {rounds}; it goes on with: unalike resume {self.path}"]


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

    def save(self, file: Path) -> None:
        """The model's named tensors, and ``input.shift`` and ``input.scale``: the model reads (x − shift) · scale."""
        model, clients = self.run.method.model, self.run.population.train
        tensors = {name: value.contiguous().clone() for name, value in model.tensors(self.theta).items()}
        if clients.shift is not None and clients.scale is not None:
            tensors |= {"input.shift": clients.shift.clone(), "input.scale": clients.scale.clone()}
        about = {"run": self.run.path.name, "round": str(self.run.round), "newcomer": self.name}
        file.parent.mkdir(parents=True, exist_ok=True)
        save_file(tensors, file, about)

    @property
    def onnx_input(self) -> str:
        """What ``save_onnx``'s graph reads: rows of the type and shape that the run's own data has, not yet scaled."""
        x = self.run.population.train.x
        return f"{str(x.dtype).removeprefix('torch.')} [rows, {', '.join(map(str, x.shape[1:]))}]"

    def save_onnx(self, file: Path) -> None:
        """The same model as an ONNX graph from rows (``onnx_input``) to scores."""
        clients = self.run.population.train
        reader = _Reader(self.run.method.model.module(self.theta), clients.shift, clients.scale).eval()
        example = clients.x[:2].clone()
        file.parent.mkdir(parents=True, exist_ok=True)
        log = logging.getLogger("torch.onnx")
        level = log.level
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of the exporter, about itself; so are those that it logs
            log.setLevel(logging.ERROR)
            try:
                torch.onnx.export(
                    reader,
                    (example,),
                    file,
                    input_names=["x"],
                    output_names=["scores"],
                    dynamic_shapes=({0: torch.export.Dim("rows")},),
                    external_data=False,
                    verbose=False,
                )
            finally:
                log.setLevel(level)

    def predict(self, clients: Clients) -> list[str]:
        """A class name (or a number, for real targets) for each of the newcomer's rows."""
        outputs = _answers(self.run, self.theta, clients)
        names = self.run.population.class_names
        if self.run.population.classes is None:
            return [f"{value:g}" for value in outputs.reshape(len(outputs)).tolist()]
        return [str(c) if names is None else str(names[c]) for c in outputs.argmax(1).tolist()]


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


def newcomer_delta(run: FinishedRun, samples: int, delta: float | None) -> float:
    """δ for each of a newcomer's n rows: as asked, if below 1/n; else n^-1.1, at most 0.01 and at most the run's."""
    method = run.method
    usual: float = min(0.01, 1 / samples**1.1)
    if delta is None and isinstance(method, ODPFL) and method.newcomer_epsilon is not None:
        return min(method.newcomer_delta, usual)
    if delta is None:
        return usual
    if not 0 < delta < 1 / samples:
        raise UserError(
            f"--delta {delta:g}: expected a number above 0 and below 1/n = {1 / samples:.3g} for the newcomer's "
            f"n = {samples} rows, because 1/n would allow to publish a row as it is; leave it out, or take about "
            f"{usual:.1e}"
        )
    return delta


@dataclass
class _Listener(Simulator):
    """Remembers the descriptor that a newcomer sends."""

    descriptor: Tensor | None = field(default=None, init=False)

    def deliver(self, request: Request) -> Iterator[Batch]:
        for batch in super().deliver(request):
            for arrays in batch.arrays:
                self.descriptor = arrays.get("descriptor", self.descriptor)
            yield batch


def serve(
    run: FinishedRun,
    newcomer: Clients,
    name: str,
    *,
    epsilon: float | None = None,
    delta: float | None = None,
    left_out: int = 0,
) -> Served:
    """A model for one newcomer (T1 Alg. 7, P2 §4 and §7). Nothing of the run changes.

    ``epsilon`` protects each of its rows; a run that was trained with ``newcomer_epsilon`` protects them anyway. It is
    the cost of this call alone; ``newcomer_ledger.enter`` adds it to what earlier calls on the same rows have cost. The
    noise is the operating system's: seeded noise would protect a newcomer from nobody who knows the run's seed.
    ``left_out``: how many of its rows lack a value; the number n that the noise is made for must not depend on that.
    """
    method, samples = run.method, int(newcomer.size[0])
    if epsilon is None and isinstance(method, ODPFL):
        epsilon = method.newcomer_epsilon
    if epsilon is None and delta is not None:
        raise UserError(f"--delta {delta:g} is for an ε, but no privacy was asked for: add --epsilon, or leave it out")
    delta = newcomer_delta(run, samples, delta)
    if epsilon is not None:
        try:
            check_epsilon(epsilon, "--epsilon")
        except ValueError as error:
            raise UserError(str(error)) from error
    if not bool(newcomer.labeled.all()) and not serves_unlabeled(method):
        raise UserError(
            f"{run.prepared.recipe.method} cannot personalize for a client without labels; give labels, or train with "
            f"a method that needs none: {', '.join(_need_no_labels())}"
        )
    listener = _Listener()
    federation = Federation(newcomer, listener, run.prepared.recipe.seed, serving=True)
    plain = replace(method, newcomer_epsilon=None) if isinstance(method, ODPFL) else method
    try:
        theta = plain.personalize(run.state, federation.everyone())
    except QuorumError as error:
        if any("not finite" not in failure.reason for failure in error.failures):
            raise
        raise _overflow(run, newcomer) from error
    ledger, notes, descriptor = federation.ledger, list(run.notes), listener.descriptor
    rows: list[str] = []
    if epsilon is not None and federation.traffic.up:
        private = _protecting(run, epsilon, delta, left_out)
        noise = private.noise
        assert noise is not None and descriptor is not None
        descriptor = noise.add(descriptor, SENSITIVITY / samples, SystemDraws())
        ledger, rows = Ledger(), row_names(newcomer)  # what leaves the client is the noisy descriptor alone
        ledger.record(noise.event(), unit="point", sampling=Local(), newcomers=rows)
        theta = private.models(run.state, descriptor)
        notes.append(_noise_told(noise.std(SENSITIVITY / samples)))
        notes.append(_expectation(run, private, samples, epsilon))
    elif federation.traffic.up:
        ledger, rows = Ledger(), row_names(newcomer)
        ledger.record(BARE, unit="point", sampling=Local(), newcomers=rows)
    elif epsilon is not None:
        notes.append(
            f"--epsilon {epsilon:g}: with {run.prepared.recipe.method} nothing is sent, so ε = 0 without noise"
        )
    if not bool(_answers(run, theta[0], newcomer).isfinite().all()):
        raise _overflow(run, newcomer)
    received = dict(federation.traffic.down)
    if not any(row["note"] == "simulation only" for row in federation.transcript.rows()):
        # the server made the model; else the client did, of what it received
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
    )


def _need_no_labels() -> list[str]:
    """The methods that serve clients without labels, by what their classes say of their defaults."""
    able = []
    for name, entry in METHODS.items():
        bare: Method = object.__new__(entry.make)  # asked about its settings alone: no network is built
        vars(bare).update(entry.defaults)
        if serves_unlabeled(bare):
            able.append(name)
    return able


def _answers(run: FinishedRun, theta: Tensor, clients: Clients) -> Tensor:
    """What a model says to each row of the only client."""
    x = clients.block(torch.arange(1)).x[0]
    return torch.cat([run.method.model(theta.detach(), x[i : i + 1024]) for i in range(0, len(x), 1024)])


def _overflow(run: FinishedRun, newcomer: Clients) -> UserError:
    came, trained = (max(-float(x.min()), float(x.max())) for x in (newcomer.x, run.population.train.x))
    return UserError(
        f"the network overflows on the newcomer's rows: its numbers become infinite or NaN. The rows hold values up to "
        f"{came:g} in size, the run's data up to {trained:g}: give them on the same scale as in training. If they are, "
        "training at the newcomer diverged: train the run with a smaller learning rate"
    )


def _protecting(run: FinishedRun, epsilon: float, delta: float, left_out: int) -> ODPFL:
    """The run's method with noise on a newcomer's descriptor."""
    method = run.method
    if not isinstance(method, ODPFL) or method.encoder != "sphere" or method.rows is not None:
        raise UserError(
            f"--epsilon needs descriptors whose sensitivity is known; {run.prepared.recipe.method} of this run has "
            "none. Train with: unalike run odpfl --set encoder=sphere"
        )
    if left_out:
        raise UserError(
            f"ε = {epsilon:g} is promised for a number of rows that does not depend on what they hold, but "
            f"{counted(left_out, 'row')} would be left out for lack of a value. Fill them in, or remove them from the "
            "file; numbers are filled by the run's means with --set data.options.missing=mean, and labels are not "
            "needed with --unlabeled"
        )
    return replace(method, newcomer_epsilon=epsilon, newcomer_delta=delta)


def _noise_told(std: float) -> str:
    """How large the noise is, beside a descriptor in the unit ball."""
    told = f"the noise on each number of the descriptor has standard deviation {std:.3g}, and the descriptor is at most"
    if std <= 1:
        return f"{told} 1 long"
    return f"{told} 1 long: hardly anything of the data is left in it. Give more samples, or a larger ε"


def _expectation(run: FinishedRun, method: ODPFL, samples: int, epsilon: float) -> str:
    """What unseen clients of the run score with no more samples and the same ε, measured now (P2 Fig. 5)."""
    whole = run.population
    able = whole.test.labeled & (whole.test.size > 0) & (whole.train.size > 0)
    newcomers = Newcomers.unseen(replace(whole, unseen=whole.unseen[able[whole.unseen]]))
    if len(newcomers) == 0:
        return "the run has no unseen clients with labels to test, so nobody knows what accuracy to expect at this ε"
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


def counted(number: int, what: str) -> str:
    """A number with its noun."""
    return f"{number} {what}{'s' * (number != 1)}"
