"""Checkpoints: all that a run needs to go on as if it had never stopped, in one safetensors file."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from unalike.core.disk import write_whole
from unalike.core.federation import Federation
from unalike.core.method import State
from unalike.core.transcript import Traffic, Transcript
from unalike.privacy.ledger import Ledger
from unalike.runtime.simulate import Simulation
from unalike.studio.errors import UserError
from unalike.studio.runs.folder import CHECKPOINT, CLIENTS, RECIPE, read_json

METADATA = "unalike"
JOURNAL = "ledger.journal.json"


@dataclass(frozen=True)
class Checkpoint:
    """A run after a whole round."""

    state: State
    kept: Mapping[str, Tensor]
    about: Mapping[str, Any]  # all that is no tensor, as in the file

    @property
    def round(self) -> int:
        return int(self.about["round"])

    @property
    def seconds(self) -> float:
        """How long the run had taken."""
        return float(self.about["seconds"])

    def restore(self, federation: Federation) -> None:
        """Bring a fresh federation to where it was."""
        about = self.about
        federation.round = self.round
        federation.ledger = Ledger.from_state(about["ledger"])
        federation.transcript = Transcript.from_rows(about["transcript"])
        federation.traffic = Traffic.from_state(about["traffic"])
        federation.shapes = {
            task: {name: torch.Size(shape) for name, shape in arrays.items()}
            for task, arrays in about["shapes"].items()
        }
        federation.serial = int(about["serial"])
        if isinstance(federation.runtime, Simulation):
            federation.runtime.use_plans(about["plans"])
            federation.runtime.restore(federation.run, self.kept)


def save(folder: Path, state: State, federation: Federation, seconds: float) -> None:
    """Write the folder's checkpoint after the federation's present round."""
    runtime = federation.runtime
    tensors = {name: value.detach().contiguous().clone() for name, value in state.items()}
    if isinstance(runtime, Simulation):
        _save_kept(folder, runtime.kept(federation.run), federation.round)
    about = {
        "round": federation.round,
        "serial": federation.serial,
        "seconds": seconds,
        "ledger": federation.ledger.state(),
        "transcript": federation.transcript.rows(),
        "traffic": federation.traffic.state(),
        # the simulator's block sizes: another block changes the last bits of a sum
        "plans": runtime.plans() if isinstance(runtime, Simulation) else {},
        # of released arrays: an empty Poisson cohort still releases noise
        "shapes": {
            task: {name: list(shape) for name, shape in made.items()} for task, made in federation.shapes.items()
        },
    }
    write_whole(folder / CHECKPOINT, safetensors.torch.save(tensors, {METADATA: json.dumps(about)}))
    for old in (folder / CLIENTS).glob("*.safetensors"):
        if old.stem != str(federation.round):
            old.unlink()


def _save_kept(folder: Path, kept: Mapping[str, Tensor], round: int) -> None:
    """What the clients keep: their own files, which only a simulation has in one place with the server's."""
    if kept:
        (folder / CLIENTS).mkdir(exist_ok=True)
        content = {name: value.contiguous() for name, value in kept.items()}
        write_whole(folder / CLIENTS / f"{round}.safetensors", safetensors.torch.save(content))


def load(folder: Path) -> Checkpoint | None:
    """The folder's checkpoint; None if the run was stopped before its first one."""
    file = folder / CHECKPOINT
    if not file.exists():
        return None
    try:
        with safe_open(file, framework="pt") as stored:
            about = json.loads(stored.metadata()[METADATA])
            tensors = {name: stored.get_tensor(name) for name in stored.keys()}  # noqa: SIM118 (it is no mapping)
        missing = {"round", "serial", "seconds", "ledger", "transcript", "traffic", "plans", "shapes"} - about.keys()
        if missing:
            raise ValueError(f"it lacks {', '.join(sorted(missing))}")
        kept = folder / CLIENTS / f"{about['round']}.safetensors"
        held = safetensors.torch.load(kept.read_bytes()) if kept.exists() else {}
        return Checkpoint(State(tensors), held, about)
    except (AttributeError, SafetensorError, ValueError, KeyError, TypeError) as error:
        raise UserError(
            f"{file} is damaged or no checkpoint of Unalike ({type(error).__name__}: {error}). The run cannot go on "
            f"from it; start it afresh with: unalike run {folder / RECIPE} --out NEW_FOLDER"
        ) from error


def journal(folder: Path) -> Callable[[Ledger], None]:
    """For ``Federation.journal`` where noise is not seeded: saves the ledger before an ask is sent.

    A simulation that resumes makes the same noise again and releases nothing new. A deployed run makes fresh noise, so
    what was released after the last checkpoint must be in the ledger that it goes on with: ``journaled``.
    """

    def save(ledger: Ledger) -> None:
        write_whole(folder / JOURNAL, json.dumps(ledger.state()).encode())

    return save


def journaled(folder: Path) -> Ledger | None:
    """The ledger that was last saved by a journal, if there is one."""
    file = folder / JOURNAL
    return Ledger.from_state(read_json(file)) if file.exists() else None
