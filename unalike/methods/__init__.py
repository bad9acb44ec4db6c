"""Methods: one paper, one file, both of its sides. ``METHODS`` is the table of those that have a name.

The papers that docstrings cite as T1, T2, P1, P2 and P3 are listed in ``docs/sources.md``. The table imports no method,
so that a list of methods does not wait for PyTorch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib.metadata import entry_points
from typing import Any

from unalike.core import outside

# Hyperparameters by the name of a preset, nested as in a recipe: a class's ``presets``, laid over its defaults.
Presets = Mapping[str, Mapping[str, Any]]
PRESETS = {
    "paper": "the settings of the method's paper",
    "ozkara2022": "those of Ozkara et al., 2022, for the methods that AdaPeD is compared with",
}


def ozkara2022(rate: float = 0.1, **own: Any) -> dict[str, Any]:
    """What Ozkara et al. (P3 §4.1) take for every method: 10 local steps a round, 6 rounds an epoch, falling rates."""
    local = {"epochs": 1, "steps": 10, "batch": 1 / 60, "lr": rate, "momentum": 0.0, "weight_decay": 1e-4}
    return {"local": local, "schedule": {"kind": "exponential", "decay": 0.99, "period": 6}, **own}


@dataclass(frozen=True)
class NamedMethod:
    """A row of the table: a class, and the values that make the variant of it which has this name."""

    path: str  # package.module:Class, or file.py:Class
    title: str
    paper: str
    summary: str
    variant: Mapping[str, Any] = field(default_factory=dict)  # nested as in a recipe; the class has all other defaults

    @property
    def cls(self) -> type:
        """The method's class; its module is imported now."""
        found = outside.load(self.path)
        assert isinstance(found, type)
        return found

    @property
    def presets(self) -> Presets:
        """What a class has under ``presets``: "paper" for the settings of its paper."""
        presets: Presets = getattr(self.cls, "presets", {})
        return presets


_SUMMARIES = {
    "local": "every client trains alone, all with the same budget; no federation",
    "fedavg": "one model for all: the mean of the clients' updates",
    "fedprox": "FedAvg whose clients are held near the common model by μ/2·‖θ − θ_global‖²",
    "fedsplit": "Peaceman-Rachford splitting: clients keep corrections, so that the mean model is the best one for all",
    "fedpi": "Douglas-Rachford splitting: half of each step of FedSplit, slower and steadier",
    "fedrp": "reflection-projection splitting: ends where FedProx does, in half of the rounds",
    "splitting": "the scheme of the four above, for any alpha, beta and gamma",
    "fedavg-finetune": "FedAvg, then every client trains the common model a little further on its own labels",
    "perfedavg": "a common model from which one gradient step on its own labels gives every client a good one",
    "fedrep": "one representation for all, and a last layer of its own for each client",
    "pfedme": "personal models that are held near a common one, which follows them",
    "knnper": "FedAvg, mixed at each client with the nearest of its own labeled samples",
    "fedem": "a few common models, of which every client has its own mixture",
    "fedma": "one model for all: layers are averaged after their neurons were matched",
    "pefll": "a hypernetwork makes any client's model from a descriptor of its data",
    "pefll-unlabeled": "PeFLL whose descriptors use no labels, so that unlabeled clients are served too",
    "pfedhn": "a hypernetwork with a learned descriptor for every client; a newcomer's is optimised over rounds",
    "odpfl": "a set encoder and a hypernetwork give unlabeled newcomers a model",
    "pfl-sampled": "pFedHN; a newcomer borrows the model of a training client drawn at random",
    "pfl-nearest": "pFedHN; a newcomer borrows the model of the training client with the most similar inputs",
    "pfl-ensemble": "pFedHN; everybody gets the mean output of all training clients' models",
    "flowdup": "a small hypernetwork at the client makes its model, in a random subspace, from unlabeled data",
    "ld-fedavg": "FedAvg in the random subspace that FLowDUP uses",
    "fedtta": "a common model that takes one learned step on a client's unlabeled data",
    "adaped": "a model of its own for every client, taught by a common one as far as that helps",
    "adaped-continue": "AdaPeD whose clients go on training while they are not sampled",
    "quped": "a model of its own for every client, taught by a common one with a fixed weight; full precision",
    "fml": "a private model and a common one that teach each other at every client",
    "learned-prior": "personal models held together by a prior learned with them: Gaussian, Laplace or a mixture",
    "robust-hdp": "clients with noise of their own, each weighted by how little noise its update turns out to have",
    "weiavg": "clients with noise of their own, weighted by the ε that each declares",
    "pfa": "WeiAvg; updates of clients with a small ε are projected on the directions of the others",
    "dpfedavg": "clients with noise of their own, weighted by their numbers of samples",
    "minimum-epsilon": "DPFedAvg whose clients all have the noise for the smallest ε of all",
    "rdpcfl": "a model for each cluster of clients, found from noisy first updates of full batches",
    "ifca": "a few models, of which every client selects the one that fits it, privately where there is an ε",
    "mr-mtl": "a model of its own for every client, held near the mean of all",
}


def _row(name: str, where: str, title: str, paper: str, **variant: Any) -> tuple[str, NamedMethod]:
    return name, NamedMethod(f"unalike.methods.{where}", title, paper, _SUMMARIES[name], variant)


