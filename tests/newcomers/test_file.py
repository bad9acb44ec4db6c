"""A newcomer's own file: read as the run's was, matched by name, and refused or noted where it does not fit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from sklearn.datasets import load_digits

from unalike.core.schema import Schema
from unalike.data import DataError, load
from unalike.newcomers.file import NewcomerFile, _codes, read_newcomer
from unalike.newcomers.serve import serve
from unalike.runs.errors import UserError
from unalike.runs.finished import FinishedRun
from unalike.runs.recipe.recipe import to_recipe
from unalike.runs.run import run_recipe

SHOPS = {"client_column": "shop", "label_column": "returned"}


def sales(shops: int, seed: int, colours: tuple[str, ...] = ("blue", "green", "red")) -> pd.DataFrame:
    random = np.random.default_rng(seed)
    n = 12 * shops
    price, colour = random.normal(50, 10, n).round(2), random.choice(colours, n)
    returned = np.where(price + 10 * (colour == "red") > 52, "yes", "no")
    shop = [f"s{i % shops:02}" for i in range(n)]
    return pd.DataFrame(
        {"shop": shop, "price": price, "colour": colour, "days": np.arange(n) % 9, "returned": returned}
    )


def trained(folder: Path, data: Path | str, method: str = "fedavg", rounds: int = 2, **options: Any) -> FinishedRun:
    """A run on the data, opened again from its folder."""
    plan = {"name": str(data), "options": options, **({"partition": "iid", "clients": 6} if data == "digits" else {})}
    recipe = {"method": method, "rounds": rounds, "data": plan, "model": {"name": "logistic"}}
    cohort = {} if method == "local" else {"hyperparameters": {"cohort": 2}}
    run_recipe(to_recipe({**recipe, **cohort}, "test"), folder / "run")
    return FinishedRun.open(folder / "run")


@pytest.fixture(scope="module")
def shops(tmp_path_factory: pytest.TempPathFactory) -> FinishedRun:
    folder = tmp_path_factory.mktemp("shops")
    sales(8, 0).to_csv(folder / "shops.csv", index=False)
    return trained(folder, folder / "shops.csv", **SHOPS)


@pytest.fixture(scope="module")
def digits(tmp_path_factory: pytest.TempPathFactory) -> FinishedRun:
    return trained(tmp_path_factory.mktemp("digits"), "digits")


def written(folder: Path, frame: pd.DataFrame, name: str = "mine.csv", **how: Any) -> Path:
    frame.to_csv(folder / name, index=False, **how)
    return folder / name


def archive(folder: Path, **arrays: Any) -> Path:
    np.savez(folder / "mine.npz", **arrays)
    return folder / "mine.npz"


def test_a_table_is_read_with_the_options_of_the_run(shops: FinishedRun, tmp_path: Path) -> None:
    mine = sales(1, 7)
    came = read_newcomer(shops, written(tmp_path, mine))
    assert came.notes == [] and came.clients.y is not None
    assert came.clients.y.tolist() == (mine["returned"] == "yes").astype(int).tolist()
    without = read_newcomer(shops, written(tmp_path, mine.drop(columns=["shop", "returned"])))
    assert torch.equal(without.clients.x, came.clients.x) and not without.clients.labeled.any()
    blank = read_newcomer(shops, written(tmp_path, mine.assign(returned="")))
    assert not blank.clients.labeled.any()


def test_a_newcomer_is_nobody_who_trained(tmp_path: Path) -> None:
    """By AdaPeD it trains from μ; with the id of a training client it would be taken for one that has a model."""
    sales(8, 0).to_csv(tmp_path / "shops.csv", index=False)
    run = trained(tmp_path, tmp_path / "shops.csv", "adaped", rounds=6, **SHOPS)
    assert len(run.state.ids) > 4
    mine = read_newcomer(run, written(tmp_path, sales(1, 7))).clients
    assert not torch.isin(mine.ids, run.roster.ids).any()
    served = serve(run, mine, "mine").theta
    assert not torch.allclose(served, run.state.mu)
    answers, common = (run.method.model(theta, mine.inputs(0)).argmax(1) for theta in (served, run.state.mu))
    y = mine.rows(0)[1]
    assert y is not None and (answers == y).sum() >= (common == y).sum()
    file = NewcomerFile.read(run, written(tmp_path, sales(1, 7)))
    for truth in (False, True):  # labels that score a model have no part in it
        hidden = file.newcomer("s00", unlabeled=True, truth=truth)
        assert (hidden.truth is not None) == truth and not hidden.clients.labeled.any()
        assert torch.equal(serve(run, hidden.clients, "mine").theta, run.state.mu)


def test_rows_of_a_newcomer_weigh_as_those_of_training_did(tmp_path: Path) -> None:
    weighed = sales(8, 0).assign(copies=lambda t: 1 + np.arange(len(t)) % 3)
    weighed.to_csv(tmp_path / "shops.csv", index=False)
    run = trained(tmp_path, tmp_path / "shops.csv", "local", **SHOPS, weight_column="copies")
    mine = sales(1, 7).assign(copies=lambda t: [1, 5, 2] * (len(t) // 3))
    weight = read_newcomer(run, written(tmp_path, mine)).clients.weight
    assert weight is not None
    assert (weight / weight[0]).tolist() == pytest.approx(mine["copies"].tolist())


def test_columns_are_matched_by_name_and_text_by_the_values_of_training(shops: FinishedRun, tmp_path: Path) -> None:
    mine = sales(1, 7, ("red", "blue"))
    came = read_newcomer(shops, written(tmp_path, mine)).clients.x
    assert came.shape == (12, 5)
    assert came[:, 1:4].tolist() == [[c == "blue", c == "green", c == "red"] for c in mine["colour"]]
    swapped = read_newcomer(shops, written(tmp_path, mine[["returned", "days", "colour", "price", "shop"]]))
    assert torch.equal(swapped.clients.x, came)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.rename(columns={"price": "cost"}), "'price' is missing, 'cost' was not there: rename"),
        (lambda t: t.drop(columns="days"), "those of training, price, colour, days; 'days' is missing"),
        (lambda t: t.assign(colour=["red"] * 11 + ["pink"]), "'colour' holds 'pink' in data row 12.*blue, green, red"),
        (lambda t: t.assign(colour=7), "'colour' holds '7' in data row 1, which was not in training"),
        (lambda t: t.assign(price="dear"), "'price' should hold numbers, but data row 1 holds 'dear'"),
        (
            lambda t: t.assign(returned="perhaps"),
            "the class 'perhaps' was not in .*; the run knows no and yes",
        ),
        (lambda t: t[:0], "the table has no rows"),
    ],
)
def test_a_table_that_does_not_fit_is_explained(change: Any, message: str, shops: FinishedRun, tmp_path: Path) -> None:
    with pytest.raises((UserError, DataError), match=message):
        read_newcomer(shops, written(tmp_path, change(sales(1, 7))))


def test_columns_that_training_did_not_have_are_named_and_ignored(shops: FinishedRun, tmp_path: Path) -> None:
    mine = sales(1, 7)
    came = read_newcomer(shops, written(tmp_path, mine))
    more = read_newcomer(shops, written(tmp_path, mine.assign(size=1, note="new")[["note", "size", *mine.columns]]))
    assert torch.equal(more.clients.x, came.clients.x)
    assert more.notes == ["ignored, because training did not have the columns: note and size"]
    (note,) = read_newcomer(shops, written(tmp_path, mine.rename(columns={"returned": "back"}))).notes
    assert note.endswith("the column: back; if it holds labels, name it with --label-column")


def test_a_feature_called_y_stays_a_feature(tmp_path: Path) -> None:
    table = pd.DataFrame({"client": np.repeat(range(4), 6), "y": range(24), "kind": ["a", "b"] * 12})
    run = trained(tmp_path, written(tmp_path, table, "all.csv"), label_column="kind")
    came = read_newcomer(run, written(tmp_path, table[:6])).clients
    assert came.x.flatten().tolist() == [0, 1, 2, 3, 4, 5] and came.y is not None and came.y.tolist() == [0, 1] * 3


def test_a_missing_value_and_the_advice_about_it(shops: FinishedRun, tmp_path: Path) -> None:
    file = written(tmp_path, sales(1, 7).assign(price=[np.nan, *range(40, 51)]))
    with pytest.raises(DataError, match=r"first in data row 1; .* say missing='drop'"):
        read_newcomer(shops, file)
    came = read_newcomer(shops, file, {"missing": "drop"})
    assert len(came.clients.x) == 11 and came.notes == [
        "left out for lack of a value: 1 row; no prediction is made for it"
    ]
    with pytest.raises(UserError, match=r"data.options.task cannot be set for a newcomer; client_column, .* can"):
        read_newcomer(shops, file, {"task": "regression"})
    other = written(tmp_path, sales(1, 7).rename(columns={"returned": "back"}), sep=";")
    came = read_newcomer(shops, other, {"delimiter": ";", "label_column": "back"})
    assert came.clients.labeled.all()
    with pytest.raises(UserError, match=r"there is no column 'gone' \(--label-column\)"):
        read_newcomer(shops, written(tmp_path, sales(1, 7).drop(columns="returned")), {"label_column": "gone"})


def test_a_missing_number_becomes_the_mean_of_the_runs_training_rows(shops: FinishedRun, tmp_path: Path) -> None:
    population = shops.prepared.population
    seen = population.train.select(population.seen)
    expected = float(torch.cat([seen.rows(i)[0] for i in range(len(seen))])[:, 0].mean())
    for others in (40.0, 60.0):  # neither the newcomer's own rows nor those of others matter
        mine = sales(2, 7)
        mine.loc[1:, "price"] = others
        mine.loc[0, "price"] = np.nan
        came = read_newcomer(shops, written(tmp_path, mine), {"missing": "mean"}, client="s00")
        assert float(came.clients.x[0, 0]) == pytest.approx(expected, rel=1e-5) and came.left_out == 0
        assert came.notes == ["filled in by the schema's means: 1 value"]
        assert came.clients.x[1:, 0].tolist() == [others] * 11
    mine = sales(1, 7).assign(colour=[*["red"] * 11, np.nan])
    shares = read_newcomer(shops, written(tmp_path, mine), {"missing": "mean"}).clients.x[-1, 1:4]
    of_all = torch.cat([seen.rows(i)[0] for i in range(len(seen))])[:, 1:4].mean(0)
    torch.testing.assert_close(shares, of_all, msg="a missing word counts as the share of each word in training")


def test_rows_are_left_out_and_counted_of_the_newcomer_alone(shops: FinishedRun, tmp_path: Path) -> None:
    mine = sales(2, 7)
    mine.loc[[1, 2, 3, 5], "price"] = np.nan  # the rows of s01 are the odd ones
    mine.loc[4, "colour"] = np.nan
    came = read_newcomer(shops, written(tmp_path, mine), {"missing": "drop"}, client="s00")
    assert came.left_out == 2 and came.notes[0].startswith("left out for lack of a value: 2 rows;")
    expected = mine[mine["shop"] == "s00"].dropna()
    np.testing.assert_allclose(came.clients.x[:, 0], expected["price"], rtol=1e-6)
    assert came.clients.y is not None and came.clients.y.tolist() == (expected["returned"] == "yes").tolist()
    with pytest.raises(UserError, match="every row lacks a feature, so missing='drop' leaves nothing"):
        read_newcomer(shops, written(tmp_path, mine.assign(price=np.nan)), {"missing": "drop"}, client="s00")


def test_where_names_cannot_be_compared_it_is_noted(shops: FinishedRun, tmp_path: Path) -> None:
    x = read_newcomer(shops, written(tmp_path, sales(1, 7))).clients.x.numpy()
    assert read_newcomer(shops, archive(tmp_path, x=x)).notes == [
        "x has no names for its features; they were taken in the order of training: price, colour and days"
    ]
    np.savez(tmp_path / "all.npz", x=np.tile(x, (4, 1)), y=np.arange(48) % 2, client=np.arange(48) // 12)
    run = trained(tmp_path, tmp_path / "all.npz")
    table = pd.DataFrame(x, columns=list("abcde"))
    assert read_newcomer(run, written(tmp_path, table)).notes == [
        "the run's data has no names for its features; the columns were taken in order: a, b, c, d and e"
    ]


@pytest.mark.parametrize(
    ("labels", "refused"), [([1, 2], "0"), ([-1, 1], "0"), (["1", "x"], "2"), ([True, False], "1")]
)
def test_classes_are_found_by_name_alone(labels: list[Any], refused: str, tmp_path: Path) -> None:
    x = np.random.default_rng(0).normal(size=(40, 3))
    np.savez(tmp_path / "all.npz", x=x, y=np.array(labels * 20), client=np.arange(40) // 8)
    run = trained(tmp_path, tmp_path / "all.npz")
    expected = sorted(range(2), key=lambda i: labels[i])
    for i, label in enumerate(labels):  # one class alone is enough
        came = read_newcomer(run, archive(tmp_path, x=x[:3], y=np.array([label] * 3))).clients
        assert came.y is not None and came.y.tolist() == [expected.index(i)] * 3
    with pytest.raises(UserError, match=rf"the class '{refused}' was not in training \(data row 1\); the run knows"):
        read_newcomer(run, archive(tmp_path, x=x[:2], y=np.full(2, int(refused))))


def test_classes_of_a_known_data_set_have_numbers_too() -> None:
    schema = Schema((64,), classes=3, class_names=("airplane", "frog", "1"))

    def codes(labels: list[Any], named_data: bool) -> list[float]:
        return list(_codes(Path("f"), np.array(labels, object), np.arange(len(labels)), schema, named_data))

    assert codes([0, 2, "frog", "1"], named_data=True) == [0, 2, 1, 2]  # a name goes before a number
    with pytest.raises(UserError, match="the class '0' was not in training"):
        codes([0, 2], named_data=False)


def test_several_clients_are_not_merged(shops: FinishedRun, tmp_path: Path) -> None:
    file = written(tmp_path, sales(7, 3))
    with pytest.raises(UserError, match=r"holds 7 clients \(s00, s01, s02, s03 and 3 others\).*--client NAME"):
        read_newcomer(shops, file)
    came = read_newcomer(shops, file, client="s02")
    assert came.name == "s02" and came.clients.x[:, 0].numpy() == pytest.approx(sales(7, 3)["price"][2::7].to_numpy())
    with pytest.raises(UserError, match="has no client 's99'; there are s00, s01"):
        read_newcomer(shops, file, client="s99")
    with pytest.raises(UserError, match="does not say whose a row is, so --client s02 cannot be found"):
        read_newcomer(shops, written(tmp_path, sales(1, 3).drop(columns="shop")), client="s02")


def test_whole_numbers_in_the_range_of_training_are_bytes_whatever_their_type(
    digits: FinishedRun, tmp_path: Path
) -> None:
    images = load_digits().images[:20]  # float64, 0 to 16
    came = read_newcomer(digits, archive(tmp_path, x=images, y=load_digits().target[:20]))
    assert came.notes == [] and came.clients.x.dtype == torch.uint8
    assert came.clients.x[:, 0].tolist() == images.tolist()
    for wrong in (images / 16, images * 16.0, (images * 16).astype(np.int64)):
        with pytest.raises(UserError, match=r"whole numbers from 0 to 255 \(uint8\), but x holds .* on the same scale"):
            read_newcomer(digits, archive(tmp_path, x=wrong))
    for wrong in (np.nan, np.inf):
        images[3, 0, 0] = wrong
        for whose, client in (({}, None), ({"client": np.arange(20) % 2}, "1")):  # the row is that of the file
            with pytest.raises(UserError, match="data row 4 holds NaN, infinity or"):
                read_newcomer(digits, archive(tmp_path, x=images, **whose), client=client)


def test_values_far_from_the_mean_of_training_are_noted(
    digits: FinishedRun, shops: FinishedRun, tmp_path: Path
) -> None:
    scaled = np.clip(load_digits().images[:20] * 16, 0, 255).astype(np.uint8)
    assert read_newcomer(digits, archive(tmp_path, x=scaled)).notes == []  # bytes have one scale
    mine = sales(1, 7)
    (note,) = read_newcomer(shops, written(tmp_path, mine.assign(days=1e6 * mine["days"]))).notes
    mean, spread = days_of(shops)
    assert note.startswith(
        f"days lies between 0 and 8e+06, more than 10 deviations from its mean in training, {mean:.3g} ± {spread:.3g};"
    )
    assert read_newcomer(shops, written(tmp_path, mine.assign(days=mean + 9.9 * spread))).notes == []
    (note,) = read_newcomer(shops, written(tmp_path, mine.assign(days=1e6, price=1e9))).notes
    assert note.startswith("price lies") and "(and 1 other feature likewise)" in note


def days_of(run: FinishedRun) -> tuple[float, float]:
    assert run.schema.shift is not None and run.schema.scale is not None
    return float(run.schema.shift[-1]), 1 / float(run.schema.scale[-1])


def test_a_number_that_is_not_finite_is_named_by_its_data_row(tmp_path: Path) -> None:
    x = np.random.default_rng(0).normal(size=(40, 3))
    np.savez(tmp_path / "all.npz", x=x, y=np.arange(40) % 2, client=np.arange(40) // 8)
    run = trained(tmp_path, tmp_path / "all.npz")
    for wrong in (np.nan, np.inf, 1e300):
        x[3, 1] = wrong
        with pytest.raises(UserError, match="data row 4 holds NaN, infinity or a number too large"):
            read_newcomer(run, archive(tmp_path, x=x))


@pytest.mark.parametrize("method", ["pefll", "odpfl", "pfl-nearest", "fedavg-finetune", "fedavg"])
def test_rows_on_which_the_network_overflows_are_told(method: str, tmp_path: Path) -> None:
    x = np.random.default_rng(0).normal(size=(40, 3))
    np.savez(tmp_path / "all.npz", x=x, y=np.arange(40) % 2, client=np.arange(40) // 8)
    run = trained(tmp_path, tmp_path / "all.npz", method, rounds=1)
    came = read_newcomer(run, archive(tmp_path, x=3e38 * np.sign(x), y=np.arange(40) % 2)).clients
    with pytest.raises(UserError, match=r"network overflows .*up to 3e\+38 in size, those of training \d"):
        serve(run, came, "mine")


def test_targets_that_are_numbers_and_labels_in_part(tmp_path: Path) -> None:
    x = np.random.default_rng(0).normal(size=(40, 3))
    np.savez(tmp_path / "all.npz", x=x, y=x[:, 0], client=np.arange(40) // 8)
    run = trained(tmp_path, tmp_path / "all.npz")
    file = archive(tmp_path, x=x[:4], y=np.array([1, 2, 3, np.nan]))
    with pytest.raises(DataError, match=r"lack 1 of 4 labels.*partial_labels='drop'"):
        read_newcomer(run, file, {"partial_labels": "error"})
    kept = read_newcomer(run, file)
    assert kept.clients.known is not None and kept.clients.known.tolist() == [True, True, True, False]
    assert kept.notes == ["labels: 3 of 4 rows have one; all rows describe the client, those with a label train"]
    came = read_newcomer(run, file, {"partial_labels": "drop"})
    assert came.clients.y is not None and came.clients.y.tolist() == [1, 2, 3] and len(came.clients.x) == 3
    assert came.notes == ["left out for lack of a value: 1 row; no prediction is made for it"]


def test_a_folder_is_a_newcomer_if_it_holds_one_client(tmp_path: Path) -> None:
    for name in ("anna", "ben", "cleo"):
        (tmp_path / "all").mkdir(exist_ok=True)
        sales(1, len(name)).drop(columns="shop").to_csv(tmp_path / "all" / f"{name}.csv", index=False)
    run = trained(tmp_path, tmp_path / "all", label_column="returned")
    (tmp_path / "new").mkdir()
    sales(1, 9)[["days", "price", "colour"]].to_csv(tmp_path / "new" / "dora.csv", index=False)
    came = read_newcomer(run, tmp_path / "new").clients
    assert came.x[:, 4].tolist() == [i % 9 for i in range(12)] and not came.labeled.any()
    with pytest.raises(UserError, match=r"holds 3 clients \(anna, ben and cleo\)"):
        read_newcomer(run, tmp_path / "all")


@pytest.mark.parametrize(
    ("method", "received"),
    [
        ("flowdup", {"h1", "hidden", "last", "bias"}),
        ("fedavg-finetune", {"theta"}),
        ("fedtta", {"theta", "phi"}),
        ("local", set()),
        ("fedavg", {"theta"}),
        ("ld-fedavg", {"theta"}),
    ],
)
def test_what_stays_at_the_client_is_not_sent_and_a_model_is_received_once(
    method: str, received: set[str], tmp_path: Path
) -> None:
    run = trained(tmp_path, "digits", method)
    population = load("digits", partition="iid", clients=1, unseen=0, test=0)
    served = serve(run, population.train, "mine")
    assert served.sent == {} and served.epsilon == 0
    assert set(served.received) == received
    if "theta" in received:
        assert served.received["theta"] == 4 * run.method.model.size
    asked = serve(run, population.train, "mine", epsilon=2.0)
    assert asked.notes == [f"--epsilon 2: with {method} nothing is sent, so ε = 0 without noise"] and asked.epsilon == 0
    assert torch.equal(asked.theta, served.theta)


def test_a_run_that_was_stopped_says_where(tmp_path: Path) -> None:
    run = trained(tmp_path, "digits")
    assert run.notes == []
    recipe = (tmp_path / "run" / "recipe.toml").read_text()
    (tmp_path / "run" / "recipe.toml").write_text(recipe.replace("rounds = 2", "rounds = 200"))
    population = load("digits", partition="iid", clients=1, unseen=0, test=0)
    (note,) = serve(FinishedRun.open(tmp_path / "run"), population.train, "mine").notes
    assert note == f"the run stopped at round 2 of 200; it goes on with: unalike resume {tmp_path / 'run'}"
