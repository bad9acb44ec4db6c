"""Count the files from ``unalike run fedavg`` to the gradient step and back to the report.

``python -m benchmarks.walk`` prints them. A small run is traced, call by call. Three numbers come of it:

- **to open**: the files of the functions that are on the stack, from the command down, when a client takes a gradient
  step (PyTorch is asked for a gradient), and when the report is written (``write_report``). Whoever wants to follow a
  run reads these.
- **touched**: these files, and those of the functions that are called from the way itself: all their callers are on
  it. They are one step off, where a reader may wonder what a line does.
- **run**: all files of the package in which anything runs, however deep.

What PyTorch, Typer and the standard library do between two functions of Unalike is skipped, and so is importing.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import pkgutil
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import unalike

PACKAGE = Path(unalike.__file__).parent
COMMAND = ("run", "fedavg", "--clients", "8", "--rounds", "2", "--quiet", "--threads", "1")


class Trace:
    """What is called on which stack of the package's functions, and which of them are there at the two moments."""

    def __init__(self) -> None:
        self.calls: set[tuple[CodeType, frozenset[CodeType]]] = set()
        self.way: set[CodeType] = set()

    def __call__(self, frame: FrameType, event: str, _: Any) -> None:
        if event != "call":
            return
        if _is_moment(frame):
            self.way |= {one.f_code for one in _ours(frame)}
        if _is_ours(frame.f_code):
            self.calls.add((frame.f_code, frozenset(one.f_code for one in _ours(frame.f_back))))

    def files(self) -> dict[str, list[str]]:
        """The three lists, each in alphabetical order."""
        touched = self.way | {code for code, stack in self.calls if stack <= self.way}
        everything = {code for code, _ in self.calls}
        found = {"to open": self.way, "touched": touched, "run": everything}
        return {name: sorted({_path(code) for code in codes}) for name, codes in found.items()}


def _is_ours(code: CodeType) -> bool:
    return code.co_filename.startswith(str(PACKAGE)) and code.co_name != "<module>"


def _ours(frame: FrameType | None) -> Iterator[FrameType]:
    """The frames of the package from this one outwards, without comprehensions, which are part of their function."""
    while frame is not None:
        if _is_ours(frame.f_code) and not frame.f_code.co_name.startswith("<"):
            yield frame
        frame = frame.f_back


def _is_moment(frame: FrameType) -> bool:
    code = frame.f_code
    if code.co_filename.endswith("_functorch/eager_transforms.py"):
        return code.co_name in ("grad_impl", "grad_and_value_impl")
    return _is_ours(code) and (_path(code), code.co_name) == ("report/page/page.py", "write_report")


def _path(code: CodeType) -> str:
    return str(Path(code.co_filename).relative_to(PACKAGE))


def count(command: tuple[str, ...] = COMMAND) -> dict[str, list[str]]:
    """The three lists of files for one command."""
    for module in pkgutil.walk_packages([str(PACKAGE)], "unalike."):  # what an import runs is not counted
        if module.name.rpartition(".")[2] not in ("__main__", "ray"):
            with contextlib.suppress(ImportError):  # of an extra that is not installed
                importlib.import_module(module.name)
    from unalike.commands.main import main

    trace, before = Trace(), sys.argv
    with tempfile.TemporaryDirectory() as folder:
        sys.argv = ["unalike", *command, "--out", f"{folder}/run"]
        threading.setprofile(trace)
        sys.setprofile(trace)
        try:
            with contextlib.suppress(SystemExit), contextlib.redirect_stdout(sys.stderr):
                main()
        finally:
            sys.setprofile(None)
            threading.setprofile(None)  # type: ignore[arg-type]
            sys.argv = before
    return trace.files()


if __name__ == "__main__":
    print(json.dumps(count(), indent=1))
