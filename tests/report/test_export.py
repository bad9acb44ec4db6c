"""What leaves a report: tables whose numbers are those of the runs, in LaTeX, CSV and JSON, and figures as files."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from typer.testing import CliRunner

from tests.report.run_folders import make_run
from unalike.commands.main import app


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """FedAvg with two seeds, and local training."""
    home = tmp_path_factory.mktemp("runs")
    return [make_run(home / f"f{seed}", "fedavg", seed=seed) for seed in (0, 1)] + [make_run(home / "l", "local")]


def report(folders: list[Path], *words: object) -> str:
    done = CliRunner().invoke(app, ["report", *map(str, folders), *map(str, words)])
    assert done.exit_code == 0, done.output
    return done.stdout


def means(folders: list[Path], group: str = "seen") -> list[float]:
    return [json.loads((folder / "result.json").read_text())["accuracy"][group]["mean"] for folder in folders]


def test_results_have_a_row_for_each_method(folders: list[Path]) -> None:
    rows = list(csv.DictReader(io.StringIO(report(folders, "--csv"))))
    assert [row["method"] for row in rows] == ["fedavg", "local"] and rows[0]["seeds"] == "2"
    assert float(rows[0]["seen_mean"]) == pytest.approx(np.mean(means(folders[:2])))
    assert float(rows[0]["seen_std"]) == pytest.approx(np.std(means(folders[:2])))
    assert rows[1]["unseen_mean"] == "" and rows[0]["epsilon"] == ""
    assert json.loads(report(folders, "--json"))[0]["seen_mean"] == pytest.approx(float(rows[0]["seen_mean"]))


def test_latex_has_the_results_as_a_paper_prints_them(folders: list[Path]) -> None:
    text = report(folders, "--latex")
    found = means(folders[:2])
    assert f"fedavg & ${100 * np.mean(found):.1f} \\pm {100 * np.std(found):.1f}$" in text
    assert text.startswith(
        "% accuracy in percent: mean and standard deviation over seeds (over clients where there is one)"
    )
    assert report(folders[2:], "--latex").startswith(
        "% accuracy in percent: mean and standard deviation over clients\n"
    )
    assert "\\toprule" in text and "Seen clients" in text and "local & $" in text and " & -- & " in text


@pytest.mark.parametrize("name", ["clients", "rounds", "transcript", "settings"])
def test_every_table_has_every_form(name: str, folders: list[Path], tmp_path: Path) -> None:
    table = pd.read_csv(io.StringIO(report(folders, "--csv", "--table", name)))
    assert len(json.loads(report(folders, "--json", "--table", name))) == len(table) > 0
    assert report(folders, "--latex", "--table", name).count("\\\\\n") == len(table) + 1
    report(folders, "--csv", "--table", name, "--out", tmp_path / "t.csv")
    assert len(pd.read_csv(tmp_path / "t.csv")) == len(table)


def test_clients_are_those_of_the_runs(folders: list[Path]) -> None:
    table = pd.read_csv(io.StringIO(report(folders, "--csv", "--table", "clients")))
    own = table[(table["method"] == "fedavg") & (table["seed"] == 1)].set_index(["client", "group"])["score"]
    scores = pd.read_csv(folders[1] / "simulation" / "scores.csv").set_index(["client", "group"])["score"]
    pd.testing.assert_series_equal(own, scores)


def test_figures_are_files_with_a_legend_of_their_own(folders: list[Path], tmp_path: Path) -> None:
    report(folders, "--figures", tmp_path / "svg", "--ending", "svg")
    files = {file.name: file.read_text() for file in (tmp_path / "svg").iterdir()}
    assert len(files) >= 6 and all(text.startswith("<svg") for text in files.values())
    curves = files["accuracy-on-seen-clients.svg"]
    assert ">fedavg<" in curves and ">local<" in curves and "var(--" not in curves
    report(folders[2:], "--figures", tmp_path / "pdf")
    assert all(file.read_bytes().startswith(b"%PDF") for file in (tmp_path / "pdf").iterdir())


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("--csv", "--latex"), "choose one"),
        (("--csv", "--table", "maps"), "expected results"),
        (("--figures", "f", "--ending", "gif"), "a figure's file ends in"),
    ],
)
def test_what_cannot_be_is_refused(words: tuple[str, ...], says: str, folders: list[Path]) -> None:
    done = CliRunner().invoke(app, ["report", *map(str, folders), *words])
    assert done.exit_code == 1 and says in " ".join(done.output.split())
