"""The runtime that everybody uses first: one shard, or several, in this process."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from unalike.core.request import Program, Reply, Request
from unalike.core.schema import Schema
from unalike.runtime.routes import Drop, Routes
from unalike.runtime.shard.shard import Shard


class Simulation:
    """Shards in this process. Its program is open: an ask teaches it the task that it is about.

    strict: pass every request and reply through the wire codec, as on a network.
    drop: who fails to answer; see ``Routes``.
    """

    def __init__(self, shards: Sequence[Shard], program: Program, *, strict: bool = False, drop: Drop = 0.0) -> None:
        self.shards, self.program, self.strict = shards, program, strict
        self._routes = Routes([shard.roster for shard in shards], drop)
        self.roster = self._routes.roster

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
        homes = list(self._routes.homes(ids))
        found = [self.shards[number].look(run, handle, ids[mine]) for number, mine in homes]
        order = torch.cat([mine for _, mine in homes])
        return torch.cat(found)[torch.argsort(order)]

    def forget(self, run: str, prefix: str = "") -> None:
        for shard in self.shards:
            shard.forget(run, prefix)
