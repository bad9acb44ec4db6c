"""The method that a recipe names, and its hyperparameters: the fields of its dataclass, checked by pydantic."""

from __future__ import annotations

import dataclasses
import inspect
import math
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, dataclass
from difflib import get_close_matches
from functools import cache, cached_property
from pathlib import Path
from types import SimpleNamespace
from typing import Annotated, Any, Union, get_args, get_type_hints

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError, WrapValidator, create_model
from pydantic.errors import PydanticUserError
from pydantic_core import to_jsonable_python

from unalike.core import outside
from unalike.core.method import DECLARATIONS
from unalike.core.notes import did_you_mean, join_notes
from unalike.methods import METHODS, PRESETS, NamedMethod, by_name, installed_methods
from unalike.methods.problem import Problem
from unalike.runs.errors import FLAG, Note, UserError
from unalike.runs.recipe.keys import FLAGS, flatten, merge
from unalike.runs.recipe.recipe import all_keys, mistakes, wrong_value
from unalike.runs.words import listed

PAPER = "paper"  # the preset
NONE = "none"  # TOML has no null: this word stands for it
GIVEN = ("model", "problem")  # fields that are filled with the recipe's model, or with the whole problem


def method_named(name: str) -> NamedMethod:
    """A method by its name, or from outside by ``file.py:Class``."""
    if name in METHODS:
        return METHODS[name]
    if not outside.is_path(name):
        if name not in installed_methods():
            raise UserError(f"no method is called {name!r}{did_you_mean(name, by_name())}")
        row = installed_methods()[name]
        _check_class(row.path, f"{name} ({row.path})")
        return row
    return NamedMethod(name, _check_class(name, name).__name__, paper="", summary="")


def _check_class(path: str, name: str) -> type:
    """The class that an import path names, if it can be a method."""
    found = outside.load(path)
    if not isinstance(found, type):
        raise UserError(f"{name} is no class; a method is a frozen dataclass with start, round and personalize")
    for needed in ("start", "round", "personalize"):
        if not callable(getattr(found, needed, None)):
            raise UserError(f"{name} has no {needed}(...); a method has start, round and personalize")
    if not dataclasses.is_dataclass(found):
        raise UserError(f"{found.__name__} is no method: mark it with @dataclass(frozen=True)")
    _refuse_untyped(found)
    return found


def as_recipe(method: object) -> dict[str, Any]:
    """What a recipe says about a method that is given as a class or as an instance of one.

    An instance brings its hyperparameters, and its model. What has no import path is remembered in this process alone.
    """
    cls = method if isinstance(method, type) else type(method)
    values: dict[str, Any] = {"method": outside.path_of(cls), "label": cls.__name__}
    known = Hyperparameters.of(values["method"])
    if isinstance(method, type):
        return values
    changed = {}
    for field in dataclasses.fields(cls):
        value = getattr(method, field.name)
        if field.name in GIVEN:
            model = value.model if isinstance(value, Problem) else value
            values["model"] = {"name": outside.remember(model, f"{cls.__name__}.model")}
        elif field.init and value != _default_of(field):
            if field.name not in known.hints:
                raise UserError(
                    f"{cls.__name__}.{field.name} = {value!r}: no recipe can say this; leave it at its default (noise "
                    "comes from epsilon=... or noise_multiplier=...)"
                )
            changed[field.name] = plain(value)
    return values | {"hyperparameters": changed}


def _default_of(field: dataclasses.Field[Any]) -> Any:
    return field.default if field.default_factory is MISSING else field.default_factory()


def preset_values(method: str, preset: str) -> Mapping[str, Any]:
    """What a preset sets of a method, nested as in a recipe; under ``privacy`` what it sets of that section."""
    if preset not in PRESETS:
        names = "; ".join(f"{name}: {what}" for name, what in PRESETS.items())
        raise UserError(f"preset = {preset!r}{FLAG}: expected one of {names}", "preset")
    values = method_named(method).presets.get(preset)
    if values is None:
        others = [name for name, row in METHODS.items() if preset in row.presets]
        raise UserError(f"{method} has no preset {preset!r}{FLAG}; {listed(others)} have one", "preset")
    return values


