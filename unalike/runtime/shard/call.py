"""The call of a task for a block of clients: what is read for it, and what happens at each client."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from torch.func import vmap

from unalike.core.bits import shorten
from unalike.core.client import Block, Client, Kept
from unalike.core.draws import Draws
from unalike.core.release import Sum
from unalike.privacy.mechanisms import DrawsLike
from unalike.runtime.shard.kept import HELD, SECRET
from unalike.runtime.shard.recording import Inputs, Kind, Recordings
from unalike.runtime.shard.tuning import SMALL
from unalike.runtime.shard.work import Work

Arrays = dict[str, Tensor]
Outputs = tuple[list[Arrays], Arrays]  # what each release lets out, and what is kept
_CPU = torch.device("cpu")


@dataclass(frozen=True)
class BlockCall:
    """A task for a block of clients at once, or for one of them after the other.

    All that it needs is read when it is made, so it may run in any thread.
    """

    work: Work
    block: Block
    inputs: Sequence[Inputs]  # of the whole block, or of each client
    count: int  # of clients; those that only fill the block up come after them
    vectorised: bool
    device: torch.device
    recordings: Recordings | None  # None: a rehearsal, in which nothing is recorded or played back
    kind: Kind | None

    @classmethod
    def read(
        cls, work: Work, rows: Tensor, device: torch.device, recordings: Recordings | None, *, singly: bool = False
    ) -> BlockCall:
        """The call for these rows of the work."""
        vectorised, count = len(rows) > 1 and not singly, len(rows)
        if vectorised and work.private:
            rows = _fill_up(work, rows)
        bounds = work.bounds[rows]
        # DP-SGD takes as many steps as N̄ has batches, which no row of a client may change
        least = int(bounds.max()) if any(one.cost is not None for one in work.releases) else 1
        block = work.clients.block(work.positions[rows], least, tame=work.private)
        kept = work.kept.read(block.ids)
        own = {
            "columns": to_device(block.columns(work.key, bounds), device),
            "kept": to_device(kept.values, device),
            "present": to_device(kept.present, device),
            "each": to_device({name: value[rows] for name, value in work.each.items()}, device),
        }
        turns = [slice(None)] if vectorised else [slice(i, i + 1) for i in range(len(rows))]
        inputs: list[Inputs] = [
            {
                "shared": work.shared,
                **{group: {name: v[turn] for name, v in arrays.items()} for group, arrays in own.items()},
            }
            for turn in turns
        ]
        known = (vectorised, block.full, block.all_labeled, work.terms.system)
        kind = None if recordings is None else recordings.kind(work, inputs[0], *known)
        return cls(work, block, inputs, count, vectorised, device, recordings, kind)

    def __call__(self) -> Outputs:
        """What the clients send and keep, on the CPU."""
        out, keep = _stack([self._turn(one) for one in self.inputs])
        if len(self.block.ids) > self.count:
            out = [{name: value[: self.count] for name, value in release.items()} for release in out]
            keep = {name: value[: self.count] for name, value in keep.items()}
        return [to_device(release, _CPU) for release in out], to_device(keep, _CPU)

    def _turn(self, inputs: Inputs) -> Outputs:
        """One call: played back where there is a recording, else computed and counted."""
        if self.kind is not None and self.kind.recorded is not None:
            played: Outputs = self.kind.recorded(inputs)
            return played
        begin = time.perf_counter()
        outputs = self._checked(inputs)
        if self.recordings is not None and self.kind is not None:
            self.recordings.called(self.kind, time.perf_counter() - begin, self._compute, inputs)
        return outputs

    def _checked(self, inputs: Inputs) -> Outputs:
        """Compute; a single client's task that draws from PyTorch's global generator is an error, as in ``vmap``."""
        before = None if self.vectorised else _global_draws()
        outputs = self._compute(inputs)
        if before is not None and not torch.equal(before, _global_draws()):
            raise RuntimeError(GLOBAL_DRAWS)
        return outputs

    def _compute(self, inputs: Inputs) -> Outputs:
        # a mode under which new tensors are made on the device; it slows every operation down
        with contextlib.nullcontext() if self.device.type == "cpu" else self.device:
            groups = [dict(inputs[name]) for name in ("columns", "kept", "present", "each")]
            one = partial(self._at_client, inputs["shared"])
            if self.vectorised:
                result: Outputs = vmap(one)(*groups)
                return result
            out, keep = one(*({name: value[0] for name, value in arrays.items()} for arrays in groups))
            return [_as_block(release) for release in out], _as_block(keep)

    def _at_client(
        self, shared: Mapping[str, Tensor], columns: Arrays, values: Arrays, present: Arrays, each: Arrays
    ) -> Outputs:
        """All that happens at a client: the task, and what each release lets out of it."""
        client, noise = client_of(self.work, self.block, columns, Kept(values, present))
        sent = self.work.task(client, **shared, **each)
        out, keep = let_out(self.work, client, sent.arrays, noise)
        return out, {**sent.keep, **keep}


def client_of(work: Work, block: Block, columns: Arrays, kept: Kept) -> tuple[Client, DrawsLike]:
    """The client of a row of a block's columns, and the draws of its releases."""
    client = block.client(columns, kept, work.terms.system)
    return client, client.noise if work.terms.system else Draws(columns["key"], 1)


