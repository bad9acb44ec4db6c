"""A rate for each method, by one rule for all: the best of a few on the clients' validation rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from reproductions.item import Numbers, Work
from unalike.core.federation import Federation, Held, each
from unalike.core.method import Method, State
from unalike.core.request import Part
from unalike.learn.evaluation import Scorer


def accuracies(part: Part, method: Method, state: State, federation: Federation) -> Tensor:
    """[clients] how often each client's model is right on this part of its rows (%); charged to no ledger."""
    with federation.aside() as aside:
        cohort = aside.everyone()
        models = method.personalize(state, cohort)
        theta = models if isinstance(models, Held) else each(models)
        found: Tensor = 100 * cohort.on(part).ask(Scorer(method.model).score, theta=theta)["score"]
    return found.nan_to_num(nan=0.0)


def tuned(work: Work, name: str, compute: Callable[..., Numbers], rates: Sequence[float], **settings: Any) -> Numbers:
    """The numbers of the rate with the best ``validation``, of equals the smaller one. Test rows do not count."""
    found = [(rate, work.part(f"{name}, rate {rate:g}", compute, rate=rate, **settings)) for rate in sorted(rates)]
    rate, numbers = max(found, key=lambda one: one[1]["validation"])
    return {**numbers, "rate": rate}
