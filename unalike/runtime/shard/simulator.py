"""The in-process simulator: runs a task for a block of clients at once.

On small models nearly all the cost is Python and dispatch, so a task written for one client is vectorised over a block
of clients with ``torch.func.vmap``. A task that cannot be vectorised runs client by client, with one warning.

Rows and kept state lie on the CPU. A block is moved to the simulator's device and computed there, and its replies are
moved back. Draws are hashes of integers, so they are the same bits on every device. Tasks that work on bytes or Python
values (the exchanges of a secure sum) run on the CPU.
"""

from __future__ import annotations

import functools
import os
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from unalike.core import outside, wire
from unalike.core.client import Kept
from unalike.core.failure import Diverged
from unalike.core.request import Reply
from unalike.runtime.shard.call import GLOBAL_DRAWS, BlockCall, Outputs, client_of, let_out, to_device
from unalike.runtime.shard.recording import Recordings
from unalike.runtime.shard.tuning import Plan, Tuner, keep_freed_memory
from unalike.runtime.shard.work import MAX_BLOCK_BYTES, Work, cut_blocks, cut_singles, input_bytes

_CPU = torch.device("cpu")
MAX_BYTES_AHEAD = 1 << 30  # of inputs in all blocks that workers have at a time
MOST_ON_DEVICE = 1024  # clients in a block on another device than the CPU, where nothing is measured


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
        self._device = find_device(self.device)
        keep_freed_memory()

    def plans(self) -> dict[str, dict[str, Any]]:
        """The blocks and threads measured so far, as plain values: a run that resumes goes on with the same ones."""
        return {kind: asdict(plan) for kind, plan in self._tuner.plans.items()}

    def use_plans(self, plans: Mapping[str, dict[str, Any]]) -> None:
        self._tuner.plans.update({kind: Plan(**plan) for kind, plan in plans.items()})

    def expect(self, number: int, left: int) -> None:
        """Round ``number`` begins, and ``left`` more will follow: what is prepared for them must be worth its time."""
        self._recordings.expect(number, left)

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
                yield from self._batches(work, rows, plan, self._recordings)

    def _with_shared(self, work: Work) -> Work:
        """The work with all that its clients share where it is computed.

        An input of one row repeated by stride 0 is shared, which vectorises far better.
        """
        repeated = {name: value[0] for name, value in work.each.items() if value.stride(0) == 0}
        each = {name: value for name, value in work.each.items() if name not in repeated}
        return replace(work, shared=to_device({**work.shared, **repeated}, self._device_of(work)), each=each)

    def _device_of(self, work: Work) -> torch.device:
        return self._device if work.task.vectorised else _CPU

    def _plan(self, work: Work, rows: Tensor) -> Plan:
        if self._device_of(work) != _CPU:
            return Plan(1 if work.task.name in self._loop else self.block or _fitting(work))
        if work.task.name in self._loop or not work.task.vectorised:
            return Plan.of(work, self.threads, block=1)
        if self.block is not None:
            return Plan.of(work, self.threads, self.block)
        return self._tuner.plan(work, rows, self.threads, partial(self._rehearse, work))

    def _rehearse(self, work: Work, plan: Plan, rows: Tensor) -> None:
        """Run the rows by the plan; nothing is kept, sent or recorded."""
        deque(self._batches(work, rows, plan, None), maxlen=0)

    def _batches(self, work: Work, rows: Tensor, plan: Plan, recordings: Recordings | None) -> Iterator[Reply]:
        """Block by block, or one for each worker at a time.

        A block is computed by one worker, so how many there are changes no bit. recordings: None in a rehearsal.
        """
        singly = plan.block == 1
        if singly:
            blocks = cut_singles(work, rows, plan.workers)
        else:
            blocks = self._vectorisable(work, cut_blocks(work, rows, plan.block, plan.overhead))
        if plan.workers > 1:
            yield from self._side_by_side(work, blocks, plan.workers, singly, recordings)
            if recordings is not None:
                recordings.make()  # now that no worker is at work
        else:
            for block_rows in blocks:
                call = self._call(work, block_rows, recordings, singly)
                yield from self._finish(work, block_rows, call, recordings)
                if recordings is not None:
                    recordings.make()

    def _vectorisable(self, work: Work, blocks: Iterator[Tensor]) -> Iterator[Tensor]:
        """The blocks; from where the task has turned out not to be vectorisable on, its clients one by one."""
        for rows in blocks:
            yield from rows[:, None] if work.task.name in self._loop else (rows,)

    def _side_by_side(
        self, work: Work, blocks: Iterator[Tensor], workers: int, singly: bool, recordings: Recordings | None
    ) -> Iterator[Reply]:
        ahead: deque[tuple[Tensor, Future[Outputs]]] = deque()
        try:
            for block_rows in blocks:
                held = sum(input_bytes(work, rows) for rows in (block_rows, *(rows for rows, _ in ahead)))
                while len(ahead) > workers or (ahead and held > MAX_BYTES_AHEAD):
                    first, future = ahead.popleft()
                    held -= input_bytes(work, first)
                    yield from self._finish(work, first, future.result, recordings)
                call = self._call(work, block_rows, recordings, singly)
                ahead.append((block_rows, _workers(workers).submit(_without_gradients, call)))
            while ahead:
                first, future = ahead.popleft()
                yield from self._finish(work, first, future.result, recordings)
        finally:  # whoever asked may have given up
            for _, future in ahead:
                future.cancel()
            wait([future for _, future in ahead])

    def _call(
        self, work: Work, rows: Tensor, recordings: Recordings | None, singly: bool = False
    ) -> Callable[[], Outputs]:
        return BlockCall.read(work, rows, self._device_of(work), recordings, singly=singly)

    def _finish(
        self, work: Work, rows: Tensor, result: Callable[[], Outputs], recordings: Recordings | None
    ) -> list[Reply]:
        """One block's replies; if its call raised, those of its clients one by one: an error stays its client's."""
        try:
            return [_reply(work, rows, result(), keep=recordings is not None)]
        except Exception as error:  # a client's own failure is data
            reason = outside.describe_error(error, in_task=True)
        if "randomness error mode" in reason:  # what vmap raises; single calls would raise it, too
            reason = f"{GLOBAL_DRAWS}{reason[reason.find(chr(10)) :] if chr(10) in reason else ''}"
            return [Reply(rows[:0], failed=dict.fromkeys(rows.tolist(), reason))]
        if len(rows) == 1:
            return [Reply(rows[:0], failed={int(rows): reason})]
        singles = [self._finish(work, row, self._call(work, row, recordings), recordings)[0] for row in rows[:, None]]
        if work.task.name not in self._loop and not any(one.failed for one in singles):
            self._loop.add(work.task.name)
            warnings.warn(
                f"task {work.task.name} cannot be vectorised over clients and runs one client at a time, which is "
                f"slower. The operation that prevents it: {reason.splitlines()[0]}",
                LoopInstead,
                stacklevel=2,
            )
        return singles


