"""Shards in this process, the runtime that everybody uses first, and the routes to shards that all runtimes share."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from unalike.core import wire
from unalike.core.draws import Draws, key
from unalike.core.request import Program, Reply, Request
from unalike.core.roster import Roster
from unalike.core.schema import Schema
from unalike.runtime.shard.shard import Shard

Drop = float | Callable[[int, Draws], bool]
Answers = Callable[[int, Request], Iterator[Reply]]  # (shard, its part of a request): what its clients say


class Routes:
    """Brings each shard its part of a request.

    drop: fraction of clients that fail to answer, or a function (client id, draws) -> bool; to rehearse failures. Asks
        that only measure reach everybody.
    """

    def __init__(self, rosters: Sequence[Roster], drop: Drop = 0.0) -> None:
        if isinstance(drop, float | int) and not 0 <= drop <= 1:
            raise ValueError(f"drop={drop}; expected a fraction from 0 to 1")
        self.shards, self.drop = len(rosters), drop
        self.roster = rosters[0] if len(rosters) == 1 else Roster.join(rosters)
        self._home = torch.zeros(0, dtype=torch.int64)  # [clients] the shard of each, in the order of sorted ids
        if len(rosters) > 1:
            owner = torch.cat([torch.full((len(roster),), i) for i, roster in enumerate(rosters)])
            self._home = owner[torch.argsort(torch.cat([roster.ids for roster in rosters]))]
        self._numbered = torch.equal(self.roster.ids, torch.arange(len(self.roster)))  # an id is a position

    def deliver(self, request: Request, answers: Answers) -> Iterator[Reply]:
        """All replies to a request, shard after shard.

        Every shard has its part before the first is listened to. They are listened to in their order, whichever is
        ready first: sums are merged as replies come, so that a repeated run has the same bits.
        """
        if self.shards == 1 and not self.drop:
            yield from answers(0, request) if len(request.ids) else ()
            return
        rows = torch.arange(len(request.ids))
        if self.drop and request.purpose != "measure":
            gone = self._dropped(request)
            if bool(gone.any()):
                why = "did not answer (simulated drop-out)"
                yield request.reply(failed=dict.fromkeys(rows[gone].tolist(), why))
                rows = rows[~gone]
        asked = []
        for number, own in self.homes(request.ids[rows]):
            mine = rows[own]
            part = request if len(mine) == len(request.ids) else request.only(mine)
            asked.append((number, mine, answers(number, part)))
        for number, mine, replies in asked:
            for reply in replies:
                try:
                    placed = reply.at(mine)
                except wire.WireError as error:  # one bad shard costs its own clients and nobody else's
                    failed = dict.fromkeys(mine.tolist(), f"its shard sent nonsense: {error}")
                    yield replace(request.reply(failed=failed), shard=number)
                    break
                yield placed if number == 0 else replace(placed, shard=number)

    def homes(self, ids: Tensor) -> Iterator[tuple[int, Tensor]]:
        """The shards where some of these clients live, and the positions of those."""
        if self.shards == 1:
            if len(ids):
                yield 0, torch.arange(len(ids))
            return
        place = (ids if self._numbered else torch.searchsorted(self.roster.ids, ids)).clamp(0, len(self.roster) - 1)
        if not torch.equal(self.roster.ids[place], ids):
            raise ValueError(f"client {int(ids[self.roster.ids[place] != ids][0])} lives in no shard")
        home = self._home[place]
        for number in range(self.shards):
            mine = (home == number).nonzero().flatten()
            if len(mine):
                yield number, mine

    def _dropped(self, request: Request) -> Tensor:
        """[C] who fails to answer; a client's draw is its own, so that it does not depend on the others."""
        keys = key(request.key, -2, request.ids)
        if callable(self.drop):
            draws = Draws(key(request.key, -2))
            return torch.tensor([bool(self.drop(int(client), draws)) for client in request.ids], dtype=torch.bool)
        return ((keys >> 11) & ((1 << 53) - 1)).to(torch.float64) * 2.0**-53 < self.drop


class Simulation:
    """Shards in this process. Its program is open: an ask teaches it the task that it is about.

    strict: pass every request and reply through the wire codec, as on a network.
    drop: who fails to answer; see ``Routes``.
    """

    def __init__(self, shards: Sequence[Shard], program: Program, *, strict: bool = False, drop: Drop = 0.0) -> None:
        self.shards, self.program, self.strict = shards, program, strict
        self._routes = Routes([shard.roster for shard in shards], drop)
        self.roster = self._routes.roster

    @property
    def shard_count(self) -> int:
        return len(self.shards)

    def deliver(self, request: Request) -> Iterator[Reply]:
        return self._routes.deliver(request, self._answers)

    def _answers(self, number: int, part: Request) -> Iterator[Reply]:
        shard = self.shards[number]
        if not self.strict:
            return shard.answer(part)
        return (Reply.decode(reply.encode()) for reply in shard.answer(Request.decode(part.encode())))

    def plans(self) -> dict[str, Any]:
        """The blocks and threads that were measured: a run that resumes goes on with the same ones."""
        return self.shards[0].simulator.plans()

    def use_plans(self, plans: Mapping[str, Any]) -> None:
        self.shards[0].simulator.use_plans(plans)

    def expect(self, number: int, left: int) -> None:
        """Round ``number`` begins, and ``left`` more will follow; no result depends on it."""
        for shard in self.shards:
            shard.simulator.expect(number, left)

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
        """What clients hold under a handle; only a simulation can see it."""
        homes = list(self._routes.homes(ids))
        found = [self.shards[number].look(run, handle, ids[mine]) for number, mine in homes]
        order = torch.cat([mine for _, mine in homes])
        return torch.cat(found)[torch.argsort(order)]

    def forget(self, run: str, prefix: str = "") -> None:
        for shard in self.shards:
            shard.forget(run, prefix)
