"""The federation: the clients, how to reach them, and the one primitive, ``Cohort.ask``."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from unalike.core.client import Clients
from unalike.core.draws import Draws, key
from unalike.core.kept import KeptStore
from unalike.core.release import Each, Mean, Release, Sum
from unalike.core.request import Batch, Failure, Request, Runtime, alike
from unalike.core.secure import check_secure, secure_sum
from unalike.core.task import Task
from unalike.core.transcript import Entry, Traffic, Transcript
from unalike.privacy.account import BARE
from unalike.privacy.dpsgd import LocalCost
from unalike.privacy.ledger import Budget, Charge, Ledger
from unalike.privacy.sampling import Everyone, FixedSize, Local, Poisson, Sampling

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
class Replies(Mapping[str, Tensor]):
    """What an ask released, by name, and which clients did not answer.

    ``Each`` arrays have one row for each client in ``answered`` (positions in the cohort, ascending).
    """

    released: Mapping[str, Tensor]
    answered: Tensor
    failures: list[Failure]

    def __getitem__(self, name: str) -> Tensor:
        if name not in self.released:
            known = ", ".join(self.released) or "none"
            raise KeyError(f"no array {name!r} was released by this ask; there are: {known}")
        return self.released[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.released)

    def __len__(self) -> int:
        return len(self.released)


@dataclass
class Federation:
    """Clients, a seed, a runtime, and the record of all that was asked of them.

    - ``quorum``: the share of a cohort that must answer; below it an ask stops with a ``QuorumError``.
    - ``budget``: refuses an ask before it is sent if its release would spend more.
    """

    clients: Clients
    runtime: Runtime
    seed: int = 0
    quorum: float = 0.5
    budget: Budget | None = None
    ledger: Ledger = field(default_factory=Ledger)
    transcript: Transcript = field(default_factory=Transcript)
    traffic: Traffic = field(default_factory=Traffic)
    kept: KeptStore = field(default_factory=KeptStore)
    round: int = 0
    metrics: dict[str, float] = field(default_factory=dict)  # of the present round, e.g. the loss a method released
    failures: list[Failure] = field(default_factory=list)  # of the present round
    simulation_only: bool = False
    serving: bool = False  # no training: clients ask for models, and what a release calls simulation_only stays there
    journal: Callable[[Ledger], None] | None = None  # told what an ask costs before it is sent, to save it
    shapes: dict[str, dict[str, torch.Size]] = field(default_factory=dict)  # of arrays that were released, by task
    _calls: int = field(default=0, init=False)  # asks and samples so far in this round

    def __post_init__(self) -> None:
        if len(self.clients) == 0:
            raise ValueError("a federation needs at least one client; none was given")
        empty = (self.clients.size == 0).nonzero().flatten()
        if len(empty):
            names = ", ".join(self.clients.name(i) for i in empty[:5].tolist())
            raise ValueError(f"{len(empty)} clients have no samples ({names}, ...); leave them out of the federation")
        self._labeled = self.clients.labeled.nonzero().flatten()

    def begin_round(self, number: int) -> Federation:
        """Start round ``number``: draws depend on it, and the round's metrics and failures are fresh."""
        self.round, self._calls = number, 0
        self.ledger.close_cohorts()
        self.metrics, self.failures = {}, []
        return self

    def everyone(self) -> Cohort:
        """All clients."""
        return self.cohort(torch.arange(len(self.clients)))

    def cohort(self, positions: Tensor | Sequence[int]) -> Cohort:
        """The clients at these positions, chosen by the caller (so no privacy amplification by sampling)."""
        chosen = torch.as_tensor(positions, dtype=torch.int64)
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
            pool = self._labeled if labeled else (~self.clients.labeled).nonzero().flatten()
        total = len(self.clients) if pool is None else len(pool)
        if total == 0:
            raise ValueError(f"no client {'has' if labeled else 'lacks'} labels, so none can be sampled")
        wanted = count if isinstance(count, int) else count * total
        if not 0 < wanted <= total:
            raise ValueError(f"cannot sample {count} of {total} clients; give 1..{total}, or a share above 0 up to 1.0")
        random = self._generator()
        if poisson:
            size = int(random.binomial(total, wanted / total))
            sampling: Sampling = Poisson(wanted / total)
        else:
            size = max(1, round(wanted))
            sampling = FixedSize(size, total)
        chosen = torch.from_numpy(random.choice(total, size, replace=False).astype(np.int64))
        positions = chosen if pool is None else pool[chosen]
        return Cohort(self, positions, sampling, wanted if poisson else size, self._cohort_name())

    def aside(self, clients: Clients | None = None) -> Federation:
        """A federation to measure with in simulation: it reads what clients kept but never changes it, and what it asks
        is charged to no ledger and marked as simulation-only in a transcript of its own.
        """
        return Federation(
            self.clients if clients is None else clients,
            self.runtime,
            self.seed + 1,
            kept=KeptStore(self.kept),
            round=self.round,
            simulation_only=True,
        )

    def report(self, **metrics: Tensor | float) -> None:
        """Numbers of this round for progress and metrics; take them from releases, so that they are accounted for."""
        self.metrics.update({name: float(value) for name, value in metrics.items()})

    def draws(self) -> Draws:
        """Fresh server-side draws, a function of (seed, round, call)."""
        self._calls += 1
        return Draws(key(self.seed, _ASKS, self.round, self._calls, -1))

    def _generator(self) -> np.random.Generator:
        self._calls += 1
        seed = int(key(self.seed, _COHORTS, self.round, self._calls)) & ((1 << 64) - 1)
        return np.random.Generator(np.random.Philox(seed))

    def _cohort_name(self) -> str:
        return f"{self.round}.{self._calls}"

    def _next_key(self) -> Tensor:
        self._calls += 1
        return key(self.seed, _ASKS, self.round, self._calls)


