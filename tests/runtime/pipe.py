"""Shards in other processes, started by exec and fed with bytes over stdin and stdout: no fork, no pickle.

A message is a letter, a length of 8 bytes and the bytes. To a shard: B, build from plain settings; N, an array that the
next request names; Q, a request; F, forget; U, use a schema; L, look at what was noted for the test. From it: the
roster, A for arrays that it lacks, R for each reply and E at the end.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch
from torch import Tensor

from unalike.core.request import Reply, Request
from unalike.core.roster import Roster
from unalike.core.schema import Schema
from unalike.core.wire import ArrayStore, Lacking, WireError, decode, encode
from unalike.runtime.simulate import Drop, Simulation

ROOT = Path(__file__).parents[2]


def put(stream: BinaryIO, letter: bytes, data: bytes = b"") -> None:
    stream.write(letter + len(data).to_bytes(8, "little") + data)
    stream.flush()


def take(stream: BinaryIO) -> tuple[bytes, bytes]:
    """The next message; no letter at the end of the stream."""
    head = stream.read(9)
    return (head[:1], stream.read(int.from_bytes(head[1:], "little"))) if len(head) == 9 else (b"", b"")


# The server's side


class Remote:
    """A shard elsewhere, as a runtime reaches it."""

    def __init__(self) -> None:
        command = [sys.executable, "-m", "tests.runtime.pipe"]
        self.process = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert self.process.stdin is not None and self.process.stdout is not None
        self._to, self._from = self.process.stdin, self.process.stdout
        self.roster: Roster
        self.sent: list[str] = []  # large shared inputs that went down, in order
        self.crossed: list[bytes] = []  # all that went up, roster and replies

    def build(self, **settings: Any) -> None:
        put(self._to, b"B", json.dumps(settings).encode())
        self.crossed = [self._answer(b"B")]
        self.roster = Roster.decode(self.crossed[0])

    def answer(self, request: Request) -> Iterator[Reply]:
        head = request.head().encode()
        put(self._to, b"Q", head)
        try:
            while True:
                letter, data = take(self._from)
                if letter == b"A":
                    self._send(request, json.loads(data))
                    put(self._to, b"Q", head)
                    continue
                if letter != b"R":
                    break
                self.crossed.append(data)
                yield Reply.decode(data)
        finally:
            while letter == b"R":  # whoever asked may have given up
                letter, _ = take(self._from)
        if letter != b"E":
            raise RuntimeError("the process of a shard has ended")

    def _send(self, request: Request, digests: list[str]) -> None:
        """The arrays that the shard does not have."""
        for name, digest in request.named.items():
            if digest in digests:
                self.sent.append(name)
                put(self._to, b"N", encode({"": request.shared[name]}))

    def forget(self, run: str, prefix: str = "") -> None:
        put(self._to, b"F", json.dumps([run, prefix]).encode())

    def use(self, schema: Schema) -> None:
        put(self._to, b"U", schema.to_json().encode())

    def noted(self) -> dict[str, Tensor]:
        """What the shard noted for the test; a way that no runtime has."""
        put(self._to, b"L")
        return {name: value for name, value in decode(self._answer(b"L")).items() if isinstance(value, Tensor)}

    def _answer(self, letter: bytes) -> bytes:
        came, data = take(self._from)
        if came != letter:
            raise RuntimeError("the process of a shard has ended")
        return data

    def close(self) -> None:
        self._to.close()
        self.process.wait(30)
        self._from.close()


class Pipe(Simulation):
    """A simulation's routing and drop-outs over shards in other processes; its program is closed.

    ``problems`` is a module that both sides know: its ``stored(data, name)`` reads the clients' rows, and its
    ``program(name, schema)`` says what the clients agree to.
    """

    def __init__(self, remotes: list[Remote], problems: str, name: str, data: Path, drop: Drop = 0.0) -> None:
        for number, remote in enumerate(remotes):
            remote.build(problems=problems, name=name, data=str(data), shard=number, shards=len(remotes))
        program = importlib.import_module(problems).program(name, remotes[0].roster.schema)
        super().__init__(remotes, program, drop=drop)  # type: ignore[arg-type]
        self.failed: Counter[str] = Counter()  # how many clients did not answer, by task

    def deliver(self, request: Request) -> Iterator[Reply]:
        for reply in super().deliver(request):
            self.failed[request.task] += len(reply.failed)
            yield reply


class Opened(Exception):
    """The server opened the clients' data."""


_closed: set[str] = set()  # files that this process may not open now
_opened: list[str] = []


@functools.cache
def _watch() -> None:
    def watch(event: str, arguments: tuple[object, ...]) -> None:
        path = arguments[0] if event == "open" and _closed else None
        if isinstance(path, str | bytes | os.PathLike) and (real := os.path.realpath(os.fsdecode(path))) in _closed:
            _opened.append(real)
            raise Opened(real)

    sys.addaudithook(watch)  # it stays for ever, and does nothing while no file is closed


@contextlib.contextmanager
def unopened(file: Path) -> Iterator[None]:
    """This process, the server's, may not open the clients' data meanwhile."""
    _watch()
    _closed.add(os.path.realpath(file))
    _opened.clear()
    try:
        yield
        if _opened:  # and the error was passed over
            raise Opened(_opened[0])
    finally:
        _closed.clear()


