"""A large CSV: the memory of reading it into clients and of training on it, beside its cells as float32.

Each file is read in a process of its own (``python -m benchmarks.tables FILE``), so that the memory is its alone.
Memory is what cannot be given back: pages of temporary files that are mapped do not count, as the system drops them
when somebody else needs the room.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

import unalike
from benchmarks.report import Ratio, Row
from unalike.data import load

COLUMNS, CLIENTS, BLOCK = 30, 1000, 100_000
LIMIT_MB = 1000


def write_table(path: Path, rows: int) -> None:
    """Numbers of three digits, a label, and whose a row is; the rows of a client are spread over the file."""
    random = np.random.default_rng(0)
    cells = random.normal(size=(BLOCK, COLUMNS)).round(3)
    label = np.where(cells[:, 0] + cells[:, 1] > 0, "yes", "no")
    lines = [",".join([word, *map(str, row)]) for word, row in zip(label, cells.tolist(), strict=True)]
    with path.open("w") as file:
        file.write(",".join(["client", "y", *(f"x{number}" for number in range(COLUMNS))]) + "\n")
        for first in range(0, rows, BLOCK):
            owner = random.integers(CLIENTS, size=min(BLOCK, rows - first)).tolist()
            file.write("".join(f"c{one:04d},{line}\n" for one, line in zip(owner, lines, strict=False)))


class Memory(threading.Thread):
    """Watches what this process holds that cannot be given back, in MB."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.peak = 0.0

    def run(self) -> None:
        while True:
            lines = Path("/proc/self/status").read_text().splitlines()
            found = sum(int(line.split()[1]) for line in lines if line.startswith(("RssAnon", "VmSwap")))
            self.peak = max(self.peak, found / 1e3)
            time.sleep(0.02)


def read_and_train(file: str) -> dict[str, float]:
    memory = Memory()
    memory.start()
    unalike.run("fedavg", "digits", rounds=1)  # what a run loads anyway
    before, begin = memory.peak, time.perf_counter()
    population = load(file)
    read, seconds = memory.peak, time.perf_counter() - begin
    unalike.run("fedavg", population, rounds=2, hyperparameters={"cohort": 10})
    return {"import_mb": before, "read_mb": read, "peak_mb": memory.peak, "seconds": seconds}


def measure(counts: Sequence[int]) -> tuple[list[Row], dict[str, Any]]:
    rows, raw = list[Row](), dict[str, Any]()
    for count in counts:
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "table.csv"
            write_table(file, count)
            command = [sys.executable, "-m", "benchmarks.tables", str(file)]
            done = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).resolve().parent.parent)
            if done.returncode:
                raise RuntimeError(f"reading {count} rows failed:\n{done.stderr}")
            one = json.loads(done.stdout.splitlines()[-1]) | {"csv_mb": file.stat().st_size / 1e6}
        name = f"CSV, {count:,} rows x {COLUMNS}"
        rows += [
            Row(name, "MB of its cells as float32", Ratio.of([count * COLUMNS * 4 / 1e6]), "MB"),
            Row(name, "MB of reading, beside an import", Ratio.of([one["read_mb"] - one["import_mb"]]), "MB"),
            Row(name, "peak memory of a run", Ratio.of([one["peak_mb"]]), "MB", target=("≤", LIMIT_MB)),
            Row(name, "microseconds a row", Ratio.of([1e6 * one["seconds"] / count]), "µs"),
        ]
        raw[name] = one
    return rows, raw


if __name__ == "__main__":
    print(json.dumps(read_and_train(sys.argv[1])))
