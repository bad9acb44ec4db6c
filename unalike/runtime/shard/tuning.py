"""How many clients to a block, how many workers, vmap or loop: measured for a kind of work, then remembered.

The rule:

- A plan is measured before the first client of its kind of work is asked. Candidates take turns, several times, and
  the best time of each counts; the clock is this program's own CPU time. So another program cannot spoil the choice.
  Only the choice between one worker and several is by the clock on the wall, less the time that other programs took.
- Cohorts of 65 to 128 clients, say, have one plan. It is measured for 128, so that it does not matter which of them
  came first, and each of them is cut into equal blocks.
- Plans are remembered on this machine (``tuning.json`` in ``cache_folder``), because the block changes the last bits
  of a sum: two runs with equal settings are identical.
- A remembered plan is checked once in a process, before it is used: if its block takes more than twice or less
  than half the CPU time that was measured, the candidates are measured again. The plan stays unless another is 10 %
  faster.
- Inside a run a plan never changes. The run folder holds the plans that the run used, and a run that resumes uses
  them unchecked.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import json
import math
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from unalike.runtime.shard.work import Work

CANDIDATES = (1, 2, 8, 32, 128, 512)  # clients in a block; 2 is for the line through two blocks' times (`_overhead`)
PATIENCE = 1.5  # CPU seconds of each worker, after which no further candidate or turn begins
TURNS = 7  # in which all candidates are measured, if there is time
FAR = 2.0  # times slower or faster than remembered: measure again; a crowded cache alone costs up to 1.8
WORTH = 1.4  # times faster must several workers be than one: in a round there is more to wait for than in a rehearsal
CLOSE = 1.1  # times the fastest: not worth a change of plan
FORMAT = 2  # of the file, and of how plans are chosen
MOST = 1000  # plans in the file; the oldest go first
SMALL = 256  # numbers in one sample: on less than a small image, threads wait for each other longer than they work
FEW = 16  # clients: so few small samples are one block, without a measurement


@dataclass(frozen=True)
class Plan:
    """Clients per block, and PyTorch threads (None: as they are).

    overhead: what a block costs besides its clients, in clients: so much padding is cheaper than one more block.
    workers: how many blocks are computed at a time; with more than one, each has one thread.
    seconds: CPU seconds per client, as measured; 0 if they were not.
    """

    block: int
    overhead: float = 8.0
    threads: int | None = None
    workers: int = 1
    seconds: float = 0.0

    @classmethod
    def of(cls, work: Work, threads: int | None, block: int) -> Plan:
        """Threads as workers, which scale better than threads inside an operation and do not wait for each other.

        But only for tasks that are pure, and not where a step is so short that they would queue for the interpreter.
        """
        small = work.clients.x[0].numel() <= SMALL
        if work.pure and not small:
            return cls(block, threads=1, workers=threads or torch.get_num_threads())
        return cls(block, threads=threads or (1 if small else None))

    def evenly(self, count: int) -> Plan:
        """The plan with equal blocks, no larger than these, for ``count`` clients, equally many for each worker."""
        turns = math.ceil(count / (self.workers * self.block))
        return replace(self, block=math.ceil(count / (self.workers * turns)))

    @contextlib.contextmanager
    def threads_set(self) -> Iterator[None]:
        before = torch.get_num_threads()
        if self.threads is None or self.threads == before:
            yield
            return
        torch.set_num_threads(self.threads)
        try:
            yield
        finally:
            torch.set_num_threads(before)


Rehearse = Callable[[Plan, Tensor], None]  # runs the rows by the plan; nothing is kept or sent


def cache_folder() -> Path:
    """Where Unalike remembers things between runs: ``UNALIKE_CACHE``, or a folder in the user's cache."""
    return Path(os.environ.get("UNALIKE_CACHE") or Path.home() / ".cache" / "unalike")


@functools.cache
def keep_freed_memory() -> None:
    """Have the C library keep freed blocks of up to 256 MB for the next step instead of returning them at once.

    A step's temporaries are a few MB each; fetching them from the kernel anew every time cost a fifth of a small
    model's step. Without glibc nothing changes.
    """
    with contextlib.suppress(OSError, AttributeError):
        libc = ctypes.CDLL(None)
        m_trim_threshold, m_mmap_threshold, size = -1, -3, 1 << 28
        libc.mallopt(m_mmap_threshold, size)
        libc.mallopt(m_trim_threshold, size)


@dataclass
class Tuner:
    """The plans of one run, by kind of work."""

    plans: dict[str, Plan] = field(default_factory=dict)

    def plan(self, work: Work, rows: Tensor, threads: int | None, rehearse: Rehearse) -> Plan:
        one = Plan.of(work, threads, block=1)
        if len(rows) <= one.workers:
            return one
        # in a block, batches of DP-SGD are padded to several times their size: that is worth it for small samples only
        padded = any(release.cost is not None for release in work.releases) and work.clients.x[0].numel() > SMALL
        if len(rows) <= FEW and one.workers == 1 and not padded:
            return replace(one, block=len(rows))
        kind = _kind(work, rows, threads)
        if kind not in self.plans:
            self.plans[kind] = _find(kind, rows, one, rehearse)
        return self.plans[kind].evenly(len(rows))


