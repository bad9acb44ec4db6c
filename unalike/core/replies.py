"""The replies to an ask as they stream in: checked, added up, metered and written down."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from unalike.core.bits import message_bytes
from unalike.core.failure import Diverged
from unalike.core.release import SIZE, Each, Release, Total, is_summed, longest
from unalike.core.request import Reply, Request
from unalike.core.shapes import Shapes
from unalike.core.transcript import Traffic
from unalike.privacy.mechanisms import DrawsLike
from unalike.privacy.sampling import Sampling

DIGEST = 32  # bytes


class Collector:
    """Takes the replies to one ask and checks them: whoever answers nonsense is a failure, with the reason.

    A sum cannot be taken apart again, so a shard's sums are merged together, once, when all of its replies fit.

    - ``sizes``: [C] the declared sizes of the request's clients.
    - ``shapes``: of what each client sends; None: the first who sends something shows them.
    - ``noised``: the shards have put the noise on their sums.
    """

    def __init__(
        self,
        request: Request,
        sizes: Tensor,
        releases: Sequence[Release],
        shapes: Sequence[Shapes] | None,
        *,
        noised: bool,
    ) -> None:
        self._request, self._sizes, self._releases = request, sizes, releases
        self._rows: list[Tensor] = []  # those of every reply, and their arrays for each release
        self._arrays: list[Sequence[Mapping[str, Tensor]]] = []
        self._totals = {place: Total(release, noised) for place, release in enumerate(releases) if is_summed(release)}
        self._shapes: list[Shapes] | None = None
        if shapes is not None:
            named = zip(releases, shapes, strict=True)
            self._shapes = [
                {name: known[name] for name in (known if one.visible is None else one.visible)} for one, known in named
            ]
            for place, total in self._totals.items():
                total.shape = shapes[place][total.name]
        self._by = np.full(len(sizes), -1)  # [C] the shard in which each client answered
        self._place = np.empty(len(sizes), dtype=np.int64)  # [C] where in the latest reply that has it
        self._failed: dict[int, str] = {}
        self._over: dict[int, str] = {}  # shards that are done or refused, and what is wrong with further replies

    def expect(self, sent: Mapping[str, Tensor]) -> None:
        """Nobody was drawn: sums are noise of the type that clients send, so that this does not show."""
        for total in self._totals.values():
            total.like(sent[total.name])

    def add(self, reply: Reply) -> bool:
        """Take a reply; False: nothing of it could be used, and its clients' failures say why."""
        if (reply.run, reply.serial) != (self._request.run, self._request.serial):
            return False  # late, or a lie
        for row, reason in reply.failed.items():
            if 0 <= row < len(self._by) and (reply.shard not in self._over or self._by[row] < 0):
                self._by[row] = -1
                self._failed[row] = reason
        wrong = self._over.get(reply.shard) or self._wrong(reply)
        if wrong is not None:
            self._refuse(reply, wrong)
            return False
        if len(reply.rows):
            rows, sent = reply.rows, reply.arrays
            sound = self._sound(reply)
            if sound is not None:
                rows, sent = rows[sound], [{name: v[sound] for name, v in arrays.items()} for arrays in sent]
            self._by[rows.numpy()] = reply.shard
            if len(rows):
                self._rows.append(rows)
                self._arrays.append(sent)
        if reply.partials:
            wrong = self._misfit(reply)
            if wrong is not None:
                self._refuse(reply, wrong)
                return False
            for place, partial in reply.partials.items():
                self._totals[place].merge(partial)
            self._over[reply.shard] = "went on after its sums"
        return True

    def _refuse(self, reply: Reply, wrong: str) -> None:
        """Use nothing more from a shard; rows that it sent before its sums stay."""
        reason, rows = type(wrong)(f"its shard {wrong}"), reply.rows.numpy()
        rows = rows[(rows >= 0) & (rows < len(self._by))]
        rows = rows[self._by[rows] < 0]
        if reply.shard not in self._over:
            self._over[reply.shard] = wrong
            rows = np.concatenate([rows, np.flatnonzero(self._by == reply.shard)])
        self._by[rows] = -1
        self._failed.update(dict.fromkeys(rows.tolist(), reason))

    def _wrong(self, reply: Reply) -> str | None:
        """What is wrong with a shard's rows, if anything."""
        rows = reply.rows.numpy()
        if not len(rows):
            return None
        if rows.view(np.uint64).max() >= len(self._by) or self._twice(rows):  # one below 0 is large there
            return "answered for clients that were not asked, or for one twice"
        failed = self._failed and any(row in self._failed for row in rows.tolist())
        if failed or np.count_nonzero(self._by[rows] >= 0):
            return "answered for clients that had answered or failed before"
        if len(reply.arrays) != len(self._releases):
            return f"answered for {len(reply.arrays)} releases, but there are {len(self._releases)}"
        for release, arrays in zip(self._releases, reply.arrays, strict=True):
            if release.visible is not None and set(arrays) != set(release.visible):
                asked = ", ".join(release.visible) or "none"
                return f"sent the arrays {', '.join(arrays) or 'none'} of each client, but was asked for {asked}"
        return None

    def _twice(self, rows: np.ndarray[Any, Any]) -> bool:
        """Is a client named twice? In the time of the rows, not of the cohort."""
        places = np.arange(len(rows))
        self._place[rows] = places
        return bool(np.count_nonzero(self._place[rows] != places))

    def _sound(self, reply: Reply) -> Tensor | None:
        """[b] whose arrays fit those of the others and are finite, None if all do; the others are failures."""
        shapes = reply.shapes()
        if self._shapes is None:
            self._shapes = [dict(one) for one in shapes]
        for known, came in zip(self._shapes, shapes, strict=True):
            known.update({name: came.get(name) for name, shape in known.items() if shape is None})
        if shapes != self._shapes:
            reason = f"sent arrays of shapes {shapes}, expected {self._shapes}"
            self._failed.update(dict.fromkeys(reply.rows.tolist(), reason))
            return torch.zeros(len(reply.rows), dtype=torch.bool)
        sound = torch.ones(len(reply.rows), dtype=torch.bool)
        for release, arrays in zip(self._releases, reply.arrays, strict=True):
            for name, value in arrays.items():
                for good, reason in self._checks(release, name, value):
                    for row in reply.rows[~good].tolist() if not bool(good.all()) else ():
                        self._failed.setdefault(row, reason)
                    sound &= good
        return None if bool(sound.all()) else sound

    def _checks(self, release: Release, name: str, value: Tensor) -> Iterator[tuple[Tensor, str]]:
        """What must hold of the rows of one array: for which it does [b], and what is wrong with the others."""
        if not value.is_floating_point():
            return
        flat = value.reshape(len(value), math.prod(value.shape[1:]))
        yield torch.isfinite(flat.sum(1)), Diverged.array(name)
        if isinstance(release, Each) and release.bounded:
            lengths = torch.linalg.vector_norm(flat.to(torch.float64), dim=1)
            limit = longest(release, 1, flat.shape[1], release.noise is not None)
            assert limit is not None, "a clip bounds it"
            yield lengths <= limit * (1 + 1e-4), f"the array {name!r} is longer than its clip and noise allow"

    def _misfit(self, reply: Reply) -> str | None:
        """What is wrong with a shard's sums, if anything."""
        if reply.partials.keys() != self._totals.keys():
            return f"sent {len(reply.partials)} sums, but {len(self._totals)} were asked for"
        answered = self._by == reply.shard
        count, rows = int(np.count_nonzero(answered)), float(self._sizes.numpy()[answered].sum())
        for place, partial in reply.partials.items():
            release = self._releases[place]
            if partial.count != count:
                return f"counts {partial.count} clients in a sum, but {count} answered"
            if release.names[1:] == (SIZE,) and partial.weight != rows:
                return f"weighs its clients by {partial.weight:g}, which is not what they declared"
            wrong = self._totals[place].refuse(partial, rows)
            if wrong is not None:
                return wrong
        return None

    def close(self) -> tuple[Tensor, dict[int, str]]:
        """The rows that answered, ascending, and a reason for each of the others."""
        for shard in np.flatnonzero(np.bincount(self._by + 1)).tolist() if self._totals else ():
            if shard > 0 and shard - 1 not in self._over:
                rows = np.flatnonzero(self._by == shard - 1)
                self._failed.update(dict.fromkeys(rows.tolist(), "its shard sent no sum"))
                self._by[rows] = -1
        answered = np.flatnonzero(self._by >= 0)
        if len(answered) + len(self._failed) < len(self._by):
            for row in np.flatnonzero(self._by < 0).tolist():
                self._failed.setdefault(row, "did not answer")
        return torch.from_numpy(answered), self._failed

    def finish(
        self, answered: Tensor, expected: float, sampling: Sampling, draws: DrawsLike, shards: int
    ) -> dict[str, Tensor]:
        """What is released: the rows that answered, and the sums with their noise."""
        released: dict[str, Tensor] = {}
        rows = torch.cat(self._rows) if self._rows else answered
        order = torch.argsort(rows)
        if len(answered) < len(rows):  # some were dropped after their rows had come
            order = order[torch.isin(rows[order], answered)]
        for place in range(len(self._releases)):
            if place in self._totals:
                released |= self._totals[place].finish(expected, sampling, draws, shards)
                continue
            parts = [arrays[place] for arrays in self._arrays]
            for name in parts[0] if parts else ():
                released[name] = torch.cat([part[name] for part in parts])[order]
        return released


