"""Computes an item in its folder: resumable, and every number that a verdict rests on is written down."""

from __future__ import annotations

import hashlib
import json
import subprocess
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, Protocol

import pandas as pd

import unalike
from reproductions.item import Choice, Item, Numbers, Planned, overall
from reproductions.item import smaller as size_told
from unalike.core.disk import write_whole
from unalike.report.figures.file import save
from unalike.runs.errors import UserError
from unalike.runs.words import counted

DECLARED, VERDICT, NUMBERS, FIGURE, PARTS = "declared.json", "verdict.json", "numbers.csv", "figure.svg", "parts"
STORED = Path(__file__).parent / "verdicts"


class Watch(Protocol):
    """Is told how far the work is; it changes nothing."""

    def going(self, name: str, done: int, total: int) -> None: ...

    def finished(self, name: str, seconds: float, was_there: bool) -> None: ...


class Unwatched:
    """Says nothing."""

    def going(self, name: str, done: int, total: int) -> None:
        pass

    def finished(self, name: str, seconds: float, was_there: bool) -> None:
        pass


class Parts:
    """The parts of an item, each a file of ``parts/`` under its name and settings; those that are there are read."""

    def __init__(self, folder: Path, full: bool, watch: Watch) -> None:
        self._folder, self._watch, self._full = folder / PARTS, watch, full
        self.chosen: dict[str, Any] = {}
        self.smaller: dict[str, str] = {}  # in what the run is smaller than the paper's, and how
        self.seconds = 0.0
        self.older = 0  # parts that other code than today's computed
        self._folder.mkdir(parents=True, exist_ok=True)

    def choose(self, what: str, paper: Choice, smaller: Choice) -> Choice:
        here = self.chosen[what] = paper if self._full else smaller
        if text := size_told(what, paper, here):
            self.smaller[what] = text
        return here

    def part(self, name: str, compute: Callable[..., Numbers], **settings: Any) -> Numbers:
        asked = {"name": name, "settings": json.loads(json.dumps(settings))}  # as it will be read again
        key = hashlib.sha256(json.dumps(asked, sort_keys=True).encode()).hexdigest()[:16]
        file = self._folder / f"{key}.json"
        if file.exists():
            kept = _read(file)
            self.older += kept["code"] != code_digest()
            self.seconds += kept["seconds"]
            self._watch.finished(name, kept["seconds"], True)
            return dict(kept["numbers"])
        begin = time.perf_counter()
        self._watch.going(name, 0, 0)
        found = compute(lambda done, total: self._watch.going(name, done, total), **settings)
        seconds = time.perf_counter() - begin
        numbers: Numbers = json.loads(json.dumps(found))  # so that a resumed item computes with the very same numbers
        _write(file, {**asked, "code": code_digest(), "seconds": round(seconds, 3), "numbers": numbers})
        self.seconds += seconds
        self._watch.finished(name, seconds, False)
        return numbers


