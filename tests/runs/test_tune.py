"""The search for hyperparameters: on validation rows, equal trials, pruned, resumable, and never beside an ε."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from unalike.commands.main import app
from unalike.runs.errors import UserError
from unalike.runs.recipe.recipe import Plan, plan_of, read_toml
from unalike.runs.recipe.settings import plan_for
from unalike.runs.tune import tune
from unalike.runs.watcher import Watcher

optuna = pytest.importorskip("optuna", reason="a search needs Optuna: pip install 'unalike[tune]'")
SMALL: dict[str, Any] = {"data": "digits", "clients": 6, "rounds": 2, "eval_every": 1, "cohort": 3, "model": "logistic"}
LR = {"local.lr": (1e-6, 1.0)}


class Listening(Watcher):
    def __init__(self) -> None:
        self.said: list[str] = []

    def note(self, text: str) -> None:
        self.said.append(text)


def plan(*methods: str, **settings: Any) -> Plan:
    return plan_for(methods, {**SMALL, **settings})


def test_a_search_finds_a_rate_that_learns_and_ends_in_a_recipe_that_compare_runs(tmp_path: Path) -> None:
    found = tune(plan("fedavg", "local"), 5, tmp_path, LR, Watcher())
    assert [one.label for one in found] == ["fedavg", "local"] and {one.trials for one in found} == {5}
    assert all(one.values["local.lr"] > 1e-4 for one in found)  # nothing is learnt below
    written = plan_of(read_toml(tmp_path / "tuned.toml"), "tuned.toml")
    for one, (label, recipe) in zip(found, written.runs, strict=True):
        assert label == one.label and recipe.hyperparameters["local"]["lr"] == one.values["local.lr"]
        assert recipe.data.validation == 0.2 and recipe.rounds == 2
    shown = CliRunner().invoke(app, ["compare", str(tmp_path / "tuned.toml"), f"--out={tmp_path / 'both'}", "-q"])
    assert shown.exit_code == 0 and "fedavg" in shown.stdout


def test_a_search_goes_on_and_finds_what_it_finds_in_one_go(tmp_path: Path) -> None:
    listening = Listening()
    tune(plan("fedavg"), 2, tmp_path / "twice", LR, Watcher())
    [twice] = tune(plan("fedavg"), 4, tmp_path / "twice", LR, listening)
    assert [text.split(",")[0] for text in listening.said] == ["fedavg: trial 3 of 4", "fedavg: trial 4 of 4"]
    assert twice.trials == 4
    [again] = tune(plan("fedavg"), 4, tmp_path / "twice", LR, listening)
    assert again.score == twice.score and len(listening.said) == 2  # all was done


def test_a_search_does_not_go_on_with_trials_of_another(tmp_path: Path) -> None:
    tune(plan("fedavg"), 1, tmp_path, LR, Watcher())
    for settings, ranges in (
        ({"rounds": 1}, LR),
        ({"seed": 7}, LR),
        ({"metric": "log_loss"}, LR),
        ({}, {"local.lr": (1e-3, 1.0)}),
    ):
        with pytest.raises(UserError, match="another recipe, data, metric or ranges"):
            tune(plan("fedavg", **settings), 1, tmp_path, ranges, Watcher())
    assert tune(plan("fedavg", threads=1), 1, tmp_path, LR, Watcher())[0].trials == 1  # equal numbers


def test_help_says_what_to_install() -> None:
    shown = CliRunner().invoke(app, ["tune", "--help"]).stdout
    assert "pip install 'unalike[tune]'" in " ".join(shown.split())


def test_trials_that_lag_behind_or_diverge_end_early(tmp_path: Path) -> None:
    [found] = tune(plan("fedavg", model="mlp", rounds=4), 10, tmp_path, {"local.lr": (1e-6, 1e4)}, Watcher())
    assert found.pruned > 0 and found.score > 0.2


def test_a_search_refuses_exact_scores_beside_an_epsilon_and_what_a_method_does_not_have(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="a search looks at exact scores of the clients, which no ε counts"):
        tune(plan("fedavg", epsilon=2.0), 1, tmp_path, {}, Watcher())
    with pytest.raises(UserError, match="fedavg has no hyperparameter 'mu'"):
        tune(plan("fedavg"), 1, tmp_path, {"mu": (0.1, 1.0)}, Watcher())
    shown = CliRunner().invoke(app, ["tune", "fedavg", "--search=local.lr=1", f"--out={tmp_path}"])
    assert shown.exit_code == 1 and "expected KEY=LOW:HIGH" in shown.stderr


def test_a_rate_on_the_command_line_reaches_fine_tuning_where_a_method_fine_tunes() -> None:
    [(_, recipe)] = plan("fedavg-finetune", lr=0.03).runs
    assert recipe.hyperparameters["finetune"]["lr"] == recipe.hyperparameters["local"]["lr"] == 0.03
    [(_, plain)] = plan("fedavg", lr=0.03).runs
    assert "finetune" not in plain.hyperparameters
    own = {"finetune": {"lr": 0.5}}
    [(_, kept)] = plan("fedavg-finetune", lr=0.03, hyperparameters=own).runs
    assert kept.hyperparameters["finetune"]["lr"] == 0.5
