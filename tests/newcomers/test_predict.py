"""A run folder that travels: without its training data it serves newcomers, and what is damaged is refused."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from typer.testing import CliRunner

from tests.newcomers.test_file import SHOPS, archive, sales, written
from unalike.commands.main import app
from unalike.core.roster import Roster
from unalike.core.schema import Schema
from unalike.data import DataError
from unalike.newcomers.client_model import client_model
from unalike.newcomers.file import NewcomerFile
from unalike.report.analyses.analyse import finished_run
from unalike.runs import checkpoint, folder
from unalike.runs.errors import UserError
from unalike.runs.finished import FinishedRun
from unalike.runs.recipe.recipe import to_recipe
from unalike.runs.run import run_recipe
from unalike.runs.simulate import gather_models

SMALL = {"cohort": 4, "descriptor": 4, "local": {"steps": 2}}


def trained(where: Path, data: Path, method: str = "pefll", rounds: int = 2, **more: Any) -> Path:
    recipe = {
        "method": method,
        "rounds": rounds,
        "data": {"name": str(data), "options": more.pop("options", SHOPS), "unseen": 0.25},
        "model": {"name": "mlp"},
        "hyperparameters": more.pop("hyperparameters", {}),
    }
    run_recipe(to_recipe(recipe, "test"), where)
    return where


@pytest.fixture(scope="module")
def away(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that was moved to another folder; the data that it was trained on are deleted."""
    home, elsewhere = tmp_path_factory.mktemp("home"), tmp_path_factory.mktemp("away") / "moved"
    data = written(home, sales(8, 0), "shops.csv")
    shutil.move(trained(home / "run", data, hyperparameters=SMALL), elsewhere)
    data.unlink()
    return elsewhere


def unalike(*words: object) -> str:
    """What the command prints; it must succeed."""
    result = CliRunner().invoke(app, [str(word) for word in words])
    assert result.exit_code == 0, result.output
    return result.stdout


