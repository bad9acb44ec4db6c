"""Text for the user: it names settings by their keys in Python, with their flags on the command line; unknown names."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable

FLAG = "{flag}"  # in a message: here the command line names the flag of a setting, and Python names nothing


class Note(str):
    """Text for the user in which settings are named. As it is, it has no flags; ``shown`` puts them in.

    keys: the settings, dotted as in a recipe, one for each ``FLAG`` in the text. What runs and data say is free of
    flags; the command line, which has them, shows them.
    """

    template: str
    keys: tuple[str, ...]

    def __new__(cls, text: str, *keys: str) -> Note:
        made = super().__new__(cls, text.replace(FLAG, ""))
        made.template, made.keys = text, keys
        return made

    def with_flags(self, flag_of: Callable[[str], str]) -> str:
        """The text with the flags that set ``keys`` in their places."""
        text = self.template
        for key in self.keys:
            text = text.replace(FLAG, flag_of(key), 1)
        return text.replace(FLAG, "")


def join_notes(between: str, notes: Iterable[str]) -> Note:
    """Several notes as one."""
    parts = [note if isinstance(note, Note) else Note(note) for note in notes]
    return Note(between.join(part.template for part in parts), *(key for part in parts for key in part.keys))


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """The end of an error message about an unknown name: the known one nearest to it, else all there are."""
    names = list(known)
    small = {known.lower(): known for known in reversed(names)}  # papers write AdaPeD
    near = difflib.get_close_matches(name.lower(), small, 1)
    return f"; did you mean {small[near[0]]!r}?" if near else f"; there are: {', '.join(names) or 'none'}"


def printable(text: str, besides: str = "") -> str:
    """Somebody else's text, in which nothing may speak to a terminal."""
    return "".join(one if one.isprintable() or one in besides else "\N{REPLACEMENT CHARACTER}" for one in text)
