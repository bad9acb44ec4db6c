"""The studio: from recipes to runs, run folders and reports. In three lines:

from unalike.studio import run
result = run("fedavg", data="digits", partition="pathological", rounds=20)
print(result)
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from unalike.data.population import Population
from unalike.studio.errors import Interrupted, UserError
from unalike.studio.recipe.recipe import Recipe
from unalike.studio.recipe.settings import plan_for
from unalike.studio.runs.compare import Comparison, carry_out, resume_any
from unalike.studio.runs.progress import Watcher
from unalike.studio.runs.result import Result

__all__ = ["Comparison", "Interrupted", "Recipe", "Result", "UserError", "compare", "resume", "run"]


def run(
    target: str,
    data: str | Population | None = None,
    *,
    out: str | Path | None = None,
    watcher: Watcher | None = None,
    **settings: Any,
) -> Result:
    """Train one method and measure it.

    - ``target``: a method's name, ``file.py:Class``, a recipe's name or file.
    - ``data``: a name, a file or a population; None: a recipe's own, else the digits.
    - ``out``: a new folder to save everything in; without it nothing is written.
    - ``settings``: the flags of ``unalike run`` with underscores (``rounds=20, partition="dirichlet", alpha=0.3``), and
      ``hyperparameters={...}`` for all others.
    """
    plan = plan_for([target], _named(data, settings))
    if len(plan.with_seeds()) > 1:
        raise UserError(f"{target} makes {len(plan.with_seeds())} runs; use compare(...) for several methods or seeds")
    return carry_out(plan, _path(out), population=_given(data), watcher=watcher).results[0]


def compare(
    *targets: str,
    data: str | Population | None = None,
    out: str | Path | None = None,
    watcher: Watcher | None = None,
    **settings: Any,
) -> Comparison:
    """Train several methods over the same clients; the arguments are those of ``run``."""
    plan = plan_for(targets, _named(data, settings))
    return carry_out(plan, _path(out), population=_given(data), watcher=watcher)


def resume(folder: str | Path, *, data: Population | None = None, watcher: Watcher | None = None) -> Comparison:
    """Go on with a run or comparison that was stopped; one that is finished is only read."""
    return resume_any(Path(folder), population=data, watcher=watcher)


def _named(data: str | Population | None, settings: dict[str, Any]) -> dict[str, Any]:
    return {"data": data, **settings} if isinstance(data, str) else settings


def _given(data: str | Population | None) -> Population | None:
    return data if isinstance(data, Population) else None


def _path(out: str | Path | None) -> Path | None:
    return None if out is None else Path(out)
