"""A neural network as a function of one flat vector: ``model(theta, x)`` with theta in R^d.

So a cohort's models are a matrix [C, d], and averaging, clipping, hypernetworks and mixtures are plain linear algebra.
"""

from __future__ import annotations

import copy
import itertools
import math
import threading
from typing import Any

import torch
from torch import Tensor, nn

from unalike.core import dropout
from unalike.core.device import beside

_Slot = tuple[dict[str, Any], str, str]  # a module's parameters, one's name there, and its name in the whole


class Model:
    """An ``nn.Module`` seen as a function of its parameters, laid end to end in the module's own order.

    Constant buffers are part of the function. Batch norm is refused: its running statistics are neither parameters
    (so they would not be averaged) nor constants, and its batch statistics leak across a client's samples. The
    module is in training mode while a client trains (``core/dropout.py``: dropout's masks are the client's draws), else
    in evaluation mode.
    """

    kind: type[nn.Module] = nn.Module  # what it is made of, where that is one module

    def __init__(self, module: nn.Module) -> None:
        for name, part in module.named_modules():
            if isinstance(part, nn.modules.batchnorm._BatchNorm) or getattr(part, "track_running_stats", False):
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
        names = [name for name, parameter in module.named_parameters() if parameter.requires_grad]
        if not names:
            raise ValueError(f"{type(module).__name__} has no trainable parameters")
        self._module, self.kind = copy.deepcopy(module).eval(), type(module)
        self._twins: dict[tuple[int, torch.device | None, bool], tuple[nn.Module, list[_Slot]]] = {}
        self._drops: bool | None = None  # does it drop anything in training? Not known before it has been tried
        parameters = dict(self._module.named_parameters())
        self.shapes: dict[str, torch.Size] = {name: parameters[name].shape for name in names}
        self._sizes = [math.prod(shape) for shape in self.shapes.values()]
        self.size = sum(self._sizes)
        self._has_constants = len(names) < len(parameters) or any(True for _ in self._module.buffers())
        for parameter in self._module.parameters():
            parameter.requires_grad_(False)

    def __call__(self, theta: Tensor, *inputs: Tensor) -> Tensor:
        # torch.func.functional_call does the same, but walks the module twice in every call: a tenth of a small step
        tensors: dict[str, Any] = self.tensors(theta)
        masks = dropout.masks()
        module, hung = self._hung(theta, training=masks is not None)
        before = [slots[slot] for slots, slot, _ in hung]
        try:
            for slots, slot, name in hung:
                slots[slot] = tensors[name]
            result: Tensor = module(*inputs) if masks is None else self._training(module, masks, inputs)
        finally:
            for (slots, slot, _), parameter in zip(hung, before, strict=True):
                slots[slot] = parameter
        return result

    def _training(self, module: nn.Module, masks: dropout.Masks, inputs: tuple[Tensor, ...]) -> Tensor:
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
        return self._hung(theta, training)[0]

    def _hung(self, theta: Tensor, training: bool = False) -> tuple[nn.Module, list[_Slot]]:
        """This thread's module on theta's device, and the places where parameters hang in it."""
        mine = threading.get_ident(), theta.device if self._has_constants else None, training
        if mine not in self._twins:
            tensors = itertools.chain(self._module.named_parameters(), self._module.named_buffers())
            shared = {id(one): one if name in self.shapes else beside(one, theta) for name, one in tensors}
            module = copy.deepcopy(self._module, shared).train(training)  # copies no tensor
            name_of = {id(parameter): name for name, parameter in module.named_parameters() if name in self.shapes}
            slots = [  # a parameter that is shared hangs in several places
                (part._parameters, slot, name_of[id(parameter)])
                for part in module.modules()
                for slot, parameter in part._parameters.items()
                if id(parameter) in name_of
            ]
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

        Parameters that no ``reset_parameters`` sets keep the value the module was given with.
        """
        module = copy.deepcopy(self._module)
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            torch.manual_seed(seed)
            for part in module.modules():
                reset = getattr(part, "reset_parameters", None)
                if callable(reset):
                    reset()
        return self.flatten(dict(module.named_parameters())).detach().clone()

    def module(self, theta: Tensor) -> nn.Module:
        """An ordinary ``nn.Module`` with these parameters, to use or export outside of Unalike."""
        module = copy.deepcopy(self._module)
        module.load_state_dict(self.tensors(theta.detach().clone()), strict=False)
        return module
