"""How many clients to a block, and how many threads: measured once for a kind of work, then remembered on this machine.

Remembered, because the block changes the last bits of a sum: two runs with equal settings must be identical.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import json
import math
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import torch
from torch import Tensor

from unalike.runtime.shard.work import Work

CANDIDATES = (1, 8, 32, 128, 512)
PATIENCE = 1.0  # seconds of rehearsal before the best so far is taken
SMALL = 256  # numbers in one sample: on less than a small image, threads wait for each other longer than they work
FEW = 16  # clients: so few small samples are one block, without a measurement


@dataclass(frozen=True)
class Plan:
    """Clients per block, and PyTorch threads (None: as they are).

    overhead: what a block costs besides its clients, in clients: so much padding is cheaper than one more block.
    workers: how many blocks are computed at a time; with more than one, each has one thread.
    """

    block: int
    overhead: float = 8.0
    threads: int | None = None
    workers: int = 1

    @classmethod
    def of(cls, work: Work, threads: int | None, block: int) -> Plan:
        """Threads as workers, which scale better than threads inside an operation and do not wait for each other.

        But only for tasks that are pure, and not where a step is so short that they would queue for the interpreter.
        """
        small = work.clients.x[0].numel() <= SMALL
        if work.pure and not small:
            return cls(block, threads=1, workers=threads or torch.get_num_threads())
        return cls(block, threads=threads or (1 if small else None))

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
    """Plans by kind of work; read from and written to one small JSON file."""

    plans: dict[str, Plan] = field(default_factory=dict)

    def plan(self, work: Work, rows: Tensor, threads: int | None, rehearse: Rehearse) -> Plan:
        one = Plan.of(work, threads, block=1)
        if len(rows) <= one.workers:
            return one
        if len(rows) <= FEW and one.workers == 1:
            return replace(one, block=len(rows))
        kind = _kind(work, rows, threads)
        if kind not in self.plans:
            self.plans[kind] = _recall(kind) or _remember(kind, _measure(rows, one, rehearse))
        return self.plans[kind]


def _kind(work: Work, rows: Tensor, threads: int | None) -> str:
    """Work that should run alike: same task and inputs, sizes and cohort alike to a power of two."""

    def magnitude(number: int) -> int:
        return max(1, number).bit_length()

    inputs = {**work.shared, **{name: value[0] for name, value in work.each.items()}}
    owner = work.task.owner
    settings = repr(owner) if owner is not None else ""
    parts = [
        work.task.name,
        hashlib.sha256(settings.encode()).hexdigest()[:16],
        tuple(work.clients.x.shape[1:]),
        magnitude(int(work.clients.size[work.positions[rows]].max())),
        magnitude(len(rows)),
        sorted((name, tuple(value.shape)) for name, value in inputs.items()),
        [type(release).__name__ for release in work.releases],
        threads,
        torch.get_num_threads(),
        os.cpu_count(),
        torch.__version__,
    ]
    return json.dumps(parts, default=str)


def _measure(rows: Tensor, one: Plan, rehearse: Rehearse) -> Plan:
    """Rehearse growing blocks of one middle-sized client's copies (nothing is kept or sent); take the fastest."""
    limit = len(rows)
    middle = rows[limit // 2]  # rows come sorted by size; copies, so that only the block's size differs
    # a single thread's own time does not show what other programs do
    clock = time.thread_time if one.workers == (one.threads or torch.get_num_threads()) == 1 else time.perf_counter

    def seconds(block: int) -> float:
        """Of a block, when every worker has one."""
        plan = replace(one, block=block)

        def timed(turns: int) -> float:
            start = clock()
            rehearse(plan, middle.expand(turns * block * one.workers))
            return (clock() - start) / turns

        with plan.threads_set():
            first = timed(1)  # pays for lazy set-up
            turns = max(1, 8 // block) if first < PATIENCE / 20 else 1  # handing out few short blocks takes longest
            taken = [timed(turns)]
            while len(taken) < 7 and turns * sum(taken) < PATIENCE / 3:
                taken.append(timed(turns))
            return min(taken)

    most = math.ceil(limit / one.workers)
    candidates = sorted({min(size, most) for size in CANDIDATES})
    begin = time.perf_counter()
    taken: dict[int, float] = {}
    for block in candidates:
        taken[block] = seconds(block)
        slower = taken[block] / block > 1.3 * min(time / size for size, time in taken.items())
        if slower or (len(taken) > 1 and time.perf_counter() - begin > 2 * PATIENCE):
            break
    fastest = min(time / size for size, time in taken.items())
    best = max(block for block in taken if taken[block] / block <= 1.03 * fastest)  # of equals that with least overhead
    if best == 1:
        return one  # no vectorisation at all: large models and batches prefer it
    turns = math.ceil(limit / (one.workers * best))  # of every worker, with blocks alike
    largest = max(taken)
    overhead = Plan.overhead if largest == 2 else _overhead(2, seconds(2), largest, taken[largest])
    return replace(one, block=math.ceil(limit / (one.workers * turns)), overhead=overhead)


def _overhead(few: int, few_seconds: float, many: int, many_seconds: float) -> float:
    """The fixed cost of a block, in clients: where the line through two blocks' times begins."""
    per_client = max(1e-9, (many_seconds - few_seconds) / (many - few))
    return min(100.0, max(0.0, few_seconds / per_client - few))


def _recall(kind: str) -> Plan | None:
    try:
        stored = json.loads((cache_folder() / "tuning.json").read_text()).get(kind)
        if stored is None:
            return None
        return Plan(int(stored["block"]), float(stored["overhead"]), stored["threads"], int(stored["workers"]))
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None  # no cache yet, or one that cannot be read: measure


def _remember(kind: str, plan: Plan) -> Plan:
    file = cache_folder() / "tuning.json"
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        try:
            plans = json.loads(file.read_text())
        except (OSError, ValueError):
            plans = {}
        plans[kind] = asdict(plan)
        fresh = file.with_suffix(f".{os.getpid()}")
        fresh.write_text(json.dumps(plans))
        fresh.replace(file)
    except OSError:
        pass  # a home that cannot be written only costs the measurement next time
    return plan
