"""A newcomer and a finished run: read its data, send what the method needs, receive a personal model."""

from __future__ import annotations

import importlib.util
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from motley.client import Clients
from motley.data.files import file_source
from motley.data.population import Population
from motley.federation import Federation
from motley.method import Method, State
from motley.methods import METHODS
from motley.methods.odpfl import ODPFL, SENSITIVITY
from motley.privacy import Ledger
from motley.privacy.sampling import Local
from motley.privacy.system import SystemDraws
from motley.studio import checkpoint, folder
from motley.studio.analyses import Newcomers, accuracy_by_size_and_epsilon
from motley.studio.errors import UserError
from motley.studio.measure import serves_unlabeled
from motley.studio.prepare import Prepared, prepare
from motley.studio.recipe import read_recipe

MANY = 100_000  # more classes than anybody has: whole-number labels of a file then stay as they are
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


@dataclass(frozen=True)
class Served:
    """What a newcomer sent and received, and the model that came of it."""

    run: FinishedRun
    name: str
    samples: int
    theta: Tensor
    sent: dict[str, int]  # bytes up, by array
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
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of the exporter, about itself
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


def read_newcomer(file: Path, population: Population, *, unlabeled: bool = False) -> Clients:
    """All rows of a file as one client that fits the population, or an error that says where it does not."""
    regression = population.has_labels and population.classes is None
    source = file_source(
        file,
        kind=population.kind,
        classes=None if regression else MANY,
        task="regression" if regression else "classification",
    )
    x = np.ascontiguousarray(source.x)
    if tuple(x.shape[1:]) != population.input_shape:
        raise UserError(
            f"{file}: a sample has shape {tuple(x.shape[1:])}, but the run was trained on {population.kind} of shape "
            f"{population.input_shape}"
        )
    if x.dtype.kind == "f" and not np.isfinite(x).all():
        row = int(np.flatnonzero(~np.isfinite(x.reshape(len(x), -1)).all(1))[0])
        raise UserError(f"{file}: row {row} holds NaN or infinity; leave such rows out or fill them in")
    y = None
    if source.y is not None and not unlabeled:
        y = torch.from_numpy(source.y) if regression else _classes(file, source.y, source.class_names, population)
    dtype = population.train.x.dtype
    inputs = torch.from_numpy(x)
    if dtype == torch.uint8 and inputs.dtype != torch.uint8:
        raise UserError(f"{file}: the run was trained on bytes 0 … 255 (uint8), but x holds {x.dtype}")
    one = Clients.from_sizes(
        inputs.to(dtype),
        y,
        torch.tensor([len(x)]),
        names=None,
        shift=population.train.shift,
        scale=population.train.scale,
    )
    return replace(one, ids=one.ids + len(population))  # nobody's id: it is taken for no training client


def _classes(file: Path, y: np.ndarray, names: Sequence[str] | None, population: Population) -> Tensor:
    """Labels by the run's own numbers of classes: found by name, or else they are those numbers already."""
    assert population.classes is not None
    known = [str(i) for i in range(population.classes)]
    known = known if population.class_names is None else [str(name) for name in population.class_names]
    found: dict[int, int] = {}
    for code in np.unique(y).tolist():
        word = str(code) if names is None else names[code]
        if word in known:
            found[code] = known.index(word)
        elif names is None and code < population.classes:
            found[code] = code
        else:
            shown = ", ".join(known[:10]) + (", ..." if len(known) > 10 else "")
            raise UserError(f"{file}: the class {word!r} was not in training; the run knows {shown}")
    return torch.tensor([found[code] for code in y.tolist()])


def serve(
    run: FinishedRun, newcomer: Clients, name: str, *, epsilon: float | None = None, delta: float = 0.01
) -> Served:
    """A model for one newcomer (T1 Alg. 7, P2 §4 and §7). Nothing of the run changes.

    ``epsilon`` protects each of its rows; a run that was trained with ``newcomer_epsilon`` protects them anyway. The
    noise is the operating system's: seeded noise would protect a newcomer from nobody who knows the run's seed.
    """
    method = run.method
    if epsilon is None and isinstance(method, ODPFL) and method.newcomer_epsilon is not None:
        epsilon, delta = method.newcomer_epsilon, method.newcomer_delta
    labeled = bool(newcomer.labeled.all())
    if not labeled and not serves_unlabeled(method):
        able = ", ".join(key for key in ("pefll-unlabeled", "odpfl", "pfl-nearest", "fedavg") if key in METHODS)
        raise UserError(
            f"{run.prepared.recipe.method} cannot personalize for a client without labels; give labels, or train with "
            f"a method that needs none: {able}"
        )
    ledger = Ledger()
    federation = Federation(newcomer, run.prepared.recipe.seed, ledger=Ledger())
    notes: list[str] = []
    descriptor: Tensor | None = None
    if epsilon is not None:
        if not isinstance(method, ODPFL) or method.encoder != "sphere" or method.rows is not None:
            raise UserError(
                f"--epsilon needs descriptors whose sensitivity is known; {run.prepared.recipe.method} of this run has "
                "none. Train with: motley run odpfl --set encoder=sphere"
            )
        private = replace(method, newcomer_epsilon=epsilon, newcomer_delta=delta)
        noise = private.noise
        assert noise is not None
        exact = replace(method, newcomer_epsilon=None).descriptors(run.state, federation.everyone())
        descriptor = noise.add(exact, SENSITIVITY / int(newcomer.size[0]), SystemDraws())
        ledger.record(noise.event(), unit="point", sampling=Local(), newcomers=[name])
        theta = private.models(run.state, descriptor)
        notes += _expectation(run, private, int(newcomer.size[0]), epsilon)
    else:
        theta = method.personalize(run.state, federation.everyone())
        ledger = federation.ledger
        if hasattr(method, "descriptors") and hasattr(method, "introduce"):
            descriptor = method.descriptors(run.state, federation.aside().everyone())
    spent = ledger.epsilon(delta, newcomer=name) if epsilon is not None else ledger.epsilon(delta)
    received = dict(federation.traffic.down)
    received["theta"] = received.get("theta", 0) + theta[0].numel() * 4
    return Served(
        run=run,
        name=name,
        samples=int(newcomer.size[0]),
        theta=theta[0].detach(),
        sent=dict(federation.traffic.up),
        received=received,
        descriptor=None if descriptor is None else descriptor[0],
        ledger=ledger,
        epsilon=spent,
        delta=delta,
        notes=notes,
    )


def _expectation(run: FinishedRun, method: ODPFL, samples: int, epsilon: float) -> list[str]:
    """What unseen clients of the run score with as many samples and the same ε, measured now (P2 Fig. 5)."""
    newcomers = Newcomers.unseen(run.population)
    if len(newcomers) == 0 or int(newcomers.test.size.sum()) == 0:
        return []
    federation = run.prepared.federation()
    curves = accuracy_by_size_and_epsilon(method, run.state, federation, newcomers, [samples], [epsilon, None])
    noisy, exact = curves[epsilon][0].mean, curves[None][0].mean
    told = f"unseen clients of this run with up to {samples} samples score {noisy:.3f} at ε = {epsilon:g}"
    if exact - noisy <= NOTICEABLE:
        return [f"{told}, and {exact:.3f} without noise"]
    return [
        f"{told}, but {exact:.3f} without noise: {samples} samples are too few for this ε. The noise falls as "
        "1/samples: give more samples, or a larger ε"
    ]
