"""The demonstration: unlike clients, a few methods, one table and one report, in a minute or two."""

from __future__ import annotations

from typing import Any

from unalike.studio.recipe.recipe import Plan
from unalike.studio.recipe.settings import plan_for

METHODS = ("local", "fedavg", "fedprox", "fedavg-finetune", "pefll", "flowdup")
SETTINGS: dict[str, Any] = {
    "title": "demo",
    "data": "digits",
    "partition": "pathological:2",
    "clients": 40,  # of about 45 rows each, 9 of them to test on
    "unseen": 10,
    "cohort": 20,
    "rounds": 60,
    "seed": 1,
    "threads": 1,  # the models are tiny: more threads only wait for one another
}


def demo_plan(rounds: int | None = None) -> Plan:
    """40 clients that know two digits each; 10 of them arrive only after training."""
    return plan_for(METHODS, SETTINGS | ({} if rounds is None else {"rounds": rounds}))
