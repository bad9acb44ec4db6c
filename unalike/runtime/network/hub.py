"""The hub: owns the port, the server's key and the list of admitted nodes. It carries messages and reads none of them.

A node dials in by mutual TLS and holds one stream. Its certificate must be of this network's authority, and its public
key that of a line in the file ``admitted``: who deletes the line ends the stream at once. A run reaches the hub by a
Unix socket that only its owner can open, with one connection for each node; it may end, crash and come back while nodes
stay connected.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import time
from collections.abc import Callable, Coroutine, Mapping
from pathlib import Path
from typing import Any

import grpc

from unalike.runtime.network import frames
from unalike.runtime.network.frames import HEAD, SILENCE, SOCKET, TooLong

CHANNELS = 16  # runs that may ask one node at the same time
STUCK = 10.0  # seconds after which a run that does not read what a node says is left alone


class _Node:
    """A node's stream."""

    def __init__(self, name: str, key: str, hello: Mapping[str, Any], context: Any) -> None:
        self.name, self.key, self.context = name, key, context
        self.instance, self.version = str(hello.get("instance", "")), str(hello.get("version", ""))[:100]
        self.since = self.heard = time.time()
        self.news: dict[str, Any] = {}  # what it says of itself
        self.runs: dict[int, asyncio.StreamWriter] = {}  # by channel
        self.pending: set[tuple[int, int]] = set()  # calls that it has not answered
        self.over: asyncio.Future[tuple[grpc.StatusCode, str]] = asyncio.get_running_loop().create_future()
        self._writing = asyncio.Lock()

    async def write(self, frame: bytes) -> None:
        async with self._writing:
            await self.context.write(frame)

    def end(self, code: grpc.StatusCode, why: str) -> None:
        if not self.over.done():
            self.over.set_result((code, why))
        for writer in self.runs.values():
            writer.close()

    async def hear(self, frame: bytes) -> None:
        """Pass a frame of the node on to the run that it is for; one for a run that has gone is dropped."""
        self.heard = time.time()
        channel, call, kind = frames.head(frame)
        writer = self.runs.get(channel)
        if kind == frames.PING:
            self.news = frames.content(frame)
        if kind == frames.LAST:
            self.pending.discard((channel, call))
        if writer is None or kind not in (frames.MORE, frames.LAST):
            return
        writer.write(len(frame).to_bytes(4, "little") + frame)
        try:
            await asyncio.wait_for(writer.drain(), STUCK)
        except (TimeoutError, ConnectionError):
            writer.close()

    def status(self) -> dict[str, Any]:
        refused = self.news.get("refused")
        return {
            "since": self.since, "heard": self.heard, "version": self.version,
            "runs": len(self.runs), "busy": bool(self.pending), "doing": str(self.news.get("doing", ""))[:200],
            "refused": [str(one)[:500] for one in refused[-5:]] if isinstance(refused, list) else [],
        }  # fmt: skip


