"""A newcomer's file: read as the run's own data was, and matched to it by the names of columns and classes."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from unalike.core.client import Clients
from unalike.data.arrays import Task, array_source
from unalike.data.files.reader import read_rows
from unalike.data.files.tabular import Features
from unalike.data.population import Population
from unalike.data.source import Array
from unalike.studio.errors import UserError
from unalike.studio.runs.finished import FinishedRun
from unalike.studio.runs.measure import serves_unlabeled
from unalike.studio.words import counted, listed

OPTIONS = ("client_column", "label_column", "delimiter", "missing", "partial_labels", "size")


@dataclass(frozen=True)
class Newcomer:
    """One client that arrives after training, and what there is to say about its data."""

    name: str
    clients: Clients  # of length 1
    notes: list[str]
    left_out: int = 0  # how many of its rows lack a value


def read_newcomer(
    run: FinishedRun,
    file: Path,
    options: Mapping[str, Any] | None = None,
    *,
    client: str | None = None,
    unlabeled: bool = False,
) -> Newcomer:
    """A file's rows as one client that fits the run, or an error that says where they do not.

    ``options`` are laid over those that the run's own file was read with. ``client`` chooses one of several clients.
    With ``missing="mean"`` a missing number becomes the mean of the run's training rows, never one of the newcomer's
    own: then a row changes no other row, and the sensitivity of a private descriptor stays 2/n (P2 Lemma 2).
    """
    population, given = run.population, dict(options or {})
    for key in given:
        if key not in OPTIONS:
            raise UserError(f"data.options.{key} cannot be set for a newcomer; {', '.join(OPTIONS)} can")
    if not file.exists():
        raise UserError(f"there is no file or folder {file}")
    how = {**run.file_options, **given}
    partial_labels, missing = how.pop("partial_labels", "error"), how.get("missing")
    if missing in ("drop", "mean"):
        how["missing"] = "keep"  # it is about the newcomer's rows alone, which are chosen below
    if file.is_dir():
        how.pop("client_column", None)  # a folder's files are its clients
    rows = read_rows(file, known=population.columns, **how)
    if rows.columns is None and given.get("label_column"):
        raise UserError(f"{file} holds arrays, which have no columns (--label-column); its labels are the array `y`")
    if rows.columns is not None and population.kind == "image":
        shape = ", ".join(map(str, population.input_shape))
        raise UserError(f"{file} is a table, but the run was trained on images: give an NPZ with x of [rows, {shape}]")
    if given.get("label_column") and rows.y is None:
        raise UserError(f"{file}: there is no column {given['label_column']!r} (--label-column)")
    if rows.x.ndim and len(rows.x) == 0:
        raise UserError(f"{file} has no rows, but a newcomer needs at least one; give a file that holds its rows")
    if population.kind == "image" and rows.x.ndim not in (3, 4):
        raise _other_shape(file, rows.x, population)
    whole = array_source(rows.x, None, rows.client, name=file.name, kind=population.kind)
    if tuple(whole.x.shape[1:]) != population.input_shape:
        raise _other_shape(file, whole.x, population)
    own = _chosen(file, len(whole.x), whole.client, whole.client_names, client)
    keep, x = own, whole.x[own]
    notes: list[str] = []
    if rows.columns is not None and missing == "drop":
        keep = own[~np.isnan(x).any(1)]
        x = whole.x[keep]
        if len(keep) == 0:
            raise UserError(f"{file}: every row lacks a feature, so missing='drop' leaves nothing; fill some in")
    elif rows.columns is not None and missing == "mean" and np.isnan(x).any():
        notes.append(f"filled in by the means of the run's training rows: {counted(int(np.isnan(x).sum()), 'value')}")
        x = _filled(file, x, rows.columns, population)
    y = None
    if rows.y is not None and population.has_labels and not unlabeled:
        if rows.y.size != len(whole.x):
            raise UserError(f"{file}: {len(whole.x)} rows of x but {rows.y.size} labels; give one for each row")
        y = rows.y.reshape(-1)[keep]
        if population.classes is not None:
            y = _codes(file, y, keep, population, run.named_data, needed=not serves_unlabeled(run.method))
        y = None if y.dtype.kind == "f" and np.isnan(y).all() else y  # a column of labels that is left empty
    task: Task = "regression" if population.classes is None else "classification"
    source = array_source(
        _inputs(file, x, keep, population),
        y,
        name=file.name,
        kind=population.kind,
        classes=population.classes,
        task=task,
        partial_labels=partial_labels,
    )
    one = Clients.from_sizes(
        torch.from_numpy(source.x),
        None if source.y is None else torch.from_numpy(source.y),
        torch.tensor([len(source.x)]),
        shift=population.train.shift,
        scale=population.train.scale,
    )
    one = replace(one, ids=one.ids + len(population))  # nobody's id: it is taken for no training client
    if population.kind == "features":
        notes += _by_position(population.columns, rows.columns)
    left_out = len(own) - len(one.x)
    if left_out:
        them = "it" if left_out == 1 else "them"
        notes.append(f"left out for lack of a value: {counted(left_out, 'row')}; no prediction is made for {them}")
    return Newcomer(client or file.name, one, notes + _far_away(one.x, population), left_out)


def _chosen(file: Path, rows: int, owner: Array | None, names: Sequence[str] | None, client: str | None) -> Array:
    """Which rows are the newcomer's."""
    if owner is None:
        if client is not None:
            raise UserError(f"{file} does not say whose a row is, so --client {client} cannot be found; leave it out")
        return np.arange(rows)
    known = [str(number) for number in range(int(owner.max()) + 1)] if names is None else list(names)
    if client is None and len(known) > 1:
        raise UserError(
            f"{file} holds {len(known)} clients ({listed(list(known), 5)}), but a newcomer is one; choose one with "
            f"--client NAME, or give a file of its own"
        )
    if client is not None and client not in known:
        raise UserError(f"{file} has no client {client!r}; there are {listed(list(known), 10)}")
    return np.flatnonzero(owner == (0 if client is None else known.index(client)))


