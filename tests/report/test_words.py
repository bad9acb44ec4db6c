"""What a report says of runs in words: who leads, over which clients, and by how much."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from tests.report.report_pages import SCALE, edit, report
from tests.report.run_folders import make_run
from unalike.report.page.read import Run, read_runs
from unalike.report.page.words import Lead, Scale, client_table, details, finding


def with_scores(folder: Path, scores: list[float], method: str) -> Run:
    """A run with these scores on seen clients and nothing else."""
    make_run(folder, "local", clients=4)
    rows = "".join(f"c{i},seen,{score}\n" for i, score in enumerate(scores))
    (folder / "simulation" / "scores.csv").write_text("client,group,score\n" + rows)
    mean = {"mean": float(np.mean(scores)), "std": 0.0, "p10": min(scores)}
    edit(folder / "result.json", method=method, accuracy={"seen": mean, "unseen": None, "unlabeled": None})
    return read_runs([folder])[0]


def test_a_lead_counts_only_beyond_two_standard_errors(tmp_path: Path) -> None:
    base = with_scores(tmp_path / "a", [0.5, 0.6, 0.7, 0.8], "a")
    # differences 0.1, 0.1, 0.1, 0.2: mean 0.125, standard error 0.025
    clear = with_scores(tmp_path / "b", [0.6, 0.7, 0.8, 1.0], "b")
    # differences 0.2, -0.1, 0.2, -0.1: mean 0.05, standard error 0.087
    vague = with_scores(tmp_path / "c", [0.7, 0.5, 0.9, 0.7], "c")
    assert Lead.of(clear, base, "seen").clear and not Lead.of(vague, base, "seen").clear
    assert finding([base, clear], SCALE) == "b is best on seen clients: 77.5%"
    assert finding([base, vague], SCALE) == "No run is clearly ahead on seen clients: c has 70.0%"
    close = with_scores(tmp_path / "d", [0.6, 0.7, 0.8, 0.98], "d")  # below b for one client alone
    shared = "b (77.5%) and d (77.0%) share the lead on seen clients"
    assert finding([base, clear, close], SCALE) == shared


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
    assert not Lead.of(b, a, "seen").clear
    assert finding([b, a], SCALE) == "No lead is claimed: these runs are over different clients"
    assert details([b, a], SCALE)[0] == f"{why[0].upper()}{why[1:]}."
    page = report(tmp_path, tmp_path / "b", tmp_path / "a")
    assert "better for" not in page.words
    assert not [tag for tag, attributes in page.tags if attributes.get("class") == "best"]


def test_clients_of_the_same_settings_that_have_other_data_are_not_compared(tmp_path: Path) -> None:
    with_scores(tmp_path / "a", [0.5, 0.6, 0.7, 0.8], "a")
    with_scores(tmp_path / "b", [0.6, 0.7, 0.8, 1.0], "b")
    edit(tmp_path / "b" / "simulation" / "map.json", n=[1, 2, 3, 4])
    lines = details(read_runs([tmp_path / "b", tmp_path / "a"]), SCALE)
    assert "The clients of b and a differ in their n (map.json)." in lines


def test_a_lead_over_several_seeds_is_one_with_every_seed(tmp_path: Path) -> None:
    low, high = [0.5, 0.6, 0.7, 0.8], [0.6, 0.7, 0.8, 1.0]

    def repeated(place: Path, second: list[float]) -> list[Run]:
        for seed, of_b in ((0, high), (1, second)):
            for name, scores in (("a", low), ("b", of_b)):
                with_scores(place / f"{name}{seed}", scores, name)
                edit(place / f"{name}{seed}" / "result.json", seed=seed)
                (place / f"{name}{seed}" / "recipe.toml").write_text(f"seed = {seed}\n[data]\nname = 'digits'\n")
        return read_runs([place / name for name in ("a0", "a1", "b0", "b1")])

    runs = repeated(tmp_path / "clear", high)
    assert [run.label for run in runs] == ["a", "b"] and [run.seeds for run in runs] == [(0, 1), (0, 1)]
    assert finding(runs, SCALE) == "b is best on seen clients: 77.5% ± 0.0 over 2 seeds"
    assert details(runs, SCALE)[0] == "On seen clients, b is 12.5 points above a: better with 2 of 2 seeds."
    vague = repeated(tmp_path / "vague", [0.4, 0.6, 0.7, 0.8])
    assert finding(vague, SCALE) == "No run is clearly ahead on seen clients: b has 70.0% ± 7.5 over 2 seeds"
    assert "better with 1 of 2 seeds; that may be chance" in details(vague, SCALE)[0]


def test_a_single_client_shows_no_lead(tmp_path: Path) -> None:
    runs = [with_scores(tmp_path / name, [score], name) for name, score in (("a", 0.5), ("b", 0.9))]
    assert finding(runs, SCALE) == "No run is clearly ahead on seen clients: b has 90.0%"
    assert "better for 1 of 1 client, worse for 0; that may be chance" in details(runs, SCALE)[0]


def test_two_spellings_of_a_partition_are_no_difference(tmp_path: Path) -> None:
    for name, partition in (("a", "pathological"), ("b", "pathological:num_classes_per_partition=2")):
        with_scores(tmp_path / name, [0.5, 0.6], name)
        text = f"seed = 0\n[data]\nname = 'digits'\npartition = '{partition}'\n"
        (tmp_path / name / "recipe.toml").write_text(text)
    page = report(tmp_path, tmp_path / "a", tmp_path / "b")
    assert "data.partition" not in page.parts.get("code", []) and "different clients" not in page.words


def test_the_seeds_of_a_method_are_one_row_with_their_deviation(tmp_path: Path) -> None:
    folders = [
        make_run(tmp_path / f"{name}{seed}", name, seed=seed) for name in ("fedavg", "local") for seed in range(3)
    ]
    runs = read_runs(folders)
    assert [run.label for run in runs] == ["fedavg", "local"]
    results = [json.loads((folder / "result.json").read_text()) for folder in folders[:3]]
    means = [result["accuracy"]["seen"]["mean"] for result in results]
    summary = runs[0].result.accuracy.seen
    assert summary is not None
    assert summary.mean == pytest.approx(np.mean(means)) and summary.std == pytest.approx(np.std(means))
    assert runs[0].result.bytes.up == np.mean([result["bytes"]["up"] for result in results])
    last = runs[0].rounds[-1].seen
    assert last is not None and last.mean == pytest.approx(np.mean(means), abs=1e-9)
    page = report(tmp_path, *folders)
    assert (
        SCALE(summary.mean) in page.words and SCALE.spread(summary.std) in page.words and "over 3 seeds" in page.words
    )
    assert len(page.parts["button"]) == 2 and "seed 0" not in page.words


def test_clients_have_a_table_by_name_up_to_fifty(tmp_path: Path) -> None:
    few = [make_run(tmp_path / f"few{seed}", "fedavg", clients=20, seed=seed) for seed in (0, 1)]
    (run,) = read_runs(few)
    rows = client_table([run], SCALE)
    assert len(rows) == 25 and [row[1] for row in rows] == ["seen"] * 15 + ["unseen"] * 5 + ["unlabeled"] * 5
    scores = [pd.read_csv(folder / "simulation" / "scores.csv", index_col="client") for folder in few]
    first = np.mean([table.loc["client-000"]["score"] for table in scores])
    assert rows[0][0] == "client-000" and rows[0][3:] == [SCALE(first)]
    assert "client-000" in report(tmp_path, *few).parts["th"]
    (many,) = read_runs([make_run(tmp_path / "many", "fedavg", clients=60)])
    assert client_table([many], SCALE) == []


def test_an_error_is_a_positive_number_of_which_less_is_better(tmp_path: Path) -> None:
    for name, errors in (("a", [-0.5, -0.6, -0.7, -0.8]), ("b", [-0.1, -0.2, -0.3, -0.5])):
        with_scores(tmp_path / name, errors, name)
        edit(tmp_path / name / "result.json", metric="negative mean squared error")
    a, b = read_runs([tmp_path / "a", tmp_path / "b"])
    assert a.result.metric == "mean squared error" and a.scores("seen")["c0", 0] == 0.5
    scale = Scale("mean squared error", lower_is_better=True)
    assert finding([a, b], scale) == "b is best on seen clients: 0.275"
    assert details([a, b], scale)[0] == "On seen clients, b is 0.38 below a: better for 4 of 4 clients, worse for 0."
    page = report(tmp_path, tmp_path / "a", tmp_path / "b")
    assert "90th percentile" in page.words and "0.8" in page.words and "-0." not in page.words
    assert "negative" not in page.words


def test_clients_that_differ_in_one_direction_only_have_no_map(tmp_path: Path) -> None:
    """The shares of two classes add up to 1."""
    folder = make_run(tmp_path / "two", "fedavg", clients=4)
    assert "There is no map" not in report(tmp_path, folder).words
    edit(folder / "simulation" / "map.json", label_histogram=[[1, 9], [5, 5], [9, 1], [3, 2]])
    page = report(tmp_path, folder)
    assert "There is no map" in page.words
