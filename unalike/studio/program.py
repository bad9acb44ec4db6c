"""What a shard elsewhere agrees to run for a method: an explicit list, made by the installed code."""

from __future__ import annotations

from unalike.core.method import Method, tasks_of
from unalike.core.request import Program
from unalike.core.secure import EXCHANGES
from unalike.learn.evaluation import Scorer


def program_of(method: Method) -> Program:
    """The method's tasks, scoring, and the exchanges of a secure sum; a request for anything else is refused."""
    return Program([*tasks_of(method), *tasks_of(Scorer(method.model)), *EXCHANGES])
