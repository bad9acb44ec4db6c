"""What `run` and `compare` take as data, and what a run with an ε refuses to read off all clients' rows."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from typer.testing import CliRunner

import unalike
from tests.runs.helpers import At, Crash, crash
from unalike.api import Comparison, Result, UserError, compare, resume, run
from unalike.commands.main import app
from unalike.data import DataError, from_arrays
from unalike.data.arrays import array_source

QUICK: dict[str, Any] = {"rounds": 2, "eval_every": 2, "cohort": 3, "block": 4, "threads": 1, "model": "logistic"}
COLUMNS = {"client_column": "shop", "label_column": "returned"}


def sales(rows: int = 120) -> pd.DataFrame:
    random = np.random.default_rng(0)
    price, days = random.normal(50, 10, rows), random.integers(0, 9, rows)
    returned = (price > 50).astype(int)
    return pd.DataFrame({"shop": np.arange(rows) % 10, "price": price, "days": days, "returned": returned})


def arrays() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    table = sales()
    return table[["price", "days"]].to_numpy(np.float32), table["returned"].to_numpy(), table["shop"].to_numpy()


def test_every_kind_of_data_trains_on_the_same_rows(tmp_path: Path) -> None:
    sales().to_csv(tmp_path / "sales.csv", index=False)
    x, y, client = arrays()
    np.savez(tmp_path / "sales.npz", x=x, y=y, client=client)
    (tmp_path / "shops").mkdir()
    for shop, rows in sales().rename(columns={"returned": "y"}).groupby("shop"):
        rows.drop(columns="shop").to_csv(tmp_path / "shops" / f"{shop}.csv", index=False)
    tried = {
        "text path": run("fedavg", data=str(tmp_path / "sales.csv"), **COLUMNS, **QUICK),
        "path": run("fedavg", data=tmp_path / "sales.csv", **COLUMNS, **QUICK),
        "npz": run("fedavg", data=tmp_path / "sales.npz", **QUICK),
        "folder": run("fedavg", data=tmp_path / "shops", **QUICK),
        "table": run("fedavg", data=sales(), **COLUMNS, **QUICK),
        "tuple": run("fedavg", data=(x, y, client), **QUICK),
        "dict": run("fedavg", data={"x": x, "y": y, "client": client}, **QUICK),
        "source": run("fedavg", data=array_source(x, y, client), **QUICK),
        "population": run("fedavg", data=from_arrays(x, y, client), **QUICK),
        "compare": compare("fedavg", data=tmp_path / "sales.csv", **COLUMNS, **QUICK).results[0],
    }
    first = tried["path"]
    assert first.data == "sales.csv" and first.client_count == 10 and first.accuracy.seen is not None
    for kind, result in tried.items():
        assert (result.accuracy, result.client_count, result.bytes) == (first.accuracy, 10, first.bytes), kind


def test_settings_reach_arrays_and_tables() -> None:
    x, y, client = arrays()
    assert run("fedavg", data=(x, y, client), unseen=4, **QUICK).unseen == 4
    dealt = run("fedavg", data=(x, y, None), partition="iid", clients=5, **QUICK)
    assert dealt.client_count == 5 and dealt.partition == "iid"
    with pytest.raises(UserError, match=r"nothing says which client a row belongs to; give client ids"):
        run("fedavg", data=(x, y, None), **QUICK)
    with pytest.raises(UserError, match=r"partition = 'iid': a population is dealt out already"):
        run("fedavg", data=from_arrays(x, y, client), partition="iid", **QUICK)
    with pytest.raises(DataError, match=r"there is no column 'shp' \(client_column\)"):
        run("fedavg", data=sales(), client_column="shp", **QUICK)


@pytest.mark.parametrize("drop", ["days", ["days"]])
def test_columns_given_as_the_share_of_clients_that_fail_are_answered_with_drop_columns(drop: object) -> None:
    with pytest.raises(
        UserError, match=r"runtime\.drop = .*: expected a number; to leave columns .* out, say drop_columns"
    ):
        run("fedavg", data=sales(), drop=drop, **COLUMNS, **QUICK)
    with pytest.raises(UserError, match=r"runtime\.drop = 2: expected 1 or less$"):
        run("fedavg", data=sales(), drop=2, **COLUMNS, **QUICK)
    assert run("fedavg", data=sales(), drop_columns="days", **COLUMNS, **QUICK).client_count == 10


def test_a_path_is_never_taken_for_a_name_and_nothing_falls_back_to_digits(tmp_path: Path) -> None:
    for missing in (Path("digits"), tmp_path / "nowhere", tmp_path / "no.csv"):
        with pytest.raises(DataError, match="there is no file or folder"):
            run("fedavg", data=missing, **QUICK)
    x, y, _ = arrays()
    wrong = [(x, "a ndarray"), ((x, y), "a tuple of 2"), ({"X": x}, "a dict with 'X'"), (3, "a int"), ([x], "a list")]
    for data, says in wrong:
        for start in (run, compare):
            with pytest.raises(
                UserError, match=f"data is {says}; expected a name, a path to a file or folder, a pandas"
            ):
                start("fedavg", data=data, **QUICK)


def test_none_is_the_recipes_own_data_or_the_digits(tmp_path: Path) -> None:
    sales().to_csv(tmp_path / "sales.csv", index=False)
    recipe = tmp_path / "sales.toml"
    options = 'options = {client_column = "shop", label_column = "returned"}'
    recipe.write_text(f'method = "fedavg"\n[data]\nname = "{tmp_path / "sales.csv"}"\n{options}\n')
    assert run(str(recipe), data=None, **QUICK).data == "sales.csv"
    assert run("fedavg", data=None, clients=12, **QUICK).data == "digits"


def test_the_package_itself_has_run_compare_and_resume(tmp_path: Path) -> None:
    assert (unalike.run, unalike.compare, unalike.resume) == (run, compare, resume)
    with pytest.raises(Crash):
        unalike.run("fedavg", data=arrays(), out=tmp_path / "run", watcher=At(1, crash), **QUICK)
    with pytest.raises(UserError, match=r"given from Python; resume it from Python as well"):
        unalike.resume(tmp_path / "run")
    whole = unalike.run("fedavg", data=arrays(), **QUICK)
    resumed = unalike.resume(tmp_path / "run", data=arrays())
    assert isinstance(resumed, Result) and resumed.accuracy == whole.accuracy
    compare("fedavg", "local", data=sales(), out=tmp_path / "both", **COLUMNS, **QUICK)
    both = unalike.resume(tmp_path / "both")
    assert isinstance(both, Comparison) and [one.label for one in both.results] == ["fedavg", "local"]


PRIVATE: dict[str, Any] = {**QUICK, "noise_multiplier": 1.0, "clip": 0.5, "delta": 0.01, "simulate_noise": True}


def test_a_private_run_computes_nothing_from_all_rows(tmp_path: Path) -> None:
    x, y, client = arrays()
    with pytest.raises(UserError, match=r"the scaling of the inputs would come from .*data\.normalize=false"):
        run("fedavg", data=from_arrays(x, y, client, classes=2), out=tmp_path / "run", **PRIVATE)
    assert not (tmp_path / "run").exists(), "it is refused before anything starts"
    with pytest.raises(UserError, match=r"the number of classes .*would come from .*data\.options\.classes=NUMBER"):
        run("fedavg", data=from_arrays(x, y, client, normalize=False), **PRIVATE)
    result = run("fedavg", data=from_arrays(x, y, client, classes=2, normalize=False), **PRIVATE)
    assert result.privacy.epsilon is not None, "the ledger knows of no release but the noisy one"
    words = sales().assign(returned=lambda t: t["returned"].map({0: "no", 1: "yes"}), colour=["red", "blue"] * 60)
    with pytest.raises(
        UserError, match=r"the names of the classes and the values of the text column 'colour' would"
    ) as e:
        run("fedavg", data=words, normalize=False, **COLUMNS, **PRIVATE)
    assert "set data.schema=FILE" in str(e.value) and "normalize" not in str(e.value)
    words = words.drop(columns="colour")
    with pytest.raises(UserError, match=r"; or name the classes, class_names$"):
        run("fedavg", data=words, normalize=False, **COLUMNS, **PRIVATE)
    named = run("fedavg", data=words, normalize=False, class_names=["no", "yes"], **COLUMNS, **PRIVATE)
    assert named.privacy.epsilon == result.privacy.epsilon
    with pytest.raises(UserError, match=r"classes = \['no', 'yes'\]: expected a number, .* is class_names"):
        run("fedavg", data=words, normalize=False, classes=["no", "yes"], **COLUMNS, **PRIVATE)


def test_a_public_schema_makes_a_private_run_of_a_table_possible(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    words = sales().assign(returned=lambda t: t["returned"].map({0: "no", 1: "yes"}), colour=["red", "blue"] * 60)
    words.to_csv("sales.csv", index=False)
    flags = ["--client-column=shop", "--label-column=returned"]
    command = ["data", "sales.csv", *flags, "--schema", "public.json"]
    told = CliRunner().invoke(app, command)
    assert told.exit_code == 0 and "schema: public.json" in told.output, told.output
    schema = json.loads(Path("public.json").read_text())
    assert schema["columns"] == {"price": None, "days": None, "colour": ["blue", "red"]}
    assert schema["class_names"] == ["no", "yes"] and "shift" not in schema
    assert "exists already" in CliRunner().invoke(app, command).output
    with pytest.raises(UserError, match="put public numbers in its center and deviation and remove its note"):
        run("fedavg", data="sales.csv", schema="public.json", **COLUMNS, **PRIVATE)  # they were computed from the rows
    for name in ("note", "center", "deviation"):
        del schema[name]
    numbers = {"shift": [50.0, 4.0, 0.0, 0.0], "scale": [0.125, 0.25, 1.0, 1.0]}
    schema |= {name: {"shape": [4], "values": values} for name, values in numbers.items()}
    Path("public.json").write_text(json.dumps(schema))
    result = run("fedavg", data="sales.csv", schema="public.json", out="run", **COLUMNS, **PRIVATE)
    assert result.privacy.epsilon is not None
    assert json.loads(Path("run/schema.json").read_text()) == schema
    monkeypatch.chdir("/")  # the recipe knows where the schema lies
    again = run(str(tmp_path / "run" / "recipe.toml"))
    assert again.accuracy == result.accuracy
