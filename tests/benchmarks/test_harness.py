"""The harness works: it measures what it says, and says what it leaves out. No test looks at how long anything took."""

import json
import socket
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from benchmarks import __main__ as program
from benchmarks import own, peers, plans, scale, secure_sum
from benchmarks.compare import compare
from benchmarks.peers import BARE, UNALIKE, Running, Tool, Unavailable
from benchmarks.report import Ratio, Row, machine, table
from benchmarks.rounds import Rounds, alternate, data, quotients
from benchmarks.workloads import MLP

TINY = replace(MLP, clients=20, samples=7, cohort=4, batch=3)


def test_a_ratio_is_the_median_of_the_repetitions_with_its_spread() -> None:
    assert Ratio.of([3.0, 1.0, 2.0]) == Ratio(2.0, 1.0, 3.0)
    assert quotients([2.0, 9.0], [1.0, 3.0]) == Ratio(2.5, 2.0, 3.0)
    with pytest.raises(ValueError, match="no repetition"):
        Ratio.of([])


@pytest.mark.parametrize(
    ("target", "met"), [(("≥", 2.0), True), (("≥", 2.1), False), (("≤", 1.9), False), (None, None)]
)
def test_a_row_says_whether_its_target_is_met(target: tuple[str, float] | None, met: bool | None) -> None:
    row = Row("work", "what", Ratio(2.0, 1.0, 3.0), target=target)
    assert row.met is met
    assert row.as_json()["met"] is met
    assert ("MISSED" in table([row])) == (met is False)


def test_the_machine_is_described_without_its_name() -> None:
    text = json.dumps(machine())
    assert torch.__version__ in text and "cores" in text
    assert socket.gethostname() not in text


@pytest.mark.long
def test_tools_take_turns_on_the_same_work_and_one_that_cannot_run_is_left_out_and_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refused() -> list[str]:
        raise Unavailable("no namespace here")

    monkeypatch.setattr(peers, "isolation", refused)
    monkeypatch.setattr("benchmarks.compare.WARM", 2)
    monkeypatch.setattr("benchmarks.compare.TURN", 0.01)
    said: list[str] = []
    tools = (BARE, replace(BARE, name="isolated", loopback_only=True))
    rows, raw = compare(TINY, tools, 2, {BARE.name: ("≥", 0.0)}, said.append)
    assert raw["client_steps"] == 4 * 3  # 7 samples in batches of 3: three steps a client
    assert {name: len(seconds) for name, seconds in raw["seconds_per_round"].items()} == {UNALIKE.name: 2, BARE.name: 2}
    assert [row.what for row in rows] == ["Unalike", "bare PyTorch loop / Unalike"]
    assert rows[1].met
    assert raw["left_out"] == {"isolated": "no namespace here"}
    assert any("isolated is left out: no namespace here" in line for line in said)


def test_a_program_that_dies_says_why(tmp_path: Path) -> None:
    with pytest.raises(Unavailable, match=r"broken stopped: .*workload\.json"):
        Running(Tool("broken", "run_bare.py"), tmp_path)


def test_isolation_needs_its_tools(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers.shutil, "which", lambda name: None)
    with pytest.raises(Unavailable, match="nothing but loopback"):
        peers.isolation()


def test_a_secure_sum_is_measured_although_clients_drop_out(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"CLIENTS": 12, "LENGTH": 50, "LOST": 2}.items():
        monkeypatch.setattr(secure_sum, name, value)
    assert secure_sum.run()["largest_error"] < 0.01


def test_unequal_clients_have_as_many_samples_as_equal_ones() -> None:
    sizes = own.unequal_sizes(100, 50)
    assert int(sizes.sum()) == 5000 and int(sizes.min()) >= 2
    assert int(sizes.max()) > 50 * int(sizes.min())


def test_the_kernel_does_the_steps_of_a_round() -> None:
    rounds = Rounds(TINY, data(TINY, torch.full((TINY.clients,), TINY.samples)), TINY.cohort)
    number = rounds.federation.round
    seconds = alternate(1, rounds, own.kernel(TINY, rounds))
    assert [len(taken) for taken in seconds] == [1, 1]
    assert rounds.federation.round == number + 2  # one turn to warm up, one that counts


@pytest.mark.long
def test_plans_are_found_beside_a_busy_program_that_ends_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[subprocess.Popen[bytes]] = []

    class Noted(subprocess.Popen[bytes]):
        def __init__(self, command: list[str]) -> None:
            super().__init__(command)
            started.append(self)

    monkeypatch.setattr(plans.subprocess, "Popen", Noted)
    monkeypatch.setattr(plans, "MLP", replace(TINY, cohort=20))
    monkeypatch.setattr(plans, "LENET", replace(TINY, name="other", cohort=18))
    rows, raw = plans.measure(2, quick=False)
    assert started and all(program.returncode is not None for program in started)
    assert len(rows) == len(raw) == 3 and all(row.target == ("≥", 0.85) for row in rows)
    assert [len(raw["other"]["plans"][where]) for where in ("beside", "alone")] == [1, 1]


def test_a_population_is_trained_and_its_memory_read() -> None:
    raw = scale.build_and_train(50, 20, 2)
    assert raw["peak_mb"] >= raw["import_mb"] > 10
    assert raw["data_mb"] == pytest.approx(50 * 10 * (64 * 4 + 8) / 1e6)
    assert len(raw["large"]) == len(raw["small"]) == 2


def test_the_program_prints_a_table_and_keeps_a_json(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    row = Row("work", "what", Ratio(2.0, 1.0, 3.0), target=("≥", 3.0))
    monkeypatch.setitem(program.PARTS, "mdm", lambda repetitions, quick: ([row], {"left_out": {"x": "why"}}))
    assert program.main(["--quick", "--only", "mdm", "--save", str(tmp_path / "kept.json")]) == 0
    printed = capsys.readouterr().out
    assert "MISSED" in printed and "x was left out: why" in printed and "1 of 1 targets missed" in printed
    kept = json.loads((tmp_path / "kept.json").read_text())
    assert kept["rows"][0]["median"] == 2.0 and kept["quick"] is True and "machine" in kept
