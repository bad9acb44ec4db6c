"""Messages of fewer bits: random rounding that is right on average, and what it took off added to the next message.

Every 256 numbers share a scale s, the largest magnitude among them, which is sent in 32 bits; a number x becomes one of
the whole numbers k next to x·L/s, L = 2^(bits−1) − 1, and which one is drawn such that k·s/L is x on average (QSGD,
Alistarh et al., 2017). From 4 bits on the squared error of 256 numbers is on average below three quarters of their
squared length. So with ``feedback`` (Seide et al., 2014), where a client adds what rounding took off to its next
message, what is still owed stays bounded.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from unalike.privacy.mechanisms import DrawsLike, clip, uniform

if TYPE_CHECKING:
    from unalike.core.client import Client
    from unalike.core.release import Release

PIECE = 256  # numbers that share a scale
FEWEST, MOST = 4, 16
REST = "rest."  # under this prefix a client keeps what rounding took off


def check_bits(what: str, bits: int | None, feedback: bool) -> None:
    """Refuse numbers of bits that make no sense, and feedback without them."""
    if bits is None and feedback:
        raise ValueError(f"{what}: feedback=true gives back what rounding took off; set bits=..., for example 8")
    if bits is not None and not FEWEST <= bits <= MOST:
        raise ValueError(f"{what}: bits={bits}; expected {FEWEST} to {MOST}, or none for numbers as they are")


def message_bytes(numbers: int, bits: int) -> int:
    """What a message of so many numbers takes, scales included."""
    return math.ceil(numbers * bits / 8) + 4 * math.ceil(numbers / PIECE)


def round_randomly(value: Tensor, draws: DrawsLike) -> Tensor:
    """A whole number next to each number, float64, and the number itself on average."""
    low = torch.floor(value)
    up: Tensor = low + (uniform(draws, value.numel()).reshape(value.shape) < value - low)
    return up


def in_few_bits(value: Tensor, bits: int, draws: DrawsLike) -> Tensor:
    """What the receiver reads of a message with so many bits for each number; NaN where a piece is not finite."""
    levels, flat = 2 ** (bits - 1) - 1, value.reshape(-1).to(torch.float64)
    pieces = torch.nn.functional.pad(flat, (0, -len(flat) % PIECE)).reshape(-1, PIECE)
    scale = pieces.abs().amax(1, keepdim=True).to(torch.float32).to(torch.float64)  # as it is sent
    steps = round_randomly(pieces * (levels / scale.clamp(min=torch.finfo(torch.float32).tiny)), draws)
    read: Tensor = steps.clamp(-levels, levels) * (scale / levels)
    return read.reshape(-1)[: len(flat)].reshape(value.shape).to(value.dtype)


def shorten(
    release: Release, sent: Mapping[str, Tensor], client: Client, draws: DrawsLike
) -> tuple[Mapping[str, Tensor], dict[str, Tensor]]:
    """The arrays of a task with that of the release in its few bits, and what the client keeps of it for feedback.

    A clip comes before, so that what it takes off is not owed, and once more after, as for every message.
    """
    if release.bits is None or getattr(release, "secure", False):  # a secure sum rounds to the grid of its ring
        return sent, {}
    name = release.names[0]
    value, bound = sent[name], getattr(release, "clip", None)
    if bound is not None:
        value = clip(value, bound, getattr(release, "norm", "l2"))
    if not release.feedback:
        return {**sent, name: in_few_bits(value, release.bits, draws)}, {}
    owed = value + client.kept.get(REST + name, torch.zeros_like(value))
    read = in_few_bits(owed, release.bits, draws)
    return {**sent, name: read}, {REST + name: owed - read}
