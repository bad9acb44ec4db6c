"""Help after a typo."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def nearest(name: str, known: Iterable[str]) -> str:
    """The end of an error message about an unknown name: the known one nearest to it, else all there are."""
    names = list(known)
    small = {known.lower(): known for known in reversed(names)}  # papers write AdaPeD
    near = difflib.get_close_matches(name.lower(), small, 1)
    return f"; did you mean {small[near[0]]!r}?" if near else f"; there are: {', '.join(names) or 'none'}"
