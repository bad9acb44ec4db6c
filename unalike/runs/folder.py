"""A run folder: everything about a run, in files that are either whole or not there.

Every file but ``metrics.jsonl`` is written beside its place, brought to the disk and then renamed, so a crash leaves
the old one or the new one. ``metrics.jsonl`` grows by a line each round and is cut back to the checkpoint when a run
resumes.
"""

from __future__ import annotations

import contextlib
import csv
import importlib.metadata
import io
import itertools
import json
import os
import platform
import re
import shutil
import unicodedata
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, Literal, TypeVar

from unalike.core import outside
from unalike.core.disk import write_whole
from unalike.core.roster import Roster
from unalike.core.schema import Schema
from unalike.networks.pretrained import PREFIX, find_folder
from unalike.runs.errors import FLAG, UserError
from unalike.runs.recipe.keys import flatten
from unalike.runs.recipe.recipe import CODE, PRETRAINED, Recipe, code_paths
from unalike.runs.recipe.recipe import RECIPE as RECIPE
from unalike.runs.words import no_formula
from unalike.version import __version__

FORMAT = 1  # of run and comparison folders; raise it when a file changes so that older folders would be misread
ABOUT, VERSIONS, RESULT = "unalike.json", "versions.json", "result.json"
SCHEMA, ROSTER, METRICS, METRICS_TABLE = "schema.json", "roster.safetensors", "metrics.jsonl", "metrics.csv"
CHECKPOINT, TRANSCRIPT, LEDGER, LOCK = "checkpoint.safetensors", "transcript.json", "ledger.json", ".lock"
JOURNAL = "ledger.journal.json"  # what the asks of a private run have cost since its last checkpoint
ANALYSES, REPORT, COMPARISON = "simulation/analyses.json", "report.html", "comparison.json"
TREATMENT = "treated.json"  # clients' weights and clusters, as the server knows them
CLIENTS = "clients"  # what stays with the clients: what they keep, and a fingerprint of their data
SIMULATION = "simulation"  # what only a simulation may look at; never exported
SCORES, CLIENT_MAP = f"{SIMULATION}/scores.csv", f"{SIMULATION}/map.json"
# Of a run with an ε the scores, which are measured without noise, lie there as well, and so does a report of them.
MEASURED, MEASURED_TABLE = f"{SIMULATION}/{METRICS}", f"{SIMULATION}/{METRICS_TABLE}"
ACCURACY: Literal["simulation/accuracy.json"] = "simulation/accuracy.json"
WORKERS = f"{SIMULATION}/workers.json"  # and what workers did, which tells how many clients were drawn
T = TypeVar("T")
_LIBRARIES = ("unalike", "torch", "numpy", "scikit-learn", "dp-accounting", "safetensors", "pydantic")


def write_json(file: Path, content: Any, mode: int = 0o600) -> None:
    write_whole(file, json.dumps(content, indent=2, allow_nan=False).encode() + b"\n", mode)


