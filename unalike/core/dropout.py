"""Dropout (Srivastava et al. 2014) whose masks are draws of the client that trains.

PyTorch's own masks come from a global generator: one seed would not give one result, and a result would change with the
block in which a client is computed. So while a client trains, a mode takes the place of ``F.dropout`` and its kin
inside of networks, and element j of the i-th mask is a function of the client's key, i and j alone. Everywhere else
(evaluation, descriptors, service) networks are in evaluation mode and drop nothing.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from unalike.core.draws import Draws

_PLAIN = (F.dropout, torch.dropout)
_CHANNELS = (F.dropout1d, F.dropout2d, F.dropout3d, torch.feature_dropout)
_here = threading.local()


@dataclass(frozen=True)
class Masks:
    """Where masks come from. ``place``: which row of its batch is computed, where rows are computed one by one.

    A batch's masks are then the same whether its rows are computed together or singly: rows come first.
    """

    draws: Draws
    place: Tensor | None = None

    def of(self, step: int | Tensor, place: Tensor) -> Masks:
        """Those of one row of one step's batch: a function of both, however the batch is computed."""
        return Masks(self.draws.fork(step), place)

    def kept(self, p: float, *shape: int) -> Tensor:
        """True with probability 1 − p, in steps of 2⁻²⁴."""
        count = math.prod(shape)
        elements = torch.arange(count)
        if self.place is not None:
            elements = elements + self.place * count
        high = (self.draws.bits_at(elements) >> 40) & 0xFFFFFF
        return (high >= round(p * 2**24)).reshape(shape)


def masks() -> Masks | None:
    """Those of the client that trains now; None: nobody does, and nothing is dropped."""
    found: Masks | None = getattr(_here, "masks", None)
    return found


@contextmanager
def dropout_from(masks: Masks | None) -> Iterator[None]:
    """Networks that are called inside drop what these masks say; with None they drop nothing."""
    before = getattr(_here, "masks", None)
    _here.masks = masks
    try:
        yield
    finally:
        _here.masks = before


class FromMasks(TorchFunctionMode):
    """Takes the place of PyTorch's dropout. ``used``: has anything been dropped?"""

    def __init__(self, masks: Masks) -> None:
        super().__init__()
        self._masks, self.used = masks, False

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func not in _PLAIN and func not in _CHANNELS:
            return func(*args, **(kwargs or {}))
        given = {**dict(zip(("input", "p", "training"), args, strict=False)), **(kwargs or {})}
        x: Tensor = given["input"]
        p, training = float(given.get("p", 0.5)), bool(given.get("training", given.get("train", True)))
        if not 0 <= p <= 1:
            raise ValueError(f"dropout with p={p}; expected a probability between 0 and 1")
        if not training or p == 0:
            return x
        self.used = True
        shape = tuple(x.shape)
        if func in _CHANNELS:
            if x.ndim < 3:
                raise ValueError(f"dropout of channels reads [rows, channels, ...], but its input has shape {shape}")
            shape = shape[:2] + (1,) * (x.ndim - 2)
        if p == 1:
            return torch.zeros_like(x)
        return x * (self._masks.kept(p, *shape).to(x.dtype) / (1 - p))
