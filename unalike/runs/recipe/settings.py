"""What a command or a call of the Python API runs: its targets and settings made into a plan."""

from __future__ import annotations

import ast
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from unalike.core import outside
from unalike.core.notes import did_you_mean
from unalike.data.sources.catalog import CATALOG
from unalike.methods import by_name
from unalike.runs.errors import UserError
from unalike.runs.recipe.hyperparameters import NONE, Hyperparameters, as_recipe, method_named
from unalike.runs.recipe.keys import FLAGS, KEYS, PARTITION_OPTIONS, flatten, merge, nest
from unalike.runs.recipe.recipe import (
    RECIPE,
    Expected,
    Plan,
    Recipe,
    Runtime,
    apply_overrides,
    check_code,
    plan_of,
    read_toml,
    shipped,
)
from unalike.runs.words import listed

_PATHS = ("data", "schema", "epsilons", "network")  # settings that may be paths


def plan_for(targets: Sequence[object], settings: Mapping[str, Any], overrides: Sequence[str] = ()) -> Plan:
    """What to run: one recipe (a file or a shipped name), or methods: names, ``file.py:Class``, classes or instances.

    ``settings`` are short names of ``KEYS`` (None: not given), ``overrides`` are ``key=value`` and come last.
    """
    files = {one: file for one in targets if isinstance(one, str) and (file := _recipe_file(one)) is not None}
    if files and len(targets) > 1:
        raise UserError(f"{next(iter(files))} is a recipe; a recipe is run alone, or give methods only")
    file = next(iter(files.values()), None)
    settings = {name: value for name, value in settings.items() if value is not None}
    values = _of_methods(targets, settings) if file is None else _of_file(file)
    values = apply_overrides(merge(values, expand_settings(settings)), overrides)
    network = values.get("model")
    changed = {"model", "adapter"} & settings.keys() or any(one.startswith("model.") for one in overrides)
    if changed and isinstance(network, Mapping) and "digest" in network:
        values = merge(values, {"model": {"digest": None}})  # it is of what another adapter left frozen
    plan = plan_of(_with_partition(values, settings), "these settings" if file is None else str(file))
    if "lr" in settings:
        plan = plan.model_copy(update={"runs": [(label, _with_rate(one, settings["lr"])) for label, one in plan.runs]})
    if file is not None:
        return _expecting(plan, file)
    return plan if len(plan.runs) == 1 else _only_what_fits(plan, settings)


def _of_file(file: Path) -> dict[str, Any]:
    """What a recipe says; that of a run folder names no code that the user has not named."""
    values, of_run = read_toml(file), file.name == RECIPE
    if of_run:
        check_code(file.parent, values)
    values.setdefault("title", file.resolve().parent.name if of_run else file.stem)
    return values


def _of_methods(targets: Sequence[object], settings: Mapping[str, Any]) -> dict[str, Any]:
    """What a recipe says that compares these methods."""
    entries = [_by_name(one) if isinstance(one, str) else _by_object(one, settings) for one in targets]
    methods = [entry["method"] for entry in entries]
    if doubled := sorted({name for name in methods if methods.count(name) > 1}):
        raise UserError(f"{doubled[0]} is named twice")
    return {"compare": entries}


def _expecting(plan: Plan, file: Path) -> Plan:
    """A recipe's plan without the scores to reach where a run is not as the recipe was written, other seeds aside."""
    if all(recipe.expected == Expected() for _, recipe in plan.runs):
        return plan
    written = plan_of(read_toml(file), str(file))
    speed = set(Runtime.model_fields) - {"drop", "lost", "quorum"}  # what changes nothing but how fast it is
    apart = dict.fromkeys(("title", "seed", "eval_every", "checkpoint_every", "expected"), True) | {"runtime": speed}
    before = {label: recipe.model_dump(exclude=apart) for label, recipe in written.runs}
    runs = []
    for label, recipe in plan.runs:
        same = before.get(label) == recipe.model_dump(exclude=apart)
        runs.append((label, recipe if same else recipe.model_copy(update={"expected": Expected()})))
    return plan.model_copy(update={"runs": runs})


