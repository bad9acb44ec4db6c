"""A node's host: all that a run may ask of a site, by name, and what the site makes of it.

The site fixes its data, its folders and its program from its own installation and its own files. Requests are checked
against its policy before anything runs, and charged in its ledger before anything leaves. What goes wrong is answered
with a sentence that holds nothing of the rows, no path and no traceback; the reason is in the site's own log.
"""

from __future__ import annotations

import errno
import hashlib
import hmac
import json
import math
import os
import re
import secrets
import time
import tomllib
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from pydantic import ValidationError
from torch import Tensor

from unalike.core import wire
from unalike.core.client import Clients
from unalike.core.disk import write_whole
from unalike.core.failure import SITE, Diverged
from unalike.core.notes import printable
from unalike.core.release import Each, Noise, Release, Stays, Terms
from unalike.core.request import Program, Reply, Request
from unalike.core.roster import Roster
from unalike.core.schema import Schema
from unalike.data import DataError
from unalike.data.population import Population
from unalike.deploy import plain
from unalike.deploy.node.analysis import TAUGHT, public, read_own
from unalike.deploy.node.analysis import told as told_of
from unalike.deploy.node.ledger import SiteLedger
from unalike.deploy.node.policy import Analysis, Forbidden, Policy, check_approved
from unalike.deploy.program import READING, program_of_analysis, program_of_run
from unalike.deploy.site import GIVEN, Given, parts_of
from unalike.privacy.account import BARE
from unalike.privacy.dpsgd import LocalCost
from unalike.privacy.ledger import Charge
from unalike.runs import fingerprint
from unalike.runs.absent import Absent
from unalike.runs.errors import UserError
from unalike.runs.load import load_data
from unalike.runs.prepare import Prepared, check_public, prepare
from unalike.runs.privacy import noise_of
from unalike.runs.recipe.recipe import Recipe, Runtime, to_recipe
from unalike.runtime.shard.host import FULL, NO_MEMORY, NotReady, version
from unalike.runtime.shard.journal import Journal, pack
from unalike.runtime.shard.shard import Refused, Shard
from unalike.runtime.shard.simulator import Simulator

SETTINGS, RUNS, SCHEMA, SENT = "node.toml", "runs", "schema.json", "sent"
CALLS = ("version", "load", "settle", "answer", "learn", "use", "forget", "commit", "rollback", "plans")
KINDS = (Absent, Clients)  # what is told about clients, by either side
_RUN = re.compile(r"[0-9a-f]{32}")
LARGEST = 1e9  # number in an input
_MOST_TEXT = 1 << 20  # characters of a recipe or a schema


@dataclass(frozen=True)
class Site:
    """A site's own settings, and its ledger."""

    folder: Path
    name: str
    network: str
    data: Path
    ledger: SiteLedger
    tell: Callable[[str], None]
    news: dict[str, Any] = field(default_factory=dict)  # for the hub's status: what it is doing, what it refused

    @classmethod
    def open(cls, folder: Path, name: str, network: str, tell: Callable[[str], None]) -> Site:
        return cls(folder, name, network, data_of(folder), SiteLedger(folder), tell)


def data_of(folder: Path) -> Path:
    """The file or folder that holds the rows of a site's clients."""
    file = folder / SETTINGS
    try:
        found = Path(str(tomllib.loads(file.read_text(encoding="utf-8"))["data"])).expanduser()
    except (OSError, KeyError, ValueError) as error:
        raise UserError(f'{file}: expected a line such as data = "rows.csv" ({error})') from error
    found = folder / found  # an absolute path stays what it is
    if not found.exists():
        raise UserError(f"{file}: there is no file or folder {found}")
    return found


def local_recipe(recipe: Recipe, data: Path, schema: Path | None) -> Recipe:
    """The recipe over a site's own rows. Who arrives later, and whose labels are hidden, is decided for all sites."""
    own = recipe.data.model_copy(
        update={"name": str(data), "schema_": None if schema is None else str(schema), "unseen": 0, "labeled": 1.0}
    )
    return recipe.model_copy(update={"data": own, "runtime": Runtime(block=recipe.runtime.block)})


