"""Clients simulated from a mixture, the mixture's file, own data, and the command."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import typer
from scipy.stats import dirichlet as scipy_dirichlet
from typer.testing import CliRunner

from unalike.analytics.mdm.counts import histogram_clients, known_mixture, population_histograms
from unalike.analytics.mdm.study import client_distance, compare_clients
from unalike.commands import mdm as command
from unalike.data import from_arrays, load
from unalike.data.partition.histograms import read_counts
from unalike.data.partition.mixture import MDMError, Mixture, dirichlet
from unalike.data.partition.schemes import (
    conditional_partition,
    iid_partition,
    mdm_partition,
)
from unalike.report.figures import mdm as figure
from unalike.runs.errors import UserError


def server_labels(rows: int = 60_000, classes: int = 10) -> np.ndarray:
    return np.random.default_rng(9).integers(classes, size=rows)


def histograms(labels: np.ndarray, parts: list[np.ndarray], classes: int = 10) -> np.ndarray:
    return np.stack([np.bincount(labels[part], minlength=classes) for part in parts])


def test_draws_have_the_moments_of_a_dirichlet_also_where_alpha_is_tiny() -> None:
    alpha = np.array([0.01, 0.5, 3.0])
    drawn = dirichlet(np.tile(alpha, (40_000, 1)), np.random.default_rng(0))
    known = scipy_dirichlet(alpha)
    np.testing.assert_allclose(drawn.mean(0), known.mean(), atol=0.005)
    np.testing.assert_allclose(drawn.var(0), known.var(), atol=0.003)
    tiny = dirichlet(np.full((100, 5), 1e-4), np.random.default_rng(0))
    assert np.isfinite(tiny).all() and np.allclose(tiny.sum(1), 1)


def test_simulated_clients_resemble_the_mixture_and_share_no_row() -> None:
    truth = known_mixture("high-2")
    rng = np.random.default_rng(0)
    labels = server_labels()
    parts = mdm_partition(labels, 200, rng, truth)
    rows = np.concatenate(parts)
    assert len(np.unique(rows)) == len(rows)
    assert [len(part) for part in parts] == [100] * 200
    true, simulated = truth.sample(200, rng), histograms(labels, parts)
    alike = histograms(labels, iid_partition(labels, 200, rng, truth))
    assert client_distance(true, simulated) < 0.8 * client_distance(true, alike)


def test_conditionally_iid_clients_have_exactly_the_true_histograms() -> None:
    counts = known_mixture("medium-2").sample(100, np.random.default_rng(1))
    labels = server_labels()
    parts = conditional_partition(labels, counts, np.random.default_rng(2))
    np.testing.assert_array_equal(histograms(labels, parts), counts)
    assert len(np.unique(np.concatenate(parts))) == counts.sum()
    with pytest.raises(MDMError, match="more rows of class"):
        conditional_partition(labels[:5000], counts, np.random.default_rng(2))


def test_conditionally_iid_is_a_partition_by_name(tmp_path: Path) -> None:
    counts, file = np.array([[3, 0, 5], [1, 4, 0], [2, 2, 2]]), tmp_path / "counts.csv"
    file.write_text("a,b,c\n" + "\n".join(",".join(map(str, row)) for row in counts) + "\n")
    y = np.repeat([0, 1, 2], 20)
    np.savez(tmp_path / "rows.npz", x=np.arange(60, dtype=np.float32)[:, None], y=y)
    how: dict[str, Any] = {"partition": f"conditional:{file}", "test": 0, "unseen": 0, "normalize": False}
    population = load(tmp_path / "rows.npz", clients=2, **how)
    assert population.histogram().tolist() == counts[:2].tolist()
    rows = population.train.x[population.train.pool_rows()[0]].flatten().tolist()
    assert len(set(rows)) == len(rows) == 13
    with pytest.raises(MDMError, match="3 histograms, for 4 clients"):
        load(tmp_path / "rows.npz", clients=4, **how)


def test_when_a_class_runs_out_others_fill_in() -> None:
    truth = known_mixture("high-1")
    labels = server_labels(1000)
    parts = mdm_partition(labels, 10, np.random.default_rng(0), truth)
    assert sorted(np.concatenate(parts).tolist()) == list(range(1000))


def test_too_many_clients_or_unknown_classes_are_refused() -> None:
    truth = known_mixture("high-1")
    with pytest.raises(MDMError, match="hold 2000 rows, but there are 1000: use at most about 9"):
        mdm_partition(server_labels(1000), 20, np.random.default_rng(0), truth)
    with pytest.raises(MDMError, match="class 11, but the mixture knows 10 categories"):
        mdm_partition(server_labels(1000, classes=12), 2, np.random.default_rng(0), truth)


def test_the_distance_is_that_of_the_best_matching() -> None:
    first = np.array([[10, 0, 0], [0, 10, 0]])
    assert client_distance(first, first[::-1]) == 0.0
    assert client_distance(first, np.array([[0, 0, 5], [0, 4, 4]])) == pytest.approx((1 + 0.5) / 2)
    with pytest.raises(MDMError, match="two equally large groups"):
        client_distance(first, first[:1])


def test_a_good_mixture_is_nearer_than_iid_clients() -> None:
    truth = known_mixture("medium-3")
    distances, groups = compare_clients(truth.sample(400, np.random.default_rng(0)), truth, seed=0)
    assert distances["mdm"] < 0.8 * distances["iid"]
    assert set(groups) == {"true", "mdm", "iid"} and len(groups["mdm"]) == 400


# The file, and data by it


def test_the_file_gives_the_same_mixture_back(tmp_path: Path) -> None:
    truth = known_mixture("medium-3")
    truth.save(tmp_path / "m.json")
    again = Mixture.load(tmp_path / "m.json")
    for name in ("tau", "alpha", "pi", "edges"):
        torch.testing.assert_close(getattr(again, name), getattr(truth, name), rtol=0, atol=0)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"alpha": [[1.0, -1.0]]}, "not negative"),
        ({"tau": [0.5]}, "tau must add up to 1"),
        ({"edges": [2, 1, 3]}, "must increase"),
        ({"format": "other"}, "not a mixture that"),
        ({"surprise": 1}, "not a mixture that"),
        ({"pi": [[0.5, 0.5], [1.0]]}, "equally long"),
    ],
)
def test_a_damaged_file_is_refused(tmp_path: Path, change: dict[str, object], message: str) -> None:
    sound = {
        "format": "unalike-mdm",
        "version": 1,
        "tau": [1.0],
        "alpha": [[1.0, 2.0]],
        "pi": [[0.5, 0.5]],
        "edges": [1, 2, 3],
    }
    file = tmp_path / "m.json"
    file.write_text(json.dumps(sound))
    assert Mixture.load(file).categories == 2
    file.write_text(json.dumps({**sound, **change}))
    with pytest.raises(MDMError, match=message):
        Mixture.load(file)


def test_data_can_be_dealt_out_by_the_file(tmp_path: Path) -> None:
    file = tmp_path / "m.json"
    pi = torch.zeros(1, 30, dtype=torch.float64)
    pi[0, -1] = 1.0
    alpha = torch.full((1, 10), 0.1, dtype=torch.float64)
    Mixture(torch.ones(1, dtype=torch.float64), alpha, pi, torch.arange(1, 32)).save(file)
    unlike = load("digits", partition=f"mdm:{file}", clients=40, seed=1)
    alike = load("digits", partition=f"mdm:{file},mode=iid", clients=40, seed=1)
    assert unlike.sizes.tolist() == [30] * 40 == alike.sizes.tolist()
    most = [population.histogram().max(1).values.double().mean() for population in (unlike, alike)]
    assert most[0] > 15 > 8 > most[1]
    with pytest.raises(MDMError, match="there is no mixture file"):
        load("digits", partition="mdm:nowhere.json", clients=40)


def test_histograms_come_from_own_arrays() -> None:
    x, y, client = np.zeros((6, 2)), np.array(["a", "b", "b", "a", "c", "c"]), np.array([0, 0, 0, 1, 1, 1])
    own = from_arrays(x, y, client, test=0.0, unseen=0.0)
    assert population_histograms(own).x.tolist() == [[1, 2, 0], [1, 0, 2]]
    numbers = from_arrays(x, np.linspace(0.1, 0.7, 6), client, test=0.0, unseen=0.0)
    with pytest.raises(MDMError, match="no classes to count"):
        population_histograms(numbers)


def test_counts_are_read_from_files(tmp_path: Path) -> None:
    (tmp_path / "c.csv").write_text("red,green\n1,2\n3,4\n")
    np.savez(tmp_path / "c.npz", counts=np.array([[1, 2], [3, 4]]))
    np.savez(tmp_path / "d.npz", other=np.zeros(3))
    (tmp_path / "e.csv").write_text("1,2\n3,x\n")
    for name in ("c.csv", "c.npz"):
        assert histogram_clients(read_counts(tmp_path / name)).x.tolist() == [[1, 2], [3, 4]]
    with pytest.raises(MDMError, match="array called 'counts'"):
        read_counts(tmp_path / "d.npz")
    with pytest.raises(MDMError, match="one line of comma-separated counts"):
        read_counts(tmp_path / "e.csv")
    with pytest.raises(MDMError, match="there is no file"):
        read_counts(tmp_path / "none.csv")
    (tmp_path / "f.csv").write_text("red,green\n1,2,3\n3,4,5\n")
    with pytest.raises(MDMError, match="the header has 2 cells, and a line has 3"):
        read_counts(tmp_path / "f.csv")


# The command


def run(*arguments: str) -> str:
    app = typer.Typer()
    app.callback()(lambda: None)
    app.add_typer(command.app)
    result = CliRunner().invoke(app, ["mdm", *arguments], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.stdout


def test_the_command_prints_json(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(figure, "_MOST", 30)  # t-SNE of more clients takes seconds
    out, plot = tmp_path / "m.json", tmp_path / "m.html"
    found = json.loads(
        run("--data", "mdm:medium-2,clients=400", "--rounds", "40", "--cohort", "400", "--seed", "0", "--json",
            "--out", str(out), "--plot", str(plot))
    )  # fmt: skip
    assert found["relative_error"]["alpha"] < 0.25
    assert found["log_likelihood"] == pytest.approx(-26.4, abs=0.5)
    assert found["seconds"] > 0
    assert found["distance"]["mdm"] < found["distance"]["iid"]
    assert Mixture.load(out).alpha.tolist() == found["alpha"]
    assert "simulated by MDM" in plot.read_text()
    with pytest.raises(UserError, match="exists already"):
        run("--data", "digits", "--out", str(out))


def test_the_command_chooses_the_number_of_components() -> None:
    printed = run("--data", "mdm:selection,clients=700", "--validation", "500", "--components", "1,3", "--rounds", "60")
    assert "clients=700: 3 components" in printed
    assert "K=1:" in printed and "below the best" in printed


def test_the_command_names_what_it_wrote(tmp_path: Path) -> None:
    out = tmp_path / "m.json"
    printed = run("--data", "mdm:medium-1,clients=60", "--components", "1", "--rounds", "2", "--out", str(out))
    assert "clients=60: 1 component\n" in "\n".join(line.rstrip() for line in printed.splitlines())
    assert f"mixture: {out}\n" in printed


def test_the_command_is_private_on_request() -> None:
    arguments = (
        "--data",
        "mdm:medium-1,clients=600",
        "--components",
        "1",
        "--rounds",
        "5",
        "--cohort",
        "600",
        "--json",
    )
    found = json.loads(run(*arguments, "--epsilon", "8"))
    assert found["privacy"]["epsilon"] <= 8.0 + 1e-6
    assert found["privacy"]["unit"] == "client"
    assert json.loads(run(*arguments))["privacy"] is None


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "give the clients' data with --data"),
        (["--data", "mdm:low-1,clients=5", "--components", "9"], "9 mixture components for 5 clients"),
        (["--data", "digits", "--components", "two"], "--components must be a number"),
        (["--data", "digits", "--epsilon", "1"], "--largest"),
        (["--data", "digits", "--components", "1-3", "--validation", "0"], "some kept apart"),
    ],
)
def test_the_command_says_what_is_wrong(arguments: list[str], message: str) -> None:
    with pytest.raises(UserError, match=message):
        run(*arguments)


@pytest.mark.parametrize(
    ("line", "message"),
    [("1,-2", "negative"), ("1,2.5", "fractional"), ("0,0", "no data")],
)
def test_the_command_refuses_counts_that_are_none(tmp_path: Path, line: str, message: str) -> None:
    file = tmp_path / "c.csv"
    file.write_text(f"3,4\n{line}\n")
    with pytest.raises(UserError, match=message):
        run("--counts", str(file), "--components", "1")