def let_out(work: Work, client: Client, sent: Mapping[str, Tensor], noise: DrawsLike) -> Outputs:
    """What each release lets out of what a task sends, and what is kept for a later ask."""
    out: list[Arrays] = []
    keep: Arrays = {}
    for release in work.releases:
        message, rest = shorten(release, sent, client, noise)
        keep |= rest
        out.append(release.at_client(message, client, noise))
        for name, value in release.keep_back(message, noise).items():  # under the serial of the ask
            keep[name if name.startswith(SECRET) else f"{HELD}{work.serial}.{name}"] = value
        if isinstance(release, Sum):
            keep |= release.secret_noise(work.terms)
    return out, keep


def to_device(arrays: Mapping[str, Tensor], device: torch.device) -> Arrays:
    return {name: value.to(device) for name, value in arrays.items()}


def _fill_up(work: Work, rows: Tensor) -> Tensor:
    """A block of one of a few sizes; the first client takes the places that are left over, for nothing.

    Private cohorts have another size in every round. Rounded up to a multiple of 4 (of 8 for small samples, of more in
    large blocks) they have few, so that blocks can be recorded, which saves more than the added clients cost.
    """
    small = work.clients.x[0].numel() <= SMALL and all(one.cost is None for one in work.releases)
    some = max(8 if small else 4, 1 << max(0, len(rows).bit_length() - 3))
    return torch.cat([rows, rows[:1].expand(-len(rows) % some)]) if len(rows) > 4 else rows


def _as_block(arrays: Arrays) -> Arrays:
    """The arrays of one client as those of a block."""
    return {name: value[None] for name, value in arrays.items()}


def _stack(outputs: list[Outputs]) -> Outputs:
    """Outputs of one client each as those of a block."""
    if len(outputs) == 1:
        return outputs[0]
    releases = zip(*(out for out, _ in outputs), strict=True)
    return [_concatenate(one) for one in releases], _concatenate([keep for _, keep in outputs])


def _concatenate(parts: Sequence[dict[str, Tensor]]) -> dict[str, Tensor]:
    if any(part.keys() != parts[0].keys() for part in parts):
        raise ValueError("clients sent arrays of different names")
    return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}


GLOBAL_DRAWS = (
    "the task draws from PyTorch's global generator, so one seed would not give one result; draw from client.draws: "
    "client.draws.uniform(3), .normal(3), .integers(10, 3) or .permutation(client.n, client.capacity)"
)


_ONE_AT_A_TIME = threading.Lock()


def _global_draws() -> Tensor:
    """The state of PyTorch's global generator.

    PyTorch reads it under a lock of its own and may give up the interpreter's meanwhile (when garbage is collected).
    Another thread that then asks for it would wait while it holds the interpreter: a deadlock. So threads take turns.
    """
    with _ONE_AT_A_TIME:
        return torch.get_rng_state()
