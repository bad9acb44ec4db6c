"""The commands of docs/own-data.md work as typed, one after the other, and give what the page says."""

from __future__ import annotations

import re
import runpy
import shlex
import shutil
import sys
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from typer.testing import CliRunner

from unalike.commands.main import app

ROOT = Path(__file__).parent.parent


def test_the_page_goes_from_four_hospitals_to_predictions_for_a_fifth(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    shutil.copytree(ROOT / "examples", tmp_path / "examples")
    blocks = re.findall(r"```(sh|python)\n(.*?)```", (ROOT / "docs" / "own-data.md").read_text(), re.DOTALL)
    assert len(blocks) == 6
    shown, values = "", dict[str, Any]()
    for kind, text in blocks:
        if kind == "python":
            exec(compile(text, "own-data.md", "exec"), values)
            continue
        program, *words = shlex.split(text)
        if program == "python":
            monkeypatch.setattr(sys, "argv", words)
            runpy.run_path(words[0], run_name="__main__")
            continue
        result = CliRunner().invoke(app, words)
        assert result.exit_code == 0, f"{text}{result.output}"
        shown += result.output
    assert "text with 3 values: atypical, none, typical" in shown and "ε = 4" in shown
    assert (tmp_path / "hospitals.pdf").read_bytes().startswith(b"%PDF")
    predictions = pd.read_csv(tmp_path / "turin.predictions.csv")
    assert predictions["id"].tolist() == pd.read_csv(tmp_path / "turin.csv")["patient"].tolist()
    auroc, low, high = re.search(
        r"AUROC over .*: ([0-9.]+) \(95 % interval over rows: ([0-9.]+) to ([0-9.]+)", shown
    ).groups()
    assert 0.5 < float(low) < float(auroc) < float(high) < 1
    sick = (pd.read_csv(tmp_path / "turin_answered.csv")["sick"] == "yes").to_numpy()
    ahead = predictions["p_yes"].to_numpy()[sick][:, None] > predictions["p_yes"].to_numpy()[~sick]
    assert float(auroc) == pytest.approx(ahead.mean(), abs=1e-3)
