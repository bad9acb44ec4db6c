"""Which classes a model may predict: a client rules out those that it does not have (T1 B.1.3, label masking)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from unalike.core.model import Model

NEVER = -1e4  # the score of a masked class: its probability is 0 in float32, and a loss on it stays finite


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