@dataclass(frozen=True)
class Cohort:
    """Some clients of a federation, and how they were chosen (the privacy of a release depends on it)."""

    federation: Federation
    positions: Tensor  # [C] in the federation's clients
    sampling: Sampling
    expected: float  # how many clients were to be expected: what a noisy mean divides by, as no client changes it
    name: str  # of this sample, for the ledger: asks to one cohort are about one and the same sample

    def __len__(self) -> int:
        return len(self.positions)

    @property
    def sizes(self) -> Tensor:
        """[C] how many samples each client has."""
        return self.federation.clients.size[self.positions]

    def only(self, rows: Tensor) -> Cohort:
        """Some of the cohort, by position in it: for example those who answered."""
        return Cohort(self.federation, self.positions[rows], self.sampling, self.expected, self.name)

    def ask(
        self, task: Task, /, into: Release | Sequence[Release] | None = None, **inputs: Tensor | PerClient | float
    ) -> Replies:
        """Have every client of the cohort run ``task`` on ``inputs``; release what ``into`` says.

        ``into`` is a release or several; None shows the server every client's arrays (``Each``), an empty list nothing.

        Everything is checked before anything is sent: names, shapes, and that the privacy budget allows the release.
        """
        federation = self.federation
        if self.name.split(".")[0] != str(federation.round):
            raise ValueError(f"this cohort is of an earlier round than {federation.round}; sample one in every round")
        releases: list[Release] = [Each()] if into is None else [into] if not isinstance(into, Sequence) else list(into)
        shared, per_client = self._checked(task, inputs)
        secure = check_secure(self, releases)
        if not federation.simulation_only:
            self._charge([release for release in releases if not _stays(federation, release)])
        replies = self._deliver(task, releases, shared, per_client)
        if secure is None:
            return replies
        shape = federation.shapes[task.name][secure.name]
        summed = secure_sum(self.only(replies.answered), task, secure, shape)
        released = {**replies.released, secure.name: summed.value}
        return Replies(released, replies.answered[summed.survivors], [*replies.failures, *summed.failures])

    def _deliver(
        self,
        task: Task,
        releases: Sequence[Release],
        shared: Mapping[str, Tensor],
        per_client: Mapping[str, Tensor],
        protocol: bool = False,
    ) -> Replies:
        """Send what was checked and charged, and gather the replies.

        An exchange of a secure sum (``protocol``) counts its own drop-outs and is one line of the transcript in all.
        """
        federation = self.federation
        key_of_ask = federation._next_key()
        request = Request(
            task,
            federation.clients,
            self.positions,
            shared,
            per_client,
            releases,
            key_of_ask,
            federation.kept,
            measuring=federation.simulation_only,
        )
        shapes = federation.shapes.setdefault(task.name, {})
        collectors = [release.collect(shapes) for release in releases]
        answered: list[Tensor] = []
        failures: list[Failure] = []
        record = _Record(self, request)
        for batch in _honest(alike(federation.runtime.deliver(request)), releases) if len(self) else ():
            for row, reason in batch.failed.items():
                name = federation.clients.name(int(self.positions[row]))
                failures.append(Failure(name, task.name, federation.round, reason))
            if len(batch.rows) == 0:
                continue
            answered.append(batch.rows)
            for collector, release, arrays in zip(collectors, releases, batch.arrays, strict=True):
                collector.add(batch.rows, arrays)
                record.add(release, arrays)
        if not protocol:
            record.close()
        federation.failures.extend(failures)
        count = sum(map(len, answered))
        if not protocol and (count < federation.quorum * len(self) or (count == 0 and len(self))):
            examples = "\n  ".join(str(failure) for failure in failures[:3])
            raise QuorumError(
                f"only {count} of {len(self)} clients answered {task.name} in round {federation.round}; the quorum is "
                f"{federation.quorum:.0%}. The first failures:\n  {examples}",
                failures,
            )
        draws = Draws(key(key_of_ask, -1))
        released: dict[str, Tensor] = {}
        for collector in collectors:
            released.update(collector.finish(count, self.expected, self.sampling, draws))
        rows = torch.sort(torch.cat(answered)).values if answered else torch.zeros(0, dtype=torch.int64)
        return Replies(released, rows, failures)

    def _charge(self, releases: Sequence[Release]) -> None:
        """Enter the ask in the ledger, unless the budget forbids it; a release without noise is non-private on purpose.

        The events of one ask, and of several asks to the same cohort, are about the same sample of clients.
        """
        charges: list[Charge] = []
        ids = tuple(self.federation.clients.ids[self.positions].tolist())
        paid: list[LocalCost] = []  # several arrays that one private training made cost what the training cost
        for release in releases:
            if release.cost is not None:
                charges += [] if release.cost in paid else release.cost.charges(ids)
                paid.append(release.cost)
            elif release.noise is None:
                charges.append(Charge(BARE))
            elif isinstance(release, Each):  # noise made at the client costs that client alone
                charges.append(Charge(release.noise.event(), release.unit, Local(), clients=ids))
            else:
                charges.append(Charge(release.noise.event(), release.unit, self.sampling, self.name))
        self.federation.ledger.charge(charges, self.federation.budget)
        if self.federation.journal is not None:
            self.federation.journal(self.federation.ledger)

    def write(self, task: Task, release: Release, name: str, shape: tuple[int, ...], clients: int, size: int) -> None:
        """Enter one array of an ask in the transcript."""
        noise = None if release.noise is None else str(release.noise)
        unit: str | None = None if noise is None else release.unit
        clip: float | None = getattr(release, "clip", None)
        if release.cost is not None:
            noise, unit, clip = release.cost.noise, "point", release.cost.clip
        note = "simulation only" if self.federation.simulation_only or _stays(self.federation, release) else None
        if noise is not None and note is None:
            note = "seeded noise: protects nobody outside a simulation"
        seen = "individual" if isinstance(release, Each) else "mean" if isinstance(release, Mean) else "sum"
        seen_as = f"secure {seen}" if getattr(release, "secure", False) else seen
        number, how = self.federation.round, str(self.sampling)
        entry = Entry(number, task.name, name, shape, clients, size, seen_as, unit, clip, noise, how, note)
        self.federation.transcript.add(entry)

    def _checked(
        self, task: Task, inputs: Mapping[str, Tensor | PerClient | float]
    ) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        if not isinstance(task, Task):
            raise TypeError(f"ask takes a function marked with @task, but got {task!r}")
        task.check_inputs(set(inputs))
        shared: dict[str, Tensor] = {}
        per_client: dict[str, Tensor] = {}
        for name, value in inputs.items():
            if isinstance(value, PerClient):
                rows = value.values.shape[0] if value.values.ndim else None
                if rows != len(self):
                    raise ValueError(f"{task.name}: each({name}) has {rows} rows for a cohort of {len(self)} clients")
                per_client[name] = value.values.detach()
            elif isinstance(value, Tensor):
                shared[name] = value.detach()
            elif isinstance(value, bool | int | float):
                shared[name] = torch.tensor(value)
            else:
                raise TypeError(
                    f"{task.name}: the input {name!r} is a {type(value).__name__}; tasks take tensors and numbers only"
                )
        return shared, per_client