def expand_settings(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Settings by their short names as the values of a recipe."""
    values: dict[str, Any] = {"hyperparameters": settings.get("hyperparameters", {})}
    for name, value in settings.items():
        if name == "simulate_noise":
            values = merge(values, nest({KEYS[name]: "simulated" if value else "system"}))
        elif name in KEYS:
            values = merge(values, nest({KEYS[name]: _absolute(str(value)) if name in _PATHS else value}))
        elif name not in PARTITION_OPTIONS and name != "hyperparameters":
            known = [*KEYS, *PARTITION_OPTIONS, "hyperparameters"]
            raise UserError(f"no setting is called {name!r}{did_you_mean(name, known)}")
    local = values["hyperparameters"].get("local", {})
    local = local if isinstance(local, Mapping) else {}  # else it is refused with the others
    given = [name for name in ("epochs", "steps") if local.get(name) not in (None, NONE)]
    if len(given) == 2:
        raise UserError(f"give local epochs ({local['epochs']}) or local steps ({local['steps']}), not both")
    if given:  # it replaces the other of the method's default
        other = "epochs" if given == ["steps"] else "steps"
        values = merge(values, nest({f"hyperparameters.local.{other}": "none"}))
    return values


def _with_rate(recipe: Recipe, lr: Any) -> Recipe:
    """The rate that was asked for also where a method fine-tunes, unless that has one of its own."""
    usual = Hyperparameters.of(recipe.method, recipe.preset).defaults.get("finetune")
    own = flatten(recipe.hyperparameters)
    if usual is None or "local.lr" not in own or "finetune.lr" in own:
        return recipe
    return recipe.model_copy(update={"hyperparameters": merge(recipe.hyperparameters, nest({"finetune.lr": lr}))})


def _with_partition(values: dict[str, Any], settings: Mapping[str, Any]) -> dict[str, Any]:
    """``alpha`` and ``classes`` as options of the partition, which they also choose if none is named."""
    for name, (implied, option) in PARTITION_OPTIONS.items():
        if isinstance(settings.get(name), list | tuple):
            raise UserError(
                f"{name} = {settings[name]!r}: expected a number, how many classes each client of a pathological "
                "partition has; what the labels are called is class_names"
            )
        if name in settings:
            partition = values.get("data", {}).get("partition") or implied
            joint = "," if ":" in partition else ":"
            values = merge(values, nest({"data.partition": f"{partition}{joint}{option}={settings[name]}"}))
    return values


def _recipe_file(target: str) -> Path | None:
    if target.endswith(".toml"):
        return Path(target)
    return None if target in by_name() else shipped().get(target)


def _by_object(method: object, settings: Mapping[str, Any]) -> dict[str, Any]:
    """What a recipe says about a class or an instance, whose values give way to those that are set."""
    entry = as_recipe(method)
    for name in ("model", "preset"):
        if name in settings and not isinstance(method, type):
            raise UserError(f"{name} = {settings[name]!r}: this {entry['label']} has its own; give the class instead")
    return merge(entry, {"hyperparameters": expand_settings(settings)["hyperparameters"]})


def _by_name(target: str) -> dict[str, Any]:
    """What a recipe says about a method by name: a file's full path, so that a run can be resumed from anywhere."""
    if outside.is_path(target):
        file, _, name = target.rpartition(":")
        method_named(target)  # so that a wrong path is told at once
        return {"method": f"{_absolute(file) if file.endswith('.py') else file}:{name}", "label": name}
    if target.endswith(".py"):
        raise UserError(f"{target} is a file: name the method in it, {target}:ClassName{_classes_in(Path(target))}")
    if target not in by_name():
        raise UserError(
            f"no method or recipe is called {target!r}{did_you_mean(target, [*by_name(), *shipped()])} "
            "(`unalike methods` and `unalike recipes` list them; a method of your own is path/to/file.py:Class)"
        )
    return {"method": target, "label": target}


def _classes_in(file: Path) -> str:
    """The classes of a Python file, read without running it."""
    if not file.is_file():
        return "; and there is no such file"
    try:
        body = ast.parse(file.read_bytes()).body
    except SyntaxError as error:
        return f"; and it is not valid Python (line {error.lineno}: {error.msg})"
    names = [node.name for node in body if isinstance(node, ast.ClassDef)]
    return f"; its classes: {', '.join(names) or 'none'}"


def _absolute(text: str) -> str:
    path = Path(text).expanduser()
    known = text.partition(":")[0].strip() in CATALOG
    return str(path.resolve()) if path.exists() and not known else text


def _only_what_fits(plan: Plan, settings: Mapping[str, Any]) -> Plan:
    """In a comparison a flag such as --cohort goes to those methods that have it; if none has, it is refused later."""
    short = {name: value for name, value in settings.items() if name in KEYS}
    flags = flatten(expand_settings(short)["hyperparameters"])
    known = {label: Hyperparameters.of(recipe.method).keys for label, recipe in plan.runs}
    shared = {key for key in flags if any(key in keys for keys in known.values())}
    runs = []
    for label, recipe in plan.runs:
        given = flatten(recipe.hyperparameters)
        fitting = nest({key: value for key, value in given.items() if key in known[label] or key not in shared})
        runs.append((label, recipe.model_copy(update={"hyperparameters": fitting})))
    notes = []
    for name in short:
        key = KEYS[name].removeprefix("hyperparameters.")
        lacking = [label for label, keys in known.items() if key not in keys]
        if key in shared and lacking:
            having = listed([label for label in known if label not in lacking])
            notes.append(f"{FLAGS[KEYS[name]]} is for {having}; {listed(lacking)} cannot use it")
    return plan.model_copy(update={"runs": runs, "notes": notes})
