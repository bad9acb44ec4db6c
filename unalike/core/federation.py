"""The federation: the clients, how to reach them, and the one primitive, ``Cohort.ask``."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from unalike.core.draws import Draws, key
from unalike.core.failure import SITE, Failure
from unalike.core.release import (
    SECURE_SHAPE,
    Each,
    Mean,
    Noise,
    Release,
    Stays,
    Sum,
    Terms,
    Trust,
    check_held,
    protects,
)
from unalike.core.replies import Collector, Meter
from unalike.core.request import Part, Purpose, ReleaseName, Request, Runtime
from unalike.core.roster import Declarations, Roster
from unalike.core.schema import Schema
from unalike.core.secure import check_secure, secure_sum
from unalike.core.shapes import DryRun, Shapes, check_private, dry_output, dry_run
from unalike.core.task import Task
from unalike.core.transcript import Disclosure, Facts, Traffic, Transcript, facts
from unalike.core.wire import digest
from unalike.privacy.account import BARE
from unalike.privacy.checks import check_delta
from unalike.privacy.dpsgd import LocalCost
from unalike.privacy.ledger import Budget, Charge, ClientId, Ledger
from unalike.privacy.sampling import Everyone, FixedSize, Local, Poisson, Sampling
from unalike.privacy.system import SystemDraws

_COHORTS, _ASKS = 1, 2  # domains of the seed, so that choosing clients and their own draws never coincide

_LARGE = 1 << 10  # bytes of an input that is named by its digest
_REMEMBERED = 64  # digests


class QuorumError(RuntimeError):
    """Too few clients answered an ask; ``failures`` has a reason for each of the others."""

    def __init__(self, message: str, failures: Sequence[Failure] = ()) -> None:
        super().__init__(message)
        self.failures = failures

    @property
    def diverged(self) -> bool:
        """Did all who failed fail because their numbers are not finite?"""
        return bool(self.failures) and all(failure.diverged for failure in self.failures)

    @property
    def refused(self) -> bool:
        """Did the policy of a site refuse?"""
        return any(failure.reason.startswith(SITE) for failure in self.failures)


@dataclass(frozen=True)
class PerClient:
    """An input that differs from client to client; made by ``each``."""

    values: Tensor


def each(values: Tensor) -> PerClient:
    """Mark an input of an ask as different for every client: row i goes to the cohort's i-th client alone."""
    return PerClient(values)


@dataclass(frozen=True)
class Held:
    """An array that lies at each client of a cohort, under a handle; an input for later asks of the same federation."""

    handle: str
    name: str
    shape: tuple[int, ...] | None = None  # at one client, where it is known


Input = Tensor | PerClient | Held | float
Models = Tensor | Held  # of a cohort: [C, d] where the server makes them, else where the clients hold them


@dataclass(frozen=True)
class Inputs:
    """The inputs of an ask: the same for all clients, different for each [C, ...], or held by the clients."""

    shared: dict[str, Tensor]
    each: dict[str, Tensor]
    held: dict[str, Held] = field(default_factory=dict)

    def of_one(self, task: Task, roster: Roster) -> dict[str, Tensor]:
        """As one client would get them, for a dry run."""
        inputs = dict(self.shared)
        inputs |= {
            name: value[0] if len(value) else value.new_zeros(value.shape[1:]) for name, value in self.each.items()
        }
        inputs |= {name: torch.zeros(one.shape or ()) for name, one in self.held.items()}
        return inputs | {name: value[0] for name, value in task.derive_inputs(roster, torch.arange(1)).items()}


class Replies(dict[str, Tensor]):
    """What an ask released, by name, and which clients did not answer.

    ``Each`` arrays have one row for each client in ``answered`` (positions in the cohort, ascending).
    """

    def __init__(
        self,
        released: Mapping[str, Tensor],
        answered: Tensor,
        failures: Sequence[Failure],
        handles: Mapping[str, Held],
    ) -> None:
        super().__init__(released)
        self.answered, self.failures, self.handles = answered, failures, handles

    def held(self, name: str) -> Held:
        """An array that stayed with the clients (``Stays``), to be used there by a later ask."""
        if name not in self.handles:
            known = ", ".join(self.handles) or "none"
            raise KeyError(f"no array {name!r} stayed at its client in this ask; there are: {known}")
        return self.handles[name]

    def __missing__(self, name: str) -> Tensor:
        raise KeyError(f"no array {name!r} was released by this ask; there are: {', '.join(self) or 'none'}")


