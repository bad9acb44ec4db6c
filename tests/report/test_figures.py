"""Figures: every kind is drawn, in every kind of file, without a network."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import altair as alt
import numpy as np
import pytest
import torch

from unalike.analytics.estimation.study import Curve, Sweep
from unalike.analytics.kmeans.algorithm import Clustering
from unalike.analytics.kmeans.study import KMeansRun
from unalike.data import load
from unalike.report.figures import estimation, kmeans
from unalike.report.figures.clients import Dot, client_map, population_chart
from unalike.report.figures.file import ENDINGS, check_ending, inline, save
from unalike.report.figures.theme import COLOURS, DARK, LIGHT, colour, dash, glyph, shape
from unalike.report.figures.training import Axis, Line, Scores, lines, scores, span, traffic
from unalike.runs.errors import UserError
from unalike.runs.result import Summary

EVIL = '<script>alert("1")</script>'


def rows_of(chart: alt.LayerChart | alt.HConcatChart) -> list[list[dict[str, Any]]]:
    """What each layer or panel of a chart is drawn from."""
    spec = chart.to_dict()
    return [spec["datasets"][part["data"]["name"]] for part in spec.get("layer") or spec["hconcat"]]


def some_lines(label: str = "run") -> alt.LayerChart:
    at = [(0.1, 0.0), (1.0, 0.5), (10.0, 1.0)]
    line = Line(0, label, at, ["low", "middle", "high"], errors=[0.1, 0.1, 0.1])
    return lines([line], Axis("α", log=True, places=[0.1, 1.0, 10.0]), Axis(domain=(0.0, 1.0)))


@pytest.mark.parametrize(
    ("ending", "begins"), [(".svg", b"<svg"), (".pdf", b"%PDF-"), (".png", b"\x89PNG"), (".html", b"<!doctype html>")]
)
def test_a_chart_becomes_the_file_that_its_ending_says(tmp_path: Path, ending: str, begins: bytes) -> None:
    path = tmp_path / "new" / f"chart{ending}"
    save(some_lines().properties(title=EVIL), path)
    content = path.read_bytes()
    assert content.startswith(begins) and len(content) > 1000
    if ending == ".html":
        text = content.decode()
        assert "<title>&lt;script&gt;" in text and "<script" not in text
        assert re.findall(r"https?://[^\"]*", text) == ["http://www.w3.org/2000/svg", "http://www.w3.org/1999/xlink"]


def test_another_ending_is_refused_with_those_that_are_known() -> None:
    check_ending(None)
    for ending in ENDINGS:
        check_ending(Path(f"chart{ending.upper()}"))
    with pytest.raises(UserError, match=r"ends in \.html, \.pdf, \.png or \.svg; front\.jpg does not"):
        check_ending(Path("front.jpg"))


def test_a_logarithmic_axis_has_equal_steps_for_equal_factors() -> None:
    chart = inline(some_lines(), "t")
    tips = r'<path data-tip="(?:low|middle|high)" transform="translate\(([\d.]+),([\d.]+)\)"'
    places = [(float(x), float(y)) for x, y in re.findall(tips, chart)]
    assert len(places) == 3 and places[1][0] - places[0][0] == pytest.approx(places[2][0] - places[1][0], abs=0.2)
    assert places[0][1] > places[1][1] > places[2][1] and "mark-area" in chart


def test_what_a_file_calls_its_runs_and_clients_stays_text() -> None:
    marks = [Dot(0.0, 0.0, EVIL, 20.0, 3, "circle"), Dot(1.0, 0.0, EVIL, 20.0, None, "diamond")]
    drawn = (
        some_lines(EVIL),
        traffic([(EVIL, 10.0, 0.0)]),
        scores([Scores(0, EVIL, [0.5], Summary(mean=0.5, std=0.0, p10=0.4))], Axis(EVIL, domain=(0.0, 1.0)), str),
        client_map(marks, [(0.0, 0.0, EVIL)]),
    )
    for chart in drawn:
        text = inline(chart, EVIL)
        assert "<script" not in text and "&lt;script" in text


def test_no_two_runs_look_the_same() -> None:
    assert len(set(LIGHT.values())) == len(LIGHT) and set(LIGHT) == set(DARK)
    for kind in (colour, shape, glyph):
        assert len({kind(i) for i in range(COLOURS)}) == COLOURS
    assert len({(colour(i), str(dash(i))) for i in range(3 * COLOURS)}) == 3 * COLOURS


def test_clients_at_one_place_do_not_hide_each_other() -> None:
    chart = client_map([Dot(0.0, 0.0, f"client {i}", 20.0, 6, "circle") for i in range(30)], [(0.0, 0.0, "a class")])
    places = np.array([(row["x"], row["y"]) for row in rows_of(chart)[0]])
    distance = np.linalg.norm(places[:, None] - places[None], axis=-1) + 100 * np.eye(len(places))
    assert distance.min() >= 8 and np.abs(places).max() < 60


@pytest.mark.parametrize("values", [[0.5], [3.0, 3.0], [0.0, 0.0], [-1e-14, 3e-14]])
def test_a_scale_has_two_ends(values: list[float]) -> None:
    low, high = span(values)
    assert low < high and low <= min(values) and high >= max(values)


def test_scores_are_counted_in_bars() -> None:
    found = Scores(0, "run", [0.0, 0.5, 0.5, 0.5, 1.0], Summary(mean=0.5, std=0.3, p10=0.2))
    text = inline(scores([found], Axis(domain=(0.0, 1.0)), lambda value: f"{value:g}"), "t")
    assert re.findall(r'data-tip="run[^:"]*: (\d) client', text) == ["1", "3", "1"]


def test_labels_of_clients_are_stacked_and_sizes_counted() -> None:
    population = load("digits", partition="pathological:2", clients=30)
    chart = population_chart(population)
    bars, sizes = rows_of(chart)
    stacked = [sum(row["rows"] for row in bars if row["client"] == population.train.name(i)) for i in range(30)]
    assert stacked == population.sizes.tolist() and sum(row["clients"] for row in sizes) == 30
    assert chart.to_dict()["title"].startswith("digits: 30 clients")


def test_many_clients_without_classes_are_drawn_as_some_of_them() -> None:
    bars, sizes = rows_of(population_chart(load("bernoulli:clients=500")))
    assert len(bars) == 60 and sum(row["clients"] for row in sizes) == 500


def test_a_pareto_front_has_only_runs_that_no_other_beats() -> None:
    runs = [KMeansRun("ours", epsilon, 1, cost) for epsilon, cost in ((1.0, 5.0), (2.0, 6.0), (3.0, 4.0))]
    every, front, *_ = rows_of(kmeans.pareto(runs, {"Optimal": 3.5}, "title"))
    assert len(every) == 3 and [row["cost"] for row in front] == [5.0, 4.0]


def test_runs_that_failed_do_not_press_a_pareto_front_into_a_line() -> None:
    runs = [
        KMeansRun("ours", epsilon, 1, cost) for epsilon, cost in ((0.1, 4000.0), (1.0, 5.0), (2.0, 4.0), (3.0, 3.9))
    ]
    chart = kmeans.pareto(runs, {"Optimal": 3.5}, "title")
    assert all(row["cost"] <= 5 for row in [*rows_of(chart)[0], *rows_of(chart)[1]])
    assert str(chart.title) == "title (1 run above 6.75 left out)"


@pytest.mark.parametrize("dim", [1, 3])
def test_a_clustering_is_drawn_in_the_plane_of_its_centres(dim: int) -> None:
    torch.manual_seed(0)
    found = Clustering(torch.randn(4, dim), torch.zeros(4, dim), 1.0, 20, curve=(3.0, 2.0, 1.0, 0.5))
    chart = kmeans.clustering(found, torch.randn(20, dim), {"ours": 1.0, "Optimal": 0.9}, "title")
    assert inline(chart, "title").count("mark-symbol") >= 3


def test_errors_are_drawn_against_epsilon_and_bits() -> None:
    swept = Sweep(Curve([0.5, 1.0], [0.3, 0.2], [0.31, 0.19]), Curve([1.0, 2.0], [0.4, 0.25]), 0.5, 0.1)
    text = inline(estimation.sweep("title", swept, ", δ = 0.01"), "t")
    assert "Locally private, δ = 0.01" in text and "Theorem 2" in text and "bits of a number" in text
