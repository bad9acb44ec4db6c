"""The list of all tables and figures: those that can be computed, by group, and those that cannot yet or never."""

from __future__ import annotations

import re
from difflib import get_close_matches

from reproductions import adaped, clustering, estimation, hdp, mixture, on_demand, rdpcfl, simulated, splitting
from reproductions.item import Item, Planned, TwoCores
from unalike.runs.errors import UserError

DOCUMENTS = {
    "t1": "J. Scott, Data Heterogeneity and Personalization in Federated Learning (thesis, 2026)",
    "p1": "Scott, Zakerinia and Lampert, PeFLL: A Lifelong Learning Approach to Personalized Federated Learning",
    "t2": "S. Malekmohammadi's thesis: operator splitting (ch. 2), Robust-HDP (3), R-DPCFL (4)",
    "p2": "Amosy, Eyal and Chechik, On-Demand Unlabeled Personalized Federated Learning",
    "p3": "Ozkara, Girgis, Data and Diggavi, A Generative Framework for Personalized Learning and Estimation",
}
# a new group of items goes here
GROUPS: tuple[tuple[Item, ...], ...] = (
    adaped.ITEMS,
    clustering.ITEMS,
    estimation.ITEMS,
    hdp.ITEMS,
    mixture.ITEMS,
    on_demand.ITEMS,
    rdpcfl.ITEMS,
    simulated.ITEMS,
    splitting.ITEMS,
)

_LATER = "nothing computes it yet"
_DATA = "its data are not shipped with Unalike and cannot be downloaded by it"
_SCHEMATIC = "a drawing: there is nothing to compute"
_SETTINGS = "settings, no results: --data mdm:low-1 to mdm:high-3; how well they are found is in Figures 3.2, A.3, A.4"
_SWEEP = "CIFAR-10: FedAvg by batch, rate and local epochs on MDM and IID clients"
_LOST = "only its caption survives; the text and the numbers are lost"


def _by_hand(command: str) -> str:
    """A command draws it, unjudged."""
    return f"{_LATER}; by hand: `{command}`"


