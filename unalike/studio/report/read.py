"""Reads a run folder for the report. Nothing but files is read, so a report can be made anywhere, long after the run.

Files of a run folder that a report uses (only ``result.json`` must be there; the report names each other one it lacks):

- ``result.json``: method, label (may be left out), data, seed, rounds, seconds, metric, expected, failures,
  ``accuracy.{seen,unseen,unlabeled}.{mean,std,p10,clients,failed}`` or null, ``bytes.{up,down}``,
  ``privacy.{private,epsilon,delta,unit}``;
- ``metrics.jsonl``: one object for each round: round, seconds, loss, bytes_up, bytes_down (all totals since the start),
  epsilon, and at evaluated rounds seen, unseen, unlabeled as in the result;
- ``simulation/clients.csv``: client, group (seen, unseen, unlabeled), n_train, n_test, score, loss; an empty score
  means that the client got no model;
- ``simulation/clients.json``: what the client map is drawn from, columns of equal length::

      {"names": [...], "group": [...], "n": [...],
       "label_histogram": [[rows of class 0, of class 1, ...], ...] or null,
       "descriptor": [[...], ...] or null,
       "class_names": [...] or null}

  A client is found in ``clients.csv`` by its name and group. Without labels and descriptors there is no map;
- ``transcript.json``: the rows of ``unalike.core.transcript.Transcript.rows()``;
- ``recipe.toml`` and ``versions.json``: shown as they are;
- ``analyses.json``: only there after ``unalike analyse``; see ``unalike.studio.analyses.file``.
"""

from __future__ import annotations

import contextlib
import csv
import io
import json
import math
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, BeforeValidator, TypeAdapter, ValidationError, model_validator

from unalike.data import DataError
from unalike.data.build import short_form
from unalike.studio.analyses.file import Analyses, read_analyses
from unalike.studio.errors import UserError
from unalike.studio.runs.folder import CLIENT_MAP, SCORES, check_format
from unalike.studio.runs.prepare import FROM_PYTHON
from unalike.studio.runs.result import ByGroup, Result


class ReportError(UserError):
    """A run folder cannot be read; the message says which file, what is wrong and what to do."""


def _known(value: object) -> object:
    """Empty and NaN both mean that there is no number."""
    missing = value is None or value == "" or (isinstance(value, float) and math.isnan(value)) or value == "nan"
    return None if missing else value


Number = Annotated[float | None, BeforeValidator(_known)]


class Round(ByGroup):
    """One line of ``metrics.jsonl``."""

    round: int
    seconds: Number = None
    loss: Number = None
    bytes_up: Number = None
    bytes_down: Number = None
    epsilon: Number = None


class ClientScore(BaseModel):
    """One line of ``clients.csv``."""

    client: str
    group: str
    n_train: Number = None
    n_test: Number = None
    score: Number = None
    loss: Number = None


class Sight(BaseModel):
    """One line of the transcript: an array that the server got to see."""

    task: str
    array: str
    shape: tuple[int, ...]
    seen_as: str
    first: int
    last: int
    times: int
    replies: int
    bytes: int
    unit: str | None = None
    clip: Number = None
    noise: str | None = None
    sampling: str | None = None
    note: str | None = None
    epsilon: Number = None


class ClientMap(BaseModel):
    """``clients.json``."""

    names: list[str]
    group: list[str]
    n: list[int]
    label_histogram: list[list[float]] | None = None
    descriptor: list[list[float]] | None = None
    class_names: list[str] | None = None

    @model_validator(mode="after")
    def _equal_lengths(self) -> ClientMap:
        for name in ("group", "n", "label_histogram", "descriptor"):
            column = getattr(self, name)
            if column is not None and len(column) != len(self.names):
                raise ValueError(f"{name} has {len(column)} entries for {len(self.names)} names")
        for name in ("label_histogram", "descriptor"):
            if len({len(row) for row in getattr(self, name) or ()}) > 1:
                raise ValueError(f"the rows of {name} differ in length")
        return self


@dataclass(frozen=True)
class Run:
    """All that a report knows of one run."""

    folder: Path
    label: str
    result: Result
    rounds: list[Round]
    clients: list[ClientScore]
    map: ClientMap | None
    transcript: list[Sight] | None
    recipe: str | None
    settings: dict[str, str]  # the recipe, flat: "data.clients" -> "40"
    versions: dict[str, str]
    missing: list[str]  # files that are not there
    analyses: Analyses | None = None

    @property
    def names(self) -> set[str]:
        """All clients that the run's files tell of."""
        return {row.client for row in self.clients} | set(self.map.names if self.map else ())

    @property
    def origin(self) -> dict[str, str]:
        """How the clients came about: what two runs must agree in to have the same ones; empty if nothing is known."""
        made = {key: value for key, value in self.settings.items() if key.startswith("data.")}
        if not made:
            return {}
        own_seed = made.pop("data.seed", self.settings.get("seed", str(self.result.seed)))
        return made if made.get("data.name", "").startswith(FROM_PYTHON) else {**made, "seed": own_seed}

    def scores(self, group: str) -> dict[str, float]:
        """Client -> score, of those clients of a group that were served."""
        return {row.client: row.score for row in self.clients if row.group == group and row.score is not None}


