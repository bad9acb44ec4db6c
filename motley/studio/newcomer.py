"""A newcomer and a finished run: it sends what the method needs and gets a personal model."""

from __future__ import annotations

import importlib.util
import logging
import warnings
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from motley.client import Clients
from motley.data.population import Population
from motley.data.sources import CATALOG
from motley.federation import Federation
from motley.method import Method, State
from motley.methods import METHODS
from motley.methods.odpfl import ODPFL, SENSITIVITY
from motley.privacy import Ledger
from motley.privacy.checks import check_epsilon
from motley.privacy.sampling import Local
from motley.privacy.system import SystemDraws
from motley.studio import checkpoint, folder
from motley.studio.analyses import Newcomers, accuracy_by_size_and_epsilon
from motley.studio.errors import UserError
from motley.studio.measure import serves_unlabeled
from motley.studio.prepare import Prepared, prepare
from motley.studio.recipe import read_recipe

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
                f"{path} is no run folder: it has no {folder.RECIPE}; give one that `motley run` wrote (its --out)"
            )
        saved = checkpoint.load(path)
        if saved is None or saved.round == 0:
            raise UserError(f"{path} has not been trained yet; go on with: motley resume {path}")
        return cls(path, prepare(read_recipe(path / folder.RECIPE)), saved.state, saved.round)

    @property
    def method(self) -> Method:
        return self.prepared.method

    @property
    def population(self) -> Population:
        return self.prepared.population

    @property
    def named_data(self) -> bool:
        """Was the run trained on one of the data sets that come with Motley, not on somebody's own file?"""
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
        return [f"the run stopped at round {self.round} of {rounds}; it goes on with: motley resume {self.path}"]


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

    def save(self, file: Path) -> None:
        """The model's named tensors, and ``input.shift`` and ``input.scale``: the model reads (x − shift) · scale."""
        model, clients = self.run.method.model, self.run.population.train
        tensors = {name: value.contiguous().clone() for name, value in model.tensors(self.theta).items()}
        if clients.shift is not None and clients.scale is not None:
            tensors |= {"input.shift": clients.shift.clone(), "input.scale": clients.scale.clone()}
        about = {"run": self.run.path.name, "round": str(self.run.round), "newcomer": self.name}
        file.parent.mkdir(parents=True, exist_ok=True)
        save_file(tensors, file, about)

    def save_onnx(self, file: Path) -> None:
        """The same model as an ONNX graph that reads rows as they are in the data and gives scores."""
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
        block = clients.block(torch.arange(1))
        outputs = self.run.method.model(self.theta, block.x[0])
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
    """δ for each of a newcomer's rows: as asked, or the run's, or n^-1.1; never above 1/n for its n rows."""
    method = run.method
    usual: float = min(0.01, 1 / samples**1.1)
    if delta is None and isinstance(method, ODPFL) and method.newcomer_epsilon is not None:
        return min(method.newcomer_delta, 1 / samples)
    if delta is None:
        return usual
    if not 0 < delta < 1 or delta > 1 / samples:
        raise UserError(
            f"--delta {delta:g}: expected a number above 0 and at most 1/n = {1 / samples:.3g} for the newcomer's "
            f"n = {samples} rows, because more would allow to publish a row as it is; leave it out, or take about "
            f"{usual:.1e}"
        )
    return delta


def serve(
    run: FinishedRun, newcomer: Clients, name: str, *, epsilon: float | None = None, delta: float | None = None
) -> Served:
    """A model for one newcomer (T1 Alg. 7, P2 §4 and §7). Nothing of the run changes.

    ``epsilon`` protects each of its rows; a run that was trained with ``newcomer_epsilon`` protects them anyway. The
    noise is the operating system's: seeded noise would protect a newcomer from nobody who knows the run's seed.
    """
    method, samples = run.method, int(newcomer.size[0])
    delta = newcomer_delta(run, samples, delta)
    if epsilon is None and isinstance(method, ODPFL):
        epsilon = method.newcomer_epsilon
    if not bool(newcomer.labeled.all()) and not serves_unlabeled(method):
        able = ", ".join(key for key in ("pefll-unlabeled", "odpfl", "pfl-nearest", "fedavg") if key in METHODS)
        raise UserError(
            f"{run.prepared.recipe.method} cannot personalize for a client without labels; give labels, or train with "
            f"a method that needs none: {able}"
        )
    federation = Federation(newcomer, run.prepared.recipe.seed, serving=True)
    ledger, notes = federation.ledger, list(run.notes)
    descriptor: Tensor | None = None
    if epsilon is not None:
        private = _protecting(run, epsilon, delta)
        noise = private.noise
        assert noise is not None
        exact = replace(private, newcomer_epsilon=None).descriptors(run.state, federation.everyone())
        descriptor = noise.add(exact, SENSITIVITY / samples, SystemDraws())
        ledger = Ledger()  # what leaves the client is the noisy descriptor alone
        ledger.record(noise.event(), unit="point", sampling=Local(), newcomers=[name])
        theta = private.models(run.state, descriptor)
        notes += _expectation(run, private, samples, epsilon)
    else:
        theta = method.personalize(run.state, federation.everyone())
        if hasattr(method, "descriptors") and hasattr(method, "introduce"):
            descriptor = method.descriptors(run.state, federation.aside().everyone())
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
        epsilon=ledger.epsilon(delta, newcomer=name if epsilon is not None else None),
        delta=delta,
        notes=notes,
    )


def _protecting(run: FinishedRun, epsilon: float, delta: float) -> ODPFL:
    """The run's method with noise on a newcomer's descriptor."""
    try:
        check_epsilon(epsilon, "--epsilon")
    except ValueError as error:
        raise UserError(str(error)) from error
    method = run.method
    if not isinstance(method, ODPFL) or method.encoder != "sphere" or method.rows is not None:
        raise UserError(
            f"--epsilon needs descriptors whose sensitivity is known; {run.prepared.recipe.method} of this run has "
            "none. Train with: motley run odpfl --set encoder=sphere"
        )
    return replace(method, newcomer_epsilon=epsilon, newcomer_delta=delta)


def _expectation(run: FinishedRun, method: ODPFL, samples: int, epsilon: float) -> list[str]:
    """What unseen clients of the run score with no more samples and the same ε, measured now (P2 Fig. 5)."""
    newcomers = Newcomers.unseen(run.population)
    tested = newcomers.train.size[newcomers.test.size > 0].clamp(max=samples)
    if len(tested) == 0:
        return []
    federation = run.prepared.federation()
    curves = accuracy_by_size_and_epsilon(method, run.state, federation, newcomers, [samples], [epsilon, None])
    noisy, exact = curves[epsilon][0].mean, curves[None][0].mean
    low, high = int(tested.min()), int(tested.max())
    size = counted(high, "sample") if low == high else f"{low} to {high} samples"
    told = f"the unseen clients of this run, with {size} each, score {noisy:.3f} at ε = {epsilon:g}"
    if exact - noisy <= NOTICEABLE:
        return [f"{told}, and {exact:.3f} without noise"]
    verdict = f"{size} are too few for this ε"
    if samples > high:
        verdict += f" (you have {samples})"
    return [
        f"{told}, but {exact:.3f} without noise: {verdict}. The noise falls as 1/samples: give more samples, or a "
        "larger ε"
    ]


def counted(number: int, what: str) -> str:
    """A number with its noun."""
    return f"{number} {what}{'s' * (number != 1)}"
