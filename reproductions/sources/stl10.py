"""STL-10, whose nine classes of CIFAR-10 are newcomers to a run on CIFAR-10 in P2 §6.8."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from unalike.data.files.archive import reading
from unalike.data.source import Array, DataError, Source
from unalike.data.sources.folder import File, locate
from unalike.data.sources.images import CIFAR_CLASSES, CIFAR_SCALE, image_source, read_members

STL_ARCHIVE = File(
    "stl-10/stl10_binary.tar.gz",
    "f31fd99273a1acb8609c8db427cebb1de3f71de77758cdc0e22956e1289b9866",
    "https://cs.stanford.edu/~acoates/stl10/stl10_binary.tar.gz",
)
_STL_CLASSES = ["airplane", "bird", "car", "cat", "deer", "dog", "horse", "monkey", "ship", "truck"]


def stl10(classes: str = "stl-10", size: int = 96) -> Source:
    """13,000 labeled colour pictures of 96×96 pixels in 10 classes; Coates, Ng and Lee 2011.

    ``size``: 96, or a divisor of it, to which blocks of pixels are averaged. ``classes="cifar-10"``: the nine classes
    that CIFAR-10 has too, numbered and scaled as there (monkeys are left out, and no picture shows a frog), for
    newcomers to a run on CIFAR-10 (P2 §6.8, with ``size=32``).
    """
    if classes not in ("stl-10", "cifar-10"):
        raise DataError(f"stl-10: classes must be 'stl-10' or 'cifar-10', got {classes!r}")
    if size < 1 or 96 % size:
        raise DataError(f"stl-10: size must divide 96, for example 32 or 48, got {size}")
    parts = read_stl_archive(locate(STL_ARCHIVE, "stl-10"), STL_ARCHIVE.sha256)
    x, y = (np.concatenate(arrays) for arrays in zip(*parts, strict=True))
    is_test = np.arange(len(x)) >= len(parts[0][0])
    if size < 96:
        times = 96 // size
        means = x.reshape(-1, 3, size, times, size, times).mean((3, 5), dtype=np.float32)
        x = np.rint(means).astype(np.uint8)
    if classes == "stl-10":
        scale = 255 * np.array([[0.446711, 0.439810, 0.406646], [0.260341, 0.256577, 0.271267]])
        return image_source("stl-10", x, y, _STL_CLASSES, *scale, is_test=is_test)
    renamed = ["automobile" if name == "car" else name for name in _STL_CLASSES]
    number = np.array([CIFAR_CLASSES.index(name) if name in CIFAR_CLASSES else -1 for name in renamed])[y]
    keep = number >= 0
    return image_source("stl-10", x[keep], number[keep], CIFAR_CLASSES, *CIFAR_SCALE, is_test=is_test[keep])


def read_stl_archive(path: Path, sha256: str | None = None) -> list[tuple[Array, Array]]:
    """Training and test part: bytes of red, green and blue, column by column; labels from 1."""
    parts = []
    with reading(path, sha256):
        raw = read_members(path, [f"stl10_binary/{part}_{what}.bin" for part in ("train", "test") for what in "Xy"])
        for pixels, labels in zip(raw[::2], raw[1::2], strict=True):
            x = np.frombuffer(pixels, np.uint8).reshape(-1, 3, 96, 96).transpose(0, 1, 3, 2)
            y = np.frombuffer(labels, np.uint8).astype(np.int64) - 1
            if len(x) != len(y) or (len(y) and not 0 <= int(y.min()) <= int(y.max()) < 10):
                raise ValueError(f"{len(x)} images have {len(y)} labels, which must be 1 to 10")
            parts.append((x, y))
    return parts
