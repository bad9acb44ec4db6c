"""Plans that were found beside a busy program, against plans that were found alone."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from benchmarks.report import Row
from benchmarks.rounds import Rounds, alternate, data, quotients
from benchmarks.workloads import LENET, MLP
from unalike.runtime.shard.recording import AFTER

SPIN = "import os; parent = os.getppid()\nwhile os.getppid() == parent: pass"  # it does not outlive the benchmark


@contextlib.contextmanager
def busy() -> Iterator[None]:
    """Every core has another program that never sleeps."""
    spinning = [subprocess.Popen([sys.executable, "-c", SPIN]) for _ in range(os.cpu_count() or 1)]
    try:
        yield
    finally:
        for program in spinning:
            program.kill()
            program.wait()


@contextlib.contextmanager
def nothing_remembered() -> Iterator[None]:
    """Plans are measured anew, and are not remembered for other runs."""
    before = os.environ.get("UNALIKE_CACHE")
    with tempfile.TemporaryDirectory(prefix="unalike-bench-") as folder:
        os.environ["UNALIKE_CACHE"] = folder
        try:
            yield
        finally:
            os.environ.pop("UNALIKE_CACHE")
            if before is not None:
                os.environ["UNALIKE_CACHE"] = before


def measure(repetitions: int, quick: bool) -> tuple[list[Row], dict[str, Any]]:
    """Both plans run alone and take turns, after so many rounds that their tasks are played back."""
    rows, raw = [], {}
    for full in (MLP, LENET, replace(LENET, name="LeNet 28x28, batches of 20", batch=20)):
        shared = full.quick() if quick else full
        clients = data(shared, torch.full((shared.clients,), shared.samples))
        with nothing_remembered(), busy():
            beside = Rounds(shared, clients, shared.cohort)
        with nothing_remembered():
            alone = Rounds(shared, clients, shared.cohort)
        for rounds in (beside, alone):
            rounds(2 if quick else AFTER)
        times = 1 if full.network == "lenet" else 10
        taken = alternate(repetitions, partial(beside, times), partial(alone, times))
        what = "speed with a plan found beside a busy program / found alone"
        rows.append(Row(full.name, what, quotients(taken[1], taken[0]), target=("≥", 0.85)))
        plans = {"beside": list(beside.simulator.plans().values()), "alone": list(alone.simulator.plans().values())}
        raw[full.name] = {"beside": taken[0], "alone": taken[1], "plans": plans}
    return rows, raw
