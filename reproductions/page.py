"""One page of all tables and figures: the document's claim, our numbers drawn beside its numbers, and the verdict.

Figures that were stored with a verdict lie in a folder beside the page.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from html import escape
from pathlib import Path
from typing import Any

from reproductions.catalog import DOCUMENTS
from reproductions.item import Item, Planned
from reproductions.runner import stored, stored_figure
from unalike.core.disk import write_whole
from unalike.runs.words import counted, duration

VERDICTS = ("holds", "differs", "not decided", "not comparable")
WIDTH, HEIGHT, EDGE = 220, 18, 8  # of a row's drawing

_STYLE = """<style>
.verdict { border-radius: .6em; padding: .1em .6em; font-size: .8em; white-space: nowrap; color: #14181d; }
.holds { background: #bfe3c6; } .differs { background: #f3c1bb; } .decided { background: #e3d5f0; }
.comparable { background: #f3e2b3; } .run { background: #dde1e6; }
.rows td:nth-child(n+2):nth-child(-n+3) { text-align: right; white-space: nowrap; padding-left: .9em; }
.scrolls { overflow-x: auto; }
.rows td:first-child { min-width: 14em; }
.rows svg { vertical-align: middle; min-width: 220px; }
.rows small { color: #5a6472; }
.ours { max-width: 100%; background: white; padding: .5em; }
</style>"""
_HEAD = "".join(f"<th>{name}</th>" for name in ("what", "paper", "ours", "", "differs if ours is", ""))
FIGURES = "figures"  # the folder beside the page


def write_page(items: Mapping[str, Item | Planned], file: Path) -> None:
    """Write the page, and the stored figures into a folder beside it."""
    folder = file.parent / f"{file.stem}-{FIGURES}"
    for id in items:
        if stored_figure(id).exists():
            folder.mkdir(parents=True, exist_ok=True)
            write_whole(folder / f"{id}.svg", stored_figure(id).read_bytes())
    write_whole(file, page(items, folder.name).encode())


def page(items: Mapping[str, Item | Planned], figures: str) -> str:
    """The page in Markdown; ``figures``: the folder of the figures, as seen from it."""
    kept = {id: stored(id) for id in items}
    parts = [
        "# Every table and figure",
        _STYLE,
        "Computed again by `python -m reproductions ID`. A row's drawing has a band for what counts as agreement, a "
        "bar for the document's number, and a dot for ours with the spread of the seeds; a row marked *main* is what "
        "the document is cited for. [How a verdict is reached](reproducing.md#verdicts).",
        _summary(items, kept),
    ]
    for document, title in DOCUMENTS.items():
        mine = {id: item for id, item in items.items() if id.startswith(f"{document}-")}
        parts.append(f"## {document.upper()}: {title}")
        parts += [_section(id, verdict, figures) for id in mine if (verdict := kept[id])]
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


def _section(id: str, verdict: Mapping[str, Any], figures: str) -> str:
    scale = "the paper's scale" if verdict["scale"] == "paper" else f"scaled: {verdict.get('scaled', '')}"
    facts = [scale, counted(len(verdict["seeds"]), "seed"), duration(verdict["seconds"])]
    facts.append(f"computed by {verdict['commit']}")
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
        f'<div class="scrolls"><table class="rows"><thead><tr>{_HEAD}</tr></thead><tbody>{rows}</tbody></table></div>'
        + (f"\n\n![{escape(verdict['title'])}]({figures}/{id}.svg){{ .ours }}" if stored_figure(id).exists() else "")
        + (f"\n\n<details><summary>Settings and reasons</summary><ul>{more}</ul></details>" if more else "")
    )


def _row(row: Mapping[str, Any]) -> str:
    paper = row["paper"] if isinstance(row["paper"], str) else f"{row['paper']:.4g}"
    ours = "–" if row["ours"] is None else f"{row['ours']:.4g}"
    ours += "" if row["spread"] is None else f" ± {row['spread']:.2g}"
    main = " <small>main</small>" if row.get("main") else ""
    if isinstance(row["paper"], str):  # a claim in words goes with what it is about
        cells = [f"{escape(row['what'])}{main}<br><small>{escape(paper)}</small>", "", ours]
    else:
        cells = [f"{escape(row['what'])}{main}", paper, ours]
    cells += [_drawing(row), _refuted(row), _badge(row["verdict"])]
    return "<tr>" + "".join(f"<td>{cell}</td>" for cell in cells) + "</tr>"


def _refuted(row: Mapping[str, Any]) -> str:
    """Which outcome would refute the row."""
    low, high = row["tolerance"]["low"], row["tolerance"]["high"]
    if low is None and high is None:
        return ""
    bounds = [f"{way} {bound:.4g}" for way, bound in (("below", low), ("above", high)) if bound is not None]
    by = {"margin": " by two standard errors", "every": " once", "mean": ""}[row["test"]]
    return f"<small>{' or '.join(bounds)}{by}</small>"


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
