"""The federation: the clients, how to reach them, and the one primitive, ``Cohort.ask``."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from types import MappingProxyType
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from unalike.core.draws import Draws, key
from unalike.core.release import SECURE_SHAPE, Each, Mean, Release, Stays, protects
from unalike.core.replies import Gathered, Record
from unalike.core.request import Failure, Part, Purpose, Request, Runtime, Wanted
from unalike.core.roster import Declared, Roster
from unalike.core.schema import Schema
from unalike.core.secure import check_secure, secure_sum
from unalike.core.shapes import Shapes, dry_run, dry_sent
from unalike.core.task import Task
from unalike.core.terms import Noise, Terms, Trust
from unalike.core.transcript import Entry, Traffic, Transcript
from unalike.privacy.account import BARE
from unalike.privacy.checks import check_delta
from unalike.privacy.dpsgd import LocalCost
from unalike.privacy.ledger import Budget, Charge, ClientId, Ledger
from unalike.privacy.sampling import Everyone, FixedSize, Local, Poisson, Sampling
from unalike.privacy.system import SystemDraws

_COHORTS, _ASKS = 1, 2  # domains of the seed, so that choosing clients and their own draws never coincide


class QuorumError(RuntimeError):
    """Too few clients answered an ask for its result to be used; ``failures`` says why each of the others did not."""

    def __init__(self, message: str, failures: Sequence[Failure] = ()) -> None:
        super().__init__(message)
        self.failures = failures


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

    - ``roster``: whom it asks; the runtime's whole roster unless told otherwise.
    - ``quorum``: the share of a cohort that must answer; below it an ask stops with a ``QuorumError``.
    - ``budget``: refuses an ask before it is sent if its release would spend more.
    - ``run``: names the run at the clients, who keep things for it.
    - ``purpose``: what its asks are for; ``aside`` measures.
    - ``labels``: may tasks read labels?
    - ``noise``, ``trust``: see ``Terms``. Unless told otherwise, the noise is the operating system's where a budget
      states an ε, and seeded where none does.
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
    journal: Callable[[Federation], None] | None = None  # told what an ask costs before it is sent, to save it
    _calls: int = field(default=0, init=False)  # asks and samples so far in this round
    _asides: int = field(default=0, init=False)
    _begun: Counter[int] = field(default_factory=Counter, init=False)  # how often each round was begun

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

    def begin_round(self, number: int) -> Federation:
        """Start round ``number``: draws depend on it, and the round's metrics and failures are fresh.

        A round that is begun again has other draws than before: a sample that is drawn twice is two samples.
        """
        self._begun[number] += 1
        self.round, self._calls = number, 0
        self.ledger.close_cohorts()
        self.metrics, self.failures = {}, []
        return self

    def everyone(self) -> Cohort:
        """All clients."""
        return self._chosen(torch.arange(len(self.roster)))

    def cohort(self, positions: Tensor | Sequence[int]) -> Cohort:
        """The clients at these positions, chosen by the caller (so no privacy amplification by sampling)."""
        return self._chosen(_once(torch.as_tensor(positions, dtype=torch.int64)))

    def _chosen(self, chosen: Tensor) -> Cohort:
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
            chosen = SystemDraws().chosen(total, wanted / total if poisson else size)
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

        roster: whom it asks, of all the runtime's clients. Use it in a ``with`` block: what stayed at the clients for
        it is forgotten at the end.
        """
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
        """Of the present call; a round that is begun again has keys of its own."""
        again = max(0, self._begun[self.round] - 1)
        return key(self.seed, domain, self.round, self._calls, *more, *([-2, again] if again else []))

    @property
    def _era(self) -> str:
        """The present round: cohorts are of one, and never of an earlier beginning of it."""
        return f"{self.round}.{self._begun[self.round]}"

    def _cohort_name(self) -> str:
        return f"{self._era}.{self._calls}"


