"""Files that are either whole or not there, whatever happens while they are written."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterator
from pathlib import Path


def part_file(file: Path) -> Path:
    """Where a file is written before it takes its name."""
    return file.with_name(f".{file.name}.part")


def write_whole(file: Path, content: bytes, mode: int = 0o600, durable: bool = True) -> None:
    """Write a file so that a crash at any moment leaves the old one or the new one; ``mode``: who may read it.

    Not ``durable``: so it is if this process crashes, but a power cut may leave an empty file. It saves waiting for the
    disk.
    """
    fresh = part_file(file)
    try:
        with open(os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, mode), "wb") as stream:
            stream.write(content)
            stream.flush()
            if durable:
                os.fsync(stream.fileno())
        fresh.replace(file)
    except BaseException:
        fresh.unlink(missing_ok=True)
        raise
    if not durable:
        return
    # the renaming itself must survive a power cut, too; not every system lets one ask for that
    with contextlib.suppress(OSError):
        handle = os.open(file.parent, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def check_writable(file: Path) -> None:
    """Fail as ``write_whole`` would, before long work instead of after it."""
    if file.is_dir():
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(file))
    trial = part_file(file)
    trial.open("wb").close()
    trial.unlink()


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """One process at a time: of two that read a file here and replace it, the later would lose what the other wrote."""
    try:
        import fcntl
    except ImportError:  # where there are no such locks
        yield
        return
    handle = os.open(folder.absolute(), os.O_RDONLY)  # the folder, because its files are replaced when they are written
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)
