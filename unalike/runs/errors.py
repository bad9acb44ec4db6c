"""Errors for the user: the command line prints their message, which says what to do, without a traceback."""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path

FLAG = "{flag}"  # in a message: here the command line names the flag of a setting, and Python names nothing


class Note(str):
    """Text for the user in which settings are named. As it is, it has no flags; ``shown`` puts them in.

    keys: the settings, dotted as in a recipe, one for each ``FLAG`` in the text. What runs and data say is free of
    flags; the command line, which has them, shows them.
    """

    _template: str
    keys: tuple[str, ...]

    def __new__(cls, text: str, *keys: str) -> Note:
        made = super().__new__(cls, text.replace(FLAG, ""))
        made._template, made.keys = text, keys
        return made

    def shown(self, flag_of: Callable[[str], str]) -> str:
        """The text with the flags that set ``keys`` in their places."""
        text = self._template
        for key in self.keys:
            text = text.replace(FLAG, flag_of(key), 1)
        return text.replace(FLAG, "")


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