def _once(positions: Tensor) -> Tensor:
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
        return self.declared.bound

    @cached_property
    def declared(self) -> Declared:
        """What the clients declare: sizes, and where they have them budgets and batch sizes."""
        return self.federation.roster.declared(self.positions)

    @cached_property
    def ids(self) -> Tensor:
        """[C] the clients' ids."""
        return self.federation.roster.ids[self.positions]

    def only(self, rows: Tensor) -> Cohort:
        """Some of the cohort, by position in it: for example those who answered."""
        return replace(self, positions=_once(self.positions[rows]))

    def within_budget(self, task: Task) -> Cohort:
        """Those whose own declared (ε, δ) allows one more ask of this task; where nobody declares one, all."""
        budgets = self._budgets()
        if not budgets or self.federation.simulation_only:
            return self
        releases = [release.resolved({}, self.declared) for release in task.releases()]
        ledger, ids = self.federation.ledger, tuple(self.ids.tolist())
        charges = {charge for one in releases if isinstance(one.cost, LocalCost) for charge in one.cost.charges(ids)}
        after = ledger.after(charges)
        allowed = [row for row, one in enumerate(ids) if budgets[one].allows(after, one)]
        return self.only(torch.tensor(allowed, dtype=torch.int64))

    def _budgets(self) -> dict[ClientId, Budget]:
        """The clients' own, by id."""
        declared = self.declared
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
        shared, own, held = self._checked(task, inputs)
        if into is None:
            into = task.releases() or [Each()]
        asked = [into] if not isinstance(into, Sequence) else list(into)
        federation.runtime.program.teach(task, asked, federation.terms(self.sampling))
        releases = [release.resolved(shared, self.declared) for release in asked]
        secure = check_secure(self, releases)
        if not federation.simulation_only:
            self._charge([release for release in releases if not isinstance(release, Stays)])
        replies = self._deliver(task, releases, shared, own, held)
        if secure is None or SECURE_SHAPE not in replies:  # of nobody
            return replies
        released = dict(replies)
        shape = tuple(released.pop(SECURE_SHAPE)[0].tolist())
        value, survivors, failures = secure_sum(self.only(replies.answered), task, secure, shape)
        released[secure.name] = value
        return Replies(released, replies.answered[survivors], [*replies.failures, *failures], replies.handles)

    def _deliver(
        self,
        task: Task,
        releases: Sequence[Release],
        shared: Mapping[str, Tensor],
        own: Mapping[str, Tensor],
        held: Mapping[str, Held] = MappingProxyType({}),
        protocol: bool = False,
    ) -> Replies:
        """Send what was checked and charged, and gather the replies.

        An exchange of a secure sum (``protocol``) counts its own drop-outs and is one line of the transcript in all.
        """
        federation = self.federation
        federation._calls += 1
        system = federation.noise == "system"
        key_of_ask = SystemDraws().bits(1)[0] if system else federation._key(_ASKS)
        federation.serial += 1
        request = Request(
            run=federation.run,
            serial=federation.serial,
            task=task.name,
            ids=self.ids,
            part=self.part,
            labels=federation.labels or self.part == "test",
            purpose=federation.purpose,
            key=int(key_of_ask),
            wanted=tuple(map(Wanted.of, releases)),
            shared=shared,
            each=own,
            held={name: one.handle for name, one in held.items()},
        )
        shapes = None if protocol else self._shapes(task, releases, shared, own, held)
        if shapes is None and not len(self) and any(one.noise is not None for one in releases) and not protocol:
            raise ValueError(
                f"nobody was drawn for {task.name}, and its noise cannot be released because the task does not run on "
                "rows of zeros, which would give its shape; make it run without what earlier tasks keep"
            )
        gathered = Gathered(self, request, releases, shapes)
        record = Record(self, request, (protects(releases) or not releases) and not protocol)
        if shapes is not None and not len(self):
            roster = federation.roster
            gathered.would_be(dry_sent(task, roster.schema, roster.bound[0], self._dry(task, shared, own, held)) or {})
        if len(self):
            for reply in federation.runtime.deliver(request):
                if gathered.add(reply):
                    record.add(releases, reply)
        answered, reasons = gathered.close()
        names = {row: federation.roster.name(int(self.positions[row])) for row in reasons}
        failures = [Failure(names[row], task.name, federation.round, reasons[row]) for row in sorted(reasons)]
        federation.failures.extend(failures)
        count = len(answered)
        if not protocol and (count < federation.quorum * len(self) or (count == 0 and len(self))):
            examples = "\n  ".join(str(failure) for failure in failures[:3])
            if record.private:  # neither how many there are nor why some fail is anybody's business
                raise QuorumError(
                    f"fewer clients answered {task.name} in round {federation.round} than the quorum of "
                    f"{federation.quorum:.0%}; it was charged, because some did answer",
                    failures,
                )
            raise QuorumError(
                f"only {count} of {len(self)} clients answered {task.name} in round {federation.round}; the quorum is "
                f"{federation.quorum:.0%}. The first failures:\n  {examples}",
                failures,
            )
        released = gathered.finish(answered, SystemDraws() if system else Draws(key(key_of_ask, -1)))
        if not protocol:
            record.close(task, releases, released)
        handles = {
            name: Held(f"{request.serial}.{name}", name, shapes[place].get(name) if shapes else None)
            for place, release in enumerate(releases)
            if isinstance(release, Stays)
            for name in release.names
        }
        return Replies(released, answered, failures, handles)

    def _shapes(
        self,
        task: Task,
        releases: Sequence[Release],
        shared: Mapping[str, Tensor],
        own: Mapping[str, Tensor],
        held: Mapping[str, Held],
    ) -> list[Shapes] | None:
        """What each client is to send, found by a dry run of the task, once for asks alike.

        Shards in this process need none, because they run the same code; unless nobody was drawn, so that the shape of
        the noise is to be known.
        """
        program, roster = self.federation.runtime.program, self.federation.roster
        if (program.open and len(self)) or any(one.shape is None for one in held.values()):
            return None
        inputs = self._dry(task, shared, own, held)
        kind = (task.name, *map(Wanted.of, releases), *((name, value.shape) for name, value in inputs.items()))
        if kind not in program.shapes:
            program.shapes[kind] = dry_run(task, releases, roster.schema, roster.bound[0], inputs)
        return program.shapes[kind]

    def _dry(
        self, task: Task, shared: Mapping[str, Tensor], own: Mapping[str, Tensor], held: Mapping[str, Held]
    ) -> dict[str, Tensor]:
        """Inputs for a dry run, as one client would get them."""
        inputs = dict(shared)
        inputs |= {name: value[0] if len(value) else value.new_zeros(value.shape[1:]) for name, value in own.items()}
        inputs |= {name: torch.zeros(one.shape or ()) for name, one in held.items()}
        derived = task.derived(self.federation.roster, torch.arange(1))
        return inputs | {name: value[0] for name, value in derived.items()}

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
        noise = None if release.noise is None else str(release.noise)
        unit: str | None = None if noise is None else release.unit
        clip: float | None = getattr(release, "clip", None)
        local = isinstance(release, Each)
        if isinstance(release.cost, LocalCost):
            local = True
            noise, unit, clip = release.cost.noise, "point", release.cost.clip
        note = "simulation only" if self.federation.simulation_only else None
        if noise is not None and note is None and self.federation.noise == "seeded":
            note = "seeded noise: protects nobody outside a simulation"
        seen = "individual" if isinstance(release, Each) else "mean" if isinstance(release, Mean) else "sum"
        seen_as = f"secure {seen}" if getattr(release, "secure", False) else seen
        trust = None if noise is None else "nobody" if local else self.federation.trust
        entry = Entry(task.name, name, shape, seen_as, unit, clip, noise, str(self.sampling), note, trust)
        self.federation.transcript.add(entry, self.federation.round, clients, size)

    def _checked(
        self, task: Task, inputs: Mapping[str, Input]
    ) -> tuple[dict[str, Tensor], dict[str, Tensor], dict[str, Held]]:
        if not isinstance(task, Task):
            raise TypeError(f"ask takes a function marked with @task, but got {task!r}")
        task.check_inputs(set(inputs))
        shared: dict[str, Tensor] = {}
        own: dict[str, Tensor] = {}
        held: dict[str, Held] = {}
        for name, value in inputs.items():
            if isinstance(value, PerClient):
                rows = value.values.shape[0] if value.values.ndim else None
                if rows != len(self):
                    raise ValueError(f"{task.name}: each({name}) has {rows} rows for a cohort of {len(self)} clients")
                own[name] = value.values.detach()
            elif isinstance(value, Held):
                held[name] = value
            elif isinstance(value, Tensor):
                shared[name] = value.detach()
            elif isinstance(value, bool | int | float):
                shared[name] = torch.tensor(value)
            else:
                raise TypeError(
                    f"{task.name}: the input {name!r} is a {type(value).__name__}; tasks take tensors and numbers only"
                )
        return shared, own, held
