"""Adapters: the few numbers of a pretrained network that a client has for itself, and the rest of it, which is frozen.

``adapt(module, "lora:r=4,targets=attention+head")`` puts layers of low rank (LoRA; Hu et al., ICLR 2022) beside frozen
ones and lets the last layer be trained. What is trainable then is a ``Model``'s θ; all else is a constant.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrize

from unalike.core.notes import did_you_mean
from unalike.networks.heads import last_linear

Trainable = str | Callable[[str, nn.Parameter], bool]

FORMS = "lora[:r=4,alpha=4,targets=attention], ffa-lora[:...], head, norm, bias, or several joined by +"


@dataclass(frozen=True)
class LowRank:
    """The settings of LoRA, by the names that PEFT has for them."""

    r: int = 4
    alpha: float | None = None  # None: r, so that the scaling alpha / r is 1
    targets: tuple[str, ...] = ("attention",)  # or "all", or the last parts of layers' names
    freeze_a: bool = False  # FFA-LoRA (Sun et al., ICLR 2024): then the mean of products is the product of means

    @property
    def scaling(self) -> float:
        """α / r."""
        return (self.r if self.alpha is None else self.alpha) / self.r


def read_trainable(text: str) -> tuple[LowRank | None, set[str]]:
    """What a text such as "lora:r=8,alpha=16,targets=q_proj/v_proj+head" asks for."""
    low: LowRank | None = None
    whole: set[str] = set()
    for part in text.split("+"):
        name, _, settings = (word.strip() for word in part.partition(":"))
        known = ("lora", "ffa-lora", "head", "norm", "bias")
        if name not in known or (settings and "lora" not in name) or name in whole or (low and "lora" in name):
            hint = did_you_mean(name, known) if name not in known else ""
            raise ValueError(f"trainable = {text!r}: {part.strip()!r} is not understood{hint}; expected {FORMS}")
        if "lora" in name:
            low = _read_low_rank(text, settings, freeze_a=name == "ffa-lora")
        else:
            whole.add(name)
    return low, whole


def _read_low_rank(text: str, settings: str, freeze_a: bool) -> LowRank:
    given: dict[str, Any] = {}
    readers: dict[str, Callable[[str], Any]] = {
        "r": int,
        "alpha": float,
        "targets": lambda word: tuple(word.split("/")),
    }
    for setting in filter(None, settings.split(",")):
        name, _, value = (word.strip() for word in setting.partition("="))
        try:
            given[name] = readers[name](value)
        except (KeyError, ValueError):
            raise ValueError(
                f"trainable = {text!r}: {setting.strip()!r} is not understood; expected r=WHOLE NUMBER, "
                "alpha=NUMBER or targets=attention, all or the ends of layers' names with / between them (a/b)"
            ) from None
    if given.get("r", 1) < 1 or not 0 < given.get("alpha", 1.0) < math.inf or "" in given.get("targets", ()):
        raise ValueError(f"trainable = {text!r}: r and alpha are above 0, and targets name at least one layer")
    return LowRank(**given, freeze_a=freeze_a)


class Adapter(nn.Module):
    """Something with parameters ``lora_A`` and ``lora_B``, whose product begins at 0."""

    lora_A: nn.Parameter
    lora_B: nn.Parameter

    def reset_parameters(self) -> None:
        """As in PEFT and in the authors' code; what the layer had before stays."""
        nn.init.kaiming_uniform_(self.lora_A, a=math.sqrt(5))
        nn.init.zeros_(self.lora_B)


class LoRALayer(Adapter):
    """Mixed into the class of a linear layer or a convolution: adds (α/r)·B·A·x to what the frozen layer gives.

    A convolution's A is one with the layer's own kernel to r channels, and B a 1×1 convolution.
    """

    low_rank: LowRank

    def forward(self, x: Tensor) -> Tensor:
        frozen: Tensor = super().forward(x)  # the layer's own
        if isinstance(self, nn.Conv2d):
            low = F.conv2d(x, self.lora_A, None, self.stride, self.padding, self.dilation)
            return frozen + self.low_rank.scaling * F.conv2d(low, self.lora_B)
        return frozen + self.low_rank.scaling * F.linear(F.linear(x, self.lora_A), self.lora_B)


class LoRAWeight(Adapter):
    """W + (α/r)·B·A in the place of a weight W, where a module uses weights without calling a layer."""

    def __init__(self, weight: Tensor, low_rank: LowRank) -> None:
        super().__init__()
        self.low_rank = low_rank
        _add_factors(self, low_rank, weight.new_empty(low_rank.r, weight.shape[1]), (len(weight), low_rank.r))

    def forward(self, weight: Tensor) -> Tensor:
        return weight + self.low_rank.scaling * (self.lora_B @ self.lora_A)


def _add_factors(module: Adapter, low: LowRank, a: Tensor, shape_of_b: tuple[int, ...]) -> None:
    module.lora_A = nn.Parameter(a, requires_grad=not low.freeze_a)
    module.lora_B = nn.Parameter(a.new_empty(shape_of_b))
    module.reset_parameters()


@functools.cache
def _with_lora(kind: type) -> type:
    return type(f"LoRA{kind.__name__}", (LoRALayer, kind), {})


def is_transposed(layer: nn.Module) -> bool:
    """Is it a linear layer of GPT-2's kind, whose weight is [in, out] (``transformers.pytorch_utils.Conv1D``)?"""
    return any(kind.__name__ == "Conv1D" and hasattr(layer, "nf") for kind in type(layer).__mro__)


