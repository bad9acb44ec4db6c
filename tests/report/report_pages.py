"""A report as tests read it: its words, and its parts by tag."""

from __future__ import annotations

import json
from html.parser import HTMLParser
from pathlib import Path

from unalike.report.page.page import write_report
from unalike.report.page.words import Scale

VOID = {"br", "link", "meta"}
SCALE = Scale("accuracy")


class Page(HTMLParser):
    """Reads a page, checks that its elements are closed in order, and keeps what tests ask for."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.parts: dict[str, list[str]] = {}
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, name: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags.append((name, dict(attributes)))
        if name not in VOID:
            self.open.append(name)

    def handle_endtag(self, name: str) -> None:
        assert self.open.pop() == name

    def handle_data(self, text: str) -> None:
        self.parts.setdefault(self.open[-1] if self.open else "", []).append(text)

    @property
    def words(self) -> str:
        hidden = ("script", "style")
        return " ".join(text for name, texts in self.parts.items() if name not in hidden for text in texts)


def report(tmp_path: Path, *folders: Path) -> Page:
    out = tmp_path / "report.html"
    write_report(list(folders), out)
    return Page(out.read_text(encoding="utf-8"))


def edit(file: Path, **changes: object) -> None:
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))
