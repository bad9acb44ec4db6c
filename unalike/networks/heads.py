"""A classifier in two parts: what it sees in an input, and the last linear layer that reads it."""

from __future__ import annotations

import copy

from torch import nn

from unalike.core.model import Model


def without_head(model: Model) -> tuple[Model, int]:
    """The model without its last linear layer, and the length of what it then gives.

    Its parameters are the first of the model's: ``features(theta[: features.size], x)``.
    """
    module = copy.deepcopy(model._module)
    linear = [(name, part) for name, part in module.named_modules() if isinstance(part, nn.Linear)]
    if not linear:
        raise ValueError(f"{model} has no linear layer, so nothing tells where its representation ends")
    name, head = linear[-1]
    own = [f"{name}.{tensor}" for tensor, _ in head.named_parameters()]
    if list(model.shapes)[-len(own) :] != own or len(own) == len(model.shapes):
        raise ValueError(
            f"{model}: its last linear layer, {name!r}, must hold its last parameters and not all of them; use another "
            "architecture"
        )
    owner = module.get_submodule(name.rpartition(".")[0])
    if isinstance(owner, nn.ModuleList | nn.Sequential):
        owner[int(name.rpartition(".")[2])] = nn.Identity()
    else:
        setattr(owner, name.rpartition(".")[2], nn.Identity())
    for parameter in module.parameters():
        parameter.requires_grad_(True)
    return Model(module), head.in_features
