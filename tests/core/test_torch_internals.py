"""The private parts of PyTorch: with which versions they were checked, and that the public path gives the same."""

import importlib
import re
import sys
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import grad, vmap

from unalike.core import torch_internals
from unalike.core.draws import Draws, key
from unalike.core.model import Model
from unalike.networks.architectures import build

CHECKED = ("2.13",)


def test_this_version_of_pytorch_was_checked() -> None:
    found = re.match(r"\d+\.\d+", torch.__version__)
    assert found and found[0] in CHECKED, (
        f"PyTorch {torch.__version__}: read unalike/core/torch_internals.py against it, run all tests, add it here"
    )


def _wrapped() -> list[bool]:
    seen: list[bool] = []

    def look(one: Tensor) -> Tensor:
        seen.append(torch_internals.is_wrapped(one))
        return one.sum()

    vmap(look)(torch.zeros(2, 3))
    grad(look)(torch.zeros(3))
    look(torch.zeros(3))
    return seen


def test_wrapped_tensors_are_known() -> None:
    assert _wrapped() == [True, True, False]


def test_wrapped_tensors_are_known_on_the_public_path(monkeypatch: pytest.MonkeyPatch) -> None:
    builtins: Any = sys.modules["torch._C._functorch"]
    with monkeypatch.context() as without:
        without.setitem(sys.modules, "torch._C._functorch", None)
        importlib.reload(torch_internals)
        assert torch_internals.is_wrapped is not builtins.is_functorch_wrapped_tensor
        assert _wrapped() == [True, True, False]
    importlib.reload(torch_internals)
    assert torch_internals.is_wrapped is builtins.is_functorch_wrapped_tensor
    assert _wrapped() == [True, True, False]


class _Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 3)
        self.again = self.first

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.again(self.first(x))
        return result


def _outputs() -> tuple[Tensor, Tensor]:
    model = Model(_Tied())
    theta, x = Draws(key(1)).normal(4, model.size), torch.ones(4, 2, 3)
    gradient: Any = vmap(grad(lambda one, row: model(one, row).square().sum()))
    return vmap(model)(theta, x), gradient(theta, x)


def test_a_model_computes_the_same_on_the_public_path(monkeypatch: pytest.MonkeyPatch) -> None:
    outputs, gradients = _outputs()
    monkeypatch.setattr("unalike.core.model.parameter_slots", lambda module: [])
    assert torch.equal(outputs, _outputs()[0]) and torch.allclose(gradients, _outputs()[1])


def test_active_transforms_are_known_by_name() -> None:
    seen: list[tuple[list[str] | None, bool]] = []

    def look(one: Tensor) -> Tensor:
        seen.append((torch_internals.active_transforms(), torch_internals.computed_singly()))
        return one.sum()

    look(torch.zeros(3))
    vmap(grad(look))(torch.zeros(2, 3))
    assert seen == [([], True), (["vmap", "grad"], False)]


def test_cleared_transforms_let_others_run_inside() -> None:
    def inside(one: Tensor) -> Tensor:
        with torch_internals.cleared_transforms():
            assert torch_internals.computed_singly()
            assert grad(lambda two: two.square().sum())(torch.ones(2)).tolist() == [2.0, 2.0]
        assert not torch_internals.computed_singly()
        return one.sum()

    vmap(inside)(torch.zeros(2, 3))


def test_tensors_are_flattened_and_back_the_same_on_the_public_path(monkeypatch: pytest.MonkeyPatch) -> None:
    parts = [torch.arange(6.0).reshape(2, 3), torch.arange(2.0)]
    flat = torch_internals.flatten_tensors(parts)
    views = torch_internals.unflatten_tensor(flat, parts)
    monkeypatch.setattr(torch_internals, "_flatten", None)
    monkeypatch.setattr(torch_internals, "_unflatten", None)
    assert torch.equal(flat, torch_internals.flatten_tensors(parts)) and flat.tolist() == [0, 1, 2, 3, 4, 5, 0, 1]
    public = torch_internals.unflatten_tensor(flat, parts)
    assert all(torch.equal(one, other) for one, other in zip(views, public, strict=True))
    assert all(torch.equal(one, other) for one, other in zip(views, parts, strict=True))


@pytest.mark.parametrize("missing", ["_interpreters", "_modes"])
def test_a_network_computes_the_same_where_transforms_are_unknown(
    monkeypatch: pytest.MonkeyPatch, missing: str
) -> None:
    model = Model(build("lenet-5", (1, 28, 28), 10))
    theta = torch.stack([model.init(seed) for seed in (1, 2)])
    x = Draws(key(3)).normal(2, 4, 1, 28, 28)
    step: Any = vmap(grad(lambda one, rows: model(one, rows).square().sum()))
    outputs, gradients = vmap(model)(theta, x), step(theta, x)
    monkeypatch.setattr(torch_internals, missing, None)
    assert torch.allclose(vmap(model)(theta, x), outputs, atol=1e-5)
    assert torch.allclose(step(theta, x), gradients, atol=1e-3)


def test_private_steps_are_refused_clearly_where_transforms_cannot_be_cleared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_internals, "_clear", None)
    with pytest.raises(RuntimeError, match=r"DP-SGD needs a part of PyTorch .* constraints.txt"):
        torch_internals.cleared_transforms()


def test_gradients_without_the_compiler_are_pytorch_s_own(monkeypatch: pytest.MonkeyPatch) -> None:
    importlib.import_module("torch._dynamo")  # from here on its own function asks
    asked = _outputs()
    monkeypatch.delitem(sys.modules, "torch._dynamo")
    without = _outputs()
    assert all(torch.equal(one, other) for one, other in zip(asked, without, strict=True))
    assert "torch._dynamo" not in sys.modules
    transforms = importlib.import_module("torch._functorch.eager_transforms")
    monkeypatch.setattr(transforms, "_autograd_grad", len)  # of a PyTorch that is built otherwise
    torch_internals.skip_compiler()
    assert transforms._autograd_grad is len
