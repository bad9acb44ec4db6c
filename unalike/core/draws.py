"""Random numbers as a pure function of (seed, round, ask, client, draw).

A draw is a hash of where it is made, computed with tensor operations (splitmix64), so it does not depend on the block,
the thread or the machine in which a client runs, and it works inside ``torch.func.vmap``. This is what makes one seed
give one result on every runtime and block size. It is a simulation's generator: noise that protects people in a
deployed run comes from the operating system (see ``unalike.privacy``).
"""

from __future__ import annotations

import math
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from unalike.core.torch_internals import is_wrapped

_GOLDEN = 0x9E3779B97F4A7C15 - (1 << 64)  # as a signed 64-bit integer, like the two below
_MIX_1 = 0xBF58476D1CE4E5B9 - (1 << 64)
_MIX_2 = 0x94D049BB133111EB - (1 << 64)
_ALL = (1 << 64) - 1
_TO_ANGLE = 2.0 * math.pi * 2.0**-32  # of 32 bits


def _mix(z: Tensor) -> Tensor:
    """splitmix64's finalizer on int64 tensors; ``>>`` is arithmetic, so sign bits are masked off after each shift."""
    z = (z ^ ((z >> 30) & 0x3FFFFFFFF)) * _MIX_1
    z = (z ^ ((z >> 27) & 0x1FFFFFFFFF)) * _MIX_2
    return z ^ ((z >> 31) & 0x1FFFFFFFF)


def _mix_one(z: int) -> int:
    z &= _ALL
    z = ((z ^ (z >> 30)) * _MIX_1) & _ALL
    z = ((z ^ (z >> 27)) * _MIX_2) & _ALL
    return z ^ (z >> 31)


_MULTIPLES = np.arange(1, (1 << 16) + 1, dtype=np.uint64) * np.uint64(_GOLDEN & _ALL)  # 512 KB: most draws are smaller


def _mix_many(begin: int, count: int) -> NDArray[np.uint64]:
    """``_mix`` of begin + GOLDEN, begin + 2·GOLDEN, …, in NumPy's unsigned integers, which need no masks."""
    if count <= len(_MULTIPLES):
        z = _MULTIPLES[:count] + np.uint64(begin & _ALL)
    else:
        z = np.arange(1, count + 1, dtype=np.uint64) * np.uint64(_GOLDEN & _ALL) + np.uint64(begin & _ALL)
    z ^= z >> np.uint64(30)
    z *= np.uint64(_MIX_1 & _ALL)
    z ^= z >> np.uint64(27)
    z *= np.uint64(_MIX_2 & _ALL)
    z ^= z >> np.uint64(31)
    return z


def _normal_many(bits: NDArray[np.uint64]) -> NDArray[np.float32]:
    """``Draws.normal`` in four fifths of the time: where the numbers lie, and by NumPy, whose calls cost less.

    What is not exact to the last bit (logarithm, root, cosine and sine) is PyTorch's: the numbers are the same.
    """
    pairs = bits.view("<u4").astype(np.float32)
    low, high = pairs[0::2], pairs[1::2]
    radius = high + np.float32(0.5)
    radius *= np.float32(2.0**-32)
    torch.from_numpy(radius).log_()
    radius *= np.float32(-2.0)
    torch.from_numpy(radius).sqrt_()
    angle = torch.from_numpy(low * np.float32(_TO_ANGLE))
    np.multiply(torch.cos(angle).numpy(), radius, out=low)
    np.multiply(angle.sin_().numpy(), radius, out=high)
    return pairs


def _plain(key: Tensor) -> bool:
    """Is it one client's key, with a value to look at, and not that of a block or of a recording?"""
    return type(key) is Tensor and key.ndim == 0 and key.device.type == "cpu" and not is_wrapped(key)


def key(*parts: int | Tensor) -> Tensor:
    """Hash integers (or integer tensors, elementwise) into an int64 key; the order of the parts matters."""
    hashed: int | Tensor = 0
    for part in parts:
        if isinstance(part, Tensor) and _plain(part):
            part = int(part)
        if isinstance(part, Tensor):
            before = hashed if isinstance(hashed, Tensor) else _signed(hashed)
            hashed = _mix(part.to(torch.int64) * _GOLDEN + before + _GOLDEN)
        elif isinstance(hashed, Tensor):
            hashed = _mix(hashed + _signed((part + 1) * _GOLDEN))
        else:  # the same in Python's integers: far fewer operations
            hashed = _mix_one(hashed + part * _GOLDEN + _GOLDEN)
    return hashed if isinstance(hashed, Tensor) else torch.tensor(_signed(hashed))


