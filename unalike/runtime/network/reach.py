"""A run's side of the network: it reaches nodes through the hub's Unix socket. An engine for ``runtime/workers.py``."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from unalike.core.wire import MAX_BYTES, MAX_VALUES
from unalike.runtime.network.frames import HEAD, LONGEST, SOCKET, Joiner, TooLong, split
from unalike.runtime.shard.journal import pack
from unalike.runtime.workers import Unreachable

MOST = 2 * MAX_BYTES + MAX_VALUES  # bytes of one answer, which may be several messages
PATIENCE = 10.0  # seconds until a hub that is there has said what it is asked


def ask_hub(folder: Path, **what: str) -> dict[str, Any]:
    """What a hub says to one question; ``Unreachable`` where there is none."""
    with _connected(folder) as line:
        line.settimeout(PATIENCE)
        _send(line, json.dumps(what).encode())
        found = json.loads(_receive(line))
    if "error" in found:
        raise Unreachable(str(found["error"]))
    return dict(found)


def _connected(folder: Path) -> socket.socket:
    line = socket.socket(socket.AF_UNIX)
    try:
        line.connect(str(folder / SOCKET))
    except OSError as error:
        line.close()
        raise Unreachable(f"no hub answers in {folder} ({error.strerror}); start it: unalike network hub") from error
    return line


def _send(line: socket.socket, data: bytes) -> None:
    line.sendall(len(data).to_bytes(4, "little") + data)


def _receive(line: socket.socket) -> bytes:
    return _exactly(line, int.from_bytes(_exactly(line, 4), "little"))


def _exactly(line: socket.socket, size: int) -> bytes:
    if size > LONGEST:
        raise TooLong(f"a frame of {size:,} bytes")
    parts = bytearray()
    while len(parts) < size:
        some = line.recv(size - len(parts))
        if not some:
            raise EOFError
        parts += some
    return bytes(parts)


class _Line:
    """A connection to one node, and the calls that wait for its answer."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, name: str) -> None:
        self.reader, self.writer, self.name = reader, writer, name
        self.waiting: dict[int, asyncio.Future[bytes]] = {}
        self.calls = 0
        self.listening = asyncio.create_task(self._listen())

    @property
    def open(self) -> bool:
        return not self.listening.done()

    async def _listen(self) -> None:
        joiner = Joiner(MOST)
        try:
            while True:
                size = int.from_bytes(await self.reader.readexactly(4), "little")
                if size > LONGEST:
                    raise TooLong(f"a frame of {size:,} bytes")
                frame = await self.reader.readexactly(size)
                call = HEAD.unpack_from(frame)[1]
                whole = joiner.add(frame)
                answer = None if whole is None else self.waiting.pop(call, None)
                if answer is not None and whole is not None and not answer.done():
                    answer.set_result(whole)  # others are late, and nobody waits for them
        except (OSError, EOFError, ValueError):
            pass
        finally:
            self.close()

    def close(self) -> None:
        self.writer.close()
        self.listening.cancel()
        lost, self.waiting = self.waiting, {}
        for answer in lost.values():
            if not answer.done():
                answer.set_exception(Unreachable(f"{self.name} was lost"))


class Nodes:
    """The engine of a network: these nodes, through the hub whose folder this is."""

    def __init__(self, folder: Path, names: Sequence[str]) -> None:
        self._folder, self._names, self.count = folder, list(names), len(names)
        self._lines: dict[int, _Line] = {}
        self._turns: dict[int, asyncio.Lock] = {}
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()

    def name(self, number: int) -> str:
        return f"node {self._names[number]}"

    def begin(self, number: int, what: str, *data: Any) -> Future[bytes]:
        return asyncio.run_coroutine_threadsafe(self._call(number, pack([what.encode(), *data])), self._loop)

    async def _call(self, number: int, message: bytes) -> bytes:
        async with self._turns.setdefault(number, asyncio.Lock()):  # calls keep their order
            line = self._lines.get(number)
            if line is None or not line.open:
                line = self._lines[number] = await self._reach(number)
            line.calls += 1
            call = line.calls
            answer: asyncio.Future[bytes] = self._loop.create_future()
            line.waiting[call] = answer
            try:
                for frame in split(0, call, message):
                    line.writer.write(len(frame).to_bytes(4, "little") + frame)
                    await line.writer.drain()
            except OSError as error:
                line.close()
                raise Unreachable(f"{self.name(number)} was lost") from error
        return await answer

    async def _reach(self, number: int) -> _Line:
        try:
            reader, writer = await asyncio.open_unix_connection(self._folder / SOCKET)
            asked = json.dumps({"do": "reach", "node": self._names[number]}).encode()
            writer.write(len(asked).to_bytes(4, "little") + asked)
            size = int.from_bytes(await asyncio.wait_for(reader.readexactly(4), PATIENCE), "little")
            found: Mapping[str, Any] = json.loads(await reader.readexactly(min(size, LONGEST)))
        except (OSError, EOFError, ValueError) as error:
            raise Unreachable(f"no hub answers in {self._folder}; start it: unalike network hub") from error
        if "error" in found:
            writer.close()
            raise Unreachable(str(found["error"]))
        return _Line(reader, writer, self.name(number))

    def share(self, data: bytes) -> bytes:
        return data

    def end(self, number: int) -> None:
        """A node cannot be ended from here. Its line is closed, so that it drops what it has not begun, and whatever it
        says late is for nobody."""
        self._loop.call_soon_threadsafe(self._end, number)

    def _end(self, number: int) -> None:
        line = self._lines.pop(number, None)
        if line is not None:
            line.close()

    def close(self) -> None:
        async def stop() -> None:
            others = asyncio.all_tasks() - {asyncio.current_task()}
            for number in list(self._lines):
                self._end(number)
            for one in others:
                one.cancel()
            await asyncio.gather(*others, return_exceptions=True)
            self._loop.stop()

        with contextlib.suppress(RuntimeError):
            asyncio.run_coroutine_threadsafe(stop(), self._loop)
            self._thread.join(PATIENCE)
            self._loop.close()
