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


def stated(value: float | None, noise: str | None) -> str:
    """ε as it may be shown: with the word "simulated" where the noise was seeded, and so protects nobody.

    An ε of 0 needs no noise: nothing was released.
    """
    return f"{epsilon(value)}{' simulated' if noise == 'simulated' and value else ''}"


def guarantees(
    value: float | None, server: float | None, noise: str | None, trust: str | None, accepted: bool = False
) -> list[str]:
    """What stands beside an ε wherever it is shown: against whom, whom one trusts, and what it does not promise."""
    if not value:  # nothing is guaranteed, or nothing was released
        return []
    who = "against readers of the model and of what is published"
    lines = [f"ε = {stated(value, noise)} is {who}; against the server ε = {stated(server, noise)} (trust: {trust})"]
    if noise == "simulated":
        lines.append("the noise is simulated (seeded, so that a run can be repeated): it protects nobody")
    if accepted:
        lines.append("δ is 1/n or more, which was accepted: it would allow to publish somebody's data as it is")
    return lines


LARGE_DELTA = 1e-3


def large_delta(delta: float | None) -> str:
    """A remark on a δ that promises little, as n^-1.1 of few clients does; empty for any other."""
    if delta is None or delta <= LARGE_DELTA:
        return ""
    return (
        f"δ = {delta:.3g} is large: it would allow one in {1 / delta:.0f} to be revealed. It is n^-1.1 of few units "
        "unless you set it; give a smaller δ, or have more clients"
    )


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


def no_formula(cell: object) -> object:
    """A cell of a CSV file that no spreadsheet takes for a formula: a text that begins like one gets an apostrophe."""
    if not (isinstance(cell, str) and cell.startswith(("=", "+", "-", "@", "\t", "\r"))):
        return cell
    try:
        float(cell)
    except ValueError:
        return f"'{cell}"
    return cell  # a number


def share(fraction: float) -> str:
    """A part of 1 in percent: ``93.1%``."""
    return f"{100 * fraction:.1f}%"
