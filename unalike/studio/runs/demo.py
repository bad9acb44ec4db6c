"""The demonstration: unlike clients, a few methods, one table and one report, in a minute or two."""

from __future__ import annotations

from typing import Any

from unalike.methods import METHODS
from unalike.studio.recipe.recipe import Plan
from unalike.studio.recipe.settings import plan_for

METHODS_SHOWN = ("local", "fedavg", "fedprox", "fedavg-finetune", "pefll", "flowdup")
SETTINGS: dict[str, Any] = {
    "title": "demo",
    "data": "digits",
    "partition": "pathological:2",
    "clients": 100,
    "unseen": 30,
    "rounds": 60,
    "seed": 1,
    "threads": 1,  # the models are tiny: more threads only wait for one another
}


def demo_plan(rounds: int | None = None) -> Plan:
    """100 clients that know two digits each; 30 of them arrive only after training."""
    shown = [name for name in METHODS_SHOWN if name in METHODS]
    return plan_for(shown, SETTINGS | ({} if rounds is None else {"rounds": rounds}))
