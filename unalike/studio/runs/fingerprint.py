"""A fingerprint of the clients' data, so that a run never goes on with other data than it began with.

It is made with a secret key and stays with the clients, in their part of the run folder: without the key nobody can
try out whether some data has these digests.
"""

from __future__ import annotations

import hmac
import secrets
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from unalike.data.population import Population
from unalike.data.source import Array, Names
from unalike.studio.errors import UserError
from unalike.studio.runs.folder import CLIENTS, read_json, write_json
from unalike.studio.words import counted

FILE = "fingerprint.json"
_PIECE = 1 << 24  # bytes that are hashed at once
_DIGESTS = ("names", "sizes", "inputs", "labels")


def save(folder: Path, population: Population) -> None:
    """Write the fingerprint of a run that begins, for its owner alone."""
    (folder / CLIENTS).mkdir(exist_ok=True)
    key = secrets.token_bytes(32)
    write_json(folder / CLIENTS / FILE, {"key": key.hex(), **_fingerprint(population, key)}, mode=0o600)


def check(folder: Path, population: Population) -> None:
    """Refuse to go on with other data, and say what is different."""
    file = folder / CLIENTS / FILE
    if not file.exists():
        raise UserError(f"{file} is missing, so nobody knows whether the data is the same; restore it, or run anew")
    then = read_json(file)
    try:
        now = _fingerprint(population, bytes.fromhex(then["key"]))
        changed = _changes(then, now)
    except (KeyError, TypeError, ValueError) as error:
        raise UserError(
            f"{file} is damaged ({type(error).__name__}: {error}); restore it, or repeat the run"
        ) from error
    if changed:
        raise UserError(
            f"the data of {folder} has changed since the run began: {', '.join(changed)}. A run goes on with the data "
            f"that it began with: restore that, or start a new run with another --out"
        )


def _changes(then: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    found = []
    for what in ("client", "row"):
        more = int(now[f"{what}s"]) - int(then[f"{what}s"])
        if more:
            found.append(f"{counted(abs(more), what)} {'more' if more > 0 else 'fewer'}")
    return found + [f"{what} differ" for what in _DIGESTS if not hmac.compare_digest(str(then[what]), str(now[what]))]


def _fingerprint(population: Population, key: bytes) -> dict[str, Any]:
    """Numbers of clients and rows, and a digest (HMAC-SHA256) of each thing that must stay as it was."""
    train, parts = population.train, population.parts.values()
    sizes = [tensor for part in parts for tensor in (part.start, part.size)] + [population.seen, population.unseen]
    labels = [train.labeled, population.test.labeled, *(() if train.y is None else (train.y,))]
    content: dict[str, Iterable[Array]] = {
        "names": [_names(population)],
        "sizes": map(_array, sizes),
        "inputs": [_array(train.x)],
        "labels": map(_array, labels),
    }
    counts = {"clients": len(population), "rows": int(population.sizes.sum())}
    return {**counts, **{what: _digest(key, what, arrays) for what, arrays in content.items()}}


def _array(tensor: Tensor) -> Array:
    return tensor.detach().cpu().numpy()


def _names(population: Population) -> Array:
    names = population.train.names
    if isinstance(names, Names):
        return names.values
    return np.array(list(names) if names is not None else [], dtype=str)


def _digest(key: bytes, what: str, arrays: Iterable[Array]) -> str:
    made = hmac.new(key, what.encode(), "sha256")
    for array in arrays:
        made.update(f"{array.dtype.str}{array.shape}".encode())
        step = max(1, _PIECE // max(1, array[:1].nbytes))
        for begin in range(0, len(array), step):  # in pieces, so that rows that do not lie together are not all copied
            made.update(np.ascontiguousarray(array[begin : begin + step]).view(np.uint8).data)
    return made.hexdigest()
