"""Exactly once: a shard that lives elsewhere remembers on disk what it was asked and what it answered.

A request has (run, serial), and a shard works in this order: charge, on disk; run; store the reply and what the clients
kept together; send. The same serial again gets the same bytes. One that was charged but has no stored reply, because
the shard died in between, is a failure and never runs again. So neither a server that asks twice nor a shard that is
started again trains a client twice or spends its privacy twice.

What clients keep is an overlay over the last commit: ``commit`` follows the server's checkpoint, ``rollback`` goes back
to it. Replies after it stay, so a server that resumes and asks the same serials gets the same bytes, without training.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator
from pathlib import Path

import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import Tensor

from unalike.core.disk import write_whole
from unalike.core.request import Reply, Request
from unalike.runtime.shard.kept import KeptStore
from unalike.runtime.shard.shard import Refused, Shard

_RUN = re.compile(r"[A-Za-z0-9_-]{1,64}")


class Journal:
    """A shard with a folder of its own; it answers bytes with bytes.

    Asks that only measure are not kept: they change nothing, and may be run again.
    """

    def __init__(self, shard: Shard, folder: Path) -> None:
        self.shard, self.folder = shard, folder
        folder.mkdir(parents=True, exist_ok=True)
        self._restored: set[str] = set()

    def answer(self, data: bytes) -> Iterator[bytes]:
        """The replies to an encoded request, encoded."""
        request = Request.decode(data)
        if request.purpose == "measure":
            yield from (reply.encode() for reply in self.shard.answer(request))
            return
        folder = self._folder(request.run)
        charged, stored = folder / f"{request.serial}.charged", folder / f"{request.serial}.reply"
        digest = hashlib.sha256(data).hexdigest()
        if charged.exists():
            if charged.read_text() != digest:
                raise Refused(f"serial {request.serial} of run {request.run!r} was another request; it runs only once")
            if not stored.exists():
                yield Reply(
                    torch.zeros(0, dtype=torch.int64),
                    failed=dict.fromkeys(range(len(request.ids)), "its shard was interrupted in this ask, and charged"),
                ).encode()
                return
        else:
            if request.serial <= self._committed(folder):
                raise Refused(f"serial {request.serial} of run {request.run!r} is before the last commit; it is over")
            write_whole(charged, digest.encode())
            base = self.shard.kept(request.run)
            overlay = KeptStore(base)
            frames = [reply.encode() for reply in self.shard.answer(request, overlay)]
            write_whole(stored, _packed(frames, overlay.state()))
            base.absorb(overlay)
            yield from frames
            return
        frames, kept = _unpacked(stored.read_bytes())
        self.shard.kept(request.run).absorb(KeptStore.from_state(kept))
        yield from frames

    def commit(self, run: str, serial: int) -> None:
        """The server has saved its state after this serial: so do the clients, and older replies may go."""
        folder = self._folder(run)
        state = self.shard.kept(run).state()
        write_whole(folder / f"kept-{serial}.safetensors", safetensors.torch.save(state or {"": torch.zeros(0)}))
        commits = sorted(self._commits(folder))
        for old in commits[:-2]:
            (folder / f"kept-{old}.safetensors").unlink()
        for file in (*folder.glob("*.charged"), *folder.glob("*.reply")):
            if int(file.stem) <= (commits[-2] if len(commits) > 1 else -1):
                file.unlink()

    def rollback(self, run: str, serial: int) -> None:
        """What clients keep is again what it was when the server saved its state after this serial."""
        file = self._folder(run) / f"kept-{serial}.safetensors"
        if serial == 0:
            self.shard.restore(run, {})
            return
        try:
            state = safetensors.torch.load(file.read_bytes())
        except FileNotFoundError:
            known = sorted(self._commits(self._folder(run)))
            raise Refused(f"nothing was kept for serial {serial} of run {run!r}; there are {known}") from None
        except SafetensorError as error:
            raise Refused(f"{file.name} is damaged: {error}") from error
        self.shard.restore(run, {name: value for name, value in state.items() if name})

    def _folder(self, run: str) -> Path:
        if not _RUN.fullmatch(run):
            raise Refused(f"a run is named by letters, digits, - and _, not {run!r}")
        folder = self.folder / run
        folder.mkdir(exist_ok=True)
        if run not in self._restored:  # this process has just started: go on from what is on disk
            self._restored.add(run)
            last = self._committed(folder)
            if last:
                self.rollback(run, last)
            for serial in sorted(int(file.stem) for file in folder.glob("*.reply")):
                if serial > last:
                    _, kept = _unpacked((folder / f"{serial}.reply").read_bytes())
                    self.shard.kept(run).absorb(KeptStore.from_state(kept))
        return folder

    @staticmethod
    def _commits(folder: Path) -> list[int]:
        return [int(file.stem.removeprefix("kept-")) for file in folder.glob("kept-*.safetensors")]

    def _committed(self, folder: Path) -> int:
        return max(self._commits(folder), default=0)


def _packed(frames: list[bytes], kept: dict[str, Tensor]) -> bytes:
    """Replies and what was kept, in one file: both are there, or neither."""
    held = safetensors.torch.save(kept) if kept else b""
    head = json.dumps({"replies": [len(frame) for frame in frames], "kept": len(held)}).encode()
    return len(head).to_bytes(8, "little") + head + b"".join(frames) + held


def _unpacked(data: bytes) -> tuple[list[bytes], dict[str, Tensor]]:
    size = int.from_bytes(data[:8], "little")
    head = json.loads(data[8 : 8 + size])
    place, frames = 8 + size, []
    for length in head["replies"]:
        frames.append(data[place : place + length])
        place += length
    return frames, safetensors.torch.load(data[place : place + head["kept"]]) if head["kept"] else {}
