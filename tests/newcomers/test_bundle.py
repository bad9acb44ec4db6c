"""Bundles: the task, the functions and the ONNX graphs make one model, and nothing else is in the files."""

from __future__ import annotations

import hashlib
import json
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.newcomers.onnx_files import assert_plain
from unalike import Clients, simulate
from unalike.core.method import OnDemand
from unalike.core.model import Model
from unalike.core.schema import Schema
from unalike.methods import METHODS
from unalike.methods.fedavg import FedAvg
from unalike.methods.flowdup import FLowDUP
from unalike.methods.odpfl import ODPFL
from unalike.methods.pefll import PeFLL
from unalike.methods.problem import Problem
from unalike.networks import architectures
from unalike.networks.architectures import build
from unalike.newcomers.bundle import NOT, served_by_default, write_bundle, write_graphs
from unalike.runs.errors import UserError
from unalike.runs.finished import FinishedRun
from unalike.runs.recipe.recipe import to_recipe
from unalike.runs.run import run_recipe
from unalike.runs.simulate import gather_models

pytest.importorskip("onnx")
ort = pytest.importorskip("onnxruntime")
SHAPES = {"cnn1d": (2, 32), "lenet-5": (1, 28, 28), "small-cnn": (1, 8, 8)}
FEATURES = ("logistic", "linear", "mlp", "dense")
QUICK = (("logistic", "pefll"), ("small-cnn", "flowdup"), ("cnn1d", "fedavg"))


def run_graph(file: Path, **inputs: Tensor) -> Tensor:
    session = ort.InferenceSession(str(file), providers=["CPUExecutionProvider"])
    return torch.from_numpy(session.run(None, {name: value.numpy() for name, value in inputs.items()})[0])


def problem_of(name: str) -> tuple[Problem, Schema]:
    shape = (6,) if name in FEATURES else SHAPES.get(name, (3, 32, 32))
    classes = 1 if name == "linear" else 4
    kind = "image" if len(shape) == 3 else "features"
    model = Model(build(name, shape, classes))
    shift, scale = torch.full(shape, 0.3), torch.full(shape, 1.7)
    schema = Schema(shape, kind, target="class", classes=classes, shift=shift, scale=scale)
    return Problem(model, shape, classes, 4, kind), schema


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        pytest.param(name, kind, marks=[] if (name, kind) in QUICK else pytest.mark.long)
        for name in architectures.names()
        for kind in ("pefll", "odpfl", "flowdup", "fedavg")
        if name not in ("lstm", "lenet-embedding")  # text has no bundle; an embedding is no classifier
        and (name, kind) != ("linear", "flowdup")  # which refuses a model without a last layer
    ],
)
def test_the_task_the_functions_and_the_graphs_make_the_same_scores(name: str, kind: str, tmp_path: Path) -> None:
    problem, schema = problem_of(name)
    method: Any = {
        "pefll": lambda: PeFLL(problem, descriptor=5),
        "odpfl": lambda: ODPFL(problem, descriptor=5, encoder="sphere"),
        "flowdup": lambda: FLowDUP(problem.model, features=8, width=4, dimension=16),
        "fedavg": lambda: FedAvg(problem.model),
    }[kind]()
    random = torch.Generator().manual_seed(1)
    state = method.start(0)
    if "scale" in state:
        state = state.replace(shift=torch.randn(5, generator=random) * 0.1, scale=torch.tensor(3.0))
    if "theta" in state:  # where nothing is trained yet, a linear model has zeros alone
        state = state.replace(theta=state["theta"] + 0.1 * torch.randn(state["theta"].shape, generator=random))
    sizes = [1, 7]
    raw = torch.randn(sum(sizes), *problem.input_shape, generator=random)
    y = torch.randint(problem.classes or 1, (sum(sizes),), generator=random)
    clients = Clients.from_sizes((raw - 0.3) * 1.7, y, torch.tensor(sizes))
    cohort = simulate(clients, block=2).everyone()
    tasks = gather_models(cohort, method.personalize(state, cohort))
    length = write_graphs(method, state, schema, tmp_path)
    assert length == {"pefll": 5, "odpfl": 5, "flowdup": 8}.get(kind)
    for client, own in enumerate((slice(0, 1), slice(1, 8))):
        x, scaled = raw[own], (raw[own] - 0.3) * 1.7
        wanted = problem.model(tasks[client], scaled)
        graphs = {"x": x}
        if isinstance(method, OnDemand):
            theta = method.model_of(state, method.descriptor_of(state, scaled, y[own] if method.reads_labels else None))
            close(problem.model(theta, scaled), wanted)
            rows = {"x": x, "y": y[own]} if method.reads_labels else {"x": x}
            v = run_graph(tmp_path / "describe.onnx", **rows)
            graphs["theta"] = run_graph(tmp_path / "make.onnx", v=v)
        close(run_graph(tmp_path / "model.onnx", **graphs), wanted)
    assert float(tasks.abs().max()) > 0
    for file in tmp_path.iterdir():
        assert_plain(file)


