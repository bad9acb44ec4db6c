"""A prediction belongs to the row of its id, by whatever way the row came and wherever labels are missing.

What is expected of a row comes from the saved model and the row alone: scaled, multiplied and summed by hand.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from tests.newcomers.test_file import archive, sales, written
from tests.newcomers.test_predict import SMALL, by_hand, trained, unalike
from unalike.newcomers.file import read_newcomer
from unalike.newcomers.serve import serve
from unalike.runs.finished import FinishedRun

COLOURS = ("blue", "green", "red")
Change = Callable[[pd.DataFrame], pd.DataFrame]


def gaps(table: pd.DataFrame) -> pd.DataFrame:
    """The same rows, three of five without their label, scattered among the others."""
    return table.assign(returned=table["returned"].where(np.arange(len(table)) * 7 % 5 > 2, ""))


def named(table: pd.DataFrame) -> pd.DataFrame:
    """The rows in random order, each with an id that says which it is and not where it stands."""
    order = np.random.default_rng(3).permutation(len(table))
    return table.assign(order=[f"r{i}" for i in range(len(table))]).iloc[order].reset_index(drop=True)


def expected(model: Path, table: pd.DataFrame) -> pd.DataFrame:
    words, shares = by_hand(model, table)
    return pd.DataFrame({"prediction": words, "p_no": shares[:, 0], "p_yes": shares[:, 1]}, index=list(table["order"]))


def agree(answers: pd.DataFrame, wanted: pd.DataFrame) -> None:
    """Every id of ``wanted`` has one line, and it says what the model says to the row of that id."""
    found = answers.set_index("id")
    assert sorted(found.index) == sorted(wanted.index)
    found = found.loc[wanted.index]
    odds, wanted_odds = (np.log(table["p_yes"] / table["p_no"]) for table in (found, wanted))
    assert wanted_odds.round(2).nunique() > 0.9 * len(wanted)  # so that rows could hardly be exchanged unseen
    assert list(found["prediction"]) == list(wanted["prediction"])
    np.testing.assert_allclose(odds, wanted_odds, atol=0.004)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A method that needs no labels of a newcomer, trained long enough to answer both ways."""
    home = tmp_path_factory.mktemp("run")
    return trained(home / "run", written(home, sales(8, 0), "shops.csv"), "odpfl", 30, hyperparameters=SMALL)


@pytest.mark.parametrize("labels", [gaps, lambda t: t, lambda t: t.assign(returned="")], ids=["partly", "all", "none"])
@pytest.mark.parametrize(
    ("change", "options"),
    [
        (lambda t: t, []),
        (lambda t: t[t.columns[::-1]], []),
        (lambda t: t, ["--unlabeled"]),
        (lambda t: t.drop(columns="shop"), []),
    ],
    ids=["as it is", "columns in another order", "unlabeled", "no client column"],
)
def test_a_newcomer(labels: Change, change: Change, options: list[str], run: Path, tmp_path: Path) -> None:
    table = named(labels(sales(1, 7)))
    file = written(tmp_path, change(table), "new.csv")
    common = ["--data", file, "--id-column", "order", *options]
    unalike("predict", run, *common, "--out", tmp_path / "predicted.csv")
    model, answers = tmp_path / "m.safetensors", tmp_path / "answers.csv"
    unalike("personalize", run, *common, "--out", model, "--predictions", answers)
    for found in (tmp_path / "predicted.csv", answers):
        agree(pd.read_csv(found), expected(model, table))


@pytest.mark.parametrize("kind", ["csv", "npz", "folder"])
def test_several_clients(kind: str, run: Path, tmp_path: Path) -> None:
    """In one table, in arrays, or in a file for each: rows of one are predicted by its model, and by no other's."""
    table = named(gaps(sales(3, 7)))
    file = tmp_path / "new"
    if kind == "csv":
        file = written(tmp_path, table, "new.csv")
    elif kind == "npz":
        x = np.stack([table["price"], *(table["colour"] == c for c in COLOURS), table["days"]], 1)
        text = {name: table[name].to_numpy(str) for name in ("returned", "shop", "order")}
        arrays = {"y": text["returned"], "client": text["shop"], "order": text["order"]}
        file = archive(tmp_path, x=x.astype(np.float32), **arrays)
    else:
        file.mkdir()
        for shop, rows in table.groupby("shop"):
            written(file, rows.drop(columns="shop"), f"{shop}.csv")
    out = tmp_path / "p.csv"
    options = ["--id-column", "order", *(["--label-column", "returned"] if kind == "folder" else [])]
    unalike("predict", run, "--data", file, "--out", out, *options)
    answers = pd.read_csv(out)
    models = [tmp_path / f"{shop}.safetensors" for shop in ("s00", "s01", "s02")]
    wanted = []
    for model in models:
        unalike("personalize", run, "--data", file, "--client", model.stem, "--out", model, *options)
        wanted.append(expected(model, table[table["shop"] == model.stem]))
    agree(answers, pd.concat(wanted))


