"""The report's section of analyses."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from tests.report.report_pages import SCALE, report
from tests.report.run_folders import make_run
from unalike.report.page.page import write_report
from unalike.runs.errors import UserError

pytestmark = pytest.mark.usefixtures("drawings")


@pytest.fixture
def runs(tmp_path: Path) -> list[Path]:
    return [make_run(tmp_path / name, name) for name in ("local", "fedavg", "fedavg-finetune", "pefll")]


def analysed(folder: Path, **changes: object) -> Path:
    """The run with analyses of its clients: a curve, a map and a line of bytes."""
    clients = json.loads((folder / "simulation" / "map.json").read_text())
    point = {"mean": 0.5, "error": 0.1}
    found = {
        "round": 20,
        "quick": False,
        "map": [
            {"name": name, "group": group, "main_class": "three", "pca": [i % 7, i // 7], "t_sne": [i % 7, i // 7]}
            for i, (name, group) in enumerate(zip(clients["names"], clients["group"], strict=True))
        ],
        "correlation": {"mean": 0.625, "low": -0.25, "high": 0.875, "clients": 7, "untrained": 0.125},
        "alpha": [{"at": at, **point} for at in (0.1, 1, 10)],
        "size": [{"epsilon": None, "points": [{"at": 5, **point}, {"at": 100, "mean": 0.75, "error": 0.1}]}],
        "bytes": [{"gigabytes": 0.001, "seen": 0.25, "unseen": None}, {"gigabytes": 0.003, "seen": 0.5, "unseen": 0.4}],
        "left_out": {"blur": "it holds features, no images"},
        **changes,
    }
    (folder / "simulation" / "analyses.json").write_text(json.dumps(found))
    return folder


def test_analyses_have_a_section_where_they_are(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", "pefll")
    assert "Analyses" not in report(tmp_path, folder).parts["h2"]
    page = report(tmp_path, analysed(folder))
    assert "Analyses" in page.parts["h2"]
    assert any(cell.startswith("0.62 (-0.25 to 0.88)") and "; 0.12 before" in cell for cell in page.parts["td"])
    titles = [
        attributes["aria-label"] for name, attributes in page.tags if name == "svg" and "aria-label" in attributes
    ]
    assert "t-SNE of descriptors, pefll" in titles and "accuracy: other class shares of newcomers" in titles
    assert not [title for title in titles if title and "turned images" in title]  # nothing was measured
    tips = [attributes["data-tip"] for _, attributes in page.tags if "data-tip" in attributes]
    assert "pefll\nDirichlet α (small: few classes each) 0.1: 50.0% ± 10.0" in tips
    text = (tmp_path / "report.html").read_text()
    chart = text[text.index('aria-label="accuracy: other class shares') :]
    assert ">80%<" in chart[: chart.index("</svg>")]  # the scale has room for a band of another chart, 75% ± 10%
    assert "three" in page.parts["text"] and "1MB" in page.parts["text"]
    assert "pefll, not measured: blurred images (it holds features, no images)." in page.words


def test_curves_of_analysed_runs_share_a_chart_and_maps_stand_side_by_side(tmp_path: Path, runs: list[Path]) -> None:
    analysed(runs[2], map=[], correlation=None)
    analysed(runs[3])
    page = report(tmp_path, *runs)
    text = (tmp_path / "report.html").read_text()
    section = text[text.index('id="analyses"') : text.index('id="cost"')]
    chart = section[section.index('aria-label="accuracy: other class shares') :]
    chart = chart[: chart.index("</svg>")]
    assert "var(--s2)" in chart and "var(--s3)" in chart and "var(--s0)" not in chart
    assert section.count("of descriptors, pefll") == 2 and "of descriptors, fedavg" not in section
    assert "Not analysed: local and fedavg. For a run: unalike analyse RUN" in page.words


def test_epsilon_has_a_line_each_and_the_line_without_noise_is_not_drawn_twice(tmp_path: Path) -> None:
    points = [{"at": at, "mean": 0.5, "error": 0.0} for at in (5, 50)]
    private = [{**point, "delta": delta} for point, delta in zip(points, (0.01, 0.00025), strict=True)]
    curves = [{"epsilon": None, "points": points}, {"epsilon": 0.5, "points": private}]
    page = report(tmp_path, analysed(make_run(tmp_path / "run", "pefll"), size=curves))
    assert {"no noise", "ε = 0.5"} <= set(page.parts["text"])
    labels = [attributes.get("aria-label") for name, attributes in page.tags if name == "svg"]
    assert [label for label in labels if label and "number of samples" in label] == [
        "accuracy: number of samples and privacy, δ = 0.01 to 0.00025"
    ]


@pytest.mark.parametrize(
    "extreme",
    [
        {"alpha": [{"at": 1, "mean": 5, "error": 0}]},
        {"alpha": [{"at": 1, "mean": -5, "error": 0}]},
        {"alpha": [{"at": 1, "mean": 1e-14, "error": 0}, {"at": 2, "mean": 3e-14, "error": 0}]},
        {"rotation": [{"at": 1e17, "mean": 0.5, "error": 0}]},
        {"bytes": [{"gigabytes": 1e30, "seen": 0.5, "unseen": None}]},
        {"bytes": [{"gigabytes": x, "seen": 0.5, "unseen": None} for x in (1e29, 1.0000000000000003e29)]},
    ],
)
def test_numbers_that_no_analysis_gives_are_drawn_all_the_same(tmp_path: Path, extreme: dict[str, object]) -> None:
    nothing: dict[str, object] = {"map": [], "correlation": None, "alpha": [], "size": [], "bytes": []}
    page = report(tmp_path, analysed(make_run(tmp_path / "run", "pefll"), **{**nothing, **extreme}))
    assert "nan" not in page.words
    charts = [
        attributes["aria-label"] for name, attributes in page.tags if name == "svg" and "aria-label" in attributes
    ]
    assert any(str(chart).startswith("accuracy: ") for chart in charts)


def test_the_score_of_a_single_newcomer_has_no_band(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", "pefll")
    alone = [{"at": at, "mean": 0.5, "error": None} for at in (0.1, 1)]
    report(tmp_path, analysed(folder, alpha=alone, size=[]))
    text = (tmp_path / "report.html").read_text()
    chart = text[text.index('aria-label="accuracy: other class shares') :]
    chart = chart[: chart.index("</svg>")]
    assert "mark-area" not in chart and "±" not in chart and "pefll" in chart


@pytest.mark.long
def test_maps_of_many_analysed_runs_have_fewer_dots_each(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("unalike.report.page.charts._MOST_DOTS", 500)
    folders = [analysed(make_run(tmp_path / f"run-{i}", "pefll", clients=300)) for i in range(2)]
    for shown, dots in ((folders[:1], 300), (folders, 250)):
        report(tmp_path, *shown)
        text = (tmp_path / "report.html").read_text()
        chart = text[text.index('aria-label="PCA of descriptors') :]
        assert chart[: chart.index("</svg>")].count("data-tip") == dots


def test_clients_that_turn_their_images_are_coloured_by_rotation(tmp_path: Path) -> None:
    """T1 Fig. 5.1: one colour for each rotation, whatever the scores, and its angle written beside."""
    folder = make_run(tmp_path / "run", "pefll")
    turned = [(0.0, 90.0, 180.0, 270.0)[i % 4] for i in range(30)]
    places = [
        {"name": str(i), "group": "seen", "main_class": "3", "rotation": angle, "pca": [i, 0], "t_sne": [i, 0]}
        for i, angle in enumerate(turned)
    ]
    report(tmp_path, analysed(folder, map=places))
    text = (tmp_path / "report.html").read_text()
    chart = text[text.index('aria-label="PCA of descriptors') :]
    chart = chart[: chart.index("</svg>")]
    assert all(f">{angle}°<" in chart for angle in (0, 90, 180, 270)) and "coloured by rotation" in text
    places[3]["rotation"] = None  # not of everybody: then classes are written
    report(tmp_path, analysed(folder, map=places))
    assert "coloured by rotation" not in (tmp_path / "report.html").read_text()


def test_names_in_analyses_are_escaped(tmp_path: Path) -> None:
    evil = "<script>alert(1)</script>"
    folder = make_run(tmp_path / "run", "pefll")
    places = [{"name": evil, "group": "seen", "main_class": evil, "pca": [i, 0], "t_sne": [i, 0]} for i in range(30)]
    page = report(tmp_path, analysed(folder, map=places, left_out={"blur": evil}))
    assert [name for name, _ in page.tags].count("script") == 1 and evil in page.words


def test_a_broken_file_of_analyses_is_named_and_nothing_is_written(tmp_path: Path) -> None:
    folder = analysed(make_run(tmp_path / "run", "pefll"), alpha=[{"at": "far"}])
    with pytest.raises(UserError, match=r"analyses.json: alpha.0.at.*unalike analyse"):
        write_report([folder], tmp_path / "report.html")
    assert not (tmp_path / "report.html").exists()


def test_what_is_about_single_clients_lies_in_simulation_and_a_report_does_without_it(tmp_path: Path) -> None:
    runs = [analysed(make_run(tmp_path / "whole" / name, name)) for name in ("fedavg", "pefll")]
    assert "client-000" in str(report(tmp_path, *runs).tags)
    for run in runs:
        shutil.copytree(run, tmp_path / "handed" / run.name, ignore=shutil.ignore_patterns("simulation"))
        assert not any("client-000" in file.read_text() for file in (tmp_path / "handed" / run.name).iterdir())
    page = report(tmp_path, *(tmp_path / "handed" / run.name for run in runs))
    left_out = "is left out: scores, maps and analyses of single clients."
    assert f"pefll: no simulation/ in pefll; what is made from that {left_out}" in page.words
    assert "client-000" not in str(page.tags) and "Analyses" not in page.parts["h2"] and "no map" in page.words
    mean = json.loads((runs[1] / "result.json").read_text())["accuracy"]["seen"]["mean"]
    assert SCALE(mean) in page.words and "no client has a score in both; that may be chance" in page.words
