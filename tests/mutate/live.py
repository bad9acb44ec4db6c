"""A mistake in a process that has the package in memory: the function's code is exchanged, and nothing read again."""

from __future__ import annotations

import gc
import importlib
import os
import pkgutil
import sys
from collections.abc import Iterator
from pathlib import Path
from types import CodeType, FunctionType

from tests.mutate.operators import Mutant

LIBRARIES = ("numpy", "torch", "torch.func", "scipy.stats", "sklearn.cluster", "sklearn.mixture", "pandas", "altair")
LIBRARIES += ("dp_accounting.pld", "safetensors.torch", "typer.testing", "rich.console", "jinja2")
OURS = ("tests", "unalike", "benchmarks", "examples", "reproductions")
Place = tuple[str, str, int]  # file, qualified name, first line


def load(tree: Path, root: Path) -> dict[Place, list[FunctionType]]:
    """Have all in memory that tests read again and again, from that tree; and where its functions are."""
    os.environ |= {"PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1"}
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    sys.dont_write_bytecode = False
    for name in LIBRARIES:
        importlib.import_module(name)
    os.chdir(tree)
    sys.path[:] = [str(tree), *(entry for entry in sys.path if entry not in ("", str(root)))]
    forget()
    importlib.import_module("tests.start")
    for module in pkgutil.walk_packages(importlib.import_module("unalike").__path__, "unalike."):
        try:
            importlib.import_module(module.name)
        except ImportError:  # of an engine that is not installed
            continue
    found: dict[Place, list[FunctionType]] = {}
    for one in gc.get_objects():
        if isinstance(one, FunctionType) and one.__code__.co_filename.startswith(str(tree)):
            found.setdefault(_place(one.__code__), []).append(one)
    gc.collect()
    gc.freeze()  # so that forks share it
    return found


def forget() -> None:
    """Have all of ours imported anew."""
    for name in [name for name in sys.modules if name.split(".")[0] in OURS]:
        del sys.modules[name]


def _place(code: CodeType) -> Place:
    return code.co_filename, code.co_qualname, code.co_firstlineno


def _codes(code: CodeType) -> Iterator[CodeType]:
    """Of the functions that are no part of another one, in their order."""
    for one in code.co_consts:
        if isinstance(one, CodeType):
            if "<locals>" not in one.co_qualname:
                yield one
            if not one.co_flags & 0x1:  # CO_OPTIMIZED: all functions have it, modules and classes have not
                yield from _codes(one)


def swap(tree: Path, mutant: Mutant, source: str, changed: str, known: dict[Place, list[FunctionType]]) -> bool:
    """Put the mistake in; False where it is not in a function that is in memory, such as a default or a constant."""
    file = str(tree / mutant.path)
    before, after = (list(_codes(compile(text, file, "exec"))) for text in (source, changed))
    if [one.co_qualname for one in before] != [one.co_qualname for one in after]:
        return False
    swapped = False
    for old, new in zip(before, after, strict=True):
        if old.co_firstlineno <= mutant.line <= _last(old) and old.co_flags & 0x1:
            live = known.get(_place(old), [])
            if not live or any(one.__code__.co_freevars != new.co_freevars for one in live):
                return False
            for one in live:
                one.__code__ = new
            swapped = True
    return swapped


def _last(code: CodeType) -> int:
    inner = [_last(one) for one in code.co_consts if isinstance(one, CodeType)]
    return max([line for *_, line in code.co_lines() if line is not None] + inner)
