"""What may cross a wire: named arrays and plain values, never code. Encoded as safetensors, sizes bounded."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

Plain = bool | int | float | str | None
MAX_BYTES = 1 << 31  # of one message; a larger model than this does not fit a message in any runtime
MAX_NAMES = 4096
MAX_VALUES = 1 << 26  # bytes of plain values: the names or the failures of a million clients
DTYPES = {  # of arrays that may cross: PyTorch computes with all of them
    torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64,
    torch.float16, torch.bfloat16, torch.float32, torch.float64,
}  # fmt: skip
_VALUES = "values"  # the metadata entry that holds the plain values, as JSON


class WireError(ValueError):
    """A message that cannot be sent, or bytes that are not a message."""


def check(name: str, value: Tensor) -> None:
    """Refuse an array that no message carries."""
    if value.dtype not in DTYPES or value.layout != torch.strided or value.is_quantized:
        raise WireError(f"{name!r} is a {value.dtype} tensor ({value.layout}); only dense real arrays are sent")


class Lacking(Exception):
    """Arrays that a request names are not here (any more); send them along."""

    def __init__(self, digests: Sequence[str]) -> None:
        super().__init__(", ".join(digests))
        self.digests = digests


def digest(value: Tensor) -> str:
    """Names an array by its content."""
    content = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    return hashlib.sha256(f"{value.dtype}{list(value.shape)}".encode() + content.numpy().tobytes()).hexdigest()


class ArrayStore:
    """Arrays of earlier asks by their digests; the latest ones stay, up to ``most`` bytes."""

    def __init__(self, most: int = 1 << 28) -> None:
        self._most, self._arrays = most, dict[str, Tensor]()

    def take(self, names: Iterable[str], sent: Iterable[bytes] = ()) -> dict[str, Tensor]:
        """Copies of the arrays of these digests, of those that were sent now or are still here; else ``Lacking``.

        Copies, because a task may change its inputs in place, and a later ask gets what the digest says. What was sent
        stays here even where another array is lacking.
        """
        arrays = [value for message in sent for value in decode(message).values() if isinstance(value, Tensor)]
        known = self._arrays | {digest(value): value for value in arrays}  # nobody's word is taken for a digest
        wanted = list(dict.fromkeys(names))
        found = {name: known[name] for name in wanted if name in known}
        self._arrays = {name: value for name, value in known.items() if name not in found} | found
        while self._arrays and sum(value.nbytes for value in self._arrays.values()) > self._most:
            del self._arrays[next(iter(self._arrays))]
        if missing := [name for name in wanted if name not in found]:
            raise Lacking(missing)
        return {name: value.clone() for name, value in found.items()}


def encode(message: Mapping[str, Tensor | Plain], max_bytes: int = MAX_BYTES) -> bytes:
    """A message as bytes. Anything but a tensor or a plain value (bool, int, float, str, None) is refused."""
    arrays: dict[str, Tensor] = {}
    values: dict[str, Plain] = {}
    for name, value in message.items():
        if isinstance(value, Tensor):
            check(name, value)
            arrays[name] = value.detach().contiguous()
        elif isinstance(value, Plain):
            values[name] = value
        else:
            raise WireError(f"{name!r} is a {type(value).__name__}; only tensors and plain values are sent")
    size = sum(array.nbytes for array in arrays.values())
    if size > max_bytes or len(message) > MAX_NAMES:
        raise WireError(f"a message of {size:,} bytes and {len(message)} names is over {max_bytes:,} or {MAX_NAMES}")
    # safetensors refuses tensors that share memory, so a view of another entry is copied
    seen: set[int] = set()
    for name, array in arrays.items():
        pointer = array.untyped_storage().data_ptr()
        arrays[name] = array.clone() if pointer in seen else array
        seen.add(pointer)
    text = json.dumps(values)
    if len(text) > MAX_VALUES // 2:  # they are escaped once more in the header
        raise WireError(f"a message with {len(text):,} bytes of plain values is over {MAX_VALUES // 2:,}")
    return save(arrays, {_VALUES: text})


def decode(data: bytes, max_bytes: int = MAX_BYTES) -> dict[str, Tensor | Plain]:
    """The message in these bytes, or a ``WireError`` that says what is wrong with them."""
    if len(data) > max_bytes + MAX_VALUES:
        raise WireError(f"a message of {len(data):,} bytes is over the limit of {max_bytes:,}")
    try:
        header_size = int.from_bytes(data[:8], "little")
        if len(data) < 8 or header_size > min(len(data), MAX_VALUES):
            raise WireError(f"{len(data)} bytes do not begin with a header")
        header = json.loads(data[8 : 8 + header_size])
        if not isinstance(header, dict) or len(header) > MAX_NAMES:
            raise WireError("the header is not a table of names, or has too many")
        values = json.loads(header.get("__metadata__", {}).get(_VALUES, "{}"))
        arrays = load(data)
    except WireError:
        raise
    except (SafetensorError, ValueError, AttributeError, KeyError, TypeError, RecursionError, RuntimeError) as error:
        raise WireError(f"malformed message: {error}") from error
    if not isinstance(values, dict) or not all(isinstance(value, Plain) for value in values.values()):
        raise WireError("the message's plain values are not a table of plain values")
    for name, value in arrays.items():
        check(name, value)
    return {**values, **arrays}
