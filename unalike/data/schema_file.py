"""A schema as a file that a person can read, check and make public: centers and deviations by the columns' names."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from unalike.core.client import Clients
from unalike.core.schema import Schema
from unalike.data.files.layout import MISSING
from unalike.data.population import Population
from unalike.data.source import DataError, number_places

_WARNING = (
    "center and deviation were computed from the training rows, and are not used while this note is here; put public "
    "knowledge in their place and remove the note"
)


def schema_text(population: Population) -> str:
    """The schema of this data as JSON; of a table with the center and the deviation of each column of numbers."""
    schema = population.schema
    values: dict[str, Any] = json.loads(replace(schema, shift=None, scale=None).to_json())
    if schema.columns is None:
        return json.dumps(json.loads(schema.to_json()), indent=1, ensure_ascii=False)
    seen = population.train.select(population.seen)
    x = seen.x[seen.pool_rows()[0]].to(torch.float64)
    places = number_places(schema.columns or {})
    center = {name: _mean(x[:, place]) for name, place in places.items()}
    deviation = {name: _mean((x[:, place] - center[name]).square()) ** 0.5 or 1.0 for name, place in places.items()}
    if schema.shift is not None and schema.scale is not None:  # public already
        center = {name: float(schema.shift[place]) for name, place in places.items()}
        deviation = {name: 1 / float(schema.scale[place]) for name, place in places.items()}
    else:
        values["note"] = _WARNING
        indicators = [name for name in places if name.endswith(MISSING)]  # of zeros and ones, whatever the rows hold
        center |= dict.fromkeys(indicators, 0.0)
        deviation |= dict.fromkeys(indicators, 1.0)
        if schema.target == "number" and schema.target_center is None:
            values |= _of_target(seen)
    values["center"] = {name: float(f"{one:.4g}") for name, one in center.items()}
    values["deviation"] = {name: float(f"{one:.4g}") for name, one in deviation.items()}
    return json.dumps(values, indent=1, ensure_ascii=False)


def write_schema(population: Population, file: str | Path) -> None:
    """Write what rows look like into a new file, to be checked, made public and given to a run with an ε."""
    with Path(file).open("x", encoding="utf-8") as made:
        made.write(schema_text(population) + "\n")


def _of_target(clients: Clients) -> dict[str, float]:
    """The center and the deviation of the numbers to predict, if there are any."""
    rows = clients.select(clients.labeled.nonzero().flatten()).pool_rows()[0]
    y = None if clients.y is None else clients.y[rows if clients.known is None else rows[clients.known[rows]]].double()
    if y is None or not len(y):
        return {}
    numbers = {"target_center": float(y.mean()), "target_deviation": float(y.std(correction=0)) or 1.0}
    return {name: float(f"{number:.4g}") for name, number in numbers.items()}


def _mean(values: Tensor) -> float:
    return float(values.nanmean().nan_to_num(0.0))


def read_schema(file: str | Path) -> Schema:
    """The schema in a file."""
    path = Path(file).expanduser()
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
        center, deviation = values.pop("center", None), values.pop("deviation", None)
        if values.pop("note", None) is not None:  # nobody has said that they are public
            center = deviation = None
            values = {name: value for name, value in values.items() if not name.startswith("target_")}
        schema = Schema.from_json(json.dumps(values))
    except OSError as error:
        raise DataError(f"the schema {path} cannot be read: {error.strerror}") from error
    except (ValueError, AttributeError) as error:
        raise DataError(
            f"{path}: not a schema: {str(error).removeprefix('not a schema: ')}; expected JSON as `unalike data "
            "DATASET --schema FILE` writes it: shape, kind, columns, classes, class_names, and center and deviation by "
            "column, or shift and scale"
        ) from error
    if center is not None or deviation is not None:
        return _scaled(schema, path, center, deviation)
    for name, value in (("shift", schema.shift), ("scale", schema.scale)):
        if value is not None and not bool(value.isfinite().all()):
            raise DataError(f"{path}: its {name} holds numbers that are not finite")
    return schema


def _scaled(schema: Schema, path: Path, center: Any, deviation: Any) -> Schema:
    """The schema with the constants that are given by column."""
    shift, scale = torch.zeros(schema.shape), torch.ones(schema.shape)
    places = number_places(schema.columns or {})
    for what, given in (("center", center), ("deviation", deviation)):
        if not isinstance(given, dict) or set(given) != set(places):
            raise DataError(f"{path}: {what} must have a number for each of {', '.join(places) or 'no column'}")
        for name, number in given.items():
            if not isinstance(number, int | float) or not abs(number) < 1e30 or (what == "deviation" and number <= 0):
                raise DataError(
                    f"{path}: the {what} of {name!r} is {number!r}; expected a finite number"
                    + (" above 0" if what == "deviation" else "")
                )
            if what == "center":
                shift[places[name]] = number
            else:
                scale[places[name]] = 1 / number
    return replace(schema, shift=shift, scale=scale)
