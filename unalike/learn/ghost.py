"""Clipped sums of per-sample gradients without the per-sample gradients, for networks made of linear layers.

A linear layer's gradient for one sample is the outer product of its input a and its output's gradient g, so its squared
norm is ‖g‖²·(‖a‖² + 1), bias included (Goodfellow 2015, "ghost norm"). One backward pass gives all g at once; the
clipped sum is then a product of two matrices. Nothing of the size samples × parameters is ever made.

``clip_factors`` is the clip of DP-SGD, for these networks and for all others (``learn/dpsgd.py``).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.func import functional_call, grad
from torch.overrides import TorchFunctionMode

from unalike.core.model import Model
from unalike.privacy.checks import check_positive


def clip_factors(norms: Tensor, bound: float) -> Tensor:
    """The factors that bring arrays of these norms within the bound: exactly 1 below it, 0 where one is not finite."""
    check_positive(bound, "the clip bound", "give the largest norm that one point's gradient may have, e.g. 1.0")
    # a hair below the bound, more than the error of a norm in the gradient's own precision; a tensor, because a number
    # divided by a tensor is its reciprocal times the number, which is not exactly 1 where it should be
    limit = torch.as_tensor((1.0 - 2.0**-16) * bound, dtype=norms.dtype)
    return limit / norms.nan_to_num(nan=torch.inf, posinf=torch.inf).clamp(min=limit)


class _Linears(TorchFunctionMode):
    """Watches ``F.linear``: notes inputs and whose weights they meet, and adds a perturbation to each output."""

    def __init__(self, perturb: list[Tensor] | None = None) -> None:
        super().__init__()
        self.calls: list[tuple[Tensor, Tensor, Tensor | None]] = []
        self.outputs: list[Tensor] = []
        self.others: set[str] = set()  # names of all other functions that were called
        self._perturb = perturb

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        if func is not F.linear:
            self.others.add(getattr(func, "__name__", str(func)))
            return out
        given = {**dict(zip(("input", "weight", "bias"), args, strict=False)), **(kwargs or {})}
        self.calls.append((given["input"], given["weight"], given.get("bias")))
        if self._perturb is not None:
            out = out + self._perturb[len(self.calls) - 1]
        self.outputs.append(out)
        return out


# What may stand between the layers. Each of these treats the samples of a batch one by one; of anything else (the
# statistics of a batch, a softmax over it, a sum) nobody knows, and then the norms below would not bound a gradient.
_EACH_BY_ITSELF = {
    *("relu", "relu_", "leaky_relu", "elu", "gelu", "silu", "selu", "tanh", "sigmoid", "softplus", "identity"),
    *("flatten", "view", "reshape", "contiguous", "size", "dim", "__get__", "__len__", "to", "float"),
    *("add", "mul", "sub", "div", "__add__", "__mul__", "__sub__", "__rmul__", "__radd__", "__truediv__"),
}


@lru_cache(maxsize=64)  # it depends on the model's code and the shape of its inputs alone
def _independent(model: Model, shape: tuple[int, ...]) -> bool:
    """Does a sample's output stay as it is when the other samples of the batch change? Tried with made-up numbers."""
    count = math.prod(shape)
    theta = torch.sin(torch.arange(model.size) * 12.9898) / 4.0
    one, other, another = (torch.sin(torch.arange(count) * 78.233 + at).reshape(1, *shape) for at in (1.0, 2.0, 30.0))
    batches = [(one,), (one, other), (one, 3.0 * another), (other, one)]
    with torch.no_grad():
        outputs = [functional_call(model.twin(theta), model.tensors(theta), (torch.cat(x),)) for x in batches]
    of_one = [*(out[0] for out in outputs[:-1]), outputs[-1][1]]
    return all(bool(torch.allclose(of_one[0], out, rtol=1e-4, atol=1e-5)) for out in of_one[1:])


class GhostNorms:
    """The clipped sum for one model of linear layers that are used once each."""

    def __init__(self, model: Model, layers: list[tuple[str, str | None]], widths: list[int]) -> None:
        self.model, self._layers, self._widths = model, layers, widths

    @classmethod
    def of(cls, model: Model, example: Tensor) -> GhostNorms | None:
        """None if the model has any other layers: then every sample's gradient must be made."""
        theta = torch.zeros(model.size, device=example.device)
        named = model.tensors(theta)
        with torch.no_grad(), _Linears() as watched:
            functional_call(model.twin(theta), named, (example,))
        names = {id(value): name for name, value in named.items()}
        layers = [(names.get(id(w)), names.get(id(b)) if b is not None else None) for _, w, b in watched.calls]
        used = [name for pair in layers for name in pair if name is not None]
        flat = all(a.ndim == 2 and len(a) == len(example) for a, _, _ in watched.calls)
        sound = flat and sorted(used) == sorted(named) and all(weight is not None for weight, _ in layers)
        if not sound or not watched.others <= _EACH_BY_ITSELF or not _independent(model, example.shape[1:]):
            return None
        return cls(model, [(str(weight), bias) for weight, bias in layers], [out.shape[-1] for out in watched.outputs])

    def clipped_sum(
        self,
        theta: Tensor,
        x: Tensor,
        y: Tensor,
        loss_of: Callable[[Tensor, Tensor], Tensor],
        taken: Tensor,
        bound: float,
    ) -> tuple[Tensor, Tensor]:
        """Σ of the taken samples' gradients, each clipped to ``bound``, and all samples' losses."""

        def total(perturb: list[Tensor]) -> tuple[Tensor, tuple[list[Tensor], Tensor]]:
            with _Linears(perturb) as watched:
                out = self.model(theta, x)
            losses = loss_of(out, y)
            return losses.sum(), ([a for a, _, _ in watched.calls], losses)

        zeros = [torch.zeros(x.shape[0], width) for width in self._widths]
        gradients, (inputs, losses) = grad(total, has_aux=True)(zeros)
        square = torch.zeros(x.shape[0])
        for g, a, (_, bias) in zip(gradients, inputs, self._layers, strict=True):
            square = square + g.square().sum(1) * (a.square().sum(1) + (0.0 if bias is None else 1.0))
        factor = (taken * clip_factors(square.sqrt(), bound))[:, None]
        parts: dict[str, Tensor] = {}
        for g, a, (weight, bias) in zip(gradients, inputs, self._layers, strict=True):
            scaled = factor * g.nan_to_num(0.0, 0.0, 0.0)
            parts[weight] = scaled.T @ a.nan_to_num(0.0, 0.0, 0.0)
            if bias is not None:
                parts[bias] = scaled.sum(0)
        return self.model.flatten(parts), losses
