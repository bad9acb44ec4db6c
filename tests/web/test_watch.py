"""A run is watched while it goes on: its rounds come, also again after a resume, and a private run shows no scores."""

from __future__ import annotations

import json
import re
import urllib.request
from pathlib import Path
from typing import Any

import pytest
from axe_playwright_python.sync_playwright import Axe

from tests.web.conftest import browsing, running
from unalike.core.disk import write_whole
from unalike.newcomers.watch import watching
from unalike.runs.errors import UserError


@pytest.fixture
def run(tmp_path: Path) -> Path:
    folder = tmp_path / "wards"
    folder.mkdir()
    (folder / "recipe.toml").write_text('method = "pefll"\nrounds = 9\n')
    return folder


def line(number: int, **more: Any) -> str:
    record = {"round": number, "seconds": 0.5 * number, "loss": 1 / number, "bytes_up": 1000 * number, "failures": 0}
    scores = {"seen": {"mean": 0.625, "worst": 0.1}, "unseen": None}
    return json.dumps({**record, "bytes_down": 2000 * number, "epsilon": None, **scores, **more}) + "\n"


def test_the_rounds_come_as_they_are_made(run: Path) -> None:
    with running(watching(run)) as address, browsing(viewport={"width": 360, "height": 740}) as context:
        page, console = context.new_page(), list[str]()
        page.on("console", lambda message: console.append(message.text))
        page.on("pageerror", lambda error: console.append(str(error)))
        page.goto(address)
        page.get_by_text("pefll: waiting for its first round.").wait_for()
        with (run / "metrics.jsonl").open("a") as metrics:
            metrics.write(line(1))
            metrics.flush()
            page.get_by_text("pefll: round 1 of 9.").wait_for()
            metrics.write(line(2) + line(3)[:30])  # the last one is being written
            metrics.flush()
            page.get_by_text("round 2 of 9.").wait_for()
            metrics.write(line(3)[30:] + line(4))
        page.get_by_text("round 4 of 9.").wait_for()
        page.get_by_text("training clients 0.625").wait_for()
        assert page.locator("polyline").first.evaluate("one => one.points.numberOfItems") == 4
        write_whole(run / "metrics.jsonl", (line(1) + line(2)).encode())  # a resume cuts it back
        page.get_by_text("round 2 of 9.").wait_for()
        (run / "result.json").write_text("{}")
        page.get_by_text("round 2 of 9, and it has ended.").wait_for()
        assert page.evaluate("document.documentElement.scrollWidth") <= 360
        assert Axe().run(page).violations_count == 0 and console == []
        page.goto("about:blank")


@pytest.mark.parametrize("how", [{"epsilon": 1.5}, {"private": True}, {}])
def test_no_score_of_a_private_run_is_sent(run: Path, how: dict[str, Any]) -> None:
    """One has an ε, says that it is private, or has measured what lies with its simulation alone."""
    (run / "metrics.jsonl").write_text(line(1, **how))
    if not how:
        (run / "simulation").mkdir()
        (run / "simulation" / "metrics.jsonl").write_text('{"round": 1, "seen": {"mean": 0.875}}\n')
    with running(watching(run)) as address, urllib.request.urlopen(f"{address}events", timeout=20) as stream:
        told = ""
        while "event: round" not in told or not told.endswith("\n\n"):
            told += stream.readline().decode()
    shown = json.loads(re.findall(r"event: round\ndata: (.*)\n", told)[0])
    assert shown["loss"] == 1.0 and shown["epsilon"] == how.get("epsilon")
    assert "seen" not in shown and "0.625" not in told and "0.875" not in told


def test_a_folder_of_no_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"has no recipe.toml; expected the folder of a run"):
        watching(tmp_path)
