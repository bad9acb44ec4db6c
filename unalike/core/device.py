"""Devices: constants that follow a computation to the device where it runs.

Inside a task new tensors are made on the device of its client (the simulator sees to it). What a method made before,
once and on the CPU, is moved by ``beside``.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

_moved: WeakTensorKeyDictionary = WeakTensorKeyDictionary()  # constant -> its copies, by device


def beside(constant: Tensor, other: Tensor) -> Tensor:
    """The constant on the device of ``other``; it is copied there once."""
    if constant.device == other.device:
        return constant
    if constant not in _moved:
        _moved[constant] = {}
    copies: dict[torch.device, Tensor] = _moved[constant]
    if other.device not in copies:
        with torch._C._DisableFuncTorch():  # a copy that outlives `grad` and `vmap` must not belong to them
            copies[other.device] = constant.to(other.device)
    return copies[other.device]
