"""Clipped sums of per-sample gradients without the per-sample gradients, for networks made of linear layers.

A linear layer's gradient for one sample is the outer product of its input a and its output's gradient g, so its squared
norm is ‖g‖²·(‖a‖² + 1), bias included (Goodfellow 2015, "ghost norm"). One backward pass gives all g at once; the
clipped sum is then a product of two matrices. Nothing of the size samples × parameters is ever made.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.func import functional_call, grad
from torch.overrides import TorchFunctionMode

from unalike.core.model import Model


class _Linears(TorchFunctionMode):
    """Watches ``F.linear``: notes inputs and whose weights they meet, and adds a perturbation to each output."""

    def __init__(self, perturb: list[Tensor] | None = None) -> None:
        super().__init__()
        self.calls: list[tuple[Tensor, Tensor, Tensor | None]] = []
        self.outputs: list[Tensor] = []
        self._perturb = perturb

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        if func is not F.linear:
            return out
        given = {**dict(zip(("input", "weight", "bias"), args, strict=False)), **(kwargs or {})}
        self.calls.append((given["input"], given["weight"], given.get("bias")))
        if self._perturb is not None:
            out = out + self._perturb[len(self.calls) - 1]
        self.outputs.append(out)
        return out


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
        if not sound:
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
        named = self.model.tensors(theta)

        def total(perturb: list[Tensor]) -> tuple[Tensor, tuple[list[Tensor], Tensor]]:
            with _Linears(perturb) as watched:
                out = functional_call(self.model.twin(theta), named, (x,))
            losses = loss_of(out, y)
            return losses.sum(), ([a for a, _, _ in watched.calls], losses)

        zeros = [torch.zeros(x.shape[0], width) for width in self._widths]
        gradients, (inputs, losses) = grad(total, has_aux=True)(zeros)
        square = torch.zeros(x.shape[0])
        for g, a, (_, bias) in zip(gradients, inputs, self._layers, strict=True):
            square = square + g.square().sum(1) * (a.square().sum(1) + (0.0 if bias is None else 1.0))
        limit = (1.0 - 2.0**-16) * bound
        factor = (taken * (limit / square.sqrt().nan_to_num(nan=torch.inf, posinf=torch.inf).clamp(min=limit)))[:, None]
        parts: dict[str, Tensor] = {}
        for g, a, (weight, bias) in zip(gradients, inputs, self._layers, strict=True):
            scaled = factor * g.nan_to_num(0.0, 0.0, 0.0)
            parts[weight] = scaled.T @ a.nan_to_num(0.0, 0.0, 0.0)
            if bias is not None:
                parts[bias] = scaled.sum(0)
        return self.model.flatten(parts), losses
