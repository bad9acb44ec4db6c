"""What clients declare about their privacy (``[privacy] epsilons``): public values that their noise is made from.

- ``FILE``: a CSV, TSV or Parquet file with a row for each client: its name in the client column, ``epsilon``, and where
  they differ ``delta`` and ``batch``, its own batch size. Several rows of a client must agree.
- ``column:NAME``: a column of the data itself, where they are a table; it is then no feature.
- ``uniform:LOW,HIGH``: ε drawn for each client.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from unalike.core.lazy import pd
from unalike.data.files.frames import read_table
from unalike.data.files.layout import Layout
from unalike.data.population import Population
from unalike.runs.errors import FLAG, UserError
from unalike.runs.recipe.recipe import Recipe
from unalike.runs.words import listed

KEY = "privacy.epsilons"


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
    if name == "uniform":
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
        raise UserError(f"privacy.epsilons = {wanted!r}{FLAG}: {error}", KEY) from error
    return made


def _uniform(wanted: str, bounds: str, count: int, seed: int) -> Tensor:
    try:
        low, high = (float(one) for one in bounds.split(","))
        if not 0 < low <= high:
            raise ValueError
    except ValueError:
        raise UserError(
            f"privacy.epsilons = {wanted!r}{FLAG}: expected two numbers above 0, for example uniform:0.2,2", KEY
        ) from None
    return torch.from_numpy(np.random.default_rng([seed, 33]).uniform(low, high, count))


def _read(path: Path, recipe: Recipe, population: Population, named: str = "epsilon") -> dict[str, Tensor]:
    if not path.is_file():
        raise UserError(
            f"privacy.epsilons = {str(path)!r}{FLAG}: expected a file with the columns client and epsilon, "
            "column:NAME, or uniform:LOW,HIGH; there is no such file",
            KEY,
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
