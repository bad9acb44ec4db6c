"""What all runs on the same data have cost together: a ledger beside the data file, kept for ever.

Every run with an ε on somebody's own file is a release about the same people: its seeds, the trials of a search, and
what a resumed run asks again. Each run has an entry of its own, which is on the disk before an ask is sent, so that a
run that is killed stays charged. Runs with simulated noise, and without any, are not entered: they protect nobody.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from unalike.core.disk import check_writable, locked
from unalike.core.federation import Federation
from unalike.data.entry import is_named
from unalike.privacy import Budget, BudgetExceeded, Everyone, Ledger
from unalike.privacy.mechanisms import Gaussian
from unalike.runs import folder
from unalike.runs.errors import FLAG, UserError
from unalike.runs.prepare import Prepared
from unalike.runs.privacy import noise_of
from unalike.runs.recipe.recipe import Recipe
from unalike.runs.words import counted

ABOUT = "What runs of Unalike with an ε have cost the people in the file beside this one. Keep it with the data."
ENDING = ".runs.ledger.json"
# In a run's folder: which entry is its own. A run that goes on gives it a new name, so that of two copies of a folder
# one alone finds it, and the other is charged for all that it has released, too.
_ENTRY = f"{folder.CLIENTS}/data-ledger.json"
_CLEARLY = 1.01  # a run whose ε alone would exceed the total by a hundredth is refused before it starts


class Entry(BaseModel):
    """One run: what somebody has paid for it who is the worst off."""

    model_config = ConfigDict(extra="forbid")

    run: str
    began: str
    method: str
    delta: float = Field(gt=0, lt=1)
    ledger: dict[str, Any]

    def spent(self) -> Ledger:
        return Ledger.from_state(self.ledger)


class Content(BaseModel):
    """The file."""

    model_config = ConfigDict(extra="forbid")

    about: str = Field(ABOUT, pattern=f"^{re.escape(ABOUT)}$")
    total_epsilon: float | None = Field(None, gt=0)  # the most that all runs may cost together
    runs: list[Entry] = []

    @property
    def delta(self) -> float:
        """The smallest δ of any run: a total at a larger one could be less than what was told before."""
        return min(one.delta for one in self.runs)

    def together(self) -> list[Ledger]:
        """All runs composed: one ledger for what protects clients, and one for what protects points."""
        sums: dict[tuple[Any, Any], Ledger] = {}
        for one in self.runs:
            spent = one.spent()
            kind = (spent.unit, spent.relation)
            sums[kind] = sums[kind] + spent if kind in sums else spent
        return list(sums.values())

    def words(self) -> list[str]:
        """For each unit: how many runs, and their ε."""
        told = []
        for total in self.together():
            runs = sum(one.spent().unit == total.unit for one in self.runs)
            epsilon = f"ε = {total.worst(self.delta):.4g} at δ = {self.delta:.3g} for one {total.unit}"
            told.append(f"{counted(runs, 'run')} {'together have' if runs > 1 else 'has'} cost {epsilon}")
        return told


def file_of(data: str) -> Path | None:
    """Where the ledger of this data is; None for data sets that have a name."""
    path = Path(data).expanduser()
    if is_named(data) or not path.exists():
        return None
    path = path.resolve()
    return path.with_name((path.name if path.is_dir() else path.name.split(".")[0]) + ENDING)


def read(file: Path) -> Content:
    """What is in the file; nothing if there is none."""
    if not file.exists():
        return Content()
    try:
        content = Content.model_validate(folder.read_json(file))
        content.together()
        return content
    except (ValidationError, AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
        raise UserError(
            f"{file} is damaged ({type(error).__name__}: {error}): it says what earlier runs on this data have cost; "
            "restore it"
        ) from error


@contextmanager
def _changing(file: Path) -> Iterator[Content]:
    """The file's content, to be changed; of two runs that do so at once, the later waits."""
    with locked(file.parent):
        content = read(file)
        before = content.model_dump()
        yield content
        if content.model_dump() != before:
            folder.write_json(file, content.model_dump())


