"""The report: whole, true to the files, safe against what they hold, and clear about what is missing or broken."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tests.report.report_pages import SCALE, edit, report
from tests.report.run_folders import make_run
from unalike.report.page.page import write_report
from unalike.report.page.read import read_runs
from unalike.report.page.transcript import describe, rows
from unalike.runs.errors import UserError
from unalike.runs.map_data import plane
from unalike.runs.words import duration, size

drawn = pytest.mark.usefixtures("drawings")  # for tests that look at charts, or for what must be nowhere in a page


@pytest.fixture
def runs(tmp_path: Path) -> list[Path]:
    return [make_run(tmp_path / name, name) for name in ("local", "fedavg", "fedavg-finetune", "pefll")]


def test_numbers_of_every_result_are_in_the_table(tmp_path: Path, runs: list[Path]) -> None:
    page = report(tmp_path, *runs)
    cells = {text.strip() for name in ("td", "b", "span") for text in page.parts[name]}
    for folder in runs:
        result = json.loads((folder / "result.json").read_text())
        assert result["method"] in page.parts["th"]
        assert size(result["bytes"]["up"]) in cells and duration(result["seconds"]) in cells
        for summary in filter(None, result["accuracy"].values()):
            assert f"{100 * summary['mean']:.1f}%" in cells
            assert f"± {100 * summary['std']:.1f}" in cells
            assert f"{100 * summary['p10']:.1f}%" in cells


def test_every_group_that_a_method_does_not_serve_says_so(tmp_path: Path, runs: list[Path]) -> None:
    page = report(tmp_path, *runs)
    # local serves neither unseen nor unlabeled clients, fedavg-finetune no unlabeled ones
    assert page.parts["td"].count("not served") == 3


def test_one_run_gets_all_sections_and_its_guarantee(tmp_path: Path) -> None:
    page = report(tmp_path, make_run(tmp_path / "run", "fedavg", private=True))
    sections = [attributes["id"] for name, attributes in page.tags if name == "section"]
    assert sections == ["result", "rounds", "clients", "map", "cost", "transcript", "recipe"]
    assert "ε = 4.02, δ = 1e-05 for each client" in page.words
    assert "Privacy spent" in page.words and "Everything carried noise." in page.words


def test_a_run_without_noise_promises_nothing(tmp_path: Path) -> None:
    page = report(tmp_path, make_run(tmp_path / "run", "fedavg"))
    assert "No differential privacy" in page.words and "∞" in page.parts["td"]
    assert "Privacy spent" not in page.words


@drawn
def test_no_page_refers_to_the_outside(tmp_path: Path, runs: list[Path]) -> None:
    page = report(tmp_path, *runs)
    targets = [value for _, attributes in page.tags for key, value in attributes.items() if key in ("src", "href")]
    assert targets == ["data:,"]
    text = (tmp_path / "report.html").read_text()
    assert not re.search(r"https?://|@import|url\(", text)
    policies = [attributes["content"] for _, attributes in page.tags if "http-equiv" in attributes]
    assert len(policies) == 1 and str(policies[0]).startswith("default-src 'none';")


@drawn
def test_all_that_files_hold_is_escaped(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", "fedavg")
    evil = '<script>alert("1")</script>'
    edit(folder / "result.json", method=evil, data=evil, metric=evil)
    edit(folder / "versions.json", **{evil: evil})
    table = (folder / "simulation" / "scores.csv").read_text()
    (folder / "simulation" / "scores.csv").write_text(table.replace("client-000", '"' + evil.replace('"', '""') + '"'))
    people = json.loads((folder / "simulation" / "map.json").read_text())
    edit(folder / "simulation" / "map.json", names=[evil, *people["names"][1:]], class_names=[evil] * 10)
    rows = json.loads((folder / "transcript.json").read_text())
    hostile = {"array": evil, "task": evil, "noise": evil, "note": evil, "seen_as": evil, "sampling": evil}
    (folder / "transcript.json").write_text(json.dumps([{**rows[0], **hostile}]))
    (folder / "recipe.toml").write_text(f"title = '{evil}'\n")
    page = report(tmp_path, folder)
    assert [name for name, _ in page.tags].count("script") == 1
    text = (tmp_path / "report.html").read_text()
    assert "<script>alert" not in text and text.count("&lt;script&gt;") > 10
    assert evil in page.words


@pytest.mark.parametrize(
    "name",
    [
        "metrics.jsonl",
        "simulation/scores.csv",
        "simulation/map.json",
        "transcript.json",
        "recipe.toml",
        "versions.json",
    ],
)
def test_an_absent_file_is_named_and_the_rest_is_shown(tmp_path: Path, name: str) -> None:
    folder = make_run(tmp_path / "run", "fedavg")
    (folder / name).unlink()
    page = report(tmp_path, folder)
    assert f"fedavg: no {name} in run; what is made from that is left out." in page.words
    assert len([tag for tag, _ in page.tags if tag == "section"]) == 7


@drawn
def test_the_result_alone_is_enough(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", "fedavg")
    for file in folder.rglob("*.*"):
        if file.name not in ("result.json", "unalike.json"):
            file.unlink()
    page = report(tmp_path, folder)
    assert "no curve to show" in page.words and "There is no map" in page.words
    mean = json.loads((folder / "result.json").read_text())["accuracy"]["seen"]["mean"]
    assert SCALE(mean) in page.words


@pytest.mark.parametrize(
    ("name", "text", "says"),
    [
        ("result.json", '{"method": "fed', "result.json: Invalid JSON: EOF while parsing a string at line 1 column 15"),
        ("result.json", '{"method": "fedavg"}', "result.json: data: Field required"),
        ("metrics.jsonl", '{"round": 1}\n{"rou', "metrics.jsonl, line 2: Invalid JSON: EOF"),
        ("metrics.jsonl", '{"round": "first"}\n', "metrics.jsonl, line 1: round"),
        ("simulation/scores.csv", "client,group,score\na,seen,high\n", "scores.csv, row 2: score"),
        ("simulation/map.json", '{"names": ["a"], "group": [], "n": [1]}', "group has 0 entries for 1 names"),
        ("transcript.json", "[1]", "transcript.json: 0"),
        ("recipe.toml", "method = ", "recipe.toml is not valid TOML"),
        ("versions.json", b"\xff\xfe", "versions.json is not UTF-8 text"),
    ],
)
def test_a_broken_file_is_named_with_the_fault_and_nothing_is_written(
    tmp_path: Path, name: str, text: str | bytes, says: str
) -> None:
    folder = make_run(tmp_path / "run", "fedavg")
    (folder / name).write_bytes(text.encode() if isinstance(text, str) else text)
    with pytest.raises(UserError) as caught:
        write_report([folder], tmp_path / "report.html")
    assert says in str(caught.value) and "repeat the run" in str(caught.value)
    assert not (tmp_path / "report.html").exists()


def test_an_unfinished_run_is_told_apart_from_no_run(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", "fedavg")
    (folder / "result.json").unlink()
    with pytest.raises(UserError, match=r"has not ended.*unalike resume"):
        write_report([folder], tmp_path / "report.html")
    with pytest.raises(UserError, match="no such folder"):
        write_report([tmp_path / "nowhere"], tmp_path / "report.html")
    with pytest.raises(UserError, match="at least one"):
        write_report([], tmp_path / "report.html")


def test_runs_of_different_metrics_are_not_compared(tmp_path: Path, runs: list[Path]) -> None:
    edit(runs[0] / "result.json", metric="negative mean squared error")
    with pytest.raises(UserError, match="cannot be compared"):
        write_report(runs, tmp_path / "report.html")


def test_equal_methods_are_told_apart_by_what_differs(tmp_path: Path) -> None:
    seeds = [make_run(tmp_path / f"run{seed}", "fedavg", seed=seed) for seed in (1, 2)]
    for folder in seeds:
        (folder / "recipe.toml").unlink()  # so that nobody knows whether they are the same but for the seed
    assert [run.label for run in read_runs(seeds)] == ["fedavg, seed 1", "fedavg, seed 2"]
    twins = [make_run(tmp_path / name, "fedavg") for name in ("a", "b")]
    assert [run.label for run in read_runs(twins)] == ["fedavg (a)", "fedavg (b)"]


def test_what_differs_between_recipes_is_listed(tmp_path: Path) -> None:
    folders = [make_run(tmp_path / name, "fedavg") for name in ("a", "b")]
    for folder, rate in zip(folders, ("0.1", "0.2"), strict=True):
        own = f"\n[hyperparameters]\nlr = {rate}\nonly_{folder.name} = 1\n"
        (folder / "recipe.toml").write_text((folder / "recipe.toml").read_text() + own)
    page = report(tmp_path, *folders)
    assert "lr" in page.parts["code"] and {"0.1", "0.2"} <= set(page.parts["td"])
    assert "rounds" not in page.parts["code"] and "only_a" not in page.parts["code"]


def test_transcript_reads_as_plain_words(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", "pefll")
    page = report(tmp_path, folder)
    assert "The server saw descriptor of each client individually." in page.words
    assert "Each client's own" in page.words and "Mean only" in page.words
    assert "10 of 23, drawn at random" in page.words
    assert describe({"kind": "Gaussian", "noise_multiplier": 1.1}) == "Gaussian, 1.1 times the bound"
    (run,) = read_runs([folder])
    sights = [run.transcript[0].model_copy(update={"times": times}) for times in (1, 2, 3000)]  # type: ignore[index]
    assert [row["often"] for row in rows(replace(run, transcript=sights))] == ["once", "twice", "3,000 times"]
    assert describe({"kind": "Something", "else": 1.23456}) == "Something(else=1.235)"
    assert describe("Gaussian(noise_multiplier=1.1)") == "Gaussian(noise_multiplier=1.1)"  # of an older version


@drawn
@pytest.mark.long
def test_many_clients_make_a_page_of_bounded_size(tmp_path: Path) -> None:
    report(tmp_path, make_run(tmp_path / "run", "fedavg", clients=4000))
    assert (tmp_path / "report.html").stat().st_size < 2_500_000


@drawn
def test_scores_that_are_no_accuracy_are_plain_numbers(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", "fedavg")
    edit(folder / "result.json", metric="negative mean squared error")
    mean = json.loads((folder / "result.json").read_text())["accuracy"]["seen"]["mean"]
    page = report(tmp_path, folder)
    assert f"{mean:.3g}" in page.words and "%" not in " ".join(page.parts["h1"])


def test_the_map_keeps_distances_of_a_plane() -> None:
    random = np.random.default_rng(0)
    flat = random.normal(size=(12, 2))
    turned = flat @ np.linalg.qr(random.normal(size=(5, 2)))[0].T
    placed = plane(turned)
    distance = np.linalg.norm(flat[:, None] - flat[None], axis=-1)
    np.testing.assert_allclose(np.linalg.norm(placed[:, None] - placed[None], axis=-1), distance, atol=1e-12)
    assert plane(np.ones((1, 1))).shape == (1, 2)


@drawn
def test_charts_take_the_colours_of_the_page_and_say_what_each_mark_is(tmp_path: Path, runs: list[Path]) -> None:
    page = report(tmp_path, *runs)
    text = (tmp_path / "report.html").read_text()
    charts = [attributes for name, attributes in page.tags if name == "svg"]
    assert len(charts) > 10 and all(attributes["role"] == "img" and attributes["aria-label"] for attributes in charts)
    assert not re.search(r'(fill|stroke)="#', text)  # each is a variable, which the page sets for light and for dark
    used = set(re.findall(r"var\(--(\w+)\)", text))
    assert {"s0", "s3", "grid"} <= used <= set(re.findall(r"--(\w[\w-]*):", text))
    tips = [attributes["data-tip"] for _, attributes in page.tags if "data-tip" in attributes]
    assert any(str(tip).startswith("fedavg\nround 20: ") for tip in tips)
    assert any("clients" in str(tip) and str(tip).startswith("pefll\n") for tip in tips)


@drawn
def test_runs_that_send_nothing_are_named_beside_those_that_do(tmp_path: Path, runs: list[Path]) -> None:
    page = report(tmp_path, *runs)
    assert {"nothing up", "nothing down", "1MB"} <= set(page.parts["text"])
    alone = report(tmp_path, runs[0])
    assert "Bytes sent" not in alone.words


def test_the_headline_is_one_short_line(tmp_path: Path, runs: list[Path]) -> None:
    for shown in (runs, runs[:1], runs[1:3]):
        (headline,) = report(tmp_path, *shown).parts["h1"]
        assert len(headline) < 80 and ";" not in headline and headline[-1] != "."


@drawn
def test_no_text_tells_a_reader_on_a_phone_to_hover(tmp_path: Path, runs: list[Path]) -> None:
    page = report(tmp_path, *runs)
    assert "over" in page.words and "hover" not in page.words.lower()
    assert "The server sees the array of every single client." in page.words


@drawn
def test_budgets_weights_and_clusters_are_drawn_where_a_run_has_them(tmp_path: Path, runs: list[Path]) -> None:
    run = runs[1]
    assert "How clients were treated" not in report(tmp_path, run).words
    own = {"declared": 2.0, "spent": 1.5, "delta": 1e-4}
    edit(run / "result.json", privacy={"private": True, "epsilon": 1.5, "delta": 1e-4, "clients": {"a": own}})
    treated = {"names": ["a", "b"], "weight": [0.75, 0.25], "cluster": [0, None], "place": [[1.0, 2.0], [0.0, 1.0]]}
    (run / "treated.json").write_text(json.dumps(treated))
    page = report(tmp_path, run)
    tips = {str(attributes["data-tip"]) for _, attributes in page.tags if "data-tip" in attributes}
    assert {"a\nspent 1.5 of ε = 2", "a\nweight 0.75, ε = 2", "a\ncluster 1", "b\nno cluster yet"} <= tips
    assert "1 cluster, in the plane of first updates" in page.words
    edit(run / "treated.json", place=None)
    assert "1 cluster, a column each" in report(tmp_path, run).words
    edit(run / "treated.json", weight=[1.0])
    with pytest.raises(UserError, match="weight has 1 entries for 2 names"):
        report(tmp_path, run)
