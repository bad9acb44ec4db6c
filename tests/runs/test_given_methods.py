"""Methods of one's own: a class or an instance from Python, and the entry point of an installed package."""

from __future__ import annotations

import importlib.metadata
import runpy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from typer.testing import CliRunner

import unalike as ua
from tests.runs.helpers import At, Crash, crash
from unalike import methods
from unalike.commands.main import app
from unalike.core import outside
from unalike.core.outside import CannotLoad
from unalike.runs.recipe.recipe import read_recipe

FILE = Path(__file__).parents[2] / "examples" / "ditto.py"
Ditto = runpy.run_path(str(FILE))["Ditto"]  # as in a cell of a notebook: no import path leads to it
QUICK: dict[str, Any] = {"rounds": 2, "cohort": 4, "block": 4, "threads": 1}
DIGITS: dict[str, Any] = {"data": "digits", "clients": 8, "partition": "pathological"}


@pytest.fixture(autouse=True)
def nothing_remembered() -> Iterator[None]:
    yield
    outside._handed_over.clear()


def test_a_class_without_a_path_is_compared_with_a_method_by_name() -> None:
    random = np.random.default_rng(0)
    frame = pd.DataFrame({"shop": np.arange(200) % 10, "price": random.normal(size=200)})
    frame["returned"] = ((frame["price"] > 0) ^ (frame["shop"] > 4)).astype(int)  # two kinds of shops
    given: dict[str, Any] = {"data": frame, "client_column": "shop", "label_column": "returned", "model": "mlp"}
    found = ua.compare("fedavg", Ditto, **given, **{**QUICK, "rounds": 30}, lr=0.2)
    assert [one.label for one in found.results] == ["fedavg", "Ditto"]
    fedavg, ditto = (one.accuracy.seen for one in found.results)
    assert fedavg is not None and ditto is not None and ditto.mean > fedavg.mean + 0.1


def test_an_instance_brings_its_model_and_hyperparameters(tmp_path: Path) -> None:
    clients = ua.data.load("digits", partition="pathological", clients=8, unseen=0.25, seed=0)
    model = ua.Model.named("mlp", clients, hidden=(7,))
    by_hand = Ditto(model, cohort=4, strength=0.3)
    federation = ua.simulate(clients, seed=0)
    state = ua.train(by_hand, federation, rounds=2)
    wanted = ua.evaluate(by_hand, state, clients, federation=federation)
    found = ua.run(Ditto(model, strength=0.3), data=clients, out=tmp_path / "run", **QUICK)
    assert found.accuracy.seen is not None and wanted.seen is not None
    assert found.accuracy.seen.mean == pytest.approx(wanted.seen.mean, abs=1e-9)
    recipe = read_recipe(tmp_path / "run" / "recipe.toml")
    assert recipe.hyperparameters["strength"] == 0.3 and recipe.hyperparameters["cohort"] == 4
    with pytest.raises(ua.UserError, match=r"model = 'lenet': this Ditto has its own; give the class instead"):
        ua.run(Ditto(model), data=clients, model="lenet")


def test_noise_is_a_setting_and_nothing_that_an_instance_brings() -> None:
    clients = ua.data.load("digits", clients=8, seed=0)
    method = ua.FedAvg(ua.Model.named("logistic", clients), clip=1.0, noise=ua.Gaussian(1.0))
    with pytest.raises(ua.UserError, match=r"FedAvg\.noise = .*no recipe can say this.*epsilon="):
        ua.run(method, data=clients, **QUICK)


def test_a_class_of_the_package_is_recorded_by_its_path(tmp_path: Path) -> None:
    ua.run(ua.FedAvg, **DIGITS, **QUICK, out=tmp_path / "run")
    assert read_recipe(tmp_path / "run" / "recipe.toml").method == "unalike.methods.fedavg:FedAvg"


def test_a_run_of_a_class_without_a_path_goes_on_when_it_is_handed_over_again(tmp_path: Path) -> None:
    whole = ua.run(Ditto, **DIGITS, **QUICK)
    with pytest.raises(Crash):
        ua.run(Ditto, **DIGITS, **QUICK, out=tmp_path / "run", checkpoint_every=1, watcher=At(2, crash))
    outside._handed_over.clear()  # another process
    with pytest.raises(CannotLoad, match=r"Ditto was handed over from Python .*resume\(\.\.\., method=Ditto\)"):
        ua.resume(tmp_path / "run")
    assert ua.resume(tmp_path / "run", method=Ditto).accuracy == whole.accuracy


def test_an_installed_package_registers_a_method(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    found = importlib.metadata.EntryPoint("ditto", f"{FILE}:Ditto", "unalike.methods")
    ours = importlib.metadata.EntryPoint("fedavg", "nowhere:FedAvg", "unalike.methods")
    monkeypatch.setattr(methods, "entry_points", lambda group: [found, ours] if group == "unalike.methods" else [])
    methods.installed_methods.cache_clear()
    try:
        listed = CliRunner().invoke(app, ["methods"])
        assert "ditto" in listed.stdout
        assert "strength" in CliRunner().invoke(app, ["methods", "ditto"]).stdout
        done = ua.run("ditto", **DIGITS, **QUICK, out=tmp_path / "run")
        assert done.method == "ditto" and done.accuracy.unseen is not None
        assert ua.run("fedavg", **DIGITS, **QUICK).method == "fedavg"
        with pytest.raises(ua.UserError, match=r"did you mean 'ditto'"):
            ua.run("dito", **DIGITS)
    finally:
        methods.installed_methods.cache_clear()