def _filled(file: Path, x: Array, columns: Features, population: Population) -> Array:
    """A table's missing numbers filled in by the means over the training rows of the run's training clients."""
    first = 0
    for column, values in columns.items():
        if values is not None and np.isnan(x[:, first]).any():
            raise UserError(f"{file}: the text column {column!r} lacks values, and text has no mean; fill them in")
        first += 1 if values is None else len(values)
    seen = population.train.select(population.seen)
    trained = torch.cat([seen.rows(i)[0] for i in range(len(seen))]).to(torch.float64)
    return np.where(np.isnan(x), trained.mean(0).numpy(), x)


def _codes(file: Path, y: Array, rows: Array, population: Population, named_data: bool, needed: bool = True) -> Array:
    """Labels as the run's own numbers of classes, found by name; NaN where one is missing.

    The classes of a data set that comes with Unalike, such as CIFAR-10's, are known by their published numbers too.
    An unknown class is refused even where labels are not ``needed``: the file may be another than the one meant.
    """
    names, numbers = population.class_names, [str(i) for i in range(population.classes or 0)]
    known = numbers if names is None else [str(name) for name in names]
    place: dict[str, float] = {"": math.nan}
    if named_data:
        place |= {number: float(i) for i, number in enumerate(numbers)}
    place |= {name: float(i) for i, name in enumerate(known)}
    words = [_word(value) for value in y.tolist()]
    for row, word in zip(rows, words, strict=True):
        if word not in place:
            raise UserError(
                f"{file}: the class {word!r} was not in training (data row {row + 1}); the run knows "
                f"{listed(list(known), 10)}. Name the classes as in training, or leave out the rows of others"
                + ("" if needed else "; or add --unlabeled, because this run needs no labels")
            )
    return np.array([place[word] for word in words])


