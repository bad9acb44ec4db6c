"""A million clients: resident memory beside the data's own, and a round beside that of a hundredth of them.

Runs in a process of its own (``python -m benchmarks.scale``), so that the memory is its alone.
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

from benchmarks.report import Ratio, Row
from benchmarks.rounds import Rounds, alternate, data, quotients
from benchmarks.workloads import Shared

SAMPLES = 10
WORK = Shared("scale", "mlp", (64,), cohort=1000, batch=10, samples=SAMPLES)


def peak_mb() -> float:
    """The most memory that was ever resident, in MB."""
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) / 1e3 for line in lines if line.startswith("VmHWM"))
    except (OSError, StopIteration):  # no Linux; a child's figure may then include its parent's at the start
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak / 1e6 if sys.platform == "darwin" else peak / 1e3


def build_and_train(clients: int, few: int, rounds: int) -> dict[str, Any]:
    """The large population first; its memory is read before the small one is built."""
    import_mb = peak_mb()
    many = data(WORK, torch.full((clients,), SAMPLES))
    assert many.y is not None
    data_mb = (many.x.nbytes + many.y.nbytes) / 1e6
    large = Rounds(WORK, many, min(WORK.cohort, clients))
    large(rounds)
    after_mb = peak_mb()
    small = Rounds(WORK, data(WORK, torch.full((few,), SAMPLES)), min(WORK.cohort, few))
    taken = alternate(rounds, large, small)
    return {
        "clients": clients,
        "few": few,
        "data_mb": data_mb,
        "peak_mb": after_mb,
        "import_mb": import_mb,
        "large": taken[0],
        "small": taken[1],
    }


def measure(clients: int, few: int, rounds: int) -> tuple[list[Row], dict[str, Any]]:
    command = [sys.executable, "-m", "benchmarks.scale", str(clients), str(few), str(rounds)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).resolve().parent.parent)
    if done.returncode:
        raise RuntimeError(f"the measurement of {clients} clients failed:\n{done.stderr}")
    raw: dict[str, Any] = json.loads(done.stdout)
    name = f"{clients:,} clients x {SAMPLES} samples"
    beyond = (raw["peak_mb"] - 400) / raw["data_mb"]
    time_ratio = quotients(raw["large"], raw["small"])
    return [
        Row(name, "(peak memory - 400 MB) / data", Ratio.of([beyond]), target=("≤", 1.3)),
        Row(name, f"round / round with {few:,} clients", time_ratio, target=("≤", 1.15)),
        Row(name, "seconds of a round of 1,000 clients", Ratio.of(raw["large"]), "s"),
    ], raw


if __name__ == "__main__":
    print(json.dumps(build_and_train(*map(int, sys.argv[1:4]))))
