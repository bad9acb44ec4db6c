"""Shards in other processes, started by exec and fed with bytes over stdin and stdout: no fork, no pickle.

A message is a letter, a length of 8 bytes and the bytes. To a shard: B, build from plain settings; Q, a request; F,
forget; U, use a schema; L, look at what was noted for the test. From it: the roster, R for each reply and E at the end.
"""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from unalike.core.request import Reply, Request
from unalike.core.roster import Roster
from unalike.core.schema import Schema
from unalike.core.wire import WireError, decode, encode
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
        self.crossed: list[bytes] = []  # all that went up, roster and replies

    def build(self, **settings: Any) -> None:
        put(self._to, b"B", json.dumps(settings).encode())
        self.crossed = [self._answer(b"B")]
        self.roster = Roster.decode(self.crossed[0])

    def answer(self, request: Request) -> Iterator[Reply]:
        put(self._to, b"Q", request.encode())
        try:
            while True:
                letter, data = take(self._from)
                if letter != b"R":
                    break
                self.crossed.append(data)
                yield Reply.decode(data)
        finally:
            while letter == b"R":  # whoever asked may have given up
                letter, _ = take(self._from)
        if letter != b"E":
            raise RuntimeError("the process of a shard has ended")

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
    """A simulation's routing and drop-outs over shards in other processes; its program is closed."""

    def __init__(self, remotes: list[Remote], build: str, name: str, data: Path, drop: Drop = 0.0) -> None:
        from unalike.studio.program import program_of

        for number, remote in enumerate(remotes):
            remote.build(build=build, name=name, data=str(data), shard=number, shards=len(remotes))
        program = program_of(load(build)(name), remotes[0].roster.schema)
        super().__init__(remotes, program, drop=drop)  # type: ignore[arg-type]


def load(place: str) -> Any:
    module, _, function = place.partition(":")
    return getattr(importlib.import_module(module), function)


# The shard's side


class Noted:
    """For the test: what clients keep or hold, and what a release with a bound was given before it was bounded."""

    def __init__(self) -> None:
        from unalike.core.release import Sum
        from unalike.runtime.shard.kept import KeptStore

        self.arrays: dict[str, Tensor] = {}
        write, bounded = KeptStore.write, Sum._bounded

        def watched_write(store: KeptStore, ids: Tensor, values: dict[str, Tensor]) -> None:
            write(store, ids, values)
            for name, value in values.items():
                if not name.startswith("secure.") or name == "secure.array":
                    self._note(f"kept {name}", value)

        def watched_bounded(release: Sum, arrays: dict[str, Tensor]) -> Tensor:
            if release.clip is not None:
                self._note(f"unclipped {release.name}", arrays[release.name][None])
            return bounded(release, arrays)

        KeptStore.write, Sum._bounded = watched_write, watched_bounded  # type: ignore[method-assign, assignment]

    def _note(self, name: str, values: Tensor) -> None:
        for value in values:
            if value.is_floating_point() and value.numel() > 3:
                self.arrays[f"{len(self.arrays)} {name}"] = value.clone()


def serve() -> None:
    """The program of a shard's process."""
    to, own = sys.stdout.buffer, sys.stdin.buffer
    sys.stdout = sys.stderr  # whatever is printed is no message
    torch.set_num_threads(1)
    noted, shard = Noted(), None
    while True:
        letter, data = take(own)
        if letter == b"B":
            noted.arrays.clear()
            shard = _built(json.loads(data))
            put(to, b"B", shard.roster.encode())
        elif letter == b"Q":
            for reply in _answers(shard, data):
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
    from tests.runtime import problems
    from unalike.runtime.shard.shard import Shard
    from unalike.runtime.shard.simulator import Simulator
    from unalike.studio.program import program_of

    population = problems.read(Path(settings["data"]))
    mine = torch.arange(settings["shard"], len(population), settings["shards"])
    parts = {name: part.select(mine) for name, part in population.parts.items()}
    program = program_of(load(settings["build"])(settings["name"]), population.schema)
    return Shard(parts, population.roster().select(mine), program, Simulator(block=1))  # 1: what is noted has values


def _answers(shard: Any, data: bytes) -> Iterator[Reply]:
    """The shard's replies; where it refuses, all clients are failures that say why."""
    from unalike.runtime.shard.shard import Refused

    request = Request.decode(data)
    try:
        yield from shard.answer(request)
    except (Refused, WireError, TypeError) as error:
        yield Reply(torch.arange(0), (), dict.fromkeys(range(len(request.ids)), f"refused: {error}"))


if __name__ == "__main__":
    serve()
