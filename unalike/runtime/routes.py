"""Routes: which shard each client lives in, and who drops out on the way; the same for every runtime."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from unalike.core.draws import Draws, key
from unalike.core.request import Reply, Request
from unalike.core.roster import Roster

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
        self.roster = rosters[0] if len(rosters) == 1 else Roster.joined(rosters)
        self._home = torch.zeros(0, dtype=torch.int64)  # [clients] the shard of each, in the order of sorted ids
        if len(rosters) > 1:
            owner = torch.cat([torch.full((len(roster),), i) for i, roster in enumerate(rosters)])
            self._home = owner[torch.argsort(torch.cat([roster.ids for roster in rosters]))]
        self._numbered = torch.equal(self.roster.ids, torch.arange(len(self.roster)))  # an id is a position

    def deliver(self, request: Request, answers: Answers) -> Iterator[Reply]:
        """All that is said to a request, shard after shard.

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
        for number, mine, said in asked:
            for reply in said:
                moved = reply if len(mine) == len(request.ids) else reply.at(mine)
                yield moved if number == 0 else replace(moved, shard=number)

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