def crossed(remotes: list[Remote], shown: str | None = None) -> list[str]:
    """What of the clients' own is among the bytes that came from them, but for what they are to show (``Noted``)."""
    came = b"".join(part for remote in remotes for part in remote.crossed)
    own: list[tuple[str, bytes]] = []
    for numbered, value in (one for remote in remotes for one in remote.noted().items()):
        name = numbered.partition(" ")[2]
        if shown is None or not name.startswith(shown):
            own += [(name, value.to(precision).numpy().tobytes()) for precision in (torch.float32, torch.float64)]
    begun = _begun(came, {copy[:8] for _, copy in own})
    return sorted({f"{name} of a client" for name, copy in own if copy[:8] in begun and copy in came})


def _begun(came: bytes, beginnings: set[bytes]) -> set[bytes]:
    """Those beginnings of up to 8 bytes that came: one pass for all of them, where each whole array would need one."""
    short = {one for one in beginnings if len(one) < 8 and one in came}
    wanted = np.array([int.from_bytes(one, "little") for one in beginnings if len(one) == 8], dtype=np.uint64)
    likely = np.zeros(1 << 16, dtype=bool)  # by the first two bytes
    likely[(wanted & 0xFFFF).astype(np.int64)] = True
    for offset in range(8):
        words = np.frombuffer(came, "<u8", max(0, len(came) - offset) // 8, offset)
        words = words[likely[words.astype("<u2")]]
        short |= {int(word).to_bytes(8, "little") for word in np.intersect1d(words, wanted)}
    return short


# The shard's side


class Noted:
    """For the test: clients' rows, what they keep or hold, and what a private release was given before its bound and
    noise."""

    def __init__(self) -> None:
        from unalike.core.client import Client
        from unalike.core.release import Each, Sum
        from unalike.privacy.mechanisms import DrawsLike
        from unalike.runtime.shard.kept import KeptStore

        self.arrays: dict[str, Tensor] = {}
        write, bounded, each = KeptStore.write, Sum._bounded, Each.at_client

        def watched_write(store: KeptStore, ids: Tensor, values: dict[str, Tensor]) -> None:
            write(store, ids, values)
            for name, value in values.items():
                if not name.startswith("secure.") or name == "secure.array":
                    self.note(f"kept {name}", value)

        def watched_bounded(release: Sum, arrays: dict[str, Tensor], exact: bool) -> Tensor:
            if release.clip is not None or release.noise is not None:
                self.note(f"raw {release.name}", arrays[release.name][None])
            return bounded(release, arrays, exact)

        def watched_each(
            release: Each, arrays: dict[str, Tensor], client: Client, draws: DrawsLike
        ) -> dict[str, Tensor]:
            if release.noise is not None:
                self.note(f"raw {release.names[0]}", arrays[release.names[0]][None])
            return each(release, arrays, client, draws)

        KeptStore.write, Sum._bounded = watched_write, watched_bounded  # type: ignore[method-assign, assignment]
        Each.at_client = watched_each  # type: ignore[method-assign, assignment]

    def note(self, name: str, values: Tensor) -> None:
        for value in values:
            if len(set(value.numpy().tobytes())) > 7:  # fewer different bytes may be anywhere
                self.arrays[f"{len(self.arrays)} {name}"] = value.clone()


def serve() -> None:
    """The program of a shard's process."""
    to, own = sys.stdout.buffer, sys.stdin.buffer
    sys.stdout = sys.stderr  # whatever is printed is no message
    torch.set_num_threads(1)
    noted, shard = Noted(), None
    store, arrays = ArrayStore(), list[bytes]()
    while True:
        letter, data = take(own)
        if letter == b"B":
            noted.arrays.clear()
            shard = _built(json.loads(data))
            for part in shard.parts.values():
                noted.note("a row", part.x)
            put(to, b"B", shard.roster.encode())
        elif letter == b"N":
            arrays.append(data)
        elif letter == b"Q":
            try:
                request = Request.decode(data).with_arrays(store, arrays)
            except Lacking as error:
                put(to, b"A", json.dumps(error.digests).encode())
                continue
            arrays.clear()
            for reply in _answers(shard, request):
                put(to, b"R", reply.encode())
            put(to, b"E")
        elif letter == b"F":
            shard.forget(*json.loads(data))
        elif letter == b"U":
            shard.use(Schema.from_json(data.decode()))
        elif letter == b"L":
            put(to, b"L", encode(noted.arrays))
        else:
            return


def _built(settings: dict[str, Any]) -> Any:
    from unalike.runtime.shard.shard import Shard
    from unalike.runtime.shard.simulator import Simulator

    problems = importlib.import_module(settings["problems"])
    parts, roster = problems.stored(Path(settings["data"]), settings["name"])
    mine = torch.arange(settings["shard"], len(roster), settings["shards"])
    own = {name: part.select(mine) for name, part in parts.items()}
    program = problems.program(settings["name"], roster.schema)
    return Shard(own, roster.select(mine), program, Simulator(block=1))  # 1: what is noted has values


def _answers(shard: Any, request: Request) -> Iterator[Reply]:
    """The shard's replies; where it refuses, all clients are failures that say why."""
    from unalike.runtime.shard.shard import Refused

    try:
        yield from shard.answer(request)
    except (Refused, WireError, TypeError) as error:
        yield request.reply(failed=dict.fromkeys(range(len(request.ids)), f"refused: {error}"))


if __name__ == "__main__":
    serve()
