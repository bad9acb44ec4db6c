"""What the models of a run predict for every test row, as files of the run, and all metrics computed from them.

``simulation/predictions.csv`` (or ``.parquet``, where it is large and pyarrow is there) has a line for each test row:
group, client, row, truth, prediction, and for each class its probability ``p_CLASS``. ``simulation/baseline.csv`` has
what the training labels of a client predict by themselves.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from unalike.core.disk import write_whole
from unalike.core.lazy import pd
from unalike.data.population import Population
from unalike.learn.metrics import MetricSummary, Predictions, best_threshold, summarise, temperature
from unalike.runs.errors import FLAG, UserError
from unalike.runs.folder import SCORES, SIMULATION, csv_text
from unalike.runs.measure import Measured
from unalike.runs.words import no_formula

_FILES = (f"{SIMULATION}/predictions.parquet", f"{SIMULATION}/predictions.csv")
Grouped = dict[str, tuple[Predictions, int]]  # by group: what was predicted, and for how many clients
BASELINE = f"{SIMULATION}/baseline.csv"
_LARGE = 2_000_000  # cells


def write(path: Path, measured: Sequence[Measured], population: Population) -> None:
    """Write both files into a run's folder; nothing where nobody looked at rows."""
    groups = _groups(measured)
    if not groups:
        return
    tables = [_columns(one, population) for one in groups]
    if sum(len(one) * len(one["row"]) for one in tables) > _LARGE and find_spec("pyarrow") is not None:
        write_whole(path / _FILES[0], made_in(measured, population).to_parquet(index=False))
    else:
        write_whole(path / _FILES[1], _csv(tables))
    write_whole(path / BASELINE, _csv([_baseline(one) for one in groups]))


def _groups(measured: Sequence[Measured]) -> list[Measured]:
    """All groups whose rows were looked at, validation rows apart."""
    groups = [one for one in measured if one.rows is not None]
    return groups + [replace(one, group="validation", rows=one.validation) for one in groups if one.validation]


def made_in(measured: Sequence[Measured], population: Population) -> pd.DataFrame:
    """The predictions of this process as the table of the file."""
    tables = [pd.DataFrame(_columns(one, population)) for one in _groups(measured)]
    return pd.concat(tables, ignore_index=True) if tables else pd.DataFrame()


def baseline_in(measured: Sequence[Measured]) -> pd.DataFrame:
    """What training labels predict by themselves, as the table of its file."""
    tables = [pd.DataFrame(_baseline(one)) for one in _groups(measured)]
    return pd.concat(tables, ignore_index=True) if tables else pd.DataFrame()


def _csv(tables: Sequence[dict[str, Any]]) -> bytes:
    rows = (row for table in tables for row in zip(*map(_cells, table.values()), strict=True))
    return csv_text(list(tables[0]), rows).encode()


def _cells(column: Any) -> list[Any]:
    """A column as cells of a CSV file: numbers that are not whole have six digits."""
    values = column.tolist() if isinstance(column, np.ndarray) else column
    return [f"{one:.6g}" if isinstance(one, float) and one == one else one for one in values]


def _names(one: Measured) -> np.ndarray:
    return np.array([one.train.name(position) for position in range(len(one.train))], dtype=object)


def _columns(one: Measured, population: Population) -> dict[str, Any]:
    rows = one.rows
    assert rows is not None
    names = (population.row_ids[rows.row] if population.row_ids is not None else rows.row).astype(str)
    columns = {"group": [one.group] * len(names), "client": _names(one)[rows.client], "row": names}
    if rows.classes is None:
        return {**columns, "truth": rows.truth, "prediction": rows.answer}
    labels = np.array(list(population.class_names or range(rows.classes)), dtype=object)
    truth = [None if np.isnan(value) else labels[int(value)] for value in rows.truth]
    chances = {f"p_{label}": rows.chances[:, number] for number, label in enumerate(labels)}
    return {**columns, "truth": truth, "prediction": labels[rows.answer], **chances}