def read_json(file: Path) -> Any:
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"{file.parent} has no {file.name}; is it the folder of a finished run?") from None
    except OSError as error:
        raise UserError(f"{file} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise UserError(f"{file} is damaged: {error}") from error


def check_format(folder: Path) -> None:
    """Refuse the folder of a run or comparison whose files are in another format than this version reads."""
    if not folder.is_dir():
        raise UserError(f"there is no run folder {folder}")
    file = folder / ABOUT
    content = read_json(file) if file.is_file() else {}
    found = content.get("format") if isinstance(content, dict) else content
    if found == FORMAT and type(found) is int:
        return
    what = f"format {_short(found)}" if found is not None else f"no format number (a file {ABOUT} would say it)"
    again = f": unalike run {folder / RECIPE} --out NEW_FOLDER" if (folder / RECIPE).is_file() else ""
    raise UserError(
        f"{folder} has {what}, but this version of Unalike ({__version__}) reads format {FORMAT}; use the version that "
        f"made it (see {VERSIONS}), or repeat the run with this one{again}"
    )


def check_run(folder: Path) -> None:
    """Refuse what is no run folder, or one in another format."""
    if not (folder / RECIPE).is_file():
        raise UserError(f"{folder} is no run folder: it has no {RECIPE}; give one that `unalike run` wrote")
    check_format(folder)


def runs_in(path: Path) -> list[Path]:
    """The folder of a run, or those of the runs of a comparison, at least one."""
    if not path.is_dir():
        raise UserError(f"there is no run folder {path}")
    return compared_runs(path) if (path / COMPARISON).exists() else [path]


def compared_runs(comparison: Path) -> list[Path]:
    """The folders of a comparison's runs, at least one."""
    check_format(comparison)
    file = comparison / COMPARISON
    content = read_json(file)
    runs = content.get("runs") if isinstance(content, dict) else None
    if not isinstance(runs, list) or not runs:
        raise UserError(f'{file} is damaged: expected "runs", a list of one or more, got {_short(content)}')
    for one in runs:
        name = one.get("folder") if isinstance(one, dict) else None
        if not isinstance(name, str) or not name or Path(name).name != name:
            raise UserError(f'{file} is damaged: expected a run with "folder", the name of one, got {_short(one)}')
    return [comparison / one["folder"] for one in runs]


def _short(content: Any) -> str:
    text = json.dumps(content)
    return text if len(text) <= 80 else text[:79] + "…"


def write_table(file: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """CSV with the columns of all rows; nested values as ``group.name``."""
    flat = [flatten(row) for row in rows]
    names = list(dict.fromkeys(name for row in flat for name in row))
    write_whole(file, csv_text(names, ([row.get(name) for name in names] for row in flat)).encode())


def csv_text(names: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """Rows as CSV under these names; nothing and NaN are empty. Without pandas, which a run may not need otherwise."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(names)
    writer.writerows(["" if cell is None or cell != cell else no_formula(cell) for cell in row] for row in rows)
    return text.getvalue()


def check_free(path: Path) -> None:
    """Refuse a folder that holds anything: nothing is overwritten."""
    if path.exists() and not path.is_dir():
        raise UserError(f"{path} is a file, not a folder; choose another{FLAG}", "out")
    if path.is_dir() and any(path.iterdir()):
        begun = (path / RECIPE).exists() or (path / COMPARISON).exists()
        ended = any((path / name).exists() for name in (REPORT, f"{SIMULATION}/{REPORT}", RESULT))
        advice = f"go on with its unfinished run (unalike resume {path}), or " if begun and not ended else ""
        raise UserError(f"{path} exists already, and nothing is overwritten: {advice}choose another{FLAG}", "out")


def create(path: Path, recipe: Recipe | None = None, label: str = "") -> None:
    """Make the folder of a run, or of a comparison, which has no recipe of its own."""
    path.mkdir(parents=True, exist_ok=True)
    write_json(path / VERSIONS, versions())
    write_json(path / ABOUT, {"format": FORMAT, "version": __version__, "label": label})
    if recipe is not None:
        write_whole(path / RECIPE, recipe.to_toml().encode())
        if recipe.model.name is not None and recipe.model.name.startswith(PREFIX):
            _keep_pretrained(find_folder(recipe.model.name), path / PRETRAINED)
        if code := outside.code_of(code_paths(recipe.model_dump())):
            write_json(path / CODE, code)


def _keep_pretrained(source: Path, own: Path) -> None:
    """Link the files of a pretrained network, or copy them to another disk: the folder of a run needs no other."""
    own.mkdir()
    for file in source.iterdir():
        if file.is_file() and file.suffix in (".json", ".safetensors", ".txt", ".model"):
            try:
                os.link(file.resolve(), own / file.name)
            except OSError:
                shutil.copyfile(file, own / file.name)


def save_roster(path: Path, roster: Roster) -> None:
    """Who trains, and how their rows are read: with these two files a run is of use where its data are not."""
    write_json(path / SCHEMA, json.loads(roster.schema.to_json()))  # a person can read and edit it
    write_whole(path / ROSTER, roster.encode())


def load_roster(path: Path) -> Roster:
    """The training clients of a run and the schema of their rows; refused if a file is missing, damaged or changed."""
    schema = _part(path, SCHEMA, lambda content: Schema.from_json(content.decode()))
    roster = _part(path, ROSTER, Roster.decode)
    if schema != roster.schema:
        ours, theirs = (json.loads(one.to_json()) for one in (schema, roster.schema))
        other = [key for key in {**theirs, **ours} if json.dumps(ours.get(key)) != json.dumps(theirs.get(key))]
        raise UserError(
            f"{path / SCHEMA} is not the schema that the run was trained with: it differs from the one in {ROSTER} in "
            f"{', '.join(other)}. A model cannot read other rows than those that it was trained on. {_again(path)}"
        )
    return roster


def _part(path: Path, name: str, decode: Callable[[bytes], T]) -> T:
    try:
        return decode((path / name).read_bytes())
    except FileNotFoundError:
        raise incomplete(path, name) from None
    except OSError as error:
        raise UserError(f"{path / name} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise UserError(f"{path / name} is damaged: {error}. {_again(path)}") from error


def incomplete(path: Path, name: str) -> UserError:
    """A file of a run is missing."""
    return UserError(
        f"{path} has no {name}, so the folder is not complete, or an older version wrote it. {_again(path)}"
    )


def _again(path: Path) -> str:
    return (
        "Copy the whole folder once more from where the run was trained, or train it again: "
        f"unalike run {path / RECIPE} --out NEW_FOLDER"
    )


def plain_name(text: str) -> str:
    """The text as the name of a folder that is easy to type: ``ε = 8`` is ``epsilon-8``."""
    spelled = (
        unicodedata.name(letter).rpartition(" ")[2].lower() if "α" <= letter <= "ω" else letter
        for letter in unicodedata.normalize("NFKD", text.casefold())
    )
    ascii_only = "".join(spelled).encode("ascii", "ignore").decode()
    return re.sub(r"[^a-z0-9_.]+", "-", ascii_only).strip("-.") or "run"


def fresh_name(base: Path) -> Path:
    """``base``, or ``base-2``, ``base-3``, ...: the first that does not exist."""
    names = itertools.chain([base.name], (f"{base.name}-{number}" for number in itertools.count(2)))
    return next(path for path in map(base.with_name, names) if not path.exists())


def versions() -> dict[str, str]:
    """What the run was made with."""
    found = {"python": platform.python_version(), "system": platform.platform()}
    for name in _LIBRARIES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found


class RunFolder:
    """The files of one run; only one process at a time may hold it.

    ``private``: scores go to a file of their own in ``simulation/``.
    ``new``: it was made for this run, so an error before the end of the first round, which leaves nothing to go on
    with, takes it away again. After an error of the disk it stays, because the run can go on; and so it does where
    clients have given something that is charged.
    """

    def __init__(self, path: Path, new: bool = False, private: bool = False) -> None:
        self.path, self._new = path, new
        self._metrics = {METRICS: METRICS_TABLE} | ({MEASURED: MEASURED_TABLE} if private else {})
        self._open: dict[str, IO[str]] = {}
        self._lock: IO[str] | None = None

    def __enter__(self) -> RunFolder:
        self._lock = (self.path / LOCK).open("w")
        try:
            import fcntl
        except ImportError:  # no such locks on this system
            return self
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            self._lock.close()
            raise UserError(f"{self.path} is in use by another run that is still going") from None
        return self

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        for file in self._open.values():
            file.close()
        if self._lock is not None:
            self._lock.close()
            (self.path / LOCK).unlink(missing_ok=True)
        failed = isinstance(error, Exception) and not isinstance(error, OSError)
        spent = (self.path / JOURNAL).exists()
        if self._new and failed and not spent and not read_metrics(self.path / METRICS):
            shutil.rmtree(self.path, ignore_errors=True)

    def keep_metrics(self, rounds: int) -> list[dict[str, Any]]:
        """Drop the lines of rounds after ``rounds`` (and a line cut short by a crash): they will be made again."""
        for name in self._metrics:
            kept = [record for record in read_metrics(self.path / name) if 0 < record["round"] <= rounds]
            lines = "".join(json.dumps(record) + "\n" for record in kept)
            (self.path / name).parent.mkdir(exist_ok=True)
            write_whole(self.path / name, lines.encode())
        return read_rounds(self.path)

    def add_metrics(self, record: Mapping[str, Any], measured: Mapping[str, Any]) -> None:
        """A round's line; what was ``measured`` in it stands there, too, or apart if the run is private."""
        if MEASURED not in self._metrics:
            self._add(METRICS, {**record, **measured})
            return
        self._add(METRICS, record)
        if measured:
            self._add(MEASURED, {"round": record["round"], **measured})

    def _add(self, name: str, record: Mapping[str, Any]) -> None:
        if name not in self._open:
            self._open[name] = (self.path / name).open("a", encoding="utf-8")
        self._open[name].write(json.dumps(record, allow_nan=False) + "\n")
        self._open[name].flush()

    def sync_metrics(self) -> None:
        """Bring the lines to the disk, before a checkpoint says that they are there."""
        for file in self._open.values():
            os.fsync(file.fileno())
        for name, table in self._metrics.items():
            write_table(self.path / table, read_metrics(self.path / name))


def report_of(path: Path, runs: Sequence[Path]) -> Path:
    """Where in ``path`` the report of these runs belongs: with the simulation's own view, if it shows what is there."""
    shows = any((run / ACCURACY).exists() for run in runs)
    return path / SIMULATION / REPORT if shows else path / REPORT


def read_rounds(path: Path) -> list[dict[str, Any]]:
    """The lines of all rounds of a run, with what was measured, wherever that lies."""
    measured = {record["round"]: record for record in read_metrics(path / MEASURED)}
    return [{**record, **measured.get(record["round"], {})} for record in read_metrics(path / METRICS)]


def read_metrics(file: Path) -> list[dict[str, Any]]:
    """The whole lines of a metrics file; a last line that was cut short is left out."""
    if not file.exists():
        return []
    records: list[dict[str, Any]] = []
    for line in file.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            record = json.loads(line)
        except ValueError:
            break
        if not isinstance(record, dict) or "round" not in record:
            break
        records.append(record)
    return records
