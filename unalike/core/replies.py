"""The replies to an ask as they stream in: checked, added up, metered and written down."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from unalike.core.release import SIZE, Release, Rows, Total, summed
from unalike.core.request import Reply, Request
from unalike.core.shapes import Shapes
from unalike.core.task import Task
from unalike.privacy.mechanisms import DrawsLike
from unalike.privacy.sampling import Poisson

if TYPE_CHECKING:
    from unalike.core.federation import Cohort


class Gathered:
    """The replies to one ask as they stream in, checked: whoever answers nonsense is a failure, with the reason.

    A sum cannot be taken apart again, so a shard's sums are taken together, once, when all that it said fits.
    """

    def __init__(
        self, cohort: Cohort, request: Request, releases: Sequence[Release], shapes: Sequence[Shapes] | None
    ) -> None:
        self._cohort, self._request, self._releases = cohort, request, releases
        self._shown = [Rows() for _ in releases]
        noised = cohort.federation.terms().at_shard
        self._totals = {place: Total(release, noised) for place, release in enumerate(releases) if summed(release)}
        self._shapes: list[Shapes] | None = None  # of what each client sends: by a dry run, or by the first who did
        if shapes is not None:
            named = zip(releases, shapes, strict=True)
            self._shapes = [
                {name: known[name] for name in (known if one.shown is None else one.shown)} for one, known in named
            ]
            for place, total in self._totals.items():
                total.shape = shapes[place][total.name]
        self._by = np.full(len(cohort), -1)  # [C] the shard in which each client answered
        self._place = np.empty(len(cohort), dtype=np.int64)  # [C] where in the latest reply that has it
        self._failed: dict[int, str] = {}
        self._over: dict[int, str] = {}  # shards that have said all, or nonsense; and what is wrong with what follows

    def would_be(self, sent: Mapping[str, Tensor]) -> None:
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
            for shown, arrays in zip(self._shown, sent, strict=True):
                if arrays and len(rows):
                    shown.add(rows, arrays)
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
        """Use nothing that a shard says; what it said in time stays."""
        reason, rows = f"its shard {wrong}", reply.rows.numpy()
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
            if release.shown is not None and set(arrays) != set(release.shown):
                asked = ", ".join(release.shown) or "none"
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
        sound: Tensor | None = None
        for arrays in reply.arrays:
            for name, value in arrays.items():
                finite = torch.isfinite(value.reshape(len(value), -1).sum(1)) if value.is_floating_point() else None
                if finite is not None and not bool(finite.all()):
                    for row in reply.rows[~finite].tolist():
                        self._failed.setdefault(row, f"the array {name!r} is not finite (NaN or infinite)")
                    sound = finite if sound is None else sound & finite
        return sound

    def _misfit(self, reply: Reply) -> str | None:
        """What is wrong with a shard's sums, if anything."""
        if reply.partials.keys() != self._totals.keys():
            return f"sent {len(reply.partials)} sums, but {len(self._totals)} were asked for"
        answered = self._by == reply.shard
        count = int(np.count_nonzero(answered))
        for place, partial in reply.partials.items():
            release = self._releases[place]
            if partial.count != count:
                return f"counts {partial.count} clients in a sum, but {count} answered"
            if release.names[1:] == (SIZE,) and partial.weight != self._cohort.sizes.numpy()[answered].sum():
                return f"weighs its clients by {partial.weight:g}, which is not what they declared"
            wrong = self._totals[place].refuse(partial)
            if wrong is not None:
                return wrong
        return None

    def close(self) -> tuple[Tensor, dict[int, str]]:
        """The rows of those who answered, ascending, and why the others did not."""
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

    def finish(self, answered: Tensor, draws: DrawsLike) -> dict[str, Tensor]:
        released: dict[str, Tensor] = {}
        for place, shown in enumerate(self._shown):
            total = self._totals.get(place)
            if total is None:
                released |= shown.finish(answered)
            else:
                shards = getattr(self._cohort.federation.runtime, "shards", 1)  # one, unless the runtime has more
                parts = shards if isinstance(shards, int) else len(shards)
                released |= total.finish(self._cohort.expected, self._cohort.sampling, draws, parts)
        return released


class Record:
    """Meters bytes and writes the transcript while replies stream in.

    private: who was drawn protects, so what is written says how many were to be expected, whoever came.
    """

    def __init__(self, cohort: Cohort, request: Request, private: bool) -> None:
        self.cohort, self.private = cohort, private and isinstance(cohort.sampling, Poisson)
        self.arrays: dict[tuple[int, str], tuple[tuple[int, ...], int, int]] = {}  # shape, clients, bytes
        down, count = cohort.federation.traffic.down, len(request.ids)
        clients = round(cohort.expected) if self.private else count
        for name, value in request.shared.items():
            down[name] += value.nbytes * clients
        for name, value in request.each.items():
            down[name] += math.prod(value.shape[1:]) * value.element_size() * clients

    def add(self, releases: Sequence[Release], reply: Reply) -> None:
        """A client that is only part of a sum still sends its array: to its shard, which is as near as it wants."""
        if self.private:
            return
        for place, arrays in enumerate(reply.arrays):
            for name, value in arrays.items():
                self._count(place, name, tuple(value.shape[1:]), len(value), value.nbytes)
        for place, partial in reply.partials.items():
            release, total = releases[place], partial.total
            each = total.numel() * (8 if partial.dtype == "float64" else 4)
            self._count(place, release.names[0], tuple(total.shape), partial.count, each * partial.count)
            for weight in release.names[1:]:
                if weight != SIZE:
                    self._count(place, weight, (), partial.count, 4 * partial.count)

    def _count(self, place: int, name: str, shape: tuple[int, ...], clients: int, size: int) -> None:
        self.cohort.federation.traffic.up[name] += size
        _, before, bytes_before = self.arrays.get((place, name), (shape, 0, 0))
        self.arrays[place, name] = (shape, before + clients, bytes_before + size)

    def close(self, task: Task, releases: Sequence[Release], released: Mapping[str, Tensor]) -> None:
        if self.private:
            clients = round(self.cohort.expected)
            for place, release in enumerate(releases):
                for name in release.names:
                    if name in released:
                        value = released[name]
                        shape = tuple(value.shape if summed(release) else value.shape[1:])
                        self._count(place, name, shape, clients, math.prod(shape) * value.element_size() * clients)
        for (place, name), (shape, clients, size) in self.arrays.items():
            if not getattr(releases[place], "secure", False):  # a secure sum writes its own line when it is opened
                self.cohort.write(task, releases[place], name, shape, clients, size)
