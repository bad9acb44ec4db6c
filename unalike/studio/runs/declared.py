"""What clients declare about their privacy (``[privacy] epsilons``): public values that their noise is made from.

- ``FILE``: a CSV, TSV or Parquet file with a row for each client: its name in the client column, ``epsilon``, and where
  they differ ``delta`` and ``batch``, its own batch size. Several rows of a client must agree.
- ``column:NAME``: a column of the data itself, where they are a table; it is then no feature.
- ``uniform:LOW,HIGH``: ε drawn for each client.
- ``dist1`` to ``dist9``: ε and batch sizes of Malekmohammadi's thesis, Table 3.3. For 20, 40 or 60 clients they are the
  author's own draws, if ``robust-hdp/dists.json`` is in the data folder; otherwise they are drawn from the table.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from unalike.data.files.tabular import Layout, read_table
from unalike.data.population import Population
from unalike.data.sources.folder import data_folder
from unalike.studio.errors import UserError
from unalike.studio.recipe.recipe import Recipe
from unalike.studio.words import listed

DRAWS = "robust-hdp/dists.json"  # below the data folder
BATCHES = (16, 32, 64, 128)
LEAST = 0.05  # a normal distribution of ε has values below 0; no client's ε is below this
# Table 3.3: parts of a mixture as (share, "normal" or "uniform", mean or low, variance or high)
_DISTRIBUTIONS: dict[str, list[tuple[float, str, float, float]]] = {
    "dist1": [(1.0, "normal", 2.0, 1.0)],
    "dist2": [(0.2, "normal", 0.2, 0.01), (0.6, "normal", 1.0, 0.1), (0.2, "normal", 5.0, 1.0)],
    "dist3": [(1.0, "uniform", 0.2, 5.0)],
    "dist4": [(0.2, "normal", 0.2, 0.01), (0.6, "normal", 0.5, 0.1), (0.2, "normal", 2.0, 1.0)],
    "dist5": [(1.0, "uniform", 0.2, 2.0)],
    "dist6": [(0.3, "normal", 0.2, 0.01), (0.5, "normal", 0.5, 0.1), (0.2, "normal", 1.0, 0.1)],
    "dist7": [(1.0, "uniform", 0.2, 1.0)],
    "dist8": [(0.6, "normal", 0.2, 0.01), (0.4, "normal", 0.5, 0.1)],
    "dist9": [(1.0, "uniform", 0.2, 0.5)],
}


def column_of(recipe: Recipe) -> str | None:
    """The column of the data that has each client's ε."""
    kind, _, name = (recipe.privacy.epsilons or "").partition(":")
    return name if kind == "column" and name else None


def declare(recipe: Recipe, population: Population, delta: float) -> Population:
    """The population whose clients declare what the recipe says; δ is this one where nothing else is said."""
    wanted = recipe.privacy.epsilons
    if wanted is None or (column_of(recipe) is not None and population.declared):  # read off the rows, where they are
        return population
    count = len(population)
    name, _, rest = wanted.partition(":")
    if name.lower() in _DISTRIBUTIONS and not rest:
        declared = authors_draws(name.lower(), count) or _drawn(name.lower(), count, recipe.seed)
    elif name == "uniform":
        declared = {"epsilon": _uniform(wanted, rest, count, recipe.seed)}
    elif (column := column_of(recipe)) is not None:
        declared = _read(Path(recipe.data.name).expanduser(), recipe, population, column)
    else:
        declared = _read(Path(wanted).expanduser(), recipe, population)
    declared.setdefault("delta", torch.full((count,), delta, dtype=torch.float64))
    made = replace(population, declared=declared)
    try:
        made.roster()
    except ValueError as error:
        raise UserError(f"privacy.epsilons = {wanted!r} (--epsilons): {error}") from error
    return made


def authors_draws(name: str, count: int) -> dict[str, Tensor] | None:
    """ε and batch sizes of so many clients as the thesis's author drew them; None where they are not at hand."""
    file = data_folder() / DRAWS
    if not file.is_file():
        return None
    drawn = json.loads(file.read_text(encoding="utf-8"))[name.capitalize()].get(str(count))
    if drawn is None:
        return None
    return {
        "epsilon": torch.tensor(drawn["eps"], dtype=torch.float64),
        "batch": torch.tensor(drawn["batch"], dtype=torch.int64),
    }


def _drawn(name: str, count: int, seed: int) -> dict[str, Tensor]:
    random = np.random.default_rng([seed, 33])
    parts = _DISTRIBUTIONS[name]
    which = random.choice(len(parts), count, p=[part[0] for part in parts])
    values = np.empty(count)
    for place, index in enumerate(which):
        _, kind, first, second = parts[index]
        values[place] = random.normal(first, second**0.5) if kind == "normal" else random.uniform(first, second)
    return {
        "epsilon": torch.from_numpy(values.clip(LEAST)),
        "batch": torch.from_numpy(random.choice(BATCHES, count).astype(np.int64)),
    }


def _uniform(wanted: str, bounds: str, count: int, seed: int) -> Tensor:
    try:
        low, high = (float(one) for one in bounds.split(","))
        if not 0 < low <= high:
            raise ValueError
    except ValueError:
        raise UserError(
            f"privacy.epsilons = {wanted!r} (--epsilons): expected two numbers above 0, for example uniform:0.2,2"
        ) from None
    return torch.from_numpy(np.random.default_rng([seed, 33]).uniform(low, high, count))


def _read(path: Path, recipe: Recipe, population: Population, named: str = "epsilon") -> dict[str, Tensor]:
    if not path.is_file():
        raise UserError(
            f"privacy.epsilons = {str(path)!r} (--epsilons): expected a file with the columns client and epsilon, "
            "column:NAME, dist1 to dist9, or uniform:LOW,HIGH; there is no such file"
        )
    column = str(recipe.data.options.get("client_column") or "client")
    delimiter = recipe.data.options.get("delimiter") if path == Path(recipe.data.name).expanduser() else None
    frame = read_table(path, Layout(client_column=column, delimiter=delimiter))
    for needed in (column, named):
        if needed not in frame.columns:
            raise UserError(f"{path}: there is no column {needed!r}; the columns are {listed(list(frame.columns), 20)}")
    frame = frame.rename(columns={named: "epsilon"})
    own = ("epsilon",) if named != "epsilon" else ("epsilon", "delta", "batch")  # others of the data are features
    given = [name for name in own if name in frame.columns]
    names = frame[column].astype(str)
    grouped = frame[given].apply(pd.to_numeric, errors="coerce").groupby(names)
    mixed = grouped.nunique(dropna=False).max(axis=1) > 1
    if mixed.any():
        raise UserError(f"{path}: the rows of client {mixed.index[mixed][0]!r} do not agree in {listed(given)}")
    values = grouped.first()
    clients = [population.train.name(position) for position in range(len(population))]
    lacking = [client for client in clients if client not in values.index or values.loc[client].isna().any()]
    if lacking:
        raise UserError(f"{path}: {len(lacking)} clients have no {listed(given)} there, the first is {lacking[0]!r}")
    types = {"epsilon": torch.float64, "delta": torch.float64, "batch": torch.int64}
    return {name: torch.tensor(values.loc[clients, name].to_numpy(), dtype=types[name]) for name in given}
