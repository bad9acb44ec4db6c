"""Short names for what everybody sets: the flags of the command line, and the keyword arguments of the Python API."""

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
from unalike.studio.recipe import hyperparameters, shipped
from unalike.studio.recipe.hyperparameters import merged
from unalike.studio.recipe.keys import KEYS, PARTITION_OPTIONS
from unalike.studio.recipe.recipe import Plan, overridden, plan_of, read_toml
from unalike.studio.runs.folder import RECIPE
from unalike.studio.runs.prepare import method_class


def plan_for(targets: Sequence[str], settings: Mapping[str, Any], overrides: Sequence[str] = ()) -> Plan:
    """What to run: one recipe (a file or a shipped name), or methods by name or by ``file.py:Class``.

    ``settings`` are short names of ``KEYS`` (None: not given), ``overrides`` are ``key=value`` and come last.
    """
    recipes = [target for target in targets if _recipe_file(target) is not None]
    if recipes and len(targets) > 1:
        raise UserError(f"{recipes[0]} is a recipe; a recipe is run alone, or give methods only")
    if recipes:
        file = _recipe_file(recipes[0])
        assert file is not None
        values, where = read_toml(file), str(file)
        values.setdefault("title", file.resolve().parent.name if file.name == RECIPE else file.stem)
    else:
        methods = [_method(target) for target in targets]
        doubled = sorted({name for name in methods if methods.count(name) > 1})
        if doubled:
            raise UserError(f"{doubled[0]} is named twice")
        values, where = {"compare": [{"method": name, "label": _label(name)} for name in methods]}, "these settings"
    values = merged(values, nested(settings))
    plan = plan_of(_with_partition(overridden(values, overrides), settings), where)
    return plan if recipes else _only_what_fits(plan, settings)


def nested(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Short names to a recipe's nested values."""
    values: dict[str, Any] = {}
    for name, value in settings.items():
        if name in PARTITION_OPTIONS or value is None:
            continue
        if name == "hyperparameters":
            values = merged(values, {name: value})
            continue
        if name not in KEYS:
            known = [*KEYS, *PARTITION_OPTIONS, "hyperparameters"]
            raise UserError(f"no setting is called {name!r}{nearest(name, known)}")
        inner: Any = _absolute(str(value)) if name == "data" else value
        for part in reversed(KEYS[name].split(".")):
            inner = {part: inner}
        values = merged(values, inner)
    local = values.get("hyperparameters", {}).get("local", {})
    if "steps" in local and "epochs" in local:
        raise UserError(f"give local epochs ({local['epochs']}) or local steps ({local['steps']}), not both")
    if "steps" in local or "epochs" in local:  # the one that is given replaces the other of the method's default
        other = "epochs" if "steps" in local else "steps"
        values = merged(values, {"hyperparameters": {"local": {other: "none"}}})
    return values


def _with_partition(values: dict[str, Any], settings: Mapping[str, Any]) -> dict[str, Any]:
    """``alpha`` and ``classes`` as options of the partition, which they also choose if none is named."""
    for name, (implied, option) in PARTITION_OPTIONS.items():
        if settings.get(name) is not None:
            partition = values.get("data", {}).get("partition") or implied
            joint = "," if ":" in partition else ":"
            values = merged(values, {"data": {"partition": f"{partition}{joint}{option}={settings[name]}"}})
    return values


def _recipe_file(target: str) -> Path | None:
    if target.endswith(".toml"):
        return Path(target)
    return None if target in METHODS else shipped.names().get(target)


def _method(target: str) -> str:
    """A method's name as a recipe records it: a file's full path, so that a run can be resumed from anywhere."""
    if outside.is_path(target):
        file, _, name = target.rpartition(":")
        method_class(target)  # so that a wrong path is told at once
        return f"{_absolute(file)}:{name}"
    if target.endswith(".py"):
        raise UserError(f"{target} is a file: name the method in it, {target}:ClassName{_classes_in(Path(target))}")
    if target not in METHODS:
        known = [*METHODS, *shipped.names()]
        raise UserError(
            f"no method or recipe is called {target!r}{nearest(target, known)} "
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


def _label(method: str) -> str:
    return method.rpartition(":")[2]


def _absolute(text: str) -> str:
    path = Path(text).expanduser()
    known = text.partition(":")[0].strip() in CATALOG
    return str(path.resolve()) if path.exists() and not known else text


def _only_what_fits(plan: Plan, settings: Mapping[str, Any]) -> Plan:
    """In a comparison a flag such as --batch goes to the methods that have it; one that nobody has is refused later."""
    if len(plan.runs) == 1:
        return plan
    paths = [
        KEYS[name].removeprefix("hyperparameters.")
        for name, value in settings.items()
        if value is not None and KEYS.get(name, "").startswith("hyperparameters.")
    ]
    paths += ["local.epochs", "local.steps"] if "local.epochs" in paths or "local.steps" in paths else []
    known = [hyperparameters.of_method(method_class(recipe.method)) for _, recipe in plan.runs]
    shared = [path for path in paths if any(hyperparameters.has(own, path) for own in known)]
    runs = []
    for (label, recipe), own in zip(plan.runs, known, strict=True):
        values = recipe.hyperparameters
        for path in shared:
            if not hyperparameters.has(own, path):
                values = _without(values, path.split("."))
        runs.append((label, recipe.model_copy(update={"hyperparameters": values})))
    return plan.model_copy(update={"runs": runs})


def _without(values: Mapping[str, Any], path: Sequence[str]) -> dict[str, Any]:
    rest = dict(values)
    if len(path) == 1:
        rest.pop(path[0], None)
    elif path[0] in rest:
        rest[path[0]] = _without(rest[path[0]], path[1:])
        if not rest[path[0]]:
            del rest[path[0]]
    return rest
