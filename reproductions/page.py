"""One page of all tables and figures: the document's claim, our numbers drawn beside its numbers, and the verdict."""

from __future__ import annotations

import math
import subprocess
from collections import Counter
from collections.abc import Mapping
from html import escape
from typing import Any

from reproductions.catalog import DOCUMENTS
from reproductions.item import Item, Planned
from reproductions.runner import STORED, stored
from unalike.runs.words import counted, duration

VERDICTS = ("holds", "differs", "not decided", "not comparable")
WIDTH, HEIGHT, EDGE = 220, 18, 8  # of a row's drawing

_STYLE = """<style>
.verdict { border-radius: .6em; padding: .1em .6em; font-size: .8em; white-space: nowrap; color: #14181d; }
.holds { background: #bfe3c6; } .differs { background: #f3c1bb; } .decided { background: #e3d5f0; }
.comparable { background: #f3e2b3; } .run { background: #dde1e6; }
.rows td:nth-child(n+2):nth-child(-n+3) { text-align: right; white-space: nowrap; }
.rows svg { vertical-align: middle; min-width: 220px; }
</style>"""


def page(items: Mapping[str, Item | Planned]) -> str:
    """The page in Markdown."""
    kept = {id: stored(id) for id in items}
    parts = [
        "# Every table and figure",
        _STYLE,
        "Computed again by `python -m reproductions ID`. A row's drawing has a band for what counts as agreement, a "
        "bar for the document's number, and a dot for ours with the spread of the seeds. [How a verdict is "
        "reached](reproducing.md#verdicts).",
        _summary(items, kept),
    ]
    for document, title in DOCUMENTS.items():
        mine = {id: item for id, item in items.items() if id.startswith(f"{document}-")}
        parts.append(f"## {document.upper()}: {title}")
        parts += [_section(id, verdict) for id in mine if (verdict := kept[id])]
        missing = [item for id, item in mine.items() if not kept[id]]
        if missing:
            lines = [f"| `{one.id}` | {one.title} | {_why_not(one)} |" for one in missing]
            parts.append("\n".join(["### Not run", "", "| id | what it shows | why |", "| --- | --- | --- |", *lines]))
    return "\n\n".join(parts) + "\n"


def _why_not(item: Item | Planned) -> str:
    return item.why if isinstance(item, Planned) else "not run yet"


def _summary(items: Mapping[str, Item | Planned], kept: Mapping[str, dict[str, Any] | None]) -> str:
    lines = ["| document | " + " | ".join(VERDICTS) + " | not run |", "| --- |" + " ---: |" * (len(VERDICTS) + 1)]
    for document in DOCUMENTS:
        mine = [kept[id] for id in items if id.startswith(f"{document}-")]
        counts = Counter(one["verdict"] if one else "not run" for one in mine)
        lines.append(
            f"| {document.upper()} | " + " | ".join(str(counts[name]) for name in (*VERDICTS, "not run")) + " |"
        )
    return "\n".join(lines)


def _section(id: str, verdict: Mapping[str, Any]) -> str:
    scale = "the paper's scale" if verdict["scale"] == "paper" else f"scaled: {verdict.get('scaled', '')}"
    facts = [scale, counted(len(verdict["seeds"]), "seed"), duration(verdict["seconds"])]
    if commit := verdict.get("commit") or _commit(id):
        facts.append(f"commit {commit}")
    rows = "".join(_row(row) for row in verdict["rows"])
    reasons: dict[str, list[str]] = {}
    for row in verdict["rows"]:
        if "why" in row:
            reasons.setdefault(f"{row['verdict']}: {row['why']}", []).append(row["what"])
    notes = [
        f"{counted(len(which), 'row')} {why}" if len(which) > 1 else f"{which[0]}, {why}"
        for why, which in reasons.items()
    ]
    notes += [f"{name}: {value}" for name, value in verdict["settings"].items()] + list(verdict["notes"])
    more = "".join(f"<li>{escape(note)}</li>" for note in notes)
    return (
        f"### {id} {{ #{id} }}\n\n{_badge(verdict['verdict'])} **{verdict['title']}.** {verdict['claim']}\n\n"
        f"{'; '.join(facts)}. `python -m reproductions {id}`\n\n"
        '<table class="rows"><thead><tr><th>what</th><th>paper</th><th>ours</th><th></th><th></th></tr></thead>'
        f"<tbody>{rows}</tbody></table>"
        + (f"\n\n<details><summary>Settings and reasons</summary><ul>{more}</ul></details>" if more else "")
    )


def _row(row: Mapping[str, Any]) -> str:
    paper = row["paper"] if isinstance(row["paper"], str) else f"{row['paper']:.4g}"
    ours = "–" if row["ours"] is None else f"{row['ours']:.4g}"
    ours += "" if row["spread"] is None else f" ± {row['spread']:.2g}"
    if isinstance(row["paper"], str):  # a claim in words goes with what it is about
        cells = [f"{escape(row['what'])}<br><small>{escape(paper)}</small>", "", ours]
    else:
        cells = [escape(row["what"]), paper, ours]
    cells += [_drawing(row), _badge(row["verdict"])]
    return "<tr>" + "".join(f"<td>{cell}</td>" for cell in cells) + "</tr>"


def _drawing(row: Mapping[str, Any]) -> str:
    """A band from low to high, a bar for the paper's number, a dot for ours and a line for its spread."""
    low, high, ours, spread = row["tolerance"]["low"], row["tolerance"]["high"], row["ours"], row["spread"] or 0.0
    paper = None if isinstance(row["paper"], str) else float(row["paper"])
    shown = [value for value in (low, high, ours, paper) if value is not None]
    if ours is None or len(shown) < 2:
        return ""
    begin, end = min(*shown, ours - spread), max(*shown, ours + spread)
    span = (end - begin) or 1.0

    def x(value: float | None, otherwise: float) -> float:
        if value is None or not math.isfinite(value):
            return otherwise
        return EDGE + (value - begin) / span * (WIDTH - 2 * EDGE)

    middle = HEIGHT / 2
    left, right = x(low, 0.0), x(high, WIDTH)
    band = f'x="{left:.1f}" y="3" width="{max(right - left, 1):.1f}" height="{HEIGHT - 6}"'
    parts = [f'<rect {band} fill="#8fb8d8" opacity=".35"/>']
    if paper is not None:
        parts.append(f'<rect x="{x(paper, 0) - 1:.1f}" y="1" width="2" height="{HEIGHT - 2}" fill="#5a6472"/>')
    if spread:
        ends = f'x1="{x(ours - spread, 0):.1f}" x2="{x(ours + spread, 0):.1f}"'
        parts.append(f'<line {ends} y1="{middle}" y2="{middle}" stroke="#c05600"/>')
    parts.append(f'<circle cx="{x(ours, 0):.1f}" cy="{middle}" r="4" fill="#c05600"/>')
    box = f'width="{WIDTH}" height="{HEIGHT}" viewBox="0 0 {WIDTH} {HEIGHT}"'
    return f'<svg {box} role="img" aria-label="ours {ours:.4g}">{"".join(parts)}</svg>'


def _badge(verdict: str) -> str:
    return f'<span class="verdict {verdict.split()[-1]}">{verdict}</span>'


def _commit(id: str) -> str:
    """The commit that stored a verdict; empty where there is no checkout."""
    words = ["git", "log", "-1", "--format=%h", "--follow", "--diff-filter=AM", "--", f"{id}.json"]
    try:
        done = subprocess.run(words, cwd=STORED, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return ""
    return done.stdout.strip()
