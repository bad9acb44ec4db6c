"""Checkpoints: all that a run needs to go on as if it had never stopped, in one safetensors file."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol, runtime_checkable

import safetensors.torch
import torch
from pydantic import BaseModel
from safetensors import SafetensorError, safe_open
from torch import Tensor

from unalike.core.disk import write_whole
from unalike.core.transcript import Traffic, Transcript
from unalike.core.vocabulary import Federation, State
from unalike.privacy.ledger import Ledger
from unalike.runs.errors import UserError
from unalike.runs.folder import CHECKPOINT, CLIENTS, JOURNAL, RECIPE, read_json
from unalike.runtime.simulate import Simulation

METADATA = "unalike"
_BEST = "best"
_SERIALS = 6  # that one ask may use: its own, and those of the exchanges of a secure sum


@runtime_checkable
class OnWorkers(Protocol):
    """A runtime whose shards are elsewhere: they save what clients keep by themselves, and tell how they are doing."""

    waiting: Callable[[list[int], float], None]

    def report(self) -> list[dict[str, Any]]: ...

    def commit(self, run: str, serial: int) -> Sequence[Mapping[str, Any]]: ...

    def rollback(self, run: str, serial: int, plans: Sequence[Mapping[str, Any]]) -> None: ...


class Best(NamedTuple):
    """The best round so far, by the score on validation rows, and all that its models need."""

    round: int
    score: float
    state: State
    kept: Mapping[str, Tensor]


class About(BaseModel):
    """All of a checkpoint that is no tensor."""

    round: int
    served_round: int | None = None  # whose models the run serves, where that is not the last one but the best
    serial: int
    seconds: float = 0.0  # that the run had trained
    measuring: float = 0.0  # that its models had been measured besides
    ledger: dict[str, Any]
    transcript: list[dict[str, Any]]
    traffic: dict[str, Any]
    plans: Any  # the simulator's block sizes: another block changes the last bits of a sum
    kept: bool = False  # do clients keep something?
    best: tuple[int, float] | None = None


@dataclass(frozen=True)
class Checkpoint:
    """A run after a whole round."""

    state: State
    kept: Mapping[str, Tensor]
    about: About
    best: Best | None = None

    @property
    def round(self) -> int:
        return self.about.round

    def restore(self, federation: Federation) -> None:
        """Bring a fresh federation to where it was."""
        about = self.about
        federation.round, federation.serial = about.round, about.serial
        federation.ledger = Ledger.from_state(about.ledger)
        federation.transcript = Transcript.from_rows(about.transcript)
        federation.traffic = Traffic.from_state(about.traffic)
        if isinstance(federation.runtime, OnWorkers):
            federation.runtime.rollback(federation.run, about.serial, about.plans)
        elif isinstance(federation.runtime, Simulation):
            if about.kept and not self.kept:
                raise UserError(
                    f"{CLIENTS}/{self.round}.safetensors is missing: what the clients keep, without which the run "
                    "cannot go on. Copy the whole folder, or start the run afresh"
                )
            federation.runtime.use_plans(about.plans)
            federation.runtime.restore(federation.run, self.kept)


def save(
    folder: Path,
    state: State,
    federation: Federation,
    times: Mapping[str, float] | None = None,
    best: Best | None = None,
    served_round: int | None = None,
) -> None:
    """Write the folder's checkpoint after the federation's present round.

    times: for how many ``seconds`` it has trained, and for how many it was ``measuring``. served_round: of which
    ``state`` is, where that is an earlier one.
    """
    plans: Any = {}
    runtime, tensors = federation.runtime, _whole(state)
    kept = runtime.kept(federation.run) if isinstance(runtime, Simulation) else {}
    (folder / CLIENTS).mkdir(exist_ok=True)
    if kept:  # the clients' own files, which only a simulation has in one place with the server's
        write_whole(folder / CLIENTS / f"{federation.round}.safetensors", safetensors.torch.save(_whole(kept)))
    if isinstance(runtime, OnWorkers):  # before the server's own: it keeps the commit before this one, too
        plans = runtime.commit(federation.run, federation.serial)
    elif isinstance(runtime, Simulation):
        plans = runtime.plans()
    if federation.noise == "system":  # they tell how large cohorts were, which is nobody's business where that protects
        plans = [{} for _ in plans] if isinstance(plans, list) else {}
    if best is not None:
        tensors |= {f"{_BEST}.{name}": value for name, value in _whole(best.state).items()}
        write_whole(folder / CLIENTS / f"{_BEST}.safetensors", safetensors.torch.save(_whole(best.kept)))
    about = About(
        round=federation.round,
        served_round=served_round,
        serial=federation.serial,
        **(times or {}),
        ledger=federation.ledger.state(),
        transcript=federation.transcript.rows(),
        traffic=federation.traffic.state(),
        plans=plans,
        kept=bool(kept),
        best=None if best is None else (best.round, best.score),
    )
    write_whole(folder / CHECKPOINT, safetensors.torch.save(tensors, {METADATA: about.model_dump_json()}))
    for old in (folder / CLIENTS).glob("*.safetensors"):
        if old.stem not in (str(federation.round), _BEST):
            old.unlink()


def _whole(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Copies that a file can be written from."""
    return {name: value.detach().contiguous().clone() for name, value in tensors.items()}


