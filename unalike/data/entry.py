"""``load`` and ``from_arrays``: from a name, a file, a folder, a table or arrays to a population."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import pandas as pd
import torch

from unalike.core.schema import Schema
from unalike.data import spec
from unalike.data.arrays import PartialLabels, Task, array_source
from unalike.data.build import LaidOut, lay_out
from unalike.data.files.reader import file_source, frame_source
from unalike.data.partition.schemes import Partition
from unalike.data.population import Population
from unalike.data.source import DataError, Kind, Source
from unalike.data.sources.catalog import CATALOG, open_source

PLAN = [name for name in inspect.signature(lay_out).parameters if name != "source"]


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
    - ``options`` go to the source or file reader, e.g. ``client_column="shop"``.

    The same arguments and ``seed`` give the same population, and each decision has a generator of its own: hiding more
    labels does not change who is unseen.
    """
    given = locals()
    plan = {name: given[name] for name in PLAN}
    return _laid_out(data, plan, options).population(overwrite=not isinstance(data, Source))


def in_pieces(data: str | Path, *, schema: Schema | str | Path | None = None, **given: Any) -> LaidOut:
    """What ``load`` would make a population of, before inputs are read, for who wants the rows of some clients alone.

    Inputs stay in their file where it can be mapped (NPZ without compression), and tables are read some rows at a time
    into a temporary file, but for those that need a look at all rows at once (``files.tabular.spooled``). Every other
    source is read as a whole.
    """
    plan = {name: given.pop(name) for name in PLAN if name in given}
    return _laid_out(data, {**plan, "schema": schema}, given, pieces=True)


def _laid_out(
    data: str | Path | pd.DataFrame | Source, plan: dict[str, Any], options: dict[str, Any], pieces: bool = False
) -> LaidOut:
    schema = plan["schema"]
    plan["schema"] = known = schema if schema is None or isinstance(schema, Schema) else read_schema(schema)
    if isinstance(data, Source):
        if options:
            raise DataError(f"unknown options for a ready-made source: {', '.join(options)}")
        return lay_out(data, **plan)
    source = _open(data, plan.get("seed", 0), known, options, pieces)
    if source.client is None and plan.get("partition") is None and not _named(data):
        raise _nobody(source.name)
    return lay_out(source, **plan)


def read_schema(file: str | Path) -> Schema:
    """The schema in a file."""
    path = Path(file).expanduser()
    try:
        schema = Schema.from_json(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise DataError(f"the schema {path} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise DataError(
            f"{path}: {error}; expected JSON as `unalike data DATASET --schema FILE` writes it: shape, kind, columns, "
            "classes, class_names, shift, scale"
        ) from error
    scaling: dict[str, Any] = {}
    for name, value in (("shift", schema.shift), ("scale", schema.scale)):
        if value is None:
            return schema
        try:
            value.expand(schema.shape)
        except RuntimeError as error:
            raise DataError(
                f"{path}: its {name} is of shape {list(value.shape)}, which does not fit rows of {list(schema.shape)}; "
                "give one number for each feature, or [channels, 1, 1] for images"
            ) from error
        if not bool(value.isfinite().all()):
            raise DataError(f"{path}: its {name} holds numbers that are not finite")
        scaling[name] = value.to(torch.float32)
    return replace(schema, **scaling)


def _named(data: object) -> bool:
    return isinstance(data, str) and data.partition(":")[0].strip() in CATALOG


def _nobody(name: str) -> DataError:
    return DataError(
        f"{name}: nothing says which client a row belongs to; give client ids (an array `client`, a column named by "
        f"client_column), or deal the rows out with a partition, e.g. partition='iid' (on the command line: "
        f"--client-column NAME or --partition iid)"
    )


def _open(
    data: str | Path | pd.DataFrame, seed: int, schema: Schema | None, options: dict[str, Any], pieces: bool
) -> Source:
    if isinstance(data, pd.DataFrame):
        return frame_source(data, schema=schema, **options)
    if not isinstance(data, str | Path):
        raise DataError(
            f"data is a {type(data).__name__}; expected a name, a path, a pandas table or a Source (for arrays there "
            "is from_arrays)"
        )
    text = str(data)
    if _named(data):
        return open_source(text, seed, **options)
    path = Path(data).expanduser()
    if not path.exists():
        if isinstance(data, Path) or "/" in text or path.suffix:
            raise DataError(f"there is no file or folder {text}")
        raise spec.unknown("data set", text, list(CATALOG), extra=" (nor is there a file or folder of that name)")
    return file_source(path, schema=schema, pieces=pieces, **options)


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
    schema = plan.get("schema")
    if schema is not None and not isinstance(schema, Schema):
        plan["schema"] = schema = read_schema(schema)
    how: dict[str, Any] = {"kind": kind, "classes": classes, "task": task, "partial_labels": partial_labels}
    source = array_source(x, y, client, name=name, schema=schema, **how)
    if client is None and plan.get("partition") is None:
        raise _nobody(name)
    return lay_out(source, **plan).population(overwrite)
