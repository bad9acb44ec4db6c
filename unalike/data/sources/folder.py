"""The folder that data sets are read from, and the download of those that are not there yet."""

from __future__ import annotations

import hashlib
import os
import tempfile
import urllib.error
import urllib.request
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from unalike.data.source import DataError

VARIABLE = "UNALIKE_DATA"
_TIMEOUT = 30.0  # seconds without an answer


@dataclass(frozen=True)
class File:
    """One file of a data set: where it lies below the data folder and where it officially comes from."""

    path: str  # below the data folder
    sha256: str | None = None  # None: not published
    url: str | None = None  # None: there is no single official file to fetch, or none that a program can fetch
    md5: str | None = None  # where only that is published

    def __post_init__(self) -> None:
        if self.url is not None and self.sha256 is None and self.md5 is None:
            raise ValueError(f"{self.path}: a file is downloaded only if a checksum of it is known")


def data_folder() -> Path:
    """``UNALIKE_DATA`` if it is set, else ``data`` in Unalike's cache (``UNALIKE_CACHE``, or below the user's home)."""
    chosen = os.environ.get(VARIABLE)
    if chosen:
        return Path(chosen).expanduser()
    return Path(os.environ.get("UNALIKE_CACHE") or Path.home() / ".cache" / "unalike") / "data"


def present(*files: File) -> bool:
    """Whether all of these files are in the data folder."""
    return all((data_folder() / file.path).is_file() for file in files)


def locate(file: File, name: str, how: str = "") -> Path:
    """The path of a file, downloaded first if it is missing and has an official address.

    ``how`` says in the error how to get a file that has none.
    """
    folder = data_folder()
    path = folder / file.path
    if path.is_file():
        return path
    setting = f"{VARIABLE} is {os.environ[VARIABLE]!r}" if os.environ.get(VARIABLE) else f"{VARIABLE} is not set"
    missing = f"data set {name!r}: {setting}, so the folder looked in is {folder}; {file.path} is not there"
    if file.url is None:
        raise DataError(f"{missing}. {how} Then set {VARIABLE} to the folder that holds {file.path}.")
    try:
        download(file.url, path, file.sha256, file.md5)
    except urllib.error.URLError as error:
        raise DataError(
            f"{missing}, and it could not be downloaded from {file.url} ({error.reason}). Without a network, "
            f"put the file there by hand or set {VARIABLE} to a folder that has it."
        ) from error
    except OSError as error:
        raise DataError(
            f"{missing}, and the download from {file.url} failed ({error}). Set {VARIABLE} to a folder that can be "
            f"written, or put the file there by hand."
        ) from error
    return path


def download(url: str, path: Path, sha256: str | None, md5: str | None = None) -> None:
    """Fetch a file; it appears under its name only when it is complete and its checksum is right."""
    path.parent.mkdir(parents=True, exist_ok=True)
    name, expected = ("sha256", sha256) if sha256 is not None else ("md5", md5)
    digest = hashlib.new(name, usedforsecurity=False)  # md5: it finds damage, and is all that is published
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=path.name + ".")
    try:
        with os.fdopen(handle, "wb") as out, urllib.request.urlopen(url, timeout=_TIMEOUT) as answer:
            while chunk := answer.read(1 << 20):
                digest.update(chunk)
                out.write(chunk)
        if digest.hexdigest() != expected:
            raise DataError(
                f"what {url} sent is not the expected file: its {name} is {digest.hexdigest()}, expected {expected}. "
                f"Nothing was kept. Try again, or put the right file at {path} by hand."
            )
        os.replace(temporary, path)
    finally:
        with suppress(FileNotFoundError):
            os.unlink(temporary)