def load(folder: Path) -> Checkpoint | None:
    """The folder's checkpoint; None if the run was stopped before its first one."""
    file = folder / CHECKPOINT
    if not file.exists():
        return None
    try:
        with safe_open(file, framework="pt") as stored:
            about = About.model_validate_json(stored.metadata()[METADATA])
            Ledger.from_state(about.ledger)
            tensors = {name: stored.get_tensor(name) for name in stored.keys()}  # noqa: SIM118 (it is no mapping)
        file = folder / CLIENTS / f"{about.round}.safetensors"  # what the clients keep: an error is told of it
        kept = safetensors.torch.load(file.read_bytes()) if file.exists() else _kept_by_workers(folder, about.serial)
        best, own = None, {name: value for name, value in tensors.items() if not name.startswith(f"{_BEST}.")}
        if about.best is not None:
            file = folder / CLIENTS / f"{_BEST}.safetensors"
            theirs = safetensors.torch.load(file.read_bytes()) if file.exists() else {}
            best = Best(*about.best, State(State(tensors).part(_BEST)), theirs)
        return Checkpoint(State(own), kept, about, best)
    except (AttributeError, SafetensorError, ValueError, LookupError, TypeError) as error:
        raise UserError(
            f"{file} is damaged, or was not written by Unalike ({type(error).__name__}: {error}). The run cannot go on "
            f"from it; start it afresh with: unalike run {folder / RECIPE} --out NEW_FOLDER"
        ) from error


def _kept_by_workers(folder: Path, serial: int) -> dict[str, Tensor]:
    """What the clients of a cluster's workers keep, where the workers saved it in the run's own folder."""
    files = sorted((folder / CLIENTS / "workers").glob(f"worker-*/*/kept-{serial}.safetensors"))
    parts = [safetensors.torch.load(file.read_bytes()) for file in files]
    names = sorted({name for part in parts for name in part if name})
    return {name: torch.cat([part[name] for part in parts if name in part]) for name in names}


def journal(folder: Path, beside: Callable[[Federation], None] | None = None) -> Callable[[Federation], None]:
    """For ``Federation.journal`` where noise is not seeded: saves what an ask costs before it is sent.

    A simulation with seeded noise that resumes makes the same noise again and releases nothing new. With the operating
    system's noise it makes fresh noise for fresh samples. So what was released after the last checkpoint stays in the
    ledger that it goes on with, and what it asks again is charged again. ``beside``: saves it elsewhere, or refuses.
    """

    def save(federation: Federation) -> None:
        if beside is not None:
            beside(federation)
        content = {"ledger": federation.ledger.state(), "serial": federation.serial + _SERIALS}
        write_whole(folder / JOURNAL, json.dumps(content).encode())

    return save


def recall_charges(folder: Path) -> dict[str, Any]:
    """For a federation: the ledger that was last saved by a journal, if there is one, and serials that are not used."""
    if not (folder / JOURNAL).exists():
        return {}
    content = read_json(folder / JOURNAL)
    try:
        return {"ledger": Ledger.from_state(content["ledger"]), "serial": int(content["serial"])}
    except (AttributeError, IndexError, KeyError, TypeError, ValueError, OverflowError) as error:
        raise UserError(
            f"{folder / JOURNAL} is damaged ({type(error).__name__}: {error}): it says what the run has cost since its "
            "last checkpoint; restore it"
        ) from error
