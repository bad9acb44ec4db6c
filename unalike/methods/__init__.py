"""Methods: one paper, one file, both of its sides. ``METHODS`` is the table of those that go by a name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from unalike.methods.borrowed import Borrowed
from unalike.methods.fedavg import FedAvg
from unalike.methods.fedtta import FedTTA
from unalike.methods.flowdup import FLowDUP, LDFedAvg
from unalike.methods.local import Local
from unalike.methods.odpfl import ODPFL
from unalike.methods.pefll import PeFLL
from unalike.methods.pfedhn import PFedHN


@dataclass(frozen=True)
class Entry:
    """A named method. ``defaults`` (nested as in a recipe) are laid over those of the class."""

    make: type
    title: str
    paper: str
    summary: str
    defaults: Mapping[str, Any] = field(default_factory=dict)
    unlabeled: bool = False  # with these defaults it serves clients without labels


# One pass in batches of 10, as in McMahan et al.: equal work at a client in every method that trains the model there.
_PASS: dict[str, Any] = {"local": {"epochs": 1, "batch": 10, "lr": 0.1}}

METHODS: dict[str, Entry] = {
    "local": Entry(
        Local,
        "Local",
        "baseline",
        "every client trains alone, all with the same budget; no federation",
        _PASS,
    ),
    "fedavg": Entry(
        FedAvg,
        "FedAvg",
        "McMahan et al., AISTATS 2017",
        "one model for all: the mean of the clients' updates",
        _PASS,
        unlabeled=True,
    ),
    "fedprox": Entry(
        FedAvg,
        "FedProx",
        "Li et al., MLSys 2020",
        "FedAvg whose clients are held near the common model by μ/2·‖θ − θ_global‖²",
        {**_PASS, "mu": 0.1},
        unlabeled=True,
    ),
    "fedavg-finetune": Entry(
        FedAvg,
        "FedAvg + fine-tuning",
        "McMahan et al., AISTATS 2017",
        "FedAvg, then every client trains the common model a little further on its own labels",
        {**_PASS, "finetune": {"steps": 50, "batch": 10, "lr": 0.1}},
    ),
    "pefll": Entry(
        PeFLL,
        "PeFLL",
        "Scott et al., ICLR 2024",
        "a hypernetwork makes any client's model from a descriptor of its data",
    ),
    "pefll-unlabeled": Entry(
        PeFLL,
        "PeFLL, unlabeled",
        "Scott et al., ICLR 2024",
        "PeFLL whose descriptors use no labels, so that unlabeled clients are served too",
        {"labels": "ignored"},
        unlabeled=True,
    ),
    "pfedhn": Entry(
        PFedHN,
        "pFedHN",
        "Shamsian et al., ICML 2021",
        "a hypernetwork with a learned descriptor for every client; a newcomer's is optimised over rounds",
    ),
    "odpfl": Entry(
        ODPFL,
        "ODPFL-HN",
        "Amosy, Eyal and Chechik, 2022",
        "a set encoder and a hypernetwork give unlabeled newcomers a model",
        unlabeled=True,
    ),
    "pfl-sampled": Entry(
        Borrowed,
        "PFL-sampled",
        "Amosy, Eyal and Chechik, 2022",
        "pFedHN; a newcomer borrows the model of a training client drawn at random",
        {"choice": "sampled"},
        unlabeled=True,
    ),
    "pfl-nearest": Entry(
        Borrowed,
        "PFL-nearest",
        "Amosy, Eyal and Chechik, 2022",
        "pFedHN; a newcomer borrows the model of the training client with the most similar inputs",
        {"choice": "nearest"},
        unlabeled=True,
    ),
    "pfl-ensemble": Entry(
        Borrowed,
        "PFL-ensemble",
        "Amosy, Eyal and Chechik, 2022",
        "pFedHN; everybody gets the mean output of all training clients' models",
        {"choice": "ensemble"},
        unlabeled=True,
    ),
    "flowdup": Entry(
        FLowDUP,
        "FLowDUP",
        "Scott, 2026, chapter 5",
        "a small hypernetwork at the client makes its model, in a random subspace, from unlabeled data",
        unlabeled=True,
    ),
    "ld-fedavg": Entry(
        LDFedAvg,
        "LD-FedAvg",
        "Scott, 2026, chapter 5",
        "FedAvg in the random subspace that FLowDUP uses",
        unlabeled=True,
    ),
    "fedtta": Entry(
        FedTTA,
        "FedTTA",
        "Ye et al., SDM 2024",
        "a common model that takes one learned step on a client's unlabeled data",
        unlabeled=True,
    ),
}
