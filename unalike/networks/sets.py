"""Set encoders g: a client's samples, in any order, to one descriptor (P2 §4 and App. C). No labels enter.

Every encoder is a module of ``(x [B, ...], own [B])``; rows with ``own`` False are padding and change nothing. All are
written in operations that ``torch.func.vmap`` can run for a block of clients at once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from unalike.core.model import Model
from unalike.networks.classifiers import MLP, LeNet, lenet_reads, side_after_two

Encoder = Literal["deepset", "deepset-once", "deepset-every", "dss", "set-transformer", "sphere"]


def mean_over(points: Tensor, own: Tensor) -> Tensor:
    """The mean of the own rows; zeros if there are none."""
    shape = (-1,) + (1,) * (points.ndim - 1)
    return torch.where(own.reshape(shape), points, 0).sum(0) / own.sum().clamp(min=1)


def max_over(points: Tensor, own: Tensor) -> Tensor:
    """The largest value of the own rows in each coordinate; zeros if there are none."""
    largest = torch.where(own[:, None], points, -torch.inf).amax(0)
    return torch.where(own.any(), largest, 0)


def _mean_and_max(points: Tensor, own: Tensor) -> Tensor:
    """Mean of the first half of the coordinates, maximum of the second (P2 App. C)."""
    half = points.shape[1] // 2
    return torch.cat([mean_over(points[:, :half], own), max_over(points[:, half:], own)])


def _features(input_shape: Sequence[int], width: int) -> nn.Module:
    """One sample to ``width`` numbers: LeNet with one more layer's width for images, one hidden layer otherwise."""
    return LeNet(input_shape, width) if lenet_reads(input_shape) else MLP(input_shape, width, hidden=(250,))


class DeepSet(nn.Module):
    """ψ(pool φ(x)) with mean and max pooling (Zaheer et al. 2017; P2 App. C): 200 pooled units, then ψ.

    For feature vectors P2 has three layers of 500 and pools after the first; here φ and ψ have one hidden layer of 250.
    """

    def __init__(self, input_shape: Sequence[int], descriptor: int, width: int = 200) -> None:
        super().__init__()
        self.phi = _features(input_shape, width)
        self.psi = MLP((width,), descriptor, hidden=() if lenet_reads(input_shape) else (250,))

    def forward(self, x: Tensor, own: Tensor) -> Tensor:
        return self.psi(_mean_and_max(self.phi(x).relu(), own)[None])[0]


class DeepSetOnce(nn.Module):
    """The deep set as P2 App. C prints it, which pools once: images as ``DeepSet``, feature vectors as follows.

    Three layers of 500, of which the first is followed by the mean of 250 units and the maximum of the other 250.
    """

    def __init__(self, input_shape: Sequence[int], descriptor: int) -> None:
        super().__init__()
        images = lenet_reads(input_shape)
        self.phi = _features(input_shape, 200) if images else nn.Linear(math.prod(input_shape), 500)
        self.psi = MLP((200 if images else 500,), descriptor, hidden=() if images else (500, 500))

    def forward(self, x: Tensor, own: Tensor) -> Tensor:
        points = self.phi(x if isinstance(self.phi, LeNet) else x.flatten(1)).relu()
        return self.psi(_mean_and_max(points, own)[None])[0]