class DataLedger:
    """The ledger of a run's data, as the run sees it: called between charge and send, it saves what was charged."""

    def __init__(self, file: Path, prepared: Prepared, out: Path | None) -> None:
        self.file, self._delta = file, prepared.delta
        self._run, self._noted = secrets.token_hex(8), None if out is None else out / _ENTRY
        known = folder.read_json(self._noted) if self._noted is not None and self._noted.exists() else {}
        self._before = str(known.get("run")) if isinstance(known, dict) else ""
        self._method, self._began = prepared.recipe.method, datetime.now(UTC).date().isoformat()

    @classmethod
    def of(cls, prepared: Prepared, out: Path | None, note: Callable[[str], None]) -> DataLedger | None:
        """That of a run about to start or go on; refuses one that would exceed the total.

        None where nothing is to be entered, or cannot be, of which a ``note`` is made.
        """
        recipe, wanted = prepared.recipe, prepared.recipe.privacy.total_epsilon
        file = _file_for(recipe)
        if file is None:
            return None
        try:
            check_writable(file)
        except OSError as error:
            why = f"{file} cannot be written ({error.strerror}), so nobody adds up what all runs on this data cost"
            if wanted is None and read(file).total_epsilon is None:
                note(why)
                return None
            raise UserError(f"{why}; make it writable, or move the data to where it is") from error
        with _changing(file) as content:
            if wanted is not None and wanted > (content.total_epsilon or wanted):
                raise UserError(
                    f"total_epsilon = {wanted:g}{FLAG}, but {file} says {content.total_epsilon:g}, for ever; whoever "
                    "answers for the data may change it there",
                    "privacy.total_epsilon",
                )
            content.total_epsilon = wanted or content.total_epsilon
            _refuse_too_much(content, prepared, file)
        return cls(file, prepared, out)

    def __call__(self, federation: Federation) -> None:
        with _changing(self.file) as content:
            own = federation.ledger.worst_off(self._delta)
            entry = Entry(run=self._run, began=self._began, method=self._method, delta=self._delta, ledger=own.state())
            before = [one for one in content.runs if one.run not in (self._run, self._before)]
            after = content.model_copy(update={"runs": [*before, entry]})
            if content.total_epsilon is not None:
                budget = Budget(content.total_epsilon, after.delta)
                for total in after.together():
                    if not budget.allows(total):
                        raise BudgetExceeded(budget, _most(content), total.worst(after.delta), whose=" of the data")
            content.runs = after.runs
        if self._noted is not None and self._before != self._run:
            self._noted.parent.mkdir(exist_ok=True)
            folder.write_json(self._noted, {"run": self._run})
        self._before = self._run

    def words(self) -> list[str]:
        """What all runs on the data have cost together, where there were others."""
        content = read(self.file)
        return [f"{one} ({self.file})" for one in content.words()] if len(content.runs) > 1 else []


def _file_for(recipe: Recipe) -> Path | None:
    file, wanted = file_of(recipe.data.name), recipe.privacy.total_epsilon
    if file is None:
        if wanted is not None:
            raise UserError(
                f"total_epsilon = {wanted:g}{FLAG}: what all runs on the same data cost is kept beside its file, and "
                f"{recipe.data.name} is none",
                "privacy.total_epsilon",
            )
        return None
    if noise_of(recipe) == "system":
        return file
    total = wanted or read(file).total_epsilon
    if total is not None:
        raise UserError(
            f"{file.name} allows ε = {total:g} for all runs on this data together, and a run without an ε, or with "
            f"simulated noise, protects nobody: give privacy.epsilon{FLAG}",
            "privacy.epsilon",
        )
    return None


def _most(content: Content) -> float:
    return max((total.worst(content.delta) for total in content.together()), default=0.0)


def _refuse_too_much(content: Content, prepared: Prepared, file: Path) -> None:
    """Refuse a run before it starts that would clearly end above the total, as if it were one Gaussian release."""
    epsilon, total = prepared.recipe.privacy.epsilon, content.total_epsilon
    if epsilon is None or total is None:
        return
    delta = min([prepared.delta, *(one.delta for one in content.runs)])
    unit = prepared.recipe.privacy.unit
    for after in [one for one in content.together() if one.unit == unit] or [Ledger(unit)]:
        spent = after.worst(delta)
        neighbours = Everyone(after.relation or "add_remove")
        after.record(Gaussian.for_budget(epsilon, prepared.delta).event(), unit=unit, sampling=neighbours)
        if after.worst(delta) > _CLEARLY * total:
            raise UserError(
                f"{file.name} allows ε = {total:g} for all runs on this data together, and {spent:.4g} is spent: with "
                f"this run it would be about {after.worst(delta):.4g}. Nothing was sent; give a smaller ε{FLAG}, or "
                "train no more on this data",
                "privacy.epsilon",
            )
