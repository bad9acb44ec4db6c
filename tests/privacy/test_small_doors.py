"""What is in names, who may read files, two calls at once, and the δ of samples that were cut."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import dp_accounting
import pytest
from typer.testing import CliRunner

from tests.core.helpers import clients
from tests.privacy.test_doors import SMALL
from unalike import run
from unalike.commands.main import app
from unalike.newcomers import ledger as newcomers
from unalike.privacy import Gaussian, Ledger
from unalike.privacy.sampling import Local
from unalike.runs.folder import write_table


def test_a_name_cannot_speak_to_a_terminal() -> None:
    roster = replace(clients([2, 3, 4]).roster(), names=("ward\x1b[2J\x1b]0;gone\x07", "a\nb", "Zürich 7"))
    assert [roster.name(at) for at in range(3)] == ["ward\ufffd[2J\ufffd]0;gone\ufffd", "a\ufffdb", "Zürich 7"]


def test_a_name_is_no_formula_in_a_spreadsheet(tmp_path: Path) -> None:
    rows = [{"client": name, "score": -0.5} for name in ("=cmd|' /C calc'!A0", "+1+cmd", "-1", "@sum", "\t=1", "ward")]
    write_table(tmp_path / "scores.csv", rows)
    cells = [line.split(",")[0].strip('"') for line in (tmp_path / "scores.csv").read_text().splitlines()[1:]]
    assert cells == ["'=cmd|' /C calc'!A0", "'+1+cmd", "-1", "'@sum", "'\t=1", "ward"]
    assert (tmp_path / "scores.csv").read_text().count("-0.5") == 6  # numbers stay numbers


def test_nobody_else_may_read_the_files_of_a_run(tmp_path: Path) -> None:
    before = os.umask(0o022)
    try:
        run("fedavg", out=tmp_path / "run", **SMALL)
    finally:
        os.umask(before)
    kinds = (".json", ".toml", ".csv", ".safetensors")
    written = [file for file in (tmp_path / "run").rglob("*") if file.is_file() and file.suffix in kinds]
    assert len(written) > 5
    readable = [file.name for file in written if stat.S_IMODE(file.stat().st_mode) & 0o077]
    assert not readable


WAITS = """
import sys, time
from pathlib import Path
from unalike.newcomers import ledger
from unalike.privacy import Gaussian, Ledger
from unalike.privacy.sampling import Local
read = ledger.read_ledger
def slowly(file):
    found = read(file)
    time.sleep(0.5)
    return found
ledger.read_ledger = slowly
one = Ledger()
one.record(Gaussian(2.0).event(), unit="point", sampling=Local(), newcomers=["row"])
ledger.add(Path(sys.argv[1]), one, ["row"], 1e-3)
"""


def test_two_calls_at_once_are_both_in_a_newcomers_ledger(tmp_path: Path) -> None:
    file = tmp_path / "mine.ledger.json"
    calls = [subprocess.Popen([sys.executable, "-c", WAITS, str(file)]) for _ in range(2)]
    assert [call.wait(timeout=120) for call in calls] == [0, 0]
    found, _ = newcomers.read_ledger(file)
    both = dp_accounting.get_epsilon_gaussian(2.0 / 2**0.5, 1e-3)
    assert found.epsilon(1e-3, newcomer="row") == pytest.approx(both, rel=1e-3)


def test_samples_that_were_cut_are_in_delta() -> None:
    """Every Poisson sample is cut with a probability of up to 2e-12: of δ = 4e-9 a thousand of them leave half."""

    def spent(rounds: int, delta: float) -> float:
        ledger = Ledger()
        sampled = dp_accounting.PoissonSampledDpEvent(0.1, Gaussian(8.0).event())
        event = dp_accounting.SelfComposedDpEvent(sampled, rounds)
        ledger.record(event, sampling=Local(), clients=["a"], unit="point")
        return ledger.epsilon(delta, client="a")

    sampled = dp_accounting.PoissonSampledDpEvent(0.1, Gaussian(8.0).event())
    exact = dp_accounting.pld.PLDAccountant().compose(sampled, 1000).get_epsilon(2e-9)
    assert spent(1000, 4e-9) == pytest.approx(exact, rel=1e-3)
    assert spent(1000, 1.9e-9) == float("inf")


def test_points_of_clients_that_become_server_points_are_said_to_be_public() -> None:
    told = " ".join(CliRunner().invoke(app, ["kmeans", "--help"], env={"COLUMNS": "200"}).output.split())
    assert "they count as public, and no noise protects them" in told
