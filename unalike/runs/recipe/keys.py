"""The names of settings: short names, the dotted keys of a recipe that they stand for, and the flags that set them.

The command line reads this table before anything else is loaded, so this module imports nothing heavy.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_SECTIONS = {
    "": "title rounds seed seeds preset eval_every checkpoint_every metric select",
    "data.": "partition clients samples min_samples test validation unseen labeled rotate normalize schema "
    "class_weights",
    "data.options.": "client_column label_column id_column weight_column features categorical indicator task missing "
    "na_values decimal delimiter",
    "hyperparameters.": "cohort",
    "hyperparameters.local.": "batch lr",
    "privacy.": "epsilon epsilons delta noise_multiplier clip unit trust accept_delta total_epsilon",
    "runtime.": "block threads device drop workers address network deadline",
}
# short name -> key of the recipe
KEYS = {name: section + name for section, names in _SECTIONS.items() for name in names.split()} | {
    "data": "data.name",
    "drop_columns": "data.options.drop",
    "class_names": "data.options.classes",
    "model": "model.name",
    "adapter": "model.trainable",
    "runtime": "runtime.name",
    "local_epochs": "hyperparameters.local.epochs",
    "local_steps": "hyperparameters.local.steps",
    "simulate_noise": "privacy.noise",
}
# An option of a partition that has a flag of its own: the partition it implies, and the option's name there.
PARTITION_OPTIONS = {"alpha": ("dirichlet", "alpha"), "classes": ("pathological", "num_classes_per_partition")}

# on the command line: --set
WITHOUT_FLAG = ("title", "min_samples", "test", "rotate", "normalize", "schema", "drop")
FLAGS = {key: "--" + name.replace("_", "-") for name, key in KEYS.items() if name not in WITHOUT_FLAG}
FLAGS["data.options.drop"] = "--drop"
_OF_COMMANDS = {name: f"--{name}" for name in ("out", "plot", "table", "track", "cut-noise")}  # of no recipe


def flag_of(key: str) -> str:
    """For an error message: the flag that sets a dotted key (or what it is a part of) in brackets, or nothing."""
    parts = key.split(".")
    above = [".".join(parts[:count]) for count in range(len(parts), 0, -1)]
    otherwise = f" (--set {key}=…)" if key.startswith("data.options.") else ""
    known = FLAGS | _OF_COMMANDS
    return next((f" ({known[one]})" for one in above if one in known), otherwise)


def nest(flat: Mapping[str, Any]) -> dict[str, Any]:
    """Values by dotted key as tables: ``{"local.lr": 0.1}`` is ``{"local": {"lr": 0.1}}``."""
    tables: dict[str, Any] = {}
    for key, value in flat.items():
        for part in reversed(key.split(".")):
            value = {part: value}
        tables = merge(tables, value)
    return tables


def flatten(tables: Mapping[str, Any], path: str = "") -> dict[str, Any]:
    """The inverse of ``nest``."""
    flat: dict[str, Any] = {}
    for name, value in tables.items():
        inner = isinstance(value, Mapping) and value
        flat |= flatten(value, f"{path}{name}.") if inner else {path + name: value}
    return flat


def merge(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """``base`` with the values of ``over`` in their place, table by table."""
    result = dict(base)
    for key, value in over.items():
        below = result.get(key)
        result[key] = merge(below, value) if isinstance(below, Mapping) and isinstance(value, Mapping) else value
    return result
