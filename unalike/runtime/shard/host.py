"""A shard as one reaches it from elsewhere: what may be asked of it by name, with bytes in and bytes out.

A runtime whose shards are in other processes carries these bytes and nothing else. Whatever goes wrong comes back as
bytes, too: no exception, which would have to be pickled, crosses.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Protocol, cast

import torch
from torch import Tensor

from unalike.core import outside, wire
from unalike.core.request import Program, Request
from unalike.core.schema import Schema
from unalike.runtime.shard.journal import Journal, pack
from unalike.runtime.shard.shard import Refused, Shard
from unalike.version import __version__

CALLS = (
    "version", "load", "settle", "answer", "learn", "use", "forget", "commit", "rollback", "plans", "view",
)  # fmt: skip
NO_MEMORY = "can't allocate memory"  # PyTorch raises a plain RuntimeError with these words
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class Site(Protocol):
    """Clients' data where they are, found by plain settings. It makes the shard that answers for some of them."""

    def about(self) -> bytes:
        """What a server may know of all clients, encoded as its reader wants it."""

    def shard(self, settings: str, mine: Tensor) -> Shard:
        """The clients at these positions, with the program that the settings describe."""

    def learn(self, what: bytes) -> Program:
        """The program that these settings describe, in place of the one that the shard began with."""

    def view(self, what: str) -> bytes:
        """What only a simulation looks at, by name."""


class NotReady(RuntimeError):
    """The host has started again and needs its set-up calls."""


class OutOfMemory(RuntimeError):
    """A host had no memory left for what it was asked."""


class Failed(RuntimeError):
    """An error that a host reports."""


@cache
def version() -> str:
    """The version of Unalike here, and a digest of its code: equal versions can be of different days."""
    package = Path(__file__).parents[2]
    digest = hashlib.sha256()
    for file in sorted(package.rglob("*.py")):
        digest.update(str(file.relative_to(package)).encode() + file.read_bytes())
    return f"{__version__} (code {digest.hexdigest()[:8]})"


class Host:
    """A site, and its shard behind a journal. ``call`` is the one way in."""

    def __init__(self, sites: Sequence[str] = ()) -> None:
        self._sites = tuple(sites)  # what it may be told to load
        self._site: Site | None = None
        self._journal: Journal | None = None

    def call(self, what: str, *data: bytes) -> bytes:
        """Do what is named; the first byte of the answer is its status: see ``result``."""
        try:
            if what not in CALLS:
                raise Refused(f"a host does not know {what!r}; it knows {', '.join(CALLS)}")
            answer: bytes | None = getattr(self, f"_{what}")(*data)
            return b"+" + (answer or b"")
        except NotReady:
            return b"?"
        except wire.Lacking as error:
            return b"A" + json.dumps(error.digests).encode()
        except (Refused, wire.WireError) as error:
            return b"-" + str(error).encode()
        except OSError as error:
            if error.errno not in FULL:
                return b"!" + traceback.format_exc().encode()
            return b"D" + json.dumps([error.errno, str(error.filename or self._folder)]).encode()
        except MemoryError as error:
            return b"M" + str(error).encode()
        except Exception as error:  # an exception would have to be pickled
            if NO_MEMORY in str(error):
                return b"M" + str(error).encode()
            text = f"{type(error).__name__}: {error}"
            return b"!" + (text if isinstance(error, ValueError) else f"{text}\n{traceback.format_exc()}").encode()

    @property
    def journal(self) -> Journal:
        if self._journal is None:
            raise NotReady
        return self._journal

    @property
    def _folder(self) -> Path | None:
        return None if self._journal is None else self._journal.folder

    def _version(self) -> bytes:
        return json.dumps({"version": version(), "pid": os.getpid()}).encode()

    def _load(self, assemble: bytes, settings: bytes) -> bytes:
        if assemble.decode() not in self._sites:
            raise Refused(f"this host loads {', '.join(self._sites) or 'nothing'}, not {assemble.decode()!r}")
        make = cast("Callable[[str], Site]", outside.load(assemble.decode()))
        torch.set_num_threads(1)  # a worker has one core, unless the recipe says otherwise
        self._site = make(settings.decode())
        return self._site.about()

    def _settle(self, data: bytes) -> bytes:
        if self._site is None:
            raise NotReady
        message = wire.decode(data)
        settings, folder, mine, again = (message.get(name) for name in ("settings", "folder", "mine", "again"))
        if not (isinstance(settings, str) and isinstance(folder, str) and isinstance(mine, Tensor)):
            raise wire.WireError("a host settles with settings, a folder and its clients")
        self._journal = Journal(self._site.shard(settings, mine), Path(folder), again=again is True)
        return self._journal.shard.roster.encode()

    def _answer(self, head: bytes, *arrays: bytes) -> bytes:
        begin, cpu = time.perf_counter(), time.process_time()
        frames = list(self._replies(head, arrays))
        about = {"seconds": time.perf_counter() - begin, "cpu": time.process_time() - cpu}
        return pack([json.dumps(about).encode(), *frames])

    def _replies(self, head: bytes, arrays: Sequence[bytes]) -> Iterator[bytes]:
        try:
            yield from self.journal.answer(head, *arrays)
        except (Refused, wire.WireError, TypeError) as error:  # all its clients are failures that say why
            request = Request.decode(head)
            yield request.reply(failed=dict.fromkeys(range(len(request.ids)), f"refused: {error}")).encode()

    def _learn(self, what: bytes) -> None:
        shard = self.journal.shard
        if self._site is None:
            raise NotReady
        shard.program = self._site.learn(what)

    def _use(self, schema: bytes) -> None:
        self.journal.shard.use(Schema.from_json(schema.decode()))

    def _forget(self, data: bytes) -> None:
        run, prefix = json.loads(data)
        self.journal.shard.forget(run, prefix)

    def _commit(self, data: bytes) -> bytes:
        run, serial = json.loads(data)
        self.journal.commit(run, serial)
        return json.dumps(self.journal.shard.simulator.plans()).encode()

    def _rollback(self, data: bytes) -> None:
        run, serial = json.loads(data)
        self.journal.rollback(run, serial)

    def _plans(self, plans: bytes) -> None:
        self.journal.shard.simulator.use_plans(json.loads(plans))

    def _view(self, what: bytes) -> bytes:
        if self._site is None:
            raise NotReady
        return self._site.view(what.decode())


def result(answer: bytes, who: str) -> bytes:
    """What a call gave; what went wrong there is raised here."""
    letter, data = answer[:1], answer[1:]
    if letter == b"+":
        return data
    if letter == b"?":
        raise NotReady
    if letter == b"A":
        raise wire.Lacking(json.loads(data))
    if letter == b"M":
        raise OutOfMemory(f"{who} has no memory left: {data.decode(errors='replace')}")
    if letter == b"D":
        number, file = json.loads(data)
        raise OSError(number, f"{os.strerror(number)} at {who}", file)
    raise (Refused if letter == b"-" else Failed)(f"{who}: {data.decode(errors='replace')}")
