"""The run's side of a network: which nodes take part, what is known of their clients together, and their runtime."""

from __future__ import annotations

import hashlib
import json
import secrets
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from unalike.analytics.estimation.samples import Samples
from unalike.analytics.kmeans.points import Points
from unalike.analytics.mdm.study import Histograms
from unalike.core import wire
from unalike.core.client import Clients
from unalike.core.federation import Federation
from unalike.core.release import Noise, Terms
from unalike.data import load
from unalike.data.build import set_apart, usual_unseen
from unalike.data.schema_file import read_schema
from unalike.data.source import Names
from unalike.deploy import plain
from unalike.deploy.program import TaughtProgram, program_of_run
from unalike.deploy.site import GIVEN, READS, Given
from unalike.runs.absent import Absent
from unalike.runs.errors import UserError
from unalike.runs.prepare import Prepared
from unalike.runs.recipe.recipe import Recipe, Runtime
from unalike.runs.simulate import federate
from unalike.runs.words import listed
from unalike.runtime.network.reach import Nodes, ask_hub
from unalike.runtime.shard.host import Failed
from unalike.runtime.shard.shard import Refused
from unalike.runtime.workers import Unreachable, WorkerError, WorkerRuntime, Workers, settled

START = 60.0  # seconds to wait for nodes when a run begins
KINDS = (Absent, Clients)  # what nodes say
BACK = 120.0  # seconds to wait for a node that is lost, where no deadline is given
_WORTH = 2.0  # seconds that a later ask waits for a node that had gone


