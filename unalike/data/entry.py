"""``load`` and ``from_arrays``: from a name, a file, a folder, a table or arrays to a population."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any, Literal

import numpy as np

from unalike.core.lazy import pd
from unalike.core.notes import FLAG
from unalike.core.schema import Schema
from unalike.data import spec
from unalike.data.arrays import PartialLabels, Task, array_source
from unalike.data.build import Division, divide
from unalike.data.files.reader import file_source, frame_source
from unalike.data.lazy import LazyPopulation
from unalike.data.partition.schemes import Partition
from unalike.data.population import Population
from unalike.data.schema_file import read_schema
from unalike.data.source import DataError, Kind, Source
from unalike.data.sources.catalog import CATALOG, open_source

_DIVISION = [field.name for field in fields(Division)]


def load(
    data: str | Path | pd.DataFrame | Source,
    *,
    partition: str | Partition | None = None,
    clients: int | None = None,
    samples: int | None = None,
    min_samples: int | None = None,
    test: float | Literal["source"] | None = None,
    validation: float = 0.0,
    unseen: int | float | Sequence[int] | None = None,
    labeled: float = 1.0,
    rotate: Sequence[float] | None = None,
    normalize: bool | Literal["private"] = True,
    schema: Schema | str | Path | None = None,
    class_weights: str | None = None,
    seed: int = 0,
    **options: Any,
) -> Population:
    """A population from a named source (``"mnist"``, ``"acs:race"``), a file, a folder, a pandas table or a ``Source``.

    - ``partition``: a name with options such as ``"dirichlet:0.1"`` or ``"pathological:2"`` (see
      ``list_partitions()``), or a function ``(labels, clients, rng) -> list of row indices``. Default: the source's
      own clients, else ``iid``.
    - ``clients``: how many (default: all natural ones; where rows are dealt out 100, or fewer so that each has 40 rows:
      scores on a handful of test rows say little); ``samples``: at most so many rows for each.
    - ``test``: the fraction of each client's rows kept for testing, or ``"source"`` for the source's own test rows (the
      default where there are some; else 0.2). ``validation``: the fraction kept for validation. Both are rounded, give
      at least one row where a client has two, and always leave one to train on.
    - ``min_samples``: clients with fewer rows (default 2, or 1 with ``test=0``) or without a row to train on are left
      out and listed in ``dropped``.
    - ``unseen``: the fraction or number of clients that do not take part in training, or their positions (default
      0.1; nobody for the sources made for analytics, which have no test rows by default either).
    - ``labeled``: the fraction p of training clients that have labels; the labels of the others are hidden.
    - ``rotate``: angles of which each client draws one for all its images.
    - ``normalize``: scale inputs, by the constants of the ``schema`` or the published ones of a known image source;
      where there are none, ``unalike.simulate`` asks the training clients for their mean and deviation (``"private"``:
      in a run with an ε, by noisy sums that are part of it). ``False`` leaves inputs as they are. The data stays raw;
      models get scaled inputs.
    - ``schema``: what rows look like (a ``Schema``, or a file as ``Schema.to_json`` writes it). Columns in order,
      values of text, classes and scaling are then its own, and data that does not fit is an error.
    - ``class_weights``: how much rows count in local training: "balanced", so that each class of a client counts the
      same, or numbers by class, "yes=10,no=1". ``weight_column`` of a table names weights of rows.
    - ``options`` go to the source or file reader, e.g. ``client_column="shop"``.

    The same arguments and ``seed`` give the same population, and each decision has a generator of its own: hiding more
    labels does not change who is unseen.
    """
    given = locals()
    division = {name: given[name] for name in _DIVISION}
    return _divided(data, division, options).population(overwrite=not isinstance(data, Source))


def load_lazily(data: str | Path, *, schema: Schema | str | Path | None = None, **given: Any) -> LazyPopulation:
    """The population that ``load`` gives, before its inputs are read: for whoever needs the rows of some clients only.

    Inputs stay in their file where it can be mapped (NPZ without compression), and large tables are read into a
    temporary file. Every other source is read as a whole.
    """
    division = {name: given.pop(name) for name in _DIVISION if name in given}
    return _divided(data, {**division, "schema": schema}, given, lazily=True)


def _divided(
    data: str | Path | pd.DataFrame | Source, given: dict[str, Any], options: dict[str, Any], lazily: bool = False
) -> LazyPopulation:
    division = _division(given)
    if isinstance(data, Source):
        if options:
            raise DataError(f"unknown options for a ready-made source: {', '.join(options)}")
        return divide(data, division)
    source = _open(data, division.seed, division.schema, options, lazily)
    if source.client is None and division.partition is None and not is_named(data):
        raise _no_clients(source.name)
    return divide(source, division)


def _division(given: dict[str, Any]) -> Division:
    """How to divide the rows, with the schema read where it is a file."""
    schema = given.get("schema")
    read = schema if schema is None or isinstance(schema, Schema) else read_schema(schema)
    return Division(**{**given, "schema": read})


def is_named(data: object) -> bool:
    """Is this the name of a data set, with or without options?"""
    return isinstance(data, str) and data.partition(":")[0].strip() in CATALOG


def _no_clients(name: str) -> DataError:
    return DataError(
        f"{name}: nothing says which client a row belongs to; give client ids (an array `client`, a column named by "
        f"client_column{FLAG}), or deal the rows out with a partition, e.g. partition='iid'{FLAG}",
        "data.options.client_column",
        "data.partition",
    )


def _open(
    data: str | Path | pd.DataFrame, seed: int, schema: Schema | None, options: dict[str, Any], lazily: bool
) -> Source:
    if not isinstance(data, str | Path):
        if isinstance(data, pd.DataFrame) or hasattr(data, "to_pandas"):
            return frame_source(data, schema=schema, **options)
        raise DataError(
            f"data is a {type(data).__name__}; expected a name, a path, a pandas table or a Source (for arrays there "
            "is from_arrays)"
        )
    text = str(data)
    if is_named(data):
        return open_source(text, seed, **options)
    path = Path(data).expanduser()
    if not path.exists():
        if isinstance(data, Path) or "/" in text or path.suffix:
            raise DataError(f"there is no file or folder {text}")
        raise spec.unknown("data set", text, list(CATALOG), extra=" (nor is there a file or folder of that name)")
    return file_source(path, schema=schema, lazily=lazily, **options)


def from_arrays(
    x: Any,
    y: Any = None,
    client: Any = None,
    *,
    name: str = "arrays",
    kind: Kind | None = None,
    classes: int | None = None,
    task: Task | None = None,
    partial_labels: PartialLabels = "keep",
    overwrite: bool = False,
    **plan: Any,
) -> Population:
    """A population from arrays (numpy, torch or lists): ``x`` [rows, ...], ``y`` and ``client`` [rows] or None.

    Rows are not copied when they are float32 or uint8, grouped by client, and no random test or validation rows are
    asked for (``test=0``); the population then shares the caller's memory. Otherwise they are copied once, or, with
    ``overwrite=True`` and rows grouped by client, shuffled inside the caller's array. ``plan`` takes the arguments of
    ``load`` from ``partition`` to ``seed``.
    """
    division = _division(plan)
    how: dict[str, Any] = {"kind": kind, "classes": classes, "task": task, "partial_labels": partial_labels}
    source = array_source(x, y, client, name=name, schema=division.schema, **how)
    if client is None and division.partition is None:
        raise _no_clients(name)
    return divide(source, division).population(overwrite)


def from_dataset(dataset: Any, client: Any, **how: Any) -> Population:
    """A population from a PyTorch data set of pairs (x, y): ``client`` [rows] says whose a row is.

    ``how``: as for ``from_arrays``. Rows are read once and kept in memory.
    """
    rows = [dataset[number] for number in range(len(dataset))]
    pairs = [row if isinstance(row, tuple | list) else (row, None) for row in rows]
    if not pairs or any(len(pair) != 2 for pair in pairs):
        raise DataError("dataset: expected rows that are pairs (x, y), or x alone")
    x = np.stack([np.asarray(x) for x, _ in pairs])
    labels = [y for _, y in pairs]
    y = None if all(label is None for label in labels) else np.array([np.nan if y is None else y for y in labels])
    return from_arrays(x, y, client, name=type(dataset).__name__, **how)
