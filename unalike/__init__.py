"""Unalike: personalized, private federated learning among clients that are not alike."""

import os
from typing import TYPE_CHECKING

# A thread that waits for another one sleeps, unless PyTorch was loaded before. Spinning is no faster here, and beside
# another program it takes twice as long and more.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

from unalike.version import __version__

# PyTorch takes a second to import, so a name is loaded when it is first used: `unalike --help` answers without it.
if TYPE_CHECKING:
    from unalike.core.client import Client, Clients
    from unalike.core.federation import Cohort, Federation, Replies, each
    from unalike.core.method import Method, State, train
    from unalike.core.model import Model
    from unalike.core.release import SIZE, Each, Mean, Stays, Sum
    from unalike.core.task import send, task
    from unalike.learn.local import LocalSGD
    from unalike.runtime.shard.simulator import Simulator
    from unalike.studio import compare, resume, run
    from unalike.studio.simulate import simulate
else:
    _NAMES = {
        "unalike.core.client": ("Client", "Clients"),
        "unalike.core.federation": ("Cohort", "Federation", "Replies", "each"),
        "unalike.core.method": ("Method", "State", "train"),
        "unalike.core.model": ("Model",),
        "unalike.core.release": ("SIZE", "Each", "Mean", "Stays", "Sum"),
        "unalike.core.task": ("send", "task"),
        "unalike.learn.local": ("LocalSGD",),
        "unalike.runtime.shard.simulator": ("Simulator",),
        "unalike.studio": ("compare", "resume", "run"),
        "unalike.studio.simulate": ("simulate",),
    }

    def __getattr__(name):
        from importlib import import_module

        for module, names in _NAMES.items():
            if name in names:
                value = globals()[name] = getattr(import_module(module), name)
                return value
        raise AttributeError(f"module 'unalike' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


__all__ = [
    "SIZE",
    "Client",
    "Clients",
    "Cohort",
    "Each",
    "Federation",
    "LocalSGD",
    "Mean",
    "Method",
    "Model",
    "Replies",
    "Simulator",
    "State",
    "Stays",
    "Sum",
    "__version__",
    "compare",
    "each",
    "resume",
    "run",
    "send",
    "simulate",
    "task",
    "train",
]
