"""What was released of a newcomer's rows so far: a small file that is kept with its data."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from unalike.core.disk import locked
from unalike.data.source import Array
from unalike.privacy import Ledger
from unalike.runs import folder
from unalike.runs.errors import UserError

ABOUT_LEDGER = (
    "What was released of a newcomer's rows by `unalike personalize --epsilon`. Each row goes by a hash of its values, "
    "from which they can be guessed: keep this file with the data, and as private."
)


def path_beside(data: Path, ending: str) -> Path:
    """A file beside the data, and called like it."""
    if data.name in ("", ".."):
        raise UserError(f"--data {data}: expected the newcomer's file, or a folder by its name, e.g. --data mine.npz")
    return data.with_name(data.name.split(".")[0] + ending)


def file_word(client: str) -> str:
    """A client's name as a part of a file's name."""
    word = "".join(sign if sign.isalnum() or sign in "-_." else "_" for sign in client).lstrip(".")
    return word[:60] or "client"


def read_ledger(file: Path) -> tuple[Ledger, float]:
    """What was released of a newcomer's rows before, and the smallest δ of it; empty and 1 if there is no file yet."""
    if not file.exists():
        return Ledger(), 1.0
    content = folder.read_json(file)
    try:
        if content["about"] != ABOUT_LEDGER:  # a run's own ledger, for example
            raise ValueError("it is about something else")
        return Ledger.from_state(content), float(content["delta"])
    except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
        raise UserError(
            f"{file}: expected a ledger that `unalike personalize` wrote, but it cannot be read as one "
            f"({type(error).__name__}: {error}). With --ledger FILE another one is begun, which knows nothing of what "
            "was spent before"
        ) from error


def add(file: Path, release: Ledger, rows: Sequence[str], delta: float) -> tuple[float, float]:
    """Add a release of these rows to a newcomer's ledger file; their (ε, δ) by all releases in there.

    Each row has an account of its own: rows that come again, also beside others, are recognised if the runs read the
    same columns, and what was released of other rows does not count. δ is the smallest of all calls, because a total at
    a larger one could be less than what was told before.
    """
    with locked(file.parent):
        before, smallest = read_ledger(file)
        ledger, delta = before + release, min(smallest, delta)
        folder.write_json(file, {"about": ABOUT_LEDGER, "delta": delta, **ledger.state()})
    return max(ledger.epsilon(delta, newcomer=row) for row in rows), delta


def row_names(x: Array, gaps: Array | None = None) -> list[str]:
    """A name for each different row that is the same in every call to a run that reads the same columns.

    ``gaps``: [n, ...] which values are not the newcomer's own, because each run fills a gap by a mean of its own.
    """
    rows = x.astype(np.float64) + 0.0  # -0.0 is 0.0
    if gaps is not None:
        rows[gaps] = np.nan
    names = (hashlib.sha256(row.tobytes()).hexdigest()[:16] for row in rows)
    return list(dict.fromkeys(names))
