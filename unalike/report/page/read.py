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
import statistics
import tomllib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, BeforeValidator, TypeAdapter, ValidationError

from unalike.data import DataError
from unalike.data.partition.assignment import short_form
from unalike.report.analyses.file import Analyses, first_fault, read_analyses
from unalike.runs import folder
from unalike.runs.errors import UserError
from unalike.runs.load import FROM_PYTHON
from unalike.runs.map_data import MapData, Treatment
from unalike.runs.result import GROUPS, NEGATIVE, ByGroup, Bytes, Result, Summary


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
    n_train: int | None = None
    score: Number = None
    seed: int = 0  # of the run


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
    noise: dict[str, Any] | str | None = None  # a string in the folders of older versions
    sampling: dict[str, Any] | str | None = None
    note: str | None = None


@dataclass(frozen=True)
class Run:
    """All that a report knows of one run, or of the runs of one method that differ in their seed alone."""

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
    treated: Treatment | None = None
    seeds: tuple[int, ...] = ()
    lower_is_better: bool = False  # the metric is an error

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

    def scores(self, group: str) -> dict[tuple[str, int], float]:
        """(client, seed) -> score, of those clients of a group that were served."""
        return {
            (row.client, row.seed): row.score for row in self.clients if row.group == group and row.score is not None
        }

    def mean_scores(self) -> dict[tuple[str, str], float]:
        """(client, group) -> mean score over the seeds."""
        found: dict[tuple[str, str], list[float]] = {}
        for row in self.clients:
            if row.score is not None:
                found.setdefault((row.client, row.group), []).append(row.score)
        return {place: statistics.fmean(scores) for place, scores in found.items()}


def read_runs(paths: Sequence[Path]) -> list[Run]:
    """Read run folders; runs that differ in their seed alone become one. Each gets a label that no other one has."""
    if not paths:
        raise UserError("a report needs at least one run folder; none was given")
    runs = _merge_seeds([_read_run(Path(path)) for path in paths])
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
    scores, recipe = path / folder.SCORES, _text(path / folder.RECIPE)
    result = _parse(Result, path / folder.RESULT, _text(path / folder.RESULT) or "").placed(path)
    of_clients, others = [folder.SCORES, folder.CLIENT_MAP], [folder.TRANSCRIPT, folder.RECIPE, folder.VERSIONS]
    if result.scores is not None:
        of_clients = [folder.ACCURACY, folder.MEASURED, *of_clients]
    if not (path / folder.SIMULATION).exists():
        of_clients = [f"{folder.SIMULATION}/"]
    files = [folder.METRICS, *of_clients, *others]
    table = enumerate(csv.DictReader(io.StringIO(_text(scores) or "")), start=2)
    run = Run(
        folder=path,
        label=path.resolve().name,
        result=result,
        rounds=_rounds(path),
        clients=[_parse(ClientScore, scores, {**row, "seed": result.seed}, f", row {i}") for i, row in table],
        map=_optional(MapData, path / folder.CLIENT_MAP),
        transcript=_optional(list[Sight], path / folder.TRANSCRIPT),
        recipe=recipe,
        settings=_settings(path / folder.RECIPE, recipe or ""),
        versions=_flat(_optional(dict[str, Any], path / folder.VERSIONS) or {}),
        missing=[name for name in files if not (path / name).exists()],
        analyses=read_analyses(path),
        treated=_optional(Treatment, path / folder.TREATMENT),
        seeds=(result.seed,),
    )
    return _as_error(run) if result.metric.startswith(NEGATIVE) else run


def _as_error(run: Run) -> Run:
    """The same run with its error as a positive number, of which less is better."""
    expected = {group: value and -value for group, value in run.result.expected.items()}
    result: dict[str, Any] = {"metric": run.result.metric.removeprefix(NEGATIVE), "expected": expected}
    result["accuracy"] = ByGroup(**_by_group(_negated, [run.result.accuracy]))
    return replace(
        run,
        result=run.result.model_copy(update=result),
        rounds=[one.model_copy(update=_by_group(_negated, [one])) for one in run.rounds],
        clients=[one.model_copy(update={"score": None if one.score is None else -one.score}) for one in run.clients],
        lower_is_better=True,
    )


