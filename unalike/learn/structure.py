"""What a network does in one call: is it made of layers that treat samples one by one, and of nothing else?"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from unalike.learn.layers import Between, Layer, pair_of


class NotByLayers(Exception):
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
# These do as long as they leave the first dimension alone, which is that of the samples.
_ALONG = {"softmax": 1, "chunk": 2, "split": 2, "mean": 1}  # the argument that names dimensions
_BOTH = {"matmul", "bmm", "__matmul__", "scaled_dot_product_attention"}
_POOLS = {"max_pool2d", "avg_pool2d", "adaptive_avg_pool2d", "adaptive_max_pool2d"}


def is_frozen(weight: Any) -> bool:
    """Is it the module's own, which hangs in it as a parameter where those of θ are plain tensors?"""
    return isinstance(weight, nn.Parameter)


class Structure(TorchFunctionMode):
    """Follows a network through one call and raises where anything but layers uses weights or may mix samples."""

    def __init__(self, named: Mapping[str, Tensor], x: Tensor) -> None:
        super().__init__()
        self._named, self._rows = named, len(x)
        self.chain: list[Layer | Between] | None = []  # None: it is more than one function after the other
        self.by_hand = True  # is all that stands between its layers?
        self._last = x  # what the chain has come to
        self._of_rows = {id(x): x}  # all that was computed from rows; what was not is a constant
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
        given = [one for arg in (*args, *kwargs.values()) for one in (arg if isinstance(arg, list | tuple) else [arg])]
        weight = [self._weights[id(one)] for one in given if id(one) in self._weights]
        if not weight and not any(id(one) in self._of_rows for one in given):
            return func(*args, **kwargs)
        allowed = name in _LOOKS or (name in _LAYOUTS if weight else self._by_itself(name, args, kwargs))
        version = self._last._version
        out = func(*args, **kwargs) if allowed else None
        if not allowed or (name == "__get__" and isinstance(out, Tensor)):  # a transposed tensor, say
            raise NotByLayers
        if weight and isinstance(out, Tensor):
            self._weights[id(out)] = weight[0][0], out
        elif name not in _LOOKS:
            parts = out if isinstance(out, list | tuple) else [out]
            self._of_rows |= {id(one): one for one in parts if isinstance(one, Tensor)}
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

    def _by_itself(self, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
        x = args[0] if args else None
        if name in _BOTH:
            parts = [*args, *kwargs.values()][: 3 if name == "scaled_dot_product_attention" else 2]
            if len(parts) == 2 and parts[1].ndim == 2 and id(parts[1]) not in self._of_rows:
                parts = parts[:1]  # times a constant matrix
            return all(one.ndim > 2 and len(one) == self._rows for one in parts)
        if name == "cat" and isinstance(x, list | tuple):
            dim = kwargs.get("dim", args[1] if len(args) > 1 else 0)
            return all(len(one) == self._rows for one in x) and dim % x[0].ndim != 0
        if not isinstance(x, Tensor):
            return False
        if name in _POOLS:
            return x.ndim == 4 and len(x) == self._rows
        named = [*args[1:], *kwargs.values()]
        if name == "permute":
            order = named[0] if isinstance(named[0], tuple | list) else named
            return bool(order[0] == 0)
        if name == "__getitem__":
            index = args[1] if isinstance(args[1], tuple) else (args[1],)
            return index[0] == slice(None) and all(one is None or isinstance(one, int | slice) for one in index)
        if name == "transpose":
            return len(x) == self._rows and all(one % x.ndim != 0 for one in named)
        if name in _ALONG:
            dims = kwargs.get("dim", args[_ALONG[name]] if len(args) > _ALONG[name] else None)
            dims = dims if isinstance(dims, list | tuple) else [0 if dims is None else dims]
            return len(x) == self._rows and all(one % x.ndim != 0 for one in dims)
        if name == "layer_norm":
            shape = kwargs.get("normalized_shape", args[1] if len(args) > 1 else x.shape)
            return len(x) == self._rows and len(shape) < x.ndim
        return name in _EACH_BY_ITSELF

    def _layer(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Tensor:
        names = ("input", "weight", "bias", "stride", "padding", "dilation", "groups")
        given = {**dict(zip(names, args, strict=False)), **kwargs}
        a, frozen = given["input"], is_frozen(given["weight"])
        made: Tensor
        if frozen and id(a) not in self._of_rows:
            made = func(*args, **kwargs)
            return made
        if frozen and (given.get("bias") is None or is_frozen(given["bias"])) and len(a) == self._rows and a.ndim > 1:
            self.chain = None
            made = func(*args, **kwargs)
            self._of_rows[id(made)] = made
            return made
        weight, bias = self._name(given["weight"]), self._name(given.get("bias"))
        plain = pair_of(given.get("dilation", 1)) == (1, 1) and given.get("groups", 1) == 1
        stride, padding = pair_of(given.get("stride", 1)), pair_of(given.get("padding", 0))
        places = a.ndim >= 2 if func is F.linear else a.ndim == 4
        if weight is None or len(a) != self._rows or not places or not plain or stride is None or padding is None:
            raise NotByLayers
        if id(a) in self._weights:
            raise NotByLayers
        kernel = None if func is F.linear else (int(given["weight"].shape[2]), int(given["weight"].shape[3]))
        out: Tensor = func(*args, **kwargs)
        layer = Layer(weight, bias, kernel, stride, padding)
        if self.chain is None or a is not self._last:
            self.chain = None
        else:
            self.chain.append(layer)
            self._last = out
        self._of_rows[id(out)] = out
        met = math.prod(layer.patches(a).shape[1:])
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
            raise NotByLayers
        return name
