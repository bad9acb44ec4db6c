"""A method's hyperparameters: its dataclass fields, read from and written to plain values with their types checked."""

from __future__ import annotations

import dataclasses
import difflib
import inspect
import math
import types
import typing
from collections.abc import Mapping, Sequence
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from pydantic import TypeAdapter, ValidationError

from unalike.core.model import Model
from unalike.core.suggest import nearest
from unalike.studio.errors import UserError
from unalike.studio.recipe.keys import flag_of

NONE = "none"  # TOML has no null: this word stands for it


@dataclasses.dataclass(frozen=True)
class Hyperparameter:
    """One of them: its type, and the value it has when nobody sets it."""

    hint: Any
    default: Any = dataclasses.MISSING


def of_method(cls: type) -> dict[str, Hyperparameter]:
    """A method's hyperparameters: the fields of its dataclass that plain values can express.

    The keyword parameters of ``for_problem``, where there is one, count too: they size the method's networks.
    """
    if not dataclasses.is_dataclass(cls):
        raise UserError(f"{cls.__name__} is no method: mark it with @dataclass(frozen=True)")
    known = _fields(cls)
    builder = getattr(cls, "for_problem", None)
    if builder is not None:
        hints = get_type_hints(builder)
        for name, parameter in list(inspect.signature(builder).parameters.items())[1:]:
            if parameter.kind in (parameter.KEYWORD_ONLY, parameter.POSITIONAL_OR_KEYWORD) and name not in known:
                default = dataclasses.MISSING if parameter.default is parameter.empty else parameter.default
                known[name] = Hyperparameter(hints.get(name, Any), default)
    return known


def _fields(cls: type) -> dict[str, Hyperparameter]:
    hints = get_type_hints(cls)
    known = {}
    for field in dataclasses.fields(cls):
        if field.init and _is_plain(hints[field.name]):
            default = field.default_factory() if field.default_factory is not dataclasses.MISSING else field.default
            known[field.name] = Hyperparameter(hints[field.name], default)
    return known


def _is_plain(hint: Any) -> bool:
    """Can plain values (numbers, words, lists, tables) express it? Networks and mechanisms are not hyperparameters."""
    origin = get_origin(hint)
    if origin is Literal or hint is Any:
        return True
    if origin in (Union, types.UnionType):
        return all(_is_plain(part) for part in get_args(hint))
    if origin is not None:
        wanted = [part for part in get_args(hint) if part is not Ellipsis]
        return isinstance(origin, type) and issubclass(origin, tuple | list | Mapping) and all(map(_is_plain, wanted))
    if hint in (int, float, str, bool, type(None)):
        return True
    if not isinstance(hint, type) or not dataclasses.is_dataclass(hint) or issubclass(hint, Model):
        return False
    inner = get_type_hints(hint)
    return all(_is_plain(inner[field.name]) for field in dataclasses.fields(hint))


def read(
    owner: str,
    known: Mapping[str, Hyperparameter],
    values: Mapping[str, Any],
    path: str = "",
    elsewhere: Sequence[str] = (),
) -> dict[str, Any]:
    """Arguments for the constructor: the defaults, with ``values`` (partial, nested) in their place, all checked.

    elsewhere: keys that are no hyperparameters, but may be what was meant by one that is unknown.
    """
    for name in values:
        if name not in known:
            meant = _meant(path + name, [*_paths(known, path), *elsewhere])
            advice = f"; did you mean {meant}?" if meant else nearest(path + name, [path + one for one in known])
            raise UserError(f"{owner} has no hyperparameter {path + name!r}{advice}")
    arguments = {}
    for name, one in known.items():
        if name in values:
            arguments[name] = _converted(owner, path + name, one, values[name])
        elif one.default is not dataclasses.MISSING:
            arguments[name] = one.default
        else:
            raise UserError(f"{owner} needs the hyperparameter {path + name!r}: give it with --set {path + name}=VALUE")
    return arguments


def _paths(known: Mapping[str, Hyperparameter], path: str) -> list[str]:
    """The dotted names of hyperparameters, those inside a group too."""
    paths = []
    for name, one in known.items():
        group = _dataclass_in(one.hint)
        paths += [path + name] if group is None else _paths(_fields(group), f"{path}{name}.")
    return paths


def _meant(name: str, keys: Sequence[str]) -> str:
    """The keys that an unknown one may stand for: those of that last name, else the one nearest to it."""
    same = [key for key in keys if key.rpartition(".")[2] == name]
    if same:
        return " or ".join(map(repr, same))
    near = difflib.get_close_matches(name, keys, 1)
    if near:
        return repr(near[0])
    last_names = {key.rpartition(".")[2]: key for key in reversed(keys)}
    near = difflib.get_close_matches(name, last_names, 1)
    return repr(last_names[near[0]]) if near else ""


def _converted(owner: str, path: str, one: Hyperparameter, value: Any) -> Any:
    if value == NONE and type(None) in get_args(one.hint):
        return None
    group = _dataclass_in(one.hint)
    if group is not None and isinstance(value, Mapping):
        known = _fields(group)
        if dataclasses.is_dataclass(one.default):  # what is not given stays as in the method's own default
            known = {key: Hyperparameter(h.hint, getattr(one.default, key)) for key, h in known.items()}
        arguments = read(owner, known, value, path + ".")
        try:
            return group(**arguments)
        except ValueError as error:
            name, equals, _ = str(error).partition(" = ")  # it begins with the field that is wrong, or not
            if equals and name in known:
                raise UserError(f"{owner}, {path}.{error}{flag_of(f'hyperparameters.{path}.{name}')}") from error
            raise UserError(f"{owner}, {path}: {error}") from error
    flag = flag_of(f"hyperparameters.{path}")
    if path.rpartition(".")[2] == "lr" and isinstance(value, float) and not math.isfinite(value):
        raise UserError(f"{owner}, {path} = {value!r}{flag}: a learning rate is a finite number, for example 0.1")
    try:
        return TypeAdapter(one.hint).validate_python(value)
    except ValidationError as error:
        wanted = "; or ".join(dict.fromkeys(problem["msg"] for problem in error.errors()))
        raise UserError(f"{owner}, {path} = {value!r}{flag}: {wanted}") from error


def _dataclass_in(hint: Any) -> type | None:
    for part in (hint, *get_args(hint)):
        if isinstance(part, type) and dataclasses.is_dataclass(part):
            return part
    return None


def plain(known: Mapping[str, Hyperparameter], arguments: Mapping[str, Any]) -> dict[str, Any]:
    """The inverse of ``read``: arguments as plain values that TOML can hold, every default spelled out."""
    return {name: _plain(arguments[name]) for name in known}


def _plain(value: Any) -> Any:
    if value is None:
        return NONE
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: _plain(getattr(value, field.name)) for field in dataclasses.fields(value) if field.init}
    if isinstance(value, Mapping):
        return {str(key): _plain(each) for key, each in value.items()}
    if isinstance(value, tuple | list):
        return [_plain(each) for each in value]
    return value


def has(known: Mapping[str, Hyperparameter], path: str) -> bool:
    """Does the method have the hyperparameter of this dotted name?"""
    name, _, rest = path.partition(".")
    if name not in known:
        return False
    group = _dataclass_in(known[name].hint)
    return not rest or (group is not None and has(_fields(group), rest))


def merged(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """``base`` with the values of ``over`` in their place, table by table."""
    result = dict(base)
    for key, value in over.items():
        below = result.get(key)
        both = isinstance(below, Mapping) and isinstance(value, Mapping)
        result[key] = merged(typing.cast(Mapping[str, Any], below), value) if both else value
    return result
