"""What goes wrong with real workers: killed, hanging, out of memory or disk, of another version; and a driver."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from tests.cluster.faulty import CLIENTS, Counting, everybody, runtime, trained
from tests.cluster.test_runs import ON_RAY, QUICK, states
from unalike import Federation, simulate
from unalike.api import resume, run
from unalike.core.federation import Replies
from unalike.runs import folder
from unalike.runs.folder import read_metrics
from unalike.runtime import workers as module
from unalike.runtime.ray import start_workers
from unalike.runtime.workers import WorkerError, WorkerRuntime, Workers


def ask(federation: Federation) -> Replies:
    return federation.everyone().ask(Counting().count, step=1.0)


def federation(made: WorkerRuntime) -> Federation:
    return Federation(made, 0, quorum=0.2, noise="seeded")


def test_a_worker_killed_in_a_task_is_asked_again_and_nothing_is_charged_twice(
    workers: Workers, tmp_path: Path
) -> None:
    made = runtime(workers, tmp_path)
    asked = federation(made)
    before = workers.processes()
    assert float(ask(asked)["count"]) == pytest.approx(CLIENTS)
    (tmp_path / "fault-1").write_text("killed 1")
    found = ask(asked)
    assert float(found["count"]) == pytest.approx(2 * CLIENTS) and not found.failures  # what was kept is restored
    assert trained(tmp_path) == ["1 0", "1 1", "2 0", "2 1", "2 1"]  # the second made the bytes that the first lost
    clean = simulate(everybody(), 0, quorum=0.2, noise="seeded")
    for _ in range(2):
        ask(clean)
    assert asked.ledger.state() == clean.ledger.state()
    assert made.tallies[1].restarts == 1 and workers.processes()[0] == before[0] != workers.processes()[1]
    assert float(ask(asked)["count"]) == pytest.approx(3 * CLIENTS)


def test_or_its_clients_are_failures_of_this_ask_alone(workers: Workers, tmp_path: Path) -> None:
    asked = federation(runtime(workers, tmp_path, lost="failed"))
    (tmp_path / "fault-1").write_text("killed 1")
    found = ask(asked)
    assert [failure.client for failure in found.failures] == ["1", "3", "5"]
    assert "its worker was lost in this ask" in found.failures[0].reason
    assert float(found["count"]) == pytest.approx(3)
    assert float(ask(asked)["count"]) == pytest.approx(2 * 3 + 1 * 3)  # the lost ask left nothing behind


def test_with_fresh_noise_a_lost_ask_never_runs_again(workers: Workers, tmp_path: Path) -> None:
    made = runtime(workers, tmp_path, seeded=False)
    asked = federation(made)
    (tmp_path / "fault-1").write_text("killed 1")
    found = ask(asked)
    assert {failure.reason for failure in found.failures} == {"its shard was interrupted in this ask, and charged"}
    assert trained(tmp_path) == ["1 0", "1 1"]


def test_a_worker_that_hangs_misses_its_deadline_and_comes_back(workers: Workers, tmp_path: Path) -> None:
    made = runtime(workers, tmp_path)
    asked = federation(made)
    ask(asked)  # starts all that is slow the first time
    made.deadline = 4.0
    late: list[list[int]] = []
    made.waiting = lambda who, _: late.append(who)
    (tmp_path / "fault-0").write_text("hangs 1")
    begin = time.monotonic()
    found = ask(asked)
    assert 4 <= time.monotonic() - begin < 30
    assert {failure.reason for failure in found.failures} == {"its worker did not answer within 4 s"}
    assert late[-2:] == [[0], []]  # worker 1 had answered, and then nobody was waited for
    made.deadline = None
    found = ask(asked)
    assert not found.failures and float(found["count"]) == pytest.approx(3 * 2 + 3 * 3)
    assert made.tallies[0].missed == 1


@pytest.mark.parametrize("times", [1, 3])
def test_a_worker_out_of_memory_is_started_again(times: int, workers: Workers, tmp_path: Path) -> None:
    made = runtime(workers, tmp_path)
    asked = federation(made)
    (tmp_path / "fault-1").write_text(f"memory {times}")
    found = ask(asked)
    if times == 1:
        assert not found.failures and float(found["count"]) == pytest.approx(CLIENTS)
    else:
        assert {one.reason for one in found.failures} == {"its worker ran out of memory 3 times in this ask"}
    assert made.tallies[1].restarts == times


@pytest.mark.parametrize("seeded", [True, False])
def test_a_full_disk_stops_the_run_and_says_where(seeded: bool, workers: Workers, tmp_path: Path) -> None:
    asked = federation(runtime(workers, tmp_path, seeded=seeded))
    ask(asked)
    (tmp_path / "fault-1").write_text("disk 1")
    with pytest.raises(OSError, match="at worker 1") as told:
        ask(asked)
    assert told.value.errno == errno.EFBIG and str(told.value.filename).startswith(str(tmp_path))
    asked.serial -= 1  # the server asks the same again, as a run that resumes does
    asked._calls -= 1
    found = ask(asked)  # there is space again
    assert len(found.failures) == (0 if seeded else 3)  # it was charged: with fresh noise it does not run again
    count = 2 * CLIENTS if seeded else 2 * 3
    assert float(found["count"]) == pytest.approx(count)
    workers.engine.end(1)  # and its limit with it
    workers.revive(1)


def test_a_worker_of_another_version_is_refused(workers: Workers, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "version", lambda: "0.0.1 (code 00000000)")
    with pytest.raises(WorkerError, match=r"worker 0 has Unalike .* but this process has 0\.0\.1 .* the same version"):
        workers.check()


def test_workers_that_are_not_there_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="workers=0; expected at least 1"):
        start_workers(0)


def test_a_driver_that_is_killed_goes_on_from_its_folder(shared: Workers, tmp_path: Path) -> None:
    """Its cluster dies with it. What the clients keep is in the workers' folders, and others take it up."""
    out, settings = tmp_path / "killed", {**QUICK, "rounds": 6, "checkpoint_every": 2}
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in {**settings, **ON_RAY}.items()]
    driver = subprocess.Popen([sys.executable, "-m", "unalike", "run", "local", *flags, f"--out={out}", "--quiet"])
    until = time.monotonic() + 150
    while len(read_metrics(out / folder.METRICS)) < 3:
        assert driver.poll() is None and time.monotonic() < until, "the driver ended, or took too long"
        time.sleep(0.02)
    os.kill(driver.pid, signal.SIGKILL)
    driver.wait()
    (out / folder.LOCK).unlink(missing_ok=True)
    gone_on = resume(out)
    whole = run("local", **settings, **ON_RAY, out=tmp_path / "whole")
    assert gone_on.accuracy == whole.accuracy
    assert all(torch.equal(*pair) for pair in states(out, tmp_path / "whole"))
