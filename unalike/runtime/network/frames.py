"""Frames: what crosses between a run, a hub and a node. A message is cut into frames; none is longer than ``CHUNK``.

A frame begins with its channel (a run's way to one node), the number of its call in that channel, and its kind. Who
puts frames together bounds what they may come to.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator, Mapping
from typing import Any

SOCKET = "hub.sock"  # in the folder of a network
METHOD = "/unalike.Network/Join"
HUB = "hub.unalike.internal"  # in the hub's certificate, whatever its address is
HEAD = struct.Struct("<IIB")  # channel, call, kind
CHUNK = 1 << 20
LONGEST = HEAD.size + CHUNK
OPTIONS = (("grpc.max_receive_message_length", LONGEST), ("grpc.max_send_message_length", LONGEST))
MORE, LAST, PING, OPEN, CLOSE = range(5)
FEW = 4096  # bytes of plain values that are looked at
BEAT = 5.0  # seconds between two pings of a hub
SILENCE = 4 * BEAT  # a stream on which nothing came for so long is given up, on either side


class TooLong(ValueError):
    """A message that is longer than its reader allows, or a frame that is none."""


def split(channel: int, call: int, data: bytes) -> Iterator[bytes]:
    """A message as frames."""
    view = memoryview(data)
    for place in range(0, max(1, len(data)), CHUNK):
        kind = LAST if place + CHUNK >= len(data) else MORE
        yield HEAD.pack(channel, call, kind) + view[place : place + CHUNK]


def signal(kind: int, channel: int = 0, content: Mapping[str, Any] | None = None) -> bytes:
    """A frame that is no message; with a few plain values, as a ping has."""
    return HEAD.pack(channel, 0, kind) + (b"" if content is None else json.dumps(dict(content)).encode()[:CHUNK])


def greeting(content: Mapping[str, Any]) -> bytes:
    """A node's first frame."""
    return signal(LAST, content=content)


def content(frame: bytes) -> dict[str, Any]:
    """The plain values of such a frame; none where they are not what is expected."""
    try:
        found = json.loads(frame[HEAD.size : HEAD.size + FEW])
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def head(frame: bytes) -> tuple[int, int, int]:
    """A frame's channel, call and kind."""
    if not HEAD.size <= len(frame) <= LONGEST:
        raise TooLong(f"a frame of {len(frame):,} bytes; expected {HEAD.size} to {LONGEST:,}")
    channel, call, kind = HEAD.unpack_from(frame)
    return channel, call, kind


class Joiner:
    """Puts the frames of one channel together; the messages of a channel do not mix."""

    def __init__(self, most: int) -> None:
        self._most, self._parts, self._size = most, list[bytes](), 0

    def add(self, frame: bytes) -> bytes | None:
        """The whole message with its last frame. ``TooLong`` with the last frame of one that is over the bound."""
        self._size += len(frame) - HEAD.size
        if self._size > self._most:
            self._parts.clear()
        else:
            self._parts.append(frame[HEAD.size :])
        if head(frame)[2] != LAST:
            return None
        whole, size = b"".join(self._parts), self._size
        self._parts, self._size = [], 0
        if size > self._most:
            raise TooLong(f"a message of {size:,} bytes; at most {self._most:,} are taken")
        return whole