def _word(label: Any) -> str:
    """A class as it is called: 1.0 is '1', and what is missing is ''."""
    if isinstance(label, float):
        return "" if math.isnan(label) else str(int(label)) if label.is_integer() else str(label)
    return label.decode() if isinstance(label, bytes) else str(label)


def _other_shape(file: Path, x: Array, population: Population) -> UserError:
    came, wanted = tuple(x.shape[1:]), population.input_shape
    what = "images" if population.kind == "image" else population.kind
    change = f"resize or crop the {what}" if population.kind == "image" else "bring the samples to that shape"
    if math.prod(came) == math.prod(wanted):
        change = "reshape it" if len(came) == 1 else "bring its axes into that order"
    return UserError(
        f"{file}: a sample has shape {came}, but the run was trained on {what} of shape {wanted}; give x of "
        f"[rows, {', '.join(map(str, wanted))}]: {change}, or train a run on such data"
    )


def _inputs(file: Path, x: Array, rows: Array, population: Population) -> Array:
    """The inputs in the type of the run's data; refused where they cannot be meant. ``rows``: where they are in it."""
    trained = population.train.x
    wanted = trained.numpy().dtype
    with np.errstate(over="ignore", invalid="ignore"):  # found just below
        inputs = np.ascontiguousarray(x, dtype=wanted)
    finite = np.isfinite(inputs if wanted.kind == "f" else x).reshape(len(x), -1).all(1)
    if not finite.all():
        row = rows[np.argmin(finite)] + 1
        raise UserError(f"{file}: data row {row} holds NaN, infinity or a number too large for float32; fill it in")
    if wanted.kind in "ui" and not (x.dtype == wanted == np.uint8):
        low, high = int(trained.min()), int(trained.max())
        if not ((x == np.rint(x)).all() and x.min() >= low and x.max() <= high):
            raise UserError(
                f"{file}: the run's data are whole numbers from {low} to {high} ({wanted}), but x holds {x.dtype} "
                f"from {x.min():g} to {x.max():g}; give the values on the same scale as in training"
            )
    return inputs


def _by_position(trained: Mapping[str, Sequence[str] | None] | None, came: Mapping[str, Any] | None) -> list[str]:
    """A note where names could not be compared."""
    if trained is None and came is not None:
        said = "the run's data has no names for its features; the columns were taken in order"
        return [f"{said}: {listed(list(came), 10)}"]
    if trained is not None and came is None:
        said = "x has no names for its features; they were taken in the order of training"
        return [f"{said}: {listed(list(trained), 10)}"]
    return []


def _far_away(x: Tensor, population: Population) -> list[str]:
    """A note where values lie further outside the range of the run's data than that range is wide."""
    if population.kind == "tokens":
        return []
    features = population.kind == "features" and x.ndim == 2
    (low, high), (least, most) = (_range(values, features) for values in (population.train.x, x))
    width = high - low
    far = ((most > high + width) | (least < low - width)).nonzero().flatten().tolist()
    if not far:
        return []
    i, others = far[0], len(far) - 1
    name = "x" if not features else _names(population)[i] if population.columns else f"feature {i + 1}"
    more = f" (and {others} other feature{'s' * (others > 1)} likewise)" if others else ""
    return [
        f"{name} lies between {least[i]:g} and {most[i]:g}, in the run's data between {low[i]:g} and {high[i]:g}"
        f"{more}; with another scale or unit than in training the model's answers mean nothing"
    ]


def _range(x: Tensor, by_feature: bool) -> tuple[Tensor, Tensor]:
    flat = x if by_feature else x.reshape(-1, 1)
    return flat.amin(0).to(torch.float64), flat.amax(0).to(torch.float64)


def _names(population: Population) -> list[str]:
    """The features of a table."""
    columns = (population.columns or {}).items()
    return [name for column, values in columns for name in ([column] if values is None else values)]
