"""The in-process simulator: runs a task for a block of clients at once.

On small models nearly all the cost is Python and dispatch, so a task written for one client is vectorised over a block
of clients with ``torch.func.vmap``. A task that cannot be vectorised runs client by client, and that is said once.

Rows and kept state lie on the CPU. A block is moved to the simulator's device and computed there, and its replies are
moved back. Draws are hashes of integers, so they are the same bits on every device. Tasks that work on bytes or Python
values (the exchanges of a secure sum) run on the CPU.
"""

from __future__ import annotations

import functools
import itertools
import os
import threading
import time
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.func import vmap

from unalike.core import outside, wire
from unalike.core.client import Client, Kept
from unalike.core.draws import Draws
from unalike.core.release import Sum
from unalike.core.request import Reply
from unalike.privacy.mechanisms import DrawsLike
from unalike.runtime.shard.kept import HELD, SECRET
from unalike.runtime.shard.recording import Inputs, Recordings
from unalike.runtime.shard.tuning import SMALL, Plan, Tuner, keep_freed_memory
from unalike.runtime.shard.work import Work

Arrays = dict[str, Tensor]
Outputs = tuple[list[dict[str, Tensor]], dict[str, Tensor]]  # what each release lets out, and what is kept
MAX_BLOCK_BYTES = 1 << 28  # of inputs in one block: a larger cohort streams through
MAX_BYTES_AHEAD = 1 << 30  # of inputs in all blocks that workers have at a time
MOST_ON_DEVICE = 1024  # clients in a block on another device than the CPU, where nothing is measured
TOGETHER = 8  # clients that are read together where they are computed one by one


class LoopInstead(UserWarning):
    """A task could not be vectorised and runs client by client."""


