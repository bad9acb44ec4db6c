"""Clipped sums of per-sample gradients without all of these, for networks of linear layers and convolutions.

One backward pass gives the gradients g of all layers' outputs, for all samples at once; with the layers' inputs a, that
is all that is needed.

- A linear layer's gradient for one sample is the outer product of a and g, so its squared norm is ‖g‖²·(‖a‖² + 1), bias
  included (Goodfellow 2015, "ghost norm"), and the clipped sum is a product of two matrices.
- Where weights meet several places of a sample (a convolution), its gradient is the product of g with the patches of a
  and is made, for this layer alone: kernels are small, and what is added up is then what was measured. A norm from
  Gram matrices would not need it, but cancellation could make that norm too small.

So a step costs what it does without privacy. ``clip_factors`` is the clip of DP-SGD, for these networks and for all
others (``learn/dpsgd.py``).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._C._functorch import peek_interpreter_stack
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors
from torch.func import functional_call, grad, vjp
from torch.overrides import TorchFunctionMode

from unalike.core import dropout
from unalike.core.draws import Draws
from unalike.core.model import Model
from unalike.learn import objective
from unalike.privacy.checks import check_positive

Loss = Callable[[Tensor, Tensor], Tensor]  # outputs and labels to per-sample losses [B]
Pull = Callable[[Tensor], Tensor]  # the gradient of an output to that of the input


def clip_factors(norms: Tensor, bound: float) -> Tensor:
    """The factors that bring arrays of these norms within the bound: exactly 1 below it, 0 where one is not finite."""
    check_positive(bound, "the clip bound", "give the largest norm that one point's gradient may have, e.g. 1.0")
    # a hair below the bound, more than the error of a norm in the gradient's own precision; a tensor, because a number
    # divided by a tensor is its reciprocal times the number, which is not exactly 1 where it should be
    limit = norms.new_full((), (1.0 - 2.0**-16) * bound)
    return limit / norms.nan_to_num(nan=torch.inf, posinf=torch.inf).clamp(min=limit)


def computed_singly() -> bool:
    """Is one client computed, and not a block of them under ``vmap``? Then shapes may depend on numbers."""
    return peek_interpreter_stack() is None


@dataclass(frozen=True)
class Layer:
    """A linear layer, or a convolution with this stride and padding."""

    weight: str
    bias: str | None
    kernel: tuple[int, int] | None = None  # None: a linear layer
    stride: tuple[int, int] = (1, 1)
    padding: tuple[int, int] = (0, 0)

    def of_inputs(self, a: Tensor) -> Tensor:
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

    def convolved(self, patches: Tensor, input: Tensor, weight: Tensor, bias: Tensor | None, **_: Any) -> Tensor:
        """The convolution as a product of matrices."""
        kernels = weight.flatten(1).expand(len(input), -1, -1)
        out = torch.bmm(kernels, patches) if bias is None else torch.baddbmm(bias[None, :, None], kernels, patches)
        height = (input.shape[2] + 2 * self.padding[0] - weight.shape[2]) // self.stride[0] + 1
        return out.reshape(*out.shape[:2], height, -1)

    def apply(self, a: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor, Pull]:
        """What the layer makes of its inputs, what its weights have met, and how gradients go back."""
        met = self.of_inputs(a)
        if self.kernel is None:
            return F.linear(a, weight, bias), met, lambda g: g @ weight
        settings = (self.stride, self.padding, (1, 1), False, (0, 0), 1, (True, False, False))

        def pull(g: Tensor) -> Tensor:
            made: Tensor = torch.ops.aten.convolution_backward(g, a, weight, None, *settings)[0]
            return made

        return self.convolved(met, a, weight, bias), met, pull

    def of_outputs(self, g: Tensor) -> Tensor:
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
            return halved(a)
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
        kernel, stride = _pair(given["kernel_size"]), _pair(given.get("stride") or given["kernel_size"])
        plain = _pair(given.get("padding", 0)) == (0, 0) and _pair(given.get("dilation", 1)) == (1, 1)
        return kernel == stride == (2, 2) and plain and a.shape[-1] % 2 == a.shape[-2] % 2 == 0


def halved(a: Tensor) -> tuple[Tensor, Pull]:
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
        if func is not F.linear and func is not F.conv2d:
            return func(*args, **(kwargs or {}))
        number = len(self.met)
        given = {**dict(zip(("input", "weight", "bias"), args, strict=False)), **(kwargs or {})}
        with torch.no_grad():
            self.met.append(self._layers[number].of_inputs(given["input"]))
        if number == 0 and func is F.conv2d:  # nobody asks for the gradient of its input, and its patches are there
            out = self._layers[0].convolved(self.met[0], **given)
        else:
            out = func(*args, **(kwargs or {}))
        if self._perturb is not None:
            out = out + self._perturb[number]
        elif not out.requires_grad:
            out.requires_grad_()  # nothing before it needs a gradient
        self.outputs.append(out)
        return out


class _NotByLayers(Exception):
    """The network does something of which nobody knows whether it treats samples one by one."""


# What may stand between the layers. Each of these treats the samples of a batch one by one; of anything else (the
# statistics of a batch, a softmax over it, a sum) nobody knows, and then the norms above would not bound a gradient.
_EACH_BY_ITSELF = {
    *("relu", "relu_", "leaky_relu", "elu", "gelu", "silu", "selu", "tanh", "sigmoid", "softplus", "identity"),
    *("flatten", "view", "reshape", "contiguous", "to", "float"),
    *("add", "mul", "sub", "div", "__add__", "__mul__", "__sub__", "__rmul__", "__radd__", "__truediv__"),
}
_LOOKS = {"size", "dim", "__len__", "__get__"}  # read a shape or another property
_LAYOUTS = {"permute", "contiguous", "__getitem__", "view", "reshape"}  # of weights, too
_POOLS = {"max_pool2d", "avg_pool2d", "adaptive_avg_pool2d", "adaptive_max_pool2d"}


class _Structure(TorchFunctionMode):
    """Follows a network through one call and raises where anything but layers uses weights or may mix samples."""

    def __init__(self, named: Mapping[str, Tensor], x: Tensor) -> None:
        super().__init__()
        self._named, self._rows = named, len(x)
        self.chain: list[Layer | Between] | None = []  # None: it is more than one function after the other
        self.by_hand = True  # is all that stands between its layers?
        self._last = x  # what the chain has come to
        self._weights = {id(value): (name, value) for name, value in named.items()}  # and what was laid out anew
        self.layers: list[Layer] = []
        self.outputs: list[Tensor] = []
        self.numbers = 0  # that a sample needs room for

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs, name = kwargs or {}, str(getattr(func, "__name__", func))
        if func is F.linear or func is F.conv2d:
            return self._layer(func, args, kwargs)
        weight = [self._weights[id(one)] for one in (*args, *kwargs.values()) if id(one) in self._weights]
        allowed = name in _LOOKS or (name in _LAYOUTS if weight else self._by_itself(name, args))
        version = self._last._version
        out = func(*args, **kwargs) if allowed else None
        if not allowed or (name == "__get__" and isinstance(out, Tensor)):  # a transposed tensor, say
            raise _NotByLayers
        if weight and isinstance(out, Tensor):
            self._weights[id(out)] = weight[0][0], out
        elif name not in _LOOKS:
            self._follow(name, func, args, kwargs, out, written=self._last._version > version)
        return out

    def _follow(
        self,
        name: str,
        func: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        out: Any,
        written: bool,
    ) -> None:
        """One more function of the chain, if it is one of what came last and of nothing else."""
        others = [one for one in (*args[1:], *kwargs.values()) if isinstance(one, Tensor)]
        name = "relu" if name == "relu_" else name
        if name in ("flatten", "view", "reshape"):
            name = "flatten" if isinstance(out, Tensor) and out.ndim == 2 else ""
        known = name and (name == "relu" or not written) and not others
        if self.chain is None or args[0] is not self._last or not isinstance(out, Tensor) or not known:
            self.chain = None
        elif written or out is not self._last:
            step = Between(name, func, args[1:], kwargs)
            self.by_hand = self.by_hand and step.by_hand(self._last)
            after_relu = self.chain and isinstance(self.chain[-1], Between) and self.chain[-1].name == "relu"
            # the largest of some numbers, cut at 0, is the largest of those that were cut: a quarter as many to cut
            self.chain.insert(len(self.chain) - (1 if name == "max_pool2d" and after_relu else 0), step)
            self._last = out
        elif name not in ("flatten", "contiguous"):  # these change no number
            self.chain = None  # a change of type, say: rows of another type than these would need it

    def _by_itself(self, name: str, args: tuple[Any, ...]) -> bool:
        x = args[0] if args else None
        if not isinstance(x, Tensor):
            return False
        if name in _POOLS:
            return x.ndim == 4 and len(x) == self._rows
        if name == "permute":
            order = args[1] if isinstance(args[1], tuple | list) else args[1:]
            return bool(order[0] == 0)
        if name == "__getitem__":
            index = args[1] if isinstance(args[1], tuple) else (args[1],)
            return index[0] == slice(None) and all(one is None or isinstance(one, int | slice) for one in index)
        return name in _EACH_BY_ITSELF

    def _layer(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Tensor:
        names = ("input", "weight", "bias", "stride", "padding", "dilation", "groups")
        given = {**dict(zip(names, args, strict=False)), **kwargs}
        a, weight, bias = given["input"], self._name(given["weight"]), self._name(given.get("bias"))
        plain = _pair(given.get("dilation", 1)) == (1, 1) and given.get("groups", 1) == 1
        stride, padding = _pair(given.get("stride", 1)), _pair(given.get("padding", 0))
        places = a.ndim >= 2 if func is F.linear else a.ndim == 4
        if weight is None or len(a) != self._rows or not places or not plain or stride is None or padding is None:
            raise _NotByLayers
        if id(a) in self._weights:
            raise _NotByLayers
        kernel = None if func is F.linear else (int(given["weight"].shape[2]), int(given["weight"].shape[3]))
        out: Tensor = func(*args, **kwargs)
        layer = Layer(weight, bias, kernel, stride, padding)
        if self.chain is None or a is not self._last:
            self.chain = None
        else:
            self.chain.append(layer)
            self._last = out
        met = math.prod(layer.of_inputs(a).shape[1:])
        self.layers.append(layer)
        self.outputs.append(out)
        self.numbers += met + out[0].numel() + (given["weight"].numel() if met > given["weight"][0].numel() else 0)
        return out

    def _name(self, weight: Tensor | None) -> str | None:
        """The parameter that it is, perhaps laid out in another way."""
        if weight is None:
            return None
        name, _ = self._weights.get(id(weight), (None, None))
        if name is None or weight.shape != self._named[name].shape or not torch.equal(weight, self._named[name]):
            raise _NotByLayers
        return name


def _pair(given: Any) -> tuple[int, int] | None:
    if isinstance(given, int):
        return given, given
    return (int(given[0]), int(given[1])) if isinstance(given, tuple | list) and len(given) == 2 else None


def _made_up(count: int, begin: float, shape: tuple[int, ...], device: torch.device) -> Tensor:
    """Numbers between −1 and 1 that are all different and come from no data."""
    at = torch.arange(count * math.prod(shape), device=device)
    return torch.sin(at * 78.233 + begin).reshape(count, *shape)


class GhostNorms:
    """The clipped sum for one model of layers that are used once each."""

    def __init__(self, model: Model, seen: _Structure) -> None:
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
            g, met = _in(made_in, layer.of_outputs(g)), _in(made_in, met)
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
        flat: Tensor = _flatten_dense_tensors([parts[name] for name in self.model.shapes])  # type: ignore[no-untyped-call]
        return flat

    def _named(self, theta: Tensor) -> dict[str, Tensor]:
        if not computed_singly():
            return self.model.tensors(theta)
        views = _unflatten_dense_tensors(theta, self._like)  # type: ignore[no-untyped-call]
        return dict(zip(self.model.shapes, views, strict=True))

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


@lru_cache(maxsize=64)  # it depends on the model's code and the shape of its inputs alone
def _found(model: Model, shape: tuple[int, ...], device: torch.device) -> GhostNorms | None:
    """By three checks, on made-up numbers and in training mode: what the network calls, and what it computes."""
    theta, x = _made_up(1, 0.0, (model.size,), device)[0] / 4.0, _made_up(3, 1.0, shape, device)
    named = model.tensors(theta)
    nobody = dropout.Masks(Draws(torch.tensor(0)))
    with temporarily_clear_interpreter_stack(), torch.no_grad(), dropout.dropping(nobody):
        learning = x.clone().requires_grad_()
        try:
            # a network may take another way where no gradient is wanted
            with torch.enable_grad(), _Structure(named, learning) as seen:
                functional_call(model.twin(theta, training=True), named, (learning,))
        except _NotByLayers:
            return None
        used = [name for layer in seen.layers for name in (layer.weight, layer.bias) if name is not None]
        if sorted(used) != sorted(named) or not _independent(model, theta, x):
            return None
        found = GhostNorms(model, seen)
        return found if _agrees(found, theta, x) else None


def _independent(model: Model, theta: Tensor, x: Tensor) -> bool:
    """Does a sample's output stay as it is when the other samples of the batch change?"""
    one, other, another = x[:1], x[1:2], x[2:]
    batches = [(one,), (one, other), (one, 3.0 * another), (other, one)]
    outputs = [model(theta, torch.cat(rows)) for rows in batches]
    of_one = [*(out[0] for out in outputs[:-1]), outputs[-1][1]]
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
