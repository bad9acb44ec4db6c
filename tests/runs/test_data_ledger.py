"""The ledger beside a data file: what all runs on it have cost together, through kills and at once, and its total."""

from __future__ import annotations

import json
import os
import shutil
import signal
import threading
import time
from pathlib import Path
from typing import Any

import dp_accounting
import numpy as np
import pandas as pd
import pytest
from dp_accounting.pld import PLDAccountant
from typer.testing import CliRunner

from tests.child import in_child
from tests.runs.helpers import At, Crash, crash
from unalike.api import UserError, resume, run
from unalike.commands.main import app
from unalike.privacy import BudgetExceeded, Gaussian, Ledger
from unalike.runs import data_ledger
from unalike.runs.recipe.settings import plan_for
from unalike.runs.run import run_plan
from unalike.runs.watcher import Watcher

SETTINGS: dict[str, Any] = {
    "client_column": "who", "label_column": "y", "unseen": 0, "model": "logistic", "rounds": 2, "cohort": 0.5,
    "clip": 0.5, "delta": 1e-3, "normalize": False, "block": 8, "threads": 1,
}  # fmt: skip


@pytest.fixture
def shops(tmp_path: Path) -> Path:
    random = np.random.default_rng(0)
    frame = pd.DataFrame(random.standard_normal((160, 2)), columns=["a", "b"])
    frame = frame.assign(y=(frame["a"] > 0).astype(int), who=np.repeat(np.arange(40), 4))
    frame.to_csv(tmp_path / "shops.csv", index=False)
    return tmp_path / "shops.csv"


