"""A site's own ledger and transcript, for all runs and for ever: append-only, each line chained to the one before.

A line is written, and is on the disk, before anything that it speaks of leaves the site. The server's ε is never
believed: what is charged is what this site's code released, as if everybody here had been in it, because the server
knows who was drawn.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from unalike.deploy import keys
from unalike.privacy.ledger import Charge, Ledger
from unalike.runs.errors import UserError

FILE = "ledger.jsonl"
_START = "0" * 64


class SiteLedger:
    """What has left a site, and what was refused. Each line is signed by the site's key."""

    def __init__(self, folder: Path) -> None:
        self._file, self._key = folder / FILE, keys.own_key(folder)
        self._last, self._count = _START, 0
        self.total: dict[str, Ledger] = {}  # by unit
        self.by_run: dict[tuple[str, str], Ledger] = {}  # by run and unit
        self.asks: dict[str, int] = {}  # that trained, by run
        self._charged: set[str] = set()
        self._refused: str = ""
        self._cut_torn_line()
        for entry in self.lines():
            self._take(entry)

    def _cut_torn_line(self) -> None:
        """Drop a last line that a power cut has left half: what it was to speak of had not left."""
        if self._file.exists() and not (content := self._file.read_bytes()).endswith(b"\n") and content:
            with self._file.open("r+b") as file:
                file.truncate(content.rfind(b"\n") + 1)

    def lines(self, signed: bool = False) -> Iterator[dict[str, Any]]:
        """The entries, each checked against the one before; ``signed``: and its signature, which takes longer."""
        last = _START
        content = self._file.read_bytes() if self._file.exists() else b""
        for number, line in enumerate(content.split(b"\n")[:-1], 1):
            try:
                entry = json.loads(line)
                own, signature = entry.pop("hash"), entry.pop("signature")
                if entry["before"] != last or own != _hash(entry):
                    raise ValueError("its hash does not follow from what is before it")
                if signed and not keys.is_signed(self._key, own, signature):
                    raise ValueError("it is not signed by this site's key")
            except (ValueError, KeyError, TypeError, AttributeError) as error:
                raise UserError(
                    f"{self._file}, line {number}: the ledger has been changed or is damaged ({error}). A node does "
                    "not work with it: restore the file from a backup"
                ) from error
            last = own
            yield {**entry, "hash": own}

    def _take(self, entry: dict[str, Any]) -> None:
        self._last, self._count = entry["hash"], self._count + 1
        if entry["kind"] != "charge":
            return
        self._charged.add(entry["ask"])
        run = entry["run"]
        self.asks[run] = self.asks.get(run, 0) + (entry["purpose"] == "train")
        for unit, state in entry["cost"].items():
            spent = Ledger.from_state(state)
            self.total[unit] = self.total.get(unit, Ledger()) + spent
            self.by_run[run, unit] = self.by_run.get((run, unit), Ledger()) + spent

    def _append(self, **entry: Any) -> None:
        whole = {"number": self._count + 1, "time": datetime.now(UTC).isoformat(timespec="seconds"), **entry}
        whole["before"] = self._last
        whole["hash"] = _hash(whole)
        whole["signature"] = keys.sign(self._key, whole["hash"])
        handle = os.open(self._file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        try:
            data = json.dumps(whole).encode() + b"\n"
            before = os.fstat(handle).st_size
            try:
                if os.write(handle, data) != len(data):
                    raise OSError(28, "the ledger's line was cut short", str(self._file))
                os.fsync(handle)
            except OSError:
                os.ftruncate(handle, before)
                raise
        finally:
            os.close(handle)
        self._take(whole)

    def known(self, ask: str) -> bool:
        """Was this very ask charged before?"""
        return ask in self._charged

    def after(self, run: str, charges: Sequence[Charge]) -> tuple[dict[str, Ledger], dict[str, Ledger]]:
        """All runs together and this run, by unit, as they would be after these charges."""
        total, own = dict(self.total), {unit: one for (name, unit), one in self.by_run.items() if name == run}
        for unit, spent in _by_unit(charges).items():
            total[unit] = total.get(unit, Ledger()) + spent
            own[unit] = own.get(unit, Ledger()) + spent
        return total, own

    def replay(self, delta: float) -> Iterator[tuple[dict[str, Any], dict[str, float]]]:
        """Each charge, and the ε of all until then by unit, computed again from the lines alone."""
        total: dict[str, Ledger] = {}
        for entry in self.lines(signed=True):
            if entry["kind"] == "charge":
                for unit, state in entry["cost"].items():
                    total[unit] = total.get(unit, Ledger()) + Ledger.from_state(state)
                yield entry, {unit: one.worst(delta) for unit, one in total.items()}

    def charge(self, run: str, ask: str, purpose: str, what: dict[str, Any], charges: Sequence[Charge]) -> None:
        """Write what is about to leave."""
        cost = {unit: spent.state() for unit, spent in _by_unit(charges).items()}
        self._append(kind="charge", run=run, ask=ask, purpose=purpose, **what, cost=cost)

    def refuse(self, run: str, rule: str, why: str) -> None:
        """Note a refusal, but not the same one twice in a row, so that nobody can fill the disk by asking."""
        if self._refused != f"{run} {rule}":
            self._refused = f"{run} {rule}"
            self._append(kind="refusal", run=run, rule=rule, why=why[:500])


def _by_unit(charges: Sequence[Charge]) -> dict[str, Ledger]:
    found: dict[str, Ledger] = {}
    for one in charges:
        found.setdefault(one.unit, Ledger()).charge([one])
    return found


def _hash(entry: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(entry, sort_keys=True).encode()).hexdigest()
