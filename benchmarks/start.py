"""Quick to start: ``unalike --help``, ``import unalike`` and a first round beside ``import torch``, in turns.

Every measurement is a fresh process, from its start to its end.
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import tempfile
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
HEAVY = ("torch", "torch._dynamo", "dp_accounting", "pandas", "scipy", "sklearn", "altair", "vl_convert")
"""Packages that take long to import."""
FIRST_ROUND = """import sys
from unalike.methods.fedavg import FedAvg
play = FedAvg.round
def once(self, state, federation):
    play(self, state, federation)
    sys.exit()
FedAvg.round = once
from unalike.commands.main import main
main()
"""
"""The command ``run``, up to the end of its first round."""
RUN = ["run", "fedavg", "--rounds", "1", "--quiet", "--out"]
FIRST_ROUND_LIMIT, RUN_LIMIT = 1.5, 2.5  # of the CPU time that ``import torch`` takes
TELL = f"import json, sys; print(json.dumps([name for name in {HEAVY!r} if name in sys.modules]))"


def python(*words: str, code: int = 0) -> str:
    """What a fresh Python prints."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONDONTWRITEBYTECODE": ""}  # as an installed package
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


def loaded_by_first_round() -> list[str]:
    """Which of the heavy packages are there when the first round of ``unalike run fedavg`` on digits ends."""
    with tempfile.TemporaryDirectory() as folder:
        words = [*RUN, str(Path(folder) / "run")]
        told = FIRST_ROUND.replace("    sys.exit()", f"    {TELL.replace('; ', chr(10) + '    ')}\n    sys.exit()")
        names: list[str] = json.loads(python("-c", told, *words).splitlines()[-1])
    return names


def cpu_seconds(*words: str) -> float:
    """Of a fresh process and its threads."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    python(*words)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def first_round(repetitions: int) -> list[Row]:
    """CPU time to the end of a first FedAvg round on digits, and of all of ``--rounds 1`` with its report."""
    taken: dict[str, list[float]] = {"torch": [], "round": [], "run": []}
    for turn in range(repetitions + 1):
        if turn == 1:  # the first compiles what has changed
            taken = {name: [] for name in taken}
        with tempfile.TemporaryDirectory() as folder:
            taken["torch"].append(cpu_seconds("-c", TORCH))
            taken["round"].append(cpu_seconds("-c", FIRST_ROUND, *RUN, f"{folder}/round"))
            taken["run"].append(cpu_seconds("-m", "unalike", *RUN, f"{folder}/run"))
    limits = {"round": ("to the end of a first round", FIRST_ROUND_LIMIT), "run": ("all of --rounds 1", RUN_LIMIT)}
    return [
        Row("start", f"CPU, {about} / {TORCH}", quotients(taken[name], taken["torch"]), target=("≤", limit))
        for name, (about, limit) in limits.items()
    ]


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
    return rows + first_round(repetitions), {"seconds": taken, "loaded": loaded, "names of unalike": NAMES}
