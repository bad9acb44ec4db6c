"""What a shard elsewhere agrees to run for a method: an explicit list, made by the installed code."""

from __future__ import annotations

from unalike.core.method import Method, tasks_of
from unalike.core.request import Program
from unalike.core.schema import Schema
from unalike.core.secure import EXCHANGES
from unalike.core.terms import Terms
from unalike.learn.evaluation import Scorer
from unalike.learn.optimum import Losses
from unalike.learn.scaling import PrivateScaling, Scaling


def program_of(
    method: Method,
    schema: Schema,
    *,
    terms: Terms = Terms(),
    simulated: bool = False,
    scaling: PrivateScaling | None = None,
) -> Program:
    """The method's tasks, scoring, scaling, and the exchanges of a secure sum; all else is refused.

    scaling: where inputs are scaled by noisy statistics; then nobody gives exact ones.
    simulated: the clients are a simulation's, which may also measure how far a convex problem is from its minimum.
    """
    owners = (method, Scorer(method.model), scaling or Scaling(schema.kind), *([Losses()] if simulated else []))
    tasks = [task for owner in owners for task in tasks_of(owner)]
    return Program(tasks, terms=terms, exchanges=EXCHANGES, private=terms.system, measured=tasks if simulated else ())
