"""Names with options in one string, as they are typed on a command line: ``dirichlet:0.1,min_partition_size=5``."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from difflib import get_close_matches
from types import NoneType
from typing import Any, get_args, get_origin, get_type_hints

from unalike.core.notes import did_you_mean
from unalike.data.source import DataError


def parse(text: str) -> tuple[str, list[Any], dict[str, Any]]:
    """Split ``name:value,key=value`` into its name, its plain values and its named ones (numbers become numbers)."""
    name, _, rest = text.partition(":")
    values: list[Any] = []
    named: dict[str, Any] = {}
    for item in rest.split(",") if rest else []:
        key, equals, value = item.partition("=")
        if not item or (equals and not key):
            raise DataError(f"cannot read {text!r}: expected name:value,key=value")
        if equals:
            named[key.strip()] = literal(value)
        else:
            values.append(literal(key))
    return name.strip(), values, named


def literal(text: str) -> Any:
    """A number, true, false or none if the text reads like one; ``0+90+180`` is a list; else the text itself."""
    text = text.strip()
    words = {"true": True, "false": False, "none": None}
    if text.lower() in words:
        return words[text.lower()]
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            pass
    pieces = text.split("+")
    if len(pieces) > 1 and all(isinstance(literal(piece), int | float) for piece in pieces):
        return [literal(piece) for piece in pieces]
    return text


def written(name: str, named: Mapping[str, Any]) -> str:
    """The inverse of ``parse``, all values with their names."""
    return name + "".join(f"{',' if i else ':'}{key}={_word(value)}" for i, (key, value) in enumerate(named.items()))


def _word(value: Any) -> str:
    if isinstance(value, list | tuple):
        return "+".join(map(_word, value))
    return str(value).lower() if value is None or isinstance(value, bool) else str(value)


def options(function: Callable[..., Any], *, hidden: int = 0) -> dict[str, inspect.Parameter]:
    """The options of a partition or source: its parameters after the first ``hidden`` ones."""
    return dict(list(inspect.signature(function).parameters.items())[hidden:])


def bind(
    what: str, function: Callable[..., Any], values: list[Any], named: Mapping[str, Any], hidden: int
) -> dict[str, Any]:
    """Match typed values to the function's options, in order; complain about one that does not exist or fit."""
    known = options(function, hidden=hidden)
    if len(values) > len(known):
        raise DataError(f"{what} takes at most {len(known)} values ({', '.join(known) or 'none'}), got {values}")
    bound = dict(zip(known, values, strict=False))
    for key, value in named.items():
        if key not in known:
            near = get_close_matches(key, known, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise DataError(f"{what} has no option {key!r}; it has {', '.join(known) or 'none'}{hint}")
        if key in bound:
            raise DataError(f"{what}: option {key!r} is given twice")
        bound[key] = value
    lacking = [key for key, option in known.items() if option.default is option.empty and key not in bound]
    if lacking:
        raise DataError(f"{what} needs {lacking[0]!r}")
    hints = get_type_hints(function)
    for key, value in bound.items():
        if not _fits(value, hints[key]):
            raise DataError(f"{key} must be {_kind(hints[key])}, got {value!r}")
    return bound


_KINDS = {bool: "true or false", int: "a whole number", float: "a number", NoneType: "none"}


def _fits(value: Any, hint: Any) -> bool:
    """Is it a number where a number belongs? Words are left to the function: it knows which ones there are."""
    if hint in _KINDS:
        allowed = (int, float) if hint is float else hint
        return isinstance(value, allowed) and isinstance(value, bool) == (hint is bool)
    if get_origin(hint) is Sequence:
        return all(_fits(each, get_args(hint)[0]) for each in (value if isinstance(value, list | tuple) else [value]))
    kinds = get_args(hint)
    return not set(kinds) & set(_KINDS) or any(_fits(value, kind) for kind in kinds)


def _kind(hint: Any) -> str:
    if get_origin(hint) is Sequence:
        return f"{_KINDS[get_args(hint)[0]]} for each, as in 0+90"
    return _KINDS[hint] if hint in _KINDS else " or ".join(map(_kind, get_args(hint)))


def unknown(what: str, name: str, known: list[str], extra: str = "") -> DataError:
    """The error for a name that is not in a list, with the nearest one that is."""
    return DataError(f"no {what} is called {name!r}{did_you_mean(name, known)}{extra}")