def zero_reply(work: Work, row: Tensor, sent: Mapping[str, Tensor]) -> Reply:
    """The reply of a client whose task failed where all that leaves it is private: zeros, under the same noise.

    Then nobody can tell that it failed. It keeps nothing but what a later exchange needs.
    """
    block = work.clients.block(work.positions[row], tame=True)
    columns = {name: value[0] for name, value in block.columns(work.key, work.bounds[row]).items()}
    client, noise = client_of(work, block, columns, Kept())
    out, keep = let_out(work, client, sent, noise)
    if keep:
        work.kept.write(block.ids, {name: value[None] for name, value in keep.items()})
    return Reply(row, [{name: value[None] for name, value in release.items()} for release in out])


def _reply(work: Work, rows: Tensor, outputs: Outputs, *, keep: bool) -> Reply:
    """Leave out replies that make no sense, let the rest keep what they keep, and hand over what they sent."""
    arrays, kept = outputs
    sent = {name: value for release in arrays for name, value in release.items()}
    for name, value in sent.items():
        wire.check(name, value)
    sound, failed = torch.ones(len(rows), dtype=torch.bool), dict[int, str]()
    for good, reason in _checks(work, len(rows), sent, outputs):
        if not good.all():
            failed.update(dict.fromkeys(rows[~good & sound].tolist(), reason))
            sound.logical_and_(good)
    if failed:
        rows = rows[sound]
        arrays = [{name: value[sound] for name, value in release.items()} for release in arrays]
        kept = {name: value[sound] for name, value in kept.items()}
    if kept and keep and len(rows):  # last: who fails on the way must not have kept anything
        work.kept.write(work.clients.ids[work.positions[rows]], kept)
    return Reply(rows, arrays, failed)


def _checks(work: Work, count: int, sent: Mapping[str, Tensor], outputs: Outputs) -> Iterator[tuple[Tensor, str]]:
    """What must hold of every reply: which clients it holds for [count], and the reason of the others' failure."""
    arrays, kept = outputs
    for name, value in [*sent.items(), *((f"kept {name}", value) for name, value in kept.items())]:
        if value.is_floating_point():
            # NaN or inf anywhere survives a sum
            yield torch.isfinite(value.reshape(count, -1).sum(1)), Diverged.array(name)
    for release, out in zip(work.releases, arrays, strict=True):
        weight = getattr(release, "weight", None)
        if weight in out:
            amount = out[weight].reshape(count, -1)
            sound = (amount >= 0).all(1) & (amount.shape[1] == 1)
            yield sound, f"the weight {weight!r} is not one number of 0 or more"


def find_device(name: str) -> torch.device:
    """The device of a name; "auto" is the first of cuda, mps and cpu that is here."""
    here = [one for one, there in (("cuda", torch.cuda), ("mps", torch.backends.mps)) if there.is_available()] + ["cpu"]
    if name == "auto":
        return torch.device(here[0])
    try:
        return torch.empty(0, device=name).device  # fails where there is none
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        reason = str(error).splitlines()[0]
        raise ValueError(f"device={name!r} is not here ({reason}); use auto or one of: {', '.join(here)}") from error


def _fitting(work: Work) -> int:
    """Clients in a block on another device: a client may have all inputs, the model above all, for itself."""
    numbers = sum(value.numel() for value in work.shared.values())
    numbers += sum(value[0].numel() for value in work.each.values())
    return max(1, min(MOST_ON_DEVICE, MAX_BLOCK_BYTES // max(1, 4 * numbers)))


def _without_gradients(call: Callable[[], Outputs]) -> Outputs:
    with torch.no_grad():  # it holds for one thread only
        return call()


@functools.cache
def _workers(count: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(count, "unalike", initializer=torch.set_num_threads, initargs=(1,))


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_workers.cache_clear)  # a child has no threads but the one that forked