def _magnitude(number: int) -> int:
    """The power of two that is as large, or the next above it."""
    return max(0, number - 1).bit_length()


def _kind(work: Work, rows: Tensor, threads: int | None) -> str:
    """Work that should run alike: same task and inputs, sizes and cohort alike to a power of two."""
    inputs = {**work.shared, **{name: value[0] for name, value in work.each.items()}}
    owner = work.task.owner
    settings = repr(owner) if owner is not None else ""
    parts = [
        work.task.name,
        hashlib.sha256(settings.encode()).hexdigest()[:16],
        tuple(work.clients.x.shape[1:]),
        _magnitude(int(work.clients.size[work.positions[rows]].max())),
        _magnitude(len(rows)),
        sorted((name, tuple(value.shape)) for name, value in inputs.items()),
        [type(release).__name__ for release in work.releases],
        threads,
    ]
    return json.dumps(parts, default=str)


_checked: set[tuple[Path, str]] = set()  # plans that this process has measured or checked


def _find(kind: str, rows: Tensor, one: Plan, rehearse: Rehearse) -> Plan:
    """Recall the plan, or measure and remember it."""
    # the folder of a run leaves the machine out, because a run that resumes elsewhere goes on with its plans
    here = json.dumps([torch.get_num_threads(), os.cpu_count(), torch.__version__, kind])
    known = _read().get(here)
    checked = (cache_folder(), here) in _checked
    _checked.add((cache_folder(), here))
    trial = Trial(rows[len(rows) // 2], rehearse)  # rows come sorted by size: a client of middle size
    most = 1 << _magnitude(len(rows))
    if known is None:
        return _remember(here, _measure(most, one, trial))
    if checked or trial.confirms(known):
        return known
    return _remember(here, _measure(most, one, trial, known), instead_of=known)


def _clock(plan: Plan) -> Callable[[], float]:
    """CPU time, because it stands still while another program has the processor.

    With one worker it is this thread's. Threads inside an operation share its work evenly and sleep while they wait, so
    this one's time is what all of them take. With several workers it is the whole process's: all are busy until the
    end, so alone on the machine the wall clock would show this sum divided by their number, which is the same for every
    candidate. The time in which a worker sleeps because another has the interpreter is missing, but what it costs to
    hand the interpreter over is there, and grows with it.
    """
    return time.thread_time if plan.workers == 1 else time.process_time


def _clients(block: int, expected: float) -> int:
    """How many a worker rehearses: of few that are short several blocks, because handing them out takes longest."""
    return block * (max(1, 8 // block) if block * expected < PATIENCE / 40 else 1)


@dataclass
class Trial:
    """Rehearses blocks of copies of one client, so that only the block differs; nothing is kept or sent."""

    client: Tensor
    rehearse: Rehearse
    best: dict[int, float] = field(default_factory=dict)  # block -> CPU seconds per client
    spent: float = 0.0  # CPU seconds of each worker, in turns; by the best times, so that a disturbance ends nothing

    def seconds(self, plan: Plan, expected: float) -> float:
        """CPU seconds per client, when every worker has as many."""
        clients = plan.workers * _clients(plan.block, expected)
        clock = _clock(plan)
        with plan.threads_set():
            begin = clock()
            self.rehearse(plan, self.client.expand(clients))
            return max(1e-9, (clock() - begin) / clients)

    def elapsed(self, plan: Plan, expected: float) -> float:
        """Seconds per client by the clock on the wall, less those in which other programs had the processors."""
        clients = plan.workers * _clients(plan.block, expected)
        with plan.threads_set():
            begin, waited = time.perf_counter(), _waited()
            self.rehearse(plan, self.client.expand(clients))
            taken = time.perf_counter() - begin
            if plan.workers <= _processors():  # else workers also wait for each other
                taken -= (_waited() - waited) / plan.workers
        return taken / clients

    def confirms(self, plan: Plan) -> bool:
        """Does the plan run about as fast as it says? A time that is too long may be a disturbance: look again."""
        taken = math.inf
        for _ in range(TURNS):
            taken = min(taken, self.seconds(plan, plan.seconds))
            if taken <= FAR * plan.seconds:
                break
        return plan.seconds / FAR <= taken <= FAR * plan.seconds

    def add(self, plan: Plan) -> None:
        """One more candidate; its first call pays for lazy set-up."""
        self.best[plan.block] = self.seconds(plan, math.inf)

    def turn(self, one: Plan) -> dict[int, float]:
        """Measure every candidate once; a slow moment hits neighbours alike."""
        now = {block: self.seconds(replace(one, block=block), best) for block, best in self.best.items()}
        self.best = {block: min(best, now[block]) for block, best in self.best.items()}
        self.spent += sum(best * _clients(block, best) for block, best in self.best.items())
        return now


def _measure(limit: int, one: Plan, trial: Trial, known: Plan | None = None) -> Plan:
    """Race growing blocks and take the fastest; ``known`` takes part, and stays if it is close to it."""

    def lags(block: int) -> bool:
        now = trial.turn(one)
        return now[block] > 1.3 * min(seconds for smaller, seconds in now.items() if smaller <= block)

    if known:
        trial.add(known)
    for block in sorted({replace(one, block=size).evenly(limit).block for size in CANDIDATES}):
        trial.add(replace(one, block=block))
        # a block of 2 says nothing about larger ones; twice, because once may be a disturbance
        if (lags(block) and block > 2 and lags(block)) or trial.spent > PATIENCE:
            break
    for _ in range(TURNS):
        if trial.spent > PATIENCE:
            break
        trial.turn(one)
    return _alone_if_faster(_fastest(one, trial, known), trial)


def _alone_if_faster(plan: Plan, trial: Trial) -> Plan:
    """The plan, or with one worker instead of several, if these would mostly wait for the interpreter.

    A worker that waits for it sleeps, so CPU time does not tell. Blocks that take long are not rehearsed once more.
    """
    alone = replace(plan, workers=1)
    each = plan.seconds * _clients(plan.block, plan.seconds)  # of a worker, in a turn
    if plan.workers == 1 or each > PATIENCE / 2:
        return plan
    best = {plan: math.inf, alone: math.inf}
    for _ in range(max(1, min(3, int(PATIENCE / (2 * each))))):
        best = {one: min(least, trial.elapsed(one, plan.seconds)) for one, least in best.items()}
    return plan if WORTH * best[plan] < best[alone] else replace(alone, seconds=trial.seconds(alone, plan.seconds))


def _processors() -> int:
    """How many this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _waited() -> float:
    """Seconds for which threads of this process were ready to run while something else had the processors."""
    total = 0
    for thread in Path("/proc/self/task").glob("*/schedstat"):  # none where the system does not tell
        with contextlib.suppress(OSError, ValueError, IndexError):
            total += int(thread.read_text().split()[1])
    return total / 1e9


def _fastest(one: Plan, trial: Trial, known: Plan | None) -> Plan:
    taken = trial.best
    fastest = min(taken.values())
    if known and taken[known.block] <= CLOSE * fastest:
        return replace(known, workers=one.workers, threads=one.threads, seconds=taken[known.block])
    if taken[1] <= CLOSE * fastest:
        # no vmap: large models and batches prefer it, and a recording later takes up to a fifth off its time, but
        # little off that of a block (`recording.py`)
        return replace(one, seconds=taken[1])
    best = max(block for block in taken if taken[block] <= 1.03 * fastest)  # of equals that with least overhead
    few, many = min(block for block in taken if block > 1), max(taken)
    overhead = Plan.overhead if few == many else _overhead(few, few * taken[few], many, many * taken[many])
    return replace(one, block=best, overhead=overhead, seconds=taken[best])


def _overhead(few: int, few_seconds: float, many: int, many_seconds: float) -> float:
    """The fixed cost of a block, in clients: where the line through two blocks' times begins."""
    per_client = max(1e-9, (many_seconds - few_seconds) / (many - few))
    return min(100.0, max(0.0, few_seconds / per_client - few))


def _file() -> Path:
    return cache_folder() / "tuning.json"


def _read() -> dict[str, Plan]:
    """The remembered plans; without those that make no sense, and none where the file is damaged or of another kind."""
    try:
        stored = json.loads(_file().read_text(encoding="utf-8"))
        entries = stored["plans"].items() if stored["format"] == FORMAT else ()
        return {kind: plan for kind, entry in entries if (plan := _sound(entry)) is not None}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return {}


def _sound(entry: Any) -> Plan | None:
    try:
        plan = Plan(**entry)
        numbers = (plan.block, plan.workers, 1 if plan.threads is None else plan.threads)
        whole = all(type(number) is int and number >= 1 for number in numbers)
        return plan if whole and 0 <= plan.overhead < math.inf and 0 < plan.seconds < math.inf else None
    except TypeError:
        return None


def _remember(kind: str, plan: Plan, instead_of: Plan | None = None) -> Plan:
    """Write the plan down; what another process has remembered meanwhile is taken instead, so that both run alike."""
    plans = _read()
    if plans.get(kind, instead_of) != instead_of:
        return plans[kind]
    plans.pop(kind, None)
    plans[kind] = plan  # the latest is the last one in the dict
    entries = {kind: asdict(plan) for kind, plan in list(plans.items())[-MOST:]}
    # a folder that cannot be written only costs the measurement next time
    with contextlib.suppress(OSError):
        _file().parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", encoding="utf-8", dir=_file().parent, delete=False) as fresh:
            json.dump({"format": FORMAT, "plans": entries}, fresh)
        try:
            Path(fresh.name).replace(_file())
        except OSError:
            Path(fresh.name).unlink()
    return plan
