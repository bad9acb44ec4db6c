"""Images in folders: ``client/class/image.png``, or ``client/image.png`` for a client without labels."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from unalike.core.notes import FLAG
from unalike.data.files.layout import RawRows
from unalike.data.source import Array, DataError

PICTURES = (".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp", ".tif", ".tiff")
_ORIENTATION = 0x0112  # how a camera was held (EXIF): pictures are read upright


def picture_folder(folder: Path, clients: list[Path], size: int | Sequence[int] | None) -> RawRows:
    """All images of all clients as uint8 [rows, channels, height, width]; grey unless one has colours."""
    found = {client.name: _pictures(client) for client in clients}
    empty = [name for name, pictures in found.items() if not pictures]
    if len(empty) == len(found):
        raise DataError(f"{folder}: no image was found; expected {folder.name}/client/class/image.png")
    files = [path for pictures in found.values() for path, _ in pictures]
    labels = [label for pictures in found.values() for _, label in pictures]
    owners = np.repeat(list(found), [len(pictures) for pictures in found.values()])
    return RawRows(read_pictures(files, size), np.array(labels) if any(labels) else None, owners, empty=empty)


def _pictures(client: Path) -> list[tuple[Path, str]]:
    """A client's images with their class (the folder's name; empty: none)."""
    found = []
    for entry in visible(client):
        found += [(path, entry.name) for path in visible(entry)] if entry.is_dir() else [(entry, "")]
    for path, _ in found:
        if not path.is_file() or path.suffix.lower() not in PICTURES:
            raise DataError(f"{path} is not an image; expected client/class/image with one of {', '.join(PICTURES)}")
    return found


def visible(folder: Path) -> list[Path]:
    """What a folder holds, in the order of names, but for hidden files."""
    return sorted(entry for entry in folder.iterdir() if not entry.name.startswith("."))


def read_pictures(files: list[Path], size: int | Sequence[int] | None = None) -> Array:
    """Image files as one uint8 array [rows, channels, height, width]; ``size`` scales to height × width."""
    try:
        from PIL import Image, ImageOps, UnidentifiedImageError
    except ImportError as error:
        raise DataError("reading image files needs Pillow: pip install 'unalike[data]'") from error
    wanted = None if size is None else (size, size) if isinstance(size, int) else tuple(size)
    if wanted is not None and (len(wanted) != 2 or min(wanted) < 1):
        raise DataError(f"size must be one number or height and width in pixels, got {size!r}")
    broken = (UnidentifiedImageError, OSError, SyntaxError, ValueError, Image.DecompressionBombError)
    shape: tuple[int, int] | None = None
    modes: list[str] = []
    for path in files:  # headers only: the pixels are read when the size of the array is known
        try:
            with Image.open(path) as image:
                modes.append(image.mode)
                found = (image.height, image.width)
                if image.getexif().get(_ORIENTATION, 1) >= 5:  # a quarter turn
                    found = (image.width, image.height)
        except broken as error:
            raise DataError(f"cannot read the image {path}: {error}") from error
        if modes[-1].startswith(("I", "F")):
            raise DataError(f"{path} has more than 8 bits a pixel ({modes[-1]}); save it with 8 bits, or use NPZ")
        if wanted is None and shape is not None and found != shape:
            common = min(*found, *shape)
            raise DataError(
                f"{path} is {found[0]}×{found[1]} pixels, {files[0]} is {shape[0]}×{shape[1]}; "
                f"give a common size, e.g. size={common}{FLAG}",
                "data.options.size",
            )
        shape = shape or found
    mode = "L" if all(m in ("1", "L", "LA") for m in modes) else "RGB"
    height, width = wanted or shape or (0, 0)
    x = np.empty((len(files), len(mode), height, width), dtype=np.uint8)
    for row, path in enumerate(files):
        try:
            with Image.open(path) as image:
                converted = ImageOps.exif_transpose(image).convert(mode)
                if (converted.height, converted.width) != (height, width):
                    converted = converted.resize((width, height), Image.Resampling.BILINEAR)
                pixels = np.asarray(converted)
        except broken as error:
            raise DataError(f"cannot read the image {path}: {error}") from error
        x[row] = pixels[None] if mode == "L" else pixels.transpose(2, 0, 1)
    return x
