"""Exactly once: a shard that lives elsewhere remembers on disk what it was asked and what it answered.

A request has (run, serial), and a shard works in this order: charge, on disk; run; store the reply and what the clients
kept together; send. The same serial again gets the same bytes. One that was charged but has no stored reply, because
the shard died in between, is a failure and never runs again (unless all its draws are seeded: ``again``). So neither a
server that asks twice nor a shard that is started again trains a client twice or spends its privacy twice.

What clients keep is an overlay over the last commit: ``commit`` follows the server's checkpoint, ``rollback`` goes back
to it. Replies after it stay, so a server that resumes and asks the same serials gets the same bytes, without training.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import Tensor

from unalike.core import wire
from unalike.core.disk import write_whole
from unalike.core.request import Reply, Request
from unalike.runtime.shard.kept import KeptStore
from unalike.runtime.shard.shard import Refused, Shard

MOST_BYTES = 1 << 26  # of rows in one reply: what several blocks of clients say is put together up to this
_OVER = "over"  # in a run's folder
_RUN = re.compile(r"[A-Za-z0-9_-]{1,64}")


class Journal:
    """A shard with its own folder; it answers bytes with bytes.

    Asks that only measure are not kept: they change nothing, and may be run again.

    again: so may an ask that was cut off. Only where all draws come from a seed: it then gives the very bytes that it
        would have given, and nothing more is known of a client. Never where noise is drawn afresh. Then an ask in
        which nobody keeps anything need not wait for the disk: what a power cut takes can be made again.
    """

    def __init__(self, shard: Shard, folder: Path, *, again: bool = False) -> None:
        self.shard, self.folder, self.again = shard, folder, again
        folder.mkdir(parents=True, exist_ok=True)
        self._restored: set[str] = set()
        self._arrays = wire.ArrayStore()

    def answer(self, data: bytes, *arrays: bytes) -> Iterator[bytes]:
        """The replies to an encoded request, encoded.

        arrays: inputs that the request names. Those that earlier asks brought need not come again, unless they have
        been forgotten: then ``Lacking``, before anything is charged.
        """
        request = Request.decode(data).with_arrays(self._arrays, arrays)
        if request.purpose == "measure":
            main = request.run.partition("/")[0]
            if (self.folder / main).is_dir():  # this process may have just started
                self._folder(main)
            yield from (reply.encode() for reply in join_replies(self.shard.answer(request)))
            return
        folder = self._folder(request.run)
        charged, stored = folder / f"{request.serial}.charged", folder / f"{request.serial}.reply"
        digest = hashlib.sha256(data)  # which has the digests of all that it names
        known = _read(charged)
        if self.again and len(known) != 2 * digest.digest_size:
            known = b""  # it was cut short, and the ask may run again
        if known and known != digest.hexdigest().encode():
            raise Refused(f"serial {request.serial} of run {request.run!r} was another request; it runs only once")
        found = _read_reply(stored)
        if found is not None:
            frames, kept = found
            self.shard.kept(request.run).absorb(KeptStore.from_state(kept))
        elif known and not self.again:
            reason = "its shard was interrupted in this ask, and charged"
            frames = [request.reply(failed=dict.fromkeys(range(len(request.ids)), reason)).encode()]
        else:
            if request.serial <= max(self._committed(folder), self._over(folder)):
                raise Refused(f"serial {request.serial} of run {request.run!r} is before the last commit; it is over")
            if not known:
                write_whole(charged, digest.hexdigest().encode(), durable=not self.again)
            base = self.shard.kept(request.run)
            overlay = KeptStore(base)
            frames = [reply.encode() for reply in join_replies(self.shard.answer(request, overlay))]
            state = overlay.state(handles=True)
            write_whole(stored, pack([*frames, safetensors.torch.save(state)]), durable=bool(state) or not self.again)
            base.absorb(overlay)
        yield from frames

    def remembers(self, run: str, serial: int) -> bool:
        """Would this serial be answered as before, or be refused, rather than run with other draws?"""
        if self.again:
            return True
        folder = self._folder(run)
        return (folder / f"{serial}.charged").exists() or serial <= max(self._committed(folder), self._over(folder))

    def commit(self, run: str, serial: int) -> None:
        """The server has saved its state after this serial: so do the clients, and older replies may go."""
        folder = self._folder(run)
        state = self.shard.kept(run).state()
        write_whole(folder / f"kept-{serial}.safetensors", safetensors.torch.save(state or {"": torch.zeros(0)}))
        commits = sorted(self._commits(folder))
        for old in commits[:-2]:
            (folder / f"kept-{old}.safetensors").unlink()
        over = commits[-2] if len(commits) > 1 else -1
        if over >= 0 and not self.again:  # on the disk before what tells of these serials goes
            write_whole(folder / _OVER, str(max(over, self._over(folder))).encode())
        for file in (*folder.glob("*.charged"), *folder.glob("*.reply")):
            if int(file.stem) <= over:
                file.unlink()

    def rollback(self, run: str, serial: int) -> None:
        """What clients keep is again what it was when the server saved its state after this serial.

        Where an ask may run again, the replies that came later go, too: a server whose state has other last bits than
        before would be refused under their serials.
        """
        folder = self._folder(run)
        file = folder / f"kept-{serial}.safetensors"
        later = [folder / f"kept-{one}.safetensors" for one in self._commits(folder) if one > serial]
        if self.again:
            later += [one for one in (*folder.glob("*.charged"), *folder.glob("*.reply")) if int(one.stem) > serial]
        self._restore(run, serial, file)
        for one in later:
            one.unlink()

    def _restore(self, run: str, serial: int, file: Path) -> None:
        if serial == 0:
            self.shard.restore(run, {})
            return
        try:
            state = safetensors.torch.load(file.read_bytes())
        except FileNotFoundError:
            known = sorted(self._commits(file.parent))
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
                self._restore(run, last, folder / f"kept-{last}.safetensors")
            for serial in sorted(int(file.stem) for file in folder.glob("*.reply")):
                found = _read_reply(folder / f"{serial}.reply")
                if serial > last and found is not None:
                    self.shard.kept(run).absorb(KeptStore.from_state(found[1]))
        return folder

    @staticmethod
    def _commits(folder: Path) -> list[int]:
        return [int(file.stem.removeprefix("kept-")) for file in folder.glob("kept-*.safetensors")]

    @staticmethod
    def _over(folder: Path) -> int:
        """The last serial of which nothing is remembered; after a rollback, too, it never runs again."""
        return int(_read(folder / _OVER) or b"-1")

    def _committed(self, folder: Path) -> int:
        return max(self._commits(folder), default=0)


def pack(frames: Sequence[bytes]) -> bytes:
    """Several messages as one."""
    return b"".join(part for frame in frames for part in (len(frame).to_bytes(8, "little"), frame))


def unpack(data: bytes) -> list[bytes]:
    """The messages; ``ValueError`` where the last one is cut short."""
    place, frames = 0, list[bytes]()
    while place < len(data):
        size = int.from_bytes(data[place : place + 8], "little")
        frames.append(data[place + 8 : place + 8 + size])
        place += 8 + size
    if place > len(data):
        raise ValueError(f"{len(data)} bytes end in the middle of a message")
    return frames


def _read_reply(file: Path) -> tuple[list[bytes], dict[str, Tensor]] | None:
    """Replies and what was kept, both of one file; None: there is none, or a power cut has emptied or shortened it."""
    try:
        *frames, kept = unpack(_read(file))
        return frames, safetensors.torch.load(kept)
    except (ValueError, SafetensorError):
        return None


def _read(file: Path) -> bytes:
    """What a file holds: nothing if there is none."""
    try:
        return file.read_bytes()
    except FileNotFoundError:
        return b""


def join_replies(replies: Iterable[Reply], most: int = MOST_BYTES) -> Iterator[Reply]:
    """Fewer replies that say the same: those of single blocks in a row become one, up to ``most`` bytes."""
    waiting: list[Reply] = []
    size = 0

    def joined() -> Reply:
        if len(waiting) == 1:
            return waiting[0]
        answered = [one for one in waiting if len(one.rows)]
        arrays = [
            {name: torch.cat([one.arrays[place][name] for one in answered]) for name in first}
            for place, first in enumerate(answered[0].arrays if answered else ())
        ]
        rows = torch.cat([one.rows for one in waiting])
        failed = {row: why for one in waiting for row, why in one.failed.items()}
        partials = {place: value for one in waiting for place, value in one.partials.items()}
        return Reply(rows, arrays, failed, partials, waiting[0].run, waiting[0].serial)

    for reply in replies:
        own = sum(value.nbytes for arrays in reply.arrays for value in arrays.values())
        if waiting and (size + own > most or waiting[-1].partials):
            yield joined()
            waiting, size = [], 0
        waiting.append(reply)
        size += own
    if waiting:
        yield joined()
