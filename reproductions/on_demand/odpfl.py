"""P2 Table 1 on CIFAR-10: unlabeled newcomers, of label-sorted shards and of Dirichlet splits."""

from __future__ import annotations

import itertools
from typing import Any

from reproductions.charts import dots
from reproductions.item import Found, Item, Row, Work, claim
from reproductions.on_demand.training import size, trained
from reproductions.tables import ahead, beside, cells, measured

_ROUNDS = 500
_SEEDS = (0, 1, 2)
_SPLITS = {
    "pathological": "shards:2",
    "α = 0.1": "inner-dirichlet:0.1",
    "α = 1": "inner-dirichlet:1.0",
    "α = 10": "inner-dirichlet:10.0",
}
# accuracies with their standard errors over the ten newcomers, in the order of the splits
_TABLE: dict[str, tuple[tuple[float, float], ...]] = {
    "FedAvg": ((50.3, 2.9), (58.7, 3.6), (48.4, 2.9), (66.2, 0.5)),
    "FedProx": ((54.2, 2.0), (53.9, 2.2), (54.2, 1.0), (52.8, 0.6)),
    "FedMA": ((42.9, 1.8), (49.3, 3.4), (54.5, 0.9), (53.8, 0.6)),
    "PFL-sampled": ((24.8, 1.0), (61.0, 3.7), (49.4, 3.0), (68.5, 0.7)),
    "PFL-nearest": ((24.4, 6.2), (63.1, 3.5), (49.4, 0.9), (68.5, 0.7)),
    "PFL-ensemble": ((47.6, 3.2), (62.2, 3.7), (49.4, 3.0), (68.5, 0.7)),
    "ODPFL-HN": ((59.5, 3.5), (66.0, 3.0), (62.9, 1.0), (68.1, 0.5)),
}
_OURS = "ODPFL-HN"
_LENT = {"PFL-sampled": "sampled", "PFL-nearest": "nearest", "PFL-ensemble": "ensemble"}
# P2 App. C searches FedAvg's rate, epochs and batch with momentum .5, and takes FedProx's and FedMA's from their code
_PLAIN: dict[str, Any] = {"cohort": 0.1, "local": {"epochs": 5, "batch": 64, "lr": 0.01, "momentum": 0.5}}
_NAMES = {"FedAvg": "fedavg", "FedProx": "fedprox", "FedMA": "fedma", _OURS: "odpfl"}
_OPEN = {
    "rates, epochs, batches": "FedAvg, FedProx, FedMA: rate .01, momentum .5, 5 epochs, batches of 64, out of the "
    "grids of P2 App. C, which does not tell what it found; ODPFL-HN and the PFL-methods: --preset paper. Fixed before "
    "any run",
    "FedProx": "μ of the defaults; the paper has that of other authors' code",
    "PFL-sampled, -nearest, -ensemble": "one training of pFedHN for all three; a newcomer of PFL-sampled draws one "
    "model where the paper has the mean over all",
    "test rows": "newcomers describe themselves by their training rows and are scored on CIFAR-10's own test rows, "
    "dealt out in the same shares",
}


def _ahead(other: str, split: str) -> str:
    return f"{_OURS} minus {other}, {split} (points)"


def _rows() -> tuple[Row, ...]:
    because = "three of the paper's standard errors, and at least three points, for rates that it does not tell"
    better = "ODPFL-HN performs better than all baselines in all scenarios except α = 10"
    leads = [
        claim(
            _ahead(other, split),
            better,
            "the claim itself",
            low=0.0,
            main=True,
        )
        for split in list(_SPLITS)[:3]
        for other in _TABLE
        if other != _OURS
    ]
    return (*cells(_TABLE, _SPLITS, 3.0, because, full_only=True), *leads)


def _table_1(work: Work) -> Found:
    table: list[dict[str, Any]] = []
    smaller, seeds = size(work), work.choose("seeds", _SEEDS, _SEEDS[:1])
    for (split, partition), seed in itertools.product(_SPLITS.items(), seeds):
        common: dict[str, Any] = {"partition": partition, "seed": seed, "scored": 0, "unlabeled": True}
        common |= {"rounds": _ROUNDS, **smaller}
        what = split if seed == 0 else f"{split}, seed {seed}"
        found: dict[str, list[float]] = {}
        for method, name in _NAMES.items():
            changes = {} if method == _OURS else _PLAIN
            numbers = work.part(f"{method}, {what}", trained, method=name, changes=changes, **common)
            found[method] = numbers["each unseen"]
        lent = work.part(
            f"PFL, {what}", trained, method="pfl-nearest", choices=list(_LENT.values()), changes={}, **common
        )
        found |= {method: lent[f"{choice}: each unseen"] for method, choice in _LENT.items()}
        for method, each in found.items():
            table.append({"method": method, "column": split, "seed": seed, "accuracy": sum(each) / len(each)})
    values = measured(table)
    for split in list(_SPLITS)[:3]:
        values |= {_ahead(other, split): ahead(values, _OURS, [other], split) for other in _TABLE if other != _OURS}
    return Found(values, table, dots(beside(table, _TABLE, _SPLITS), list(_TABLE)))


ITEMS = (
    Item(
        id="p2-table-1",
        title="ODPFL-HN and six methods for unlabeled newcomers, CIFAR-10",
        claim="ODPFL-HN performs better than all baselines, except with nearly equal clients (α = 10).",
        two_cores="hours",
        rows=_rows(),
        compute=_table_1,
        seeds=_SEEDS,
        settings=_OPEN,
    ),
)