class DeepSetEvery(nn.Module):
    """A deep set that pools after every convolution (P2 §6.3: "These layers are added after each convolution layer").

    The layers are a linear one of ``width`` units and pooling, mean and maximum, over the samples. What they give for
    both convolutions goes side by side into LeNet's fully connected layers. Only images have convolutions.
    """

    def __init__(self, input_shape: Sequence[int], descriptor: int, width: int = 200) -> None:
        super().__init__()
        if not lenet_reads(input_shape):
            raise ValueError(
                f"encoder 'deepset-every' pools after convolutions, which need images of at least "
                f"{LeNet.smallest}x{LeNet.smallest}; for a sample of shape {tuple(input_shape)} take 'deepset-once'"
            )
        channels, height, side = input_shape
        self.conv1, self.conv2 = nn.Conv2d(channels, 16, 5), nn.Conv2d(16, 32, 5)
        self.flat1 = nn.Linear(16 * ((height - 4) // 2) * ((side - 4) // 2), width)
        self.flat2 = nn.Linear(32 * side_after_two(height) * side_after_two(side), width)
        self.psi = MLP((2 * width,), descriptor, hidden=(120, 84))

    def forward(self, x: Tensor, own: Tensor) -> Tensor:
        first = F.max_pool2d(self.conv1(x), 2).relu()
        second = F.max_pool2d(self.conv2(first), 2).relu()
        pooled = [
            _mean_and_max(layer(maps.flatten(1)).relu(), own)
            for layer, maps in ((self.flat1, first), (self.flat2, second))
        ]
        return self.psi(torch.cat(pooled)[None])[0]


class DSS(nn.Module):
    """Deep sets of symmetric elements (Maron et al. 2020): every layer adds to f(x_i) a second map of the set's mean.

    So samples know of each other from the first layer on, and an image keeps its own symmetry (both are convolutions).
    """

    def __init__(self, input_shape: Sequence[int], descriptor: int, width: int = 200) -> None:
        super().__init__()
        self.images = lenet_reads(input_shape)
        if self.images:
            channels, height, side = input_shape
            self.own1, self.set1 = nn.Conv2d(channels, 16, 5), nn.Conv2d(channels, 16, 5, bias=False)
            self.own2, self.set2 = nn.Conv2d(16, 32, 5), nn.Conv2d(16, 32, 5, bias=False)
            inputs = 32 * side_after_two(height) * side_after_two(side)
        else:
            inputs = math.prod(input_shape)
        self.own3, self.set3 = nn.Linear(inputs, 120), nn.Linear(inputs, 120, bias=False)
        self.own4, self.set4 = nn.Linear(120, width), nn.Linear(120, width, bias=False)
        self.psi = nn.Linear(width, descriptor)

    def forward(self, x: Tensor, own: Tensor) -> Tensor:
        def layer(first: nn.Module, second: nn.Module, x: Tensor) -> Tensor:
            return first(x) + second(mean_over(x, own)[None])

        if self.images:
            x = F.max_pool2d(layer(self.own1, self.set1, x), 2).relu()
            x = F.max_pool2d(layer(self.own2, self.set2, x), 2).relu()
        x = layer(self.own3, self.set3, x.flatten(1)).relu()
        x = layer(self.own4, self.set4, x).relu()
        return self.psi(_mean_and_max(x, own))


class Attention(nn.Module):
    """The block MAB of the set transformer (Lee et al. 2019): queries look at keys with several heads."""

    def __init__(self, width: int, heads: int = 4) -> None:
        super().__init__()
        if width % heads:
            raise ValueError(f"width={width} must be a multiple of heads={heads}")
        self.heads = heads
        self.query, self.key, self.value = (nn.Linear(width, width) for _ in range(3))
        self.mix = nn.Linear(width, width)
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)

    def forward(self, queries: Tensor, keys: Tensor, own: Tensor) -> Tensor:
        def split(x: Tensor) -> Tensor:
            return x.reshape(x.shape[0], self.heads, -1).transpose(0, 1)  # [heads, rows, width / heads]

        q, k, v = split(self.query(queries)), split(self.key(keys)), split(self.value(keys))
        scores = torch.where(own, q @ k.transpose(1, 2) / math.sqrt(q.shape[-1]), -1e9)
        seen = (scores.softmax(-1) @ v).transpose(0, 1).reshape(queries.shape)
        x = self.norm1(queries + seen)
        return self.norm2(x + self.mix(x).relu())


class SetTransformer(nn.Module):
    """Self-attention among the samples, then pooling by attention from a learned query (Lee et al. 2019: SAB, PMA)."""

    def __init__(self, input_shape: Sequence[int], descriptor: int, width: int = 64) -> None:
        super().__init__()
        self.phi = _features(input_shape, width)
        self.among = Attention(width)
        self.pool = Attention(width)
        self.question = nn.Linear(1, width, bias=False)  # the learned query, as a layer so that it has a reset
        self.psi = nn.Linear(width, descriptor)

    def forward(self, x: Tensor, own: Tensor) -> Tensor:
        points = self.phi(x).relu()
        points = self.among(points, points, own)
        pooled = self.pool(self.question.weight.T, points, own)[0]
        return self.psi(pooled)


class Sphere(nn.Module):
    """mean of φ(x)/‖φ(x)‖: replacing one of n samples moves the descriptor by at most 2/n (P2 Lemma 2, §7).

    ψ is the identity, as in the paper's experiments, so B_φ = L_ψ = 1.
    """

    def __init__(self, input_shape: Sequence[int], descriptor: int) -> None:
        super().__init__()
        self.phi = _features(input_shape, descriptor)

    def forward(self, x: Tensor, own: Tensor) -> Tensor:
        points = self.phi(x)
        length = torch.linalg.vector_norm(points, dim=1, keepdim=True)
        return mean_over(points / length.clamp(min=1e-12), own)


_MAKERS: dict[Encoder, Callable[[Sequence[int], int], nn.Module]] = {
    "deepset": DeepSet,
    "deepset-once": DeepSetOnce,
    "deepset-every": DeepSetEvery,
    "dss": DSS,
    "set-transformer": SetTransformer,
    "sphere": Sphere,
}
ENCODERS = tuple(_MAKERS)


def set_encoder(encoder: Encoder, input_shape: Sequence[int], descriptor: int) -> Model:
    """The named encoder for samples of this shape."""
    if descriptor < 1:
        raise ValueError(f"descriptor={descriptor}; expected a length of at least 1")
    if encoder not in _MAKERS:
        raise ValueError(f"encoder {encoder!r}; expected one of {', '.join(ENCODERS)}")
    return Model(_MAKERS[encoder](input_shape, descriptor))
