"""Errors for the user: the command line prints their message, which says what to do, without a traceback."""

from __future__ import annotations

import signal
from pathlib import Path

from unalike.core.notes import FLAG, Note

__all__ = ["FLAG", "Diverged", "Interrupted", "Note", "UserError"]


class UserError(Exception):
    """Something that the user can put right; the message says what was expected, what came and what to do.

    keys: the settings that it names, as in a ``Note``.
    """

    def __init__(self, message: str, *keys: str) -> None:
        self.note = Note(message, *keys)
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