def _refuse_untyped(method: type) -> None:
    """``lr = 0.1`` in a dataclass is no field: nothing could ever set it."""
    for base in method.__mro__[:-1]:
        known = {*DECLARATIONS, *inspect.get_annotations(base)}
        for name, value in vars(base).items():
            kind = "float | None" if value is None else type(value).__name__
            could_be_set = _is_plain(type(value)) and not isinstance(value, type)
            if could_be_set and name not in known and not name.startswith("_"):
                raise UserError(
                    f"{base.__name__}.{name} has no type, so nothing can set it; give it a type: "
                    f"{name}: {kind} = {value!r} (a constant is a ClassVar[{kind}])" + _line_of(base, name)
                )


def _line_of(cls: type, field: str) -> str:
    """Where a class gives a field its value, to be put below a message."""
    try:
        file, (lines, first) = inspect.getsourcefile(cls), inspect.getsourcelines(cls)
    except (OSError, TypeError):  # a class that was typed in
        return ""
    found = [number for number, line in enumerate(lines, first) if line.split("=")[0].strip() == field]
    return f"\n    {Path(file).name}:{found[0]}: {lines[found[0] - first].strip()}" if file and found else ""


@dataclass(frozen=True)
class Hyperparameters:
    """What can be set of one method: types, and the values when nobody sets them, by the names of the fields."""

    method: str
    hints: Mapping[str, Any]
    defaults: Mapping[str, Any]

    @classmethod
    def of(cls, method: str, preset: str | None = None) -> Hyperparameters:
        """The fields that plain values can express; networks and mechanisms are not hyperparameters.

        ``preset="paper"``: the values of the method's paper take the place of the defaults.
        """
        return cls._of_class(method, preset) if outside.is_path(method) else _cached(method, preset)

    @classmethod
    def _of_class(cls, method: str, preset: str | None) -> Hyperparameters:
        entry = method_named(method)
        types = get_type_hints(entry.cls)
        hints, defaults = {}, {}
        for field in sorted(dataclasses.fields(entry.cls), key=lambda one: one.kw_only is True):  # its own come first
            default = _default_of(field)
            if not field.init or field.name in GIVEN:
                continue
            if _is_plain(types[field.name]):
                hints[field.name] = types[field.name]
                if default is not MISSING:
                    defaults[field.name] = default
            elif default is MISSING:
                raise UserError(
                    f"{method} needs {field.name}, and no recipe can give a {types[field.name]}; give it a default, or "
                    "a field `problem: Problem` from which the method makes it"
                )
        with_default = cls(method, {name: hints[name] for name in defaults}, defaults)
        usual = cls(method, hints, with_default.read(entry.variant))
        if preset is None:
            return usual
        values = {name: value for name, value in preset_values(method, preset).items() if name != "privacy"}
        return cls(method, hints, usual.read(values))

    @property
    def keys(self) -> list[str]:
        """The dotted names of all, those inside a group (such as ``local``) too."""
        return [key for name, hint in self.hints.items() for key in _keys(name, hint)]

    def read(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Arguments for the constructor: the defaults, with ``values`` (partial, nested) in their place, checked."""
        groups = {name: plain(one) for name, one in self.defaults.items() if dataclasses.is_dataclass(one)}
        values = merge({name: group for name, group in groups.items() if name in values}, values)
        for key, value in flatten(values).items():
            if key.rpartition(".")[2] == "lr" and isinstance(value, float) and not math.isfinite(value):
                found = f"{self.method}, {key} = {value!r}{FLAG}"
                raise UserError(
                    f"{found}: a learning rate is a finite number, for example 0.1", f"hyperparameters.{key}"
                )
        try:
            checked = self._table.model_validate(values)
        except ValidationError as error:
            raise UserError(join_notes("; ", self._explain(error, values))) from error
        return {**self.defaults, **{name: getattr(checked, f"of_{name}") for name in values}}

    @cached_property
    def _table(self) -> type[BaseModel]:
        """The method's fields as a pydantic model, under names that never clash with those of BaseModel."""
        fields: dict[str, Any] = {}
        for name, hint in self.hints.items():
            default = self.defaults.get(name, ...)  # ...: it must be given
            hint = Union[hint, None] if default is None else hint  # noqa: UP007  # of any hint
            fields[f"of_{name}"] = (Annotated[hint, WrapValidator(_with_null)], Field(default, alias=name))
        return create_model(self.method, __config__=ConfigDict(extra="forbid"), **fields)

    def _explain(self, error: ValidationError, values: Mapping[str, Any]) -> Iterator[str]:
        for path, value, problems in mistakes(error, values):
            key, kind = ".".join(path), problems[0]["type"]
            whole = f"hyperparameters.{key}"
            if kind in ("extra_forbidden", "unexpected_keyword_argument"):
                has = f"{FLAG}: leave it out; it has {listed(list(self.hints), 8)}"
                advice = has if whole in FLAGS else self._advice(key)
                yield Note(f"{self.method} has no hyperparameter {key!r}{advice}", whole)
            elif kind == "missing":
                yield f"{self.method} needs the hyperparameter {key!r}: set {key}=VALUE"
            elif kind == "value_error":  # from the group's own check, whose message may begin with a field's name
                reason = str(problems[0]["ctx"]["error"])
                field = f"{key}.{reason.partition(' = ')[0]}"
                told = f".{reason}{FLAG}" if field in self.keys else f": {reason}"
                yield Note(f"{self.method}, {key}{told}", f"hyperparameters.{field}")
            else:
                yield join_notes(", ", [self.method, wrong_value(whole, value, problems)])

    def _advice(self, unknown: str) -> str:
        """What an unknown key may stand for: keys of that last name, else the nearest, else all that there are."""
        group = unknown.rpartition(".")[0]
        keys = [key for key in self.keys if key.startswith(group + ".")] if group else [*self.keys, *all_keys()]
        last_names = {key.rpartition(".")[2]: key for key in reversed(keys)}
        meant = (
            [key for key in keys if key.rpartition(".")[2] == unknown]
            or get_close_matches(unknown, keys, 1)
            or [last_names[name] for name in get_close_matches(unknown, last_names, 1)]
        )
        if meant:
            return f"; did you mean {' or '.join(map(repr, meant))}?"
        return did_you_mean(unknown, keys if group else self.hints)


@cache  # pydantic takes milliseconds for each; a method in a file is found anew, since its file may change
def _cached(method: str, preset: str | None) -> Hyperparameters:
    return Hyperparameters._of_class(method, preset)


def _is_plain(hint: Any) -> bool:
    """Can numbers, words, lists and tables express it?"""
    try:
        TypeAdapter(hint).json_schema()
    except PydanticUserError:
        return False
    return True


def _keys(key: str, hint: Any) -> list[str]:
    groups = [part for part in (hint, *get_args(hint)) if dataclasses.is_dataclass(part)]
    inner = {name: each for group in groups for name, each in get_type_hints(group).items()}
    return [one for name, each in inner.items() for one in _keys(f"{key}.{name}", each)] if groups else [key]


def _with_null(value: Any, check: Any) -> Any:
    """``none`` is null, unless the type takes it as a word only."""
    try:
        return check(_replace_word(value, NONE, None))
    except ValidationError as error:
        try:
            return check(value)
        except ValidationError:
            raise error from None


def plain(value: Any) -> Any:
    """Arguments as plain values that TOML can hold."""
    return _replace_word(to_jsonable_python(value), None, NONE)


def _replace_word(value: Any, old: str | None, new: str | None) -> Any:
    if isinstance(value, Mapping):
        return {key: _replace_word(each, old, new) for key, each in value.items()}
    if isinstance(value, list):
        return [_replace_word(each, old, new) for each in value]
    return new if isinstance(value, str | None) and value == old else value


def describe(method: str) -> dict[str, Any]:
    """A method's hyperparameters with their defaults, as a recipe spells them."""
    known = Hyperparameters.of(method)
    return {name: plain(known.defaults[name]) if name in known.defaults else "required" for name in known.hints}


def serving_unlabeled() -> list[str]:
    """The methods that, with their defaults, serve clients without labels."""

    def serves(name: str) -> bool:
        declared = inspect.getattr_static(METHODS[name].cls, "serves_unlabeled", False)
        of_defaults = SimpleNamespace(**Hyperparameters.of(name).defaults)
        return bool(declared.__get__(of_defaults) if isinstance(declared, property) else declared)

    return [name for name in METHODS if serves(name)]