_UNCOMPUTED: tuple[tuple[TwoCores, str, dict[str, str]], ...] = (
    ("hours", _LATER, {
        "t1-table-5.1": "FLowDUP and others by the share of labeled clients, CIFAR-10",
        "t1-table-5.3": "FLowDUP by networks of client and embedding, CIFAR-10",
        "t1-table-5.4": "FLowDUP by the dimension k of the subspace, CIFAR-10",
        "t1-table-c.2": "FLowDUP on CIFAR-10 with a CNN",
        "t1-table-c.3": "FLowDUP on CIFAR-10 with ResNet18",
        "t1-table-c.4": "FLowDUP with and without learning the regularizer ψ_r, CIFAR-10",
        "t2-table-b.7": "Robust-HDP and others on MNIST, Dist1 to Dist9",
        "t2-table-b.8": "Robust-HDP and others on Fashion-MNIST, Dist1 to Dist9",
        "t2-table-b.9": "Robust-HDP and others on CIFAR-10, Dist1 to Dist9",
        "t2-table-b.10": "Robust-HDP and others on CIFAR-100, Dist1 to Dist9",
    }),
    ("yes", _by_hand("unalike run flowdup-rotated-mnist"), {
        "t1-table-5.2": "FLowDUP by the share of labeled clients, rotated Fashion-MNIST and FEMNIST",
        "t1-table-c.1": "FLowDUP by the share of labeled clients, rotated MNIST",
    }),
    ("yes", _SETTINGS, {
        "t1-table-a.1": "MDM: nine settings of A and τ",
    }),
    ("yes", _LATER, {
        "t1-table-b.4": "PeFLL with and without label mask",
        "t1-table-b.5": "PeFLL with small, medium and large hypernetworks",
        "t1-table-b.6": "PeFLL by regularization of client, hyper- and embedding network",
        "t1-table-b.7": "PeFLL with an MLP and a CNN as embedding network",
        "t1-figure-a.2": "Census: number of samples of a client",
        "t2-table-b.11": "Robust-HDP by privacy level: Figure 3.6, left, in numbers",
        "t2-table-b.12": "Robust-HDP by number of clients: Figure 3.6, middle, in numbers",
        "t2-table-b.13": "Robust-HDP with equal batches, unequal ε and unequal sizes, CIFAR-10",
        "t2-table-b.14": "Robust-HDP with unequal batches, equal ε and unequal sizes, CIFAR-10",
        "t2-table-b.15": "Robust-HDP with equal batches, equal ε and unequal sizes, CIFAR-10",
        "t2-table-b.16": "The same by spread over clients and by the smallest client, CIFAR-10",
        "t2-table-b.17": "Robust-HDP with at most 8 labels a client and unequal batches, MNIST, 60 clients",
    }),
    ("scaled", _LATER, {
        "t1-figure-3.5": "FEMNIST: FedAvg by rate and local epochs on true, conditionally IID, MDM and IID clients",
        "t1-figure-3.6": f"{_SWEEP}, high heterogeneity, 2 components",
        "t1-figure-4.1": "Rank correlation of descriptors over training",
        "t1-figure-a.8": "FEMNIST: FedAvg by rate and local epochs, with server data of other writers",
        "t1-figure-a.9": f"{_SWEEP}, low heterogeneity, 1 component",
        "t1-figure-a.10": f"{_SWEEP}, low heterogeneity, 2 components",
        "t1-figure-a.11": f"{_SWEEP}, low heterogeneity, 3 components",
        "t1-figure-a.12": f"{_SWEEP}, medium heterogeneity, 1 component",
        "t1-figure-a.13": f"{_SWEEP}, medium heterogeneity, 2 components",
        "t1-figure-a.14": f"{_SWEEP}, medium heterogeneity, 3 components",
        "t1-figure-a.15": f"{_SWEEP}, high heterogeneity, 1 component",
        "t1-figure-a.16": f"{_SWEEP}, high heterogeneity, 3 components",
        "t1-figure-b.2": "Shakespeare with an LSTM: accuracy by round, PeFLL and baselines",
        "t1-figure-b.3": "Shakespeare with an LSTM: accuracy by bytes, PeFLL and FedAvg",
        "t1-figure-b.4": "PeFLL and FedAvg with ResNet20, CIFAR-10",
        "t1-figure-b.12": "Rank correlation of descriptors over training, CIFAR-10, 100 clients",
        "t1-figure-b.13": "Rank correlation of descriptors over training, CIFAR-10, 500 clients",
        "t1-figure-b.14": "Rank correlation of descriptors over training, CIFAR-10, 1,000 clients",
        "p1-figure-3": "Rank correlation of descriptors over training, CIFAR-10",
        "p1-figure-4": "Newcomers of other Dirichlet α, CIFAR-10",
    }),
    ("yes", _by_hand("unalike analyse RUN"), {
        "t1-figure-b.1": "Newcomers of other Dirichlet α",
        "p2-figure-4": "ODPFL-HN: newcomers with blurred and rotated images, CIFAR-10",
        "p2-figure-5": "ODPFL-HN: private newcomers by number of samples, ε = 0.3",
        "p2-figure-6": "ODPFL-HN: private newcomers by number of samples and ε",
        "p2-figure-7": "ODPFL-HN: map of the embeddings, pathological CIFAR-10",
    }),
    ("yes", _by_hand("unalike report RUN RUN"), {
        "t1-figure-b.5": "PeFLL and FedAvg by rounds and bytes, CIFAR-10, 100 clients",
        "t1-figure-b.6": "PeFLL and FedAvg by rounds and bytes, CIFAR-10, 500 clients",
        "t1-figure-b.7": "PeFLL and FedAvg by rounds and bytes, CIFAR-10, 1,000 clients",
    }),
    ("no", _DATA, {
        "t1-figure-b.8": "PeFLL and FedAvg by rounds and bytes, CIFAR-100, 100 clients",
        "t1-figure-b.9": "PeFLL and FedAvg by rounds and bytes, CIFAR-100, 500 clients",
        "t1-figure-b.10": "PeFLL and FedAvg by rounds and bytes, CIFAR-100, 1,000 clients",
        "t1-figure-d.10": "Private k-means on Stack Overflow, facebook and hibernate",
        "t1-figure-d.11": "Private k-means on Stack Overflow, plotting and cookies",
        "t1-figure-d.12": "Private k-means on Stack Overflow, machine-learning and math",
        "p2-table-2": "ODPFL-HN on iNaturalist, Landmarks and Yahoo Answers",
        "p2-figure-3": "ODPFL-HN: accuracy by KL to the nearest client, CIFAR-100",
    }),
    ("scaled", _by_hand("unalike run pefll-femnist"), {
        "t1-figure-b.11": "PeFLL and FedAvg by rounds and bytes, FEMNIST",
    }),
    ("hours", "nothing computes it yet; its CIFAR rows are the label-masked ones of T1", {
        "p1-table-1": "PeFLL and others, seen and unseen clients, with label masks",
    }),
    ("yes", "an architecture: there is nothing to compute", {
        "p1-table-4": "Layers of the hypernetwork",
    }),
    ("yes", "settings, no results: python -m reproductions.hdp.draws", {
        "t2-table-3.3": "Distributions of ε",
    }),
    ("yes", _SCHEMATIC, {
        "t2-figure-3.1": "Security model of clients with their own ε",
        "t2-figure-4.2": "Threat model and stages of R-DPCFL",
    }),
    ("scaled", _LOST, {
        "t2-figure-4.6": "R-DPCFL: accuracy by ε, and how often clusters are found",
        "t2-figure-4.7": "R-DPCFL: accuracy of the smallest cluster by ε, and how often it is found",
        "t2-figure-d.3": "R-DPCFL: accuracy by ε, with one model for all",
        "t2-figure-d.4": "R-DPCFL: accuracy of the smallest cluster by ε, with one model for all",
        "t2-figure-e.1": "Robust-HDP: eigenvalues of M and of L, MNIST",
        "t2-figure-e.2": "Robust-HDP and others: weights, MNIST, Dist8",
        "t2-figure-f.3": "Robust-HDP: 1/H by the size of a client",
        "t2-figure-h.4": "Robust-HDP and others: weights with at most 8 labels a client, equal batches, Dist1",
        "t2-figure-h.5": "Robust-HDP and others: weights with at most 8 labels a client, unequal batches, Dist1",
    }),
)  # fmt: skip
PLANNED = tuple(Planned(id, title, cores, why) for cores, why, titles in _UNCOMPUTED for id, title in titles.items())


