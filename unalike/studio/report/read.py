"""Reads a run folder for the report. Nothing but files is read, so a report can be made anywhere, long after the run.

Only ``result.json`` must be there; the report names each other file that it lacks. What is about single clients lies in
``simulation/``: a folder that was handed on without it gives a report without that.
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

from pydantic import BaseModel, BeforeValidator, TypeAdapter, ValidationError

from unalike.data import DataError
from unalike.data.build import short_form
from unalike.studio.analyses.file import Analyses, first_fault, read_analyses
from unalike.studio.errors import UserError
from unalike.studio.runs import folder
from unalike.studio.runs.map_data import MapData
from unalike.studio.runs.prepare import FROM_PYTHON
from unalike.studio.runs.result import GROUPS, ByGroup, Result
from unalike.studio.runs.treated import Treated


def _known(value: object) -> object:
    """Empty and NaN both mean that there is no number."""
    missing = value in (None, "", "nan") or (isinstance(value, float) and math.isnan(value))
    return None if missing else value


Number = Annotated[float | None, BeforeValidator(_known)]


class Round(ByGroup):
    """What is drawn of a line of ``metrics.jsonl``; only evaluated rounds have scores."""

    round: int
    loss: Number = None
    epsilon: Number = None


class ClientScore(BaseModel):
    """What is drawn of a line of ``scores.csv``; no score: the client got no model."""

    client: str
    group: str
    score: Number = None


class Sight(BaseModel):
    """A line of ``unalike.core.transcript.Transcript.rows()``: an array that the server got to see."""

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


@dataclass(frozen=True)
class Run:
    """All that a report knows of one run."""

    folder: Path
    label: str
    result: Result
    rounds: list[Round]
    clients: list[ClientScore]
    map: MapData | None
    transcript: list[Sight] | None
    recipe: str | None
    settings: dict[str, str]  # the recipe, flat: "data.clients" -> "40"
    versions: dict[str, str]
    missing: list[str]  # files that are not there, or the whole of ``simulation``
    analyses: Analyses | None
    treated: Treated | None = None

    @property
    def withheld(self) -> bool:
        """Was the folder handed on without its scores, which lie apart where a run has an ε?"""
        return self.result.scores is not None and not (self.folder / self.result.scores).exists()

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


def read_runs(paths: Sequence[Path]) -> list[Run]:
    """Read run folders and give each run a label that no other one has."""
    if not paths:
        raise UserError("a report needs at least one run folder; none was given")
    runs = [_read_run(Path(path)) for path in paths]
    names = [run.result.label or run.result.method.rpartition(":")[2] or run.result.method for run in runs]
    for extra in ("", ", {0.result.data}", ", seed {0.result.seed}", " ({0.label})"):
        labels = [name + extra.format(run) for name, run in zip(names, runs, strict=True)]
        if len(set(labels)) == len(labels):
            break
    else:
        labels = [f"{label} #{i}" for i, label in enumerate(labels, start=1)]
    return [replace(run, label=label) for run, label in zip(runs, labels, strict=True)]


def _read_run(path: Path) -> Run:
    if not path.is_dir():
        raise UserError(f"{path} is not a run folder: there is no such folder")
    if not (path / folder.RESULT).exists():
        raise UserError(
            f"{path} has no {folder.RESULT}, so the run has not ended (or this is no run folder); "
            f"finish it with: unalike resume {path}"
        )
    folder.check_format(path)
    scores, recipe = path / folder.SCORES, path / folder.RECIPE
    result = _parse(Result, path / folder.RESULT, _text(path / folder.RESULT) or "").placed(path)
    of_clients, others = [folder.SCORES, folder.CLIENT_MAP], [folder.TRANSCRIPT, folder.RECIPE, folder.VERSIONS]
    if result.scores is not None:
        of_clients = [folder.ACCURACY, folder.MEASURED, *of_clients]
    if not (path / folder.SIMULATION).exists():
        of_clients = [f"{folder.SIMULATION}/"]
    files = [folder.METRICS, *of_clients, *others]
    table = enumerate(csv.DictReader(io.StringIO(_text(scores) or "")), start=2)
    return Run(
        folder=path,
        label=path.resolve().name,
        result=result,
        rounds=_rounds(path),
        clients=[_parse(ClientScore, scores, row, f", row {i}") for i, row in table],
        map=_optional(MapData, path / folder.CLIENT_MAP),
        transcript=_optional(list[Sight], path / folder.TRANSCRIPT),
        recipe=_text(recipe),
        settings=_settings(recipe, _text(recipe) or ""),
        versions=_flat(_optional(dict[str, Any], path / folder.VERSIONS) or {}),
        missing=[name for name in files if not (path / name).exists()],
        analyses=read_analyses(path),
        treated=_optional(Treated, path / folder.TREATED),
    )


def _rounds(path: Path) -> list[Round]:
    """Every round, with the scores that lie apart where a run has an ε."""
    told, measured = (
        [_parse(Round, file, line, f", line {i}") for i, line in enumerate(lines, start=1) if line.strip()]
        for file in (path / folder.METRICS, path / folder.MEASURED)
        for lines in [(_text(file) or "").splitlines()]
    )
    scores = {one.round: {group: one.of(group) for group in GROUPS} for one in measured}
    return [one.model_copy(update=scores.get(one.round)) for one in told]


_ADVICE = "it was cut off or edited after the run; repeat the run, or restore the file"
T = TypeVar("T")


def _text(file: Path) -> str | None:
    try:
        return file.read_text(encoding="utf-8")
    except FileNotFoundError:
        return None
    except UnicodeDecodeError as error:
        raise UserError(f"{file} is not UTF-8 text ({error.reason} at byte {error.start}); {_ADVICE}") from None


def _parse(kind: type[T], file: Path, content: str | dict[str, Any], where: str = "") -> T:
    """JSON, or a row of a table, as what it should be."""
    known: TypeAdapter[T] = TypeAdapter(kind)
    try:
        return known.validate_json(content) if isinstance(content, str) else known.validate_python(content)
    except ValidationError as error:
        raise UserError(f"{file}{where}: {first_fault(error)}; {_ADVICE}") from None


def _optional(kind: type[T], file: Path) -> T | None:
    text = _text(file)
    return None if text is None else _parse(kind, file, text)


def _settings(path: Path, recipe: str) -> dict[str, str]:
    try:
        settings = _flat(tomllib.loads(recipe))
    except tomllib.TOMLDecodeError as error:
        raise UserError(f"{path} is not valid TOML ({error}); {_ADVICE}") from None
    if "data.partition" in settings:
        with contextlib.suppress(DataError):  # of another version of Unalike: it stays as it was written
            settings["data.partition"] = short_form(settings["data.partition"])
    return settings


def _flat(nested: dict[str, Any], prefix: str = "") -> dict[str, str]:
    """Nested tables as dotted names."""
    entries: dict[str, str] = {}
    for name, value in nested.items():
        if isinstance(value, dict):
            entries |= _flat(value, f"{prefix}{name}.")
        else:
            entries[prefix + name] = value if isinstance(value, str) else json.dumps(value, default=str)
    return entries
