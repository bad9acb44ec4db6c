"""The report's section of analyses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.studio.report_pages import report
from tests.studio.run_folders import make_run
from unalike.studio.errors import UserError
from unalike.studio.report.page import write_report


@pytest.fixture
def runs(tmp_path: Path) -> list[Path]:
    return [make_run(tmp_path / name, name) for name in ("local", "fedavg", "fedavg-finetune", "pefll")]


def analysed(folder: Path, **changes: object) -> Path:
    """The run with analyses of its clients: a curve, a map and a line of bytes."""
    clients = json.loads((folder / "simulation" / "clients.json").read_text())
    spots = [[i % 7, i // 7] for i in range(len(clients["names"]))]
    point = {"mean": 0.5, "error": 0.1}
    found = {
        "round": 20,
        "quick": False,
        "map": {
            "names": clients["names"],
            "group": clients["group"],
            "main_class": ["three"] * len(spots),
            "pca": spots,
            "t_sne": spots,
        },
        "correlation": {"mean": 0.625, "low": -0.25, "high": 0.875, "clients": 7, "untrained": 0.125},
        "alpha": [{"at": at, **point} for at in (0.1, 1, 10)],
        "size": [{"epsilon": None, "points": [{"at": 5, **point}, {"at": 100, "mean": 0.75, "error": 0.1}]}],
        "bytes": [{"gigabytes": 0.001, "seen": 0.25, "unseen": None}, {"gigabytes": 0.003, "seen": 0.5, "unseen": 0.4}],
        "left_out": {"blur": "it holds features, no images"},
        **changes,
    }
    (folder / "analyses.json").write_text(json.dumps(found))
    return folder


def test_analyses_have_a_section_where_they_are(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", "pefll")
    assert "Analyses" not in report(tmp_path, folder).parts["h2"]
    page = report(tmp_path, analysed(folder))
    assert "Analyses" in page.parts["h2"]
    assert {"0.62", "-0.25 to 0.88", "0.12"} <= set(page.parts["td"])
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
    analysed(runs[2], map=None, correlation=None)
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


def test_a_file_of_an_older_version_has_neither_delta_nor_a_correlation_before_training(tmp_path: Path) -> None:
    curves = [{"epsilon": e, "points": [{"at": 5, "mean": 0.5, "error": 0.0}]} for e in (None, 0.5)]
    old = {"mean": 0.625, "low": -0.25, "high": 0.875, "clients": 7}
    page = report(tmp_path, analysed(make_run(tmp_path / "run", "pefll"), size=curves, correlation=old))
    assert "and privacy, δ unknown (P2 Fig. 5)" in page.words and "not measured" in page.parts["td"]


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
    nothing: dict[str, object] = {"map": None, "correlation": None, "alpha": [], "size": [], "bytes": []}
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


def test_maps_of_many_analysed_runs_have_fewer_dots_each(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("unalike.studio.report.charts._MOST_DOTS", 500)
    folders = [analysed(make_run(tmp_path / f"run-{i}", "pefll", clients=300, seed=i)) for i in range(2)]
    for shown, dots in ((folders[:1], 300), (folders, 250)):
        report(tmp_path, *shown)
        text = (tmp_path / "report.html").read_text()
        chart = text[text.index('aria-label="PCA of descriptors') :]
        assert chart[: chart.index("</svg>")].count("data-tip") == dots


def test_names_in_analyses_are_escaped(tmp_path: Path) -> None:
    evil = "<script>alert(1)</script>"
    folder = make_run(tmp_path / "run", "pefll")
    count = len(json.loads((folder / "simulation" / "clients.json").read_text())["names"])
    spots = [[float(i), 0.0] for i in range(count)]
    hostile = {"names": [evil] * count, "group": ["seen"] * count, "main_class": [evil] * count}
    page = report(tmp_path, analysed(folder, map={**hostile, "pca": spots, "t_sne": spots}, left_out={"blur": evil}))
    assert [name for name, _ in page.tags].count("script") == 1 and evil in page.words


def test_a_broken_file_of_analyses_is_named_and_nothing_is_written(tmp_path: Path) -> None:
    folder = analysed(make_run(tmp_path / "run", "pefll"), alpha=[{"at": "far"}])
    with pytest.raises(UserError, match=r"analyses.json: alpha.0.at.*unalike analyse"):
        write_report([folder], tmp_path / "report.html")
    assert not (tmp_path / "report.html").exists()
