"""Checkpoints: all that a run needs to go on as if it had never stopped, in one safetensors file."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from unalike.core.federation import Federation
from unalike.core.method import State
from unalike.core.transcript import Traffic, Transcript
from unalike.privacy.ledger import Ledger
from unalike.runtime.shard.kept import KeptStore
from unalike.runtime.shard.simulator import Simulator
from unalike.studio.errors import UserError
from unalike.studio.runs.folder import CHECKPOINT, read_json, write_whole

STATE, KEPT, METADATA = "state.", "kept.", "unalike"
JOURNAL = "ledger.journal.json"


@dataclass(frozen=True)
class Checkpoint:
    """A run after a whole round."""

    round: int
    seconds: float
    state: State
    kept: dict[str, Tensor]
    ledger: dict[str, Any]
    transcript: list[dict[str, Any]]
    traffic: dict[str, dict[str, int]]
    plans: dict[str, Any]  # the simulator's block sizes: another block changes the last bits of a sum
    shapes: dict[str, dict[str, list[int]]]  # of released arrays: an empty Poisson cohort still releases noise

    @classmethod
    def of(cls, federation: Federation, state: State, seconds: float) -> Checkpoint:
        runtime = federation.runtime
        return cls(
            round=federation.round,
            seconds=seconds,
            state=state,
            kept=federation.kept.state(),
            ledger=federation.ledger.state(),
            transcript=federation.transcript.rows(),
            traffic={"up": dict(federation.traffic.up), "down": dict(federation.traffic.down)},
            plans=runtime.plans() if isinstance(runtime, Simulator) else {},
            shapes={task: {k: list(v) for k, v in arrays.items()} for task, arrays in federation.shapes.items()},
        )

    def save(self, folder: Path) -> None:
        tensors = {STATE + name: value.detach().contiguous().clone() for name, value in self.state.items()}
        tensors |= {KEPT + name: value.contiguous() for name, value in self.kept.items()}
        about = {
            "round": self.round,
            "seconds": self.seconds,
            "ledger": self.ledger,
            "transcript": self.transcript,
            "traffic": self.traffic,
            "plans": self.plans,
            "shapes": self.shapes,
        }
        write_whole(folder / CHECKPOINT, safetensors.torch.save(tensors, {METADATA: json.dumps(about)}))

    def restored(self) -> dict[str, Any]:
        """Fields for a federation that goes on from here."""
        traffic = Traffic()
        traffic.up.update(self.traffic["up"])
        traffic.down.update(self.traffic["down"])
        return {
            "ledger": Ledger.from_state(self.ledger),
            "transcript": Transcript.from_rows(self.transcript),
            "traffic": traffic,
            "kept": KeptStore.from_state(self.kept),
            "round": self.round,
            "shapes": {task: {k: torch.Size(v) for k, v in arrays.items()} for task, arrays in self.shapes.items()},
        }


def load(folder: Path) -> Checkpoint | None:
    """The folder's checkpoint; None if the run was stopped before its first one."""
    file = folder / CHECKPOINT
    if not file.exists():
        return None
    try:
        with safe_open(file, framework="pt") as stored:
            about = json.loads(stored.metadata()[METADATA])
            tensors = {name: stored.get_tensor(name) for name in stored.keys()}  # noqa: SIM118 (it is no mapping)
        return Checkpoint(
            round=int(about["round"]),
            seconds=float(about["seconds"]),
            state=State(_part(tensors, STATE)),
            kept=_part(tensors, KEPT),
            ledger=about["ledger"],
            transcript=about["transcript"],
            traffic=about["traffic"],
            plans=about["plans"],
            shapes=about.get("shapes", {}),  # a checkpoint made before they were saved has none
        )
    except (SafetensorError, ValueError, KeyError, TypeError) as error:
        raise UserError(
            f"{file} is damaged or no checkpoint of Unalike ({type(error).__name__}: {error}). The run cannot go on "
            f"from it; start it afresh with: unalike run {folder / 'recipe.toml'} --out NEW_FOLDER"
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


def _part(tensors: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): value for name, value in tensors.items() if name.startswith(prefix)}
