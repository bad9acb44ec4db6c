"""A class or function by its import path: ``package.module:Name`` or ``path/to/file.py:Name``."""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import sys
from pathlib import Path
from types import ModuleType


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
        near = difflib.get_close_matches(name, public, 1)
        hint = f"; did you mean {near[0]!r}?" if near else f"; it has: {', '.join(public) or 'nothing public'}"
        raise CannotLoad(f"{where} has no {name!r}{hint}")
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
        raise CannotLoad(f"importing {file} failed: {type(error).__name__}: {error}") from error
    return module


def _from_package(where: str, path: str) -> ModuleType:
    try:
        return importlib.import_module(where)
    except ModuleNotFoundError as error:
        raise CannotLoad(
            f"cannot import {where!r} for {path!r}: {error}; install it, or name a file: 'path/to/file.py:Name'"
        ) from error
    except Exception as error:
        raise CannotLoad(f"importing {where!r} failed: {type(error).__name__}: {error}") from error
