"""Residual networks (He et al. 2016) without batch norm, which would mix the samples of a batch."""

from __future__ import annotations

from collections.abc import Sequence

import torch.nn.functional as F
from torch import Tensor, nn

from unalike.networks.classifiers import image_shape


class HeConv2d(nn.Conv2d):
    """A convolution without bias that starts as He et al. (2015) propose for ReLU networks."""

    def __init__(self, inputs: int, outputs: int, kernel: int, stride: int = 1) -> None:
        super().__init__(inputs, outputs, kernel, stride, padding=kernel // 2, bias=False)

    def reset_parameters(self) -> None:
        nn.init.kaiming_normal_(self.weight, mode="fan_out", nonlinearity="relu")


class ResidualBlock(nn.Module):
    """Two 3x3 convolutions beside a shortcut. ``groups=0`` means no normalisation; then ``scale`` tames the branch."""

    def __init__(self, inputs: int, outputs: int, stride: int, groups: int = 0, scale: float = 1.0) -> None:
        super().__init__()
        self.conv1 = HeConv2d(inputs, outputs, 3, stride)
        self.norm1 = _norm(groups, outputs)
        self.conv2 = HeConv2d(outputs, outputs, 3)
        self.norm2 = _norm(groups, outputs)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or inputs != outputs:
            self.shortcut = nn.Sequential(HeConv2d(inputs, outputs, 1, stride), _norm(groups, outputs))
        self.scale = scale

    def forward(self, x: Tensor) -> Tensor:
        branch = self.norm2(self.conv2(self.norm1(self.conv1(x)).relu()))
        total: Tensor = self.shortcut(x) + self.scale * branch
        return total.relu()


def _norm(groups: int, channels: int) -> nn.Module:
    return nn.GroupNorm(groups, channels) if groups else nn.Identity()


def _stages(widths: Sequence[int], depths: Sequence[int], groups: int = 0, scale: float = 1.0) -> nn.Sequential:
    """Residual blocks, ``depths`` of each width; every width but the first begins by halving the image."""
    outputs = [width for width, depth in zip(widths, depths, strict=True) for _ in range(depth)]
    pairs = zip([widths[0], *outputs], outputs, strict=False)
    return nn.Sequential(*[ResidualBlock(a, b, 1 if a == b else 2, groups, scale) for a, b in pairs])


class ResNet20(nn.Module):
    """ResNet20 for CIFAR without batch norm (T1 B.1.3, Fig. B.4): 3 stages of 3 blocks, 16-32-64 channels.

    Nine full-size branches would raise the activations' mean square about a hundredfold at the start. So each is
    multiplied by 1/√9, in the function itself, so that it also serves parameters that a hypernetwork makes.
    ``branch_scale=1`` leaves it out.
    """

    smallest = 8

    def __init__(self, input_shape: Sequence[int], classes: int, branch_scale: float = 1 / 3) -> None:
        super().__init__()
        channels, _, _ = image_shape(input_shape, "resnet20", self.smallest)
        self.stem = HeConv2d(channels, 16, 3)
        self.blocks = _stages((16, 32, 64), (3, 3, 3), scale=branch_scale)
        self.head = nn.Linear(64, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks(self.stem(x).relu())
        return self.head(x.mean((2, 3)))


class ResNet18(nn.Module):
    """ResNet18 (He et al. 2016) with group norm in the place of batch norm; the larger client model of FLowDUP.

    Images of up to 64 pixels a side get the usual small stem, one 3x3 convolution; larger ones the original 7x7
    convolution and pooling.
    """

    smallest = 8
    name = "resnet18"
    depths = (2, 2, 2, 2)

    def __init__(self, input_shape: Sequence[int], classes: int, width: int = 64, groups: int = 32) -> None:
        super().__init__()
        channels, height, image_width = image_shape(input_shape, self.name, self.smallest)
        if groups < 1 or width % groups:
            raise ValueError(f"groups must divide width, got groups={groups} and width={width}")
        self.large = max(height, image_width) > 64
        self.stem = HeConv2d(channels, width, 7, 2) if self.large else HeConv2d(channels, width, 3)
        self.norm = _norm(groups, width)
        self.blocks = _stages((width, 2 * width, 4 * width, 8 * width), self.depths, groups)
        self.head = nn.Linear(8 * width, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.stem(x)).relu()
        if self.large:
            x = F.max_pool2d(x, 3, stride=2, padding=1)
        return self.head(self.blocks(x).mean((2, 3)))


class ResNet34(ResNet18):
    """ResNet34 (He et al. 2016), likewise: Malekmohammadi's model for CIFAR-100 (thesis, Table B.2)."""

    name = "resnet34"
    depths = (3, 4, 6, 3)
