"""Convolutions and pooling laid out so that they are fast, for one client and for blocks of clients.

All give the numbers of ``F.conv2d`` and ``F.max_pool2d``; only the order in which they lie in memory differs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from unalike.core.torch_internals import active_function_modes, active_transforms


def _nests_gradients() -> bool:
    """Whether this computes a gradient, for a block of clients, that will be differentiated itself, as in FedTTA."""
    transforms = active_transforms()
    return transforms is None or (transforms.count("grad") > 1 and "vmap" in transforms)


def needs_gradient(x: Tensor) -> bool:
    """Whether a gradient of what is computed from x is wanted."""
    transforms = active_transforms()
    return x.requires_grad or transforms is None or "grad" in transforms


def runs_in_blocks() -> bool:
    """Whether this runs for a block of clients, and at most one gradient of it is wanted.

    Not so where a mode has to see every layer, as that of ``learn.ghost`` has.
    """
    modes, transforms = active_function_modes(), active_transforms()
    if modes is None or transforms is None or any(getattr(mode, "sees_layers", False) for mode in modes):
        return False
    others = [transform for transform in transforms if transform != "vmap"]
    return len(others) < len(transforms) and others in ([], ["grad"])


def channels_last(x: Tensor) -> Tensor:
    """The same tensor, laid out with channels last."""
    if _nests_gradients():  # for pooling in this layout, second derivatives have no batching rule
        return x
    if x.shape[1] == 1:  # no copy, but strides that say so: PyTorch takes the layout of its results from them
        return x[:, 0, :, :, None].permute(0, 3, 1, 2)
    return x.permute(0, 2, 3, 1).contiguous().permute(0, 3, 1, 2)


def convolve(x: Tensor, layer: nn.Conv2d) -> Tensor:
    """An unpadded convolution whose result has channels last: a third less time where clients are computed singly."""
    return F.conv2d(x, channels_last(layer.weight), layer.bias)


_ROOM = 1 << 26  # bytes that patches may take


def _patches(x: Tensor, kernel: Sequence[int]) -> Tensor | None:
    """[K, h, w, B, H, W] what each weight of a kernel [h, w] meets in images [K, B, 1, ., .]; None: too many."""
    if x.shape[2] > 1:
        return None  # several channels
    found = x[:, :, 0].unfold(2, kernel[0], 1).unfold(3, kernel[1], 1).permute(0, 4, 5, 1, 2, 3)
    return found if found.numel() * x.element_size() <= _ROOM else None


def _gradient(g: Tensor, x: Tensor, weight: Tensor, of: Literal[0, 1]) -> Tensor:
    """Of an unpadded convolution in its images (0) or in its weight (1), as PyTorch has it."""
    wanted = [of == 0, of == 1, False]
    made = torch.ops.aten.convolution_backward(g, x, weight, None, [1, 1], [0, 0], [1, 1], False, [0, 0], 1, wanted)
    return made[of]


class _OfEachClient(torch.autograd.Function):
    """An unpadded convolution without bias, for blocks of clients that have weights of their own.

    Images of one channel become patches, and the convolution one product of matrices for each client; all others have
    the clients' channels side by side, and last. PyTorch's own rule leaves them as they lie, which takes twice as long.
    """

    @staticmethod
    def forward(x: Tensor, weight: Tensor) -> Tensor:
        return F.conv2d(x, channels_last(weight))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, Tensor]:
        x, weight = ctx.saved_tensors
        of_x = _gradient(g, x, weight, 0) if ctx.needs_input_grad[0] else None
        return of_x, _weight_gradient(g, x, weight)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, int | None], x: Tensor, weight: Tensor) -> tuple[Tensor, int]:
        of_x, of_weight = in_dims
        if of_x is None or of_weight is None:
            return torch.vmap(_OfEachClient.forward, in_dims)(x, weight), 0
        x, weight = x.movedim(of_x, 0), weight.movedim(of_weight, 0)
        clients, filters, _, *kernel = weight.shape
        patches = _patches(x, kernel)
        if patches is not None:
            out = weight.flatten(2) @ patches.flatten(3).flatten(1, 2)
            return out.view(clients, filters, *patches.shape[3:]).transpose(1, 2), 0
        images = x.permute(1, 3, 4, 0, 2).flatten(3).permute(0, 3, 1, 2)
        weights = weight.permute(0, 1, 3, 4, 2).flatten(0, 1).permute(0, 3, 1, 2)
        out = F.conv2d(images, weights, groups=clients)
        return out.view(len(out), clients, filters, *out.shape[2:]), 1


class _WeightGradient(torch.autograd.Function):
    """The gradient of such a convolution in its weight, from that in its result; by the same patches."""

    @staticmethod
    def forward(g: Tensor, x: Tensor, weight: Tensor) -> Tensor:
        return _gradient(g, x, weight, 1)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor], output: Tensor) -> None:
        pass

    @staticmethod
    def vmap(
        info: Any, in_dims: tuple[int | None, int | None, int | None], g: Tensor, x: Tensor, weight: Tensor
    ) -> tuple[Tensor, int]:
        of_g, of_x, of_weight = in_dims
        shape = weight.shape if of_weight is None else weight.select(of_weight, 0).shape
        patches = None if of_g is None or of_x is None else _patches(x.movedim(of_x, 0), shape[2:])
        if of_g is None or patches is None:
            return torch.vmap(_WeightGradient.forward, in_dims)(g, x, weight), 0
        by_filter = g.movedim(of_g, 0).transpose(1, 2).flatten(2)
        return (by_filter @ patches.flatten(3).flatten(1, 2).mT).view(-1, *shape), 0


convolve_each_client: Callable[[Tensor, Tensor], Tensor] = _OfEachClient.apply
_weight_gradient: Callable[[Tensor, Tensor, Tensor], Tensor] = _WeightGradient.apply


def max_pool(x: Tensor) -> Tensor:
    """2x2 max pooling. PyTorch does it several times as fast where channels come last, which repays a copy."""
    return F.max_pool2d(channels_last(x), 2)


def max_pool_by_slices(x: Tensor) -> Tensor:
    """The same numbers, in less time where no gradient of them is wanted; rows or columns left over are dropped."""
    height, width = x.shape[2] // 2 * 2, x.shape[3] // 2 * 2
    rows = torch.maximum(x[:, :, 0:height:2], x[:, :, 1:height:2])
    return torch.maximum(rows[..., 0:width:2], rows[..., 1:width:2])
