"""A process of its own that need not load everything again: a fork of the one that runs the tests."""

from __future__ import annotations

import logging
import os
import signal
import sys
import tempfile
import traceback
import warnings
from collections.abc import Callable
from typing import IO, NamedTuple, NoReturn

from unalike.commands.main import main


class Ended(NamedTuple):
    """How a process ended and what it had printed; a code below 0 is the signal that ended it."""

    code: int
    out: str
    err: str


def in_child(*words: object, first: Callable[[], None] = lambda: None) -> Ended:
    """``unalike WORDS``, after something that changes its process for ever."""
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # newer Pythons warn of forks with threads
            child = os.fork()
        if child == 0:
            _be_child([str(word) for word in words], first, out, err)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        out.seek(0)
        err.seek(0)
        return Ended(code, out.read(), err.read())


def _be_child(words: list[str], first: Callable[[], None], out: IO[str], err: IO[str]) -> NoReturn:
    """As a new process would: printing to where it is told to, with Python's own treatment of warnings and logs."""
    code: int | str | None = 1
    signal.alarm(120)  # a child that waits for a thread that it has not got is ended
    try:
        os.dup2(out.fileno(), 1)
        os.dup2(err.fileno(), 2)
        sys.stdout, sys.stderr, sys.argv = out, err, ["unalike", *words]
        logging.getLogger().handlers.clear()
        warnings.resetwarnings()
        for kind in (DeprecationWarning, PendingDeprecationWarning, ImportWarning, ResourceWarning):
            warnings.simplefilter("ignore", kind)
        first()
        main()
        code = 0
    except SystemExit as ended:
        code = ended.code
    except BaseException:
        traceback.print_exc()
    finally:
        out.flush()
        err.flush()
        os._exit(code if isinstance(code, int) else int(code is not None))