@dataclass
class Meter:
    """Counts the bytes of one ask, and what its clients sent, array by array.

    expected: the cohort's size is a secret, so this many clients are counted; None: those that answered are counted.
    """

    traffic: Traffic
    releases: Sequence[Release]
    expected: int | None
    arrays: dict[tuple[int, str], tuple[tuple[int, ...], int, int]] = field(default_factory=dict)
    # by place of the release and name: shape, clients, bytes

    def count_request(self, request: Request, lacking: Mapping[str, int]) -> None:
        """``lacking``: how many clients have not had a named input before; the others get its digest."""
        clients = len(request.ids) if self.expected is None else self.expected
        for name, value in request.shared.items():
            new = lacking.get(name, clients)
            self.traffic.down[name] += value.nbytes * new + DIGEST * (clients - new)
        for name, value in request.each.items():
            self.traffic.down[name] += math.prod(value.shape[1:]) * value.element_size() * clients

    def count_reply(self, reply: Reply) -> None:
        """A client that is part of a sum sends its array to its shard, so its bytes count, too."""
        if self.expected is not None:
            return
        for place, arrays in enumerate(reply.arrays):
            for name, value in arrays.items():
                shape = tuple(value.shape[1:])
                size = self._size(place, name, math.prod(shape), value.element_size())
                self._count(place, name, shape, len(value), size * len(value))
        for place, partial in reply.partials.items():
            release, total = self.releases[place], partial.total
            width = {"float64": 8, "float16": 2, "bfloat16": 2}.get(partial.dtype, 4)
            size = self._size(place, release.names[0], total.numel(), width)
            self._count(place, release.names[0], tuple(total.shape), partial.count, size * partial.count)
            for weight in release.names[1:]:
                if weight != SIZE:
                    self._count(place, weight, (), partial.count, 4 * partial.count)

    def _size(self, place: int, name: str, numbers: int, width: int) -> int:
        """The bytes of one client's array, whose numbers have a width of so many where no release says otherwise."""
        release = self.releases[place]
        few = release.bits is not None and name == release.names[0]
        return message_bytes(numbers, release.bits) if few and release.bits is not None else numbers * width

    def _count(self, place: int, name: str, shape: tuple[int, ...], clients: int, size: int) -> None:
        self.traffic.up[name] += size
        _, before, bytes_before = self.arrays.get((place, name), (shape, 0, 0))
        self.arrays[place, name] = (shape, before + clients, bytes_before + size)

    def lines(self, released: Mapping[str, Tensor]) -> Iterator[tuple[Release, str, tuple[int, ...], int, int]]:
        """For the transcript: each array's release, name, shape, number of clients and bytes."""
        for place, release in enumerate(self.releases) if self.expected is not None else ():
            for name in release.names:
                if name in released:
                    value, clients = released[name], self.expected or 0
                    shape = tuple(value.shape if is_summed(release) else value.shape[1:])
                    size = self._size(place, name, math.prod(shape), value.element_size())
                    self._count(place, name, shape, clients, size * clients)
        for (place, name), (shape, clients, size) in self.arrays.items():
            if not getattr(self.releases[place], "secure", False):  # a secure sum writes its own line when it is opened
                yield self.releases[place], name, shape, clients, size
