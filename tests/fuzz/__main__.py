"""Fuzz what reads bytes of strangers: ``python -m tests.fuzz [TARGET ...] --seconds 60``; ``make fuzz`` does it all.

An input that breaks something is written to ``crash-...`` in the working directory; put it into ``tests/fuzz/corpus``
under the name of its target, where every run of the tests tries it again.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
from pathlib import Path

CORPUS = Path(__file__).parent / "corpus"


def fuzz(name: str, seconds: int) -> None:
    """In this process, until the time is over or an input breaks something."""
    import atheris

    with atheris.instrument_imports(include=["unalike"], enable_loader_override=False):
        from tests.fuzz.targets import TARGETS
    target = TARGETS[name]
    with tempfile.TemporaryDirectory() as folder:
        for number, seed in enumerate(target.seeds()):
            (Path(folder) / str(number)).write_bytes(seed)
        limits = [f"-max_total_time={seconds}", "-timeout=20", "-rss_limit_mb=4096", "-max_len=65536", "-verbosity=0"]
        known = [str(CORPUS / name)] if (CORPUS / name).is_dir() else []
        atheris.Setup(
            [name, *limits, "-print_final_stats=1", f"-artifact_prefix=crash-{name}-", folder, *known], target.__call__
        )
        atheris.Fuzz()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("targets", nargs="*")
    parser.add_argument("--seconds", type=int, default=60, help="for each target")
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.here:
        fuzz(given.targets[0], given.seconds)
        return 0
    from tests.fuzz.targets import TARGETS

    broken = []
    for name in given.targets or TARGETS:
        command = [sys.executable, "-m", "tests.fuzz", name, "--here", "--seconds", str(given.seconds)]
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False)
        told = re.findall(r"number_of_executed_units:\s*(\d+)", done.stderr)
        count = f"{int(told[0]):,} inputs" if told else "an unknown number of inputs"
        print(f"{name}: {count}{'' if done.returncode == 0 else ', BROKEN'}", flush=True)
        if done.returncode:
            broken.append(name)
            print(done.stderr[-4000:], done.stdout[-2000:])
    return len(broken)


if __name__ == "__main__":
    sys.exit(main())
