"""A search for hyperparameters by Optuna: on validation rows, with as many trials for every method.

The study lies in ``trials.log`` of its folder, so that it can go on; ``tuned.toml`` is the recipe that compares the
methods with what was found.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import tomli_w

from unalike.core.disk import write_whole
from unalike.data.population import Population
from unalike.runs import fingerprint
from unalike.runs.errors import FLAG, Diverged, UserError
from unalike.runs.recipe.hyperparameters import Hyperparameters, plain
from unalike.runs.recipe.keys import flatten, merge, nest
from unalike.runs.recipe.recipe import Plan, Recipe
from unalike.runs.rehearsal import Rehearsal
from unalike.runs.run import Loader
from unalike.runs.training import Context, train
from unalike.runs.watcher import Watcher
from unalike.runs.words import listed

if TYPE_CHECKING:
    import optuna

RECIPE, _LOG = "tuned.toml", "trials.log"
_SETTINGS = "settings"  # the attribute of a study that has their digest
_WIDER = 30.0  # a rate is searched from its usual value over this to its usual value times this
_VALIDATION = 0.2


@dataclass(frozen=True)
class Found:
    """The best trial of one method."""

    label: str
    recipe: Recipe
    values: Mapping[str, float]
    score: float  # mean over seen clients on validation rows
    pruned: int  # of the trials were ended early
    trials: int
    cost: Mapping[str, Any] | None = None  # of the real clients' mixture, where the search was on simulated ones


def tune(
    plan: Plan,
    trials: int,
    out: Path,
    ranges: Mapping[str, tuple[float, float]],
    watcher: Watcher,
    rehearsal: Rehearsal | None = None,
) -> list[Found]:
    """Search each method of a plan; writes the recipe, with what was found, that `unalike compare` runs.

    ranges: of hyperparameters by dotted key. Without any, all learning rates of a method are searched.
    rehearsal: search on simulated clients; the recipe that is written is of the real ones.
    """
    found = []
    with Loader() as loader:
        for label, recipe in plan.runs:
            searched, cost = _checked(recipe, rehearsal is not None), None
            if rehearsal is not None:
                searched, cost = rehearsal.prepare(searched, loader.load(recipe), out)
            one = _search(label, searched, trials, out, ranges, watcher, loader)
            found.append(one if rehearsal is None else replace(one, recipe=_with(recipe, one.values), cost=cost))
    entries = [{"label": one.label, **one.recipe.model_dump(exclude_none=True, exclude_defaults=True)} for one in found]
    title = (plan.title or "tuned") + ("" if rehearsal is None else ", chosen on clients simulated by MDM")
    write_whole(out / RECIPE, tomli_w.dumps({"title": title, "compare": entries}).encode())
    return found


def _checked(recipe: Recipe, simulated: bool) -> Recipe:
    """The recipe with validation rows, which the search is by. Clients that are ``simulated`` may be looked at."""
    if recipe.privacy.promises and not simulated:
        raise UserError(
            f"a search looks at exact scores of the clients, which no ε counts{FLAG}: search on simulated clients, on "
            "public data, or on data that need no ε, and give the private run what was found",
            "privacy.epsilon",
        )
    if recipe.runtime.name != "simulate":
        raise UserError(f"a search runs in this process: leave runtime = 'ray'{FLAG} out", "runtime.name")
    validation = recipe.data.validation or _VALIDATION
    return recipe.model_copy(update={"data": recipe.data.model_copy(update={"validation": validation})})


def _search(
    label: str,
    recipe: Recipe,
    trials: int,
    out: Path,
    ranges: Mapping[str, tuple[float, float]],
    watcher: Watcher,
    loader: Loader,
) -> Found:
    try:
        import optuna
        from optuna.storages.journal import JournalFileBackend
    except ModuleNotFoundError as error:
        raise UserError("a search needs Optuna, which is not installed: pip install 'unalike[tune]'") from error
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    out.mkdir(parents=True, exist_ok=True)
    space, population = _space(recipe, ranges), loader.load(recipe)
    settings = _digest(recipe, space, population)
    backend = JournalFileBackend(str(out / _LOG))
    study = optuna.create_study(
        study_name=label,
        direction="maximize",
        storage=optuna.storages.JournalStorage(backend),
        sampler=optuna.samplers.TPESampler(seed=recipe.seed),
        pruner=optuna.pruners.MedianPruner(n_startup_trials=4),
        load_if_exists=True,
    )
    if study.user_attrs.get(_SETTINGS, settings if not study.trials else None) != settings:
        raise UserError(
            f"{out} holds a search of {label} with another recipe, data, metric or ranges, and its trials cannot be "
            f"compared with new ones: repeat the same command to go on with it, or choose another folder{FLAG}",
            "out",
        )
    study.set_user_attr(_SETTINGS, settings)

    def objective(trial: optuna.Trial) -> float:
        values = {key: trial.suggest_float(key, low, high, log=True) for key, (low, high) in space.items()}
        context = Context(label, f"{label}, trial {trial.number + 1}", _Pruner(trial))
        try:
            result = train(_with(recipe, values), population, None, context)
        except Diverged as error:
            raise optuna.TrialPruned(str(error)) from error
        if result.validation is None:
            raise UserError("no client has validation rows: give each more rows, or a larger share of them")
        return result.validation

    while (done := sum(trial.state.is_finished() for trial in study.trials)) < trials:
        study.optimize(objective, n_trials=1)
        finished = [trial.value for trial in study.trials if trial.value is not None and trial.state.name == "COMPLETE"]
        best = f"best {max(finished):.4g}" if finished else "none has finished yet"
        watcher.note(f"{label}: trial {done + 1} of {trials}, {study.trials[-1].state.name.lower()}; {best}")
    states = [trial.state.name for trial in study.trials]
    if "COMPLETE" not in states:
        raise UserError(f"{label}: none of {trials} trials came to an end; search smaller values")
    values = dict(study.best_params)
    return Found(label, _with(recipe, values), values, study.best_value, states.count("PRUNED"), len(states))


def _digest(recipe: Recipe, space: Mapping[str, tuple[float, float]], population: Population) -> str:
    """What the trials of one search have in common; how fast they run and how many there are may differ."""
    content = {
        "recipe": recipe.model_dump(mode="json", exclude={"runtime", "expected", "checkpoint_every"}),
        "space": dict(space),
        "data": fingerprint.of(population, b"search"),  # the file may have changed under its name
    }
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _space(recipe: Recipe, ranges: Mapping[str, tuple[float, float]]) -> dict[str, tuple[float, float]]:
    """What is searched: the ranges of those hyperparameters that the method has, else its learning rates."""
    known = Hyperparameters.of(recipe.method, recipe.preset)
    usual = flatten(plain(known.read(recipe.hyperparameters)))
    if ranges:
        unknown = [key for key in ranges if key not in known.keys]
        if unknown:
            raise UserError(f"{recipe.method} has no hyperparameter {unknown[0]!r}; it has {listed(known.keys, 20)}")
        return dict(ranges)
    rates = {key: value for key, value in usual.items() if key.rpartition(".")[2] == "lr"}
    return {key: (value / _WIDER, value * _WIDER) for key, value in rates.items() if isinstance(value, float) and value}


def _with(recipe: Recipe, values: Mapping[str, Any]) -> Recipe:
    return recipe.model_copy(update={"hyperparameters": merge(recipe.hyperparameters, nest(values))})


class _Pruner(Watcher):
    """Ends a trial whose validation scores are below the median of the others in the same round."""

    def __init__(self, trial: optuna.Trial) -> None:
        self._trial = trial

    def round(self, record: Mapping[str, Any]) -> None:
        if record.get("validation") is not None:
            import optuna

            self._trial.report(record["validation"], record["round"])
            if self._trial.should_prune():
                raise optuna.TrialPruned
