"""Settings as bytes: dataclasses of Unalike by name and field, with arrays and plain values in them; no code travels.

The other side builds the same thing with its own installed classes, which check what they are given.
"""

from __future__ import annotations

import dataclasses
import importlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from torch import Tensor

from unalike.core import wire
from unalike.data.source import Names

_HOME = "unalike."


def encoded(thing: object) -> bytes:
    """Dataclasses of Unalike whose fields are plain values, arrays, or others like them."""
    arrays: dict[str, Tensor] = {}
    return wire.encode({"plain": json.dumps(_taken_apart(thing, arrays)), **arrays})


def _taken_apart(thing: Any, arrays: dict[str, Tensor]) -> Any:
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
        return {"tuple": [_taken_apart(one, arrays) for one in thing]}
    if isinstance(thing, Mapping):
        return {"mapping": [[_taken_apart(one, arrays) for one in pair] for pair in thing.items()]}
    if isinstance(thing, Sequence):
        return [_taken_apart(one, arrays) for one in thing]
    kind = type(thing)
    if not dataclasses.is_dataclass(thing) or not kind.__module__.startswith(_HOME):
        raise TypeError(f"a {kind.__name__} cannot be described to a worker: expected plain values and arrays")
    fields = {one.name: _taken_apart(getattr(thing, one.name), arrays) for one in dataclasses.fields(kind) if one.init}
    return {"kind": f"{kind.__module__}:{kind.__qualname__}", "fields": fields}


def decoded(data: bytes) -> Any:
    """What ``encoded`` was given; ``WireError`` where the bytes name anything but a dataclass of Unalike."""
    message = wire.decode(data)
    return _put_together(json.loads(str(message["plain"])), message)


def _put_together(told: Any, message: Mapping[str, Any]) -> Any:
    if isinstance(told, list):
        return [_put_together(one, message) for one in told]
    if not isinstance(told, dict):
        return told
    if "array" in told:
        return message[f"array.{told['array']}"]
    if "names" in told:
        return Names(np.array(told["names"], dtype=str))
    if "tuple" in told:
        return tuple(_put_together(one, message) for one in told["tuple"])
    if "mapping" in told:
        return {_put_together(key, message): _put_together(value, message) for key, value in told["mapping"]}
    module, _, name = str(told["kind"]).partition(":")
    kind = getattr(importlib.import_module(module), name, None) if module.startswith(_HOME) else None
    if not isinstance(kind, type) or not dataclasses.is_dataclass(kind):
        raise wire.WireError(f"{told['kind']!r} is no dataclass of Unalike, so nothing is made of it")
    return kind(**{name: _put_together(value, message) for name, value in told["fields"].items()})