def _stays(federation: Federation, release: Release) -> bool:
    """Do its arrays stay at the client? Not in training, where the server could use what it is shown."""
    return federation.serving and isinstance(release, Each) and release.simulation_only


def _honest(batches: Iterable[Batch], releases: Sequence[Release]) -> Iterator[Batch]:
    """The batches without replies longer than their clip: who sends one did not run the client's half of the release.

    The noise was made for that bound, so such a reply must not reach the sum; it is a failure of its client.
    """
    for batch in batches:
        sound, reasons = torch.ones(len(batch.rows), dtype=torch.bool), dict(batch.failed)
        for release, arrays in zip(releases, batch.arrays, strict=False):
            if not isinstance(release, Sum) or release.clip is None or release.name not in arrays:
                continue
            rows = arrays[release.name].reshape(len(batch.rows), -1)
            length = torch.linalg.vector_norm(rows, ord=1 if release.norm == "l1" else 2, dim=1, dtype=torch.float64)
            too_long = ~(length <= release.clip * (1 + 1e-5))  # NaN too: it has no length
            for i in (too_long & sound).nonzero().flatten().tolist():
                reasons[int(batch.rows[i])] = (
                    f"sent {release.name!r} of norm {float(length[i]):.4g}, beyond its clip {release.clip:g}; left out"
                )
            sound &= ~too_long
        if bool(sound.all()):
            yield batch
        else:
            kept = [{name: value[sound] for name, value in arrays.items()} for arrays in batch.arrays]
            yield Batch(batch.rows[sound], kept, reasons)


class _Record:
    """Meters bytes and writes the transcript while replies stream in."""

    def __init__(self, cohort: Cohort, request: Request) -> None:
        federation = self.federation = cohort.federation
        self.cohort, self.request = cohort, request
        self.arrays: dict[tuple[int, str], tuple[Release, tuple[int, ...], int, int]] = {}
        count = len(request.positions)
        for name, value in request.shared.items():
            federation.traffic.down[name] += value.nbytes * count
        for name, value in request.each.items():
            federation.traffic.down[name] += value[0].nbytes * count if count else 0

    def add(self, release: Release, arrays: Mapping[str, Tensor]) -> None:
        for name, value in arrays.items():
            _, _, clients, size = self.arrays.get((id(release), name), (release, (), 0, 0))
            size += value.nbytes
            if not _stays(self.federation, release):
                self.federation.traffic.up[name] += value.nbytes
            self.arrays[id(release), name] = (release, tuple(value.shape[1:]), clients + len(value), size)

    def close(self) -> None:
        for (_, name), (release, shape, clients, size) in self.arrays.items():
            if not getattr(release, "secure", False):  # a secure sum writes its own line when it is opened
                self.cohort.write(self.request.task, release, name, shape, clients, size)
