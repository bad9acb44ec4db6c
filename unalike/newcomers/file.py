"""Reads a newcomer's file by the schema of the run, and says what is wrong where the file does not fit it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from unalike.core.client import Clients
from unalike.core.lazy import pd
from unalike.core.notes import did_you_mean
from unalike.core.schema import Schema
from unalike.data.arrays import PartialLabels, array_source
from unalike.data.build import row_weights
from unalike.data.files.frames import of_frame
from unalike.data.files.layout import Layout, RawRows
from unalike.data.files.reader import read_rows
from unalike.data.files.tabular import as_strings, parse_table
from unalike.data.partition.assignment import Assignment
from unalike.data.rows import group
from unalike.data.source import Array, Names, number_places
from unalike.newcomers.ledger import row_names
from unalike.runs.errors import UserError
from unalike.runs.finished import FinishedRun
from unalike.runs.measure import serves_unlabeled
from unalike.runs.words import counted, listed

OPTIONS = (
    *("client_column", "label_column", "weight_column", "delimiter", "decimal", "na_values", "drop", "missing"),
    *("partial_labels", "size"),
)
FAR = 10  # deviations from the mean of training: further away, a value is told


@dataclass(frozen=True)
class Newcomer:
    """One client that arrives after training, and what there is to say about its data."""

    name: str
    clients: Clients  # of length 1
    rows: Array  # [n] where its rows are in the file, from 0
    ids: list[str]  # [n] what its rows are called: by a column of ids, else by their number, from 1
    truth: Array | None  # [n] its labels as the run's numbers, NaN where one is missing; None: not read, or none
    notes: list[str]
    left_out: int = 0  # how many of its rows lack a value
    row_names: list[str] = field(default_factory=list)  # of its rows as they are in the file, for a ledger


def read_newcomer(
    run: FinishedRun,
    file: Path,
    options: Mapping[str, Any] | None = None,
    *,
    client: str | None = None,
    unlabeled: bool = False,
    id_column: str | None = None,
) -> Newcomer:
    """A file's rows as one client that fits the run; ``client`` chooses one of several. See ``NewcomerFile``."""
    came = NewcomerFile.read(run, file, options, id_column=id_column)
    one = came.newcomer(came.only(client), unlabeled=unlabeled)
    return replace(one, notes=came.notes + one.notes)