def unalike_in(cwd: Path, *commands: list[object]) -> list[str]:
    """What each of several commands prints, in a process that has seen nothing of the run, in another folder."""
    code = (
        "import sys\n"
        "from unalike.commands.main import main\n"
        f"for words in {[[str(word) for word in words] for words in commands]!r}:\n"
        "    sys.argv[1:] = words\n"
        "    try:\n"
        "        main()\n"
        "    except SystemExit as ended:\n"
        "        assert not ended.code\n"
        "    print(end='\\f')\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=cwd)
    assert done.returncode == 0 and done.stderr == "", done.stderr
    return done.stdout.split("\f")[:-1]


def told(*words: object) -> str:
    """What the command says; it must fail."""
    result = CliRunner().invoke(app, [str(word) for word in words])
    assert result.exit_code == 1, result.output
    return " ".join(result.output.split())


def by_hand(file: Path, frame: pd.DataFrame) -> tuple[list[str], np.ndarray]:
    """Classes and probabilities by a saved model, from nothing but its file: scale, two layers, softmax."""
    tensors = {name: value.double().numpy() for name, value in load_file(file).items()}
    with safe_open(file, framework="pt") as stored:
        about = stored.metadata()
    schema = json.loads(about["schema"])
    columns = []
    for name, values in schema["columns"].items():
        columns += [frame[name]] if values is None else [frame[name] == value for value in values]
    x = np.stack([np.asarray(column, dtype=np.float32) for column in columns], 1)
    h = (x - tensors.pop("input.shift")) * tensors.pop("input.scale")
    weights = [name.removesuffix(".weight") for name in tensors if name.endswith(".weight")]
    for place, name in enumerate(weights):
        h = h @ tensors[f"{name}.weight"].T + tensors[f"{name}.bias"]
        h = np.maximum(h, 0) if place < len(weights) - 1 else h
    shares = np.exp(h - h.max(1, keepdims=True))
    shares /= shares.sum(1, keepdims=True)
    classes = json.loads(about["classes"])
    return [classes[place] for place in shares.argmax(1)], shares


def test_a_run_serves_newcomers_where_its_data_are_not(away: Path, tmp_path: Path) -> None:
    mine = sales(1, 7)
    written(tmp_path, mine, "new.csv")
    personalize = ["personalize", away, "--data", "new.csv", "--json"]
    predict = ["predict", away, "--data", "new.csv", "--out", "p.csv", "--json"]
    served, shown = (json.loads(printed) for printed in unalike_in(tmp_path, personalize, predict))
    assert served["notes"] == [] and served["samples"] == 12
    table = pd.read_csv(tmp_path / "p.csv", dtype={"id": str})
    assert list(table.columns) == ["id", "client", "prediction", "p_no", "p_yes"]
    assert list(table["id"]) == [str(i + 1) for i in range(12)] and set(table["client"]) == {"s00"}
    words, shares = by_hand(tmp_path / "new.model.safetensors", mine)
    assert list(table["prediction"]) == words
    np.testing.assert_allclose(table[["p_no", "p_yes"]], shares, atol=1e-5)
    right = float((table["prediction"].to_numpy() == mine["returned"].to_numpy()).mean())
    assert shown["metric"] == "accuracy" and shown["score"] == pytest.approx(right)
    assert shown["rows"] == 12 and shown["clients"][0]["score"] == shown["score"]
    trained, flattered = shown["notes"]
    assert trained.startswith("s00 also took part in training") and "also helped to make them" in flattered


def test_every_client_is_predicted_by_a_model_of_its_own_in_the_order_of_the_file(away: Path, tmp_path: Path) -> None:
    mine = sales(3, 7).assign(order=[f"{i:03}" for i in range(36)])
    file = written(tmp_path, mine, "new.csv")
    shown = json.loads(unalike("predict", away, "--data", file, "--id-column", "order", "--json"))
    table = pd.read_csv(tmp_path / "new.predictions.csv", dtype=str)
    assert list(table["id"]) == list(mine["order"]) and list(table["client"]) == list(mine["shop"])
    models = []
    for shop in ("s00", "s01", "s02"):
        model = tmp_path / f"{shop}.safetensors"
        unalike("personalize", away, "--data", file, "--client", shop, "--out", model)
        rows = (mine["shop"] == shop).to_numpy()
        words, _ = by_hand(model, mine[rows])
        assert list(table["prediction"][rows]) == words
        models.append(model.read_bytes())
    assert len(set(models)) == 3
    overall = float((table["prediction"] == mine["returned"]).mean())
    assert shown["score"] == pytest.approx(overall)
    assert [line["client"] for line in shown["clients"]] == ["s00", "s01", "s02"]
    only = json.loads(unalike("predict", away, "--data", file, "--client", "s01", "--out", tmp_path / "o", "--json"))
    assert [line["client"] for line in only["clients"]] == ["s01"]
    assert only["clients"][0]["score"] == shown["clients"][1]["score"]
    words = ["predict", away, "--data", file, "--out", tmp_path / "r", "--metric"]
    ranked = json.loads(unalike(*words, "auroc", "--json"))
    yes = (mine["returned"] == "yes").to_numpy()
    ahead = table["p_yes"].astype(float).to_numpy()[yes][:, None] > table["p_yes"].astype(float).to_numpy()[~yes]
    assert ranked["metric"] == "AUROC" and ranked["score"] == pytest.approx(ahead.mean())
    assert ranked["interval"][0] < ranked["score"] < ranked["interval"][1] and ranked["metrics"].keys() > {"accuracy"}
    (tmp_path / "r").unlink()
    assert "metric = 'aurok': for 2 classes there are accuracy" in told(*words, "aurok")
    assert not (tmp_path / "r").exists()
    assert "client 's1'; did you mean 's01'?" in told("predict", away, "--data", file, "--client", "s1", "--out", "q")


def test_a_prediction_is_the_same_for_every_kind_of_file(away: Path, tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    mine = sales(2, 7)
    mine.to_parquet(tmp_path / "new.parquet")
    table = written(tmp_path, mine, "new.csv")
    x = np.stack([mine["price"], *(mine["colour"] == c for c in ("blue", "green", "red")), mine["days"]], 1)
    arrays = archive(
        tmp_path, x=x.astype(np.float32), y=mine["returned"].to_numpy(str), client=mine["shop"].to_numpy(str)
    )
    found = []
    for number, file in enumerate((table, tmp_path / "new.parquet", arrays)):
        out = tmp_path / f"{number}.csv"
        result = CliRunner().invoke(app, ["predict", str(away), "--data", str(file), "--out", str(out)])
        assert result.exit_code == 0, result.output
        found.append(out.read_text())
    assert found[0] == found[1] == found[2]
    assert "s00" in result.output
    assert re.search(r"accuracy over all rows with a label: \d+\.\d%", result.output)
    assert "exists already, and nothing is overwritten" in told("predict", away, "--data", table, "--out", out)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.drop(columns="days"), "those of training, price, colour, days; 'days' is missing"),
        (lambda t: t.assign(colour="pink"), "'colour' holds 'pink' in data row 1, which was not in training"),
        (lambda t: t.assign(returned="maybe"), "the class 'maybe' was not in training.*--label-column ''"),
        (lambda t: t.drop(columns="returned"), "cannot personalize for a client without labels"),
        (lambda t: t.assign(price=[np.nan] * len(t)), "lacks 12 of 12 values.*missing"),
    ],
)
def test_a_file_that_does_not_fit_is_explained(
    change: Callable[[pd.DataFrame], pd.DataFrame], message: str, away: Path, tmp_path: Path
) -> None:
    file = written(tmp_path, change(sales(1, 7)), "new.csv")
    assert re.search(message, told("predict", away, "--data", file))
    assert [path.name for path in tmp_path.iterdir()] == ["new.csv"]


