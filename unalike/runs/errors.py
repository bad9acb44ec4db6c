"""Errors for the user: the command line prints their message, which says what to do, without a traceback."""

from __future__ import annotations

import contextlib
import errno
import signal
from collections.abc import Iterator
from pathlib import Path

from unalike.core.notes import FLAG, Note

__all__ = ["FLAG", "Diverged", "Interrupted", "Note", "UserError", "explain_disk_errors"]


class UserError(Exception):
    """Something that the user can put right; the message says what was expected, what came and what to do.

    keys: the settings that it names, as in a ``Note``.
    """

    def __init__(self, message: str, *keys: str) -> None:
        self.note = message if isinstance(message, Note) else Note(message, *keys)
        super().__init__(str(self.note))


class Diverged(UserError):
    """Training ended because numbers ran away; other runs of a comparison go on."""


class Interrupted(Exception):
    """A run or comparison was asked to stop and has done so after a whole round; it can go on from its folder.

    ``by`` is the signal that asked.
    """

    def __init__(self, after: str, folder: Path | None, by: int | None = None) -> None:
        self.by = by or int(signal.SIGINT)
        resume = "" if folder is None else f" Go on with: unalike resume {folder}"
        super().__init__(f"stopped after {after}.{resume}")


@contextlib.contextmanager
def explain_disk_errors(folder: Path, again: str | None = None) -> Iterator[None]:
    """Turn what the operating system says about files into a sentence and advice.

    ``again`` is the command to repeat, where neither ``unalike resume`` nor another folder would help.
    """
    try:
        yield
    except OSError as error:
        if error.errno is None:
            raise
        where = error.filename or folder
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise UserError(
                f"the disk is full: {where} could not be written. Nothing that was there is lost; free some space, "
                f"then go on with: {again or f'unalike resume {folder}'}"
            ) from error
        if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
            advice = f"choose another folder{FLAG}" if again is None else f"change that, then repeat: {again}"
            raise UserError(f"no permission to write {where}; {advice}", "out") from error
        raise UserError(f"cannot use {where}: {error.strerror}") from error