@dataclass(frozen=True)
class NewcomerFile:
    """A file whose rows have the run's features, or an error that says where they have not.

    The schema says what a row is: columns by name and in which order, values of text, classes, shape and type, scaling.
    How the file is laid out (which column is the client, which the label, what to do about gaps) is as for the run's
    own file, unless ``options`` say otherwise.
    """

    run: FinishedRun
    path: Path
    rows: RawRows
    x: Array  # [rows, ...] as in the file; images as [rows, channels, height, width]
    clients: dict[str, Array]  # whose rows are where; "" if the file does not say
    missing: str  # what to do about a table's gaps: error, drop or mean
    partial_labels: PartialLabels
    notes: list[str] = field(default_factory=list)

    @classmethod
    def read(
        cls,
        run: FinishedRun,
        data: Path | pd.DataFrame,
        options: Mapping[str, Any] | None = None,
        *,
        id_column: str | None = None,
    ) -> NewcomerFile:
        """Read a file or folder, or a table of pandas.

        Rows are called by ``id_column``, else by the run's own (where the data have it), else by the table's index or
        their number; ``""`` leaves both columns out.
        """
        schema, given = run.schema, dict(options or {})
        for key in given:
            if key not in OPTIONS:
                raise UserError(f"data.options.{key} cannot be set for a newcomer; {', '.join(OPTIONS)} can")
        if id_column is not None and id_column in (schema.columns or {}):
            raise UserError(f"--id-column {id_column}: the run was trained on this column as a feature; take another")
        how = {key: value for key, value in run.file_options.items() if key in OPTIONS} | given
        usual_id = run.file_options.get("id_column")
        how |= {"id_column": usual_id if id_column is None else id_column, "id_required": id_column is not None}
        partial_labels, missing = how.pop("partial_labels", "keep"), how.get("missing", "error")
        if missing in ("drop", "mean", "client"):
            how["missing"] = "keep"  # it is about each newcomer's rows alone, which are chosen later
        file = data if isinstance(data, Path) else Path("the table")
        rows = _read_rows(data, file, schema, how, given)
        _check_kind(file, rows, schema, given)
        whole = array_source(rows.x, None, rows.client, name=file.name, kind=schema.kind)
        if tuple(whole.x.shape[1:]) != schema.shape:
            raise _other_shape(file, whole.x, schema)
        if rows.y is not None and rows.y.size != len(whole.x):
            raise UserError(f"{file}: {len(whole.x)} rows of x but {rows.y.size} labels; give one for each row")
        if id_column and (rows.ids is None or rows.ids.shape != (len(whole.x),)):
            raise UserError(
                f"{file}: expected an id in {id_column!r} for each of its {len(whole.x)} rows (--id-column)"
            )
        clients = {"": np.arange(len(whole.x))}
        if whole.client is not None:
            names = whole.client_names or Names(np.arange(whole.clients or 0))
            order, sizes = group(whole.client, len(names))
            parts = np.split(np.arange(len(whole.x)) if order is None else order, np.cumsum(sizes)[:-1])
            clients = {name: part for name, part in zip(names, parts, strict=True) if len(part)}
        notes = _notes(rows, schema, [usual_id, how.get("weight_column")])
        return cls(run, file, rows, whole.x, clients, missing, partial_labels, notes)

    def only(self, client: str | None) -> str:
        """The one client that is meant; refused where several could be."""
        if list(self.clients) == [""]:
            if client is not None:
                raise UserError(
                    f"{self.path} does not say whose a row is, so --client {client} cannot be found; leave it out"
                )
            return ""
        if client is None and len(self.clients) > 1:
            raise UserError(
                f"{self.path} holds {len(self.clients)} clients ({listed(list(self.clients), 5)}), but a newcomer is "
                "one; choose one with --client NAME, or give a file of its own"
            )
        if client is not None and client not in self.clients:
            raise UserError(f"{self.path} has no client {client!r}{near(client, list(self.clients))}")
        return next(iter(self.clients)) if client is None else client

    def newcomer(self, client: str, *, unlabeled: bool = False, truth: bool = False) -> Newcomer:
        """One client's rows. ``unlabeled`` keeps labels from the model; ``truth`` reads them all the same, to score.

        With ``missing`` "mean" or "client" a missing number becomes the schema's mean, never one of the newcomer's own:
        then a row changes no other row, and the sensitivity of a private descriptor stays 2/n (P2 Lemma 2).
        """
        file, schema, own, weight = self.path, self.run.schema, self.clients[client], self.rows.weight
        keep, x, gaps, notes = self._complete(own)
        y = None
        if self.rows.y is not None and schema.target != "none" and (truth or not unlabeled):
            advice = "; or leave the labels unread with --label-column ''" if truth else ""
            if not truth and serves_unlabeled(self.run.method):
                advice = "; or add --unlabeled, because this run needs no labels"
            y = _numbers(file, self.rows.y.reshape(-1)[keep], keep, schema, self.run.named_data, advice)
        if y is not None and not unlabeled and self.partial_labels == "drop":
            there = ~np.isnan(y)
            keep, x, y, gaps = keep[there], x[there], y[there], gaps[there]
        source = array_source(
            _inputs(file, x, keep, schema),
            None if unlabeled else y,
            name=file.name,
            kind=schema.kind,
            classes=schema.classes,
            task="regression" if schema.classes is None else "classification",
            partial_labels=self.partial_labels,
            weight=None if weight is None else weight[keep],
        )
        everybody = Assignment(None, np.array([len(source.x)]), None)
        weights = None if source.y is None else self.run.recipe.data.class_weights
        one = Clients.from_sizes(
            torch.from_numpy(source.x),
            None if source.y is None else torch.from_numpy(source.y),
            torch.tensor([len(source.x)]),
            known=None if source.known is None else torch.from_numpy(source.known),
        ).using(schema)
        one = replace(one, weight=row_weights(source, everybody, source.y, everybody.sizes, weights))
        if source.known is not None:
            told = f"{int(source.known.sum())} of {counted(len(source.x), 'row')} have one"
            notes.append(f"labels: {told}; all rows describe the client, those with a label train")
        left_out = len(own) - len(keep)
        if left_out:
            them = "it" if left_out == 1 else "them"
            notes.append(f"left out for lack of a value: {counted(left_out, 'row')}; no prediction is made for {them}")
        ids = keep + 1 if self.rows.ids is None else self.rows.ids[keep]
        return Newcomer(
            name=client or file.name,
            clients=replace(one, ids=one.ids + int(self.run.roster.ids.max()) + 1),  # that of no training client
            rows=keep,
            ids=[_word(value) for value in ids.tolist()],
            truth=y,
            notes=notes + _far_away(one.x, schema),
            left_out=left_out,
            row_names=row_names(source.x, gaps),
        )

    def _complete(self, own: Array) -> tuple[Array, Array, Array, list[str]]:
        """Which of a client's rows are kept, what they hold, where that was missing, and what to say about it."""
        x, shift = self.x[own], self.run.schema.shift
        gaps = np.isnan(x) if self.rows.columns is not None else np.zeros(x.shape, dtype=bool)
        if not gaps.any() or self.missing not in ("drop", "mean", "client"):
            return own, x, gaps, []
        if self.missing == "drop":
            whole = ~gaps.any(1)
            if not whole.any():
                raise UserError(
                    f"{self.path}: every row lacks a feature, so missing='drop' leaves nothing; fill some in"
                )
            return own[whole], x[whole], gaps[whole], []
        if shift is None:
            raise UserError(
                f"{self.path}: values are missing, and missing='mean' has nothing to fill them with, because the run's "
                "inputs are not scaled and its schema has no means; fill them in, or leave such rows out: "
                "--missing drop"
            )
        filled = np.where(gaps, shift.to(torch.float64).numpy(), x)
        return own, filled, gaps, [f"filled in by the schema's means: {counted(int(gaps.sum()), 'value')}"]


