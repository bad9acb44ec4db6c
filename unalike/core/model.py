"""A neural network as a function of one flat vector: ``model(theta, x)`` with theta in R^d.

So a cohort's models are a matrix [C, d], and averaging, clipping, hypernetworks and mixtures are plain linear algebra.
"""

from __future__ import annotations

import copy
import hashlib
import itertools
import math
import threading
from collections.abc import Callable
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor, nn

from unalike.core import dropout
from unalike.core.schema import Schema
from unalike.core.torch_internals import Slot, parameter_slots, to_device_of

if TYPE_CHECKING:
    from unalike.networks.adapters import Trainable

_BATCH_NORM = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)


def _call_with(module: nn.Module, tensors: dict[str, Tensor], *inputs: Tensor) -> Any:
    return torch.func.functional_call(module, tensors, inputs)


class HasSchema(Protocol):
    """Clients that say what their rows look like."""

    @property
    def schema(self) -> Schema: ...


class Model:
    """An ``nn.Module`` seen as a function of its parameters, laid end to end in the module's own order.

    What is frozen, and buffers, are constants of the function: all clients have the same ones, and no round sends them.
    ``trainable`` says what of a pretrained network is not frozen ("lora:r=4,targets=attention", "head", "norm", "bias",
    several of them joined by "+", or a function of a parameter's name and the parameter); such a model starts from the
    values that the module has. None: whatever requires a gradient.

    Batch norm is refused: its running statistics are neither parameters (so they would not be averaged) nor constants,
    and its batch statistics leak across a client's samples. The module is in training mode while a client trains
    (``core/dropout.py``: dropout's masks are the client's draws), else in evaluation mode.
    """

    kind: type[nn.Module] = nn.Module  # what it is made of, where that is one module

    def __init__(self, module: nn.Module, trainable: Trainable | None = None) -> None:
        for name, part in module.named_modules():
            if isinstance(part, _BATCH_NORM) or getattr(part, "track_running_stats", False):
                raise ValueError(
                    f"{type(part).__name__} ({name or 'the module itself'}) keeps running statistics, which are "
                    "neither averaged nor private in federated training; use nn.GroupNorm in its place (the `resnet18` "
                    "architecture is the group-norm variant)"
                )
            if isinstance(part, nn.AlphaDropout | nn.FeatureAlphaDropout) and part.p > 0:
                raise ValueError(
                    f"{type(part).__name__} ({name}) draws from a global generator, so a run would not be "
                    "reproducible; use nn.Dropout, whose masks Unalike draws at the client, or set p=0"
                )
        self._module, self.kind = copy.deepcopy(module).eval(), type(module)
        self.drawn: set[str] | None = None  # the parts whose first values are drawn; None: all that know how
        if trainable is not None:
            from unalike.networks.adapters import adapt  # as in ``named``: one import upwards, for the user's sake

            self.drawn = adapt(self._module, trainable)
        names = [name for name, parameter in self._module.named_parameters() if parameter.requires_grad]
        if not names:
            said = "" if trainable is None else f": none that trainable = {trainable!r} chooses"
            raise ValueError(f"{type(module).__name__} has no trainable parameters{said}")
        self._twins: dict[tuple[int, torch.device | None, bool], tuple[nn.Module, list[tuple[Slot, str]]]] = {}
        self._drops: bool | None = None  # does it drop anything in training? Not known before it has been tried
        parameters = dict(self._module.named_parameters())
        self.shapes: dict[str, torch.Size] = {name: parameters[name].shape for name in names}
        self._sizes = [math.prod(shape) for shape in self.shapes.values()]
        self.size = sum(self._sizes)
        self._has_constants = len(names) < len(parameters) or any(True for _ in self._module.buffers())
        for parameter in self._module.parameters():
            parameter.requires_grad_(False)

    @classmethod
    def named(cls, name: str, clients: HasSchema | Schema, trainable: Trainable | None = None, **options: Any) -> Model:
        """The architecture of this name (``unalike.networks.architectures``) for the rows of these clients.

        - ``name``: such as "mlp" or "lenet", or the path of a class, as in "file.py:Class".
        - ``clients``: a population or a roster, which know the classes of their labels; or a schema.
        - ``trainable``: as of ``Model``, for a pretrained network.
        - ``options``: go to the architecture, as in ``Model.named("mlp", clients, hidden=(32,))``.
        """
        from unalike.networks import architectures  # the one import upwards, so that `Model` is all that a user needs

        schema = clients if isinstance(clients, Schema) else clients.schema
        return cls(architectures.build(name, schema.shape, schema.outputs, schema.kind, **options), trainable)

    def __call__(self, theta: Tensor, *inputs: Tensor) -> Tensor:
        # torch.func.functional_call does the same, but walks the module twice in every call: a tenth of a small step
        tensors: dict[str, Any] = self.tensors(theta)
        masks = dropout.masks()
        module, slots = self._twin(theta, training=masks is not None)
        call: Callable[..., Any] = module if slots else partial(_call_with, module, tensors)
        before = [table[key] for (table, key), _ in slots]
        try:
            for (table, key), name in slots:
                table[key] = tensors[name]
            result: Tensor = call(*inputs) if masks is None else self._call_in_training(call, masks, inputs)
        finally:
            for ((table, key), _), parameter in zip(slots, before, strict=True):
                table[key] = parameter
        return result

    def _call_in_training(self, module: Callable[..., Any], masks: dropout.Masks, inputs: tuple[Tensor, ...]) -> Tensor:
        result: Tensor
        if self._drops is False:
            result = module(*inputs)
            return result
        with dropout.FromMasks(masks) as mode:  # it slows every operation down a little
            result = module(*inputs)
        self._drops = self._drops or mode.used
        return result

    def twin(self, theta: Tensor, training: bool = False) -> nn.Module:
        """This thread's own copy of the module, to hang parameters into; its constants are where theta is."""
        return self._twin(theta, training)[0]

    def _twin(self, theta: Tensor, training: bool = False) -> tuple[nn.Module, list[tuple[Slot, str]]]:
        """This thread's module on theta's device, and the places where parameters hang in it."""
        mine = threading.get_ident(), theta.device if self._has_constants else None, training
        if mine not in self._twins:
            tensors = itertools.chain(self._module.named_parameters(), self._module.named_buffers())
            shared = {id(one): one if name in self.shapes else to_device_of(one, theta) for name, one in tensors}
            module = copy.deepcopy(self._module, shared).train(training)  # copies no tensor
            name_of = {id(parameter): name for name, parameter in module.named_parameters() if name in self.shapes}
            slots = [(slot, name_of[id(one)]) for slot, one in parameter_slots(module) if id(one) in name_of]
            self._twins[mine] = module, slots
        return self._twins[mine]

    def __repr__(self) -> str:
        return f"Model({type(self._module).__name__}, {self.size:,} parameters)"

    def tensors(self, theta: Tensor) -> dict[str, Tensor]:
        """theta [d] as named parameter tensors (views; one split, because its gradient is one concatenation)."""
        parts = theta.split_with_sizes(self._sizes)
        return {name: part.view(shape) for part, (name, shape) in zip(parts, self.shapes.items(), strict=True)}

    def flatten(self, tensors: dict[str, Tensor]) -> Tensor:
        """The inverse of ``tensors``."""
        return torch.cat([tensors[name].reshape(-1) for name in self.shapes])

    def span(self, name: str) -> slice:
        """Where in theta the named parameter lies."""
        before = 0
        for (other, _), size in zip(self.shapes.items(), self._sizes, strict=True):
            if other == name:
                return slice(before, before + size)
            before += size
        raise KeyError(f"no parameter {name!r}; there are {', '.join(self.shapes)}")

    def init(self, seed: int) -> Tensor:
        """A fresh theta [d]: every submodule's own ``reset_parameters`` under the seed (no global state is touched).

        Parameters that no ``reset_parameters`` sets keep the value the module was given with; and so do all of a
        pretrained network but what was put beside its layers.
        """
        kept: dict[int, Any] = {}  # what is not drawn need not be copied
        if self.drawn is not None:
            named = self._module.named_parameters()
            kept = {id(one): one for name, one in named if name.rpartition(".")[0] not in self.drawn}
        module = copy.deepcopy(self._module, kept)
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            torch.manual_seed(seed)
            for name, part in module.named_modules():
                reset = getattr(part, "reset_parameters", None)
                if callable(reset) and (self.drawn is None or name in self.drawn):
                    reset()
        return self.flatten(dict(module.named_parameters())).detach().clone()

    def module(self, theta: Tensor) -> nn.Module:
        """An ordinary ``nn.Module`` with these parameters, to use or export outside of Unalike."""
        module = copy.deepcopy(self._module)
        module.load_state_dict(self.tensors(theta.detach().clone()), strict=False)
        return module

    @cached_property
    def digest(self) -> str | None:
        """SHA-256 of what is frozen (names, types and values) and of buffers; None where no parameter is frozen."""
        if all(name in self.shapes for name, _ in self._module.named_parameters()):
            return None
        found = hashlib.sha256()
        for name, value in sorted(self._module.state_dict().items()):
            if name not in self.shapes:
                found.update(f"{name} {value.dtype} {tuple(value.shape)}\n".encode())
                found.update(value.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
        return found.hexdigest()
