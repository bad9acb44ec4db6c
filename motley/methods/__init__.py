"""Methods: one paper, one file, both of its sides. ``METHODS`` is the table of those that go by a name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from motley.methods.fedavg import FedAvg, Local


@dataclass(frozen=True)
class Entry:
    """A named method. ``defaults`` (nested as in a recipe) are laid over those of the class."""

    make: type
    title: str
    paper: str
    summary: str
    defaults: Mapping[str, Any] = field(default_factory=dict)


# One pass in batches of 10, as in McMahan et al.: the same work at a client in every method that trains the model there.
_PASS: dict[str, Any] = {"local": {"epochs": 1, "batch": 10, "lr": 0.1}}

METHODS: dict[str, Entry] = {
    "local": Entry(
        Local,
        "Local",
        "baseline",
        "every client trains alone; no federation",
        {**_PASS, "newcomer": {"epochs": 10, "batch": 10, "lr": 0.1}},
    ),
    "fedavg": Entry(
        FedAvg,
        "FedAvg",
        "McMahan et al., AISTATS 2017",
        "one model for all: the mean of the clients' updates",
        _PASS,
    ),
    "fedprox": Entry(
        FedAvg,
        "FedProx",
        "Li et al., MLSys 2020",
        "FedAvg whose clients are held near the common model by μ/2·‖θ − θ_global‖²",
        {**_PASS, "mu": 0.1},
    ),
    "fedavg-finetune": Entry(
        FedAvg,
        "FedAvg + fine-tuning",
        "McMahan et al., AISTATS 2017",
        "FedAvg, then every client trains the common model a little further on its own labels",
        {**_PASS, "finetune": {"epochs": 5, "batch": 10, "lr": 0.1}},
    ),
}
