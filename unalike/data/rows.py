"""Moving many rows with little memory beside them: grouping by client, copying in pieces."""

from __future__ import annotations

import mmap
import tempfile
from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.random import Generator

from unalike.data.source import Array, DataError, Kind

_PIECE = 1 << 24  # numbers handled at once: 64 MB of float32
IN_MEMORY = 1 << 26  # numbers of a table; more are in a file that is mapped: 256 MB


def owners(sizes: Array) -> Array:
    """The client of each row when clients' rows follow one another."""
    return np.repeat(np.arange(len(sizes)), sizes)


def group(owner: Array, clients: int) -> tuple[Array | None, Array]:
    """Bring each client's rows together: the row order (None: they are already in order) and the client sizes.

    Rows with owner -1 belong to nobody and are left out.
    """
    used = owner >= 0
    sizes = np.bincount(owner[used] if not used.all() else owner, minlength=clients)
    if used.all() and bool((owner[1:] >= owner[:-1]).all()):
        return None, sizes
    order = np.argsort(owner, kind="stable")
    return order[len(owner) - int(sizes.sum()) :], sizes


def shuffle(rows: Array | None, sizes: Array, rng: Generator) -> Array:
    """Put each client's rows in random order: one sort of (client, random number) for all clients together."""
    key = owners(sizes).astype(np.uint64) << np.uint64(32)
    key |= rng.integers(1 << 32, size=len(key), dtype=np.uint64)
    order = np.argsort(key, kind="stable")
    shuffled: Array = order if rows is None else rows[order]
    return shuffled


def rank(sizes: Array) -> Array:
    """The position of each row inside its client."""
    position: Array = np.arange(int(sizes.sum())) - np.repeat(np.cumsum(sizes) - sizes, sizes)
    return position


def gather(name: str, x: Array, rows: Array | None, kind: Kind, overwrite: bool = False, gaps: bool = False) -> Array:
    """The rows of ``x`` in the wanted order and as the type the store keeps, checked for numbers that are not finite.

    Nothing is copied when ``x`` is already so. With ``overwrite`` the caller gives up ``x``, and rows that move only
    within their client are moved inside it. ``gaps``: numbers may be missing (NaN).
    """
    wanted = stored_type(name, x, kind)
    count = len(x) if rows is None else len(rows)
    in_place = x.dtype == wanted and x.flags.writeable and x.flags.c_contiguous
    if rows is None and in_place:
        _check_finite(name, x, None, gaps)
        return x
    if rows is not None and overwrite and in_place and count == len(x):
        cuts = _safe_cuts(rows, _step(x))
        if cuts is not None:
            for a, b in cuts:
                x[a:b] = x[rows[a:b]]
            _check_finite(name, x, rows, gaps)
            return x
    shape = (count, *x.shape[1:])
    out = np.empty(shape, wanted) if in_file(x) is None else empty_array(shape, wanted)
    with np.errstate(over="ignore", invalid="ignore"):  # what does not fit into float32 is found just below
        for a, b in pieces(count, _step(x)):
            out[a:b] = x[a:b] if rows is None else x[rows[a:b]]
            release(x)
    _check_finite(name, out, rows, gaps)
    return out


def fill_gaps(x: Array, sizes: Array, train: Array) -> Array:
    """Fill each client's missing numbers by the means of its own training rows, in place; True where one has none.

    Clients' rows follow one another, ``sizes`` of each, of which the first ``train`` are its training rows. What comes
    back is [clients, features] bool.
    """
    owner = owners(sizes)
    training = rank(sizes) < np.repeat(train, sizes)
    left = np.zeros((len(sizes), x.shape[1]), dtype=bool)
    for column in range(x.shape[1]):
        gone = np.isnan(x[:, column])
        if not gone.any():
            continue
        used = training & ~gone
        total = np.bincount(owner[used], weights=x[used, column], minlength=len(sizes))
        count = np.bincount(owner[used], minlength=len(sizes))
        mean = np.divide(total, count, out=np.full(len(sizes), np.nan), where=count > 0)
        x[gone, column] = mean[owner[gone]]
        left[owner[gone], column] |= count[owner[gone]] == 0
    return left


def empty_array(shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
    """A new array, in a temporary file that is mapped where it is large."""
    if np.prod(shape) <= IN_MEMORY:
        return np.empty(shape, dtype)
    with tempfile.TemporaryFile() as file:
        return np.memmap(file, dtype, "w+", shape=shape)


def stored_type(name: str, x: Array, kind: Kind) -> np.dtype[np.generic]:
    """The type of which the store keeps inputs."""
    if x.dtype.kind not in "buif":
        raise DataError(f"{name}: x must hold numbers, but its type is {x.dtype}")
    if kind == "tokens":
        if x.dtype.kind not in "ui":
            raise DataError(f"{name}: tokens must be whole numbers, but the type of x is {x.dtype}")
        return np.dtype(np.int64)
    return np.dtype(np.uint8) if x.dtype == np.uint8 else np.dtype(np.float32)


def in_file(x: Array) -> mmap.mmap | None:
    """The part of a file that an array is mapped from; None: it is in memory."""
    owner: object = x
    while isinstance(owner, np.ndarray):
        owner = owner.base
    return owner if isinstance(owner, mmap.mmap) else None


def release(x: Array) -> None:
    """Let go of the memory of an array that is mapped from a file; it is read again when it is needed."""
    file = in_file(x)
    if file is not None and hasattr(mmap, "MADV_DONTNEED"):  # not on every system
        file.madvise(mmap.MADV_DONTNEED)


def _step(x: Array) -> int:
    return max(1, _PIECE // max(1, int(np.prod(x.shape[1:]))))


def pieces(count: int, step: int) -> Iterator[tuple[int, int]]:
    """The ranges that cover ``count`` rows, ``step`` at a time."""
    for a in range(0, count, step):
        yield a, min(count, a + step)


def _safe_cuts(rows: Array, step: int) -> list[tuple[int, int]] | None:
    """Ranges a..b whose new rows all come from a..b, so that they can be moved in place; None: there are too few."""
    closed = np.flatnonzero(np.maximum.accumulate(rows) == np.arange(len(rows))) + 1  # all rows before are from before
    cuts, a = [], 0
    while a < len(rows):
        reachable = closed[np.searchsorted(closed, a + step, side="right") - 1]
        b = int(reachable) if reachable > a else int(closed[np.searchsorted(closed, a, side="right")])
        if b - a > 8 * step:
            return None
        cuts.append((a, b))
        a = b
    return cuts


def _check_finite(name: str, x: Array, rows: Array | None, gaps: bool) -> None:
    if x.dtype.kind != "f":
        return
    for a, b in pieces(len(x), _step(x)):
        finite = ~np.isinf(x[a:b]) if gaps else np.isfinite(x[a:b])
        if not finite.all():
            bad = np.argwhere(~finite)
            at = int(bad[0][0]) + a
            row = at if rows is None else int(rows[at])
            where = f"data row {row + 1}, position {tuple(int(i) for i in bad[0][1:])}"
            raise DataError(
                f"{name}: x holds numbers that are missing (NaN), infinite or too large for float32, e.g. at {where}; "
                f"fill or remove them first"
            )
