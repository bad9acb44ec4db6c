"""Reads NPZ archives and turns what a damaged file makes a reader raise into one clear error."""

from __future__ import annotations

import hashlib
import os
import tarfile
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from unalike.data.source import DataError

# A zip that is encrypted or of another version gives a RuntimeError.
_DAMAGE = (OSError, EOFError, ValueError, KeyError, RuntimeError, zlib.error, zipfile.BadZipFile, tarfile.TarError)


@contextmanager
def reading(path: Path, sha256: str | None = None) -> Iterator[None]:
    """Turn what a damaged file makes numpy, gzip or json raise into one clear error."""
    try:
        yield
    except DataError:
        raise
    except _DAMAGE as error:
        problem = str(error) or type(error).__name__
        if isinstance(error, UnicodeDecodeError):
            problem = f"it is not UTF-8 text ({problem}); save it as UTF-8"
        if sha256 is None:
            raise DataError(f"cannot read {path}: {problem}") from error
        actual = checksum(path)
        verdict = (
            f"its sha256 is {actual}, expected {sha256}: delete it and fetch it again"
            if actual != sha256
            else "its checksum is right, so this is a fault of Unalike: please report it"
        )
        raise DataError(f"cannot read {path} ({problem}); {verdict}") from error


@contextmanager
def open_npz(path: Path, sha256: str | None = None) -> Iterator[np.lib.npyio.NpzFile]:
    """The arrays of an NPZ file; Python objects inside are never loaded."""
    with reading(path, sha256), path.open("rb") as file:
        # Asked first, because numpy takes any other bytes for a pickle.
        if file.read(2) != b"PK" or not zipfile.is_zipfile(file):
            raise ValueError("it is truncated or not an NPZ archive; save it again with numpy.savez")
        file.seek(0)
        archive = np.load(file, allow_pickle=False)
        with archive:
            yield archive


def mapped_npz(path: Path, name: str) -> NDArray[Any] | None:
    """An array of an NPZ file, mapped and not read; None where it is compressed, in another order, or not there."""
    with open_npz(path), zipfile.ZipFile(path) as archive, path.open("rb") as file:
        inside = next((one for one in archive.infolist() if one.filename == f"{name}.npy"), None)
        if inside is None or inside.compress_type != zipfile.ZIP_STORED:
            return None
        file.seek(inside.header_offset)
        head = file.read(30)  # of the member: its name and its extra field follow, as long as the last four bytes say
        file.seek(int.from_bytes(head[26:28], "little") + int.from_bytes(head[28:30], "little"), os.SEEK_CUR)
        version = np.lib.format.read_magic(file)
        read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
        shape, fortran, dtype = read(file)
        if fortran or dtype.hasobject or version not in ((1, 0), (2, 0)) or 0 in shape:
            return None
        return np.memmap(path, dtype, "r", file.tell(), shape)


def checksum(path: Path) -> str:
    """The sha256 of a file's bytes."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
