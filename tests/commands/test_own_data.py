"""`unalike data` and `unalike run` on a user's own files: what it says can be typed as it stands."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from unalike.commands.main import app

runner = CliRunner()
COLUMNS = ("--client-column", "shop", "--label-column", "ret")


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def unalike(*words: str, code: int = 0) -> str:
    result = runner.invoke(app, list(words))
    assert result.exit_code == code, result.output
    return " ".join(result.output.split())


def table(name: str, hole: bool = False) -> str:
    """Four shops with ten rows each: a number, a colour and whether the thing came back."""
    prices = [i * 7 % 11 for i in range(40)]
    colours = ("red", "green", "blue")
    lines = [f"s{i % 4},{price},{colours[i % 3]},{'yes' if price > 5 else 'no'}" for i, price in enumerate(prices)]
    if hole:
        lines[5] = "s1,,blue,no"
    Path(name).write_text("\n".join(["shop,price,colour,ret", *lines]) + "\n")
    return name


def test_the_advice_about_a_missing_value_works_as_typed() -> None:
    holed = table("holed.csv", hole=True)
    told = unalike("data", holed, *COLUMNS, code=1)
    assert "the column 'price' lacks 1 of 40 values, the first in data row 6" in told
    assert "'mean' (the mean by which inputs are scaled) or 'client'" in told and told.rstrip().endswith("(--missing)")
    flag = ["--missing", "mean"]
    assert "31 train, 0 validation, 8 test" in unalike("data", holed, *COLUMNS, "--missing", "drop")
    assert "32 train, 0 validation, 8 test" in unalike("data", holed, *COLUMNS, *flag)
    unalike("run", "fedavg", "--data", holed, *COLUMNS, "--rounds", "1", *flag, "--out", "run")
    assert 'missing = "mean"' in Path("run/recipe.toml").read_text()


def test_unseen_must_be_a_number() -> None:
    assert "unseen must be a fraction below 1" in unalike("data", table("t.csv"), *COLUMNS, "--unseen", "nan", code=1)


def test_bytes_that_are_no_npz_are_not_called_a_pickle() -> None:
    Path("garbage.npz").write_bytes(bytes(range(1, 200)))
    told = unalike("data", "garbage.npz", code=1)
    assert "save it again with numpy.savez" in told and "pickle" not in told


def test_a_forgotten_label_column_is_noticed() -> None:
    shown = unalike("data", table("t.csv"), "--client-column", "shop")
    assert "text with 2 values: no, yes" in shown and "text with 3 values: blue, green, red" in shown
    assert "no labels: name their column (label_column (--label-column))" in shown
    shown = unalike("data", "t.csv", *COLUMNS)
    assert "text with 3 values: blue" in shown and "text with 2" not in shown and "no labels" not in shown
