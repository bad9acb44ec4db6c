"""The studio: from recipes to runs, run folders and reports. In three lines:

from unalike import run
result = run("fedavg", data="digits", partition="pathological", rounds=20)
print(result)
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pandas as pd

from unalike.data.arrays import array_source
from unalike.data.population import Population
from unalike.data.source import Source
from unalike.studio.errors import Interrupted, UserError
from unalike.studio.recipe.keys import KEYS, PARTITION_OPTIONS
from unalike.studio.recipe.recipe import Recipe
from unalike.studio.recipe.settings import plan_for
from unalike.studio.runs.prepare import Given
from unalike.studio.runs.progress import Watcher
from unalike.studio.runs.result import Result
from unalike.studio.runs.run import Comparison, carry_out, resume_any

__all__ = ["Comparison", "Interrupted", "Recipe", "Result", "UserError", "compare", "resume", "run"]


def run(
    target: str,
    data: Any = None,
    *,
    out: str | Path | None = None,
    watcher: Watcher | None = None,
    **settings: Any,
) -> Result:
    """Train one method and measure it.

    - ``target``: a method's name, ``file.py:Class``, a recipe's name or file.
    - ``data``: a name, a path, a pandas table (with ``client_column=`` and ``label_column=``), arrays as
      ``(x, y, client)`` or ``{"x": ..., "y": ..., "client": ...}``, a ``Source`` or a ``Population``; None: a recipe's
      own, else the digits.
    - ``out``: a new folder to save everything in; without it nothing is written.
    - ``settings``: the flags of ``unalike run`` with underscores (``rounds=20, partition="dirichlet", alpha=0.3``), and
      ``hyperparameters={...}`` for all others.
    """
    name, given = _taken(data, settings)
    plan = plan_for([target], {**name, **settings})
    if len(plan.with_seeds()) > 1:
        raise UserError(f"{target} makes {len(plan.with_seeds())} runs; use compare(...) for several methods or seeds")
    return carry_out(plan, _path(out), data=given, watcher=watcher).results[0]


def compare(
    *targets: str,
    data: Any = None,
    out: str | Path | None = None,
    watcher: Watcher | None = None,
    **settings: Any,
) -> Comparison:
    """Train several methods over the same clients; the arguments are those of ``run``."""
    name, given = _taken(data, settings)
    plan = plan_for(targets, {**name, **settings})
    return carry_out(plan, _path(out), data=given, watcher=watcher)


def resume(folder: str | Path, *, data: Any = None, watcher: Watcher | None = None) -> Comparison:
    """Go on with a run or comparison that was stopped; one that is finished is only read.

    ``data``: only for a run whose data was given from Python: the same data again.
    """
    name, given = _taken(data, {})
    if name:
        raise UserError(f"data = {data!r}: a run goes on with its own data; leave it out")
    return resume_any(Path(folder), data=given, watcher=watcher)


def _taken(data: Any, settings: Mapping[str, Any]) -> tuple[dict[str, str], Given | None]:
    """Data as a setting, where a recipe can name it, or else as an object."""
    if data is None:
        return {}, None
    if isinstance(data, str):
        return {"data": data}, None
    if isinstance(data, Path):
        return {"data": str(data.expanduser().absolute())}, None  # never taken for the name of a data set
    if isinstance(data, Population):
        divided = [name for name in settings if name in PARTITION_OPTIONS or KEYS.get(name, "").startswith("data.")]
        if divided:
            raise UserError(
                f"{divided[0]} = {settings[divided[0]]!r}: a population is dealt out already; give the setting where "
                "it is made (unalike.data.load), or give the data that it is made of"
            )
        return {}, data
    if isinstance(data, Source | pd.DataFrame):
        return {}, data
    if isinstance(data, tuple) and len(data) == 3:
        return {}, array_source(*data)
    if isinstance(data, Mapping) and "x" in data and set(data) <= {"x", "y", "client"}:
        return {}, array_source(**data)
    found = f"a {type(data).__name__}"
    if isinstance(data, tuple | Mapping):
        found += f" of {len(data)}" if isinstance(data, tuple) else f" with {', '.join(map(repr, data)) or 'nothing'}"
    raise UserError(
        f"data is {found}; expected a name, a path to a file or folder, a pandas DataFrame, arrays as a tuple "
        '(x, y, client) or as {"x": ..., "y": ..., "client": ...}, a Source or a Population'
    )


def _path(out: str | Path | None) -> Path | None:
    return None if out is None else Path(out)
