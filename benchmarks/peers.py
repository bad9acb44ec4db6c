"""Other tools: each in a virtual environment of its own, made when first needed, and kept alive while it is timed.

Nothing is skipped in silence: a tool that cannot be installed or started raises ``Unavailable``, which says why.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Literal

ROOT = Path(__file__).resolve().parent.parent
PROGRAMS = Path(__file__).resolve().parent / "programs"
ENVIRONMENTS = ROOT / ".bench"
TORCH = "torch==2.13.0"


Clock = Literal["seconds", "cpu"]  # of the wall, or of a tool's process, which stands still while others are at work


class Unavailable(RuntimeError):
    """A tool cannot be measured here; the message says why."""


@dataclass(frozen=True)
class Tool:
    """What is measured. ``packages`` None: it runs in the environment of this program, with the code of ``root``."""

    name: str
    program: str
    packages: tuple[str, ...] | None = None
    loopback_only: bool = False  # start it where there is no network but loopback
    root: Path = ROOT

    def python(self) -> str:
        return sys.executable if self.packages is None else str(_environment(self))

    def command(self, folder: Path) -> list[str]:
        command = [self.python(), str(PROGRAMS / self.program), str(folder)]
        return [*isolation(), *command] if self.loopback_only else command


UNALIKE = Tool("Unalike", "run_unalike.py")
BARE = Tool("bare PyTorch loop", "run_bare.py")
PFL = Tool("pfl-research", "run_pfl.py", ("pfl==0.6.0",))
FLOWER = Tool("Flower simulation", "run_flower.py", ("flwr[simulation]==1.41.0",), loopback_only=True)


def _environment(tool: Tool) -> Path:
    """The interpreter of the tool's environment; torch goes in first and alone, so that nothing chooses another one."""
    assert tool.packages is not None
    folder = ENVIRONMENTS / Path(tool.program).stem.removeprefix("run_")
    python = folder / "bin" / "python"
    wanted = json.dumps([TORCH, *tool.packages])
    stamp = folder / "installed.json"
    if stamp.is_file() and stamp.read_text() == wanted:
        return python
    print(f"  installing {tool.name} into .bench/{folder.name} (once; a few minutes)", flush=True)
    _checked([sys.executable, "-m", "venv", "--clear", str(folder)], tool)
    for packages in ([TORCH], [TORCH, "numpy", *tool.packages]):
        _checked([str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *packages], tool)
    stamp.write_text(wanted)
    return python


def _checked(command: Sequence[str], tool: Tool) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        last = (done.stderr.strip() or done.stdout.strip() or "no message").splitlines()[-1]
        raise Unavailable(f"{tool.name} could not be installed: {last}")


def isolation() -> list[str]:
    """A command prefix that starts a program in namespaces of its own: only loopback, and no process outlives it."""
    for tool in ("unshare", "ip"):
        if shutil.which(tool) is None:
            raise Unavailable(f"needs a network namespace with nothing but loopback, but there is no `{tool}` here")
    base = ["unshare", "--net", "--pid", "--fork", "--kill-child", "--mount-proc"]
    inside = ["sh", "-c", 'ip link set lo up && exec "$@"', "sh"]
    for prefix in (base, [base[0], "--user", "--map-root-user", *base[1:]]):
        if subprocess.run([*prefix, *inside, "true"], capture_output=True).returncode == 0:
            return [*prefix, *inside]
    raise Unavailable("needs a network namespace with nothing but loopback, and this system does not allow one")


class Running:
    """A tool that is alive and warm; ``rounds(n)`` has it run n rounds now and gives the time of each."""

    def __init__(self, tool: Tool, folder: Path) -> None:
        self.tool = tool
        command = tool.command(folder)
        self._home = tempfile.TemporaryDirectory(prefix="bench-")
        self._errors = Path(self._home.name) / "errors.txt"
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(PROGRAMS), *([str(tool.root)] if tool.packages is None else [])]),
            "UNALIKE_CACHE": self._home.name,  # block and threads are measured anew in every run
            "FLWR_HOME": self._home.name,
            "FLWR_TELEMETRY_ENABLED": "0",
            "FLWR_DISABLE_UPDATE_CHECK": "1",
            "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",  # without a network it would fail
            "RAY_USAGE_STATS_ENABLED": "0",
        }
        with self._errors.open("w") as errors:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                env=environment,
                cwd=self._home.name,
            )
        try:
            self.threads = int(self._answer()["threads"])
        except BaseException:
            self.close()
            raise

    def rounds(self, count: int, clock: Clock = "seconds") -> list[float]:
        assert self._process.stdin is not None
        self._process.stdin.write(f"{count}\n")
        self._process.stdin.flush()
        return [float(value) for value in self._answer()[clock]]

    def _answer(self) -> dict[str, Any]:
        stream: IO[str] | None = self._process.stdout
        assert stream is not None
        line = stream.readline()
        if not line:
            last = (self._errors.read_text().strip() or "no message").splitlines()[-1]
            raise Unavailable(f"{self.tool.name} stopped: {last}")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def close(self) -> None:
        """The end of its input ends the program."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.close()
        self._process.stdout.close()
        try:
            self._process.wait(timeout=30)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._home.cleanup()

    def __enter__(self) -> Running:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
