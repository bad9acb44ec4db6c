"""The names of settings: short names, the dotted keys of a recipe that they stand for, and the flags that set them.

The command line reads this table before anything else is loaded, so this module imports nothing heavy.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_SECTIONS = {
    "": ("title", "rounds", "seed", "seeds", "preset", "eval_every", "checkpoint_every"),
    "data.": (
        *("partition", "clients", "samples", "min_samples", "test", "validation", "unseen", "labeled", "rotate"),
        *("normalize", "schema"),
    ),
    "data.options.": ("client_column", "label_column"),
    "hyperparameters.": ("cohort",),
    "hyperparameters.local.": ("batch", "lr"),
    "privacy.": ("epsilon", "epsilons", "delta", "noise_multiplier", "clip", "unit", "trust", "accept_delta"),
    "runtime.": ("block", "threads", "device", "drop", "workers", "address", "deadline"),
}
# short name -> key of the recipe
KEYS = {name: section + name for section, names in _SECTIONS.items() for name in names} | {
    "data": "data.name",
    "model": "model.name",
    "runtime": "runtime.name",
    "local_epochs": "hyperparameters.local.epochs",
    "local_steps": "hyperparameters.local.steps",
    "simulate_noise": "privacy.noise",
}
# An option of a partition that has a flag of its own: the partition it implies, and the option's name there.
PARTITION_OPTIONS = {"alpha": ("dirichlet", "alpha"), "classes": ("pathological", "num_classes_per_partition")}

# on the command line: --set
WITHOUT_FLAG = ("title", "min_samples", "test", "validation", "rotate", "normalize", "schema", "drop")
FLAGS = {key: "--" + name.replace("_", "-") for name, key in KEYS.items() if name not in WITHOUT_FLAG}


def flag_of(key: str) -> str:
    """For an error message: the flag that sets a dotted key (or what it is a part of) in brackets, or nothing."""
    parts = key.split(".")
    above = [".".join(parts[:count]) for count in range(len(parts), 0, -1)]
    return next((f" ({FLAGS[one]})" for one in above if one in FLAGS), "")


def nested(flat: Mapping[str, Any]) -> dict[str, Any]:
    """Values by dotted key as tables: ``{"local.lr": 0.1}`` is ``{"local": {"lr": 0.1}}``."""
    tables: dict[str, Any] = {}
    for key, value in flat.items():
        for part in reversed(key.split(".")):
            value = {part: value}
        tables = merged(tables, value)
    return tables


def flattened(tables: Mapping[str, Any], path: str = "") -> dict[str, Any]:
    """The inverse of ``nested``."""
    flat: dict[str, Any] = {}
    for name, value in tables.items():
        inner = isinstance(value, Mapping) and value
        flat |= flattened(value, f"{path}{name}.") if inner else {path + name: value}
    return flat


def merged(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """``base`` with the values of ``over`` in their place, table by table."""
    result = dict(base)
    for key, value in over.items():
        below = result.get(key)
        result[key] = merged(below, value) if isinstance(below, Mapping) and isinstance(value, Mapping) else value
    return result
