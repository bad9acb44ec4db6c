"""Embedding networks φ(x, y): one sample, with its label or without, to a point of the descriptor space."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Literal

import torch
from torch import Tensor, nn

from unalike.core.model import Model
from unalike.networks.classifiers import MLP, LeNet, LeNetEmbedding, lenet_reads
from unalike.networks.heads import frozen_features
from unalike.networks.lstm import CharLSTM

Labels = Literal["auto", "planes", "linear", "alone", "ignored"]
LABEL_WIDTH = 16  # of a label's linear embedding, where it joins the features


def label_vectors(y: Tensor, classes: int | None) -> Tensor:
    """One-hot classes [B, C], or real targets as one column [B, 1]; a class beyond the last has a row of zeros."""
    if classes is None:
        return y.reshape(-1, 1).to(torch.float32)
    return (y[:, None] == torch.arange(classes)).to(torch.float32)


class VectorEmbedding(nn.Module):
    """A ReLU network on the flattened features, which a linear embedding of the label joins at its input."""

    def __init__(
        self,
        input_shape: Sequence[int],
        classes: int | None,
        descriptor: int,
        labels: bool = True,
        hidden: Sequence[int] = (120, 84),
    ) -> None:
        super().__init__()
        self.classes, self.labels = classes, labels
        if labels:
            self.label = nn.Linear(classes or 1, LABEL_WIDTH, bias=False)
        self.network = MLP((math.prod(input_shape) + (LABEL_WIDTH if labels else 0),), descriptor, hidden=hidden)

    def forward(self, x: Tensor, y: Tensor | None = None) -> Tensor:
        x = x.flatten(1)
        if self.labels:
            assert y is not None
            x = torch.cat([x, self.label(label_vectors(y, self.classes))], dim=1)
        return self.network(x)


class LabelEmbedding(nn.Module):
    """One linear map of the label, whatever the input: T1 §4.4's choice for CIFAR-100."""

    def __init__(self, classes: int | None, descriptor: int) -> None:
        super().__init__()
        self.classes = classes
        self.label = nn.Linear(classes or 1, descriptor)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.label(label_vectors(y, self.classes))


class SumEmbedding(nn.Module):
    """A network of the input alone plus a linear embedding of the label: for text, which a label cannot join."""

    def __init__(self, network: nn.Module, classes: int | None, descriptor: int, labels: bool = True) -> None:
        super().__init__()
        self.network, self.classes, self.labels = network, classes, labels
        if labels:
            self.label = nn.Linear(classes or 1, descriptor, bias=False)

    def forward(self, x: Tensor, y: Tensor | None = None) -> Tensor:
        embedded: Tensor = self.network(x)
        if self.labels:
            assert y is not None
            embedded = embedded + self.label(label_vectors(y, self.classes))
        return embedded


class OverFeatures(nn.Module):
    """A network over the features that a frozen one gives."""

    def __init__(self, body: nn.Module, network: nn.Module) -> None:
        super().__init__()
        self.body, self.network = body, network

    def forward(self, x: Tensor, *more: Tensor) -> Tensor:
        return self.network(self.body(x), *more)


def over_features(model: Model, make: Callable[[int], Model]) -> Model:
    """The network that is made for features of a width, over those of a pretrained model as it is at the start."""
    body, width = frozen_features(model)
    network = make(width)
    return Model(OverFeatures(body, network.module(network.init(0)).requires_grad_(True)))


def embedding_network(
    input_shape: Sequence[int],
    kind: str,
    classes: int | None,
    descriptor: int,
    labels: Labels,
    width: int | None = None,
) -> Model:
    """φ for this kind of input; "auto" lets labels enter as planes beside an image that LeNet can read, else linearly.

    With planes, or with labels ignored, such an image gets the network of T1 Table B.2. With a ``width`` φ is a network
    with one hidden layer, the MLP of T1 Table B.7, for images and features.
    """
    if descriptor < 1:
        raise ValueError(f"descriptor={descriptor}; expected a length of at least 1")
    if width is not None:
        if kind == "tokens" or labels not in ("auto", "linear", "ignored"):
            raise ValueError(
                f"embedding_width={width} makes φ a network of pixels or features, which labels join linearly; got "
                f"{kind} with labels={labels!r}: leave embedding_width out, or use labels='linear' or 'ignored'"
            )
        return Model(VectorEmbedding(input_shape, classes, descriptor, labels != "ignored", hidden=(width,)))
    lenet = kind == "image" and lenet_reads(input_shape)
    if labels == "auto":
        labels = "planes" if lenet and classes is not None else "linear"
    if labels == "planes":
        if not lenet or classes is None:
            raise ValueError(
                f"labels='planes' needs images of at least {LeNet.smallest}x{LeNet.smallest} with classes, got "
                f"{kind} of shape {tuple(input_shape)}; use labels='linear'"
            )
        return Model(LeNetEmbedding(input_shape, classes, descriptor=descriptor))
    if labels == "alone":
        return Model(LabelEmbedding(classes, descriptor))
    if labels not in ("linear", "ignored"):
        raise ValueError(f"labels={labels!r}; expected 'auto', 'planes', 'linear', 'alone' or 'ignored'")
    with_labels = labels == "linear"
    if kind == "tokens":
        if classes is None:
            raise ValueError("an embedding of tokens needs to know the alphabet: classes is None")
        network = CharLSTM(input_shape, descriptor, alphabet=classes)
        return Model(SumEmbedding(network, classes, descriptor, with_labels))
    if lenet and not with_labels:
        return Model(LeNetEmbedding(input_shape, 0, descriptor=descriptor, labels=False))
    return Model(VectorEmbedding(input_shape, classes, descriptor, with_labels))
