"""The architectures of the papers, as plain modules that ``torch.func.vmap`` can run for a block of clients at once.

Hence no batch norm (``unalike.Model`` refuses it). Everything that draws initial values does so in
``reset_parameters``, which ``Model.init`` calls under its seed. Pooling comes before the ReLU: both orders give the
same result, but this one rectifies a quarter of the values.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from unalike.networks.convolutions import (
    channels_last,
    convolve,
    convolve_each_client,
    max_pool,
    max_pool_by_slices,
    needs_gradient,
    runs_in_blocks,
)


def image_shape(input_shape: Sequence[int], name: str, smallest: int) -> tuple[int, int, int]:
    """(channels, height, width), or an error that names an architecture which would fit."""
    if len(input_shape) != 3:
        raise ValueError(
            f"{name} reads images of shape (channels, height, width), but one input has shape {tuple(input_shape)}; "
            "use 'mlp' or 'logistic'"
        )
    channels, height, width = input_shape
    if min(height, width) < smallest:
        fits = "small-cnn" if min(height, width) >= SmallCNN.smallest else "mlp"
        raise ValueError(f"{name} needs images of at least {smallest}x{smallest}, got {height}x{width}; use {fits!r}")
    return channels, height, width


class Logistic(nn.Module):
    """One linear map of the flattened input: logistic (softmax) regression, or linear regression with one output."""

    def __init__(self, input_shape: Sequence[int], classes: int) -> None:
        super().__init__()
        self.linear = nn.Linear(math.prod(input_shape), classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x.flatten(1))


class Linear(nn.Module):
    """⟨w, x⟩ in double precision, from w = 0: the least-squares and logistic problems of T2 chapter 2.

    The first of two classes has the score 0, so that the softmax is the logistic function and w is all there is.
    """

    def __init__(self, input_shape: Sequence[int], classes: int) -> None:
        super().__init__()
        if classes > 2:
            raise ValueError(f"linear predicts a number or one of two classes, not {classes}; use 'logistic'")
        self.outputs = classes
        self.weight = nn.Parameter(torch.zeros(math.prod(input_shape), dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        scores = x.flatten(1).to(self.weight.dtype) @ self.weight
        return scores[:, None] if self.outputs == 1 else torch.stack([torch.zeros_like(scores), scores], 1)


class MLP(nn.Module):
    """Linear layers with a ReLU after each but the last, on the flattened input; dropout of the last hidden units."""

    def __init__(
        self, input_shape: Sequence[int], classes: int, hidden: Sequence[int] = (64,), dropout: float = 0.0
    ) -> None:
        super().__init__()
        widths = [math.prod(input_shape), *hidden, classes]
        self.layers = nn.ModuleList([nn.Linear(a, b) for a, b in itertools.pairwise(widths)])
        self.dropout = nn.Dropout(dropout) if dropout else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        x = x.flatten(1)
        for layer in self.layers[:-1]:
            x = layer(x).relu()
        return self.layers[-1](self.dropout(x))


class Dense(MLP):
    """Client model of ODPFL-HN for feature vectors (P2 App. C): two layers of 500, then dropout of a fifth."""

    def __init__(
        self, input_shape: Sequence[int], classes: int, hidden: Sequence[int] = (500, 500), dropout: float = 0.2
    ) -> None:
        super().__init__(input_shape, classes, hidden, dropout)


def lenet_reads(input_shape: Sequence[int]) -> bool:
    """Are these images that are large enough for LeNet?"""
    return len(input_shape) == 3 and min(input_shape[1:]) >= LeNet.smallest


class SmallCNN(nn.Module):
    """Two padded 3x3 convolutions with pooling and one linear layer: for images too small for LeNet, such as digits."""

    smallest = 4

    def __init__(self, input_shape: Sequence[int], classes: int, widths: tuple[int, int] = (16, 32)) -> None:
        super().__init__()
        channels, height, width = image_shape(input_shape, "small-cnn", self.smallest)
        self.conv1 = nn.Conv2d(channels, widths[0], 3, padding=1)
        self.conv2 = nn.Conv2d(widths[0], widths[1], 3, padding=1)
        self.head = nn.Linear(widths[1] * (height // 4) * (width // 4), classes)

    def forward(self, x: Tensor) -> Tensor:
        x = max_pool(self.conv1(x)).relu()
        x = max_pool(self.conv2(x)).relu()
        return self.head(x.flatten(1))


class SignalCNN(nn.Module):
    """Two 1-D convolutions, each pooled to a quarter, and one linear layer: for signals [length] or [channels, length].

    A signal is read as an image of height 1, for which DP-SGD's per-sample norms are known.
    """

    def __init__(
        self, input_shape: Sequence[int], classes: int, widths: tuple[int, int] = (16, 32), kernel: int = 7
    ) -> None:
        super().__init__()
        if len(input_shape) > 2 or input_shape[-1] < 16:
            raise ValueError(f"cnn1d reads signals [length] or [channels, length] of 16 or more, got {input_shape}")
        self.channels, length = (1, *input_shape)[-2:]
        self.conv1 = nn.Conv2d(self.channels, widths[0], (1, kernel), padding=(0, kernel // 2))
        self.conv2 = nn.Conv2d(widths[0], widths[1], (1, kernel), padding=(0, kernel // 2))
        self.head = nn.Linear(widths[1] * _quarter(_quarter(length, kernel), kernel), classes)

    def forward(self, x: Tensor) -> Tensor:
        x = x.reshape(x.shape[0], self.channels, 1, -1)  # len(x) would fix the number of rows in ONNX graphs
        x = nn.functional.avg_pool2d(self.conv1(x).relu(), (1, 4))
        x = nn.functional.avg_pool2d(self.conv2(x).relu(), (1, 4))
        return self.head(x.flatten(1))


def _quarter(length: int, kernel: int) -> int:
    """What a padded convolution and pooling by four leave of a length."""
    return (length + 2 * (kernel // 2) - kernel + 1) // 4


def side_after_two(side: int) -> int:
    """What two rounds of an unpadded 5x5 convolution and 2x2 pooling leave of an image's side."""
    return ((side - 4) // 2 - 4) // 2


class LeNet(nn.Module):
    """Client model of PeFLL (T1 Table B.1): 5x5 convolutions to 16 and 32 channels, no padding, then 120-84-C."""

    smallest = 16
    widths = (16, 32)

    def __init__(self, input_shape: Sequence[int], classes: int) -> None:
        super().__init__()
        channels, height, width = image_shape(input_shape, "lenet", self.smallest)
        first, second = self.widths
        self.conv1 = nn.Conv2d(channels, first, 5)
        self.conv2 = nn.Conv2d(first, second, 5)
        self.fc1 = nn.Linear(second * side_after_two(height) * side_after_two(width), 120)
        self.fc2 = nn.Linear(120, 84)
        self.fc3 = nn.Linear(84, classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.after_first(convolve(x, self.conv1))

    def after_first(self, x: Tensor) -> Tensor:
        """The rest of the network, from what the first convolution gave."""
        x = self.pool(x).relu()
        return self.after_convolutions(self.pool(convolve(x, self.conv2)).relu())

    def after_convolutions(self, x: Tensor) -> Tensor:
        """The linear layers."""
        x = self.fc2(self.fc1(x.flatten(1)).relu()).relu()
        return self.fc3(x)

    def pool(self, x: Tensor) -> Tensor:
        return max_pool(x)


class LeNet5(LeNet):
    """Client model of AdaPeD (P3 §4.1), with LeNet-5's widths: convolutions to 6 and 16 channels, then 120-84-C."""

    widths = (6, 16)

    def forward(self, x: Tensor) -> Tensor:
        if not runs_in_blocks():
            return super().forward(x)
        x = self.pool_and_rectify(convolve_each_client(x, self.conv1.weight), self.conv1)
        if needs_gradient(x):
            x = F.conv2d(x, channels_last(self.conv2.weight))
        else:
            x = convolve_each_client(x, self.conv2.weight)
        return self.after_convolutions(self.pool_and_rectify(x, self.conv2))

    def pool_and_rectify(self, x: Tensor, layer: nn.Conv2d) -> Tensor:
        """Pooled before the bias is added: the same numbers, a quarter of the additions."""
        assert layer.bias is not None
        return (self.pool(x) + layer.bias[:, None, None]).relu()

    def pool(self, x: Tensor) -> Tensor:
        return max_pool(x) if needs_gradient(x) else max_pool_by_slices(x)


class LeNetEmbedding(LeNet):
    """Embedding network of PeFLL (T1 Table B.2): LeNet with l linear outputs that also sees the label.

    The label enters as C one-hot planes behind the image's channels. ``labels=False`` (Table 4.2) has no such planes.
    """

    def __init__(self, input_shape: Sequence[int], classes: int, *, descriptor: int, labels: bool = True) -> None:
        channels, height, width = image_shape(input_shape, "lenet-embedding", self.smallest)
        super().__init__((channels + classes if labels else channels, height, width), descriptor)
        self.channels = channels
        self.classes = classes if labels else 0

    def forward(self, x: Tensor, y: Tensor | None = None) -> Tensor:
        if not self.classes:
            return super().forward(x)
        if y is None:
            raise ValueError("this embedding network reads labels: give them, or build it with labels=False")
        # A one-hot plane is 0 or 1 everywhere, and there is no padding, so its convolution is the kernel's sum: the C
        # planes need not be made at all.
        weight = self.conv1.weight
        image = F.conv2d(x, channels_last(weight[:, : self.channels]), self.conv1.bias)
        one_hot = (y[:, None] == torch.arange(self.classes, device=y.device)).to(x.dtype)
        label = one_hot @ weight[:, self.channels :].sum((2, 3)).T
        return self.after_first(image + label[:, :, None, None])


class CNN(nn.Module):
    """Client model of FLowDUP with about 150,000 parameters (T1 ch. 5), in the layers of McMahan et al. (2017).

    5x5 convolutions to 32 and 64 channels and one hidden layer. By default its weights number about 98,000, whatever
    the image's size (width 96 on 28x28, 61 on 32x32).
    """

    smallest = 16

    def __init__(self, input_shape: Sequence[int], classes: int, hidden: int | None = None) -> None:
        super().__init__()
        channels, height, width = image_shape(input_shape, "cnn", self.smallest)
        features = 64 * side_after_two(height) * side_after_two(width)
        hidden = hidden or max(1, 98_304 // features)
        self.conv1 = nn.Conv2d(channels, 32, 5)
        self.conv2 = nn.Conv2d(32, 64, 5)
        self.fc1 = nn.Linear(features, hidden)
        self.fc2 = nn.Linear(hidden, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = max_pool(convolve(x, self.conv1)).relu()
        x = max_pool(convolve(x, self.conv2)).relu()
        return self.fc2(self.fc1(x.flatten(1)).relu())
