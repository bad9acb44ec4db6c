"""What can be set of a method: its typed fields, checked, with every mistake told."""

from __future__ import annotations

import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from unalike.api import UserError, run
from unalike.learn.local import LocalSGD
from unalike.methods import METHODS
from unalike.runs.prepare import prepare
from unalike.runs.privacy import forecast
from unalike.runs.recipe import keys
from unalike.runs.recipe.hyperparameters import Hyperparameters, describe, plain
from unalike.runs.recipe.recipe import to_recipe

METHOD = """
from dataclasses import dataclass, field
from typing import Literal
from unalike import LocalSGD, Model, State

@dataclass(frozen=True)
class Mine:
    model: Model
    {fields}
    serves_unlabeled = True

    def start(self, seed): return State(theta=self.model.init(seed))
    def round(self, state, federation): return state
    def personalize(self, state, cohort): return state.theta.expand(len(cohort), -1)
"""


def method(folder: Path, *fields: str) -> str:
    """A method of a user's own with these lines among its fields."""
    file = folder / "mine.py"
    file.write_text(METHOD.format(fields="\n    ".join(fields)))
    return f"{file}:Mine"


@pytest.mark.parametrize(
    ("line", "typed"),
    [
        ("lr = 0.1", "lr: float = 0.1"),
        ("cohort = 10", "cohort: int = 10"),
        ("secure = False", "secure: bool = False"),
        ("sizes = (1, 2)", r"sizes: tuple = \(1, 2\)"),
        ("clip = None", r"clip: float \| None = None"),
        ("local = LocalSGD(lr=0.5)", r"local: LocalSGD = LocalSGD\(epochs=1"),
    ],
)
def test_a_field_without_a_type_is_refused_with_the_line_to_write(tmp_path: Path, line: str, typed: str) -> None:
    with pytest.raises(UserError, match=f"Mine.{line.split()[0]} has no type.* give it a type: {typed}"):
        Hyperparameters.of(method(tmp_path, line))


def test_what_is_no_forgotten_field_needs_no_type(tmp_path: Path) -> None:
    mine = method(tmp_path, "lr: float = 0.1", "_private = 3", "double = staticmethod(lambda x: 2 * x)", "Inner = int")
    assert describe(mine) == {"lr": 0.1}


def test_a_network_that_nobody_can_give_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"needs embedding, and no recipe can give .*Model.*; .*`problem: Problem`"):
        Hyperparameters.of(method(tmp_path, "embedding: Model"))


def test_what_a_table_leaves_out_stays_as_in_the_defaults() -> None:
    arguments = Hyperparameters.of("fedavg-finetune").read({"local": {"lr": 0.5}, "finetune": {"steps": 7}})
    assert arguments["local"] == LocalSGD(epochs=1, batch=10, lr=0.5)
    assert arguments["finetune"] == LocalSGD(steps=7, batch=10, lr=0.1)
    assert Hyperparameters.of("fedavg").read({"finetune": {"lr": 0.5}})["finetune"] == LocalSGD(lr=0.5)


def test_none_is_null_but_where_it_is_a_word(tmp_path: Path) -> None:
    mine = method(tmp_path, 'norm: Literal["none", "layer"] = "layer"', "name: str | None = 'a'", "rate: float = None")
    known = Hyperparameters.of(mine)
    assert known.read({"norm": "none", "name": "none"}) == {"norm": "none", "name": None, "rate": None}
    assert describe(mine) == {"norm": "layer", "name": "a", "rate": "none"}
    assert known.read(describe(mine)) == known.defaults  # a default is its own null, whatever its type says


def test_a_hyperparameter_without_a_default_must_be_given(tmp_path: Path) -> None:
    mine = method(tmp_path, "width: int", "json: int = 1", "model_dump: int = 2")  # names that pydantic has, too
    assert describe(mine) == {"width": "required", "json": 1, "model_dump": 2}
    assert Hyperparameters.of(mine).read({"width": 3, "json": 4}) == {"width": 3, "json": 4, "model_dump": 2}
    with pytest.raises(UserError, match=r"needs the hyperparameter 'width': set width=VALUE"):
        Hyperparameters.of(mine).read({"json": 4})


