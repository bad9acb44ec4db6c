"""Code from outside of Unalike: a class or function by its import path, and the line of it where something failed.

An import path is ``package.module:Name`` or ``path/to/file.py:Name``. What Python handed over and no import path names,
such as a class of a notebook, goes by ``python:Name``; it is found in this process alone.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import inspect
import linecache
import site
import sys
import sysconfig
import traceback
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from unalike.core.notes import did_you_mean

_PACKAGE = Path(__file__).parents[1]
_PYTHON = "python:"
_handed_over: dict[str, object] = {}  # by their paths, as sys.modules has modules by their names
_INSTALLED = [Path(sysconfig.get_path(kind)) for kind in ("stdlib", "platstdlib", "purelib", "platlib")]

_loaded: set[str] = set()  # files and modules that the user has had loaded in this process
_trusted: dict[str, Path] = {}  # files that the user has named, by the digest of their code
_stand_ins: dict[str, Path] = {}  # for code that a folder names: the user's file with the same content


class WrongReturn(TypeError):
    """A function of the user's own returned what it must not; the message has the function's first line."""


class CannotLoad(ValueError):
    """An import path that leads nowhere; the message says at which step."""


def is_path(name: str) -> bool:
    """Does this name something outside of Unalike, rather than a built-in?"""
    return ":" in name and not name.startswith("hf:")  # a folder with weights, of which no code is run


def remember(value: object, name: str) -> str:
    """A path by which ``load`` finds this very object in this process; a later one of the same name takes its place."""
    path = _PYTHON + name
    _handed_over[path] = value
    return path


def path_of(cls: type) -> str:
    """A class's import path; that of ``remember`` for one of a notebook, a script or a function, which has none."""
    module = sys.modules.get(cls.__module__)
    if cls.__module__ == "__main__" or getattr(module, cls.__qualname__, None) is not cls:
        return remember(cls, cls.__name__)
    file = getattr(module, "__file__", None)
    return f"{file if cls.__module__ == _module_name(Path(str(file))) else cls.__module__}:{cls.__name__}"


def code_digest(where: str | Path) -> str | None:
    """SHA-256 of a file, or of the file of a module that this process has imported."""
    file = where if str(where).endswith(".py") else getattr(sys.modules.get(str(where)), "__file__", None)
    known = file is not None and Path(file).expanduser().is_file()
    return hashlib.sha256(Path(file).expanduser().read_bytes()).hexdigest() if known and file is not None else None


def trust(file: str | Path) -> None:
    """The user has named this file: a run folder may have its code loaded, if that is the code of the run."""
    digest = code_digest(file)
    if digest is None:
        raise CannotLoad(f"there is no file {file}; --trust-code takes a .py file of yours")
    _trusted[digest] = Path(file).expanduser().resolve()


def code_of(paths: Iterable[str]) -> dict[str, str | None]:
    """The files and modules that these paths name, each with the digest of its code."""
    named = (path.rpartition(":")[0] for path in paths if is_path(path) and not path.startswith(_PYTHON))
    return {where: code_digest(where) for where in named}


def is_installed(path: str) -> bool:
    """Is this import path one of a package that the user has installed, or of Unalike itself?"""
    file = _file_of_module(path.rpartition(":")[0])
    installed: list[str | Path] = [*site.getsitepackages(), site.getusersitepackages(), _PACKAGE]
    return file is not None and any(file.is_relative_to(folder) for folder in installed)


def _file_of_module(where: str) -> Path | None:
    """The file from which a module would be imported. To find it no code runs, not even that of its package."""
    top, *inner = where.split(".")
    if not all(part.isidentifier() for part in (top, *inner)):
        return None
    try:
        spec = importlib.util.find_spec(top)
    except (ImportError, ValueError):
        return None
    if spec is None:
        return None
    if not inner:
        return Path(spec.origin) if spec.has_location and spec.origin else None
    bases = [Path(folder, *inner) for folder in spec.submodule_search_locations or ()]
    files = [file for base in bases for file in (base / "__init__.py", base.with_suffix(".py"))]
    return next((file for file in files if file.is_file()), None)


def trusted_path(path: str) -> str:
    """An import path as another process of the user has to load it: of the trusted file, where that stands in."""
    where, _, name = path.rpartition(":")
    return f"{_stand_ins[where]}:{name}" if where in _stand_ins else path


def check_trusted(paths: Iterable[str], recorded: Mapping[str, str | None], folder: Path) -> None:
    """Refuse code that only a folder names: it runs where the user has loaded it, or trusts a file with equal content.

    recorded: digests of the code with which the run began, as the folder has them.
    """
    for where in code_of(paths):
        digest = recorded.get(where)
        if digest in _trusted:
            module = _file_of_module(where)
            if module is not None and code_digest(module) == digest:
                _stand_ins.pop(where, None)  # by its name, so that it can import its neighbours
            else:
                _stand_ins[where] = _trusted[digest]
        elif where not in _loaded and (digest is not None or Path(where).resolve() not in _trusted.values()):
            raise CannotLoad(
                f"{folder} was run with code of its own, {where}, and code is not run because a folder names it. If "
                f"you have that file and trust it, add: --trust-code {where if where.endswith('.py') else 'FILE.py'}"
                + (f" (its SHA-256 must be {digest})" if digest else "")
            )


def load(path: str) -> object:
    """The object that ``path`` names. The module is imported (its code runs), so load only what you trust."""
    if path.startswith(_PYTHON):
        if path not in _handed_over:
            name = path.removeprefix(_PYTHON)
            raise CannotLoad(
                f"{name} was handed over from Python and cannot be imported here: hand it over again "
                f"(unalike.resume(..., method={name.partition('.')[0]})), or put it in a file: file.py:{name}"
            )
        return _handed_over[path]
    where, _, name = path.rpartition(":")
    if not where or not name:
        raise CannotLoad(f"expected 'package.module:Name' or 'file.py:Name', got {path!r}")
    file = _stand_ins.get(where, Path(where) if where.endswith(".py") else None)
    module = _from_package(where, path) if file is None else _from_file(file)
    _loaded.add(where)
    if not hasattr(module, name):
        public = [key for key in vars(module) if not key.startswith("_")]
        raise CannotLoad(f"{where} has no {name!r}{did_you_mean(name, public)}")
    return getattr(module, name)


def _from_file(file: Path) -> ModuleType:
    file = file.expanduser().resolve()
    if not file.is_file():
        raise CannotLoad(f"there is no file {file}")
    name = _module_name(file)
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
        raise CannotLoad(f"importing {file} failed: {describe_error(error)}") from error
    return module


def _module_name(file: Path) -> str:
    """With the full path two files of the same name stay apart, and a second load is the same module."""
    return f"{file.stem} ({file})"


def _from_package(where: str, path: str) -> ModuleType:
    try:
        return importlib.import_module(where)
    except ModuleNotFoundError as error:
        raise CannotLoad(
            f"cannot import {where!r} for {path!r}: {error}; install it, or name a file: 'path/to/file.py:Name'"
        ) from error
    except Exception as error:
        raise CannotLoad(f"importing {where!r} failed: {describe_error(error)}") from error


def describe_error(error: Exception, in_task: bool = False) -> str:
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