def near(client: str, names: Sequence[str]) -> str:
    """The end of a sentence about an unknown client: the one nearest to it, else the first few."""
    found = did_you_mean(client, names)
    return found if found.endswith("?") else f"; there are {listed(list(names), 10)}."


def _read_rows(
    data: Path | pd.DataFrame, file: Path, schema: Schema, how: dict[str, Any], given: Mapping[str, Any]
) -> RawRows:
    """What the file, folder or table holds."""
    if isinstance(data, pd.DataFrame):
        layout = Layout(known=schema.columns, **how)
        rows = parse_table(of_frame(data.reset_index(drop=True), file.name), file.name, layout)
        if rows.ids is None and not layout.id_required:
            rows = replace(rows, ids=np.array([str(one) for one in data.index]))
    else:
        if not file.exists():
            raise UserError(f"there is no file or folder {file}")
        if file.is_dir():
            if given.get("client_column"):
                raise UserError(f"{file}: each file of a folder is a client, so there is no --client-column; leave it")
            how = {**how, "client_column": None}
        rows = read_rows(file, Layout(known=schema.columns, **how))
    if how.get("label_column") == "":
        return replace(rows, y=None)
    return replace(rows, y=as_strings(rows.y)) if isinstance(rows.y, pd.Categorical) else rows


def _notes(rows: RawRows, schema: Schema, known: Sequence[str | None]) -> list[str]:
    """What cannot be compared with the run's data, or is ignored."""
    notes = []
    if schema.kind == "features" and schema.columns is None and rows.columns is not None:
        said = "the run's data has no names for its features; the columns were taken in order"
        notes.append(f"{said}: {listed(list(rows.columns), 10)}")
    if schema.kind == "features" and schema.columns is not None and rows.columns is None:
        said = "x has no names for its features; they were taken in the order of training"
        notes.append(f"{said}: {listed(list(schema.columns), 10)}")
    ignored = [title for title in rows.ignored if title not in known]
    if ignored:
        them, what = ("it holds", "column") if len(ignored) == 1 else ("one of them holds", "columns")
        labels = "" if rows.y is not None else f"; if {them} labels, name it with --label-column"
        notes.append(f"ignored, because training did not have the {what}: {listed(ignored, 10)}{labels}")
    return notes


def _check_kind(file: Path, rows: RawRows, schema: Schema, given: Mapping[str, Any]) -> None:
    """Is it a table or an array, as the run needs, with the columns that were named?"""
    label, client = given.get("label_column"), given.get("client_column")
    if rows.columns is None and label:
        raise UserError(f"{file} holds arrays, which have no columns (--label-column); its labels are the array `y`")
    if rows.columns is None and client:
        raise UserError(f"{file} holds arrays, which have no columns (--client-column); clients are the array `client`")
    if rows.columns is not None and schema.kind == "image":
        shape = ", ".join(map(str, schema.shape))
        raise UserError(f"{file} is a table, but the run was trained on images: give an NPZ with x of [rows, {shape}]")
    if label and rows.y is None:
        raise UserError(f"{file}: there is no column {label!r} (--label-column)")
    if client and rows.client is None:
        raise UserError(f"{file}: there is no column {client!r} (--client-column)")
    if rows.x.ndim and len(rows.x) == 0:
        raise UserError(f"{file} has no rows, but a newcomer needs at least one; give a file that holds its rows")
    if schema.kind == "image" and rows.x.ndim not in (3, 4):
        raise _other_shape(file, rows.x, schema)


