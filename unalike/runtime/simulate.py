"""The runtime that everybody uses first: one shard, or several, in this process."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from unalike.core.draws import Draws, key
from unalike.core.request import Program, Reply, Request
from unalike.core.roster import Roster
from unalike.core.schema import Schema
from unalike.runtime.shard.shard import Shard

Drop = float | Callable[[int, Draws], bool]


class Simulation:
    """Shards in this process. Its program is open: an ask teaches it the task that it is about.

    strict: pass every request and reply through the wire codec, as on a network.
    drop: fraction of clients that fail to answer, or a function (client id, draws) -> bool; to rehearse failures. Asks
        that only measure reach everybody.
    """

    def __init__(self, shards: Sequence[Shard], program: Program, *, strict: bool = False, drop: Drop = 0.0) -> None:
        if isinstance(drop, float | int) and not 0 <= drop <= 1:
            raise ValueError(f"drop={drop}; expected a fraction from 0 to 1")
        self.shards, self.program, self.strict, self.drop = shards, program, strict, drop
        self.roster = shards[0].roster if len(shards) == 1 else Roster.joined([shard.roster for shard in shards])
        self._home = torch.zeros(0, dtype=torch.int64)  # [clients] the shard of each, in the order of sorted ids
        if len(shards) > 1:
            owner = torch.cat([torch.full((len(shard.roster),), i) for i, shard in enumerate(shards)])
            self._home = owner[torch.argsort(torch.cat([shard.roster.ids for shard in shards]))]

    def deliver(self, request: Request) -> Iterator[Reply]:
        rows = torch.arange(len(request.ids))
        if self.drop and request.purpose != "measure":
            gone = self._dropped(request)
            if bool(gone.any()):
                why = "did not answer (simulated drop-out)"
                yield Reply(rows[:0], (), dict.fromkeys(rows[gone].tolist(), why))
                rows = rows[~gone]
        for number, shard, own in self._homes(request.ids[rows]):
            mine = rows[own]
            part = request if len(mine) == len(request.ids) else request.only(mine)
            if self.strict:
                part = Request.decode(part.encode())
            for reply in shard.answer(part):
                told = Reply.decode(reply.encode()) if self.strict else reply
                moved = told if len(mine) == len(request.ids) else told.at(mine)
                yield moved if number == 0 else Reply(moved.rows, moved.arrays, moved.failed, moved.partials, number)

    def _homes(self, ids: Tensor) -> Iterator[tuple[int, Shard, Tensor]]:
        """The shards where some of these clients live, and the positions of those."""
        if len(self.shards) == 1:
            if len(ids):
                yield 0, self.shards[0], torch.arange(len(ids))
            return
        place = torch.searchsorted(self.roster.ids, ids).clamp(max=len(self.roster) - 1)
        if not torch.equal(self.roster.ids[place], ids):
            raise ValueError("a request names a client that no shard has")
        home = self._home[place]
        for number, shard in enumerate(self.shards):
            mine = (home == number).nonzero().flatten()
            if len(mine):
                yield number, shard, mine

    def _dropped(self, request: Request) -> Tensor:
        """[C] who fails to answer; a client's draw is its own, so that it does not depend on the others."""
        keys = key(request.key, -2, request.ids)
        if callable(self.drop):
            draws = Draws(key(request.key, -2))
            return torch.tensor([bool(self.drop(int(client), draws)) for client in request.ids], dtype=torch.bool)
        return ((keys >> 11) & ((1 << 53) - 1)).to(torch.float64) * 2.0**-53 < self.drop

    def plans(self) -> dict[str, Any]:
        """The blocks and threads that were measured: a run that resumes goes on with the same ones."""
        return self.shards[0].simulator.plans()

    def use_plans(self, plans: Mapping[str, Any]) -> None:
        self.shards[0].simulator.use_plans(plans)

    def kept(self, run: str) -> dict[str, Tensor]:
        """What the clients keep for a run, to save where they live: beside the server's own state, never in it."""
        states = [shard.kept(run).state() for shard in self.shards]
        names = sorted({name for state in states for name in state})
        return {name: torch.cat([state[name] for state in states if name in state]) for name in names}

    def restore(self, run: str, kept: Mapping[str, Tensor]) -> None:
        """The clients keep what ``kept`` says, again."""
        for shard in self.shards:
            own: dict[str, Tensor] = {}
            for name in {one.rsplit(".", 1)[0] for one in kept}:
                mine = torch.isin(kept[f"{name}.ids"], shard.roster.ids)
                own |= {f"{name}.{what}": kept[f"{name}.{what}"][mine] for what in ("ids", "values")}
            shard.restore(run, own)

    def use(self, schema: Schema) -> None:
        for shard in self.shards:
            shard.use(schema)
        self.roster = replace(self.roster, schema=schema)

    def look(self, run: str, handle: str, ids: Tensor) -> Tensor:
        """What clients hold under a handle: a view that only a simulation has, and a client of its own array."""
        found = [shard.look(run, handle, ids[mine]) for _, shard, mine in self._homes(ids)]
        order = torch.cat([mine for _, _, mine in self._homes(ids)])
        return torch.cat(found)[torch.argsort(order)]

    def forget(self, run: str, prefix: str = "") -> None:
        for shard in self.shards:
            shard.forget(run, prefix)
