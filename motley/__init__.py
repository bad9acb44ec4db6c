"""Motley: personalized, private federated learning among clients that are not alike."""

import os

# A thread that waits for another one sleeps, unless PyTorch was loaded before. Spinning is no faster here, and beside
# another program it takes twice as long and more.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

from motley.client import Client, Clients
from motley.federation import Cohort, Federation, Replies, each
from motley.learn.local import LocalSGD
from motley.method import Method, State, train
from motley.model import Model
from motley.release import Each, Mean, Sum
from motley.runtime.simulate import Simulator
from motley.task import send, task
from motley.version import __version__

__all__ = [
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
    "Sum",
    "__version__",
    "each",
    "send",
    "task",
    "train",
]
