"""A search on simulated clients: the real ones give a mixture of their histograms, whose ε is told, and train once."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor
from typer.testing import CliRunner

from unalike.commands.main import app
from unalike.data import load
from unalike.runs.errors import UserError
from unalike.runs.load import load_data
from unalike.runs.recipe.recipe import Plan, plan_of, read_toml
from unalike.runs.recipe.settings import plan_for
from unalike.runs.rehearsal import Rehearsal
from unalike.runs.tune import tune
from unalike.runs.watcher import Watcher

pytest.importorskip("optuna", reason="a search needs Optuna: pip install 'unalike[tune]'")
DIVIDED: dict[str, Any] = {"data": "digits", "partition": "dirichlet:0.2", "clients": 40, "unseen": 0}
SMALL: dict[str, Any] = {**DIVIDED, "rounds": 1, "eval_every": 1, "cohort": 5, "model": "logistic"}
LR = {"local.lr": (1e-3, 1.0)}


def plan(**settings: Any) -> Plan:
    return plan_for(["fedavg"], {**SMALL, **settings})


def test_the_search_is_on_the_servers_rows_dealt_out_like_the_clients_and_the_recipe_is_of_theirs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    searched = []

    def spy(label: str, recipe: Any, *more: Any) -> Any:
        searched.append(recipe)
        return search(label, recipe, *more)

    from unalike.runs import tune as module

    search = module._search
    monkeypatch.setattr(module, "_search", spy)
    rehearsal = Rehearsal("digits", components=[1, 2], clients=30)
    [found] = tune(plan(), 2, tmp_path, LR, Watcher(), rehearsal)
    [recipe] = searched
    assert recipe.data.partition == f"mdm:{tmp_path / 'clients.json'}" and recipe.data.clients == 30
    [(_, written)] = plan_of(read_toml(tmp_path / "tuned.toml"), "tuned.toml").runs
    assert written.data.partition == "dirichlet:0.2" and written.data.clients == 40 and written.data.validation == 0
    assert written.hyperparameters["local"]["lr"] == found.values["local.lr"]
    assert found.cost is not None and found.cost["epsilon"] is None and found.cost["clients"] == 40
    true = load("digits", partition="dirichlet:0.2", clients=40, unseen=0).histogram()
    alike = load("digits", partition="iid", clients=40, unseen=0).histogram()
    made = load_data(recipe).histogram()
    assert len(made) == 30
    near, far = concentration(made) - concentration(true), concentration(alike) - concentration(true)
    assert abs(near) < 0.25 * abs(far)  # clients as unlike one another as the real ones


def concentration(counts: Tensor) -> float:
    """The mean of Σ_j p_j², which is 1 for a client of one class."""
    return float((counts / counts.sum(1, keepdim=True)).square().sum(1).mean())


def test_the_mixture_is_charged_once_and_a_search_goes_on_with_it(tmp_path: Path) -> None:
    rehearsal = Rehearsal("digits", epsilon=3.0, unit="point", components=[1])
    [one] = tune(plan(), 1, tmp_path, LR, Watcher(), rehearsal)
    mixture = (tmp_path / "clients.json").read_bytes()
    [two] = tune(plan(), 2, tmp_path, LR, Watcher(), rehearsal)
    assert (tmp_path / "clients.json").read_bytes() == mixture and two.trials == 2  # its noise is not drawn again
    assert one.cost == two.cost == {"epsilon": 3.0, "unit": "point", "delta": 0.0, "clients": 40, "components": 1}
    with pytest.raises(UserError, match="another budget"):
        tune(plan(), 2, tmp_path, LR, Watcher(), Rehearsal("digits", epsilon=4.0, unit="point", components=[1]))


@pytest.mark.long
def test_clients_are_protected_too_and_a_private_run_may_be_rehearsed(tmp_path: Path) -> None:
    rehearsal = Rehearsal("digits", epsilon=8.0, delta=1e-3, largest=200, components=[1])
    private = plan(epsilon=50.0, delta=1e-3, simulate_noise=True)
    [found] = tune(private, 1, tmp_path, LR, Watcher(), rehearsal)
    assert found.cost is not None and 7.9 < found.cost["epsilon"] <= 8.0 and found.recipe.privacy.epsilon == 50.0
    with pytest.raises(UserError, match="no ε counts"):
        tune(private, 1, tmp_path / "real", LR, Watcher())


def test_the_command_says_what_it_cost_and_what_is_missing(tmp_path: Path) -> None:
    data = ("--data", "digits", "--partition", "dirichlet:0.2", "--clients", "20", "--rounds", "1", "--cohort", "5")
    words = ("tune", "fedavg", *data, "--trials", "1", "-q", "--on", "mdm")
    told = CliRunner().invoke(
        app,
        [*words, "--server-data", "digits", "--mdm-epsilon", "2", "--mdm-unit", "point", f"--out={tmp_path / 'one'}"],
    )
    assert told.exit_code == 0, told.output
    assert "ε = 2 at δ = 0 for each row of a client" in told.stdout
    assert json.loads((tmp_path / "one" / "rehearsal.json").read_text())["cost"]["epsilon"] == 2.0
    for more, message in (
        ((), "--server-data, whose rows"),
        (("--server-data", "digits", "--mdm-epsilon", "1"), "give --largest"),
    ):
        refused = CliRunner().invoke(app, [*words, *more, f"--out={tmp_path / 'no'}"])
        assert refused.exit_code == 1 and message in " ".join(refused.output.split()), refused.output
    alone = CliRunner().invoke(app, ["tune", "fedavg", "--mdm-epsilon", "1", f"--out={tmp_path / 'no'}"])
    assert alone.exit_code == 1 and "go with --on mdm" in " ".join(alone.output.split())
