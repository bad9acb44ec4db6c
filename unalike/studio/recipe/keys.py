"""Short names for the keys of a recipe, and the flags that set them."""

from __future__ import annotations

# short name -> key of the recipe
KEYS = {
    "title": "title",
    "data": "data.name",
    "partition": "data.partition",
    "clients": "data.clients",
    "samples": "data.samples",
    "min_samples": "data.min_samples",
    "test": "data.test",
    "validation": "data.validation",
    "unseen": "data.unseen",
    "labeled": "data.labeled",
    "rotate": "data.rotate",
    "client_column": "data.options.client_column",
    "label_column": "data.options.label_column",
    "model": "model.name",
    "rounds": "rounds",
    "seed": "seed",
    "seeds": "seeds",
    "eval_every": "eval_every",
    "checkpoint_every": "checkpoint_every",
    "cohort": "hyperparameters.cohort",
    "local_epochs": "hyperparameters.local.epochs",
    "local_steps": "hyperparameters.local.steps",
    "batch": "hyperparameters.local.batch",
    "lr": "hyperparameters.local.lr",
    "epsilon": "privacy.epsilon",
    "delta": "privacy.delta",
    "noise_multiplier": "privacy.noise_multiplier",
    "clip": "privacy.clip",
    "unit": "privacy.unit",
    "block": "runtime.block",
    "threads": "runtime.threads",
    "drop": "runtime.drop",
}
# An option of a partition that has a flag of its own: the partition it implies, and the option's name there.
PARTITION_OPTIONS = {"alpha": ("dirichlet", "alpha"), "classes": ("pathological", "num_classes_per_partition")}

WITHOUT_FLAG = ("title", "min_samples", "test", "validation", "rotate", "drop")  # on the command line: --set
FLAGS = {key: "--" + name.replace("_", "-") for name, key in KEYS.items() if name not in WITHOUT_FLAG}


def flag_of(key: str) -> str:
    """For an error message: the flag that sets a dotted key (or what it is a part of) in brackets, or nothing."""
    parts = key.split(".")
    above = [".".join(parts[:count]) for count in range(len(parts), 0, -1)]
    return next((f" ({FLAGS[one]})" for one in above if one in FLAGS), "")
