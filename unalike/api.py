"""What `import unalike` offers beside the vocabulary: run, compare, resume and evaluate. In three lines:

from unalike import run
result = run("fedavg", data="digits", partition="pathological", rounds=20)
print(result)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import nn

from unalike.core import outside
from unalike.core.federation import Federation
from unalike.core.lazy import pd
from unalike.core.method import Method, State
from unalike.core.model import Model
from unalike.data.arrays import array_source
from unalike.data.population import Population
from unalike.data.source import Source
from unalike.deploy import open_session
from unalike.learn.evaluation import Scores
from unalike.newcomers.model import PersonalModel
from unalike.notebook import Result, default_watcher
from unalike.report.page import page
from unalike.runs.errors import Interrupted, UserError
from unalike.runs.folder import COMPARISON
from unalike.runs.load import Given
from unalike.runs.measure import measure
from unalike.runs.recipe.hyperparameters import as_recipe
from unalike.runs.recipe.keys import KEYS, PARTITION_OPTIONS
from unalike.runs.recipe.recipe import Plan, Recipe
from unalike.runs.recipe.settings import plan_for
from unalike.runs.run import Comparison, run_plan
from unalike.runs.run import resume as resume_runs
from unalike.runs.simulate import simulate
from unalike.runs.watcher import Watcher

__all__ = [
    "Comparison",
    "Evaluation",
    "Interrupted",
    "Recipe",
    "Result",
    "UserError",
    "compare",
    "evaluate",
    "personalize",
    "predict",
    "resume",
    "run",
]


def run(
    target: str | type[Method] | Method,
    data: Any = None,
    *,
    out: str | Path | None = None,
    watcher: Watcher | None = None,
    **settings: Any,
) -> Result:
    """Train one method and measure it.

    - ``target``: a method (its name, ``file.py:Class``, a class or an instance), or a recipe (its name or file). An
      instance brings its model and hyperparameters.
    - ``data``: a name, a path, a pandas table (with ``client_column=`` and ``label_column=``), arrays as
      ``(x, y, client)`` or ``{"x": ..., "y": ..., "client": ...}``, a ``Source`` or a ``Population``; None: a recipe's
      own, else the digits.
    - ``out``: a new folder to save everything in; without it nothing is written.
    - ``settings``: the flags of ``unalike run`` with underscores (``rounds=20, partition="dirichlet", alpha=0.3``), and
      ``hyperparameters={...}`` for all others. ``model`` may also be a module of PyTorch, of which ``adapter`` says
      what is trainable, as ``trainable`` of ``Model`` does.
    """
    name, given = _read_data(data, settings)
    plan = plan_for([target], {**name, **_named_model(settings)})
    if len(plan.with_seeds()) > 1:
        raise UserError(f"{target} makes {len(plan.with_seeds())} runs; use compare(...) for several methods or seeds")
    result: Result = _run(plan, out, given, watcher).results[0]
    return result


def compare(
    *targets: str | type[Method] | Method,
    data: Any = None,
    out: str | Path | None = None,
    watcher: Watcher | None = None,
    **settings: Any,
) -> Comparison:
    """Train several methods over the same clients; the arguments are those of ``run``."""
    name, given = _read_data(data, settings)
    plan = plan_for(targets, {**name, **_named_model(settings)})
    return _run(plan, out, given, watcher)


def resume(
    folder: str | Path,
    *,
    data: Any = None,
    method: type[Method] | Method | Sequence[type[Method] | Method] = (),
    trust_code: str | Path | Sequence[str | Path] = (),
    watcher: Watcher | None = None,
) -> Result | Comparison:
    """Go on with a run or comparison that was stopped, from its folder; one that is finished is only read.

    The folder of a single run gives a ``Result``, as ``run`` does; that of a comparison gives a ``Comparison``.

    - ``data``, ``method``: only for a run whose data or methods were given from Python: the same again.
    - ``trust_code``: a .py file of yours, or several, that the folder may have loaded: no code is run because a folder
      names it.
    """
    for file in [trust_code] if isinstance(trust_code, str | Path) else trust_code:
        outside.trust(file)
    for one in method if isinstance(method, Sequence) else [method]:
        as_recipe(one)  # remembered, so that the recipe's path leads to it
    name, given = _read_data(data, {})
    if name:
        raise UserError(f"data = {data!r}: a run goes on with its own data; leave it out")
    path = Path(folder)
    comparison = _finish(
        resume_runs(path, data=given, watcher=watcher or default_watcher(), start_workers=open_session)
    )
    if (path / COMPARISON).exists():
        return comparison
    result: Result = comparison.results[0]
    return result


def _run(plan: Plan, out: str | Path | None, data: Given | None, watcher: Watcher | None) -> Comparison:
    shown = watcher or default_watcher()
    path = None if out is None else Path(out)
    return _finish(run_plan(plan, path, data=data, watcher=shown, start_workers=open_session, keep=True))


def _finish(comparison: Comparison) -> Comparison:
    """Write the report, and give results what Python offers of them."""
    page.report_on(comparison)
    return replace(comparison, groups=[[Result.of(one) for one in group] for group in comparison.groups])


def predict(
    run: str | Path | Result, data: Any, *, client: str | PersonalModel | None = None, **options: Any
) -> pd.DataFrame:
    """Predict rows by a finished run, or by the one in a folder; see ``Result.predict``."""
    return _open_result(run).predict(data, client=client, **options)


def personalize(run: str | Path | Result, data: Any, **options: Any) -> PersonalModel:
    """Give a newcomer its model by a finished run, or by the one in a folder; see ``Result.personalize``."""
    return _open_result(run).personalize(data, **options)


def _open_result(run: str | Path | Result) -> Result:
    return run if isinstance(run, Result) else Result.load(run)


@dataclass(frozen=True)
class Evaluation:
    """The scores of each group of clients; None where there is no such client or the method does not serve it."""

    seen: Scores | None = None
    unseen: Scores | None = None
    unlabeled: Scores | None = None

    def __str__(self) -> str:
        groups = {"seen": self.seen, "unseen": self.unseen, "unlabeled": self.unlabeled}
        lines = []
        for name, group in groups.items():
            score = "not served" if group is None else f"{group.mean:.3f}  (10th percentile {group.p10:.3f})"
            lines.append(f"{name:9}  {score}")
        return "\n".join(lines)


def evaluate(
    method: Method, state: State, clients: Population, *, federation: Federation | None = None, seed: int = 0
) -> Evaluation:
    """Score the models that a method gives to clients that trained, to newcomers, and to newcomers without labels.

    Each model is made from a client's training rows and scored on its test rows: the share of right classes, or minus
    the root mean squared error. Only a simulation can do this.

    - ``federation``: the one that the method was trained with, where clients keep what ``personalize`` needs. Without
      it the clients start afresh, as if they had kept nothing.
    """
    federation = federation or simulate(clients, seed)
    return Evaluation(**{one.group: one.scores for one in measure(method, state, federation, clients)})


def _named_model(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The settings, with a model that was given as a module remembered under a name."""
    model = settings.get("model")
    if isinstance(model, nn.Module):
        model = Model(model, settings.get("adapter"))
        settings = {**settings, "adapter": None}
    if isinstance(model, Model):
        return {**settings, "model": outside.remember(model, f"{model.kind.__name__}.model")}
    return dict(settings)


def _read_data(data: Any, settings: Mapping[str, Any]) -> tuple[dict[str, str], Given | None]:
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
    if hasattr(data, "to_pandas"):
        return {}, data.to_pandas()
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
