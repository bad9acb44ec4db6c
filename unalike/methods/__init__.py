"""Methods: one paper, one file, both of its sides. ``METHODS`` is the table of those that go by a name.

The papers that docstrings cite as T1, T2, P1, P2 and P3 are listed in ``docs/sources.md``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from unalike.methods.adaped import AdaPeD
from unalike.methods.borrowed import Borrowed
from unalike.methods.fedavg import FedAvg
from unalike.methods.fedem import FedEM
from unalike.methods.fedma import FedMA
from unalike.methods.fedrep import FedRep
from unalike.methods.fedtta import FedTTA
from unalike.methods.flowdup import FLowDUP, LDFedAvg
from unalike.methods.fml import FML
from unalike.methods.knnper import KNNPer
from unalike.methods.local import Local
from unalike.methods.mr_mtl import MRMTL
from unalike.methods.odpfl import ODPFL
from unalike.methods.pefll import PeFLL
from unalike.methods.perfedavg import PerFedAvg
from unalike.methods.pfedhn import PFedHN
from unalike.methods.pfedme import PFedMe
from unalike.methods.prior import LearnedPrior
from unalike.methods.quped import QuPeD
from unalike.methods.rdpcfl import RDPCFL
from unalike.methods.robust_hdp import RobustHDP
from unalike.methods.splitting import Splitting


@dataclass(frozen=True)
class Entry:
    """A named method. ``defaults`` (nested as in a recipe) are laid over those of the class."""

    make: type
    title: str
    paper: str
    summary: str
    defaults: Mapping[str, Any] = field(default_factory=dict)
    preset: Mapping[str, Any] | None = None  # --preset paper: laid over the defaults; {}: these are the paper's


# One pass in batches of 10, as in McMahan et al.: equal work at a client in every method that trains the model there.
_PASS: dict[str, Any] = {"local": {"epochs": 1, "batch": 10, "lr": 0.1}}

# T1 §4.4: batches of 32, momentum 0.9, five clients a round. Its rates were searched for and are not told.
_T1_STEPS: dict[str, Any] = {"batch": 32, "lr": 0.01, "momentum": 0.9}
_T1_PASS: dict[str, Any] = {"cohort": 5, "local": {"epochs": 1, **_T1_STEPS}}

_FEDREP_STEPS: dict[str, Any] = {"batch": 10, "lr": 0.01, "momentum": 0.5}  # of the authors' code

_PEFLL_PAPER: dict[str, Any] = {  # T1 §4.4, B.1.2, Table B.3, (B.54); the bound on a client's gradient: authors' code
    "layers": 4,
    "initial": "pytorch",
    "steady": 1,
    "describe_share": 1.0,
    "newcomer_rows": 32,
    "decay": "clients",
    "server": {"warmup": 1},
    "local": {"weight_decay": 0.0, "clip": 50.0},
}
_PFEDHN_PAPER: dict[str, Any] = {  # the defaults of the authors' code
    "layers": 4,
    "initial": "pytorch",
    "server": {"kind": "momentum", "lr": 1e-2, "beta1": 0.9, "warmup": 1},
    "descriptor_lr": 1e-2,
    "lambda_h": 0.0,
    "weight_decay": 1e-3,
    "local": {"steps": 50, "epochs": "none", "batch": 64, "lr": 5e-3, "momentum": 0.9, "clip": 50.0},
}
_ODPFL_PAPER: dict[str, Any] = {  # P2 Alg. 1 and App. C, with pFedHN's values where it names a grid
    **_PFEDHN_PAPER,
    "cohort": 0.1,
    "layers": 3,
    "encoder": "deepset-once",
    "encoder_lr": 1e-2,
    "lambda_g": 0.0,
    "calibration": 0,
    "local": {**_PFEDHN_PAPER["local"], "steps": "none", "epochs": 5, "weight_decay": 1e-4},
}
_BORROWED_PAPER: dict[str, Any] = {**_PFEDHN_PAPER, "cohort": 0.1}

_SPLITTING_VIEW = "Malekmohammadi et al., 2021"

METHODS: dict[str, Entry] = {
    "local": Entry(
        Local,
        "Local",
        "baseline",
        "every client trains alone, all with the same budget; no federation",
        _PASS,
        preset={"local": {"epochs": 1, **_T1_STEPS}, "calls": 200},
    ),
    "fedavg": Entry(
        FedAvg,
        "FedAvg",
        "McMahan et al., AISTATS 2017",
        "one model for all: the mean of the clients' updates",
        _PASS,
        preset=_T1_PASS,
    ),
    "fedprox": Entry(
        Splitting,
        "FedProx",
        "Li et al., MLSys 2020",
        "FedAvg whose clients are held near the common model by μ/2·‖θ − θ_global‖²",
        {**_PASS, "absentees": "left-out"},
    ),
    "fedsplit": Entry(
        Splitting,
        "FedSplit",
        "Pathak and Wainwright, NeurIPS 2020",
        "Peaceman-Rachford splitting: clients keep corrections, so that the mean model is the best one for all",
        {**_PASS, "alpha": 2.0, "beta": 2.0},
    ),
    "fedpi": Entry(
        Splitting,
        "FedPi",
        _SPLITTING_VIEW,
        "Douglas-Rachford splitting: half of each step of FedSplit, slower and steadier",
        {**_PASS, "alpha": 2.0, "beta": 2.0, "gamma": 0.5},
    ),
    "fedrp": Entry(
        Splitting,
        "FedRP",
        _SPLITTING_VIEW,
        "reflection-projection splitting: ends where FedProx does, in half of the rounds",
        {**_PASS, "alpha": 2.0},
    ),
    "splitting": Entry(
        Splitting,
        "Splitting",
        _SPLITTING_VIEW,
        "the scheme of the four above, for any alpha, beta and gamma",
        _PASS,
    ),
    "fedavg-finetune": Entry(
        FedAvg,
        "FedAvg + fine-tuning",
        "McMahan et al., AISTATS 2017",
        "FedAvg, then every client trains the common model a little further on its own labels",
        {**_PASS, "finetune": {"steps": 50, "batch": 10, "lr": 0.1}},
    ),
    "perfedavg": Entry(
        PerFedAvg,
        "Per-FedAvg",
        "Fallah et al., NeurIPS 2020",
        "a common model from which one gradient step on its own labels gives every client a good one",
        {"local": {**_PASS["local"], "steps": None}, "alpha": 0.1},
        preset={"local": {"epochs": "none", "steps": 20, "batch": 20, "lr": 0.001}, "alpha": 0.02},
    ),
    "fedrep": Entry(
        FedRep,
        "FedRep",
        "Collins et al., ICML 2021",
        "one representation for all, and a last layer of its own for each client",
        {
            **_PASS,
            "local_head": {"epochs": 5, "batch": 10, "lr": 0.1},
            "newcomer": {"epochs": 20, "batch": 10, "lr": 0.1},
        },
        preset={
            "local": {"epochs": 1, **_FEDREP_STEPS},
            "local_head": {"epochs": 10, **_FEDREP_STEPS},
            "newcomer": {"epochs": 20, **_FEDREP_STEPS},
        },
    ),
    "pfedme": Entry(
        PFedMe,
        "pFedMe",
        "Dinh et al., NeurIPS 2020",
        "personal models that are held near a common one, which follows them",
        {"personal": {"epochs": 20, "batch": 10, "lr": 0.05}},
        preset={"personal": {"epochs": 20, "batch": 20, "lr": 0.1}},
    ),
    "knnper": Entry(
        KNNPer,
        "kNN-Per",
        "Marfoq et al., ICML 2022",
        "FedAvg, mixed at each client with the nearest of its own labeled samples",
        _PASS,
        preset={"local": {"epochs": 1, "batch": 128, "lr": 0.05}, "neighbours": list(range(1, 11))},
    ),
    "fedem": Entry(
        FedEM,
        "FedEM",
        "Marfoq et al., NeurIPS 2021",
        "a few common models, of which every client has its own mixture",
        _PASS,
        preset={"components": 3, "local": {"epochs": 1, "batch": 128, "lr": 0.03}},
    ),
    "fedma": Entry(
        FedMA,
        "FedMA",
        "Wang et al., ICLR 2020",
        "one model for all: layers are averaged after their neurons were matched",
        _PASS,
        preset={"local": {"epochs": 20, "batch": 64, "lr": 0.01}},
    ),
    "pefll": Entry(
        PeFLL,
        "PeFLL",
        "Scott et al., ICLR 2024",
        "a hypernetwork makes any client's model from a descriptor of its data",
        preset=_PEFLL_PAPER,
    ),
    "pefll-unlabeled": Entry(
        PeFLL,
        "PeFLL, unlabeled",
        "Scott et al., ICLR 2024",
        "PeFLL whose descriptors use no labels, so that unlabeled clients are served too",
        {"labels": "ignored"},
        preset=_PEFLL_PAPER,
    ),
    "pfedhn": Entry(
        PFedHN,
        "pFedHN",
        "Shamsian et al., ICML 2021",
        "a hypernetwork with a learned descriptor for every client; a newcomer's is optimised over rounds",
        preset=_PFEDHN_PAPER,
    ),
    "odpfl": Entry(
        ODPFL,
        "ODPFL-HN",
        "Amosy, Eyal and Chechik, 2022",
        "a set encoder and a hypernetwork give unlabeled newcomers a model",
        preset=_ODPFL_PAPER,
    ),
    "pfl-sampled": Entry(
        Borrowed,
        "PFL-sampled",
        "Amosy, Eyal and Chechik, 2022",
        "pFedHN; a newcomer borrows the model of a training client drawn at random",
        {"choice": "sampled"},
        preset=_BORROWED_PAPER,
    ),
    "pfl-nearest": Entry(
        Borrowed,
        "PFL-nearest",
        "Amosy, Eyal and Chechik, 2022",
        "pFedHN; a newcomer borrows the model of the training client with the most similar inputs",
        {"choice": "nearest"},
        preset=_BORROWED_PAPER,
    ),
    "pfl-ensemble": Entry(
        Borrowed,
        "PFL-ensemble",
        "Amosy, Eyal and Chechik, 2022",
        "pFedHN; everybody gets the mean output of all training clients' models",
        {"choice": "ensemble"},
        preset=_BORROWED_PAPER,
    ),
    "flowdup": Entry(
        FLowDUP,
        "FLowDUP",
        "Scott, 2026, chapter 5",
        "a small hypernetwork at the client makes its model, in a random subspace, from unlabeled data",
    ),
    "ld-fedavg": Entry(
        LDFedAvg,
        "LD-FedAvg",
        "Scott, 2026, chapter 5",
        "FedAvg in the random subspace that FLowDUP uses",
    ),
    "fedtta": Entry(
        FedTTA,
        "FedTTA",
        "Ye et al., SDM 2024",
        "a common model that takes one learned step on a client's unlabeled data",
    ),
    "adaped": Entry(
        AdaPeD,
        "AdaPeD",
        "Ozkara et al., 2022",
        "a model of its own for every client, taught by a common one as far as that helps",
        preset={},
    ),
    "adaped-continue": Entry(
        AdaPeD,
        "AdaPeD, continued",
        "Ozkara et al., 2022",
        "AdaPeD whose clients go on training while they are not sampled",
        {"train_unsampled": True},
        preset={},
    ),
    "quped": Entry(
        QuPeD,
        "QuPeD",
        "Ozkara et al., NeurIPS 2021",
        "a model of its own for every client, taught by a common one with a fixed weight; full precision",
        preset={},
    ),
    "fml": Entry(
        FML,
        "FML",
        "Shen et al., 2020",
        "a private model and a common one that teach each other at every client",
        preset={},
    ),
    "learned-prior": Entry(
        LearnedPrior,
        "Learned prior",
        "Ozkara et al., 2022",
        "personal models held together by a prior that is learned with them: Gaussian, Laplace or a mixture",
    ),
    "robust-hdp": Entry(
        RobustHDP,
        "Robust-HDP",
        "Malekmohammadi et al., 2024",
        "clients with noise of their own, each weighted by how little noise its update turns out to have",
        _PASS,
    ),
    "weiavg": Entry(
        RobustHDP,
        "WeiAvg",
        "Liu et al., VLDB 2022",
        "clients with noise of their own, weighted by the ε that each declares",
        {**_PASS, "weights": "epsilon"},
    ),
    "pfa": Entry(
        RobustHDP,
        "PFA",
        "Liu et al., VLDB 2022",
        "WeiAvg; updates of clients with a small ε are projected on the directions of the others",
        {**_PASS, "weights": "projected"},
    ),
    "dpfedavg": Entry(
        RobustHDP,
        "DPFedAvg",
        "Noble et al., AISTATS 2022",
        "clients with noise of their own, weighted by their numbers of samples",
        {**_PASS, "weights": "size"},
    ),
    "minimum-epsilon": Entry(
        RobustHDP,
        "minimum ε",
        "baseline",
        "DPFedAvg whose clients all have the noise for the smallest ε of all",
        {**_PASS, "weights": "size", "least_epsilon": True},
    ),
    "rdpcfl": Entry(
        RDPCFL,
        "R-DPCFL",
        "Malekmohammadi, chapter 4",
        "a model for each cluster of clients, found from noisy first updates of full batches",
        _PASS,
    ),
    "ifca": Entry(
        RDPCFL,
        "IFCA",
        "Ghosh et al., NeurIPS 2020",
        "a few models, of which every client selects the one that fits it, privately where there is an ε",
        {**_PASS, "clustering": "selection", "clusters": 3},
    ),
    "mr-mtl": Entry(
        MRMTL,
        "MR-MTL",
        "Liu et al., NeurIPS 2022",
        "a model of its own for every client, held near the mean of all",
        _PASS,
    ),
}
