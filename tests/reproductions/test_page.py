"""The page of all items: every stored verdict is there, and a drawing says what its row says."""

from __future__ import annotations

import re

from reproductions import catalog
from reproductions.page import EDGE, WIDTH, _drawing, page
from reproductions.runner import STORED


def test_the_page_has_every_item_and_adds_them_up() -> None:
    text = page(catalog.items())
    stored = {file.stem for file in STORED.glob("*.json")}
    assert set(re.findall(r"\{ #(\S+) \}", text)) == stored
    assert all(f"`{id}`" in text or f"### {id} " in text for id in catalog.items())
    totals = [
        int(number)
        for line in text.splitlines()
        if re.match(r"\| (T|P)\d \|", line)
        for number in line.split("|")[2:-1]
    ]
    assert sum(totals) == len(catalog.items())


def test_a_drawing_puts_ours_beside_the_papers_number() -> None:
    row = {"paper": 5.0, "ours": 10.0, "spread": None, "tolerance": {"low": 0.0, "high": 10.0}}
    drawing = _drawing(row)
    assert f'cx="{WIDTH - EDGE:.1f}"' in drawing  # ours is at the right end of the band,
    assert f'x="{WIDTH / 2 - 1:.1f}" y="1"' in drawing  # the paper's number in its middle


def test_a_row_that_was_not_run_has_no_drawing() -> None:
    assert _drawing({"paper": 5.0, "ours": None, "spread": None, "tolerance": {"low": 0.0, "high": 10.0}}) == ""
