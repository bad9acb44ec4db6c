"""MDM over any feature, or several jointly: categories by hand, and rows dealt out by them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from unalike import simulate
from unalike.analytics.mdm.study import MixturePrivacy, fit_mixture, read_histograms
from unalike.commands.main import app
from unalike.data import DataError, load
from unalike.data.partition.features import Feature, categories, category_names, features_of
from unalike.data.partition.mixture import Mixture

ROWS = [  # client, race, age, label
    ("a", "red", 20, "rich"), ("a", "red", 70, "poor"), ("a", "blue", 17, "rich"),
    ("b", "blue", 30, "poor"), ("b", "green", 64, "poor"), ("b", "blue", 31, "rich"), ("b", "blue", 99, "rich"),
]  # fmt: skip
COLUMNS: Any = {"race": ["blue", "green", "red"], "age": None}


def table(folder: Path, rows: list[tuple[str, str, int, str]]) -> Path:
    file = folder / "people.csv"
    file.write_text("client,race,age,y\n" + "".join(f"{','.join(map(str, row))}\n" for row in rows))
    return file


def test_histograms_by_hand(tmp_path: Path) -> None:
    file = str(table(tmp_path, ROWS))
    race = read_histograms(file, feature=["race"])
    assert race.names == ["blue", "green", "red"]
    assert race.clients.x.tolist() == [[1, 0, 2], [3, 1, 0]]
    age = read_histograms(file, feature=["age"], bins={"age": [18, 30, 65]})
    assert age.names == ["18 to 30", "30 to 65", "65 to ..."]
    assert age.clients.x.tolist() == [[2, 0, 1], [0, 3, 1]]  # 17 lies below the first bin, and so is in it
    both = read_histograms(file, feature=["race", "label"])
    assert both.names[:3] == ["blue × poor", "blue × rich", "green × poor"]  # type: ignore[index]
    assert both.clients.x.tolist() == [[0, 1, 0, 0, 1, 1], [1, 2, 1, 0, 0, 0]]
    plain = read_histograms(file)
    assert plain.clients.x.tolist() == read_histograms(file, feature=["label"]).clients.x.tolist() == [[1, 2], [2, 2]]


def test_gaps_filled_from_other_rows_are_not_protected_row_by_row(tmp_path: Path) -> None:
    rows = [(f"c{i % 4}", "red", 20 + i, "rich" if i % 3 else "poor") for i in range(24)]
    found = read_histograms(str(table(tmp_path, rows)), feature=["age"], bins={"age": [18, 30, 40]}, missing="client")
    with pytest.raises(ValueError, match="one row changes others"):
        fit_mixture(found, simulate, components=[1], rounds=1, largest=10, privacy=MixturePrivacy(1.0, unit="point"))


def test_a_row_without_a_value_has_no_category() -> None:
    x = np.array([[1, 0, 0, 40], [0, 0, 0, 40], [0, 0, 1, np.nan]], dtype=np.float32)
    race, age = Feature("race", ("blue", "green", "red")), Feature("age", (), (0.0, 30.0))
    assert categories([race], x, None, COLUMNS).tolist() == [0, -1, 2]
    assert categories([race, age], x, None, COLUMNS).tolist() == [1, -1, -1]
    assert category_names([age, race])[4] == "30 to ... × green"


def test_simulate_by_one_feature_and_predict_another(tmp_path: Path) -> None:
    """Two kinds of clients, all red and all blue; labels have nothing to do with it."""
    rng = np.random.default_rng(0)
    rows = [("all", race, 30, label) for race in ("red", "blue") for label in rng.choice(["poor", "rich"], 300)]
    file = table(tmp_path, rows)
    pi = torch.zeros(2, 20, dtype=torch.float64)
    pi[:, -1] = 1.0
    alpha = torch.tensor([[1e3, 1e-4], [1e-4, 1e3]], dtype=torch.float64)
    mixture = Mixture(
        torch.tensor([0.5, 0.5], dtype=torch.float64),
        alpha,
        pi,
        torch.arange(1, 22),
        (Feature("race", ("blue", "red")),),
    )
    mixture.save(tmp_path / "race.json", ["blue", "red"])
    assert Mixture.load(tmp_path / "race.json").features == mixture.features
    dealt = load(str(file), partition=f"mdm:{tmp_path / 'race.json'}", clients=20, test=0.0, unseen=0, normalize=False)
    shares = torch.stack([dealt.train.rows(i)[0][:, :2].mean(0) for i in range(20)])  # of blue and red
    assert bool(((shares == 0) | (shares == 1)).all()) and 4 <= int(shares[:, 0].sum()) <= 16
    labels = dealt.histogram().double()
    assert float((labels[:, 0] / labels.sum(1)).std()) < 0.2  # as chance has it, and not 0 or 1


def test_what_cannot_be_is_refused() -> None:
    def refused(message: str, names: list[str], bins: Any = (), classes: Any = ("poor", "rich")) -> None:
        with pytest.raises(DataError, match=message):
            features_of(names, dict(bins), COLUMNS, classes)

    refused("there is no feature 'rase'; did you mean 'race'", ["rase"])
    refused("'age' is a number; say where its bins begin", ["age"])
    refused("takes no bins", ["race"], {"race": [1, 2]})
    refused("rising numbers", ["age"], {"age": [3, 2]})
    refused("bins are given for age", ["race"], {"age": [1, 2]})
    refused("each once", ["race", "race"])
    refused("there is no feature 'label'", ["label"], classes=None)
    red = Feature("race", ("red", "blue"))
    with pytest.raises(DataError, match="the mixture knows 'race' as one of red, blue"):
        categories([red], np.zeros((1, 4)), None, COLUMNS)
    with pytest.raises(DataError, match="which this data lacks"):
        categories([Feature("height", (), (0.0, 1.0))], np.zeros((1, 4)), None, COLUMNS)


def test_the_command(tmp_path: Path) -> None:
    rng = np.random.default_rng(1)
    rows = [
        (f"c{i % 12}", rng.choice(["red", "blue"]), int(rng.integers(80)), "rich" if i % 3 else "poor")
        for i in range(240)
    ]
    file, out = table(tmp_path, rows), tmp_path / "mixture.json"
    words = ["mdm", "--data", str(file), "--feature", "race,age", "--bins", "age=0:60:20", "--components", "1"]
    result = CliRunner().invoke(app, [*words, "--rounds", "3", "--out", str(out), "--json"])
    assert result.exit_code == 0, result.output
    told = json.loads(result.stdout)
    assert told["features"] == ["race", "age"] and told["categories"] == 8
    assert [one.edges for one in Mixture.load(out).features] == [(), (0.0, 20.0, 40.0, 60.0)]
    assert CliRunner().invoke(app, [*words[:5], "--bins", "age=0:9:0"]).exit_code == 1
