"""The last linear layer of a classifier: taken off, exchanged, or kept from predicting some classes."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from unalike.core.model import Model

NEVER = -1e4  # the score of a masked class: its probability is 0 in float32, and a loss on it stays finite


def without_head(model: Model) -> tuple[Model, int]:
    """The model without its last linear layer, and the length of what it then gives.

    Its parameters are the first of the model's, ``features(theta[: features.size], x)``: all, if that layer is frozen.
    """
    name, head = last_linear(model._module)
    own = [f"{name}.{tensor}" for tensor, _ in head.named_parameters() if f"{name}.{tensor}" in model.shapes]
    if list(model.shapes)[len(model.shapes) - len(own) :] != own or len(own) == len(model.shapes):
        raise ValueError(
            f"{model}: its last linear layer, {name!r}, must hold its last parameters and not all of them; use another "
            "architecture"
        )
    return _with_head(model, name, nn.Identity()), head.in_features


def frozen_features(model: Model) -> tuple[nn.Module, int]:
    """The network before its last linear layer, as the model begins and all of it frozen, and what it gives."""
    module = model.module(model.init(0)).requires_grad_(False)
    name, head = last_linear(module)
    path, _, last = name.rpartition(".")
    setattr(module.get_submodule(path), last, nn.Identity())
    return module, head.in_features


def with_outputs(model: Model, outputs: int) -> Model:
    """The model's architecture with another number of outputs: its last linear layer is exchanged (T1 C.1.2)."""
    name, head = last_linear(model._module)
    return _with_head(model, name, nn.Linear(head.in_features, outputs, bias=head.bias is not None))


def last_linear(module: nn.Module) -> tuple[str, nn.Linear]:
    """The last linear layer, by which a network answers, and its name."""
    linear = [(name, part) for name, part in module.named_modules() if isinstance(part, nn.Linear)]
    if not linear:
        raise ValueError(
            f"{type(module).__name__} has no linear layer, so nothing tells where its representation ends and its head "
            "begins"
        )
    return linear[-1]


def _with_head(model: Model, name: str, head: nn.Module) -> Model:
    """The model with another head, which is trainable; what was frozen stays so."""
    module = copy.deepcopy(model._module)
    path, _, last = name.rpartition(".")
    setattr(module.get_submodule(path), last, head)
    for key, parameter in module.named_parameters():
        parameter.requires_grad_(key in model.shapes or key.startswith(f"{name}."))
    made = Model(module)
    made.drawn = None if model.drawn is None else {*model.drawn, name}
    return made


# Label masking (T1 B.1.3): a client rules out the classes that it does not have


def class_bias(model: Model, classes: int | None) -> slice:
    """Where θ holds the last layer's bias, by which a class can be ruled out."""
    shapes: Mapping[str, Sequence[int]] = getattr(model, "shapes", {})  # several models in one have none
    name, shape = list(shapes.items())[-1] if shapes else ("none of its own", ())
    if classes is None or tuple(shape) != (classes,):
        raise ValueError(
            f"label masking needs a classifier that ends in a bias for each class, but the last parameter of "
            f"{model!r} is {name} of shape {tuple(shape)} and there are {classes} classes"
        )
    return model.span(name)


def only_classes(model: Model, theta: Tensor, present: Tensor) -> Tensor:
    """θ [d] of the same model, which never predicts a class that is not ``present`` [classes]."""
    bias = class_bias(model, len(present))
    return torch.cat([theta[: bias.start], torch.where(present, theta[bias], NEVER), theta[bias.stop :]])
