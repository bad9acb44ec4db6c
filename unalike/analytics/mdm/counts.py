"""Histograms as clients: the store that MDM is fitted on, its checks, and the known mixtures of T1 Table A.1.

In MDM a client is its histogram, so the store has one row for each client: the counts of the modelled feature. In a
deployment a client makes its own row; here they are made for all of them from their labels.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor

from unalike.core.client import Clients
from unalike.core.request import Part
from unalike.data.partition.features import Feature, categories, count
from unalike.data.partition.mixture import MDMError, Mixture
from unalike.data.population import Population
from unalike.data.sources.synthetic import MDM_SETTINGS


def known_mixture(name: str, samples: int = 100) -> Mixture:
    """The true mixture of a setting of Table A.1 (or of A.1.2); every client has ``samples`` samples."""
    if name not in MDM_SETTINGS:
        raise MDMError(f"no synthetic setting is called {name!r}; there are: {', '.join(MDM_SETTINGS)}")
    tau, alpha = (torch.tensor(values, dtype=torch.float64) for values in MDM_SETTINGS[name])
    return _of_one_size(tau, alpha, samples)


def true_mixture(population: Population) -> Mixture | None:
    """The mixture that a synthetic population was drawn from; None: it is not known."""
    if not {"tau", "A"} <= set(population.shared):
        return None
    tau = population.shared["tau"].double()
    return _of_one_size(tau / tau.sum(), population.shared["A"].double(), int(population.sizes.max()))


def _of_one_size(tau: Tensor, alpha: Tensor, samples: int) -> Mixture:
    pi = torch.zeros(len(tau), samples, dtype=torch.float64)
    pi[:, -1] = 1.0
    return Mixture(tau, alpha, pi, torch.arange(1, samples + 2))


def histogram_clients(
    counts: Tensor | NDArray[Any], names: list[str] | None = None, largest: int | None = None
) -> Clients:
    """Clients whose one row is their histogram; refuses counts that are none, before anything can be asked.

    largest: the bound M on a client's number of samples, which all of them must keep.
    """
    table = torch.as_tensor(counts)
    if table.ndim != 2 or table.shape[0] == 0 or table.shape[1] < 2:
        raise MDMError(
            f"expected counts [clients, categories], at least one client and two categories, got {list(table.shape)}"
        )
    if table.is_floating_point():
        _refuse(~torch.isfinite(table), table, "is not a finite number", "fill in or remove the missing counts")
        _refuse(table != table.round(), table, "is fractional", "counts are whole numbers, not shares or weights")
    _refuse(table < 0, table, "is negative", "a count says how many samples there are: 0 or more")
    table = table.to(torch.int64)
    empty = (table.sum(1) == 0).nonzero().flatten().tolist()
    if empty:
        shown = ", ".join(map(str, empty[:5])) + (", ..." if len(empty) > 5 else "")
        raise MDMError(f"{len(empty)} clients have no data (rows {shown}); leave them out: they have no histogram")
    if largest is not None:
        check_most(int(table.sum(1).max()), largest)
    return Clients.from_sizes(table, None, torch.ones(len(table), dtype=torch.int64), names=names)


def check_most(most: int, largest: int) -> None:
    """Refuse a bound M that a client's number of samples exceeds."""
    if most > largest:
        raise MDMError(f"a client has {most} samples, but largest={largest}; give a bound that holds for all")


def _refuse(wrong: Tensor, table: Tensor, what: str, advice: str) -> None:
    if bool(wrong.any()):
        row, column = wrong.nonzero()[0].tolist()
        raise MDMError(f"the count of client {row}, category {column} {what}: {table[row, column].item()}; {advice}")


def feature_histograms(
    population: Population, features: Sequence[Feature], groups: Iterable[Mapping[Part, Clients]]
) -> Clients:
    """Every client's histogram over the product of some features; a row without a value of one of them is left out.

    groups: the clients in their order, some at a time with their rows.
    """
    total = torch.cat([_feature_counts(group, features, population.columns) for group in groups])
    some = total.sum(1) > 0
    names = None if population.train.names is None else [population.train.name(i) for i in some.nonzero().flatten()]
    return histogram_clients(total[some], names)


def _feature_counts(
    parts: Mapping[Part, Clients], features: Sequence[Feature], columns: Mapping[str, Sequence[str] | None] | None
) -> Tensor:
    """[clients, categories] of some clients."""
    train = parts["train"]
    found = torch.from_numpy(
        categories(features, train.x.numpy(), None if train.y is None else train.y.numpy(), columns)
    )
    total = torch.zeros(len(train), count(features), dtype=torch.int64)
    for part in parts.values():
        rows, owner = part.pool_rows()
        known = found[rows] >= 0
        cells = owner[known] * total.shape[1] + found[rows[known]]
        total += torch.bincount(cells, minlength=total.numel()).view_as(total)
    return total


def population_histograms(population: Population) -> Clients:
    """Every client's histogram of its labels; clients without labels cannot be modelled by them."""
    if not population.has_labels or population.classes is None:
        raise MDMError(
            f"{population.name} has no classes to count; MDM models a categorical feature: name one or several, "
            "feature=... (and bins=... where it is a number), or load the data with it as its label"
        )
    if not bool(population.labeled.all()):
        raise MDMError(
            f"{population.name}: some clients have no labels, so they have no histogram; load it with labeled=1.0"
        )
    return histogram_clients(population.histogram())
