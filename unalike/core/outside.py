"""Code from outside of Unalike: a class or function by its import path, and the line of it where something failed.

An import path is ``package.module:Name`` or ``path/to/file.py:Name``.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import linecache
import sys
import sysconfig
import traceback
from pathlib import Path
from types import ModuleType
from typing import Any

from unalike.core.suggest import nearest

_PACKAGE = Path(__file__).parents[1]
_INSTALLED = [Path(sysconfig.get_path(kind)) for kind in ("stdlib", "platstdlib", "purelib", "platlib")]


class CannotLoad(ValueError):
    """An import path that leads nowhere; the message says at which step."""


def is_path(name: str) -> bool:
    """Does this name something outside of Unalike, rather than a built-in?"""
    return ":" in name


def load(path: str) -> object:
    """The object that ``path`` names. The module is imported (its code runs), so load only what you trust."""
    where, _, name = path.rpartition(":")
    if not where or not name:
        raise CannotLoad(f"expected 'package.module:Name' or 'file.py:Name', got {path!r}")
    module = _from_file(Path(where)) if where.endswith(".py") else _from_package(where, path)
    if not hasattr(module, name):
        public = [key for key in vars(module) if not key.startswith("_")]
        raise CannotLoad(f"{where} has no {name!r}{nearest(name, public)}")
    return getattr(module, name)


def _from_file(file: Path) -> ModuleType:
    file = file.expanduser().resolve()
    if not file.is_file():
        raise CannotLoad(f"there is no file {file}")
    # The full path is the module's name: two files of the same name stay apart, and a second load is the same module.
    name = f"{file.stem} ({file})"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or spec.loader is None:
        raise CannotLoad(f"{file} cannot be imported as Python")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look their own module up here
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        del sys.modules[name]
        raise CannotLoad(f"importing {file} failed: {told(error)}") from error
    return module


def _from_package(where: str, path: str) -> ModuleType:
    try:
        return importlib.import_module(where)
    except ModuleNotFoundError as error:
        raise CannotLoad(
            f"cannot import {where!r} for {path!r}: {error}; install it, or name a file: 'path/to/file.py:Name'"
        ) from error
    except Exception as error:
        raise CannotLoad(f"importing {where!r} failed: {told(error)}") from error


def told(error: Exception, in_task: bool = False) -> str:
    """An exception with the line of the user's own code that led to it, if there is one.

    in_task: a client's side may be one of our methods or come from a package, so only PyTorch's and our other lines
    are passed over.
    """
    message = error.args[0] if isinstance(error, KeyError) and error.args else error  # its str is a repr
    return f"{type(error).__name__}: {message}{line_of(error, in_task)}"


def line_of(error: Exception, in_task: bool = False) -> str:
    """The last line on an exception's way that is the user's own, to be put below a message; empty: there is none."""
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        file = Path(frame.filename)
        if file.is_relative_to(_PACKAGE):
            own = in_task and file.is_relative_to(_PACKAGE / "methods")
        else:
            own = not any(map(file.is_relative_to, _INSTALLED)) or (in_task and "torch" not in file.parts)
        if own and file.exists():
            return f"\n    {file.name}:{frame.lineno}, in {frame.name}: {frame.line}"
    return ""


def first_line_of(function: Any) -> str:
    """Where a function begins, to be put below a message about what it returned; empty for one without a file."""
    function = inspect.unwrap(getattr(function, "func", function))  # of a partial
    code = getattr(function, "__code__", None)
    if code is None or not Path(code.co_filename).exists():
        return ""
    number = code.co_firstlineno
    while (line := linecache.getline(code.co_filename, number).strip()).startswith("@"):
        number += 1
    return f"\n    {Path(code.co_filename).name}:{number}, in {code.co_name}: {line}"
