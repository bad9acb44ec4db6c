"""Table 1: AdaPeD and six methods, and AdaPeD beside FedEM with all clients in every round."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from reproductions.adaped.training import OPEN, flat, trained, trained_or_diverged
from reproductions.charts import dots
from reproductions.item import Found, Item, Row, Work, claim, near
from reproductions.tables import ahead, beside, cells, measured

_COLUMNS = {
    "MNIST, ξ = .1": ("mnist", 0.1, 300),
    "FEMNIST, ξ = .33": ("femnist", 1 / 3, 240),
    "FEMNIST, ξ = .15": ("femnist", 0.15, 480),
}
_TABLE: dict[str, tuple[tuple[float, float], ...]] = {
    "FedAvg": ((92.93, 0.09), (93.14, 0.15), (92.18, 0.13)),
    "FedAvg + fine-tuning": ((95.42, 0.25), (93.81, 0.30), (94.12, 0.26)),
    "AdaPeD": ((98.53, 0.11), (96.88, 0.29), (96.55, 0.32)),
    "pFedMe": ((97.83, 0.04), (94.03, 0.61), (94.95, 0.55)),
    "Per-FedAvg": ((95.88, 0.27), (93.28, 0.41), (93.51, 0.31)),
    "QuPeD": ((98.14, 0.39), (96.11, 0.13), (95.99, 0.08)),
    "FML": ((97.93, 0.33), (94.83, 0.59), (95.12, 0.18)),
}
_SEEDS = (0, 1, 2)


def _lead(column: str) -> str:
    return f"AdaPeD minus the best other method, {column} (points)"


def _alone(column: str) -> str:
    return f"AdaPeD minus Local, {column} (points)"


_COMMON = (
    "a common model does well here, as all clients' digits are digits: with the stated settings it is better than "
    "printed. The paper chose a rate for each method out of six, and does not say which this one got"
)
_STRONGER = dict.fromkeys(("FedAvg", "FedAvg + fine-tuning", "Per-FedAvg"), _COMMON)
_NO_LEAD = "methods with a common model are better here than printed, so that AdaPeD does not lead"


def _rows() -> tuple[Row, ...]:
    because = "three times the paper's own spread, and at least half a point, for other test rows and writers"
    leads = [
        claim(
            _lead(column),
            "AdaPeD consistently outperforms other methods",
            "the claim itself",
            low=0.0,
            main=True,
            explanation=_NO_LEAD,
        )
        for column in _COLUMNS
    ]
    gains = [claim(_alone(column), "clients gain from collaboration", "any gain", low=0.0) for column in _COLUMNS]
    return (*cells(_TABLE, _COLUMNS, 0.5, because, _STRONGER), *leads, *gains)


def _compute(columns: list[str], scaled: list[str], share: int = 1) -> Callable[[Work], Found]:
    """All columns, or those of a scaled run with a share of the rounds."""

    def compute(work: Work) -> Found:
        table: list[dict[str, Any]] = []
        for column in work.choose("columns", columns, scaled):
            source, cohort, rounds = _COLUMNS[column]
            settings: dict[str, Any] = {"source": source, "cohort": cohort}
            settings["rounds"] = work.choose(f"rounds, {column}", rounds, rounds // share)
            for method in ("Local", *_TABLE):
                for seed in _SEEDS:
                    name = f"{method}, {column}, seed {seed}"
                    numbers = work.part(name, trained_or_diverged, method=method, seed=seed, **settings)
                    table.append({"column": column, "method": method, "seed": seed, **flat(numbers)})
        diverged = [
            f"{line['method']}, {line['column']}, seed {line['seed']} diverged in round {line['diverged']}"
            for line in table
            if "diverged" in line
        ]
        found = measured(table)
        values = {what: each for what, each in found.items() if not what.startswith("Local")}
        for column in dict.fromkeys(line["column"] for line in table):
            values[_lead(column)] = ahead(found, "AdaPeD", _TABLE, column)
            values[_alone(column)] = ahead(found, "AdaPeD", ["Local"], column)
        return Found(values, table, dots(beside(table, _TABLE, _COLUMNS), ["Local", *_TABLE]), diverged)

    return compute


# The two columns of FEMNIST, in fewer rounds


_SHARE = 3  # of the rounds


_EARLY = (
    "in a scaled run a client's own model has had few steps on its own rows, and AdaPeD's common model, which learns "
    "from such models alone, still guesses; a model that is averaged has had the steps of all clients"
)


def _femnist_rows() -> tuple[Row, ...]:
    found = []
    for row in _rows():
        if "FEMNIST" in row.what:
            found.append(replace(row, full_only=isinstance(row.paper, float), explanation=_EARLY))
    return tuple(found)


# All clients in every round

_ALL = {"AdaPeD": (99.04, 0.11), "FedEM": (98.90, 0.20)}


def _full_participation(work: Work) -> Found:
    size: dict[str, Any] = {"rounds": work.choose("rounds", 300, 100)}
    if work.choose("clients", 50, 10) < 50:
        size["clients"] = 10
    if work.choose("rows of a client to train on", 1200, 360) < 1200:
        size["samples"] = 420
    table = []
    for method in _ALL:
        for seed in _SEEDS:
            settings: dict[str, Any] = {"source": "mnist", "cohort": 1.0, "seed": seed, **size}
            numbers = work.part(f"{method}, seed {seed}", trained, method=method, **settings)
            table.append({"method": method, "seed": seed, **flat(numbers)})
    values = {f"{method} (%)": [row["accuracy"] for row in table if row["method"] == method] for method in _ALL}
    values[_EQUAL] = [a - b for a, b in zip(values["AdaPeD (%)"], values["FedEM (%)"], strict=True)]
    return Found(values, table)


_EQUAL = "AdaPeD minus FedEM (points)"


ITEMS = (
    Item(
        id="p3-table-1",
        title="AdaPeD and six methods on MNIST and FEMNIST",
        claim="AdaPeD consistently outperforms the other methods.",
        two_cores="yes",
        rows=_rows(),
        compute=_compute(list(_COLUMNS), list(_COLUMNS)[:1]),
        seeds=_SEEDS,
        settings=OPEN,
    ),
    Item(
        id="p3-table-1-femnist",
        title="AdaPeD and six methods on FEMNIST, in fewer rounds",
        claim="AdaPeD consistently outperforms the other methods.",
        two_cores="hours",
        rows=_femnist_rows(),
        compute=_compute(list(_COLUMNS)[1:], list(_COLUMNS)[1:], _SHARE),
        seeds=_SEEDS,
        settings=OPEN,
        lacks=("FEMNIST alone, not MNIST",),
    ),
    Item(
        id="p3-section-4-full-participation",
        title="AdaPeD and FedEM with all clients in every round, MNIST",
        claim="With full participation and without privacy, AdaPeD and FedEM are comparable.",
        two_cores="hours",
        rows=(
            claim(
                _EQUAL,
                "the performance is comparable",
                "a point and a half: three times the paper's spreads together, and half a point for other test rows",
                low=-1.5,
                high=1.5,
                main=True,
                explanation="FedEM's two common models learn more slowly than personal ones; in a scaled run they may "
                "not be done",
            ),
            *(
                near(
                    f"{method} (%)",
                    value,
                    max(0.5, 3 * spread),
                    "three times the paper's own spread, at least half a point",
                    full_only=True,
                )
                for method, (value, spread) in _ALL.items()
            ),
        ),
        compute=_full_participation,
        seeds=_SEEDS,
        settings=OPEN,
    ),
)