@dataclass
class Simulator:
    """Runs tasks for blocks of clients.

    - ``block``: clients per vectorised call (1: no vectorisation); None measures and remembers what is fastest here.
    - ``threads``: as many blocks are computed at a time, or threads work inside an operation (``Plan.of``); None:
      PyTorch's number, but one for small samples.
    - ``device``: where tasks run: "cpu", "cuda", "mps" or another device of PyTorch; "auto" takes the first of cuda,
      mps and cpu that is here. On another device than the CPU one thread works, and ``block=None`` is as many clients
      as fit.
    """

    block: int | None = None
    threads: int | None = None
    device: str = "cpu"
    _device: torch.device = field(init=False)
    _loop: set[str] = field(default_factory=set, init=False)  # tasks that cannot be vectorised
    _tuner: Tuner = field(default_factory=Tuner, init=False)
    _recordings: Recordings = field(default_factory=Recordings, init=False)

    def __post_init__(self) -> None:
        if self.block is not None and self.block < 1:
            raise ValueError(f"block={self.block}; expected at least 1 client per block, or None to measure")
        self._device = found_device(self.device)
        keep_freed_memory()

    def plans(self) -> dict[str, dict[str, Any]]:
        """The blocks and threads measured so far, as plain values: a run that resumes goes on with the same ones."""
        return {kind: asdict(plan) for kind, plan in self._tuner.plans.items()}

    def use_plans(self, plans: Mapping[str, dict[str, Any]]) -> None:
        self._tuner.plans.update({kind: Plan(**plan) for kind, plan in plans.items()})

    def run(self, work: Work) -> Iterator[Reply]:
        """Stream the clients' replies, block by block."""
        if len(work.positions) == 0:
            return
        with torch.no_grad():
            work = self._with_shared(work)
            # largest clients first, so that those of a block are alike and little of it is padding
            rows = torch.argsort(work.clients.size[work.positions], descending=True, stable=True)
            plan = self._plan(work, rows)
            with plan.threads_set():
                yield from self._batches(work, rows, plan)

    def _with_shared(self, work: Work) -> Work:
        """The work with all that its clients share where it is computed.

        An input that is one row repeated for everybody (stride 0) is shared, which vectorises far better.
        """
        repeated = {name: value[0] for name, value in work.each.items() if value.stride(0) == 0}
        each = {name: value for name, value in work.each.items() if name not in repeated}
        return replace(work, shared=self._moved(work, {**work.shared, **repeated}), each=each)

    def _away(self, work: Work) -> bool:
        """Is it computed on another device than the CPU?"""
        return self._device.type != "cpu" and work.task.vectorised

    def _moved(self, work: Work, arrays: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        return _moved(arrays, self._device) if self._away(work) else arrays

    def _plan(self, work: Work, rows: Tensor) -> Plan:
        if self._away(work):
            return Plan(1 if work.task.name in self._loop else self.block or _fitting(work))
        if work.task.name in self._loop or not work.task.vectorised:
            return Plan.of(work, self.threads, block=1)
        if self.block is not None:
            return Plan.of(work, self.threads, self.block)

        def rehearse(plan: Plan, some: Tensor) -> None:
            before, self._recordings = self._recordings, Recordings()  # no candidate is played back, or worth recording
            try:
                deque(self._batches(work, some, plan, rehearsal=True), maxlen=0)
            finally:
                self._recordings = before

        return self._tuner.plan(work, rows, self.threads, rehearse)

    def _batches(self, work: Work, rows: Tensor, plan: Plan, rehearsal: bool = False) -> Iterator[Reply]:
        """Block by block, or one for each worker at a time.

        A block is computed by one worker, so how many there are changes no bit.
        """
        singly = plan.block == 1
        blocks = _singles(work, rows, plan) if singly else self._vectorisable(work, _blocks(work, rows, plan))
        if plan.workers > 1:
            yield from self._side_by_side(work, blocks, plan.workers, singly, rehearsal)
            if not rehearsal:
                self._recordings.make()  # now that no worker is at work
        else:
            for block_rows in blocks:
                yield from self._finished(work, block_rows, self._prepared(work, block_rows, singly), rehearsal)
                if not rehearsal:
                    self._recordings.make()

    def _vectorisable(self, work: Work, blocks: Iterator[Tensor]) -> Iterator[Tensor]:
        """The blocks; from where the task has turned out not to be vectorisable on, its clients one by one."""
        for rows in blocks:
            yield from rows[:, None] if work.task.name in self._loop else (rows,)

    def _side_by_side(
        self, work: Work, blocks: Iterator[Tensor], workers: int, singly: bool, rehearsal: bool
    ) -> Iterator[Reply]:
        ahead: deque[tuple[Tensor, Future[Outputs]]] = deque()
        try:
            for block_rows in blocks:
                held = sum(_input_bytes(work, rows) for rows in (block_rows, *(rows for rows, _ in ahead)))
                while len(ahead) > workers or (ahead and held > MAX_BYTES_AHEAD):
                    first, future = ahead.popleft()
                    held -= _input_bytes(work, first)
                    yield from self._finished(work, first, future.result, rehearsal)
                call = self._prepared(work, block_rows, singly)
                ahead.append((block_rows, _workers(workers).submit(_without_gradients, call)))
            while ahead:
                first, future = ahead.popleft()
                yield from self._finished(work, first, future.result, rehearsal)
        finally:  # whoever asked may have given up
            for _, future in ahead:
                future.cancel()
            wait([future for _, future in ahead])

    def _finished(self, work: Work, rows: Tensor, result: Callable[[], Outputs], rehearsal: bool) -> list[Reply]:
        """One block's replies; if its call raised, those of its clients one by one: an error stays its client's."""
        try:
            return [self._reply(work, rows, result(), rehearsal)]
        except Exception as error:  # a client's own failure is data
            reason = outside.told(error, in_task=True)
        if "randomness error mode" in reason:  # what vmap says; one client after the other would find it out, too
            reason = f"{_GLOBAL_DRAWS}{reason[reason.find(chr(10)) :] if chr(10) in reason else ''}"
            return [Reply(rows[:0], failed=dict.fromkeys(rows.tolist(), reason))]
        if len(rows) == 1:
            return [Reply(rows[:0], failed={int(rows): reason})]
        singles = [self._finished(work, row, self._prepared(work, row), rehearsal)[0] for row in rows[:, None]]
        if work.task.name not in self._loop and not any(one.failed for one in singles):
            self._loop.add(work.task.name)
            warnings.warn(
                f"task {work.task.name} cannot be vectorised over clients and runs one client at a time, which is "
                f"slower. The operation that prevents it: {reason.splitlines()[0]}",
                LoopInstead,
                stacklevel=2,
            )
        return singles

    def _prepared(self, work: Work, rows: Tensor, singly: bool = False) -> Callable[[], Outputs]:
        """The call for a block of clients, or for one of them after the other.

        All that it needs is read here; it may run in any thread.
        """
        vectorised, count = len(rows) > 1 and not singly, len(rows)
        if vectorised and work.private:
            rows = _filled_up(work, rows)
        bounds = work.bounds[rows]
        # DP-SGD takes as many steps as N̄ has batches, which no row of a client may change
        least = int(bounds.max()) if any(one.cost is not None for one in work.releases) else 1
        block = work.clients.block(work.positions[rows], least, tame=work.private)
        kept = work.kept.read(block.ids)
        own = {
            "columns": self._moved(work, block.columns(work.key, bounds)),
            "kept": self._moved(work, kept.values),
            "present": self._moved(work, kept.present),
            "each": self._moved(work, {name: value[rows] for name, value in work.each.items()}),
        }
        turns = [slice(None)] if vectorised else [slice(i, i + 1) for i in range(len(rows))]
        inputs: list[Inputs] = [
            {
                "shared": work.shared,
                **{group: {name: v[turn] for name, v in arrays.items()} for group, arrays in own.items()},
            }
            for turn in turns
        ]

        def call(inputs: Inputs) -> Outputs:
            def one(columns: Arrays, values: Arrays, present: Arrays, each: Arrays) -> Outputs:
                client = block.client(columns, Kept(values, present), work.terms.system)
                noise = client.noise if work.terms.system else Draws(columns["key"], 1)
                return _answer(work, client, {**inputs["shared"], **each}, noise)

            arguments = [dict(inputs[name]) for name in own]
            if vectorised:
                result: Outputs = vmap(one)(*arguments)
                return result
            out, keep = one(*({name: value[0] for name, value in arrays.items()} for arrays in arguments))
            return [{name: value[None] for name, value in release.items()} for release in out], {
                name: value[None] for name, value in keep.items()
            }

        def call_there(inputs: Inputs) -> Outputs:
            with self._device:  # a mode under which new tensors are made there; it slows every operation down
                return call(inputs)

        away = self._away(work)
        function = call_there if away else call
        kind = self._recordings.kind(work, inputs[0], vectorised, block.full, block.all_labeled, work.terms.system)

        def turn(inputs: Inputs) -> Outputs:
            begin, drawn = time.perf_counter(), None if kind.recorded or vectorised else _global_draws()
            made: Outputs = (kind.recorded or function)(inputs)
            if drawn is not None and not torch.equal(drawn, _global_draws()):
                raise RuntimeError(_GLOBAL_DRAWS)
            if kind.recorded is None:
                self._recordings.called(kind, time.perf_counter() - begin, function, inputs)
            return made

        def outputs() -> Outputs:
            made = _stacked([turn(one) for one in inputs])
            return made if len(rows) == count else _first(made, count)

        return (lambda: _back(outputs())) if away else outputs

    def nothing(self, work: Work, row: Tensor, sent: Mapping[str, Tensor]) -> Reply:
        """The reply of a client whose task failed where all that leaves it is private: zeros, under the same noise.

        Then nobody can tell that it failed. It keeps nothing but what a later exchange needs.
        """
        block = work.clients.block(work.positions[row], tame=True)
        columns = {name: value[0] for name, value in block.columns(work.key, work.bounds[row]).items()}
        client = block.client(columns, Kept(), work.terms.system)
        noise = client.noise if work.terms.system else Draws(columns["key"], 1)
        out, keep = _let_out(work, client, sent, noise)
        if keep:
            work.kept.write(block.ids, {name: value[None] for name, value in keep.items()})
        return Reply(row, [{name: value[None] for name, value in release.items()} for release in out])

    def _reply(self, work: Work, rows: Tensor, outputs: Outputs, rehearsal: bool) -> Reply:
        """Leave out replies that make no sense, let the rest keep what they keep, and hand over what they sent."""
        arrays, kept = outputs
        sound = torch.ones(len(rows), dtype=torch.bool)
        failed: dict[int, str] = {}

        def check(good: Tensor, reason: str) -> None:
            if not good.all():
                failed.update(dict.fromkeys(rows[~good & sound].tolist(), reason))
                sound.logical_and_(good)

        sent = {name: value for release in arrays for name, value in release.items()}
        for name, value in sent.items():
            wire.check(name, value)
        for name, value in [*sent.items(), *((f"kept {name}", value) for name, value in kept.items())]:
            if value.is_floating_point():
                finite = torch.isfinite(value.reshape(len(rows), -1).sum(1))  # NaN or inf anywhere survives a sum
                check(finite, f"the array {name!r} is not finite (NaN or infinite)")
        for release, out in zip(work.releases, arrays, strict=True):
            weight = getattr(release, "weight", None)
            if weight in out:
                amount = out[weight].reshape(len(rows), -1)
                check(
                    (amount >= 0).all(1) & (amount.shape[1] == 1),
                    f"the weight {weight!r} is not one number of 0 or more",
                )
        if failed:
            rows = rows[sound]
            arrays = [{name: value[sound] for name, value in release.items()} for release in arrays]
            kept = {name: value[sound] for name, value in kept.items()}
        if kept and not rehearsal and len(rows):  # last: who fails on the way must not have kept anything
            work.kept.write(work.clients.ids[work.positions[rows]], kept)
        return Reply(rows, arrays, failed)


def found_device(name: str) -> torch.device:
    """The device of a name; "auto" is the first of cuda, mps and cpu that is here."""
    here = [one for one, there in (("cuda", torch.cuda), ("mps", torch.backends.mps)) if there.is_available()] + ["cpu"]
    if name == "auto":
        return torch.device(here[0])
    try:
        return torch.empty(0, device=name).device  # fails where there is none
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        reason = str(error).splitlines()[0]
        raise ValueError(f"device={name!r} is not here ({reason}); use auto or one of: {', '.join(here)}") from error


def _moved(arrays: Mapping[str, Tensor], device: torch.device) -> dict[str, Tensor]:
    return {name: value.to(device) for name, value in arrays.items()}


def _back(outputs: Outputs) -> Outputs:
    """All that left a block or is kept, on the CPU."""
    cpu = torch.device("cpu")
    return [_moved(release, cpu) for release in outputs[0]], _moved(outputs[1], cpu)


def _fitting(work: Work) -> int:
    """Clients in a block on another device: a client may have all inputs, the model above all, for itself."""
    numbers = sum(value.numel() for value in work.shared.values())
    numbers += sum(value[0].numel() for value in work.each.values())
    return max(1, min(MOST_ON_DEVICE, MAX_BLOCK_BYTES // max(1, 4 * numbers)))


_GLOBAL_DRAWS = (
    "the task draws from PyTorch's global generator, so one seed would not give one result; draw from client.draws: "
    "client.draws.uniform(3), .normal(3), .integers(10, 3) or .permutation(client.n, client.capacity)"
)


_ONE_AT_A_TIME = threading.Lock()


def _global_draws() -> Tensor:
    """The state of PyTorch's global generator.

    PyTorch reads it under a lock of its own and may give up the interpreter's meanwhile (when garbage is collected).
    Another thread that then asks for it waits with the interpreter in its hands, and all stand still for ever. So
    threads take turns.
    """
    with _ONE_AT_A_TIME:
        return torch.get_rng_state()


def _without_gradients(call: Callable[[], Outputs]) -> Outputs:
    with torch.no_grad():  # it holds for one thread only
        return call()


@functools.cache
def _workers(count: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(count, "unalike", initializer=torch.set_num_threads, initargs=(1,))


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_workers.cache_clear)  # a child has no threads but the one that forked


def _answer(work: Work, client: Client, inputs: Mapping[str, Tensor], noise: DrawsLike) -> Outputs:
    """All that happens at a client: the task, and what each release lets out of it."""
    sent = work.task(client, **inputs)
    out, keep = _let_out(work, client, sent.arrays, noise)
    return out, {**sent.keep, **keep}


def _let_out(work: Work, client: Client, sent: Mapping[str, Tensor], noise: DrawsLike) -> Outputs:
    """What each release lets out of what a task sends, and what stays at hand."""
    out: list[dict[str, Tensor]] = []
    keep: dict[str, Tensor] = {}
    for release in work.releases:
        out.append(release.at_client(sent, client, noise))
        for name, value in release.staying(sent, noise).items():  # at hand, under the serial of the ask
            keep[name if name.startswith(SECRET) else f"{HELD}{work.serial}.{name}"] = value
        if isinstance(release, Sum):
            keep |= release.secret_noise(work.terms)
    return out, keep


def _blocks(work: Work, rows: Tensor, plan: Plan) -> Iterator[Tensor]:
    """Rows (largest clients first) in the blocks that take the least time.

    A block takes as long as its largest client's samples, times its clients plus what it costs besides them
    (``plan.overhead``); so it ends where its padding would cost more than one more block. Blocks begin and end where
    the size changes, unless one is full.
    """
    sizes = work.clients.size[work.positions[rows]].numpy()
    row_bytes = _row_bytes(work)
    if len(sizes) and sizes[0] == sizes[-1]:  # all are alike
        limit = min(plan.block, max(1, MAX_BLOCK_BYTES // (max(1, int(sizes[0])) * row_bytes)))
        yield from torch.split(rows, limit)
        return
    first = np.flatnonzero(np.diff(sizes, prepend=-1))  # where each distinct size begins
    edges = [*first.tolist(), len(rows)]
    least = np.zeros(len(edges))  # [g]: time of all rows before the g-th distinct size
    begins = [0] * len(edges)  # and where the last block of those begins
    limits = np.minimum(plan.block, np.maximum(1, MAX_BLOCK_BYTES // (np.maximum(1, sizes[first]) * row_bytes)))
    for end in range(1, len(edges)):
        count = edges[end] - first[:end]
        taken = least[:end] + np.maximum(1, sizes[first[:end]]) * (count + plan.overhead * -(-count // limits[:end]))
        begins[end] = int(taken.argmin())
        least[end] = taken[begins[end]]
    cuts, end = [], len(edges) - 1
    while end:
        cuts.append((begins[end], end))
        end = begins[end]
    for group, end in reversed(cuts):
        for begin in range(edges[group], edges[end], int(limits[group])):
            yield rows[begin : min(begin + int(limits[group]), edges[end])]


def _singles(work: Work, rows: Tensor, plan: Plan) -> Iterator[Tensor]:
    """Rows (largest clients first) that are computed one by one: a few alike together, because reading costs too."""
    few = min(TOGETHER, len(rows) // (16 * plan.workers)) if work.pure else 1
    where = work.positions[rows]
    sizes, labeled = work.clients.size[where].numpy(), work.clients.labeled[where].numpy()
    changes = np.flatnonzero((np.diff(sizes) != 0) | (np.diff(labeled) != 0)) + 1
    for begin, end in itertools.pairwise([0, *changes.tolist(), len(rows)]):
        fit = max(1, min(few, MAX_BLOCK_BYTES // (max(1, int(sizes[begin])) * _row_bytes(work))))
        yield from (rows[i : min(i + fit, end)] for i in range(begin, end, fit))


def _row_bytes(work: Work) -> int:
    return max(1, work.clients.x[0].numel() * 4)


def _input_bytes(work: Work, rows: Tensor) -> int:
    return len(rows) * int(work.clients.size[work.positions[rows]].max()) * _row_bytes(work)


def _filled_up(work: Work, rows: Tensor) -> Tensor:
    """A block of one of a few sizes; the first client takes the places that are left over, for nothing.

    Private cohorts have another size in every round. Rounded up to a multiple of 4 (of 8 for small samples, of more in
    large blocks) they have few, so that blocks can be recorded, which saves more than the added clients cost.
    """
    small = work.clients.x[0].numel() <= SMALL and all(one.cost is None for one in work.releases)
    some = max(8 if small else 4, 1 << max(0, len(rows).bit_length() - 3))
    return torch.cat([rows, rows[:1].expand(-len(rows) % some)]) if len(rows) > 4 else rows


def _first(outputs: Outputs, count: int) -> Outputs:
    """What the first so many clients of a block send and keep."""
    released = [{name: value[:count] for name, value in release.items()} for release in outputs[0]]
    return released, {name: value[:count] for name, value in outputs[1].items()}


def _stacked(outputs: list[Outputs]) -> Outputs:
    """Outputs of one client each as those of a block."""
    if len(outputs) == 1:
        return outputs[0]
    releases = zip(*(out for out, _ in outputs), strict=True)
    return [_concatenated(one) for one in releases], _concatenated([keep for _, keep in outputs])


def _concatenated(parts: Sequence[dict[str, Tensor]]) -> dict[str, Tensor]:
    if any(part.keys() != parts[0].keys() for part in parts):
        raise ValueError("clients sent arrays of different names")
    return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