@dataclass
class Federation:
    """A runtime that reaches clients, and the record of all that was asked of them. It holds no client's data.

    - ``roster``: the clients it asks; by default all of the runtime's.
    - ``quorum``: the share of a cohort that must answer; below it an ask stops with a ``QuorumError``.
    - ``budget``: refuses an ask before it is sent if its release would spend more.
    - ``run``: names the run at the clients, who keep things for it.
    - ``purpose``: what its asks are for; ``aside`` measures.
    - ``labels``: may tasks read labels?
    - ``noise``, ``trust``: see ``Terms``. By default noise comes from the operating system where a budget
      states an ε, and from the seed where none does.
    - ``accept_delta``: take a budget whose δ is 1 / clients or more, which would allow to publish a client's data.
    """

    runtime: Runtime
    seed: int = 0
    roster: Roster = None  # type: ignore[assignment]  # filled in below, so never None
    quorum: float = 0.5
    budget: Budget | None = None
    ledger: Ledger = field(default_factory=Ledger)
    transcript: Transcript = field(default_factory=Transcript)
    traffic: Traffic = field(default_factory=Traffic)
    round: int = 0
    metrics: dict[str, float] = field(default_factory=dict)  # of the present round, e.g. the loss a method released
    failures: list[Failure] = field(default_factory=list)  # of the present round
    run: str = "run"
    serial: int = 0  # of the last ask
    purpose: Purpose = "train"
    labels: bool = True
    noise: Noise | None = None  # never None after the start
    trust: Trust = "server"
    accept_delta: bool = False
    training: bool = False  # a method's round is under way
    journal: Callable[[Federation], None] | None = None  # called between charge and send
    _calls: int = field(default=0, init=False)  # asks and samples so far in this round
    _asides: int = field(default=0, init=False)
    _tested: set[tuple[str, object]] = field(default_factory=set, init=False)  # releases whose noise was tried
    _received: dict[tuple[str, str], Tensor] = field(default_factory=dict, init=False)  # see ``Cohort._received``
    _starts: Counter[int] = field(default_factory=Counter, init=False)  # how often each round was started

    def __post_init__(self) -> None:
        if self.roster is None:
            self.roster = self.runtime.roster
        if self.noise is None:
            self.noise = "seeded" if self.budget is None and self.roster.epsilon is None else "system"
        self.terms()
        if self.budget is not None and not self.accept_delta:  # points are more than clients: n is this at least
            check_delta(self.budget.delta, len(self.roster))
        self._labeled = self.roster.labeled.nonzero().flatten()

    def terms(self, sampling: Sampling = Everyone()) -> Terms:
        """On what terms clients that were chosen so are asked."""
        return Terms(self.noise or "system", self.trust, sampling.relation or "add_remove")

    @contextmanager
    def train_in(self, number: int) -> Iterator[None]:
        """Begin round ``number``; what is asked inside is training."""
        self.begin_round(number)
        self.training = True
        try:
            yield
        finally:
            self.training = False

    def begin_round(self, number: int) -> Federation:
        """Start round ``number``: draws depend on it, and the round's metrics and failures are fresh.

        A round that starts again has other draws than before: a sample that is drawn twice is two samples.
        """
        self._starts[number] += 1
        self.round, self._calls = number, 0
        self._received.clear()  # a run that goes on from a checkpoint counts the bytes of one that never stopped
        self.ledger.close_cohorts()
        self.metrics, self.failures = {}, []
        return self

    def everyone(self) -> Cohort:
        """All clients."""
        return self._cohort_of(torch.arange(len(self.roster)))

    def cohort(self, positions: Tensor | Sequence[int]) -> Cohort:
        """The clients at these positions, chosen by the caller (so no privacy amplification by sampling)."""
        return self._cohort_of(_check_distinct(torch.as_tensor(positions, dtype=torch.int64)))

    def _cohort_of(self, chosen: Tensor) -> Cohort:
        sampling = Everyone(self.ledger.relation or "add_remove")  # one run, one neighbouring relation
        return Cohort(self, chosen, sampling, len(chosen), self._cohort_name())

    def sample(self, count: int | float, *, poisson: bool = False, labeled: bool | None = None) -> Cohort:
        """A random cohort: ``count`` clients (an int) or that share of them (a float up to 1).

        - ``poisson``: every client takes part independently with probability count / clients, so the cohort's size
          varies; this is what client-level privacy is amplified by.
        - ``labeled``: only clients with (True) or without (False) labels.
        """
        pool: Tensor | None = None
        if labeled is not None:
            pool = self._labeled if labeled else (~self.roster.labeled).nonzero().flatten()
        total = len(self.roster) if pool is None else len(pool)
        if total == 0:
            raise ValueError(f"no client {'has' if labeled else 'lacks'} labels, so none can be sampled")
        wanted = count if isinstance(count, int) else count * total
        if not 0 < wanted <= total:
            raise ValueError(f"cannot sample {count} of {total} clients; give 1..{total}, or a share above 0 up to 1.0")
        size = max(1, round(wanted))
        sampling: Sampling = Poisson(wanted / total) if poisson else FixedSize(size, total)
        self._calls += 1
        if self.noise == "system":
            chosen = SystemDraws().choose(total, wanted / total if poisson else size)
        else:
            seed = int(self._key(_COHORTS)) & ((1 << 64) - 1)
            random = np.random.Generator(np.random.Philox(seed))
            size = int(random.binomial(total, wanted / total)) if poisson else size
            chosen = torch.from_numpy(random.choice(total, size, replace=False).astype(np.int64))
        positions = chosen if pool is None else pool[chosen]
        return Cohort(self, positions, sampling, wanted if poisson else size, self._cohort_name())

    def aside(self, roster: Roster | None = None, *, labels: bool = True) -> Federation:
        """A federation to measure with in simulation: it reads what clients kept but never changes it, and what it asks
        is charged to no ledger and marked as simulation-only in a transcript of its own.

        roster: the clients it asks. Use it in a ``with`` block: clients forget at its end what they held for it.
        """
        if self.training:
            raise RuntimeError(
                "aside() measures and is charged to nobody, so a method's round must not use it: what it learned would "
                "be in the model. Ask a cohort of the federation itself"
            )
        self._asides += 1
        return Federation(
            self.runtime,
            self.seed + 1,
            self.roster if roster is None else roster,
            round=self.round,
            run=f"{self.run}/{self._asides}",
            purpose="measure",
            labels=labels,
            noise=self.noise,
            trust=self.trust,
        )

    def __enter__(self) -> Federation:
        return self

    def __exit__(self, *_: object) -> None:
        self.runtime.forget(self.run)

    @property
    def simulation_only(self) -> bool:
        return self.purpose == "measure"

    def use(self, schema: Schema) -> None:
        """Have all clients read their rows by this schema from now on: the same rows, scaled otherwise."""
        self.runtime.use(schema)
        self.roster = replace(self.roster, schema=schema)

    def report(self, **metrics: Tensor | float) -> None:
        """Numbers of this round for progress and metrics; take them from releases, so that they are accounted for."""
        self.metrics.update({name: float(value) for name, value in metrics.items()})

    def draws(self) -> Draws | SystemDraws:
        """Fresh server-side draws: the operating system's, or a function of (seed, round, call)."""
        self._calls += 1
        return SystemDraws() if self.noise == "system" else Draws(self._key(_ASKS, -1))

    def _key(self, domain: int, *more: int) -> Tensor:
        """The key of this call; a round that starts again has other keys."""
        again = max(0, self._starts[self.round] - 1)
        return key(self.seed, domain, self.round, self._calls, *more, *([-2, again] if again else []))

    @property
    def _era(self) -> str:
        """The present round: cohorts are of one, and never of an earlier beginning of it."""
        return f"{self.round}.{self._starts[self.round]}"

    def _cohort_name(self) -> str:
        return f"{self._era}.{self._calls}"


