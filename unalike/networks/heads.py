"""A classifier in two parts: what it sees in an input, and the last linear layer that reads it."""

from __future__ import annotations

import copy

from torch import nn

from unalike.core.model import Model


def without_head(model: Model) -> tuple[Model, int]:
    """The model without its last linear layer, and the length of what it then gives.

    Its parameters are the first of the model's: ``features(theta[: features.size], x)``.
    """
    name, head = _last_linear(model)
    own = [f"{name}.{tensor}" for tensor, _ in head.named_parameters()]
    if list(model.shapes)[-len(own) :] != own or len(own) == len(model.shapes):
        raise ValueError(
            f"{model}: its last linear layer, {name!r}, must hold its last parameters and not all of them; use another "
            "architecture"
        )
    return _with_head(model, name, nn.Identity()), head.in_features


def with_outputs(model: Model, outputs: int) -> Model:
    """The model's architecture with another number of outputs: its last linear layer is exchanged (T1 C.1.2)."""
    name, head = _last_linear(model)
    return _with_head(model, name, nn.Linear(head.in_features, outputs, bias=head.bias is not None))


def _last_linear(model: Model) -> tuple[str, nn.Linear]:
    linear = [(name, part) for name, part in model._module.named_modules() if isinstance(part, nn.Linear)]
    if not linear:
        raise ValueError(f"{model} has no linear layer, so nothing tells where its representation ends")
    return linear[-1]


def _with_head(model: Model, name: str, head: nn.Module) -> Model:
    module = copy.deepcopy(model._module)
    path, _, last = name.rpartition(".")
    setattr(module.get_submodule(path), last, head)
    for parameter in module.parameters():
        parameter.requires_grad_(True)
    return Model(module)
