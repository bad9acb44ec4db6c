"""A run that was trained on simulated clients is scored on real ones, as by hand."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from unalike.commands.main import app
from unalike.data import load
from unalike.newcomers.predict import score_elsewhere
from unalike.runs.finished import FinishedRun


def told(*words: str) -> str:
    result = CliRunner().invoke(app, list(words))
    assert result.exit_code == 0, result.output
    return result.stdout


def test_trained_on_simulated_clients_and_scored_on_real_ones(tmp_path: Path) -> None:
    mixture, run = tmp_path / "mixture.json", tmp_path / "run"
    real = ("--partition", "dirichlet:0.3", "--clients", "20")
    told("mdm", "--data", "digits", *real, "--components", "1", "--rounds", "5", "--out", str(mixture), "--json")
    simulated = ("--partition", f"mdm:{mixture}", "--clients", "12", "--rounds", "2", "--cohort", "6")
    told("run", "fedavg", "--data", "digits", *simulated, "--out", str(run), "--json", "--quiet")
    found = json.loads(told("score", str(run), "--data", "digits", *real, "--json"))
    finished = FinishedRun.open(run)
    population = load("digits", partition="dirichlet:0.3", clients=20, schema=finished.schema, seed=0)
    theta, model = finished.state["theta"], finished.method.model
    scores = []
    for client in range(len(population)):
        x, y = population.test.rows(client)
        assert y is not None
        shift, scale = finished.schema.shift, finished.schema.scale
        x = x.float() if shift is None or scale is None else (x.float() - shift) * scale
        scores.append(float((model(theta, x).argmax(1) == y).float().mean()))
    assert found["scores"]["labeled"]["clients"] == 20
    assert found["scores"]["labeled"]["mean"] == pytest.approx(float(torch.tensor(scores).mean()), abs=1e-5)
    assert found["scores"]["unlabeled"] == pytest.approx(found["scores"]["labeled"])  # one model for all
    assert found["partition"].startswith("mdm:")


def test_rows_of_another_kind_are_refused(tmp_path: Path) -> None:
    run = tmp_path / "run"
    told("run", "fedavg", "--data", "digits", "--clients", "6", "--rounds", "1", "--out", str(run), "--json", "--quiet")
    result = CliRunner().invoke(app, ["score", str(run), "--data", "gaussian-mixture:clients=3,points=9,dim=4"])
    assert result.exit_code == 1 and "does not fit the schema" in result.output
    with pytest.raises(Exception, match="no run"):
        score_elsewhere(tmp_path / "nothing", "digits")
