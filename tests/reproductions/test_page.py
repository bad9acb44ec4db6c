"""The page of all items: every stored verdict is there, and a drawing says what its row says."""

from __future__ import annotations

import re
from pathlib import Path

from reproductions import catalog
from reproductions.page import EDGE, WIDTH, _drawing, _refuted, _summary, page, write_page
from reproductions.runner import STORED, stored


def test_the_page_has_every_item_and_adds_them_up() -> None:
    text = page(catalog.items(), "figures")
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


def test_a_row_says_what_would_refute_it() -> None:
    row = {"tolerance": {"low": 0.0, "high": None}, "test": "margin"}
    assert "below 0 by two standard errors" in _refuted(row)
    assert "below 1 or above 3<" in _refuted({"tolerance": {"low": 1.0, "high": 3.0}, "test": "mean"})


def test_the_stored_figures_lie_beside_the_page(tmp_path: Path) -> None:
    write_page(catalog.items(), tmp_path / "results.md")
    text = (tmp_path / "results.md").read_text(encoding="utf-8")
    shown = re.findall(r"\]\((results-figures/\S+\.svg)\)", text)
    assert {Path(one).stem for one in shown} == {file.stem for file in STORED.glob("*.svg")}
    assert all((tmp_path / one).read_text().startswith("<svg") for one in shown)


def test_the_guide_gives_the_verdicts_that_are_stored() -> None:
    guide = (Path(__file__).parents[2] / "docs" / "reproducing.md").read_text(encoding="utf-8")
    told = re.findall(r"^\| ((?:t|p)\d-[a-z0-9., -]+) \| ([a-z ]+) \|", guide, re.MULTILINE)
    assert len(told) > 30
    for ids, verdict in told:
        first, *more = ids.split(", ")
        for id in (first, *(f"{first.rsplit('-', 1)[0]}-{one}" for one in more)):
            kept = stored(id)
            assert kept is not None and kept["verdict"] == verdict, id


def test_the_readme_adds_up_what_the_page_does() -> None:
    readme = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")
    kept = {id: stored(id) for id in catalog.items()}
    assert _summary(catalog.items(), kept) in readme
