"""A node's side of the network: it dials out, holds one stream and does what it is called to do, in order.

Nothing listens here. What a run asks is answered by a host, a fresh one for each channel; hosts work in one thread, so
that the stream stays awake while they compute.
"""

from __future__ import annotations

import asyncio
import random
import secrets
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from types import MappingProxyType
from typing import Any

import grpc

from unalike.runtime.network import frames
from unalike.runtime.network.frames import SILENCE, Joiner, TooLong
from unalike.runtime.shard.journal import unpack

Host = Callable[..., bytes]  # (what, *data) -> the answer with its status; it never raises
FIRST, LONGEST_WAIT = 0.1, 5.0  # seconds before dialing again
FATAL = (grpc.StatusCode.PERMISSION_DENIED, grpc.StatusCode.ALREADY_EXISTS)  # dialing faster does not help


class _Ended(Exception):
    """A stream has ended, and why; gRPC has an exception of its own only where a read or a write was under way."""

    def __init__(self, code: grpc.StatusCode, details: str) -> None:
        super().__init__(details)
        self._code, self._details = code, details

    def code(self) -> grpc.StatusCode:
        return self._code

    def details(self) -> str:
        return self._details


class Dial:
    """Keeps a node connected.

    - ``host``: makes the host of a new channel.
    - ``most``: bytes that one message to this node may have.
    - ``tell``: takes a line for the log.
    - ``news``: what whoever asks the hub for its status may know of this node; others change it.
    """

    def __init__(
        self,
        host: Callable[[], Host],
        version: str,
        most: int,
        tell: Callable[[str], None],
        news: Mapping[str, Any] = MappingProxyType({}),
    ) -> None:
        self._make, self._version, self._most, self._tell, self._news = host, version, most, tell, news
        self._instance = secrets.token_hex(16)
        self._thread = ThreadPoolExecutor(1)

    async def keep(self, address: str, key: bytes, certificate: bytes, authority: bytes) -> None:
        """Dial, and dial again whenever the stream ends."""
        secured, wait = _secured(key, certificate, authority), FIRST
        while True:
            why = "the hub ended the stream"
            try:
                async with grpc.aio.secure_channel(address, *secured) as channel:
                    if await self._stay(channel):
                        wait = FIRST
            except (grpc.aio.AioRpcError, _Ended) as error:
                why = f"{error.code().name}: {error.details()}"
                if error.code() in FATAL:
                    wait = LONGEST_WAIT
            except asyncio.InvalidStateError:
                pass  # it ended just before a write
            except TimeoutError:
                why = f"nothing was heard from the hub for {SILENCE:g} s"
            self._tell(f"not connected ({why}); dialing {address} again in {wait:.1f} s")
            await asyncio.sleep(wait * random.uniform(0.5, 1))
            wait = min(LONGEST_WAIT, 2 * wait)

    async def _stay(self, channel: Any) -> bool:
        """Hold a stream until it ends; was there one?"""
        stream = channel.stream_stream(frames.METHOD)()
        writing, calls = asyncio.Lock(), asyncio.Queue[tuple[int, int, bytes | str]]()
        hosts: dict[int, Host] = {}
        joiners: dict[int, Joiner] = {}

        async def write(frame: bytes) -> None:
            async with writing:
                await stream.write(frame)

        await write(frames.greeting({"instance": self._instance, "version": self._version}))
        working = asyncio.create_task(self._work(calls, hosts, write))
        working.add_done_callback(lambda _: stream.cancel())  # a node that cannot work is not there
        known = False
        try:
            while (frame := await asyncio.wait_for(stream.read(), SILENCE)) is not grpc.aio.EOF:
                number, call, kind = frames.head(frame)
                if not known:
                    self._tell("connected")
                    known = True
                if kind == frames.PING:
                    await write(frames.signal(frames.PING, content=self._news))
                elif kind == frames.OPEN:
                    hosts[number], joiners[number] = self._make(), Joiner(self._most)
                elif kind == frames.CLOSE:
                    hosts.pop(number, None)
                    joiners.pop(number, None)
                elif kind in (frames.MORE, frames.LAST) and number in joiners:
                    try:
                        whole = joiners[number].add(frame)
                    except TooLong as error:
                        calls.put_nowait((number, call, str(error)))
                    else:
                        if whole is not None:
                            calls.put_nowait((number, call, whole))
            await _end_of(stream)
            return known
        except asyncio.CancelledError:
            if not working.done() or working.cancelled():
                raise  # this process is to end
            raise _Ended(grpc.StatusCode.INTERNAL, repr(working.exception())) from None
        finally:
            working.cancel()
            hosts.clear()
            stream.cancel()

    async def _work(self, calls: Any, hosts: dict[int, Host], write: Callable[[bytes], Any]) -> None:
        """Do one call after the other; those of channels that are closed are left out."""
        loop, told = asyncio.get_running_loop(), self._news.get("refused")
        while True:
            number, call, message = await calls.get()
            host = hosts.get(number)
            if host is None:
                continue
            if isinstance(message, str):
                answer = b"-" + message.encode()
            else:
                answer = await loop.run_in_executor(self._thread, _answer, host, message)
            if number in hosts:
                for frame in frames.split(number, call, answer):
                    await write(frame)
            if (refused := self._news.get("refused")) != told:  # whoever asks for the status need not wait for a ping
                await write(frames.signal(frames.PING, content=self._news))
                told = refused


async def greet(address: str, key: bytes, certificate: bytes, authority: bytes) -> tuple[str, str, float]:
    """What a hub says to this node's greeting: a status, why, and what time it is there. The stream ends at once."""
    try:
        async with grpc.aio.secure_channel(address, *_secured(key, certificate, authority)) as channel:
            stream = channel.stream_stream(frames.METHOD)()
            await stream.write(frames.greeting({"instance": secrets.token_hex(16), "version": "check"}))
            frame = await asyncio.wait_for(stream.read(), SILENCE)
            if frame is grpc.aio.EOF:
                await _end_of(stream)
                return grpc.StatusCode.UNAVAILABLE.name, "the hub ended the stream", 0.0
            return "OK", "", float(frames.content(frame).get("time", 0.0))
    except (grpc.aio.AioRpcError, _Ended) as error:
        return error.code().name, str(error.details()), 0.0
    except TimeoutError:
        return "DEADLINE_EXCEEDED", "no answer to the greeting", 0.0


async def _end_of(stream: Any) -> None:
    """Raise why a stream ended, if anything was wrong."""
    code, details = await stream.code(), await stream.details()
    if code != grpc.StatusCode.OK:
        raise _Ended(code, str(details))


def _secured(key: bytes, certificate: bytes, authority: bytes) -> tuple[Any, Any]:
    """The credentials and the options of a channel: the hub is known by the network's own authority alone."""
    named = (*frames.OPTIONS, ("grpc.ssl_target_name_override", frames.HUB), ("grpc.enable_http_proxy", 0))
    return grpc.ssl_channel_credentials(authority, key, certificate), named


def _answer(host: Host, message: bytes) -> bytes:
    try:
        what, *data = unpack(message)
        return host(what.decode("ascii"), *data)
    except ValueError:
        return b"-a call is a name and messages"