def _named(shared: Mapping[str, Tensor]) -> dict[str, str]:
    """The digests of the arrays that are large enough to be named by one."""
    return {name: digest(value) for name, value in shared.items() if value.nbytes >= _LARGE}


def _check_distinct(positions: Tensor) -> Tensor:
    if len(torch.unique(positions)) != len(positions):
        raise ValueError("a client is in a cohort once, but some position was given twice")
    return positions


@dataclass(frozen=True)
class Cohort:
    """Some clients of a federation, and how they were chosen (the privacy of a release depends on it)."""

    federation: Federation
    positions: Tensor  # [C] in the federation's roster
    sampling: Sampling
    expected: float  # how many clients were to be expected: what a noisy mean divides by, as no client changes it
    name: str  # of this sample, for the ledger: asks to one cohort are about one and the same sample
    part: Part = "train"  # of the clients' data

    def __len__(self) -> int:
        return len(self.positions)

    @property
    def sizes(self) -> Tensor:
        """[C] how many samples each client has at most: its declared size N̄."""
        return self.declarations.bound

    @cached_property
    def declarations(self) -> Declarations:
        """What the clients declare: sizes, and where they have them budgets and batch sizes."""
        return self.federation.roster.declarations(self.positions)

    @cached_property
    def ids(self) -> Tensor:
        """[C] the clients' ids."""
        return self.federation.roster.ids[self.positions]

    def only(self, rows: Tensor) -> Cohort:
        """Some of the cohort, by position in it: for example the clients that answered."""
        return replace(self, positions=_check_distinct(self.positions[rows]))

    def within_budget(self, task: Task) -> Cohort:
        """Those whose own declared (ε, δ) allows one more ask of this task; where nobody declares one, all."""
        budgets = self._budgets()
        if not budgets or self.federation.simulation_only:
            return self
        releases = [release.resolve({}, self.declarations) for release in task.releases()]
        ledger, ids = self.federation.ledger, tuple(self.ids.tolist())
        charges = {charge for one in releases if isinstance(one.cost, LocalCost) for charge in one.cost.charges(ids)}
        after = ledger.after(charges)
        allowed = [row for row, one in enumerate(ids) if budgets[one].allows(after, one)]
        return self.only(torch.tensor(allowed, dtype=torch.int64))

    def _budgets(self) -> dict[ClientId, Budget]:
        """The clients' own, by id."""
        declared = self.declarations
        if declared.epsilon is None or declared.delta is None:
            return {}
        limits = zip(self.ids.tolist(), declared.epsilon.tolist(), declared.delta.tolist(), strict=True)
        return {client: Budget(epsilon, delta) for client, epsilon, delta in limits}

    def on(self, part: Part) -> Cohort:
        """The same clients, asked about another part of their data."""
        return replace(self, part=part)

    def ask(self, task: Task, /, into: Release | Sequence[Release] | None = None, **inputs: Input) -> Replies:
        """Have every client of the cohort run ``task`` on ``inputs``; release what ``into`` says.

        ``into`` is a release or several; an empty list releases nothing. None takes what the task itself declares
        (``@fit.into``), and where it declares nothing shows the server every client's arrays (``Each``).

        Everything is checked before anything is sent: names, shapes, and that the privacy budget allows the release.
        """
        federation = self.federation
        if self.name.rpartition(".")[0] != federation._era:
            raise ValueError(f"this cohort is of an earlier round than {federation.round}; sample one in every round")
        given = self._inputs(task, inputs)
        if into is None:
            into = task.releases() or [Each()]
        asked = [into] if not isinstance(into, Sequence) else list(into)
        federation.runtime.program.teach(task, asked, federation.terms(self.sampling))
        releases = [release.resolve(given.shared, self.declarations) for release in asked]
        check_held(task.name, given.held, releases)
        self._test_noise(releases)
        if any(one.cost is not None for one in releases):
            check_private(task, releases, self._dry_run(task, releases, given))
        secure = check_secure(self, releases)
        if not federation.simulation_only:
            self._charge([release for release in releases if not isinstance(release, Stays)])
        replies = self._deliver(task, releases, given)
        if secure is None or SECURE_SHAPE not in replies:  # nobody was drawn
            return replies
        released = dict(replies)
        shape = tuple(released.pop(SECURE_SHAPE)[0].tolist())
        value, survivors, failures = secure_sum(self.only(replies.answered), task, secure, shape)
        released[secure.name] = value
        return Replies(released, replies.answered[survivors], [*replies.failures, *failures], replies.handles)

    def _test_noise(self, releases: Sequence[Release]) -> None:
        """Before a private release is made for the first time in a run: is its noise what it is to be?"""
        federation = self.federation
        for release in releases if federation.noise == "system" else ():
            if isinstance(release, Sum) and (key := (release.name, release.noise)) not in federation._tested:
                release.test_noise(self.sampling)
                federation._tested.add(key)

    def _deliver(self, task: Task, releases: Sequence[Release], given: Inputs) -> Replies:
        """Send what was checked and charged, gather the replies and write the transcript."""
        federation = self.federation
        request, draws = self._request(task, releases, given)
        shapes = self._shapes(task, releases, given)
        private = protects(releases) or not releases
        hidden = private and isinstance(self.sampling, Poisson)  # the size of the cohort is a secret
        collector = Collector(request, self.sizes, releases, shapes, noised=federation.terms().at_shard)
        meter = Meter(federation.traffic, releases, round(self.expected) if hidden else None)
        if not len(self):
            self._expect_nobody(collector, task, releases, given, shapes)
        answered, failures = self._collect(request, collector, meter)
        self._check_quorum(task, len(answered), failures, hidden)
        released = collector.finish(answered, self.expected, self.sampling, draws, federation.runtime.shard_count)
        for release, name, shape, clients, size in meter.lines(released):
            self.write(task, release, name, shape, clients, size)
        handles = {
            name: Held(f"{request.serial}.{name}", name, shapes[place].get(name) if shapes else None)
            for place, release in enumerate(releases)
            if isinstance(release, Stays)
            for name in release.names
        }
        return Replies(released, answered, failures, handles)

    def exchange(
        self,
        task: Task,
        shared: dict[str, Tensor],
        own: dict[str, Tensor],
        metered: tuple[dict[str, Tensor], dict[str, Tensor]] | None = None,
    ) -> Replies:
        """One exchange of a secure sum. Its drop-outs are counted, and its line is written, by the sum itself.

        metered: where the cohort's size is a secret, ``shared`` and ``own`` as large as in a cohort of the expected
        size: these are metered, and the sum itself meters the replies.
        """
        releases, given = [Each()], Inputs(shared, own)
        self.federation.runtime.program.teach(task, releases, self.federation.terms(self.sampling))
        request, draws = self._request(task, releases, given)
        collector = Collector(request, self.sizes, releases, None, noised=False)
        meter = Meter(self.federation.traffic, releases, None if metered is None else round(self.expected))
        counted = request
        if metered is not None:
            counted = replace(request, shared=metered[0], each=metered[1], named=_named(metered[0]))
        answered, failures = self._collect(request, collector, meter, counted)
        released = collector.finish(answered, self.expected, self.sampling, draws, 1)
        return Replies(released, answered, failures, {})

    def _request(self, task: Task, releases: Sequence[Release], given: Inputs) -> tuple[Request, Draws | SystemDraws]:
        """The next request of the federation, and the draws of the server's half."""
        federation = self.federation
        federation._calls += 1
        federation.serial += 1
        system = federation.noise == "system"
        key_of_ask = SystemDraws().bits(1)[0] if system else federation._key(_ASKS)
        request = Request(
            run=federation.run,
            serial=federation.serial,
            task=task.name,
            ids=self.ids,
            part=self.part,
            labels=federation.labels or self.part == "test",
            purpose=federation.purpose,
            key=int(key_of_ask),
            wanted=tuple(map(ReleaseName.of, releases)),
            shared=given.shared,
            each=given.each,
            held={name: one.handle for name, one in given.held.items()},
            named=_named(given.shared),
        )
        return request, SystemDraws() if system else Draws(key(key_of_ask, -1))

    def _collect(
        self, request: Request, collector: Collector, meter: Meter, counted: Request | None = None
    ) -> tuple[Tensor, list[Failure]]:
        """Send the request and take what comes: who answered, and why the others did not.

        counted: what is metered in place of the request.
        """
        federation, counted = self.federation, counted or request
        secret, received = meter.expected is not None, self._received(counted, meter.expected is not None)
        lacking = {
            name: (meter.expected or 0) * int(not had.any()) if secret else int((~had[self.positions]).sum())
            for name, had in received.items()
        }
        meter.count_request(counted, lacking)
        for reply in federation.runtime.deliver(request) if len(self) else ():
            if collector.add(reply):
                meter.count_reply(reply)
        answered, reasons = collector.close()
        for had in received.values():
            had[slice(None) if secret else self.positions[answered]] = True
        names = {row: federation.roster.name(int(self.positions[row])) for row in reasons}
        failures = [Failure(names[row], request.task, federation.round, reasons[row]) for row in sorted(reasons)]
        federation.failures.extend(failures)
        return answered, failures

    def _received(self, request: Request, secret: bool) -> dict[str, Tensor]:
        """For each named input, which clients have had it in this round [clients]; of a secret cohort all or none."""
        received, found = self.federation._received, dict[str, Tensor]()
        for name, content in request.named.items():
            mine = content, self.name if secret else ""
            had = received.pop(mine, None)
            found[name] = received[mine] = (
                had if had is not None else torch.zeros(len(self.federation.roster), dtype=torch.bool)
            )
        for old in list(received)[:-_REMEMBERED]:
            del received[old]
        return found

    def _expect_nobody(
        self,
        collector: Collector,
        task: Task,
        releases: Sequence[Release],
        given: Inputs,
        shapes: Sequence[Shapes] | None,
    ) -> None:
        """Nobody was drawn, which must not show: a sum is then noise of the shape and type that clients send."""
        if shapes is not None:
            roster = self.federation.roster
            sent = dry_output(task, roster.schema, roster.bound[0], given.of_one(task, roster))
            collector.expect(sent or {})
        elif any(one.noise is not None for one in releases):
            raise ValueError(
                f"nobody was drawn for {task.name}, and its noise cannot be released because the task does not run on "
                "rows of zeros, which would give its shape; make it run without what earlier tasks keep"
            )

    def _check_quorum(self, task: Task, count: int, failures: Sequence[Failure], hidden: bool) -> None:
        federation = self.federation
        if count >= federation.quorum * len(self) and (count or not len(self)):
            return
        if hidden:  # neither the number of clients nor the reasons may show, but that of a site's policy
            rules = {failure.reason.partition(":")[0] for failure in failures if failure.reason.startswith(SITE)}
            raise QuorumError(
                f"fewer clients answered {task.name} in round {federation.round} than the quorum of "
                f"{federation.quorum:.0%}; it was charged, because some did answer"
                + "".join(f". Some replies were {rule} (unalike network status says more)" for rule in sorted(rules)),
                failures,
            )
        examples = "\n  ".join(str(failure) for failure in failures[:3])
        raise QuorumError(
            f"only {count} of {len(self)} clients answered {task.name} in round {federation.round}; the quorum is "
            f"{federation.quorum:.0%}. The first failures:\n  {examples}",
            failures,
        )

    def _shapes(self, task: Task, releases: Sequence[Release], given: Inputs) -> list[Shapes] | None:
        """What each client is to send. Shards in this process run the same code and need no check, unless nobody was
        drawn: then the noise must have this shape.
        """
        unknown = any(one.shape is None for one in given.held.values())
        if unknown or (self.federation.runtime.program.open and len(self)):
            return None
        dry = self._dry_run(task, releases, given)
        return None if dry is None else dry.shapes

    def _dry_run(self, task: Task, releases: Sequence[Release], given: Inputs) -> DryRun | None:
        """A dry run of the task; it is run once for asks alike."""
        program, roster = self.federation.runtime.program, self.federation.roster
        inputs = given.of_one(task, roster)
        kind = (task.name, *map(ReleaseName.of, releases), *((name, value.shape) for name, value in inputs.items()))
        if kind not in program.dry_runs:
            program.dry_runs[kind] = dry_run(task, releases, roster.schema, roster.bound[0], inputs)
        return program.dry_runs[kind]

    def _charge(self, releases: Sequence[Release]) -> None:
        """Enter the ask in the ledger, unless the budget forbids it; a release without noise is non-private on purpose.

        The events of one ask, and of several asks to the same cohort, are about the same sample of clients.
        """
        federation, charges = self.federation, list[Charge]()
        ids = tuple(self.ids.tolist())
        paid: list[LocalCost] = []  # by identity: two trainings that happen to cost the same are two
        members: tuple[int, ...] | Literal["all"] | None = None
        if federation.trust == "nobody":
            members = "all" if len(ids) == len(federation.roster) else ids
        for release in releases:
            if release.cost is not None:
                assert isinstance(release.cost, LocalCost), "the release is resolved before it is charged"
                charges += [] if any(release.cost is one for one in paid) else release.cost.charges(ids)
                paid.append(release.cost)
            elif release.noise is None:
                charges.append(Charge(BARE))
            elif isinstance(release, Each):  # noise made at the client costs that client alone
                charges.append(Charge(release.noise.event(), release.unit, Local(), clients=ids))
            else:
                event = release.noise.event()
                charges.append(Charge(event, release.unit, self.sampling, self.name, members=members))
        federation.ledger.charge(charges, federation.budget, self._budgets())
        if federation.journal is not None:
            federation.journal(federation)

    def write(self, task: Task, release: Release, name: str, shape: tuple[int, ...], clients: int, size: int) -> None:
        """Enter one array of an ask in the transcript."""
        noise: Facts | None = None if release.noise is None else facts(release.noise)
        unit: str | None = None if noise is None else release.unit
        clip: float | None = getattr(release, "clip", None)
        local = isinstance(release, Each)
        if isinstance(release.cost, LocalCost):
            local = True
            noise, unit, clip = release.cost.noise, "point", release.cost.clip
        note = "simulation only" if self.federation.simulation_only else getattr(release, "note", None)
        if noise is not None and note is None and self.federation.noise == "seeded":
            note = "seeded noise: protects nobody outside a simulation"
        seen = "individual" if isinstance(release, Each) else "mean" if isinstance(release, Mean) else "sum"
        seen_as = f"secure {seen}" if getattr(release, "secure", False) else seen
        trust = None if noise is None else "nobody" if local else self.federation.trust
        bits = release.bits if name in release.names[:1] else None
        entry = Disclosure(task.name, name, shape, seen_as, unit, clip, noise, facts(self.sampling), note, bits, trust)
        self.federation.transcript.add(entry, self.federation.round, clients, size)

    def _inputs(self, task: Task, inputs: Mapping[str, Input]) -> Inputs:
        """The inputs of an ask, checked and sorted by where they come from."""
        if not isinstance(task, Task):
            raise TypeError(f"ask takes a function marked with @task, but got {task!r}")
        task.check_inputs(set(inputs))
        given = Inputs({}, {})
        for name, value in inputs.items():
            if isinstance(value, PerClient):
                rows = value.values.shape[0] if value.values.ndim else None
                if rows != len(self):
                    raise ValueError(f"{task.name}: each({name}) has {rows} rows for a cohort of {len(self)} clients")
                given.each[name] = value.values.detach()
            elif isinstance(value, Held):
                given.held[name] = value
            elif isinstance(value, Tensor):
                given.shared[name] = value.detach()
            elif isinstance(value, bool | int | float):
                given.shared[name] = torch.tensor(value)
            else:
                raise TypeError(
                    f"{task.name}: the input {name!r} is a {type(value).__name__}; tasks take tensors and numbers only"
                )
        return given
