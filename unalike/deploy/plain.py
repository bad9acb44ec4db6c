"""Settings as bytes: dataclasses of Unalike by name and field, with arrays and plain values in them; no code travels.

The other side builds the same thing with its own installed classes, which check what they are given.
"""

from __future__ import annotations

import dataclasses
import importlib
import json
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np
from torch import Tensor

from unalike.core import wire
from unalike.data.source import Names

_HOME = "unalike."


def encode(thing: object) -> bytes:
    """Dataclasses of Unalike whose fields are plain values, arrays, or others like them."""
    arrays: dict[str, Tensor] = {}
    return wire.encode({"plain": json.dumps(_to_plain(thing, arrays)), **arrays})


def _to_plain(thing: Any, arrays: dict[str, Tensor]) -> Any:
    if thing is None or isinstance(thing, bool | int | float | str):
        return thing
    if isinstance(thing, np.generic):
        return thing.item()
    if isinstance(thing, Tensor):
        arrays[f"array.{len(arrays)}"] = thing
        return {"array": len(arrays) - 1}
    if isinstance(thing, Names):
        return {"names": list(thing)}
    if isinstance(thing, tuple):
        return {"tuple": [_to_plain(one, arrays) for one in thing]}
    if isinstance(thing, Mapping):
        return {"mapping": [[_to_plain(one, arrays) for one in pair] for pair in thing.items()]}
    if isinstance(thing, Sequence):
        return [_to_plain(one, arrays) for one in thing]
    kind = type(thing)
    if not dataclasses.is_dataclass(thing) or not kind.__module__.startswith(_HOME):
        raise TypeError(f"a {kind.__name__} cannot be described to a worker: expected plain values and arrays")
    fields = {one.name: _to_plain(getattr(thing, one.name), arrays) for one in dataclasses.fields(kind) if one.init}
    return {"kind": f"{kind.__module__}:{kind.__qualname__}", "fields": fields}


def decode(data: bytes, only: Collection[type] | None = None) -> Any:
    """What ``encode`` was given; ``WireError`` where the bytes name anything but a dataclass of Unalike.

    only: the classes that may be made, where whoever sent this is not trusted.
    """
    message = wire.decode(data)
    try:
        return _from_plain(json.loads(str(message["plain"])), message, only)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise wire.WireError(f"not a description of a thing: {type(error).__name__}: {error}") from error


def _from_plain(content: Any, message: Mapping[str, Any], only: Collection[type] | None) -> Any:
    if isinstance(content, list):
        return [_from_plain(one, message, only) for one in content]
    if not isinstance(content, dict):
        return content
    if "array" in content:
        return message[f"array.{content['array']}"]
    if "names" in content:
        return Names(np.array(content["names"], dtype=str))
    if "tuple" in content:
        return tuple(_from_plain(one, message, only) for one in content["tuple"])
    if "mapping" in content:
        return {_from_plain(key, message, only): _from_plain(value, message, only) for key, value in content["mapping"]}
    if only is not None and content["kind"] not in {f"{one.__module__}:{one.__qualname__}" for one in only}:
        raise wire.WireError(f"{content['kind']!r} is not expected here")
    module, _, name = str(content["kind"]).partition(":")
    kind = getattr(importlib.import_module(module), name, None) if module.startswith(_HOME) else None
    if not isinstance(kind, type) or not dataclasses.is_dataclass(kind):
        raise wire.WireError(f"{content['kind']!r} is no dataclass of Unalike, so nothing is made of it")
    return kind(**{name: _from_plain(value, message, only) for name, value in content["fields"].items()})
