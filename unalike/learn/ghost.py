"""Clipped sums of per-sample gradients without all of these, for networks of linear layers and convolutions.

One backward pass gives the gradients g of all layers' outputs, for all samples at once; with the layers' inputs a, that
is all that is needed.

- A linear layer's gradient for one sample is the outer product of a and g, so its squared norm is ‖g‖²·(‖a‖² + 1), bias
  included (Goodfellow 2015, "ghost norm"), and the clipped sum is a product of two matrices.
- A frozen layer is a function like any other. So LoRA's A and B are two layers, with places where they read tokens.
- Where weights meet several places of a sample (a convolution), its gradient is the product of g with the patches of a
  and is made, for this layer alone: kernels are small, and what is added up is then what was measured. A norm from
  Gram matrices would not need it, but cancellation could make that norm too small.

So a step costs what it does without privacy. ``clip_factors`` is the clip of DP-SGD, for these networks and for all
others (``learn/dpsgd.py``).
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

from unalike.core import dropout
from unalike.core.draws import Draws
from unalike.core.model import Model
from unalike.core.torch_internals import cleared_transforms, computed_singly, flatten_tensors, unflatten_tensor
from unalike.learn import objective
from unalike.learn.layers import Between, Layer, Pull
from unalike.learn.structure import NotByLayers, Structure, is_frozen
from unalike.privacy.checks import check_positive

Loss = Callable[[Tensor, Tensor], Tensor]  # outputs and labels to per-sample losses [B]


def clip_factors(norms: Tensor, bound: float) -> Tensor:
    """The factors that bring arrays of these norms within the bound: exactly 1 below it, 0 where one is not finite."""
    check_positive(bound, "the clip bound", "give the largest norm that one point's gradient may have, e.g. 1.0")
    # a hair below the bound, more than the error of a norm in the gradient's own precision; a tensor, because a number
    # divided by a tensor is its reciprocal times the number, which is not exactly 1 where it should be
    limit = norms.new_full((), (1.0 - 2.0**-16) * bound)
    return limit / norms.nan_to_num(nan=torch.inf, posinf=torch.inf).clamp(min=limit)


class _Layers(TorchFunctionMode):
    """Notes what the weights of layers meet, and the layers' outputs.

    Gradients of the outputs are taken from those themselves, or (``perturb``) from what is added to them.
    """

    sees_layers = True  # networks then call every layer by its function

    def __init__(self, layers: list[Layer], perturb: list[Tensor] | None = None) -> None:
        super().__init__()
        self._layers, self._perturb = layers, perturb
        self.met: list[Tensor] = []
        self.outputs: list[Tensor] = []

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        given = {**dict(zip(("input", "weight", "bias"), args, strict=False)), **(kwargs or {})}
        if (func is not F.linear and func is not F.conv2d) or is_frozen(given["weight"]):
            return func(*args, **(kwargs or {}))
        number = len(self.met)
        with torch.no_grad():
            self.met.append(self._layers[number].patches(given["input"]))
        if number == 0 and func is F.conv2d:  # nobody asks for the gradient of its input, and its patches are there
            out = self._layers[0].convolve(self.met[0], **given)
        else:
            out = func(*args, **(kwargs or {}))
        if self._perturb is not None:
            out = out + self._perturb[number]
        elif not out.requires_grad:
            out.requires_grad_()  # nothing before it needs a gradient
        self.outputs.append(out)
        return out


def _made_up(count: int, begin: float, shape: tuple[int, ...], device: torch.device) -> Tensor:
    """Numbers between −1 and 1 that are all different and come from no data."""
    at = torch.arange(count * math.prod(shape), device=device)
    return torch.sin(at * 78.233 + begin).reshape(count, *shape)


class GhostNorms:
    """The clipped sum for one model of layers that are used once each."""

    def __init__(self, model: Model, seen: Structure) -> None:
        self.model, self._layers = model, seen.layers
        self._shapes = [out.shape[1:] for out in seen.outputs]
        self._in_place = any(out._version for out in seen.outputs)  # then an output is no longer what it was
        self._chain = seen.chain
        self.by_hand = seen.chain is not None and seen.by_hand  # gradients go back without autograd
        self.numbers = seen.numbers  # that are held for a sample
        self._like = [torch.empty(shape, device="meta") for shape in model.shapes.values()]

    @classmethod
    def of(cls, model: Model, example: Tensor) -> GhostNorms | None:
        """None if the model has any other layers: then every sample's gradient must be made."""
        return _found(model, tuple(example.shape[1:]), example.device) if example.is_floating_point() else None

    def clipped_sum(
        self,
        theta: Tensor,
        x: Tensor,
        y: Tensor,
        loss_of: Loss,
        taken: Tensor | None,
        bound: float,
        *,
        precision: torch.dtype = torch.float32,
    ) -> tuple[Tensor, Tensor]:
        """Σ of the taken samples' gradients (None: of all), each clipped to ``bound``, and all samples' losses.

        Norms and sum are made in at least this precision.
        """
        gradients, inputs, losses = self._backward(theta, x, y, loss_of)
        made_in = torch.promote_types(theta.dtype, precision)
        squares: list[Tensor] = []
        made: list[tuple[Tensor, Tensor]] = []
        for g, met, layer in zip(gradients, inputs, self._layers, strict=True):
            g, met = _in(made_in, layer.flatten_gradient(g)), _in(made_in, met)
            if met.ndim == 3:
                met, g = torch.bmm(g, met.transpose(1, 2)).flatten(1), g.sum(2)  # gradients of weights, and of biases
                squares += [_square(met)] if layer.bias is None else [_square(met), _square(g)]
            else:
                of_g, of_met = _square(g), _square(met)
                squares.append(of_g * of_met if layer.bias is None else torch.addcmul(of_g, of_g, of_met))
            made.append((g, met))
        square = sum(squares[1:], squares[0])
        if not (computed_singly() and math.isfinite(float(square.sum()))):  # else all is finite
            made = [(g.nan_to_num(0.0, 0.0, 0.0), met.nan_to_num(0.0, 0.0, 0.0)) for g, met in made]
        factor = clip_factors(square.sqrt(), bound)
        if taken is not None:
            factor = factor * taken.to(made_in)
        parts: dict[str, Tensor] = {}
        for (g, met), layer, places in zip(made, self._layers, (met.ndim == 3 for met in inputs), strict=True):
            parts[layer.weight] = factor @ met if places else (factor.unsqueeze(1) * g).T @ met
            if layer.bias is not None:
                parts[layer.bias] = factor @ g
        return self._flat(parts), losses

    # as ``model.flatten`` and ``model.tensors``, in one call each, which ``vmap`` does not know

    def _flat(self, parts: dict[str, Tensor]) -> Tensor:
        if not computed_singly():
            return self.model.flatten(parts)
        return flatten_tensors([parts[name] for name in self.model.shapes])

    def _named(self, theta: Tensor) -> dict[str, Tensor]:
        if not computed_singly():
            return self.model.tensors(theta)
        return dict(zip(self.model.shapes, unflatten_tensor(theta, self._like), strict=True))

    def _backward(
        self, theta: Tensor, x: Tensor, y: Tensor, loss_of: Loss
    ) -> tuple[list[Tensor], list[Tensor], Tensor]:
        """The gradients of the layers' outputs, what their weights have met, and the losses."""
        if self._chain is not None:
            return self._along(self._chain, theta, x, y, loss_of)
        if computed_singly() and not self._in_place:  # a third of the time of what ``vmap`` needs
            with torch.enable_grad():
                with _Layers(self._layers) as seen:
                    out = self.model(theta.detach(), x)
                losses = loss_of(out, y)
                gradients = torch.autograd.grad(losses.sum(), seen.outputs, materialize_grads=True)
            return list(gradients), [met.detach() for met in seen.met], losses.detach()

        def total(perturb: list[Tensor]) -> tuple[Tensor, tuple[list[Tensor], Tensor]]:
            with _Layers(self._layers, perturb) as seen:
                out = self.model(theta, x)
            losses = loss_of(out, y)
            return losses.sum(), (seen.met, losses)

        zeros = [torch.zeros(len(x), *shape) for shape in self._shapes]
        found, (met, losses) = grad(total, has_aux=True)(zeros)
        return found, met, losses

    def _along(
        self, chain: list[Layer | Between], theta: Tensor, x: Tensor, y: Tensor, loss_of: Loss
    ) -> tuple[list[Tensor], list[Tensor], Tensor]:
        """Forward and back without autograd, which would cost a small network as much as its arithmetic."""
        named = self._named(theta)
        met: list[Tensor] = []
        pulls: list[tuple[Pull, bool]] = []  # from the first layer's own on; does it belong to a layer?
        out = x
        for step in chain:
            if isinstance(step, Layer):
                out, one, pull = step.apply(out, named[step.weight], named[step.bias] if step.bias else None)
                met.append(one)
            else:
                out, pull = step.apply(out)
            if met:
                pulls.append((pull, isinstance(step, Layer)))
        losses, g = _slopes(loss_of, out, y)
        gradients: list[Tensor] = []
        for pull, of_layer in reversed(pulls):
            if of_layer:
                gradients.append(g)
                if len(gradients) == len(met):
                    break
            g = pull(g)
        return gradients[::-1], met, losses