def facts(population: Population, name: str, policy: Policy) -> Absent:
    """What the server is told of a site's clients: how many there are, about how large, and who has labels."""
    parts: dict[str, Any] = {}
    for which, part in population.parts.items():
        parts[which] = public(part, name, policy)
        if which != "train" and "measure" not in policy.purposes:  # then nobody need know of test rows
            parts[which] = replace(parts[which], size=torch.zeros_like(part.size)).without_labels()
    return Absent(
        name="network",
        kind=population.kind,
        **parts,
        seen=population.seen,
        unseen=population.unseen,
        classes=population.classes,
        class_names=population.class_names,
        columns=population.columns,
        partition=population.partition,
        scaling=population.scaling,
        fill=population.fill,
        pooled=population.pooled,
        network=population.network,
        nodes=(name,),
    )


class NodeHost:
    """What one channel of a run has set up at a site; ``call`` is the one way in, and never raises."""

    def __init__(self, site: Site) -> None:
        self._site = site
        self._run, self._policy, self._begun = "", Policy(), 0.0
        self._recipe: Recipe | None = None
        self._population: Population | None = None
        self._analysis: tuple[Analysis, Given] | None = None
        self._journal: Journal | None = None

    def call(self, what: str, *data: bytes) -> bytes:
        """Do what is named; the first byte of the answer is its status: see ``runtime.shard.host.result``."""
        try:
            if what not in CALLS:
                raise Refused(f"a node does not know {what[:40]!r}; it knows {', '.join(CALLS)}")
            answer: bytes | None = getattr(self, f"_{what}")(*data)
            return b"+" + (answer or b"")
        except NotReady:
            return b"?"
        except wire.Lacking as error:
            return b"A" + json.dumps(error.digests).encode()
        except Forbidden as error:
            self._note(error)
            return b"-" + str(error).encode()
        except (Refused, wire.WireError) as error:
            return b"-" + str(error).encode()
        except (UserError, DataError) as error:
            return self._failed("this site cannot do what the recipe asks of its data", error, b"-")
        except OSError as error:
            if error.errno in FULL:
                self._site.tell(f"no space: {error}")
                return b"D" + json.dumps([errno.ENOSPC, f"the folder of node {self._site.name}"]).encode()
            return self._failed("it could not read or write a file", error)
        except MemoryError as error:
            return self._failed("", error, b"M")
        except Exception as error:
            return self._failed("it failed", error, b"M" if NO_MEMORY in str(error) else b"!")

    def _failed(self, sentence: str, error: Exception, letter: bytes = b"!") -> bytes:
        """Tell the reason here, and to the server a sentence without it."""
        expected = isinstance(error, UserError | DataError)
        self._site.tell(f"{sentence}: {error}" if expected else f"{sentence}:\n{traceback.format_exc()}")
        return letter + f"{sentence}; the reason is in the node's own log".encode()

    def _note(self, refusal: Forbidden) -> None:
        why = printable(str(refusal))  # a server's words may be in it
        self._site.tell(f"refused: {why}")
        self._site.news["refused"] = [*self._site.news.get("refused", ()), why][-5:]
        self._site.ledger.refuse(self._run, refusal.rule, why)

    @property
    def journal(self) -> Journal:
        if self._journal is None:
            raise NotReady
        return self._journal

    def _version(self) -> bytes:
        return json.dumps({"version": version()}).encode()

    # Setting up

    def _load(self, settings: bytes) -> bytes:
        """Read this site's rows as a recipe says, if the policy allows it; what the server may know of them."""
        told = json.loads(settings[:_MOST_TEXT])
        if not (isinstance(told, dict) and isinstance(told.get("recipe", told.get("analysis")), dict)):
            raise Refused("a run is loaded with its recipe, or as an analysis")
        run, schema = str(told.get("run")), told.get("schema")
        if not _RUN.fullmatch(run) or not (schema is None or isinstance(schema, str)):
            raise Refused("a run is named by 32 hexadecimal digits, and a schema is text")
        self._journal = self._recipe = self._population = self._analysis = None
        self._run, self._policy = run, Policy.read(self._site.folder)
        self._begun, home = time.time(), self._site.folder / RUNS / run
        if "recipe" not in told:
            return self._load_analysis(told["analysis"], home)
        try:
            recipe = to_recipe(told["recipe"], "the recipe")
        except UserError as error:
            raise Refused(f"the recipe is none: {str(error)[:500]}") from error
        for refusal in self._policy.refusals(recipe, self._site.network):
            raise refusal
        if (home / "recipe.json").exists():  # the run goes on: it is what it began as, whatever comes now
            begun = json.loads((home / "recipe.json").read_bytes())
            recipe, schema = to_recipe(begun["recipe"], "the recipe"), begun["schema"]
            self._begun = float(begun["begun"])
            for refusal in self._policy.refusals(recipe, self._site.network):
                raise refusal
        check_approved(self._site.folder, self._policy, recipe, schema)
        home.mkdir(parents=True, exist_ok=True)
        if schema is not None:
            write_whole(home / SCHEMA, schema.encode())
        values = recipe.model_dump(mode="json", exclude_none=True)
        content = {"recipe": values, "schema": schema, "begun": self._begun}
        write_whole(home / "recipe.json", json.dumps(content).encode())
        self._recipe = local_recipe(recipe, self._site.data, home / SCHEMA if schema is not None else None)
        self._population = load_data(self._recipe)
        if recipe.privacy.promises:  # before a word of its rows is told; the server's own check is for the server
            check_public(self._population, recipe.privacy.unit, "the schema" if schema is not None else None)
        self._check_same_rows(home, self._population)
        return plain.encode(facts(self._population, self._site.name, self._policy))

    def _load_analysis(self, values: Any, home: Path) -> bytes:
        try:
            asked = Analysis.model_validate(values)
        except ValidationError as error:
            raise Refused(f"the analysis is none: {str(error)[:500]}") from error
        for refusal in self._policy.refusals(asked, self._site.network):
            raise refusal
        check_approved(self._site.folder, self._policy, asked, None)
        home.mkdir(parents=True, exist_ok=True)
        begun: dict[str, Any] = {"analysis": asked.model_dump(), "begun": self._begun}
        if (home / "analysis.json").exists():
            begun = json.loads((home / "analysis.json").read_bytes())
        if begun["analysis"] != asked.model_dump():
            raise Refused("a run goes on as the analysis that it began as")
        write_whole(home / "analysis.json", json.dumps(begun).encode())
        self._begun, self._analysis = float(begun["begun"]), (asked, read_own(asked, self._site.data))
        return plain.encode(told_of(self._analysis[1], self._site.name, self._policy))

    @staticmethod
    def _check_same_rows(home: Path, population: Population) -> None:
        """A run goes on with the rows that it began with; only this site can tell."""
        file = home / "fingerprint.json"
        known = json.loads(file.read_bytes()) if file.exists() else {"key": secrets.token_hex(32)}
        found = fingerprint.of(population, bytes.fromhex(known["key"]))
        if "rows" in known and not hmac.compare_digest(json.dumps(known["rows"]), json.dumps(found)):
            raise Refused("the rows of this site have changed since the run began; start a new run")
        write_whole(file, json.dumps({**known, "rows": found}).encode())

    def _settle(self, data: bytes) -> bytes:
        """Make the shard: the program is built here, from the recipe and what is public of all sites' clients."""
        torch.set_num_threads(1)
        if self._analysis is not None:
            return self._settle_analysis(*self._analysis, data)
        if self._recipe is None or self._population is None:
            raise NotReady
        everybody = plain.decode(data, KINDS)
        if not isinstance(everybody, Absent) or self._site.name not in everybody.nodes or everybody.declared:
            raise Refused("a site settles with what is known of all clients, its own among them, who declare no ε")
        self._population.check(everybody.schema)  # with fewer classes, say, who has the others would fail, and show
        own = facts(self._population, self._site.name, self._policy)
        mine = _places(everybody.train, own.train)
        prepared = prepare(self._recipe, everybody)
        for refusal in self._policy.late_refusals(prepared.recipe, len(everybody)):
            raise refusal
        simulated = noise_of(prepared.recipe) == "seeded"
        roster = prepared.population.roster().select(mine)
        labeled = roster.labeled & self._population.train.labeled
        roster = replace(roster, labeled=labeled)
        parts = {
            name: replace(part, ids=roster.ids, labeled=part.labeled & labeled if name == "train" else part.labeled)
            for name, part in self._population.parts.items()
        }
        simulator = Simulator(self._recipe.runtime.block, 1)
        shard = Shard(parts, roster, self._program(prepared), simulator)
        self._journal = Journal(shard, self._site.folder / RUNS / self._run, again=simulated)
        return roster.encode()

    def _settle_analysis(self, asked: Analysis, given: Given, data: bytes) -> bytes:
        found = plain.decode(data, GIVEN)
        if not (isinstance(found, list) and len(found) == 3 and isinstance(found[0], Given)):
            raise Refused("an analysis settles with what is known of all clients, a block and the source of noise")
        everybody, block, noise = found
        if noise != asked.noise or not (block is None or isinstance(block, int)):
            raise Refused(f"this analysis has {asked.noise} noise, and a block is a number of clients")
        own = told_of(given, self._site.name, self._policy)
        mine = _places(everybody.clients, own.clients)
        roster = replace(everybody.clients.roster(), ids=torch.arange(len(everybody.clients))).select(mine)
        parts = {name: replace(part, ids=mine, names=None) for name, part in parts_of(given).items()}
        program = program_of_analysis(Terms(noise), (), self._measures(noise))
        shard = Shard(parts, roster, program, Simulator(block, 1))
        self._journal = Journal(shard, self._site.folder / RUNS / self._run, again=noise == "seeded")
        encoded: bytes = roster.encode()
        return encoded

    def _learn(self, algorithms: bytes) -> None:
        """The tasks of an analysis's algorithms; this site's own classes check their settings."""
        if self._analysis is None:
            raise Refused("the program of a run is that of its recipe")
        noise, taught = self._analysis[0].noise, plain.decode(algorithms, TAUGHT)
        self.journal.shard.program = program_of_analysis(Terms(noise), taught, self._measures(noise))

    def _measures(self, noise: Noise) -> bool:
        """May what a simulation measures leave? With an ε that tells of failures: only where bare arrays may, too."""
        policy = self._policy
        bare = "bare" in (policy.sums, policy.individual) and not (policy.epsilon or policy.epsilon_run)
        return "measure" in policy.purposes and (bare or noise == "seeded")

    def _program(self, prepared: Prepared) -> Program:
        return program_of_run(prepared, simulated=self._measures(noise_of(prepared.recipe)))

    # Asks

    def _answer(self, head: bytes, *arrays: bytes) -> bytes:
        request = Request.decode(head)
        self._site.news["doing"] = f"{printable(request.task[:80])} for run {self._run[:8]}"
        try:
            self._allow(request, head, arrays)
            frames = [self._tame(frame) for frame in self.journal.answer(head, *arrays)]
        except Forbidden as refusal:
            self._note(refusal)
            frames = [_all_failed(request, f"{SITE}, {refusal}")]
        except (Refused, wire.WireError, TypeError) as error:
            self._site.tell(f"refused: {printable(f'{request.task}: {error}')}")
            frames = [_all_failed(request, f"{SITE}: the request is not one of this run")]
        finally:
            self._site.news["doing"] = ""
        sent = self._site.folder / RUNS / self._run / SENT  # over all channels of the run
        total = sum(map(len, frames)) + (int(sent.read_bytes()) if sent.exists() else 0)
        write_whole(sent, str(total).encode(), durable=False)
        if total > self._policy.megabytes << 20:
            raise Forbidden("megabytes", f"more than {self._policy.megabytes} MB would leave in this run")
        return pack([json.dumps({"seconds": 0.0, "cpu": 0.0}).encode(), *frames])  # times would tell of the rows

    def _allow(self, request: Request, head: bytes, arrays: Sequence[bytes]) -> None:
        """Check a request against the policy, and charge what it lets out."""
        shard, policy, ledger = self.journal.shard, self._policy, self._site.ledger
        policy.check_task(request.task, request.purpose)
        if time.time() > self._begun + policy.hours * 3600:
            raise Forbidden("hours", f"this run began more than {policy.hours:g} hours ago")
        for name, value in _inputs(request, arrays):
            if request.task in READING and name == "missing":
                continue  # NaN stands for what a client has not kept
            if value.is_floating_point() and not bool((value.abs() <= LARGEST).all()):  # which no NaN is
                raise Refused(f"the input {name} holds a number that is not finite or above {LARGEST:g}")
        ask = f"{self._run} {request.run} {request.serial} {hashlib.sha256(head).hexdigest()[:32]}"
        if request.purpose != "measure" and ledger.known(ask):
            if not self.journal.remembers(request.run, request.serial):  # somebody has made room in its folder
                raise Refused("it was charged once, and what was answered is not here any more")
            return  # its journal has the answer, or knows that it was cut off
        if request.purpose == "train" and ledger.asks.get(self._run, 0) >= policy.asks * (policy.rounds + 1):
            raise Forbidden("asks", f"this run has asked {policy.asks} times for each of {policy.rounds} rounds")
        releases = [] if shard.program.is_exchange(request.task) else shard.program.releases(request)
        positions, charges = shard.positions(request.ids), list[Charge]()
        for release in releases:
            protected = policy.check_release(release, len(positions), shard.program.terms)
            charges += charges_of(release, shard.roster, positions) if protected else [Charge(BARE)]
        self._check_cost(charges)
        what = {
            "task": request.task,
            "clients": len(positions),
            "trust": shard.program.terms.trust,
            "leaves": [f"{one.kind}({', '.join(one.names)})" for one in releases if not isinstance(one, Stays)],
        }
        ledger.charge(self._run, ask, request.purpose, what, charges)

    def _check_cost(self, charges: Sequence[Charge]) -> None:
        policy = self._policy
        if any(one.is_bare for one in charges):
            if policy.epsilon or policy.epsilon_run:
                raise Forbidden("epsilon", "an array without noise costs more than any ε")
            return
        if policy.unit == "client" and any(one.unit == "point" for one in charges):
            raise Forbidden("unit", "the noise protects single points, and this site wants its clients protected")
        together = zip(("epsilon", "epsilon_run"), self._site.ledger.after(self._run, charges), strict=True)
        for rule, spent in together if charges else ():
            cost, most = sum(one.worst(policy.delta, coarseness=16) for one in spent.values()), getattr(policy, rule)
            if not math.isfinite(cost) or cost > most:
                raise Forbidden(rule, f"the cost would be ε = {cost:.4g} at δ = {policy.delta:g}, allowed is {most:g}")

    @staticmethod
    def _tame(frame: bytes) -> bytes:
        """A reply whose failures say no more than that the task failed."""
        reply = Reply.decode(frame)
        if not reply.failed:
            return frame
        told = {
            row: Diverged("its numbers are not finite") if isinstance(why, Diverged) else "its task failed"
            for row, why in reply.failed.items()
        }
        return replace(reply, failed=told).encode()

    def _use(self, schema: bytes) -> None:
        self.journal.shard.use(Schema.from_json(schema.decode()))

    def _forget(self, data: bytes) -> None:
        run, prefix = _pair(data, str, str)
        self.journal.shard.forget(run, prefix)

    def _commit(self, data: bytes) -> bytes:
        run, serial = _pair(data, str, int)
        self.journal.commit(run, serial)
        return b"{}"  # plans tell how large cohorts were

    def _rollback(self, data: bytes) -> None:
        run, serial = _pair(data, str, int)
        self.journal.rollback(run, serial)

    def _plans(self, plans: bytes) -> None:
        """Blocks are this site's own business."""


