"""What a command or a call of the Python API runs: its targets and settings made into a plan."""

from __future__ import annotations

import ast
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from unalike.core import outside
from unalike.core.suggest import nearest
from unalike.data.sources.catalog import CATALOG
from unalike.methods import METHODS
from unalike.studio.errors import UserError
from unalike.studio.recipe.hyperparameters import NONE, Hyperparameters, method_named
from unalike.studio.recipe.keys import FLAGS, KEYS, PARTITION_OPTIONS, flattened, merged, nested
from unalike.studio.recipe.recipe import Expected, Plan, overridden, plan_of, read_toml, shipped
from unalike.studio.runs.folder import RECIPE
from unalike.studio.words import listed

_PATHS = ("data", "schema", "epsilons")  # settings that may be paths


def plan_for(targets: Sequence[str], settings: Mapping[str, Any], overrides: Sequence[str] = ()) -> Plan:
    """What to run: one recipe (a file or a shipped name), or methods by name or by ``file.py:Class``.

    ``settings`` are short names of ``KEYS`` (None: not given), ``overrides`` are ``key=value`` and come last.
    """
    files = {target: file for target in targets if (file := _recipe_file(target)) is not None}
    if files and len(targets) > 1:
        raise UserError(f"{next(iter(files))} is a recipe; a recipe is run alone, or give methods only")
    settings = {name: value for name, value in settings.items() if value is not None}
    if files:
        file = files[targets[0]]
        values, where = read_toml(file), str(file)
        values.setdefault("title", file.resolve().parent.name if file.name == RECIPE else file.stem)
    else:
        methods = [_method(target) for target in targets]
        doubled = sorted({name for name in methods if methods.count(name) > 1})
        if doubled:
            raise UserError(f"{doubled[0]} is named twice")
        values = {"compare": [{"method": name, "label": name.rpartition(":")[2]} for name in methods]}
        where = "these settings"
    values = overridden(merged(values, spelled_out(settings)), overrides)
    plan = plan_of(_with_partition(values, settings), where)
    if files:
        return _expecting(plan, files[targets[0]])
    return plan if len(plan.runs) == 1 else _only_what_fits(plan, settings)


def _expecting(plan: Plan, file: Path) -> Plan:
    """A recipe's plan without the scores to reach where a run is not as the recipe was written, other seeds aside."""
    if all(recipe.expected == Expected() for _, recipe in plan.runs):
        return plan
    written = plan_of(read_toml(file), str(file))
    speed = {"block", "threads", "device", "strict", "name", "workers", "address", "deadline", "folder"}
    apart = dict.fromkeys(("title", "seed", "eval_every", "checkpoint_every", "expected"), True) | {"runtime": speed}
    before = {label: recipe.model_dump(exclude=apart) for label, recipe in written.runs}
    runs = []
    for label, recipe in plan.runs:
        same = before.get(label) == recipe.model_dump(exclude=apart)
        runs.append((label, recipe if same else recipe.model_copy(update={"expected": Expected()})))
    return plan.model_copy(update={"runs": runs})


def spelled_out(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Settings by their short names as the values of a recipe."""
    values: dict[str, Any] = {"hyperparameters": settings.get("hyperparameters", {})}
    for name, value in settings.items():
        if name == "simulate_noise":
            values = merged(values, nested({KEYS[name]: "simulated" if value else "system"}))
        elif name in KEYS:
            values = merged(values, nested({KEYS[name]: _absolute(str(value)) if name in _PATHS else value}))
        elif name not in PARTITION_OPTIONS and name != "hyperparameters":
            known = [*KEYS, *PARTITION_OPTIONS, "hyperparameters"]
            raise UserError(f"no setting is called {name!r}{nearest(name, known)}")
    local = values["hyperparameters"].get("local", {})
    given = [name for name in ("epochs", "steps") if local.get(name) not in (None, NONE)]
    if len(given) == 2:
        raise UserError(f"give local epochs ({local['epochs']}) or local steps ({local['steps']}), not both")
    if given:  # it replaces the other of the method's default
        other = "epochs" if given == ["steps"] else "steps"
        values = merged(values, nested({f"hyperparameters.local.{other}": "none"}))
    return values


def _with_partition(values: dict[str, Any], settings: Mapping[str, Any]) -> dict[str, Any]:
    """``alpha`` and ``classes`` as options of the partition, which they also choose if none is named."""
    for name, (implied, option) in PARTITION_OPTIONS.items():
        if name in settings:
            partition = values.get("data", {}).get("partition") or implied
            joint = "," if ":" in partition else ":"
            values = merged(values, nested({"data.partition": f"{partition}{joint}{option}={settings[name]}"}))
    return values


def _recipe_file(target: str) -> Path | None:
    if target.endswith(".toml"):
        return Path(target)
    return None if target in METHODS else shipped().get(target)


def _method(target: str) -> str:
    """A method's name as a recipe records it: a file's full path, so that a run can be resumed from anywhere."""
    if outside.is_path(target):
        file, _, name = target.rpartition(":")
        method_named(target)  # so that a wrong path is told at once
        return f"{_absolute(file)}:{name}"
    if target.endswith(".py"):
        raise UserError(f"{target} is a file: name the method in it, {target}:ClassName{_classes_in(Path(target))}")
    if target not in METHODS:
        raise UserError(
            f"no method or recipe is called {target!r}{nearest(target, [*METHODS, *shipped()])} "
            "(`unalike methods` and `unalike recipes` list them; a method of your own is path/to/file.py:Class)"
        )
    return target


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
    flags = flattened(spelled_out(short)["hyperparameters"])
    known = {label: Hyperparameters.of(recipe.method).keys for label, recipe in plan.runs}
    shared = {key for key in flags if any(key in keys for keys in known.values())}
    runs = []
    for label, recipe in plan.runs:
        given = flattened(recipe.hyperparameters)
        fitting = nested({key: value for key, value in given.items() if key in known[label] or key not in shared})
        runs.append((label, recipe.model_copy(update={"hyperparameters": fitting})))
    notes = []
    for name in short:
        key = KEYS[name].removeprefix("hyperparameters.")
        lacking = [label for label, keys in known.items() if key not in keys]
        if key in shared and lacking:
            having = listed([label for label in known if label not in lacking])
            notes.append(f"{FLAGS[KEYS[name]]} is for {having}; {listed(lacking)} cannot use it")
    return plan.model_copy(update={"runs": runs, "notes": notes})