def reproduce(item: Item | Planned, folder: Path, *, full: bool = False, watch: Watch | None = None) -> dict[str, Any]:
    """Compute an item, write what was found into ``folder``, and give the content of its verdict.json.

    The rows with their tolerances are written before anything is computed. A part that is in the folder already, from a
    run that was stopped, is not computed again.
    """
    folder.mkdir(parents=True, exist_ok=True)
    if (folder / VERDICT).exists() or (folder / DECLARED).exists():
        other = _read(folder / (VERDICT if (folder / VERDICT).exists() else DECLARED))["id"]
        if other != item.id:
            raise UserError(f"{folder} holds {other}, not {item.id}: choose another folder with --out")
    if isinstance(item, Planned):
        nothing: dict[str, Any] = {"id": item.id, "title": item.title, "scale": None, "seconds": 0.0, "seeds": []}
        verdict = {**nothing, "verdict": None, "why": item.why, "rows": []}
        _write(folder / VERDICT, verdict)
        return verdict
    declared: dict[str, Any] = {
        "id": item.id,
        "title": item.title,
        "claim": item.claim,
        "seeds": list(item.seeds),
        "settings": dict(item.settings),
    }
    _write(folder / DECLARED, {**declared, "rows": [row.declared() for row in item.rows]})
    (folder / VERDICT).unlink(missing_ok=True)  # of an earlier run, perhaps with other tolerances
    parts = Parts(folder, full, watch or Unwatched())
    begin = time.perf_counter()
    found = item.compute(parts)
    strange = set(found.values) - {row.what for row in item.rows}
    if strange:
        raise ValueError(f"{item.id} computed {sorted(strange)}, of which it declares no row")
    scaled = "; ".join([*parts.smaller.values(), *item.lacks])
    compared = [row.compare(found.values.get(row.what), scaled) for row in item.rows]
    pd.DataFrame(found.table).to_csv(folder / NUMBERS, index=False)
    if found.chart is not None:
        save(found.chart, folder / FIGURE)
    notes = list(found.notes)
    if parts.older:
        notes.append(
            f"{counted(parts.older, 'part')} of this folder came from an earlier state of the code; --fresh computes "
            "all of them again"
        )
    verdict = {
        **declared,
        "seeds": list(parts.chosen.get("seeds", item.seeds)),
        "scale": "scaled" if scaled else "paper",
        **({"scaled": scaled} if scaled else {}),
        "commit": commit(),
        "seconds": round(max(parts.seconds, time.perf_counter() - begin), 1),
        "verdict": overall(compared),
        "rows": compared,
        "notes": notes,
    }
    _write(folder / VERDICT, verdict)
    return verdict


def forget(folder: Path) -> None:
    """Delete the parts that a folder has, so that they are computed again."""
    for file in (folder / PARTS).glob("*.json"):
        file.unlink()


def store(verdict: dict[str, Any], folder: Path) -> None:
    """Keep a verdict and its figure beside this code, for the list and the page."""
    _write(STORED / f"{verdict['id']}.json", verdict)
    figure = folder / FIGURE
    if figure.exists():
        write_whole(stored_figure(verdict["id"]), figure.read_bytes())


def stored_figure(id: str) -> Path:
    """Where the figure of a stored verdict is, if it has one."""
    return STORED / f"{id}.svg"


def stored(id: str) -> dict[str, Any] | None:
    """The verdict that comes with Unalike, if there is one."""
    file = STORED / f"{id}.json"
    return _read(file) if file.exists() else None


def listing(items: dict[str, Item | Planned]) -> list[dict[str, Any]]:
    """All items, with the verdicts that come with Unalike."""
    found = []
    for id, item in items.items():
        kept = stored(id)
        why = item.why if isinstance(item, Planned) else "" if kept else "not run yet"
        found.append(
            {
                "id": id,
                "title": item.title,
                "two_cores": item.two_cores,
                "verdict": kept and kept["verdict"],
                "scale": kept and kept["scale"],
                "command": f"python -m reproductions {id}",
                **({"why": why} if why else {}),
            }
        )
    return found


@cache
def commit() -> str | None:
    """The commit of this checkout, with a plus where files differ from it; None outside of one."""
    words = ["git", "describe", "--always", "--dirty=+", "--exclude=*"]
    try:
        return subprocess.run(words, cwd=STORED, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None


@cache
def code_digest() -> str:
    """What the package's source is today."""
    root = Path(unalike.__file__).parent
    made = hashlib.sha256()
    for file in sorted(root.rglob("*.py")):
        made.update(str(file.relative_to(root)).encode() + file.read_bytes())
    return made.hexdigest()[:16]


def _read(file: Path) -> dict[str, Any]:
    try:
        content: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"{file} cannot be read ({error}); delete it, and it is computed again") from error
    return content


def _write(file: Path, content: dict[str, Any]) -> None:
    write_whole(file, (json.dumps(content, indent=1, ensure_ascii=False) + "\n").encode())