def _slopes(loss_of: Loss, out: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Each sample's loss, and its gradient with respect to the outputs."""
    if loss_of is objective.loss_of:
        return objective.loss_and_slope(out, y)

    def total(out: Tensor) -> tuple[Tensor, Tensor]:
        losses = loss_of(out, y)
        return losses.sum(), losses

    g, losses = grad(total, has_aux=True)(out)
    return losses, g


def _in(dtype: torch.dtype, values: Tensor) -> Tensor:
    return values if values.dtype == dtype else values.to(dtype)


def _square(rows: Tensor) -> Tensor:
    """[B] the rows' squared norms; in one pass, without a square of each number."""
    norms: Tensor = torch.linalg.vector_norm(rows, dim=1)
    return norms.square()


_BATCHES = (3, 4, 8, 32, 128)  # sizes in which a network that mixes rows would show it


@lru_cache(maxsize=64)  # it depends on the model's code and the shape of its inputs alone
def _found(model: Model, shape: tuple[int, ...], device: torch.device) -> GhostNorms | None:
    """By three checks, on made-up numbers and in training mode: what the network calls, and what it computes."""
    theta, x = _made_up(1, 0.0, (model.size,), device)[0] / 4.0, _made_up(3, 1.0, shape, device)
    named = model.tensors(theta)
    nobody = dropout.Masks(Draws(torch.tensor(0)))
    with cleared_transforms(), torch.no_grad(), dropout.dropout_from(nobody):
        learning = x.clone().requires_grad_()
        try:
            # a network may take another way where no gradient is wanted
            with torch.enable_grad(), Structure(named, learning) as seen:
                functional_call(model.twin(theta, training=True), named, (learning,))
        except NotByLayers:
            return None
        used = [name for layer in seen.layers for name in (layer.weight, layer.bias) if name is not None]
        if sorted(used) != sorted(named) or not _independent(model, theta, x):
            return None
        found = GhostNorms(model, seen)
        return found if _agrees(found, theta, x) else None


def _independent(model: Model, theta: Tensor, x: Tensor) -> bool:
    """Does a sample's output stay as it is when the other samples of the batch change, however many there are?"""
    one, other, another = x[:1], x[1:2], x[2:]
    batches = [(one,), (one, other), (one, 3.0 * another), *((one, *[other, another] * (n // 2)) for n in _BATCHES)]
    of_one = [*(model(theta, torch.cat(rows))[0] for rows in batches), model(theta, torch.cat([other, one]))[1]]
    return all(bool(torch.allclose(of_one[0], out, rtol=1e-4, atol=1e-5)) for out in of_one[1:])


def _agrees(ghost: GhostNorms, theta: Tensor, x: Tensor) -> bool:
    """Is the clipped sum that of the samples' gradients, made one by one?"""
    bound = 1e-3

    def weighed(out: Tensor, _: Tensor) -> Tensor:
        return (out.flatten(1) * _made_up(1, 5.0, (out[0].numel(),), out.device)).sum(1)

    each = [grad(lambda t, row=row: weighed(ghost.model(t, row[None]), row).sum())(theta) for row in x]
    expected = torch.stack([one * (bound / one.norm().clamp(min=bound)) for one in each]).sum(0)
    made, _ = ghost.clipped_sum(theta, x, x, weighed, None, bound)
    return bool(torch.allclose(made, expected, rtol=1e-2, atol=1e-3 * bound))
