"""What a report says of runs in words: who leads, over which clients, and by how much."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.studio.report_pages import SCALE, edit, report
from tests.studio.run_folders import make_run
from unalike.studio.report.read import Run, read_runs
from unalike.studio.report.words import details, finding, level


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
    assert not level(clear, base, "seen") and level(vague, base, "seen")
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
    assert level(b, a, "seen")
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
    assert finding(runs, SCALE) == "b is best on seen clients in all 2 repetitions: 77.5%"
    assert details(runs, SCALE)[:2] == [
        f"On seen clients, b, seed {seed} is 12.5 points above a, seed {seed}: better for 4 of 4 clients, worse for 0."
        for seed in (0, 1)
    ]
    vague = repeated(tmp_path / "vague", [0.4, 0.6, 0.7, 0.8])
    assert finding(vague, SCALE) == "No method leads on seen clients in all 2 repetitions"
    assert finding(vague[:3], SCALE).startswith("No lead is claimed: these runs are over different clients")


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
