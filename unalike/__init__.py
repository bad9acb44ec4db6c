"""Unalike: personalized, private federated learning among clients that are not alike.

``import unalike as ua`` is all that an example or a method needs. The names are listed in ``__init__.pyi``.
"""

import importlib
import os
import re
from pathlib import Path

# A thread that waits for another one sleeps, unless PyTorch was loaded before. Spinning is no faster here, and beside
# another program it takes twice as long and more.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

# PyTorch takes a second to import, so a name is loaded when it is first used: `unalike --help` answers without it.
_LIST = Path(__file__).with_suffix(".pyi").read_text(encoding="utf-8")
_HOMES = {name: module for module, name in re.findall(r"^from (\S+) import (\w+) as \w+$", _LIST, re.MULTILINE)}
__all__ = sorted(_HOMES)


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module 'unalike' has no attribute {name!r}")
    home = _HOMES[name]
    if name in ("data", "figures"):  # modules
        return importlib.import_module(f"{home}.{name}")
    value = globals()[name] = getattr(importlib.import_module(home), name)
    return value


def __dir__() -> list[str]:
    return __all__