def close(found: Tensor, wanted: Tensor) -> None:
    torch.testing.assert_close(found, wanted, atol=1e-5, rtol=1e-5)


def test_what_the_exporter_notes_is_there_to_be_left_out() -> None:
    """Else the tests above would hold without any care."""
    x = torch.zeros(2, 3)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        program = torch.onnx.export(torch.nn.Linear(3, 2).eval(), (x,), opset_version=20, verbose=False)
    assert program is not None and b".py" in program.model_proto.SerializeToString()


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> FinishedRun:
    folder = tmp_path_factory.mktemp("runs") / "clinic"
    recipe = {"method": "pefll", "rounds": 2, "model": {"name": "mlp"}, "hyperparameters": {"descriptor": 4}}
    data = {"name": "digits", "partition": "pathological:2", "clients": 12, "unseen": 0.25}
    run_recipe(to_recipe({**recipe, "data": data}, "test"), folder)
    return FinishedRun.open(folder)


def test_a_bundle_holds_what_its_card_lists_and_no_training_client(run: FinishedRun, tmp_path: Path) -> None:
    card = write_bundle(run, tmp_path / "out")
    files = {file.name: file.read_bytes() for file in (tmp_path / "out").iterdir()}
    assert set(files) == {*card["files"], "card.json"} and json.loads(files["card.json"]) == card
    for name, about in card["files"].items():
        assert about == {"bytes": len(files[name]), "sha256": hashlib.sha256(files[name]).hexdigest()}
    assert (card["name"], card["length"], card["made_at"], card["reads_labels"]) == ("clinic", 4, "server", True)
    known = run.state["remembered.v"]
    assert len(known) > 1
    for v in known:
        numbers = v.numpy().astype(np.float32)
        assert all(numbers.tobytes() not in content for content in files.values())
        assert f"{float(numbers[0]):.5f}".encode() not in files["card.json"]
    for name, content in files.items():
        if name.endswith(".onnx"):
            assert_plain(tmp_path / "out" / name)
        else:
            assert str(run.path.parent).encode() not in content
    (tmp_path / "out" / "notes.txt").touch()
    with pytest.raises(UserError, match="holds other files; give a new or empty folder"):
        write_bundle(run, tmp_path / "out")


def test_every_method_says_how_a_bundle_serves_it_or_why_not() -> None:
    found = {name: served_by_default(name) for name in METHODS}
    own = {name for name, how in found.items() if how.startswith("a model of its own")}
    assert own == {"pefll", "pefll-unlabeled", "odpfl", "flowdup"}
    one = {name for name, how in found.items() if how == "one model for everybody"}
    assert {"fedavg", "fedprox", "ld-fedavg", "fedma", "robust-hdp", "fedsplit"} <= one
    others = {name: how for name, how in found.items() if name not in own | one}
    assert {"local", "pfedhn", "fedrep", "fedtta", "pfl-nearest"} <= others.keys()
    assert all(how.startswith(f"{NOT}: ") and len(how) > 30 for how in others.values())
    assert "lends each newcomer another client's model" in found["pfl-sampled"]


def test_a_method_that_needs_more_than_a_descriptor_is_refused_with_the_reason(
    run: FinishedRun, tmp_path: Path
) -> None:
    recipe = {"method": "fedrep", "rounds": 1, "model": {"name": "mlp"}, "data": {"name": "digits", "clients": 12}}
    run_recipe(to_recipe(recipe, "test"), tmp_path / "run")
    with pytest.raises(UserError, match=f"fedrep is served {NOT}: a newcomer trains.*unalike personalize"):
        write_bundle(FinishedRun.open(tmp_path / "run"), tmp_path / "out")
    assert not (tmp_path / "out").exists()