def _numbers(file: Path, y: Array, rows: Array, schema: Schema, named_data: bool, advice: str = "") -> Array | None:
    """Labels as the run's own numbers, NaN where one is missing; None: a column of labels that is left empty."""
    if schema.classes is not None:
        found = _codes(file, y, rows, schema, named_data, advice)
    else:
        try:
            found = np.array([math.nan if _word(value) == "" else float(value) for value in y.tolist()])
        except ValueError as error:
            raise UserError(f"{file}: the run predicts numbers, but a label is none: {error}") from error
    return None if np.isnan(found).all() else found


def _codes(file: Path, y: Array, rows: Array, schema: Schema, named_data: bool, advice: str = "") -> Array:
    """Labels as the run's own numbers of classes, found by name; NaN where one is missing.

    The classes of a data set that comes with Unalike, such as CIFAR-10's, are known by their published numbers too.
    An unknown class is refused even where labels are not needed: the file may be another than the one meant.
    """
    known = schema.class_labels
    place: dict[str, float] = {"": math.nan}
    if named_data:
        place |= {str(i): float(i) for i in range(len(known))}
    place |= {name: float(i) for i, name in enumerate(known)}
    words = [_word(value) for value in y.tolist()]
    for row, word in zip(rows, words, strict=True):
        if word not in place:
            raise UserError(
                f"{file}: the class {word!r} was not in training (data row {row + 1}); the run knows "
                f"{listed(list(known), 10)}. Name the classes as in training, or leave out the rows of others{advice}"
            )
    return np.array([place[word] for word in words])


def _word(label: Any) -> str:
    """A class or an id as it is called: 1.0 is '1', and what is missing is ''."""
    if isinstance(label, float):
        return "" if math.isnan(label) else str(int(label)) if label.is_integer() else str(label)
    return label.decode() if isinstance(label, bytes) else str(label)


def _other_shape(file: Path, x: Array, schema: Schema) -> UserError:
    came, wanted = tuple(x.shape[1:]), schema.shape
    what = "images" if schema.kind == "image" else schema.kind
    change = f"resize or crop the {what}" if schema.kind == "image" else "bring the samples to that shape"
    if math.prod(came) == math.prod(wanted):
        change = "reshape it" if len(came) == 1 else "bring its axes into that order"
    return UserError(
        f"{file}: a sample has shape {came}, but the run was trained on {what} of shape {wanted}; give x of "
        f"[rows, {', '.join(map(str, wanted))}]: {change}, or train a run on such data"
    )


def _inputs(file: Path, x: Array, rows: Array, schema: Schema) -> Array:
    """The inputs in the type of the run's data; refused where they cannot be meant. ``rows``: where they are in it."""
    wanted = np.dtype(schema.stored)
    with np.errstate(over="ignore", invalid="ignore"):  # found just below
        inputs = np.ascontiguousarray(x, dtype=wanted)
    finite = np.isfinite(inputs if wanted.kind == "f" else x).reshape(len(x), -1).all(1)
    if not finite.all():
        row = rows[np.argmin(finite)] + 1
        raise UserError(f"{file}: data row {row} holds NaN, infinity or a number too large for float32; fill it in")
    if wanted.kind in "ui" and not np.array_equal(inputs, x):
        span = f" from 0 to {np.iinfo(wanted).max}" if wanted.kind == "u" else ""
        raise UserError(
            f"{file}: the run's data are whole numbers{span} ({wanted}), but x holds {x.dtype} from {x.min():g} to "
            f"{x.max():g}; give the values on the same scale as in training"
        )
    return inputs


def _far_away(x: Tensor, schema: Schema) -> list[str]:
    """A note where values lie further than ``FAR`` deviations from their mean in training.

    Not for bytes, which cannot be on another scale, nor for text, whose values are known or refused.
    """
    if schema.shift is None or schema.scale is None or schema.stored == "uint8":
        return []
    mean, deviation = schema.shift.to(torch.float64), 1 / schema.scale.to(torch.float64)
    away = (x.to(torch.float64) - mean).abs() > FAR * deviation
    found = [("x", x, mean.mean(), deviation.mean())] if bool(away.any()) else []
    if schema.kind == "features" and x.ndim == 2:
        names = {f"feature {i + 1}": i for i in range(x.shape[1])}
        places = names if schema.columns is None else number_places(schema.columns)
        found = [(name, x[:, i], mean[i], deviation[i]) for name, i in places.items() if bool(away[:, i].any())]
    if not found:
        return []
    name, values, usual, spread = found[0]
    others = len(found) - 1
    more = f" (and {others} other feature{'s' * (others > 1)} likewise)" if others else ""
    return [
        f"{name} lies between {float(values.min()):g} and {float(values.max()):g}, more than {FAR} deviations from its "
        f"mean in training, {float(usual):.3g} ± {float(spread):.3g}{more}; with another scale or unit than in "
        "training the model's answers mean nothing"
    ]