def _baseline(one: Measured) -> dict[str, Any]:
    rows = one.rows
    assert rows is not None
    first = np.unique(rows.client, return_index=True)[1]
    columns = {"group": [one.group] * len(first), "client": _names(one)[rows.client[first]]}
    return columns | {f"output_{number}": rows.base[first, number] for number in range(rows.base.shape[1])}


def table(path: Path) -> pd.DataFrame:
    """What the run in this folder predicted, as in its file: names as they are in the data, numbers as numbers."""
    file = next((path / name for name in _FILES if (path / name).exists()), None)
    if file is None:
        raise UserError(f"{path} has no {_FILES[1]}: no test rows were in this process, or an older version ran it")
    if file.suffix == ".parquet":
        return pd.read_parquet(file)
    found = pd.read_csv(file, dtype={"group": str, "client": str, "row": str, "truth": str, "prediction": str})
    if found.columns[-1] == "prediction":  # no probabilities: these are numbers
        return found.astype({"truth": float, "prediction": float})
    return found


def read(path: Path) -> Grouped:
    """By group: what the run in this folder predicted, and for how many clients."""
    return grouped(table(path), pd.read_csv(path / BASELINE, dtype={"group": str, "client": str}))


def grouped(predicted: pd.DataFrame, baseline: pd.DataFrame) -> Grouped:
    """By group: these predictions, and of how many clients they are."""
    base, found = baseline.set_index(["group", "client"]), {}
    for group, rows in predicted.groupby("group", sort=False):
        client, names = pd.factorize(rows["client"])
        chances = rows.filter(regex="^p_")
        labels = [name.removeprefix("p_") for name in chances.columns]
        truth: pd.Series[float]
        if labels:
            outputs = np.log(chances.to_numpy(np.float64).clip(1e-12))
            numbered = {label: number for number, label in enumerate(labels)}
            truth = (
                rows["truth"]
                .map(str, na_action="ignore")
                .map(numbered | {no_formula(label): number for label, number in numbered.items()})
            )
        else:
            outputs, truth = rows[["prediction"]].to_numpy(np.float64), rows["truth"].astype(np.float64)
        own = base.loc[[(str(group), name) for name in names]].to_numpy(np.float64)[client]
        numbers = np.arange(len(rows)), truth.to_numpy(np.float64), outputs
        found[str(group)] = (Predictions(client, *numbers, len(labels) or None, own), len(names))
    return found


def metrics(
    predicted: Grouped, calibrate: bool = False
) -> tuple[dict[str, dict[str, MetricSummary]], dict[str, float]]:
    """All metrics of predictions by group; and the temperature and threshold, if calibrated.

    calibrate: logits are divided by a temperature, and of two classes the second is predicted from a threshold on; both
    are the best on validation rows.
    """
    found, chosen = dict(predicted), {}
    validation = found.pop("validation", (None, 0))[0]
    if calibrate:
        if validation is None or validation.classes is None:
            told = f"there are no predictions of classes for validation rows; train with validation = 0.2{FLAG}"
            raise UserError(told, "data.validation")
        chosen["temperature"] = temperature(validation)
        validation = replace(validation, outputs=validation.outputs / chosen["temperature"])
        if validation.classes == 2:
            chosen["threshold"] = best_threshold(validation)
        for group, (rows, clients) in found.items():
            outputs = rows.outputs / chosen["temperature"]
            found[group] = replace(rows, outputs=outputs, threshold=chosen.get("threshold")), clients
    return {group: summarise(rows, clients) for group, (rows, clients) in found.items()}, chosen


def gains(path: Path, other: Path) -> dict[str, dict[str, int]]:
    """By group: how many clients of one run have a better headline score than in another, a worse one, an equal one."""
    ours, theirs = (pd.read_csv(one / SCORES, dtype={"client": str}) for one in (path, other))
    both = ours.merge(theirs, on=["group", "client"], suffixes=("", "_other"))
    found = {}
    for group, rows in both.groupby("group", sort=False):
        change = (rows["score"] - rows["score_other"]).dropna()
        counts = {"gain": int((change > 0).sum()), "lose": int((change < 0).sum()), "level": int((change == 0).sum())}
        found[str(group)] = counts
    return found