def test_columns_that_were_named_and_are_not_there_are_told(away: Path, tmp_path: Path) -> None:
    file = written(tmp_path, sales(1, 7), "new.csv")
    assert "no column 'store' (--client-column)" in told("predict", away, "--data", file, "--client-column", "store")
    assert "no column 'back' (--label-column)" in told("predict", away, "--data", file, "--label-column", "back")
    assert "no column 'order' (id_column)" in told("predict", away, "--data", file, "--id-column", "order")
    assert "trained on this column as a feature" in told("predict", away, "--data", file, "--id-column", "days")


def test_five_files_are_enough(away: Path, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    for name in (folder.ABOUT, folder.RECIPE, folder.SCHEMA, folder.ROSTER, folder.CHECKPOINT):
        shutil.copy(away / name, tmp_path / "run")
    file = written(tmp_path, sales(1, 7), "new.csv")
    for number, run in enumerate((away, tmp_path / "run")):
        unalike("predict", run, "--data", file, "--out", tmp_path / f"{number}.csv")
    assert (tmp_path / "0.csv").read_text() == (tmp_path / "1.csv").read_text()


def copied(run: Path, to: Path) -> Path:
    shutil.copytree(run, to)
    return to


@pytest.mark.parametrize("name", [folder.RECIPE, folder.SCHEMA, folder.ROSTER, folder.CHECKPOINT, folder.ABOUT])
def test_a_folder_that_was_copied_in_part_is_refused(name: str, away: Path, tmp_path: Path) -> None:
    run = copied(away, tmp_path / "run")
    whole = (run / name).read_bytes()
    (run / name).unlink()
    with pytest.raises(UserError, match=rf"{re.escape(name)}.*(unalike run|--out)"):
        FinishedRun.open(run)
    (run / name).write_bytes(whole[: len(whole) // 2])
    if name not in (folder.RECIPE, folder.ABOUT):  # half of these may be whole lines
        with pytest.raises(UserError, match=rf"{re.escape(name)} is damaged.*unalike run"):
            FinishedRun.open(run)
    (run / name).write_bytes(whole)
    FinishedRun.open(run)


def test_a_schema_that_was_edited_is_refused(away: Path, tmp_path: Path) -> None:
    run = copied(away, tmp_path / "run")
    schema = json.loads((run / folder.SCHEMA).read_text())
    reordered = {**schema, "columns": dict(reversed(schema["columns"].items()))}
    for edited, key in (
        ({**schema, "class_names": ["yes", "no"]}, "class_names"),
        ({**schema, "scale": {**schema["scale"], "values": [1.0] * 5}}, "scale"),
        (reordered, "columns"),
    ):
        (run / folder.SCHEMA).write_text(json.dumps(edited))
        with pytest.raises(UserError, match=rf"differs from the one in roster.safetensors in {key}\. .*Copy the whole"):
            FinishedRun.open(run)
    (run / folder.SCHEMA).write_text(json.dumps({**schema, "colour": 1}))
    with pytest.raises(UserError, match=r"schema.json is damaged: not a schema.*colour"):
        FinishedRun.open(run)


def test_a_long_roster_keeps_its_names() -> None:
    ids = torch.arange(0, 200_000, 2)
    names = [f"client-{number:09}" for number in range(200_000)]
    roster = Roster(ids, torch.ones_like(ids), torch.ones(len(ids), dtype=torch.bool), Schema((3,)), names)
    again = Roster.decode(roster.encode())
    assert again.name(99_999) == "client-000199998" and torch.equal(again.ids, ids)


def test_analyses_alone_need_the_data(away: Path, tmp_path: Path) -> None:
    run = finished_run(away)
    with pytest.raises(UserError, match=r"needs the data that it was trained on.*`unalike predict` do not need them"):
        _ = run.prepared
    home = tmp_path / "data.csv"
    sales(8, 0).to_csv(home, index=False)
    here = FinishedRun.open(trained(tmp_path / "run", home, "fedavg", rounds=1))
    assert len(here.prepared.population.unseen) == 2
    sales(9, 0).to_csv(home, index=False)
    with pytest.raises(UserError, match="has changed since"):
        _ = FinishedRun.open(tmp_path / "run").prepared


@pytest.mark.parametrize("method", ["fedavg", "fedprox", "pfedhn", "ld-fedavg", "pfl-sampled", "pfl-ensemble", "local"])
def test_a_training_client_has_its_model_in_the_folder(method: str, tmp_path: Path) -> None:
    data = written(tmp_path, sales(8, 0), "shops.csv")
    quick = {"newcomer_rounds": 2} if method == "pfedhn" else {}
    path = trained(tmp_path / "run", data, method, hyperparameters=quick)
    run = FinishedRun.open(path)
    expected = models_as_measured(run, path)
    data.unlink()
    for position in (0, len(run.roster) - 1):
        name = run.roster.name(position)
        torch.testing.assert_close(client_model(run, name).theta, expected[position])
    out = tmp_path / "own.safetensors"
    shown = json.loads(unalike("personalize", path, "--client", name, "--out", out, "--json"))
    assert shown["sent"] == {} and shown["epsilon"] == 0
    tensors = load_file(out)
    for key, value in run.method.model.tensors(expected[-1]).items():
        torch.testing.assert_close(tensors[key], value)


def test_a_model_that_the_folder_does_not_hold_is_said_to_need_data(away: Path, tmp_path: Path) -> None:
    name = FinishedRun.open(away).roster.name(0)
    needed = told("personalize", away, "--client", name)
    assert "pefll makes the model of" in needed and "cannot be loaded here" in needed and "--data" in needed
    assert f"did you mean '{name}'?" in told("personalize", away, "--client", name + "x")
    assert "--data FILE, or name a training client" in told("personalize", away)
    assert "--epsilon is about a newcomer's rows" in told("personalize", away, "--client", name, "--epsilon", 1)
    data = written(tmp_path, sales(8, 0), "shops.csv")
    run = trained(tmp_path / "run", data, "local")
    for kept in (run / "clients").iterdir():
        kept.unlink()
    assert "what the client keeps" in told("personalize", run, "--client", name)


OWN_METHOD = """
from dataclasses import dataclass

import torch

from unalike import Client, Model, State, send, task


@dataclass(frozen=True)
class Means:
    \"\"\"A model whose numbers are the mean of the client's inputs, and what it kept of every round.\"\"\"

    model: Model

    @task
    def fit(self, client: Client):
        return send(keep={"rounds": client.kept.get("rounds", torch.zeros(())) + 1})

    @task(stays="theta")
    def mine(self, client: Client):
        rounds = client.kept.get("rounds", torch.zeros(()))
        return send(theta=torch.ones(self.model.size) * (client.mean(client.x)[0] + rounds))

    def start(self, seed):
        return State(nothing=torch.zeros(1))

    def round(self, state, federation):
        federation.everyone().ask(self.fit, into=[])
        return state

    def personalize(self, state, cohort):
        return cohort.ask(self.mine).held("theta")
"""


@pytest.mark.parametrize("method", ["fedavg-finetune", "fedrep", "pefll", "ditto.py:Means"])
def test_a_training_client_has_a_model_by_every_method_where_the_data_are(method: str, tmp_path: Path) -> None:
    """Made again of what the server has, what the client kept and its training rows: as the run measured it."""
    if method.startswith("ditto"):
        (tmp_path / "ditto.py").write_text(OWN_METHOD)
        method = f"{tmp_path / 'ditto.py'}:Means"
    path = trained(tmp_path / "run", written(tmp_path, sales(8, 0), "shops.csv"), method)
    run = FinishedRun.open(path)
    expected = models_as_measured(run, path)
    for position in (0, len(run.roster) - 1):
        torch.testing.assert_close(client_model(run, run.roster.name(position)).theta, expected[position])
    names = [run.roster.name(position) for position in range(2)]
    new = sales(8, 5).drop(columns="returned")
    unalike("predict", path, "--data", written(tmp_path, new[new["shop"].isin(names)], "new.csv"), "--seen")
    table = pd.read_csv(tmp_path / "new.predictions.csv")
    for name in names:
        unalike("personalize", path, "--client", name, "--out", tmp_path / f"{name}.safetensors")
        words, shares = by_hand(tmp_path / f"{name}.safetensors", new[new["shop"] == name])
        rows = table[table["client"] == name]
        assert list(rows["prediction"]) == words
        np.testing.assert_allclose(rows[["p_no", "p_yes"]], shares, atol=1e-5)


def models_as_measured(run: FinishedRun, path: Path) -> torch.Tensor:
    """The models [C, d] of all training clients in the run's federation, brought back to its last round."""
    federation = run.prepared.federation(round=run.round)
    saved = checkpoint.load(path)
    assert saved is not None
    saved.restore(federation)
    with federation.aside() as measuring:
        cohort = measuring.everyone()
        return gather_models(cohort, run.method.personalize(run.state, cohort))


def test_training_clients_are_predicted_by_the_models_that_they_have(tmp_path: Path) -> None:
    data = written(tmp_path, sales(8, 0), "shops.csv")
    path = trained(tmp_path / "run", data, "local", rounds=3)
    run = FinishedRun.open(path)
    names = [run.roster.name(position) for position in range(2)]
    new = sales(8, 5).drop(columns="returned")
    file = written(tmp_path, new[new["shop"].isin(names)], "new.csv")
    assert "local cannot personalize for a client without labels" in told("predict", path, "--data", file)
    unalike("predict", path, "--data", file, "--seen")
    table = pd.read_csv(tmp_path / "new.predictions.csv")
    for name in names:
        model = tmp_path / f"{name}.safetensors"
        unalike("personalize", path, "--client", name, "--out", model)
        words, shares = by_hand(model, new[new["shop"] == name])
        rows = table[table["client"] == name]
        assert list(rows["prediction"]) == words
        np.testing.assert_allclose(rows[["p_no", "p_yes"]], shares, atol=1e-5)
    unseen = written(tmp_path, new.assign(shop="s99"), "other.csv")
    alone = told("predict", path, "--data", unseen, "--seen")
    assert "s99 took no part in training" in alone and "Leave --seen out: then it gets its model as a newcomer" in alone
    assert f"the training clients are {names[0]}, {names[1]}" in alone and "--data" not in alone


def test_a_client_that_did_not_train_is_named_among_those_that_did(tmp_path: Path) -> None:
    """What the message advises works."""
    path = trained(tmp_path / "run", written(tmp_path, sales(8, 0), "shops.csv"), "fedavg")
    run = FinishedRun.open(path)
    names = {run.roster.name(position) for position in range(len(run.roster))}
    new = sales(8, 5)
    aside = [name for name in sorted(set(new["shop"])) if name not in names]
    file = written(tmp_path, new, "new.csv")
    message = told("predict", path, "--data", file, "--seen")
    assert f"{aside[0]} and {aside[1]} took no part in training" in message and len(aside) == 2
    assert f"--client {min(names)} --seen" in message and not (tmp_path / "new.predictions.csv").exists()
    unalike("predict", path, "--data", file, "--client", min(names), "--seen", "--out", tmp_path / "one.csv")
    assert set(pd.read_csv(tmp_path / "one.csv")["client"]) == {min(names)}
    shown = unalike("predict", path, "--data", file)
    assert len(pd.read_csv(tmp_path / "new.predictions.csv")) == 96
    assert "accuracy over all rows" in shown and "also helped to make" not in shown, "one model, whatever their labels"


@pytest.mark.parametrize("method", ["fedavg", "pefll"])
def test_rows_are_called_by_the_id_column_of_the_run(method: str, tmp_path: Path) -> None:
    named = sales(8, 0).assign(pid=[f"{i:03}" for i in range(96)])
    options = {**SHOPS, "id_column": "pid"}
    more = {"hyperparameters": SMALL} if method == "pefll" else {}
    path = trained(tmp_path / "run", written(tmp_path, named, "shops.csv"), method, options=options, **more)
    mine = sales(1, 7).assign(pid=[f"0{i:02}" for i in range(12)])

    def ids(frame: pd.DataFrame, *words: object) -> tuple[list[str], str]:
        shown = unalike(
            "predict", path, "--data", written(tmp_path, frame), "--json", "--out", tmp_path / "p.csv", *words
        )
        found = list(pd.read_csv(tmp_path / "p.csv", dtype=str)["id"])
        (tmp_path / "p.csv").unlink()
        return found, " ".join(json.loads(shown)["notes"])

    numbers = [str(i + 1) for i in range(12)]
    found, notes = ids(mine)
    assert found == list(mine["pid"]) and "ignored" not in notes
    assert ids(mine.drop(columns="pid"))[0] == numbers
    found, notes = ids(mine.assign(order=mine["pid"] + "x"), "--id-column", "order")
    assert found == list(mine["pid"] + "x") and "ignored" not in notes
    found, notes = ids(mine, "--id-column", "")
    assert found == numbers and "ignored" not in notes
    answers = tmp_path / "answers.csv"
    unalike("personalize", path, "--data", written(tmp_path, mine), "--predictions", answers)
    assert list(pd.read_csv(answers, dtype=str)["id"]) == list(mine["pid"])
    table = NewcomerFile.read(FinishedRun.open(path), mine.set_axis(range(100, 112)))
    assert table.newcomer("s00").ids == list(mine["pid"])
    table = NewcomerFile.read(FinishedRun.open(path), mine.drop(columns="pid").set_axis(range(100, 112)))
    assert table.newcomer("s00").ids == [str(i) for i in range(100, 112)]


def test_ids_of_arrays_are_found_by_the_name_that_the_run_gave_them(tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    x, client = random.normal(size=(96, 3)), np.arange(96) % 8
    whole = archive(tmp_path, x=x, y=(x[:, 0] > 0).astype(int), client=client, pid=np.arange(96) + 500)
    path = trained(tmp_path / "run", whole, "fedavg", options={"id_column": "pid"})
    run = FinishedRun.open(path)
    assert NewcomerFile.read(run, archive(tmp_path, x=x[:2], pid=[7, 9])).newcomer("").ids == ["7", "9"]
    plain = archive(tmp_path, x=x[:2])
    assert NewcomerFile.read(run, plain).newcomer("").ids == ["1", "2"]
    with pytest.raises(DataError, match=r"there is no array 'pid' \(id_column\)"):
        NewcomerFile.read(run, plain, id_column="pid")


def test_each_client_of_a_file_has_a_model_file_of_its_own(away: Path, tmp_path: Path) -> None:
    data = written(tmp_path, sales(2, 7).replace({"shop": {"s01": "../s/1"}}), "new.csv")
    unalike("personalize", away, "--data", data, "--client", "s00")
    unalike("personalize", away, "--data", data, "--client", "../s/1")
    assert {file.name for file in tmp_path.glob("*.safetensors")} == {
        "new.s00.model.safetensors",
        "new._s_1.model.safetensors",
    }


def test_numbers_are_predicted_and_scored_by_their_error(tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    x = random.normal(size=(40, 3))
    np.savez(tmp_path / "all.npz", x=x, y=x[:, 0] + 0.5, client=np.arange(40) // 8)
    run = trained(tmp_path / "run", tmp_path / "all.npz", "fedavg", options={})
    y = np.array([0.5, np.nan, 1.5, 2.0])
    file = archive(tmp_path, x=x[:4], y=y, row=np.array(["a", "b", "c", "d"]))
    words = ["predict", run, "--data", file, "--unlabeled", "--id-column", "row", "--json"]
    shown = json.loads(unalike(*words))
    table = pd.read_csv(tmp_path / "mine.predictions.csv")
    assert list(table.columns) == ["id", "client", "prediction"] and list(table["id"]) == ["a", "b", "c", "d"]
    assert shown["metric"] == "RMSE" and shown["notes"] == []
    assert shown["score"] == pytest.approx(float(np.nanmean((table["prediction"] - y) ** 2)) ** 0.5, rel=1e-6)
    assert shown["metrics"]["MAE"] == pytest.approx(float(np.nanmean((table["prediction"] - y).abs())), rel=1e-6)
    assert shown["interval"][0] <= shown["score"] <= shown["interval"][1]


def test_what_is_missing_is_filled_by_the_schema(away: Path, tmp_path: Path) -> None:
    mine = sales(1, 7)
    mine.loc[0, "price"] = np.nan
    file = written(tmp_path, mine, "new.csv")
    shown = json.loads(unalike("predict", away, "--data", file, "--json", "--set", "data.options.missing=mean"))
    assert "filled in by the schema's means: 1 value" in shown["notes"] and shown["rows"] == 12
    words = ["--set", "data.options.missing=drop", "--out", tmp_path / "p.csv"]
    shown = json.loads(unalike("predict", away, "--data", file, "--json", *words))
    assert shown["rows"] == 11 and list(pd.read_csv(tmp_path / "p.csv")["id"]) == list(range(2, 13))


def test_what_a_private_run_sends_of_the_rows_is_entered_in_the_ledger(tmp_path: Path) -> None:
    data = written(tmp_path, sales(8, 0), "shops.csv")
    private = {"encoder": "sphere", "newcomer_epsilon": 1.0, **SMALL}
    run = trained(tmp_path / "run", data, "odpfl", rounds=1, hyperparameters=private)
    data.unlink()
    file = written(tmp_path, sales(2, 7), "new.csv")
    words = ["predict", run, "--data", file, "--json"]
    first = json.loads(unalike(*words, "--out", tmp_path / "1.csv"))
    again = json.loads(unalike(*words, "--out", tmp_path / "2.csv"))
    assert first["ledger"] == str(tmp_path / "new.ledger.json")
    for before, after in zip(first["clients"], again["clients"], strict=True):
        assert before["epsilon"] == pytest.approx(1.0, abs=0.01) and after["epsilon"] > 1.2
    served = json.loads(unalike("personalize", run, "--data", file, "--client", "s00", "--json"))
    assert any("the data that the run was trained on are not here to test" in note for note in served["notes"])


def test_a_saved_model_says_what_it_reads_and_what_its_answers_are_called(away: Path, tmp_path: Path) -> None:
    onnx = pytest.importorskip("onnx")
    pytest.importorskip("onnxscript")
    onnxruntime = pytest.importorskip("onnxruntime")
    mine = sales(1, 7)
    unalike("personalize", away, "--data", written(tmp_path, mine, "new.csv"), "--onnx")
    with safe_open(tmp_path / "new.model.safetensors", framework="pt") as stored:
        about = stored.metadata()
    graph = onnx.load(tmp_path / "new.model.onnx")
    assert {one.key: one.value for one in graph.metadata_props}.items() >= about.items()
    assert "not scaled" in graph.doc_string and "float32 [rows, 5]" in graph.doc_string
    whose = {"method": "pefll", "run": "moved", "round": "2", "client": "s00", "input": "float32 [rows, 5]"}
    assert about.items() >= whose.items()
    assert json.loads(about["columns"]) == ["price", "colour", "days"] and json.loads(about["classes"]) == ["no", "yes"]
    assert Schema.from_json(about["schema"]) == FinishedRun.open(away).schema
    x = np.stack([mine["price"], *(mine["colour"] == c for c in ("blue", "green", "red")), mine["days"]], 1)
    session = onnxruntime.InferenceSession(tmp_path / "new.model.onnx")
    (scores,) = session.run(["scores"], {"x": x.astype(np.float32)})
    _, shares = by_hand(tmp_path / "new.model.safetensors", mine)
    np.testing.assert_allclose(np.exp(scores) / np.exp(scores).sum(1, keepdims=True), shares, atol=1e-5)
