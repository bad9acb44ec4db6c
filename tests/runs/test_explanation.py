"""What a run promises in sentences, and what several seeds of it cost together."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import dp_accounting
import pytest
from typer.testing import CliRunner

from tests.privacy.test_doors import SMALL
from unalike import compare, run
from unalike.commands.main import app
from unalike.runs.folder import LEDGER


def explained(folder: Path) -> dict[str, list[str]]:
    told = CliRunner().invoke(app, ["privacy", "explain", str(folder), "--json"])
    assert told.exit_code == 0, told.output
    return dict(json.loads(told.stdout))


def told_of(folder: Path, **settings: Any) -> dict[str, str]:
    run("fedavg", out=folder, **{**SMALL, **settings})
    return {heading: " ".join(sentences) for heading, sentences in explained(folder).items()}


def test_a_client_is_protected_from_readers_and_not_from_a_trusted_server(tmp_path: Path) -> None:
    found = told_of(tmp_path / "run")
    assert "one client with all its rows took part: ε = " in found["Protected"]
    assert "Against the server it is ε = ∞" in found["Protected"]
    assert "The server is trusted: it adds the noise" in found["Assumed"]
    assert "names and declared sizes" in found["Not protected"] and "simulation/" in found["Not protected"]
    assert "masks" not in found["Protected"] and "simulated" not in found["Assumed"]
    plain = CliRunner().invoke(app, ["privacy", "explain", str(tmp_path / "run")])
    assert plain.output.splitlines()[0] == "Protected" and "Not protected" in plain.output.splitlines()


def test_with_trust_in_nobody_masks_and_the_servers_own_epsilon_are_named(tmp_path: Path) -> None:
    more = {"cohort": 1.0, "trust": "nobody", "hyperparameters": {"secure": True}, "block": None}
    found = told_of(tmp_path / "run", **more)
    assert "Against the server, which knows who was drawn in each round, it is ε = " in found["Protected"]
    assert "Sums under masks hide a client's own array from the server" in found["Protected"]
    assert "fewer than half of a client's peers" in found["Assumed"] and "trusted" not in found["Assumed"]


def test_a_run_without_noise_protects_nobody_and_says_what_left(tmp_path: Path) -> None:
    found = told_of(tmp_path / "run", noise_multiplier=None, clip=None, delta=None)
    assert "ε = ∞, because update and loss left the clients without noise" in found["Protected"]
    assert found["Assumed"] == ""


def test_simulated_noise_is_said_to_protect_nobody(tmp_path: Path) -> None:
    found = told_of(tmp_path / "run", simulate_noise=True)
    assert "simulated" in found["Protected"] and "protects nobody" in found["Assumed"]


def test_points_are_told_apart_from_clients(tmp_path: Path) -> None:
    more = {"unit": "point", "noise_multiplier": 1.0, "clip": 1.0, "delta": 1e-4}
    found = told_of(tmp_path / "run", **more)
    assert "one row of one client took part" in found["Protected"]
    assert "That a client took part, and what many of its rows have in common" in found["Not protected"]


@pytest.mark.parametrize("in_a_folder", [True, False])
def test_seeds_are_runs_on_the_same_data_and_their_cost_adds_up(in_a_folder: bool, tmp_path: Path) -> None:
    out = tmp_path / "runs" if in_a_folder else None
    made = compare("fedavg", seeds=3, out=out, **SMALL)
    text = " ".join(str(made).split())
    one = made.results[0].privacy.epsilon
    assert one is not None
    if not in_a_folder:  # no ledger: ε and δ are added
        assert f"together they cost at most ε = {3 * one:.3g} at δ = 0.003" in text
        return
    assert out is not None and len(list(out.glob(f"*/{LEDGER}"))) == 3
    sampled = dp_accounting.PoissonSampledDpEvent(0.5, dp_accounting.GaussianDpEvent(1.5))
    expected = dp_accounting.pld.PLDAccountant().compose(sampled, 3 * 2).get_epsilon(1e-3)
    assert one < expected
    assert f"fedavg: its 3 seeds are as many runs on the same data; together they cost ε = {expected:.3g}" in text