class Sites:
    """The nodes of a network, for the runs of one command."""

    def __init__(self, how: Runtime) -> None:
        self._how = how
        self._given: Given | None = None  # of an analysis
        self._folder = Path(how.network or "").expanduser().resolve()
        self._workers: Workers | None = None
        self._names: list[str] = []
        self._facts = b""

    def close(self) -> None:
        if self._workers is not None:
            self._workers.close()

    def load(self, recipe: Recipe, key: bytes) -> Absent:
        """Have every node read its rows by the recipe; what is known of all clients together."""
        workers = self._reach(recipe.runtime)
        schema, file = None, recipe.data.schema_
        if file is not None:
            schema, known = Path(file).expanduser().read_text(encoding="utf-8"), read_schema(Path(file).expanduser())
            if (
                recipe.privacy.promises
                and recipe.data.normalize is True
                and known.kind == "features"
                and known.shift is None
            ):
                raise UserError(f"{file} still has its note: put public numbers in center and deviation, and remove it")
        told = {
            "run": hashlib.sha256(key).hexdigest()[:32],
            "recipe": {
                **recipe.model_dump(mode="json", exclude_none=True, exclude={"runtime"}),
                "runtime": {"block": recipe.runtime.block},
            },
            "schema": schema,
        }
        try:
            found = workers.tell("load", [(json.dumps(told).encode(),)] * len(workers))
            parts = [plain.decode(one, KINDS) for one in found]
            population = join(parts, self._names, recipe)
        except (Refused, Failed, WorkerError, wire.WireError) as error:
            raise UserError(f"a site cannot take part: {error}") from error
        self._facts = plain.encode(population)
        return replace(population, key=key)

    def _reach(self, how: Runtime) -> Workers:
        """The nodes that a run begins with, or goes on with; all must have this process's code."""
        names = _wait_for(self._folder, how)
        if self._workers is None or names != self._names:
            self.close()
            patience = BACK if how.deadline is None else how.deadline
            self._workers, self._names = Workers(Nodes(self._folder, names), patience, _WORTH), names
        try:
            self._workers.check()
        except (WorkerError, Unreachable, TimeoutError) as error:
            raise UserError(str(error)) from error
        return self._workers

    def federation(self, prepared: Prepared, out: Path | None, **fields: Any) -> Federation:
        """The training clients of a run, at their sites, ready to be asked."""
        recipe, population = prepared.recipe, prepared.population
        assert self._workers is not None
        try:
            how = {"drop": recipe.runtime.drop, "deadline": recipe.runtime.deadline, "lost": recipe.runtime.lost}
            data = [self._facts] * len(self._workers)
            runtime = settled(self._workers, data, program_of_run(prepared), **how)
        except (Refused, Failed, WorkerError, wire.WireError) as error:
            raise UserError(f"a site cannot take part: {error}") from error
        if not torch.equal(runtime.roster.bound, population.train.size):
            raise UserError("a node settled with other clients than it had told of")
        return federate(runtime, population, recipe.seed, quorum=recipe.runtime.quorum, **fields)

    # Analyses

    def read(self, what: str, how: dict[str, Any], noise: Noise) -> Given:
        """Have every node read its rows; what is known of all clients together, with the server's own data."""
        for name in ("counts", "clients", "partition", "server_points", "standardize"):
            if how.pop(name, None):
                raise UserError(f"{name}: at sites each reads its own rows, and no others are made or taken of them")
        server, without = how.pop("server", None), how.pop("none", False)
        if what == "points" and server is None and not without:
            raise UserError("at sites there is no server data: give some with --server FILE, or do without (--ground)")
        told = {name: value for name, value in how.items() if value is not None and name != "data"}
        method = next(name for name, read in READS.items() if read == what)
        asked = {"run": secrets.token_hex(16), "analysis": {"method": method, "how": told, "noise": noise}}
        try:
            workers = self._reach(self._how)
            found = workers.tell("load", [(json.dumps(asked).encode(),)] * len(workers))
            self._given = join_given([plain.decode(one, GIVEN) for one in found], self._names)
        except (Refused, Failed, WorkerError, wire.WireError) as error:
            raise UserError(f"a site cannot take part: {error}") from error
        if isinstance(self._given, Points) and server is not None:
            layout = {name: value for name, value in told.items() if name not in ("seed", "ranges")}
            rows = load(server, partition="iid", clients=1, test=0, unseen=0, normalize=False, **layout).train.x
            return replace(self._given, server=rows.to(torch.float32))
        return self._given

    def settle_analysis(self, sizes: Tensor, noise: Noise, block: int | None) -> WorkerRuntime:
        assert self._workers is not None and self._given is not None
        data = [plain.encode([self._given, block, noise])] * len(self._workers)
        try:
            program = TaughtProgram(self._teach, Terms(noise))
            return settled(self._workers, data, program, deadline=self._how.deadline)
        except (Refused, Failed, WorkerError, wire.WireError) as error:
            raise UserError(f"a site cannot take part: {error}") from error

    def _teach(self, algorithms: bytes) -> Sequence[bytes]:
        assert self._workers is not None
        return self._workers.tell("learn", [(algorithms,)] * len(self._workers))


def _wait_for(folder: Path, how: Runtime) -> list[str]:
    """The names of the nodes that take part, once they are all there."""
    until = time.monotonic() + START
    while True:
        try:
            here = sorted(ask_hub(folder, do="status")["nodes"])
        except Unreachable as error:
            raise UserError(str(error)) from error
        missing = [name for name in how.nodes or () if name not in here]
        enough = len(here) >= (how.workers or 1)
        if not missing and enough:
            return sorted(how.nodes) if how.nodes is not None else here
        if time.monotonic() > until:
            wanted = f"{listed(missing)} did not come" if missing else f"{how.workers or 1} were wanted"
            raise UserError(f"{len(here)} nodes are connected; {wanted} within {START:g} s (unalike network status)")
        time.sleep(0.2)