def _places(everybody: Clients, own: Clients) -> Tensor:
    """Where a site's clients are among all."""
    names, mine = [everybody.name(position) for position in range(len(everybody))], set(own.names or ())
    found = torch.tensor([position for position, one in enumerate(names) if one in mine])
    if len(found) != len(own) or not torch.equal(everybody.size[found], own.size):
        raise Refused("what is said of this site's clients is not what it told")
    return found


def _pair(data: bytes, *kinds: type) -> list[Any]:
    found = json.loads(data[:1000])
    if not isinstance(found, list) or [type(one) for one in found] != list(kinds):
        raise Refused(f"expected {' and '.join(kind.__name__ for kind in kinds)}")
    return found


def _inputs(request: Request, arrays: Sequence[bytes]) -> Iterator[tuple[str, Tensor]]:
    yield from request.shared.items()
    yield from request.each.items()
    for data in arrays:
        yield from ((name, one) for name, one in wire.decode(data).items() if isinstance(one, Tensor))


def charges_of(release: Release, roster: Roster, positions: Tensor) -> list[Charge]:
    """What a release with noise costs, as if nobody had been sampled: the server knows who was."""
    if isinstance(release, Stays):
        return []
    declared = roster.declarations(positions)
    cost = release.cost(declared) if callable(release.cost) else release.cost
    if isinstance(cost, LocalCost):
        return [Charge(event, "point") for event in dict.fromkeys(cost.events)]
    assert release.noise is not None
    times = len(release.names) if isinstance(release, Each) else 1
    return [Charge(release.noise.event(), release.unit)] * times


def _all_failed(request: Request, why: str) -> bytes:
    return request.reply(failed=dict.fromkeys(range(len(request.ids)), why)).encode()


def private_files() -> None:
    """From here on this process makes files that its owner alone can read."""
    os.umask(0o077)