def items() -> dict[str, Item | Planned]:
    """All of them by id, in the order of the documents."""
    found: dict[str, Item | Planned] = {}
    every: list[Item | Planned] = [*(item for group in GROUPS for item in group), *PLANNED]
    for item in every:
        if item.id in found:
            raise ValueError(f"{item.id} is listed twice; an item that can be computed is no longer a planned one")
        found[item.id] = item
    return dict(sorted(found.items(), key=lambda entry: _place(entry[0])))


def item_named(id: str) -> Item | Planned:
    """The item with this id."""
    known = items()
    if id not in known:
        near = get_close_matches(id, known, n=3, cutoff=0.5)
        hint = f" (did you mean {', '.join(near)}?)" if near else ""
        raise UserError(
            f"no table or figure goes by {id!r}{hint}. An id is document, kind and number, such as t2-figure-2.7; "
            "`python -m reproductions --list` has them all"
        )
    return known[id]


def _place(id: str) -> tuple[str | int, ...]:
    """Documents in their order, then chapters, sections, tables and figures by number; appendices come last."""
    document, kind, number = id.split("-", 2)
    key: list[str | int] = [list(DOCUMENTS).index(document), ("chapter", "section", "table", "figure").index(kind)]
    for piece in re.findall(r"\d+|[a-z]+", number):
        key += [0, int(piece)] if piece.isdigit() else [1, piece]
    return tuple(key)
