"""Layers with weights and the functions between them, as values that go forward and back without autograd."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.func import vjp

from unalike.core.torch_internals import computed_singly

Pull = Callable[[Tensor], Tensor]  # the gradient of an output to that of the input


@dataclass(frozen=True)
class Layer:
    """A linear layer, or a convolution with this stride and padding."""

    weight: str
    bias: str | None
    kernel: tuple[int, int] | None = None  # None: a linear layer
    stride: tuple[int, int] = (1, 1)
    padding: tuple[int, int] = (0, 0)

    def patches(self, a: Tensor) -> Tensor:
        """[B, K, L] what the weights of one output meet, at each of L places; [B, K] where there is one place only."""
        if self.kernel is None:
            return a if a.ndim == 2 else a.flatten(1, -2).transpose(1, 2)
        down, right = self.padding
        if down or right:
            a = F.pad(a, (right, right, down, down))
        # both far faster than F.unfold, which goes through the samples one by one
        if self.stride == (1, 1):  # shifted columns first: the rows of a patch then lie in one piece
            height, width = (side - kernel + 1 for side, kernel in zip(a.shape[2:], self.kernel, strict=True))
            columns = a.unfold(3, width, 1).transpose(2, 3).contiguous()
            patches = columns.unfold(3, height, 1).permute(0, 1, 3, 2, 5, 4)
        else:
            patches = a.unfold(2, self.kernel[0], self.stride[0]).unfold(3, self.kernel[1], self.stride[1])
            patches = patches.permute(0, 1, 4, 5, 2, 3)
        return patches.flatten(4, 5).flatten(1, 3)

    def convolve(self, patches: Tensor, input: Tensor, weight: Tensor, bias: Tensor | None, **_: Any) -> Tensor:
        """The convolution as a product of matrices."""
        kernels = weight.flatten(1).expand(len(input), -1, -1)
        out = torch.bmm(kernels, patches) if bias is None else torch.baddbmm(bias[None, :, None], kernels, patches)
        height = (input.shape[2] + 2 * self.padding[0] - weight.shape[2]) // self.stride[0] + 1
        return out.reshape(*out.shape[:2], height, -1)

    def apply(self, a: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor, Pull]:
        """What the layer makes of its inputs, what its weights have met, and how gradients go back."""
        met = self.patches(a)
        if self.kernel is None:
            return F.linear(a, weight, bias), met, lambda g: g @ weight
        settings = (self.stride, self.padding, (1, 1), False, (0, 0), 1, (True, False, False))

        def pull(g: Tensor) -> Tensor:
            made: Tensor = torch.ops.aten.convolution_backward(g, a, weight, None, *settings)[0]
            return made

        return self.convolve(met, a, weight, bias), met, pull

    def flatten_gradient(self, g: Tensor) -> Tensor:
        """[B, O, L] the gradients of the outputs, or [B, O]."""
        if self.kernel is not None:
            return g.flatten(2)
        return g if g.ndim == 2 else g.flatten(1, -2).transpose(1, 2)


@dataclass(frozen=True)
class Between:
    """A function of one tensor that stands between two layers; the usual ones are differentiated by hand."""

    name: str
    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]

    def apply(self, a: Tensor) -> tuple[Tensor, Pull]:
        if self.name == "relu":
            out = F.relu(a)
            return out, lambda g: torch.ops.aten.threshold_backward(g, out, 0)
        if self.name == "flatten":
            return a.flatten(1), lambda g: g.reshape(a.shape)
        if self.by_hand(a):
            return max_pool_halves(a)
        whole = partial(self.function, **self.kwargs)
        if not computed_singly():
            out, pull = vjp(lambda one: whole(one, *self.args), a)[:2]
            return out, lambda g: pull(g)[0]
        with torch.enable_grad():
            a = a.detach().requires_grad_()
            result: Tensor = whole(a, *self.args)
        return result.detach(), lambda g: torch.autograd.grad(result, a, g)[0]

    def by_hand(self, a: Tensor) -> bool:
        """Is it differentiated without autograd, where its input has the shape of this one?"""
        return self.name in ("relu", "flatten") or (self.name == "max_pool2d" and self._halves(a))

    def _halves(self, a: Tensor) -> bool:
        """Is it a maximum over squares of 2 by 2 places?"""
        names = ("kernel_size", "stride", "padding", "dilation", "ceil_mode", "return_indices")
        given = {**dict(zip(names, self.args, strict=False)), **self.kwargs}
        kernel, stride = pair_of(given["kernel_size"]), pair_of(given.get("stride") or given["kernel_size"])
        plain = pair_of(given.get("padding", 0)) == (0, 0) and pair_of(given.get("dilation", 1)) == (1, 1)
        return kernel == stride == (2, 2) and plain and a.shape[-1] % 2 == a.shape[-2] % 2 == 0


def max_pool_halves(a: Tensor) -> tuple[Tensor, Pull]:
    """The maximum of each 2 by 2 places: in a tenth of the time that PyTorch takes where channels come first.

    Where several are largest, one of them has the gradient.
    """
    top, bottom = a[..., 0::2, :], a[..., 1::2, :]
    rows = torch.maximum(top, bottom)
    left, right = rows[..., 0::2], rows[..., 1::2]

    def pull(g: Tensor) -> Tensor:
        to_right = torch.ops.aten.threshold_backward(g, right - left, 0)  # where the right one is larger
        of_rows = torch.view_as_real(torch.complex(g - to_right, to_right)).flatten(-2)
        to_bottom = torch.ops.aten.threshold_backward(of_rows, bottom - top, 0)
        return torch.stack([of_rows - to_bottom, to_bottom], -2).flatten(-3, -2)

    return torch.maximum(left, right), pull


def pair_of(given: Any) -> tuple[int, int] | None:
    if isinstance(given, int):
        return given, given
    return (int(given[0]), int(given[1])) if isinstance(given, tuple | list) and len(given) == 2 else None