def test_rows_that_are_left_out_do_not_shift_the_others(run: Path, tmp_path: Path) -> None:
    table = named(gaps(sales(1, 7)))
    table.loc[[0, 5], "price"] = np.nan
    file = written(tmp_path, table, "new.csv")
    model, answers = tmp_path / "m.safetensors", tmp_path / "answers.csv"
    common = ["--data", file, "--id-column", "order", "--set", "data.options.missing=drop"]
    unalike("personalize", run, *common, "--out", model, "--predictions", answers)
    unalike("predict", run, *common, "--out", tmp_path / "predicted.csv")
    kept = table.drop([0, 5])
    for found in (answers, tmp_path / "predicted.csv"):
        agree(pd.read_csv(found), expected(model, kept))
    labeled = tmp_path / "labeled.csv"
    dropping = [*common[:4], "--set", "data.options={missing='drop', partial_labels='drop'}"]
    unalike("personalize", run, *dropping, "--out", tmp_path / "l.safetensors", "--predictions", labeled)
    assert sorted(pd.read_csv(labeled)["id"]) == sorted(kept["order"][kept["returned"] != ""])


def test_training_clients(tmp_path: Path) -> None:
    """With --seen, and where training itself had rows without labels."""
    data = written(tmp_path, gaps(sales(4, 0)), "shops.csv")
    run = trained(tmp_path / "run", data, "local", rounds=20)
    client = FinishedRun.open(run).roster.name(0)
    new = sales(4, 5)
    table = named(gaps(new[new["shop"] == client].reset_index(drop=True)))
    model, out = tmp_path / "m.safetensors", tmp_path / "p.csv"
    unalike("personalize", run, "--client", client, "--out", model)
    file = written(tmp_path, table, "new.csv")
    unalike("predict", run, "--data", file, "--seen", "--id-column", "order", "--out", out)
    agree(pd.read_csv(out), expected(model, table))


def test_in_python_and_in_onnx(run: Path, tmp_path: Path) -> None:
    table = named(gaps(sales(1, 7)))
    file = written(tmp_path, table, "new.csv")
    finished = FinishedRun.open(run)
    newcomer = read_newcomer(finished, file, id_column="order")
    served = serve(finished, newcomer.clients, newcomer.name)
    served.save(tmp_path / "m.safetensors")
    wanted = expected(tmp_path / "m.safetensors", table)
    assert newcomer.ids == list(table["order"])
    assert served.predict(newcomer.clients) == list(wanted["prediction"])
    onnxruntime = pytest.importorskip("onnxruntime")
    served.save_onnx(tmp_path / "m.onnx")
    x = np.stack([table["price"], *(table["colour"] == c for c in COLOURS), table["days"]], 1)
    session = onnxruntime.InferenceSession(tmp_path / "m.onnx")
    (scores,) = session.run(["scores"], {"x": x.astype(np.float32)})
    np.testing.assert_allclose(served.answers(newcomer.clients), scores, atol=1e-4)
    shares = np.exp(scores) / np.exp(scores).sum(1, keepdims=True)
    np.testing.assert_allclose(wanted[["p_no", "p_yes"]], shares, atol=1e-5)


def test_numbers(tmp_path: Path) -> None:
    """A regression: a prediction follows the inputs of its own row."""
    random = np.random.default_rng(0)
    x = random.normal(size=(80, 3))
    np.savez(tmp_path / "all.npz", x=x, y=2 * x[:, 0], client=np.arange(80) // 20)
    learning = {"local": {"lr": 0.1}, "cohort": 3}
    run = trained(tmp_path / "run", tmp_path / "all.npz", "fedavg", 20, options={}, hyperparameters=learning)
    mine = random.normal(size=(12, 3))
    y = np.where(np.arange(12) % 4 == 3, 2 * mine[:, 0], np.nan)
    file = archive(tmp_path, x=mine, y=y)
    for options in ([], ["--unlabeled"]):
        unalike("predict", run, "--data", file, *options, "--out", tmp_path / f"{len(options)}.csv")
        found = pd.read_csv(tmp_path / f"{len(options)}.csv")
        assert list(found["id"]) == list(range(1, 13))
        assert np.corrcoef(found["prediction"], 2 * mine[:, 0])[0, 1] > 0.98
