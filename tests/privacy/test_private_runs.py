"""Private training out of the box, from the flags to the run folder: what it promises is what dp_accounting says."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import dp_accounting as dp
import pytest
from typer.testing import CliRunner

from tests.core.helpers import clients, total
from tests.runs.helpers import At, Crash, crash, metrics
from unalike import Sum, simulate
from unalike.api import UserError, resume, run
from unalike.commands.main import app
from unalike.methods import METHODS
from unalike.privacy import BudgetExceeded, Gaussian, Ledger
from unalike.runs import checkpoint
from unalike.runs.prepare import prepare
from unalike.runs.recipe.settings import plan_for

SMALL: dict[str, Any] = {
    "data": "digits",
    "partition": "iid",
    "clients": 40,
    "unseen": 4,
    "cohort": 0.5,
    "model": "logistic",
    "rounds": 4,
    "eval_every": 2,
    "checkpoint_every": 1,
    "block": 8,
    "threads": 1,
}
DELTA = 1e-3
SLACK = 1e-5  # discrete noise is charged a few millionths more than continuous noise


def of_dp_accounting(z: float, rate: float, rounds: int) -> float:
    accountant = dp.pld.PLDAccountant()
    accountant.compose(dp.SelfComposedDpEvent(dp.PoissonSampledDpEvent(rate, dp.GaussianDpEvent(z)), rounds))
    return float(accountant.get_epsilon(DELTA))


def ledger_in(folder: Path) -> Ledger:
    return Ledger.from_state(json.loads((folder / "ledger.json").read_text()))


def test_a_target_is_met_from_below_and_the_loss_is_not_released(tmp_path: Path) -> None:
    result = run("fedavg", epsilon=4.0, delta=DELTA, **{**SMALL, "cohort": 1.0}, out=tmp_path / "run")
    assert result.privacy.unit == "client"
    assert 3.99 < result.privacy.epsilon <= 4.0
    rows = metrics(tmp_path / "run")
    assert all(row["loss"] is None for row in rows)
    spent = [row["epsilon"] for row in rows]  # after every round
    assert spent == sorted(spent) and spent[-1] == pytest.approx(result.privacy.epsilon)
    [row] = json.loads((tmp_path / "run" / "transcript.json").read_text())
    assert (row["array"], row["unit"], row["clip"], row["seen_as"]) == ("update", "client", 0.5, "mean")
    assert "simulation only" in result.scored


def test_resume_drop_outs_and_a_repeated_run_are_accounted_like_dp_accounting(tmp_path: Path) -> None:
    private = {**SMALL, "noise_multiplier": 1.5, "clip": 0.5, "delta": DELTA}
    whole = run("fedavg", **private, out=tmp_path / "whole")
    expected = of_dp_accounting(1.5, 0.5, 4)
    assert whole.privacy.epsilon == pytest.approx(expected, abs=SLACK)

    with pytest.raises(Crash):
        run("fedavg", **private, out=tmp_path / "resumed", watcher=At(2, crash))
    resumed = resume(tmp_path / "resumed")
    assert resumed.privacy == whole.privacy
    assert ledger_in(tmp_path / "resumed") == ledger_in(tmp_path / "whole")

    lossy = run("fedavg", **private, drop=0.2, out=tmp_path / "lossy")
    assert lossy.failures > 0
    assert lossy.privacy.epsilon == pytest.approx(expected, abs=SLACK)  # who drops out is charged all the same

    twice = ledger_in(tmp_path / "whole") + ledger_in(tmp_path / "lossy")
    assert twice.epsilon(DELTA) == pytest.approx(of_dp_accounting(1.5, 0.5, 8), abs=SLACK)


def test_a_budget_below_what_the_noise_costs_stops_the_run_before_it_is_exceeded(tmp_path: Path) -> None:
    with pytest.raises(BudgetExceeded, match="nothing was sent"):
        run("fedavg", **SMALL, noise_multiplier=1.5, clip=0.5, epsilon=1.5, delta=DELTA, out=tmp_path / "run")
    spent = [row["epsilon"] for row in metrics(tmp_path / "run")]
    assert 0 < len(spent) < 4 and max(spent) <= 1.5


def test_points_are_protected_by_training_at_the_clients(tmp_path: Path) -> None:
    settings = {**SMALL, "cohort": 1.0, "rounds": 2, "batch": 64}  # batches of whole clients: quick to calibrate
    result = run("fedavg", **settings, epsilon=6.0, delta=1e-4, unit="point", out=tmp_path / "run")
    assert result.privacy.unit == "point"
    assert 5.9 < result.privacy.epsilon <= 6.0
    [row] = json.loads((tmp_path / "run" / "transcript.json").read_text())
    assert (row["unit"], row["clip"], row["noise"]) == ("point", 1.0, {"kind": "DP-SGD"})


def flags(**settings: Any) -> list[str]:
    return [f"--{name.replace('_', '-')}={value}" for name, value in settings.items()]


def invoked(*arguments: str, code: int = 0) -> str:
    result = CliRunner().invoke(app, list(arguments))
    assert result.exit_code == code, result.output
    return result.output


def test_plan_show_and_audit_by_command(tmp_path: Path) -> None:
    keys = ("data", "partition", "clients", "cohort", "model", "rounds")
    common = flags(**{key: SMALL[key] for key in keys}, noise_multiplier=1.5, clip=0.5, delta=DELTA)
    plan = json.loads(invoked("privacy", "plan", "fedavg", *common, "--json"))
    assert plan["epsilon"] == pytest.approx(of_dp_accounting(1.5, 0.5, 4), abs=SLACK)
    assert "Poisson cohorts" in invoked("privacy", "plan", "fedavg", *common)
    nothing = invoked("privacy", "plan", "fedavg", *flags(data="digits", clients=20, rounds=2))
    assert "∞" in nothing

    run("fedavg", **SMALL, noise_multiplier=1.5, clip=0.5, delta=DELTA, out=tmp_path / "run")
    shown = invoked("privacy", "show", str(tmp_path / "run"))
    assert "update" in shown and "Gaussian" in shown and f"ε = {plan['epsilon']:.4f}" in shown
    released = json.loads(invoked("privacy", "show", str(tmp_path / "run"), "--json"))
    assert released["epsilon"] == pytest.approx(plan["epsilon"])
    assert [row["array"] for row in released["released"]] == ["update"]

    few = ["--canaries=4000"]
    held = json.loads(invoked("privacy", "audit", "fedavg", *common, *few, "--json"))
    assert held["holds"] and held["promised"] == pytest.approx(plan["epsilon"], abs=SLACK)
    caught = invoked("privacy", "audit", "fedavg", *common, *few, "--cut-noise=0.1", code=1)
    assert "the attack proves more than the ledger promises" in caught


def test_a_ledger_that_is_written_before_an_ask_is_sent_survives_a_crash(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The machine stops when an ask goes out."""
    federation = simulate(clients([3, 3, 3]), journal=checkpoint.journal(tmp_path))

    def stops(_: object) -> None:
        raise Crash

    monkeypatch.setattr(federation.runtime, "deliver", stops)
    with pytest.raises(Crash):
        federation.everyone().ask(total, into=Sum("total", clip=1.0, noise=Gaussian(2.0)))
    assert checkpoint.recall_charges(tmp_path / "elsewhere") == {}
    again = simulate(clients([3, 3, 3]), **checkpoint.recall_charges(tmp_path))
    assert again.ledger == federation.ledger and again.ledger.epsilon(DELTA) > 0
    assert again.serial > federation.serial


@pytest.mark.parametrize("name", sorted(METHODS))
def test_a_method_protects_clients_or_says_which_release_prevents_it(name: str) -> None:
    method = METHODS[name].cls
    reason = getattr(method, "not_client_private", None)
    assert bool(getattr(method, "client_private", False)) != bool(reason)
    if reason:
        with pytest.raises(UserError, match=re.escape(f"{name} has no client-level privacy: {reason}")):
            plan = plan_for([name], {"data": "digits", "clients": 20, "noise_multiplier": 1.0, "clip": 0.5})
            prepare(plan.runs[0][1])
