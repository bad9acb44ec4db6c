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

from unalike.data.population import Population
from unalike.data.source import Array, Names
from unalike.runs.absent import Absent
from unalike.runs.errors import FLAG, UserError
from unalike.runs.folder import CLIENTS, read_json, write_json
from unalike.runs.words import counted

FILE = "fingerprint.json"
_DIGESTS = ("names", "sizes", "inputs", "labels")


def key_of(folder: Path | None) -> bytes:
    """The key of a run's fingerprint; a new one for a run that has none yet."""
    file = None if folder is None else folder / CLIENTS / FILE
    if file is None or not file.exists():
        return secrets.token_bytes(32)
    try:
        return bytes.fromhex(read_json(file)["key"])
    except (KeyError, TypeError, ValueError) as error:
        raise _damage(file, error) from error


def save(folder: Path, population: Population) -> None:
    """Write the fingerprint of a run that begins, for its owner alone."""
    (folder / CLIENTS).mkdir(exist_ok=True)
    key = population.key if isinstance(population, Absent) else secrets.token_bytes(32)
    write_json(folder / CLIENTS / FILE, {"key": key.hex(), **of(population, key)}, mode=0o600)


def check(folder: Path, population: Population) -> None:
    """Refuse to go on with other data, and say what is different."""
    file = folder / CLIENTS / FILE
    if not file.exists():
        raise UserError(f"{file} is missing, so nobody knows whether the data is the same; restore it, or run anew")
    then = read_json(file)
    try:
        now = of(population, bytes.fromhex(then["key"]))
        changed = _changes(then, now)
    except (KeyError, TypeError, ValueError) as error:
        raise _damage(file, error) from error
    if changed:
        raise UserError(
            f"the data of {folder} has changed since the run began: {', '.join(changed)}. A run goes on with the data "
            f"that it began with: restore that, or start a new run in another folder{FLAG}",
            "out",
        )


def _changes(then: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    found = []
    for what in ("client", "row"):
        more = int(now[f"{what}s"]) - int(then[f"{what}s"])
        if more:
            found.append(f"{counted(abs(more), what)} {'more' if more > 0 else 'fewer'}")
    return found + [f"{what} differ" for what in _DIGESTS if not hmac.compare_digest(str(then[what]), str(now[what]))]


def _damage(file: Path, error: Exception) -> UserError:
    return UserError(f"{file} is damaged ({type(error).__name__}: {error}); restore it, or repeat the run")


def of(population: Population, key: bytes, inputs: Iterable[Array] | None = None) -> dict[str, Any]:
    """Numbers of clients and rows, and a digest (HMAC-SHA256) of each thing that must stay as it was.

    inputs: those of the population in pieces, where it does not have them itself.
    """
    if isinstance(population, Absent):  # whoever has the rows made it, with the same key
        if population.key != key:
            raise ValueError("the workers made the fingerprint with another key")
        return dict(population.fingerprint)
    train, parts = population.train, population.parts.values()
    sizes = [tensor for part in parts for tensor in (part.start, part.size)] + [population.seen, population.unseen]
    labels = [train.labeled, population.test.labeled, *(one for one in (train.y, train.known) if one is not None)]
    names = train.names.values if isinstance(train.names, Names) else np.array(list(train.names or []), dtype=str)
    content = {"names": [names], "sizes": [one.numpy() for one in sizes], "labels": [one.numpy() for one in labels]}
    x = [train.x.numpy()] if inputs is None else inputs
    return {
        "clients": len(population),
        "rows": int(population.sizes.sum()),
        "inputs": _digest(key, "inputs", x, f"{train.x[:1].numpy().dtype.str}{tuple(train.x.shape)}"),
        **{what: _digest(key, what, arrays) for what, arrays in content.items()},
    }


def _digest(key: bytes, what: str, arrays: Iterable[Array], pieces_of: str | None = None) -> str:
    """The digest of arrays, or of the pieces of one array whose type and shape are given."""
    made = hmac.new(key, what.encode(), "sha256")
    made.update((pieces_of or "").encode())
    for array in arrays:
        if pieces_of is None:
            made.update(f"{array.dtype.str}{array.shape}".encode())
        made.update(np.ascontiguousarray(array).view(np.uint8).data)
    return made.hexdigest()
