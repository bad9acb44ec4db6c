"""The private parts of PyTorch that Unalike uses, in one file, each with a public path for when it is missing.

``tests/core/test_torch_internals.py`` names the versions with which they were checked.
"""

from __future__ import annotations

import contextlib
import importlib
import operator
import sys
from collections.abc import Callable, Sequence
from types import FunctionType, ModuleType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils.weak import WeakTensorKeyDictionary

_copies: WeakTensorKeyDictionary = WeakTensorKeyDictionary()  # constant -> its copies, by device


def _private(module: str, name: str) -> Any:
    """A part that PyTorch does not promise to keep; None where it is missing."""
    try:
        return getattr(importlib.import_module(module), name, None)
    except ImportError:
        return None


def _is_wrapped(tensor: Tensor) -> bool:
    return torch.func.debug_unwrap(tensor, recurse=False) is not tensor


# Does the tensor stand for many, inside ``vmap``, or for one that ``torch.func`` differentiates?
is_wrapped: Callable[[Tensor], bool] = _private("torch._C._functorch", "is_functorch_wrapped_tensor") or _is_wrapped
_interpreters: Any = _private("torch._functorch.pyfunctorch", "retrieve_all_functorch_interpreters")
_clear: Any = _private("torch._functorch.pyfunctorch", "temporarily_clear_interpreter_stack")
_peek: Any = _private("torch._C._functorch", "peek_interpreter_stack")
_modes: Any = _private("torch.overrides", "_get_current_function_mode_stack")
_flatten: Any = _private("torch._utils", "_flatten_dense_tensors")
_unflatten: Any = _private("torch._utils", "_unflatten_dense_tensors")


def skip_compiler() -> None:
    """Have ``torch.func`` take gradients without importing PyTorch's compiler, which takes as long as PyTorch itself.

    It is imported to ask whether it is compiling; where nobody has imported it, it is not. A PyTorch that is built
    otherwise is left as it is.
    """
    transforms = _private("torch._functorch", "eager_transforms")
    asking = getattr(transforms, "_autograd_grad", None)
    if not isinstance(asking, FunctionType) or "_dynamo" not in asking.__code__.co_names:
        return
    unasked = ModuleType("torch")
    not_compiling = SimpleNamespace(_disable=contextlib.nullcontext)
    unasked.__dict__.update(vars(torch), _dynamo=SimpleNamespace(compiled_autograd=not_compiling))
    seen = {**asking.__globals__, "torch": unasked}
    quick = FunctionType(asking.__code__, seen, asking.__name__, asking.__defaults__, asking.__closure__)

    def gradient(*args: Any, **kwargs: Any) -> Any:
        return (asking if "torch._dynamo" in sys.modules else quick)(*args, **kwargs)

    transforms._autograd_grad = gradient


skip_compiler()


def outside_transforms() -> contextlib.AbstractContextManager[Any]:
    """Compute outside of the ``vmap`` and ``grad`` that are active, so that results belong to none of them."""
    disable: Any = getattr(torch._C, "_DisableFuncTorch", contextlib.nullcontext)
    context: contextlib.AbstractContextManager[Any] = disable()
    return context


def active_transforms() -> list[str] | None:
    """The transforms of ``torch.func`` that are active, outermost first: "vmap", "grad" and others. None: unknown."""
    if _interpreters is None:
        return None
    return [interpreter.key().name.lower() for interpreter in _interpreters()]


def computed_singly() -> bool:
    """Is one client computed, and not a block of them under ``vmap``? Then shapes may depend on numbers.

    Where PyTorch does not tell, the answer is no: what is done for a block is right for one client too.
    """
    return _peek is not None and _peek() is None


def cleared_transforms() -> contextlib.AbstractContextManager[Any]:
    """Compute as if no transform were active, so that others can be used inside."""
    if _clear is None:
        raise RuntimeError(
            f"DP-SGD needs a part of PyTorch that version {torch.__version__} does not have; install the version that "
            "constraints.txt names"
        )
    context: contextlib.AbstractContextManager[Any] = _clear()
    return context


def active_function_modes() -> list[Any] | None:
    """The function modes (``TorchFunctionMode``) that are active. None: unknown."""
    return None if _modes is None else list(_modes())


def flatten_tensors(tensors: Sequence[Tensor]) -> Tensor:
    """The tensors' numbers side by side [d], in one call that ``vmap`` does not know."""
    flat: Tensor = torch.cat([one.reshape(-1) for one in tensors]) if _flatten is None else _flatten(tensors)
    return flat


def unflatten_tensor(flat: Tensor, like: Sequence[Tensor]) -> Sequence[Tensor]:
    """The inverse: views of ``flat`` with the shapes of ``like``."""
    if _unflatten is None:
        parts = torch.split(flat, [one.numel() for one in like])
        return [part.view(one.shape) for part, one in zip(parts, like, strict=True)]
    views: Sequence[Tensor] = _unflatten(flat, like)
    return views


def to_device_of(constant: Tensor, other: Tensor) -> Tensor:
    """The constant on the device of ``other``; it is copied there once.

    Inside a task new tensors are made on the device of its client. What a method made before, on the CPU, needs this.
    """
    if constant.device == other.device:
        return constant
    if constant not in _copies:
        _copies[constant] = {}
    copies: dict[torch.device, Tensor] = _copies[constant]
    if other.device not in copies:
        with outside_transforms():  # the copy outlives `grad` and `vmap`
            copy = constant.to(other.device)
        if is_wrapped(copy):
            return copy
        copies[other.device] = copy
    return copies[other.device]


Slot = tuple[dict[str, Any], str]  # a module's table of parameters, and the name of one there


def parameter_slots(module: nn.Module) -> list[tuple[Slot, nn.Parameter]]:
    """All places where parameters hang in a module: one that is shared hangs in several. Empty: they are not known."""
    return [
        ((table, name), parameter)
        for part in module.modules()
        for table in [getattr(part, "_parameters", {})]
        for name, parameter in table.items()
        if parameter is not None
    ]


def trace(function: Callable[..., Any], inputs: Any) -> fx.GraphModule:
    """The tensor operations of one call, found with tensors that have no values; a call that looks at one raises."""
    from torch.fx.experimental.proxy_tensor import make_fx

    def plain(inputs: Any) -> Any:  # PyTorch miscounts the arguments of a method
        return function(inputs)

    module: fx.GraphModule = make_fx(plain, tracing_mode="fake", _allow_non_fake_inputs=True)(inputs)
    return module


def may_write(module: fx.GraphModule) -> bool:
    """Could an operation write to its inputs? We cannot know it of those that are not operators of PyTorch."""
    called = {node.target for node in module.graph.nodes if node.op == "call_function"} - {operator.getitem}
    kind: Any = getattr(torch._ops, "OpOverload", ())
    return any(not isinstance(one, kind) or one._schema.is_mutable for one in called)