def _signed(number: int) -> int:
    number &= (1 << 64) - 1
    return number - (1 << 64) if number >> 63 else number


class Draws:
    """A stream of draws from one key: the i-th call, element j is a function of (key, i, j) alone.

    Element j does not depend on how many elements are asked for, so a client draws the same batches whether its data
    is padded to 50 rows in one block or to 500 in another. ``Draws(k, 1)`` draws from key(k, 1), which is not hashed
    before the first draw: most clients never use all the streams that they have.
    """

    def __init__(self, key: Tensor, domain: int | Tensor | None = None) -> None:
        self._key, self._domain = key, domain
        self._calls = 0
        self._plain: int | Literal[False] | None = None  # the key as an integer, where there is one to look at

    @property
    def used(self) -> bool:
        """Has anything been drawn from it?"""
        return self._calls > 0

    def fork(self, domain: int | Tensor) -> Draws:
        """An independent stream from the same key: draws from it change no draw here."""
        return Draws(self._key if self._domain is None else key(self._key, self._domain), domain)

    def bits(self, count: int) -> Tensor:
        """``count`` uniform 64-bit integers (as signed int64)."""
        stream = self._next()
        if isinstance(stream, int):  # the same integers in a quarter of the time
            return torch.from_numpy(_mix_many(stream, count).view(np.int64))
        return _mix(stream + torch.arange(1, count + 1, device=stream.device) * _GOLDEN)

    def bits_at(self, elements: Tensor) -> Tensor:
        """Those elements of a call of ``bits`` that have these numbers."""
        stream = self._next()
        return _mix((_signed(stream) if isinstance(stream, int) else stream) + (elements + 1) * _GOLDEN)

    def make_key(self) -> None:
        """Hash the key now: one that is hashed inside of ``grad`` belongs to it, and is of no use afterwards."""
        if self._domain is not None:
            self._key, self._domain = key(self._key, self._domain), None

    def _next(self) -> Tensor | int:
        self._calls += 1
        self.make_key()
        if self._plain is None:
            self._plain = int(self._key) if _plain(self._key) else False
        if self._plain is not False:
            return _mix_one(self._plain + self._calls * _GOLDEN)
        return _mix(self._key + _signed(self._calls * _GOLDEN))

    def uniform(self, *shape: int) -> Tensor:
        """Uniform floats in [0, 1), 24 random bits each."""
        high = (self.bits(math.prod(shape)) >> 40) & 0xFFFFFF
        return (high.to(torch.float32) * 2.0**-24).reshape(shape)

    def integers(self, bound: int | Tensor, *shape: int) -> Tensor:
        """Uniform integers in [0, bound); the bound may be a tensor (bias below bound / 2^31)."""
        high = (self.bits(math.prod(shape)) >> 33) & 0x7FFFFFFF
        return ((high * bound) >> 31).reshape(shape)

    def normal(self, *shape: int) -> Tensor:
        """Standard normal floats by Box and Muller's transform, two from one hash."""
        count = math.prod(shape)
        bits = self.bits((count + 1) // 2)
        if self._plain is not False:
            return torch.from_numpy(_normal_many(bits.numpy().view(np.uint64))[:count].reshape(shape))
        low, high = (half.to(torch.float32) for half in (bits & 0xFFFFFFFF, (bits >> 32) & 0xFFFFFFFF))
        first = (high + 0.5) * 2.0**-32
        angle = low * _TO_ANGLE
        radius = torch.sqrt(-2.0 * torch.log(first))
        pairs = torch.view_as_real(torch.complex(radius * torch.cos(angle), radius * torch.sin(angle)))
        return pairs.reshape(-1)[:count].reshape(shape)

    def permutation(self, n: Tensor | int, capacity: int) -> Tensor:
        """Indices [capacity] whose first ``n`` are a random permutation of 0..n-1 and the rest n..capacity-1."""
        order = self.bits(capacity) >> 1  # 63 bits, so that padding sorts behind every draw
        place = torch.arange(capacity, device=order.device)
        beyond = place >= n
        last = torch.iinfo(torch.int64).max - capacity + place
        return torch.argsort(torch.where(beyond, last, order & 0x3FFFFFFFFFFFFFFF), stable=True)
