"""Numbers and lists as people write them: one way for the terminal, the report and the figures."""

from __future__ import annotations

import math
from collections.abc import Sequence


def size(count: float) -> str:
    """Bytes with a decimal unit: ``4.3 MB``."""
    for unit in ("B", "kB", "MB", "GB"):
        if abs(count) < 999.5:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:,.0f} TB" if count >= 1000 else f"{count:.3g} TB"


def duration(seconds: float | None) -> str:
    """Seconds as a clock would tell them: ``4.2 s``, ``3 min 20 s``, ``2 h 5 min``."""
    if seconds is None:
        return "—"
    if seconds < 59.95:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"


def epsilon(value: float | None) -> str:
    """ε with three digits; None and infinity both mean that nothing is guaranteed."""
    return "∞" if value is None or math.isinf(value) else f"{value:.3g}"


def counted(count: int, one: str, many: str = "") -> str:
    """``1 client``, ``3 clients``; ``many`` where the plural is not the singular with an s."""
    return f"{count:,} {one}" if count == 1 else f"{count:,} {many or one + 's'}"


def listed(names: Sequence[str], most: int = 4) -> str:
    """``a, b and c``; of more than ``most`` names the first ones, and how many others there are."""
    if not names:
        return "none"
    if len(names) > most:
        names = [*names[: most - 1], f"{len(names) - most + 1} others"]
    return names[0] if len(names) == 1 else ", ".join(names[:-1]) + " and " + names[-1]


def share(fraction: float) -> str:
    """A part of 1 in percent: ``93.1%``."""
    return f"{100 * fraction:.1f}%"
