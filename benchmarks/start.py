"""Quick to start: how long ``unalike --help`` and ``import unalike`` take beside ``import torch``, in turns.

Every measurement is a fresh process, from its start to its end.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.report import Ratio, Row
from benchmarks.rounds import quotients

ROOT = Path(__file__).resolve().parent.parent
TORCH = "import torch"
COMMANDS = {
    "--version": 0,
    "--help": 0,
    "run --help": 0,
    "run fedavg --roundz 3": 2,
}
"""Words after ``unalike`` that must be answered without PyTorch, and the exit code."""
LIMIT = 0.4  # of the time that ``import torch`` takes
NAMES = "import unalike; unalike.Federation; unalike.LocalSGD; unalike.Mean; unalike.task"
HEAVY = ("torch", "dp_accounting", "pandas", "scipy", "sklearn", "altair", "vl_convert")
"""Packages that take long to import."""
TELL = f"import json, sys; print(json.dumps([name for name in {HEAVY!r} if name in sys.modules]))"


def python(*words: str, code: int = 0) -> str:
    """What a fresh Python prints."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, *words], capture_output=True, text=True, cwd=ROOT, env=environment)
    if done.returncode != code:
        raise RuntimeError(f"python {' '.join(words)} ended with {done.returncode}, expected {code}:\n{done.stderr}")
    return done.stdout


def loaded_by(program: str) -> list[str]:
    """Which of the heavy packages a program has imported when it ends."""
    names: list[str] = json.loads(python("-c", f"{program}\n{TELL}").splitlines()[-1])
    return names


def loaded_by_command(words: str) -> list[str]:
    """Which of the heavy packages ``unalike WORDS`` has imported when it ends."""
    call = f"import sys; sys.argv[1:] = {words.split()!r}\nfrom unalike.commands.main import main"
    return loaded_by(f"{call}\ntry:\n    main()\nexcept SystemExit:\n    pass")


def seconds(*words: str, code: int = 0) -> float:
    begin = time.perf_counter()
    python(*words, code=code)
    return time.perf_counter() - begin


def start(repetitions: int, quick: bool) -> tuple[list[Row], dict[str, Any]]:
    """The ratios, each taken within one turn."""
    programs: dict[str, tuple[list[str], int]] = {TORCH: (["-c", TORCH], 0)}
    programs |= {f"unalike {words}": (["-m", "unalike", *words.split()], code) for words, code in COMMANDS.items()}
    programs |= {"import unalike": (["-c", "import unalike"], 0), "names of unalike": (["-c", NAMES], 0)}
    for words, code in programs.values():
        python(*words, code=code)  # compiles what has changed, and fills the disk's cache
    taken: dict[str, list[float]] = {name: [] for name in programs}
    for _ in range(repetitions):
        for name, (words, code) in programs.items():
            taken[name].append(seconds(*words, code=code))
    rows = [Row("start", f"seconds of {TORCH}", Ratio.of(taken[TORCH]), "s")]
    for name in programs:
        if name != TORCH:
            target = ("≤", LIMIT) if name.startswith("unalike ") else None
            rows.append(Row("start", f"{name} / {TORCH}", quotients(taken[name], taken[TORCH]), target=target))
    loaded = {
        **{f"unalike {words}": loaded_by_command(words) for words in COMMANDS},
        "import unalike": loaded_by("import unalike"),
        "names of unalike": loaded_by(NAMES),
    }
    without = Ratio.of([float(sum("dp_accounting" in names for names in loaded.values()))])
    rows.append(Row("start", f"of these {len(loaded)} programs, load dp_accounting", without, "", target=("≤", 0)))
    return rows, {"seconds": taken, "loaded": loaded, "names of unalike": NAMES}
