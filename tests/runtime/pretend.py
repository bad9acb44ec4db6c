"""A pretended device: its tensors lie on the CPU and are computed there, but PyTorch takes them for another device's.

An operation that mixes them with tensors of the CPU fails, as on a GPU, and a result can be compared bit by bit with
that of the CPU. Numbers (tensors without a dimension) may be mixed in, as on a GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils._mode_utils import no_dispatch
from torch.utils._pytree import tree_leaves, tree_map, tree_map_only
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

PRETEND = "pretend"
_setup_privateuseone_for_python_backend(PRETEND)
ran: list[str] = []  # the operations that ran there; tests clear it

aten = torch.ops.aten
_MOVES = (aten.copy_.default, aten._to_copy.default)


class Pretended(Tensor):
    """A tensor of the device, around one of the CPU."""

    inner: Tensor

    @staticmethod
    def __new__(cls, inner: Tensor) -> Pretended:
        about = {"strides": inner.stride(), "storage_offset": inner.storage_offset(), "dtype": inner.dtype}
        made: Pretended = Tensor._make_wrapper_subclass(cls, inner.shape, device=f"{PRETEND}:0", **about)
        made.inner = inner
        return made

    def __repr__(self, **_: Any) -> str:
        return f"pretended {self.inner!r}"

    @classmethod
    def __torch_dispatch__(
        cls, operation: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        return _run(operation, *args, **(kwargs or {}))


def _run(operation: Any, *args: Any, **kwargs: Any) -> Any:
    tensors = [one for one in tree_leaves((args, kwargs)) if isinstance(one, Tensor)]
    here = [one for one in tensors if isinstance(one, Pretended)]
    if operation not in _MOVES:
        elsewhere = [one for one in tensors if not isinstance(one, Pretended) and one.ndim]
        if here and elsewhere:
            raise RuntimeError(f"{operation}: tensors of the device and of the CPU {[one.shape for one in elsewhere]}")
        ran.append(str(operation))
    wanted = kwargs.get("device")
    args, kwargs = tree_map(lambda one: one.inner if isinstance(one, Pretended) else one, (args, kwargs))
    if wanted is not None:
        kwargs["device"] = torch.device("cpu")
    result = operation(*args, **kwargs)
    if wanted is not None and torch.device(wanted).type != PRETEND:
        return result
    for one in here:
        if one.shape != one.inner.shape:  # it was reshaped in place, or is an output that has been given its size
            with no_dispatch():
                one.data = Pretended(one.inner)
    known = {id(one.inner): one for one in here}  # of an operation in place
    return tree_map_only(Tensor, lambda one: known[id(one)] if id(one) in known else Pretended(one), result)


def _kernel(operation: Any) -> Callable[..., Any]:
    return lambda *args, **kwargs: _run(operation, *args, **kwargs)


# What has no tensor of the device among its inputs, and what is called below the level of `__torch_dispatch__`
_every = torch.library.Library("_", "IMPL")
_every.fallback(_run, "PrivateUse1")
_some = torch.library.Library("aten", "IMPL")
for _operation in (aten.empty_strided.default, aten.empty.memory_format, aten.copy_.default):
    _some.impl(_operation, _kernel(_operation), "PrivateUse1")