def join(parts: Sequence[Absent], names: Sequence[str], recipe: Recipe) -> Absent:
    """What is known of all sites' clients, in the order of the sites. Who arrives later is drawn from the seed."""
    first = parts[0]
    for part, name in zip(parts, names, strict=True):
        _check(part, name)
        if part.schema != first.schema:
            raise UserError(
                f"the rows of {name} are not as those of {names[0]}: give all the same schema (--set data.schema=FILE)."
                f" {names[0]} has {first.schema.to_json()[:300]}, {name} has {part.schema.to_json()[:300]}"
            )
    called = [part.train.name(position) for part in parts for position in range(len(part))]
    train, validation, test = (_joined([part.parts[which] for part in parts], called) for which in first.parts)
    data, seed = recipe.data, recipe.seed if recipe.data.seed is None else recipe.data.seed
    away = usual_unseen(len(called)) if data.unseen is None else data.unseen
    seen, unseen, may_use = set_apart(train.labeled.numpy(), away, data.labeled, seed)
    labeled = torch.from_numpy(may_use)
    sizes = {"clients": len(called), "rows": int((train.size + validation.size + test.size).sum())}
    known = {"names": ", ".join(names), "sizes": json.dumps(train.size.tolist()), "inputs": "", "labels": ""}
    unmeasured = [name for part, name in zip(parts, names, strict=True) if not bool((part.test.size > 0).any())]
    note = f"no scores from {listed(unmeasured)}: {'its' if len(unmeasured) == 1 else 'their'} policy does not list "
    return replace(
        first,
        notes=[f'{note}the purpose "measure", or there are no test rows'] if unmeasured else [],
        train=replace(train, labeled=labeled),
        validation=replace(validation, labeled=labeled),
        test=test,
        seen=torch.from_numpy(seen),
        unseen=torch.from_numpy(unseen),
        pooled=sorted({one for part in parts for one in part.pooled}),
        fingerprint={**sizes, **known},
        nodes=tuple(names),
    )


def join_given(parts: Sequence[Given], names: Sequence[str]) -> Given:
    """What is known of all sites' clients, in the order of the sites."""
    first, alike = parts[0], set()
    for part, name in zip(parts, names, strict=True):
        if not isinstance(part, Given):
            raise UserError(f"{name} told nothing of its clients")
        _check_clients(part.clients, len(part.clients), name)
        nobody = part.clients.select(torch.zeros(0, dtype=torch.int64))
        rest: dict[str, Any] = {"most": 0} if isinstance(part, Histograms) else {}
        rest |= {"held_out": None} if isinstance(part, Samples) else {}
        alike.add(plain.encode(replace(part, clients=replace(nobody, names=None), **rest)))
    if len(alike) > 1:
        raise UserError("the rows of the sites have other columns or classes from one another: name them by --features")
    called = [part.clients.name(position) for part in parts for position in range(len(part.clients))]
    clients = _joined([part.clients for part in parts], called)
    if isinstance(first, Histograms):
        return replace(first, clients=clients, most=max(one.most for one in parts if isinstance(one, Histograms)))
    if isinstance(first, Samples):
        held = [one.held_out for one in parts if isinstance(one, Samples) and one.held_out is not None]
        return replace(first, clients=clients, held_out=_joined(held, called) if len(held) == len(parts) else None)
    return replace(first, clients=clients)


def _check(part: object, name: str) -> None:
    """Refuse what no honest node says."""
    if not isinstance(part, Absent) or not all(isinstance(one, Clients) for one in part.parts.values()):
        raise UserError(f"{name} told nothing of its clients")
    count = len(part.train.size)
    for one in part.parts.values():
        _check_clients(one, count, name)


def _check_clients(one: Clients, count: int, name: str) -> None:
    whole: list[Tensor] = [one.size, one.ids, one.start]
    if any(value.dtype != torch.int64 or value.shape != (count,) for value in whole) or count == 0:
        raise UserError(f"{name} told of its clients in arrays of different lengths")
    if one.labeled.dtype != torch.bool or one.labeled.shape != (count,) or bool((one.size < 0).any()) or len(one.x):
        raise UserError(f"{name} told of its clients what cannot be")
    given = [one.name(position) for position in range(count)]
    if any(client != name and not client.startswith(f"{name}/") for client in given) or len(set(given)) < count:
        raise UserError(f"{name} told of clients that are not its own")


def _joined(parts: Sequence[Clients], names: Sequence[str]) -> Clients:
    sizes = torch.cat([part.size for part in parts])
    return replace(
        parts[0],
        size=sizes,
        start=torch.zeros_like(sizes),
        labeled=torch.cat([part.labeled for part in parts]),
        ids=torch.arange(len(sizes)),
        names=Names(np.array(names, dtype=str)),
    )