class Hub:
    """Serves one network until it is stopped.

    - ``admitted``: gives the admitted nodes: names by the fingerprint of a public key.
    - ``key_of``: that fingerprint, of a certificate in PEM.
    - ``tell``: takes a line for the log.
    """

    def __init__(
        self,
        folder: Path,
        admitted: Callable[[], Mapping[str, str]],
        key_of: Callable[[bytes], str],
        tell: Callable[[str], None],
    ) -> None:
        self._folder, self._admitted, self._key_of, self._tell = folder, admitted, key_of, tell
        self._nodes: dict[str, _Node] = {}
        self._channel = 0
        self._doing: set[asyncio.Task[None]] = set()  # that nobody waits for

    async def serve(self, address: str, key: bytes, certificate: bytes, authority: bytes) -> None:
        """Listen until SIGTERM or Ctrl-C."""
        server = grpc.aio.server(options=(*frames.OPTIONS, ("grpc.so_reuseport", 0)))
        handler = grpc.stream_stream_rpc_method_handler(self._join)
        service, name = frames.METHOD.strip("/").split("/")
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, {name: handler}),))
        secret = grpc.ssl_server_credentials([(key, certificate)], authority, require_client_auth=True)
        port = server.add_secure_port(address, secret)
        stop, loop = asyncio.Event(), asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, stop.set)
        path = self._folder / SOCKET
        path.unlink(missing_ok=True)
        before = os.umask(0o177)  # nobody else may open the socket
        try:
            runs = await asyncio.start_unix_server(self._serve_run, path)
        finally:
            os.umask(before)
        await server.start()
        watching = asyncio.create_task(self._watch())
        self._tell(f"listens on {address.rpartition(':')[0]}:{port}")
        await stop.wait()
        watching.cancel()
        runs.close()
        path.unlink(missing_ok=True)
        await server.stop(1.0)

    async def _join(self, _: Any, context: Any) -> None:
        """A node's stream, from its greeting to its end."""
        shown = context.auth_context().get("x509_pem_cert", [b""])[0]
        key = self._key_of(shown)
        name = self._admitted().get(key, "")
        if not name:
            self._tell(f"refused a node of key {key[:16]}: it is not admitted")
            await context.abort(grpc.StatusCode.PERMISSION_DENIED, "this key is not admitted here")
        try:
            first = await asyncio.wait_for(context.read(), SILENCE)
            hello = frames.content(first)
        except (TimeoutError, TypeError):
            hello = {}
        if not hello:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "a node begins with a greeting")
        node, old = _Node(name, key, hello, context), self._nodes.get(name)
        if old is not None and old.instance != node.instance:
            self._tell(f"refused a second process with the key of {name}")
            await context.abort(grpc.StatusCode.ALREADY_EXISTS, "a process with this key is connected already")
        if old is not None:
            old.end(grpc.StatusCode.ABORTED, "the node has come back on another stream")
        self._nodes[name] = node
        self._tell(f"{name} is here, {node.version}")
        try:
            await node.write(_ping())
            code, why = await self._listen(node)
        finally:
            if self._nodes.get(name) is node:
                del self._nodes[name]
            node.end(grpc.StatusCode.OK, "")
        self._tell(f"{name} has gone{': ' if why else ''}{why}")
        if code != grpc.StatusCode.OK:
            await context.abort(code, why)

    async def _listen(self, node: _Node) -> tuple[grpc.StatusCode, str]:
        """Pass on what a node says, until its stream ends or is ended; why it did."""
        while True:
            reading = asyncio.ensure_future(node.context.read())
            await asyncio.wait({reading, node.over}, return_when=asyncio.FIRST_COMPLETED)
            if node.over.done():
                reading.cancel()
                return node.over.result()
            try:
                frame = reading.result()
                if frame is grpc.aio.EOF:
                    return grpc.StatusCode.OK, ""
                await node.hear(frame)
            except TooLong as error:
                return grpc.StatusCode.INVALID_ARGUMENT, str(error)
            except (grpc.aio.BaseError, asyncio.CancelledError) as error:
                return grpc.StatusCode.CANCELLED, type(error).__name__

    async def _watch(self) -> None:
        """End streams of nodes that are no longer admitted, or that say nothing; and show all that the hub is there."""
        pinged = 0.0
        while True:
            admitted = self._admitted()
            for node in list(self._nodes.values()):
                if admitted.get(node.key) != node.name:
                    node.end(grpc.StatusCode.PERMISSION_DENIED, "this key is not admitted any more")
                elif time.time() - node.heard > SILENCE:
                    node.end(grpc.StatusCode.DEADLINE_EXCEEDED, f"nothing was heard for {SILENCE:g} s")
                elif time.time() - pinged > frames.BEAT:
                    self._do(self._ping(node))
            pinged = time.time() if time.time() - pinged > frames.BEAT else pinged
            await asyncio.sleep(0.5)

    def _do(self, what: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(what)
        self._doing.add(task)
        task.add_done_callback(self._doing.discard)

    async def _ping(self, node: _Node) -> None:
        with contextlib.suppress(Exception):  # a stream that has just ended; whoever listens to it knows
            await asyncio.wait_for(node.write(_ping()), SILENCE)

    # Runs

    async def _serve_run(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            asked = json.loads(await _read(reader))
            node = self._nodes.get(str(asked.get("node")))
            if asked.get("do") == "status":
                nodes = {name: one.status() for name, one in self._nodes.items()}
                _say(writer, {"nodes": nodes, "admitted": sorted(self._admitted().values())})
            elif asked.get("do") != "reach":
                _say(writer, {"error": "a run asks for the status, or to reach a node"})
            elif node is None:
                _say(writer, {"error": f"the node {asked.get('node')} is not connected"})
            elif len(node.runs) >= CHANNELS:
                _say(writer, {"error": f"{CHANNELS} runs are at the node {node.name} already"})
            else:
                _say(writer, {})
                await self._carry(node, reader, writer)
            await writer.drain()
        except (OSError, EOFError, ValueError, AttributeError, TooLong, grpc.aio.BaseError):
            pass  # the run has gone, or the node; each sees that its connection ends
        finally:
            writer.close()

    async def _carry(self, node: _Node, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Pass on what a run tells a node, in a channel of its own."""
        self._channel += 1
        channel = self._channel
        node.runs[channel] = writer
        try:
            await node.write(frames.signal(frames.OPEN, channel))
            while True:
                frame = await _read(reader)
                _, call, kind = frames.head(frame)
                if kind not in (frames.MORE, frames.LAST):
                    raise TooLong("a run sends messages and nothing else")
                if kind == frames.LAST:
                    node.pending.add((channel, call))
                await node.write(HEAD.pack(channel, call, kind) + frame[HEAD.size :])
        finally:
            del node.runs[channel]
            node.pending = {one for one in node.pending if one[0] != channel}
            self._do(self._close(node, channel))

    async def _close(self, node: _Node, channel: int) -> None:
        with contextlib.suppress(Exception):  # its stream may have ended, and its channels with it
            await node.write(frames.signal(frames.CLOSE, channel))


def _ping() -> bytes:
    return frames.signal(frames.PING, content={"time": time.time()})


async def _read(reader: asyncio.StreamReader) -> bytes:
    size = int.from_bytes(await reader.readexactly(4), "little")
    if size > frames.LONGEST:
        raise TooLong(f"a frame of {size:,} bytes")
    return await reader.readexactly(size)


def _say(writer: asyncio.StreamWriter, what: Mapping[str, Any]) -> None:
    data = json.dumps(what).encode()
    writer.write(len(data).to_bytes(4, "little") + data)