def read_runs(folders: Sequence[Path]) -> list[Run]:
    """Read run folders and give each run a label that no other one has."""
    if not folders:
        raise ReportError("a report needs at least one run folder; none was given")
    runs = [_read_run(Path(folder)) for folder in folders]
    for extra in (_no_extra, _data, _seed, _folder):
        labels = [_name(run) + extra(run) for run in runs]
        if len(set(labels)) == len(labels):
            break
    else:
        labels = [f"{label} #{i}" for i, label in enumerate(labels, start=1)]
    return [replace(run, label=label) for run, label in zip(runs, labels, strict=True)]


def _no_extra(run: Run) -> str:
    return ""


def _data(run: Run) -> str:
    return f", {run.result.data}"


def _seed(run: Run) -> str:
    return f", seed {run.result.seed}"


def _folder(run: Run) -> str:
    return f" ({run.folder.resolve().name})"


def _name(run: Run) -> str:
    """``some/file.py:MyMethod`` is called MyMethod."""
    return run.result.label or run.result.method.rpartition(":")[2] or run.result.method


def _read_run(folder: Path) -> Run:
    if not folder.is_dir():
        raise ReportError(f"{folder} is not a run folder: there is no such folder")
    files = ("metrics.jsonl", SCORES, CLIENT_MAP, "transcript.json", "recipe.toml", "versions.json")
    text = {name: _text(folder / name) for name in files}
    result = _text(folder / "result.json")
    if result is None:
        raise ReportError(
            f"{folder} has no result.json, so the run has not ended (or this is no run folder); "
            f"finish it with: unalike resume {folder}"
        )
    check_format(folder)
    recipe = text["recipe.toml"]
    versions = text["versions.json"]
    return Run(
        folder=folder,
        label=folder.name,
        result=_parse(Result, folder / "result.json", result),
        rounds=_parse_lines(folder / "metrics.jsonl", text["metrics.jsonl"] or ""),
        clients=_parse_table(folder / SCORES, text[SCORES] or ""),
        map=_optional(ClientMap, folder / CLIENT_MAP, text[CLIENT_MAP]),
        transcript=_optional(list[Sight], folder / "transcript.json", text["transcript.json"]),
        recipe=recipe,
        settings=_settings(folder / "recipe.toml", recipe or ""),
        versions={} if versions is None else flat(_parse(dict[str, Any], folder / "versions.json", versions)),
        missing=[name for name in files if text[name] is None],
        analyses=read_analyses(folder),
    )


def _text(path: Path) -> str | None:
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return None
    except UnicodeDecodeError as error:
        raise ReportError(f"{path} is not UTF-8 text ({error.reason} at byte {error.start}); {_ADVICE}") from None


_ADVICE = "it was cut off or edited after the run; repeat the run, or restore the file"
T = TypeVar("T")


def _parse(kind: type[T], path: Path, text: str, where: str = "") -> T:
    try:
        return TypeAdapter(kind).validate_python(json.loads(text))
    except json.JSONDecodeError as error:
        where = where or f"line {error.lineno}, column {error.colno}"
        raise ReportError(f"{path} is not valid JSON ({where}: {error.msg}); {_ADVICE}") from None
    except ValidationError as error:
        raise ReportError(f"{path}{where and ', ' + where}: {_first(error)}; {_ADVICE}") from None


def _optional(kind: type[T], path: Path, text: str | None) -> T | None:
    return None if text is None else _parse(kind, path, text)


def _first(error: ValidationError) -> str:
    detail = error.errors()[0]
    name = ".".join(map(str, detail["loc"]))
    return f"{name}: {detail['msg']}" if name else detail["msg"]


def _parse_lines(path: Path, text: str) -> list[Round]:
    lines = enumerate(text.splitlines(), start=1)
    return [_parse(Round, path, line, f"line {number}") for number, line in lines if line.strip()]


def _parse_table(path: Path, text: str) -> list[ClientScore]:
    rows = []
    for number, row in enumerate(csv.DictReader(io.StringIO(text)), start=2):
        try:
            rows.append(ClientScore.model_validate(row))
        except ValidationError as error:
            raise ReportError(f"{path}, row {number}: {_first(error)}; {_ADVICE}") from None
    return rows


def _settings(path: Path, recipe: str) -> dict[str, str]:
    try:
        settings = flat(tomllib.loads(recipe))
    except tomllib.TOMLDecodeError as error:
        raise ReportError(f"{path} is not valid TOML ({error}); {_ADVICE}") from None
    if "data.partition" in settings:
        with contextlib.suppress(DataError):  # of another version of Unalike: it stays as it was written
            settings["data.partition"] = short_form(settings["data.partition"])
    return settings


def flat(nested: dict[str, Any], prefix: str = "") -> dict[str, str]:
    """Nested tables as dotted names."""
    entries: dict[str, str] = {}
    for name, value in nested.items():
        if isinstance(value, dict):
            entries |= flat(value, f"{prefix}{name}.")
        else:
            entries[prefix + name] = value if isinstance(value, str) else json.dumps(value, default=str)
    return entries
