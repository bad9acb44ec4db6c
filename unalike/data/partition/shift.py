"""Shifts by client: all its images are turned by an angle of its own, or all its labels moved on by a number."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.random import Generator
from scipy import ndimage

from unalike.data.source import Array, DataError

QUARTERS = (0, 90, 180, 270)  # T1 §5.6.1


def draw_kinds(clients: int, rng: Generator, kinds: int, counts: Sequence[int] | None, name: str, what: str) -> Array:
    """One of so many kinds for each client: at random, or ``counts[k]`` clients of each (in random places)."""
    if kinds < 1:
        raise DataError(f"{name} needs {what}, at least one")
    if counts is None:
        return rng.integers(kinds, size=clients)
    if len(counts) != kinds or sum(counts) != clients:
        raise DataError(
            f"{name}: counts must name how many of the {clients} clients get each of the {kinds} {what}, "
            f"got {list(counts)} (sum {sum(counts)})"
        )
    return rng.permutation(np.repeat(np.arange(kinds), counts))


def rotate_clients(x: Array, sizes: Array, which: Array, angles: Sequence[float]) -> None:
    """Turn the images [rows, channels, height, width] of each client, in place; clients' rows follow one another."""
    if x.ndim != 4:
        raise DataError(f"rotation needs images [rows, channels, height, width], but x has shape {tuple(x.shape)}")
    group = np.repeat(which, sizes)
    for number, angle in enumerate(angles):
        rows = np.flatnonzero(group == number)
        if angle % 360 == 0 or len(rows) == 0:
            continue
        for piece in np.array_split(rows, max(1, len(rows) // 4096)):  # small pieces: little memory beside x
            x[piece] = rotate(x[piece], angle)


def rotate(images: Array, angle: float) -> Array:
    """Images turned counter-clockwise; quarter turns of squares are exact, others are interpolated linearly."""
    height, width = images.shape[-2:]
    if angle % 180 == 0 or (angle % 90 == 0 and height == width):
        return np.rot90(images, k=int(angle // 90), axes=(-2, -1))
    turned = ndimage.rotate(images.astype(np.float32), angle, axes=(-1, -2), reshape=False, order=1, mode="nearest")
    if images.dtype == np.uint8:
        turned = np.clip(np.rint(turned), 0, 255)
    result: Array = turned.astype(images.dtype)
    return result
