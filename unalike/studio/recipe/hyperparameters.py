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
from unalike.core.suggest import nearest
from unalike.methods import METHODS, Entry
from unalike.studio.errors import UserError
from unalike.studio.recipe.keys import flag_of, flattened, merged
from unalike.studio.recipe.recipe import all_keys, mistakes, wrong_value
from unalike.studio.words import listed

PAPER = "paper"  # the preset
NONE = "none"  # TOML has no null: this word stands for it
GIVEN = ("model", "problem")  # fields that are filled with the recipe's model, or with the whole problem


def method_named(name: str) -> Entry:
    """A method by its name, or from outside by ``file.py:Class``."""
    if not outside.is_path(name):
        if name not in METHODS:
            raise UserError(f"no method is called {name!r}{nearest(name, METHODS)}")
        return METHODS[name]
    found = outside.load(name)
    if not isinstance(found, type):
        raise UserError(f"{name} is no class; a method is a frozen dataclass with start, round and personalize")
    for needed in ("start", "round", "personalize"):
        if not callable(getattr(found, needed, None)):
            raise UserError(f"{name} has no {needed}(...); a method has start, round and personalize")
    if not dataclasses.is_dataclass(found):
        raise UserError(f"{found.__name__} is no method: mark it with @dataclass(frozen=True)")
    _refuse_untyped(found)
    return Entry(found, found.__name__, paper="", summary="")


def preset_values(method: str, preset: str) -> Mapping[str, Any]:
    """What a preset sets of a method, nested as in a recipe."""
    if preset != PAPER:
        raise UserError(
            f"preset = {preset!r} (--preset): there is one preset, {PAPER}: the settings of the method's paper"
        )
    values = method_named(method).preset
    if values is None:
        having = [name for name, entry in METHODS.items() if entry.preset is not None]
        raise UserError(
            f"{method} has no preset {preset!r} (--preset): its defaults are those of its paper, or the paper names "
            f"none; {listed(having)} have one"
        )
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
    file = inspect.getsourcefile(cls)
    lines, first = inspect.getsourcelines(cls)
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
        return cls._found(method, preset) if outside.is_path(method) else _known(method, preset)

    @classmethod
    def _found(cls, method: str, preset: str | None) -> Hyperparameters:
        entry = method_named(method)
        types = get_type_hints(entry.make)
        hints, defaults = {}, {}
        for field in dataclasses.fields(entry.make):
            default = field.default_factory() if field.default_factory is not MISSING else field.default
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
        usual = cls(method, hints, with_default.read(entry.defaults))
        return usual if preset is None else cls(method, hints, usual.read(preset_values(method, preset)))

    @property
    def keys(self) -> list[str]:
        """The dotted names of all, those inside a group (such as ``local``) too."""
        return [key for name, hint in self.hints.items() for key in _keys(name, hint)]

    def read(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Arguments for the constructor: the defaults, with ``values`` (partial, nested) in their place, checked."""
        groups = {name: plain(one) for name, one in self.defaults.items() if dataclasses.is_dataclass(one)}
        values = merged({name: group for name, group in groups.items() if name in values}, values)
        for key, value in flattened(values).items():
            if key.rpartition(".")[2] == "lr" and isinstance(value, float) and not math.isfinite(value):
                finite = "a learning rate is a finite number, for example 0.1"
                raise UserError(f"{self.method}, {wrong_value(f'hyperparameters.{key}', value, finite)}")
        try:
            checked = self._table.model_validate(values)
        except ValidationError as error:
            raise UserError("; ".join(self._explained(error, values))) from error
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

    def _explained(self, error: ValidationError, values: Mapping[str, Any]) -> Iterator[str]:
        for path, value, problems in mistakes(error, values):
            key, kind = ".".join(path), problems[0]["type"]
            if kind in ("extra_forbidden", "unexpected_keyword_argument"):
                flag = flag_of(f"hyperparameters.{key}")
                advice = f"{flag}: leave it out; it has {listed(list(self.hints), 8)}" if flag else self._advice(key)
                yield f"{self.method} has no hyperparameter {key!r}{advice}"
            elif kind == "missing":
                yield f"{self.method} needs the hyperparameter {key!r}: give it with --set {key}=VALUE"
            elif kind == "value_error":  # from the group's own check, whose message may begin with a field's name
                reason = str(problems[0]["ctx"]["error"])
                field = f"{key}.{reason.partition(' = ')[0]}"
                flag = flag_of(f"hyperparameters.{field}")
                yield f"{self.method}, {key}" + (f".{reason}{flag}" if field in self.keys else f": {reason}")
            else:
                wanted = [problem["msg"] for problem in problems]
                yield f"{self.method}, {wrong_value(f'hyperparameters.{key}', value, *wanted)}"

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
        return nearest(unknown, keys if group else self.hints)


@cache  # pydantic takes milliseconds for each; a method in a file is found anew, since its file may change
def _known(method: str, preset: str | None) -> Hyperparameters:
    return Hyperparameters._found(method, preset)


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
        return check(_exchanged(value, NONE, None))
    except ValidationError as error:
        try:
            return check(value)
        except ValidationError:
            raise error from None


def plain(value: Any) -> Any:
    """Arguments as plain values that TOML can hold."""
    return _exchanged(to_jsonable_python(value), None, NONE)


def _exchanged(value: Any, old: str | None, new: str | None) -> Any:
    if isinstance(value, Mapping):
        return {key: _exchanged(each, old, new) for key, each in value.items()}
    if isinstance(value, list):
        return [_exchanged(each, old, new) for each in value]
    return new if isinstance(value, str | None) and value == old else value


def describe(method: str) -> dict[str, Any]:
    """A method's hyperparameters with their defaults, as a recipe spells them."""
    known = Hyperparameters.of(method)
    return {name: plain(known.defaults[name]) if name in known.defaults else "required" for name in known.hints}


def serving_unlabeled() -> list[str]:
    """The methods that, with their defaults, serve clients without labels."""

    def serves(name: str) -> bool:
        told = inspect.getattr_static(METHODS[name].make, "serves_unlabeled", False)
        of_defaults = SimpleNamespace(**Hyperparameters.of(name).defaults)
        return bool(told.__get__(of_defaults) if isinstance(told, property) else told)

    return [name for name in METHODS if serves(name)]