def content(shops: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((shops.parent / "shops.runs.ledger.json").read_text())
    return found


def by_hand(*noises: float, rounds: int = 2, delta: float = 1e-3) -> float:
    accountant = PLDAccountant()
    for z in noises:
        accountant.compose(dp_accounting.PoissonSampledDpEvent(0.5, dp_accounting.GaussianDpEvent(z)), rounds)
    return float(accountant.get_epsilon(delta))


class Notes(Watcher):
    def __init__(self) -> None:
        self.all: list[str] = []

    def note(self, text: str) -> None:
        self.all.append(str(text))


def train(shops: Path, method: str = "fedavg", **settings: Any) -> Any:
    out, watcher = settings.pop("out", None), settings.pop("watcher", None)
    plan = plan_for([method], {"data": str(shops), **SETTINGS, **settings}, ["data.options.classes=2"])
    return run_plan(plan, out, watcher=watcher)


def test_runs_and_seeds_add_up(shops: Path, tmp_path: Path) -> None:
    notes = Notes()
    train(shops, noise_multiplier=2.0, watcher=notes)
    assert not any("together" in note for note in notes.all)  # there was no other
    train(shops, noise_multiplier=3.0, seeds=2, out=tmp_path / "seeds", watcher=notes)
    train(shops, noise_multiplier=2.0, simulate_noise=True)  # protects nobody, and is no release
    assert len(content(shops)["runs"]) == 3
    (total,) = data_ledger.read(shops.parent / "shops.runs.ledger.json").together()
    assert total.epsilon(1e-3) == pytest.approx(by_hand(2.0, 3.0, 3.0), rel=1e-3)
    assert any(note.startswith(f"3 runs together have cost ε = {total.epsilon(1e-3):.4g}") for note in notes.all)
    train(shops, noise_multiplier=2.0, unit="point", batch=2, clip=1.0)
    told = CliRunner().invoke(app, ["privacy", "total", str(shops)])
    assert told.exit_code == 0 and "for one client" in told.output and "1 run has cost" in told.output


def test_a_total_refuses_for_ever(shops: Path) -> None:
    train(shops, epsilon=2.0, total_epsilon=2.5)
    with pytest.raises(UserError, match=r"allows ε = 2.5 for all runs .* 2 is spent"):
        train(shops, epsilon=2.0)
    with pytest.raises(UserError, match=r"says 2.5, for ever"):
        train(shops, epsilon=0.1, total_epsilon=9.0)
    for unprotected in ({}, {"epsilon": 1.0, "simulate_noise": True}):
        with pytest.raises(UserError, match="protects nobody"):
            train(shops, **{**unprotected, "clip": 0.5})
    before = content(shops)
    with pytest.raises(BudgetExceeded, match=r"the budget of the data is ε = 2\.5"):
        train(shops, noise_multiplier=2.0, rounds=50)  # no ε is named: it stops before the ask that would be too much
    assert content(shops)["runs"][0] == before["runs"][0]
    totals = data_ledger.read(shops.parent / "shops.runs.ledger.json").together()
    assert 2.0 < totals[0].epsilon(1e-3) <= 2.5
    with pytest.raises(UserError, match="is none"):
        run("fedavg", data="digits", partition="iid", clients=40, epsilon=2.0, delta=1e-3, total_epsilon=9.0)


def test_a_killed_run_stays_charged_and_goes_on_in_its_entry(shops: Path, tmp_path: Path) -> None:
    def die() -> None:
        train(shops, noise_multiplier=2.0, rounds=5, checkpoint_every=2, out=tmp_path / "run", watcher=At(3, kill))

    def kill() -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    assert in_child(first=die).code == -signal.SIGKILL
    (entry,) = content(shops)["runs"]
    resume(tmp_path / "run")
    (after,) = content(shops)["runs"]
    # round 3 was sent, and the checkpoint, of round 2, does not hold it: it is asked and charged once more
    for one, rounds in ((entry, 3), (after, 3 + 5 - 2)):
        assert Ledger.from_state(one["ledger"]).epsilon(1e-3) == pytest.approx(by_hand(2.0, rounds=rounds), rel=1e-3)


def test_a_copy_of_a_run_that_goes_on_is_charged_besides(shops: Path, tmp_path: Path) -> None:
    """Both release something fresh about the same people; once they shared an entry, and the last one was told."""
    first, copy = tmp_path / "first", tmp_path / "copy"
    with pytest.raises(Crash):
        train(shops, noise_multiplier=2.0, rounds=4, checkpoint_every=2, out=first, watcher=At(2, crash))
    shutil.copytree(first, copy)
    resume(first)
    assert len(content(shops)["runs"]) == 1
    resume(copy)
    costs = [Ledger.from_state(one["ledger"]).epsilon(1e-3) for one in content(shops)["runs"]]
    assert len(costs) == 2 and costs == pytest.approx([by_hand(2.0, rounds=4)] * 2, rel=1e-3)


def test_of_two_changes_at_once_none_is_lost(tmp_path: Path) -> None:
    def enter(number: int) -> None:
        spent = Ledger()
        spent.record(Gaussian(2.0).event())
        with data_ledger._changing(tmp_path / "x.runs.ledger.json") as found:
            time.sleep(0.05)
            one = data_ledger.Entry(run=str(number), began="", method="m", delta=1e-3, ledger=spent.state())
            found.runs = [*found.runs, one]

    threads = [threading.Thread(target=enter, args=(number,)) for number in range(8)]
    for one in threads:
        one.start()
    for one in threads:
        one.join()
    assert len(data_ledger.read(tmp_path / "x.runs.ledger.json").runs) == 8


def test_what_cannot_be_written_or_read_is_said(shops: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(file: Path) -> None:
        raise PermissionError(13, "Permission denied", str(file))

    notes = Notes()
    with monkeypatch.context() as patched:
        patched.setattr("unalike.runs.data_ledger.check_writable", refuse)
        train(shops, epsilon=2.0, watcher=notes)
        assert any("nobody adds up what all runs on this data cost" in note for note in notes.all)
        with pytest.raises(UserError, match="make it writable"):
            train(shops, epsilon=2.0, total_epsilon=3.0)
    (shops.parent / "shops.runs.ledger.json").write_text('{"about": "something else", "runs": []}')
    with pytest.raises(UserError, match="is damaged"):
        train(shops, epsilon=2.0)
