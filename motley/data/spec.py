"""Names with options in one string, as they are typed on a command line: ``dirichlet:0.1,min_partition_size=5``."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from difflib import get_close_matches
from typing import Any

from motley.data.source import DataError


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


def options(function: Callable[..., Any], *, hidden: int = 0) -> dict[str, inspect.Parameter]:
    """The options of a partition or source: its parameters after the first ``hidden`` ones."""
    return dict(list(inspect.signature(function).parameters.items())[hidden:])


def bind(
    what: str, function: Callable[..., Any], values: list[Any], named: Mapping[str, Any], hidden: int
) -> dict[str, Any]:
    """Match typed values to the function's options, in order; complain about one that does not exist."""
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
    return bound


def unknown(what: str, name: str, known: list[str], extra: str = "") -> DataError:
    """The error for a name that is not in a list, with the nearest one that is."""
    near = get_close_matches(name, known, n=1, cutoff=0.5)
    hint = f" Did you mean {near[0]!r}?" if near else ""
    return DataError(f"no {what} is called {name!r}.{hint} Known: {', '.join(known)}.{extra}")