METHODS: dict[str, NamedMethod] = dict(
    [
        _row("local", "local:Local", "Local", "baseline"),
        _row("fedavg", "fedavg:FedAvg", "FedAvg", "McMahan et al., AISTATS 2017"),
        _row("fedprox", "splitting:Splitting", "FedProx", "Li et al., MLSys 2020", absentees="left-out"),
        _row("fedsplit", "splitting:Splitting", "FedSplit", "Pathak and Wainwright, NeurIPS 2020", alpha=2.0, beta=2.0),
        _row("fedpi", "splitting:Splitting", "FedPi", "Malekmohammadi et al., 2021", alpha=2.0, beta=2.0, gamma=0.5),
        _row("fedrp", "splitting:Splitting", "FedRP", "Malekmohammadi et al., 2021", alpha=2.0),
        _row("splitting", "splitting:Splitting", "Splitting", "Malekmohammadi et al., 2021"),
        _row(
            "fedavg-finetune",
            "fedavg:FedAvg",
            "FedAvg + fine-tuning",
            "McMahan et al., AISTATS 2017",
            finetune={"steps": 50, "batch": 10, "lr": 0.1},
        ),
        _row("perfedavg", "perfedavg:PerFedAvg", "Per-FedAvg", "Fallah et al., NeurIPS 2020"),
        _row("fedrep", "fedrep:FedRep", "FedRep", "Collins et al., ICML 2021"),
        _row("pfedme", "pfedme:PFedMe", "pFedMe", "Dinh et al., NeurIPS 2020"),
        _row("knnper", "knnper:KNNPer", "kNN-Per", "Marfoq et al., ICML 2022"),
        _row("fedem", "fedem:FedEM", "FedEM", "Marfoq et al., NeurIPS 2021"),
        _row("fedma", "fedma:FedMA", "FedMA", "Wang et al., ICLR 2020"),
        _row("pefll", "pefll:PeFLL", "PeFLL", "Scott et al., ICLR 2024"),
        _row("pefll-unlabeled", "pefll:PeFLL", "PeFLL, unlabeled", "Scott et al., ICLR 2024", labels="ignored"),
        _row("pfedhn", "pfedhn:PFedHN", "pFedHN", "Shamsian et al., ICML 2021"),
        _row("odpfl", "odpfl:ODPFL", "ODPFL-HN", "Amosy, Eyal and Chechik, 2022"),
        _row("pfl-sampled", "borrowed:Borrowed", "PFL-sampled", "Amosy, Eyal and Chechik, 2022", choice="sampled"),
        _row("pfl-nearest", "borrowed:Borrowed", "PFL-nearest", "Amosy, Eyal and Chechik, 2022", choice="nearest"),
        _row("pfl-ensemble", "borrowed:Borrowed", "PFL-ensemble", "Amosy, Eyal and Chechik, 2022", choice="ensemble"),
        _row("flowdup", "flowdup:FLowDUP", "FLowDUP", "Scott, 2026, chapter 5"),
        _row("ld-fedavg", "ld_fedavg:LDFedAvg", "LD-FedAvg", "Scott, 2026, chapter 5"),
        _row("fedtta", "fedtta:FedTTA", "FedTTA", "Ye et al., SDM 2024"),
        _row("adaped", "adaped:AdaPeD", "AdaPeD", "Ozkara et al., 2022"),
        _row("adaped-continue", "adaped:AdaPeD", "AdaPeD, continued", "Ozkara et al., 2022", train_unsampled=True),
        _row("quped", "quped:QuPeD", "QuPeD", "Ozkara et al., NeurIPS 2021"),
        _row("fml", "fml:FML", "FML", "Shen et al., 2020"),
        _row("learned-prior", "prior:LearnedPrior", "Learned prior", "Ozkara et al., 2022"),
        _row("robust-hdp", "robust_hdp:RobustHDP", "Robust-HDP", "Malekmohammadi et al., 2024"),
        _row("weiavg", "robust_hdp:RobustHDP", "WeiAvg", "Liu et al., VLDB 2022", weights="epsilon"),
        _row("pfa", "robust_hdp:RobustHDP", "PFA", "Liu et al., VLDB 2022", weights="projected"),
        _row("dpfedavg", "robust_hdp:RobustHDP", "DPFedAvg", "Noble et al., AISTATS 2022", weights="size"),
        _row("minimum-epsilon", "robust_hdp:RobustHDP", "minimum ε", "baseline", weights="size", least_epsilon=True),
        _row("rdpcfl", "rdpcfl:RDPCFL", "R-DPCFL", "Malekmohammadi, chapter 4"),
        _row("ifca", "rdpcfl:RDPCFL", "IFCA", "Ghosh et al., NeurIPS 2020", clustering="selection", clusters=3),
        _row("mr-mtl", "mr_mtl:MRMTL", "MR-MTL", "Liu et al., NeurIPS 2022"),
    ]
)


@cache
def installed_methods() -> dict[str, NamedMethod]:
    """Methods of installed packages: entry points of the group ``unalike.methods`` (names of ``METHODS`` are taken)."""
    found = entry_points(group="unalike.methods")
    return {
        one.name: NamedMethod(one.value, one.name, paper=f"package {one.dist.name}" if one.dist else "", summary="")
        for one in found
        if one.name not in METHODS
    }


def by_name() -> dict[str, NamedMethod]:
    """All methods that have a name here: those of the table, and those of installed packages."""
    return METHODS | installed_methods()
