"""The report: whole, true to the files, safe against what they hold, and clear about what is missing or broken."""

from __future__ import annotations

import json
import math
import re
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest

from motley.studio.errors import UserError
from motley.studio.markup import Html, join, tag
from motley.studio.plots import Across, Series, line_chart, nice_ticks
from motley.studio.report import ReportError, write_report
from motley.studio.report_charts import plane
from motley.studio.report_data import Run, read_runs
from motley.studio.report_words import Scale, details, duration, finding, level, size, spoken
from tests.studio.run_folders import make_run

VOID = {"br", "link", "meta"}
SCALE = Scale("accuracy")


class Page(HTMLParser):
    """Reads a page, checks that its elements are closed in order, and keeps what tests ask for."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.parts: dict[str, list[str]] = {}
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, name: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags.append((name, dict(attributes)))
        if name not in VOID:
            self.open.append(name)

    def handle_endtag(self, name: str) -> None:
        assert self.open.pop() == name

    def handle_data(self, text: str) -> None:
        self.parts.setdefault(self.open[-1] if self.open else "", []).append(text)

    @property
    def words(self) -> str:
        hidden = ("script", "style")
        return " ".join(text for name, texts in self.parts.items() if name not in hidden for text in texts)


def report(tmp_path: Path, *folders: Path) -> Page:
    out = tmp_path / "report.html"
    write_report(list(folders), out)
    return Page(out.read_text(encoding="utf-8"))


def edit(file: Path, **changes: object) -> None:
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))


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


def test_no_page_refers_to_the_outside(tmp_path: Path, runs: list[Path]) -> None:
    page = report(tmp_path, *runs)
    targets = [value for _, attributes in page.tags for key, value in attributes.items() if key in ("src", "href")]
    assert targets == ["data:,"]
    text = (tmp_path / "report.html").read_text()
    assert not re.search(r"https?://|@import|url\(", text)
    policies = [attributes["content"] for _, attributes in page.tags if "http-equiv" in attributes]
    assert len(policies) == 1 and str(policies[0]).startswith("default-src 'none';")


def test_all_that_files_hold_is_escaped(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", "fedavg")
    evil = '<script>alert("1")</script>'
    edit(folder / "result.json", method=evil, data=evil, metric=evil)
    edit(folder / "versions.json", **{evil: evil})
    table = (folder / "clients.csv").read_text()
    (folder / "clients.csv").write_text(table.replace("client-000", '"' + evil.replace('"', '""') + '"'))
    people = json.loads((folder / "clients.json").read_text())
    edit(folder / "clients.json", names=[evil, *people["names"][1:]], class_names=[evil] * 10)
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
    "name", ["metrics.jsonl", "clients.csv", "clients.json", "transcript.json", "recipe.toml", "versions.json"]
)
def test_an_absent_file_is_named_and_the_rest_is_shown(tmp_path: Path, name: str) -> None:
    folder = make_run(tmp_path / "run", "fedavg")
    (folder / name).unlink()
    page = report(tmp_path, folder)
    assert f"fedavg: no {name} in run; what is made from that is left out." in page.words
    assert len([tag for tag, _ in page.tags if tag == "section"]) == 7


def test_the_result_alone_is_enough(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", "fedavg")
    for file in folder.iterdir():
        if file.name != "result.json":
            file.unlink()
    page = report(tmp_path, folder)
    assert "no curve to show" in page.words and "there is no map" in page.words
    mean = json.loads((folder / "result.json").read_text())["accuracy"]["seen"]["mean"]
    assert SCALE(mean) in page.words


@pytest.mark.parametrize(
    ("name", "text", "says"),
    [
        ("result.json", '{"method": "fed', "result.json is not valid JSON (line 1, column 12"),
        ("result.json", '{"method": "fedavg"}', "result.json: data: Field required"),
        ("metrics.jsonl", '{"round": 1}\n{"rou', "metrics.jsonl is not valid JSON (line 2"),
        ("metrics.jsonl", '{"round": "first"}\n', "metrics.jsonl, line 1: round"),
        ("clients.csv", "client,group,score\na,seen,high\n", "clients.csv, row 2: score"),
        ("clients.json", '{"names": ["a"], "group": [], "n": [1]}', "group has 0 entries for 1 names"),
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
    with pytest.raises(ReportError) as caught:
        write_report([folder], tmp_path / "report.html")
    assert says in str(caught.value) and "repeat the run" in str(caught.value)
    assert not (tmp_path / "report.html").exists()


def test_an_unfinished_run_is_told_apart_from_no_run(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", "fedavg")
    (folder / "result.json").unlink()
    with pytest.raises(ReportError, match=r"has not ended.*motley resume"):
        write_report([folder], tmp_path / "report.html")
    with pytest.raises(ReportError, match="no such folder"):
        write_report([tmp_path / "nowhere"], tmp_path / "report.html")
    with pytest.raises(ReportError, match="at least one"):
        write_report([], tmp_path / "report.html")


def test_runs_of_different_metrics_are_not_compared(tmp_path: Path, runs: list[Path]) -> None:
    edit(runs[0] / "result.json", metric="negative mean squared error")
    with pytest.raises(ReportError, match="cannot be compared"):
        write_report(runs, tmp_path / "report.html")


def test_equal_methods_are_told_apart_by_what_differs(tmp_path: Path) -> None:
    seeds = [make_run(tmp_path / f"run{seed}", "fedavg", seed=seed) for seed in (1, 2)]
    assert [run.label for run in read_runs(seeds)] == ["fedavg, seed 1", "fedavg, seed 2"]
    twins = [make_run(tmp_path / name, "fedavg") for name in ("a", "b")]
    assert [run.label for run in read_runs(twins)] == ["fedavg (a)", "fedavg (b)"]


def with_scores(folder: Path, scores: list[float], method: str) -> Run:
    """A run with these scores on seen clients and nothing else."""
    make_run(folder, "local", clients=4)
    rows = "".join(f"c{i},seen,{score}\n" for i, score in enumerate(scores))
    (folder / "clients.csv").write_text("client,group,score\n" + rows)
    mean = {"mean": float(np.mean(scores)), "std": 0.0, "p10": min(scores)}
    edit(folder / "result.json", method=method, accuracy={"seen": mean, "unseen": None, "unlabeled": None})
    return read_runs([folder])[0]


def test_a_lead_counts_only_beyond_two_standard_errors(tmp_path: Path) -> None:
    base = with_scores(tmp_path / "a", [0.5, 0.6, 0.7, 0.8], "a")
    # differences 0.1, 0.1, 0.1, 0.2: mean 0.125, standard error 0.025
    clear = with_scores(tmp_path / "b", [0.6, 0.7, 0.8, 1.0], "b")
    # differences 0.2, -0.1, 0.2, -0.1: mean 0.05, standard error 0.087
    vague = with_scores(tmp_path / "c", [0.7, 0.5, 0.9, 0.7], "c")
    assert not level(clear, base, "seen") and level(vague, base, "seen")
    assert finding([base, clear], SCALE) == "b serves its clients best: 77.5% on seen clients."
    assert finding([base, vague], SCALE) == "No run is clearly ahead on seen clients (c: 70.0%)."


def test_only_a_clear_lead_is_marked_in_the_table(tmp_path: Path) -> None:
    scores = {"a": [0.5, 0.6, 0.7, 0.8], "b": [0.6, 0.7, 0.8, 1.0], "c": [0.7, 0.5, 0.9, 0.7]}
    for name, values in scores.items():
        with_scores(tmp_path / name, values, name)
    clear = report(tmp_path, tmp_path / "a", tmp_path / "b")
    assert [tag for tag, attributes in clear.tags if attributes.get("class") == "best"] == ["b"]
    vague = report(tmp_path, tmp_path / "a", tmp_path / "c")
    assert not [tag for tag, attributes in vague.tags if attributes.get("class") == "best"]


@pytest.mark.parametrize(
    ("recipe", "why"),
    [
        ('seed = 0\n[data]\nname = "shops.csv"\nclients = 4\n', "data.name is shops.csv for b and digits for a"),
        ('seed = 0\n[data]\nname = "digits"\nclients = 5\n', "data.clients is 5 for b and 4 for a"),
        ('seed = 1\n[data]\nname = "digits"\nclients = 4\n', "seed is 1 for b and 0 for a"),
        (
            'seed = 0\n[data]\nname = "digits"\nclients = 4\npartition = "dirichlet:0.3"\n',
            "data.partition is dirichlet:alpha=0.3 for b and not given for a",
        ),
        ("", "no recipe says how the clients of b were made"),
    ],
)
def test_runs_over_different_clients_are_not_compared_client_by_client(tmp_path: Path, recipe: str, why: str) -> None:
    with_scores(tmp_path / "a", [0.5, 0.6, 0.7, 0.8], "a")
    with_scores(tmp_path / "b", [0.6, 0.7, 0.8, 1.0], "b")
    (tmp_path / "b" / "recipe.toml").write_text(recipe)
    b, a = read_runs([tmp_path / "b", tmp_path / "a"])
    assert level(b, a, "seen")
    assert finding([b, a], SCALE) == f"No lead is claimed, because these runs are over different clients: {why}."
    page = report(tmp_path, tmp_path / "b", tmp_path / "a")
    assert "better for" not in page.words
    assert not [tag for tag, attributes in page.tags if attributes.get("class") == "best"]


def test_clients_of_the_same_settings_that_have_other_data_are_not_compared(tmp_path: Path) -> None:
    with_scores(tmp_path / "a", [0.5, 0.6, 0.7, 0.8], "a")
    with_scores(tmp_path / "b", [0.6, 0.7, 0.8, 1.0], "b")
    edit(tmp_path / "b" / "clients.json", n=[1, 2, 3, 4])
    assert "the clients of b and a differ in their n (clients.json)" in finding(
        read_runs([tmp_path / "b", tmp_path / "a"]), SCALE
    )


def test_runs_of_several_seeds_are_compared_seed_by_seed(tmp_path: Path) -> None:
    low, high = [0.5, 0.6, 0.7, 0.8], [0.6, 0.7, 0.8, 1.0]

    def repeated(place: Path, second: list[float]) -> list[Run]:
        for seed, of_b in ((0, high), (1, second)):
            for name, scores in (("a", low), ("b", of_b)):
                with_scores(place / f"{name}{seed}", scores, name)
                edit(place / f"{name}{seed}" / "result.json", seed=seed)
                (place / f"{name}{seed}" / "recipe.toml").write_text(f"seed = {seed}\n[data]\nname = 'digits'\n")
        return read_runs([place / name for name in ("a0", "a1", "b0", "b1")])

    runs = repeated(tmp_path / "clear", high)
    assert finding(runs, SCALE) == "b is best on seen clients in all 2 repetitions (77.5%)."
    assert details(runs, SCALE)[:2] == [
        f"On seen clients, b, seed {seed} is 12.5 points above a, seed {seed}: better for 4 of 4 clients, worse for 0."
        for seed in (0, 1)
    ]
    vague = repeated(tmp_path / "vague", [0.4, 0.6, 0.7, 0.8])
    assert finding(vague, SCALE) == "No method leads on seen clients in all 2 repetitions."
    assert finding(vague[:3], SCALE).startswith("No lead is claimed, because these runs are over different clients")


def test_a_single_client_shows_no_lead(tmp_path: Path) -> None:
    runs = [with_scores(tmp_path / name, [score], name) for name, score in (("a", 0.5), ("b", 0.9))]
    assert finding(runs, SCALE) == "No run is clearly ahead on seen clients (b: 90.0%)."
    assert "better for 1 of 1 clients, worse for 0; that may be chance" in details(runs, SCALE)[0]


def test_two_spellings_of_a_partition_are_no_difference(tmp_path: Path) -> None:
    for name, partition in (("a", "pathological"), ("b", "pathological:num_classes_per_partition=2")):
        with_scores(tmp_path / name, [0.5, 0.6], name)
        text = f"seed = 0\n[data]\nname = 'digits'\npartition = '{partition}'\n"
        (tmp_path / name / "recipe.toml").write_text(text)
    page = report(tmp_path, tmp_path / "a", tmp_path / "b")
    assert "data.partition" not in page.parts.get("code", []) and "different clients" not in page.words


def test_what_differs_between_recipes_is_listed(tmp_path: Path) -> None:
    folders = [make_run(tmp_path / name, "fedavg") for name in ("a", "b")]
    for folder, rate in zip(folders, ("0.1", "0.2"), strict=True):
        own = f"\n[hyperparameters]\nlr = {rate}\nonly_{folder.name} = 1\n"
        (folder / "recipe.toml").write_text((folder / "recipe.toml").read_text() + own)
    page = report(tmp_path, *folders)
    assert "lr" in page.parts["code"] and {"0.1", "0.2"} <= set(page.parts["td"])
    assert "rounds" not in page.parts["code"] and "only_a" not in page.parts["code"]


def test_transcript_reads_as_plain_words(tmp_path: Path) -> None:
    page = report(tmp_path, make_run(tmp_path / "run", "pefll"))
    assert "The server saw descriptor of each client individually." in page.words
    assert "Each client's own" in page.words and "Mean only" in page.words
    assert "10 of 23, drawn at random" in page.words
    assert spoken("Gaussian(noise_multiplier=1.1)") == "Gaussian, 1.1 times the bound"
    assert spoken("Something(else)") == "Something(else)"


def analysed(folder: Path, **changes: object) -> Path:
    """The run with analyses of its clients: a curve, a map and a line of bytes."""
    clients = json.loads((folder / "clients.json").read_text())
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
        "correlation": {"mean": 0.625, "low": -0.25, "high": 0.875, "clients": 7},
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
    assert {"0.62", "-0.25 to 0.88"} <= set(page.parts["td"])
    titles = [
        attributes["aria-label"] for name, attributes in page.tags if name == "svg" and "aria-label" in attributes
    ]
    assert "t-SNE of descriptors, pefll" in titles and "accuracy: other class shares of newcomers" in titles
    assert not [title for title in titles if title and "turned images" in title]  # nothing was measured
    assert "pefll\nDirichlet α (small: few classes each) 0.1: 50% ± 10%" in page.parts["title"]
    text = (tmp_path / "report.html").read_text()
    chart = text[text.index('aria-label="accuracy: other class shares') :]
    assert ">100%<" in chart[: chart.index("</svg>")]  # the scale has room for a band of another chart, 75% ± 10%
    assert "three" in page.parts["text"] and "1 MB" in page.parts["text"]
    assert "pefll: no blurred images: it holds features, no images." in page.words


def test_curves_of_analysed_runs_share_a_chart_and_maps_stand_side_by_side(tmp_path: Path, runs: list[Path]) -> None:
    analysed(runs[2], map=None, correlation=None)
    analysed(runs[3])
    page = report(tmp_path, *runs)
    text = (tmp_path / "report.html").read_text()
    section = text[text.index('id="analyses"') : text.index('id="cost"')]
    chart = section[section.index('aria-label="accuracy: other class shares') :]
    chart = chart[: chart.index("</svg>")]
    assert 'data-run="2"' in chart and 'data-run="3"' in chart and 'data-run="0"' not in chart
    assert section.count("of descriptors, pefll") == 2 and "of descriptors, fedavg" not in section
    assert "Not analysed: local and fedavg. For a run: motley analyse RUN" in page.words


def test_epsilon_has_a_line_each_and_the_line_without_noise_is_not_drawn_twice(tmp_path: Path) -> None:
    points = [{"at": at, "mean": 0.5, "error": 0.0} for at in (5, 50)]
    curves = [{"epsilon": epsilon, "points": points} for epsilon in (None, 0.5)]
    page = report(tmp_path, analysed(make_run(tmp_path / "run", "pefll"), size=curves))
    assert {"no noise", "ε = 0.5"} <= set(page.parts["text"])
    labels = [attributes.get("aria-label") for name, attributes in page.tags if name == "svg"]
    assert [label for label in labels if label and "number of samples" in label] == [
        "accuracy: number of samples and privacy"
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
    assert 'class="band"' not in chart and "±" not in chart and ">pefll<" in chart


def test_maps_of_many_analysed_runs_have_fewer_dots_each(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("motley.studio.report_charts._MOST_DOTS", 500)
    folders = [analysed(make_run(tmp_path / f"run-{i}", "pefll", clients=300, seed=i)) for i in range(2)]
    for shown, dots in ((folders[:1], 300), (folders, 250)):
        report(tmp_path, *shown)
        text = (tmp_path / "report.html").read_text()
        chart = text[text.index('aria-label="PCA of descriptors') :]
        assert chart[: chart.index("</svg>")].count("<title>") == dots


def test_names_in_analyses_are_escaped(tmp_path: Path) -> None:
    evil = "<script>alert(1)</script>"
    folder = make_run(tmp_path / "run", "pefll")
    count = len(json.loads((folder / "clients.json").read_text())["names"])
    spots = [[float(i), 0.0] for i in range(count)]
    hostile = {"names": [evil] * count, "group": ["seen"] * count, "main_class": [evil] * count}
    page = report(tmp_path, analysed(folder, map={**hostile, "pca": spots, "t_sne": spots}, left_out={"blur": evil}))
    assert [name for name, _ in page.tags].count("script") == 1 and evil in page.words


def test_a_broken_file_of_analyses_is_named_and_nothing_is_written(tmp_path: Path) -> None:
    folder = analysed(make_run(tmp_path / "run", "pefll"), alpha=[{"at": "far"}])
    with pytest.raises(UserError, match=r"analyses.json: alpha.0.at.*motley analyse"):
        write_report([folder], tmp_path / "report.html")
    assert not (tmp_path / "report.html").exists()


def test_a_logarithmic_axis_has_equal_steps_for_equal_factors() -> None:
    line = Series(0, "run", [(0.1, 0.0), (1.0, 0.5), (10.0, 1.0)], errors=[0.1, 0.1, 0.1])
    across = Across("α", lambda x: f"{x:g}", [0.1, 1.0, 10.0], log=True)
    chart = line_chart([line], [0.0, 0.5, 1.0], title="t", form=lambda y: f"{y:g}", across=across)
    places = [float(x) for x in re.findall(r'<circle cx="([\d.]+)"', chart)]
    assert places[1] - places[0] == pytest.approx(places[2] - places[1], abs=0.2)
    assert 'class="band"' in chart
    crowded = Across("n", lambda x: f"{x:g}", [1.0, 1.01, 10.0], log=True)
    chart = line_chart([line], [0.0, 1.0], title="t", form=lambda y: f"{y:.1f}", across=crowded)
    assert ">1<" in chart and ">1.01<" not in chart and ">10<" in chart


def test_many_clients_make_bars_and_a_page_of_bounded_size(tmp_path: Path) -> None:
    page = report(tmp_path, make_run(tmp_path / "run", "fedavg", clients=4000))
    names = [name for name, _ in page.tags]
    assert names.count("rect") > 10
    assert (tmp_path / "report.html").stat().st_size < 2_500_000


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


@pytest.mark.parametrize(
    ("low", "high"), [(0.0, 1.0), (0.61, 0.97), (3.0, 3.0), (-2e-7, 5e-7), (0.0, 12_345_678.0), (1e-14, 3e-14)]
)
def test_ticks_span_the_values_with_few_round_steps(low: float, high: float) -> None:
    ticks = nice_ticks(low, high)
    assert ticks[0] <= low and ticks[-1] >= high and 3 <= len(ticks) <= 9
    assert np.allclose(np.diff(ticks), ticks[1] - ticks[0])


def test_markup_escapes_unless_it_made_the_text_itself() -> None:
    assert tag("b", "a<b", tag("i", "&"), title='"') == '<b title="&quot;">a&lt;b<i>&amp;</i></b>'
    assert join(["<", Html("<br>"), None]) == "&lt;<br>"
    assert tag("p", None, hidden=None, id=math.pi) == '<p id="3.1"></p>'