def _takes_lora(layer: nn.Module) -> bool:
    convolution = isinstance(layer, nn.Conv2d) and layer.groups == 1 and not isinstance(layer.padding, str)
    return isinstance(layer, nn.Linear | nn.MultiheadAttention) or convolution or is_transposed(layer)


def _put_lora(layer: nn.Module, low: LowRank) -> None:
    if isinstance(layer, nn.MultiheadAttention):
        for owner, name in ((layer, "in_proj_weight"), (layer.out_proj, "weight")):
            weight = getattr(owner, name)
            if weight is None:
                raise ValueError(
                    "LoRA of nn.MultiheadAttention needs one matrix for q, k and v: leave kdim and vdim out"
                )
            parametrize.register_parametrization(owner, name, LoRAWeight(weight, low))
        return
    weight = layer.weight
    assert isinstance(weight, Tensor)
    kind: Any = type(layer)
    layer.__class__ = _with_lora(kind)
    assert isinstance(layer, LoRALayer)
    layer.low_rank = low
    rows, columns = reversed(weight.shape) if is_transposed(layer) else weight.shape[:2]
    ones = (1,) * (weight.ndim - 2)
    _add_factors(layer, low, weight.new_empty(low.r, columns, *weight.shape[2:]), (rows, low.r, *ones))


def _layers_for(low: LowRank, module: nn.Module, head: str) -> Iterator[tuple[str, nn.Module]]:
    parts = dict(module.named_modules())
    inside = [f"{name}." for name, part in parts.items() if isinstance(part, nn.MultiheadAttention)]
    for name, part in parts.items():
        if not _takes_lora(part) or name.startswith(tuple(inside)):
            continue
        above = [name.rsplit(".", cut)[0] for cut in range(name.count(".") + 1)]  # its own name and those it lies in
        words = " ".join([name, *(type(parts[one]).__name__ for one in above)]).lower()
        is_attention = "attn" in words or "attention" in words
        if low.targets == ("attention",):
            chosen = is_attention and name != head
        else:
            chosen = name != head if low.targets == ("all",) else any(_ends(name, one) for one in low.targets)
        if chosen:
            yield name, part


def _ends(name: str, target: str) -> bool:
    return name == target or name.endswith(f".{target}")


def adapt(module: nn.Module, trainable: Trainable) -> set[str]:
    """Freeze the module, in place, but for what is ``trainable``; the names of the parts whose first values are drawn.

    - "lora:r=4,alpha=4,targets=attention": layers of rank r beside linear layers and convolutions: those in attention,
      "all" but the head, or those whose names end so: targets=q_proj/v_proj. "ffa-lora:…": A is drawn and frozen.
    - "head": the last linear layer; "norm": scales and shifts of normalisations; "bias": all biases.
    - Several of these joined by "+", as in "lora:r=8+head".
    - A function of a parameter's name and the parameter.

    All that is not of low rank begins with the values that the module has.
    """
    for parameter in module.parameters():
        parameter.requires_grad_(False)
    if not isinstance(trainable, str):
        for name, parameter in module.named_parameters():
            parameter.requires_grad_(bool(trainable(name, parameter)))
        return set()
    low, whole = read_trainable(trainable)
    head, last = last_linear(module) if low or "head" in whole else ("", module)
    for part in module.modules():
        if "norm" in whole and "norm" in type(part).__name__.lower():
            for parameter in part.parameters(recurse=False):
                parameter.requires_grad_(True)
    if "bias" in whole:
        for name, parameter in module.named_parameters():
            parameter.requires_grad_(name.rpartition(".")[2].endswith("bias") or parameter.requires_grad)
    if "head" in whole:
        _open_head(module, head, last)
    if low is None:
        return set()
    chosen = list(_layers_for(low, module, head))
    if not chosen:
        there = dict.fromkeys(name.rpartition(".")[2] for name, part in module.named_modules() if _takes_lora(part))
        raise ValueError(
            f"trainable = {trainable!r}: {type(module).__name__} has no layer for targets={'/'.join(low.targets)}; say "
            f"targets=all, or the ends of names: {', '.join(there)}"
        )
    with torch.random.fork_rng(devices=[]):  # an A that is frozen must be the same in every process
        torch.manual_seed(0)
        for _, layer in chosen:
            _put_lora(layer, low)
    for part in module.modules():  # PyTorch's short cuts read the weights of such layers without calling them
        if isinstance(part, nn.TransformerEncoderLayer):
            part.activation_relu_or_gelu = 0
        elif isinstance(part, nn.TransformerEncoder):
            part.use_nested_tensor = False
    return {name for name, part in module.named_modules() if isinstance(part, Adapter)}


def _open_head(module: nn.Module, head: str, last: nn.Module) -> None:
    """Let the last layer be trained, which must be nobody else's."""
    mine = {id(parameter) for parameter in last.parameters()}
    others = {
        f"{name}.{key}" if name else key
        for name, part in module.named_modules()
        if name != head
        for key, parameter in part.named_parameters(recurse=False)
        if id(parameter) in mine
    }
    if others:
        raise ValueError(
            f"the head {head!r} shares its weights with {', '.join(sorted(others))}, so that training it would change "
            "both: use lora, norm or bias, or untie them"
        )
    for parameter in last.parameters():
        parameter.requires_grad_(True)