def _by_group(change: Callable[[Sequence[Summary]], Summary], found: Sequence[ByGroup]) -> dict[str, Summary | None]:
    """For each group of clients what ``change`` makes of its summaries; None where there are none."""
    known = {group: [one for each in found if (one := each.of(group)) is not None] for group in GROUPS}
    return {group: change(summaries) if summaries else None for group, summaries in known.items()}


def _negated(summaries: Sequence[Summary]) -> Summary:
    (one,) = summaries
    worst = None if one.worst is None else -one.worst
    return one.model_copy(update={"mean": -one.mean, "p10": -one.p10, "worst": worst})


def _over_seeds(summaries: Sequence[Summary]) -> Summary:
    """The mean over seeds; ``std`` is the deviation over seeds."""
    means, worst = [one.mean for one in summaries], [one.worst for one in summaries if one.worst is not None]
    return Summary(
        mean=statistics.fmean(means),
        std=statistics.pstdev(means),
        p10=statistics.fmean(one.p10 for one in summaries),
        worst=statistics.fmean(worst) if worst else None,
        **{name: sum(getattr(one, name) for one in summaries) for name in ("clients", "scored", "failed")},
    )


_SEEDS = ("seed", "data.seed")


def _merge_seeds(runs: Sequence[Run]) -> list[Run]:
    """Runs of the same method, data and settings but for the seed become one, in the place of the first."""
    groups: dict[str, list[Run]] = {}
    for run in runs:
        settings = {key: value for key, value in run.settings.items() if key not in _SEEDS}
        named = [run.result.label, run.result.method, run.result.data, settings]
        key = json.dumps(named) if settings else str(run.folder)
        if any(one.result.seed == run.result.seed for one in groups.get(key, ())):
            key = str(run.folder)  # the same once more
        groups.setdefault(key, []).append(run)
    return [_merged(same) if len(same) > 1 else same[0] for same in groups.values()]


def _merged(runs: Sequence[Run]) -> Run:
    """One run for all seeds: means with their deviation over seeds, all clients' scores, all else of the first."""
    first, results = runs[0], [run.result for run in runs]
    up, down = (round(statistics.fmean(getattr(one.bytes, way) for one in results)) for way in ("up", "down"))
    spent = [one.privacy for one in results]
    result = {
        "accuracy": ByGroup(**_by_group(_over_seeds, [one.accuracy for one in results])),
        "bytes": Bytes(up=up, down=down),
        "seconds": statistics.fmean(one.seconds for one in results),
        "privacy": max(spent, key=lambda one: math.inf if one.epsilon is None else one.epsilon),
        "failures": sum(one.failures for one in results),
    }
    seeds = tuple(one.seed for one in results)
    settings = {key: value for key, value in first.settings.items() if key not in _SEEDS}
    return replace(
        first,
        result=first.result.model_copy(update=result),
        rounds=_mean_rounds(runs),
        clients=[row for run in runs for row in run.clients],
        settings=settings | {"seed": ", ".join(map(str, seeds))},
        missing=list(dict.fromkeys(name for run in runs for name in run.missing)),
        analyses=next((run.analyses for run in runs if run.analyses), None),
        seeds=seeds,
    )


def _mean_rounds(runs: Sequence[Run]) -> list[Round]:
    """The rounds that all seeds have."""
    rounds = []
    for same in zip(*(run.rounds for run in runs), strict=False):
        losses = [one.loss for one in same if one.loss is not None]
        spent = [one.epsilon for one in same if one.epsilon is not None]
        loss = statistics.fmean(losses) if len(losses) == len(same) else None
        epsilon = max(spent) if len(spent) == len(same) else None
        rounds.append(Round(round=same[0].round, loss=loss, epsilon=epsilon, **_by_group(_over_seeds, same)))
    return rounds


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
