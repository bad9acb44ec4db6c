"""The list of all tables and figures: those that can be computed, by group, and those that cannot yet or never."""

from __future__ import annotations

import re

from unalike.core.suggest import nearest
from unalike.studio.errors import UserError
from unalike.studio.reproduce import adaped, clustering, estimation, hdp, mixture, on_demand, rdpcfl, splitting
from unalike.studio.reproduce.item import Item, Planned, TwoCores

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
    splitting.ITEMS,
)

_LATER = "nothing computes it yet"
_DATA = "its data are not shipped with Unalike and cannot be downloaded by it"
_SCHEMATIC = "a drawing: there is nothing to compute"
_LOST = "only its caption survives; the text and the numbers are lost"


def _planned(
    kind: str, numbers: str, title: str, two_cores: TwoCores, why: str = _LATER, by_hand: str = ""
) -> list[Planned]:
    """Tables or figures of one document that show the same thing; ``by_hand``: a command that draws it, unjudged."""
    why += f"; by hand: `{by_hand}`" if by_hand else ""
    return [Planned(f"{kind}-{number}", title, two_cores, why) for number in numbers.split()]


PLANNED: tuple[Planned, ...] = (
    *_planned(
        "t1-figure",
        "3.3 a.5",
        "FEMNIST: true and simulated clients",
        "scaled",
        by_hand="unalike mdm --data femnist --plot FILE",
    ),
    *_planned(
        "t1-figure",
        "3.4 a.6 a.7",
        "Census: mixtures of 1, 3, 5 and 7 components",
        "yes",
        by_hand="unalike mdm --data acs:race --components 7 --plot FILE",
    ),
    *_planned("t1-figure", "3.5 a.8", "FEMNIST: local epochs and rates on true, MDM and IID clients", "scaled"),
    *_planned(
        "t1-figure",
        "3.6 a.9 a.10 a.11 a.12 a.13 a.14 a.15 a.16",
        "CIFAR-10: local epochs and rates on simulated clients",
        "scaled",
    ),
    *_planned("t1-figure", "a.1 a.2", "MDM: likelihood by number of components; client sizes", "yes"),
    *_planned("t1-table", "a.1", "MDM: the settings, recovered", "yes", by_hand="unalike mdm --data mdm:low-1"),
    *_planned("t1-figure", "4.1 b.12 b.13 b.14", "Rank correlation of descriptors over training", "scaled"),
    *_planned("t1-figure", "b.1", "Newcomers of other Dirichlet α", "yes", by_hand="unalike analyse RUN"),
    *_planned("t1-figure", "b.2 b.3", "Shakespeare with an LSTM", "scaled"),
    *_planned("t1-figure", "b.4", "PeFLL with ResNet20", "scaled"),
    *_planned("t1-figure", "b.5 b.6 b.7", "Accuracy by rounds and bytes", "yes", by_hand="unalike report RUN RUN"),
    *_planned("t1-figure", "b.8 b.9 b.10", "PeFLL on CIFAR-100", "no", why=_DATA),
    *_planned("t1-figure", "b.11", "PeFLL on FEMNIST", "scaled", by_hand="unalike run pefll-femnist"),
    *_planned(
        "t1-table", "b.4 b.5 b.6 b.7", "PeFLL: label mask, size of the hypernetwork, λ, embedding network", "yes"
    ),
    *_planned("t1-table", "5.1 5.3 5.4 c.2 c.3 c.4", "FLowDUP on CIFAR-10", "hours"),
    *_planned(
        "t1-table",
        "5.2 c.1",
        "FLowDUP on rotated F-MNIST, FEMNIST and rotated MNIST",
        "yes",
        by_hand="unalike run flowdup-rotated-mnist",
    ),
    *_planned("t1-figure", "d.10 d.11 d.12", "Private k-means on Stack Overflow", "no", why=_DATA),
    *_planned(
        "p1-table",
        "1 4",
        "PeFLL: accuracy, networks",
        "hours",
        why="nothing computes it yet; its CIFAR rows are the label-masked ones of T1",
    ),
    *_planned("p1-figure", "3 4", "PeFLL: the earlier paper's figures", "scaled"),
    *_planned("p2-table", "2", "ODPFL-HN on other data", "no", why=_DATA),
    *_planned("p2-figure", "3", "ODPFL-HN: accuracy by KL to the nearest client", "no", why=_DATA),
    *_planned(
        "p2-figure",
        "4 5 6 7",
        "ODPFL-HN: blur, rotation, private newcomers, map",
        "yes",
        by_hand="unalike analyse RUN",
    ),
    *_planned("t2-table", "3.3", "Distributions of ε", "yes", why="settings, no results: --epsilons dist1 to dist9"),
    *_planned("t2-figure", "3.1 4.2", "Threat models and stages", "yes", why=_SCHEMATIC),
    *_planned("t2-table", "b.7 b.8 b.9 b.10", "Robust-HDP: accuracy on MNIST, F-MNIST and CIFAR", "hours"),
    *_planned("t2-table", "b.11 b.12", "Robust-HDP: privacy level and number of clients in numbers", "yes"),
    *_planned("t2-table", "b.13 b.14 b.15 b.16 b.17", "Robust-HDP: heterogeneous data and batch sizes", "yes"),
    *_planned(
        "t2-figure",
        "4.6 4.7 4.8 d.3 d.4 d.5 d.6",
        "R-DPCFL: accuracy, minority cluster, separation",
        "scaled",
        why=_LOST,
    ),
    *_planned("t2-figure", "e.1 e.2 e.7 f.3 h.4 h.5", "Figures of the appendices", "scaled", why=_LOST),
)


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
        raise UserError(
            f"no table or figure goes by {id!r}{nearest(id, list(known))}. An id is document, kind and number, such as "
            "t2-figure-2.7; `unalike reproduce --list` has them all"
        )
    return known[id]


def _place(id: str) -> tuple[str | int, ...]:
    """Documents in their order, then chapters, sections, tables and figures by number; appendices come last."""
    document, kind, number = id.split("-", 2)
    key: list[str | int] = [list(DOCUMENTS).index(document), ("chapter", "section", "table", "figure").index(kind)]
    for piece in re.findall(r"\d+|[a-z]+", number):
        key += [0, int(piece)] if piece.isdigit() else [1, piece]
    return tuple(key)
