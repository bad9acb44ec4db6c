"""Unalike: personalized, private federated learning among clients that are not alike."""

import os

# A thread that waits for another one sleeps, unless PyTorch was loaded before. Spinning is no faster here, and beside
# another program it takes twice as long and more.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

from unalike.core.client import Client, Clients
from unalike.core.federation import Cohort, Federation, Replies, each
from unalike.core.method import Method, State, train
from unalike.core.model import Model
from unalike.core.release import SIZE, Each, Mean, Stays, Sum
from unalike.core.task import send, task
from unalike.learn.local import LocalSGD
from unalike.runtime.shard.simulator import Simulator
from unalike.studio.simulate import simulate
from unalike.version import __version__

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
    "each",
    "send",
    "simulate",
    "task",
    "train",
]