def test_every_mistake_is_told_once() -> None:
    with pytest.raises(UserError) as told:
        Hyperparameters.of("fedavg").read(
            {"local": {"lr": "fast", "epoch": 2}, "secure": "a", "finetune": {"lr": -2.0}}
        )
    assert str(told.value) == (
        "fedavg, local.lr = 'fast': expected a number or a table of keys with values; "
        "fedavg has no hyperparameter 'local.epoch'; did you mean 'local.epochs'?; "
        "fedavg, finetune.lr = -2.0: expected 0 or more; "
        "fedavg, secure = 'a': expected true or false"
    )
    assert told.value.note.with_flags(keys.flag_of).startswith("fedavg, local.lr = 'fast' (--lr): expected a number")
    with pytest.raises(UserError, match=r"^r: data.unseen = 'x': expected a number or a list$"):
        to_recipe({"method": "fedavg", "data": {"unseen": "x"}}, "r")


@pytest.mark.parametrize("name", METHODS)
def test_what_is_written_reads_back(name: str) -> None:
    known = Hyperparameters.of(name)
    assert known.read(plain(known.defaults)) == known.defaults


def test_privacy_is_a_capability_that_a_method_declares() -> None:
    """ODPFL and pFedHN have a cohort, a clip and noise, too, but for other things."""
    data = {"name": "digits", "clients": 30}
    for name, unit in (("pfedhn", "client"), ("pfedhn", "point"), ("odpfl", "point")):
        recipe = to_recipe({"method": name, "data": data, "privacy": {"epsilon": 3.0, "unit": unit}}, "r")
        with pytest.raises(UserError, match=f"{name} has no {unit}-level privacy.*; fedavg.* has it"):
            prepare(recipe)
    own = {"encoder": "sphere", "newcomer_epsilon": 1.0}  # protects a newcomer's rows, and nobody in training
    prepared = prepare(to_recipe({"method": "odpfl", "data": data, "hyperparameters": own}, "r"))
    told = forecast(prepared.recipe, prepared.method, prepared.roster, prepared.delta)
    assert (told.noise, told.epsilon) == (None, math.inf)


def test_a_method_that_does_not_say_whom_it_asks_is_not_refused(tmp_path: Path) -> None:
    data = {"name": "digits", "clients": 30, "labeled": 0.0}
    prepare(to_recipe({"method": method(tmp_path, "cohort: int = 5"), "data": data}, "r"))
    for name in ("fedavg", "flowdup"):
        with pytest.raises(UserError, match=f"no training client has labels, and {name} trains with them"):
            prepare(to_recipe({"method": name, "data": data}, "r"))


def test_the_names_of_settings_load_without_anything_heavy() -> None:
    code = "import runpy, sys; runpy.run_path(sys.argv[1]); print({'torch', 'pydantic', 'numpy'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code, keys.__file__], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"lr": "x"}, r"^fedavg, local\.lr = 'x': expected a number or a table of keys with values$"),
        ({"batch": "x"}, r"^fedavg, local\.batch = 'x': expected a number$"),
        ({"rounds": 2.5}, r"rounds = 2\.5: expected a whole number$"),
        ({"epsilon": -1}, r"privacy\.epsilon = -1: expected a number above 0$"),
        ({"hyperparameters": {"local": 3}}, r"^fedavg, local = 3: expected a table of keys with values$"),
        ({"epsilons": "a.csv", "epsilon": 1}, r"privacy = .*: give epsilons \(each client's own\) or epsilon"),
    ],
)
def test_wrong_values_are_answered_in_our_words(settings: dict[str, Any], says: str) -> None:
    with pytest.raises(UserError, match=says) as told:
        run("fedavg", **settings)
    assert "input should" not in str(told.value).lower() and "value error" not in str(told.value).lower()
