"""``import unalike as ua`` suffices: for examples, for a method of one's own, and for its test."""

import ast
import importlib
import runpy
from pathlib import Path

import pytest
import torch

import unalike as ua

ROOT = Path(__file__).parents[1]
Ditto = runpy.run_path(str(ROOT / "examples" / "ditto.py"))["Ditto"]


def test_every_public_name_is_there_and_says_what_it_is() -> None:
    for name in ua.__all__:
        value = getattr(ua, name)
        assert name in dir(ua)
        if isinstance(value, type):
            assert value.__doc__, name


def test_dir_lists_public_names_alone() -> None:
    assert dir(ua) == ua.__all__ and {"os", "re", "importlib", "Path"}.isdisjoint(dir(ua))
    assert [name for name in dir(ua) if name.startswith("_")] == ["__version__"]


def test_every_method_of_the_table_is_public_by_its_class() -> None:
    methods = importlib.import_module("unalike.methods")
    for file in (ROOT / "unalike" / "methods").glob("*.py"):
        module = importlib.import_module(f"unalike.methods.{file.stem}") if file.stem != "__init__" else methods
        for name, value in vars(module).items():
            if isinstance(value, type) and value.__module__ == module.__name__ and hasattr(value, "personalize"):
                assert getattr(ua, name) is value


@pytest.mark.parametrize(
    "file",
    sorted(one for one in (ROOT / "examples").glob("*.py") if not one.name.startswith("on_")),
    ids=lambda file: file.name,
)
def test_an_example_imports_nothing_from_within_the_package(file: Path) -> None:
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.ImportFrom):
            assert not (node.module or "").startswith("unalike."), f"{file.name}: {node.module}"
        if isinstance(node, ast.Import):
            assert not any(name.name.startswith("unalike.") for name in node.names), file.name


def test_ditto_is_trained_and_scored_on_all_kinds_of_clients() -> None:
    clients = ua.data.load("digits", partition="pathological", clients=40, unseen=0.25, seed=0)
    model = ua.Model.named("mlp", clients)
    scores = {}
    for method in (Ditto(model), ua.FedAvg(model, local=Ditto.local)):
        federation = ua.simulate(clients, seed=0)
        state = ua.train(method, federation, rounds=20)
        scores[type(method).__name__] = ua.evaluate(method, state, clients, federation=federation)
    ditto, fedavg = scores["Ditto"], scores["FedAvg"]
    assert ditto.seen.mean > fedavg.seen.mean + 0.05  # two classes a client: its own model is the better one
    assert ditto.unseen.mean == pytest.approx(fedavg.unseen.mean)  # w is FedAvg's model, and a newcomer has w
    assert ditto.unlabeled.mean == ditto.unseen.mean
    assert "unlabeled" in str(ditto)


def test_dittos_personal_model_takes_the_steps_of_its_formula() -> None:
    """Two steps of gradient descent on f(v) + λ/2·‖v − w‖², written out for softmax regression."""
    clients = ua.data.load("digits", partition="iid", clients=3, unseen=0, seed=0)
    local = ua.LocalSGD(steps=None, epochs=2, batch=None, lr=0.1)
    method = Ditto(ua.Model.named("logistic", clients), cohort=3, strength=0.5, local=local)
    federation = ua.simulate(clients, seed=0)
    w = method.start(0).w
    state = ua.train(method, federation, rounds=1)
    held = method.personalize(state, federation.everyone())
    personal = ua.gather_models(federation.everyone(), held)
    for position in range(3):
        x, y = clients.train.rows(position)
        x = ((x - clients.train.shift) * clients.train.scale).flatten(1)
        v = w.clone()
        for _ in range(2):
            gradient = softmax_gradient(v, x, y) + 0.5 * (v - w)
            v = v - 0.1 * gradient
        assert torch.allclose(personal[position], v, atol=1e-5)


def softmax_gradient(theta: torch.Tensor, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    weight, bias = theta[:-10].view(10, -1), theta[-10:]
    error = torch.softmax(x @ weight.T + bias, 1) - torch.nn.functional.one_hot(y, 10)
    return torch.cat([(error.T @ x / len(x)).flatten(), error.mean(0)])
