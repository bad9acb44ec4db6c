"""Tasks, recorded as flat lists of tensor operations and played back.

In a step of a small model the layers of ``vmap`` and ``grad`` cost more than the arithmetic they lead to. It is the
same in every round, so a task that is asked again and again with equal shapes is recorded once and from then on played
back: the same operations on the same numbers, so the same bits, in about half the time.

Hence a method's task is a pure function of its method's fields and of what it is given; anything else it reads is read
only once, at the recording. Only tasks of frozen dataclasses are recorded: a plain function may lean on anything.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from unalike.core.torch_internals import may_write, trace
from unalike.runtime.shard.work import Work

Inputs = Mapping[str, Mapping[str, Tensor]]
Function = Callable[[Inputs], Any]

AFTER = 32  # calls, and
SPENT = 1.0  # seconds of them; and where it is known how many rounds are left, only if these repay the recording:
SAVED = 0.5  # of a call, by playing it back
COST = 35.0  # calls that take as long as to record one
START = 1.0  # seconds more, of the first recording
LONGEST = 1.0  # seconds: a longer call is nearly all arithmetic, or has so many operations that recording takes minutes
MOST = 256  # kinds of calls that are remembered; the one not called for longest goes first
NODES = 100_000  # operations in all recordings, at some 15 kB each


@dataclass
class Kind:
    """Calls of one task with equal shapes."""

    owner: object  # kept alive, so that its id stays its own
    since: int = 0  # the round of its first call
    calls: int = 0
    fastest: float = math.inf  # seconds
    tried: bool = False
    recorded: Function | None = None
    nodes: int = 0  # of the recording


class Recordings:
    """The kinds of calls that were made lately."""

    def __init__(self) -> None:
        self._kinds: dict[Hashable, Kind] = {}
        self._spent = 0.0  # seconds in calls that were not played back
        self._nodes = 0
        self._round, self._left = 0, math.inf
        self._due: list[tuple[Kind, Function, Inputs]] = []

    def expect(self, number: int, left: float) -> None:
        """Round ``number`` begins, and ``left`` more will follow it."""
        self._round, self._left = number, left

    def called(self, kind: Kind, seconds: float, function: Function, inputs: Inputs) -> None:
        """Count a call that was not played back; when it has come often enough, it is due to be recorded."""
        kind.calls, kind.fastest, self._spent = kind.calls + 1, min(kind.fastest, seconds), self._spent + seconds
        if kind.calls >= AFTER and self._spent >= SPENT and not kind.tried and self._repays(kind):
            kind.tried = True
            if kind.fastest < LONGEST and self._nodes < NODES:
                self._due.append((kind, function, inputs))

    def _repays(self, kind: Kind) -> bool:
        """Will the rounds that are left, with as many calls in each as so far, save more than the recording takes?"""
        calls = self._left * kind.calls / (self._round - kind.since + 1)
        start = 0.0 if self._nodes else START
        return calls * SAVED * kind.fastest > COST * kind.fastest + start

    def make(self) -> None:
        """Record what is due. PyTorch traces for the whole process, so no other thread may be computing then."""
        while self._due:
            kind, function, inputs = self._due.pop()
            if not any(kind is known for known in self._kinds.values()):
                continue  # forgotten meanwhile
            kind.recorded, kind.nodes = _record(function, inputs)
            self._nodes += kind.nodes

    def kind(self, work: Work, inputs: Inputs, *known: Hashable) -> Kind:
        """Of the request's task with these inputs; ``known`` is all else that the call depends on."""
        task, releases = work.task, work.releases
        if not task.vectorised or not work.pure:
            return Kind(None, tried=True)  # it may depend on what changes from call to call
        halves = [(type(one), *(value for name, value in vars(one).items() if name != "cost")) for one in releases]
        shapes = [(g, n, v.shape, v.stride(), v.dtype) for g, group in inputs.items() for n, v in group.items()]
        name = (task.function, id(task.owner), known, *halves, *shapes)
        kind = self._kinds.pop(name, None) or Kind(task.owner, self._round)
        self._kinds[name] = kind  # the last one called is the last one in the dict
        if len(self._kinds) > MOST:
            self._nodes -= self._kinds.pop(next(iter(self._kinds))).nodes
        return kind

    def count(self) -> int:
        """How many kinds are played back."""
        return sum(kind.recorded is not None for kind in self._kinds.values())


def _record(function: Function, inputs: Inputs) -> tuple[Function | None, int]:
    """The recording and its size; None where the task looks at a value or has shapes that depend on one.

    It is made with tensors that have no values, so a task that looks raises.
    """
    try:
        module = trace(function, inputs)
    except Exception:  # whatever stands against it, the task itself has just run
        return None, 0
    _drop_idle(module)
    _merge(module)
    _fold(module)
    for node in module.graph.nodes:
        node.meta.clear()  # half of the memory
    return module, len(module.graph.nodes)


def _repeats(node: fx.Node) -> bool:
    """Does the operation give the same numbers for the same inputs? Only PyTorch's own are trusted to say so."""
    if node.target is operator.getitem:
        return True
    random = torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())
    return getattr(node.target, "namespace", "") in ("aten", "prims") and not random


def _merge(module: fx.GraphModule) -> None:
    """Compute once what is computed again from the same inputs, such as the layout in which all passes read a batch."""
    if may_write(module):
        return  # what is written to must not be shared
    first: dict[tuple[Any, str], fx.Node] = {}
    for node in module.graph.nodes:
        if node.op == "call_function" and _repeats(node):
            # as text, in which 1, 1.0 and True differ, and a node is its name
            known = first.setdefault((node.target, repr((node.args, node.kwargs))), node)
            if known is not node:
                node.replace_all_uses_with(known)
    module.graph.eliminate_dead_code()
    module.recompile()


_BY_SHAPE = (  # read nothing of a tensor but its shape
    torch.ops.aten.ones_like.default,
    torch.ops.aten.zeros_like.default,
    torch.ops.aten.new_zeros.default,
    torch.ops.aten.new_ones.default,
)


def _fold(module: fx.GraphModule) -> None:
    """Compute once what depends on no input: index ranges, zeros, constants."""
    if may_write(module):
        return  # a constant must not be written to
    calls = [node for node in module.graph.nodes if node.op == "call_function"]
    values: dict[fx.Node, Any] = {
        node: getattr(module, node.target) for node in module.graph.nodes if node.op == "get_attr"
    }
    for node in calls:
        known = all(source in values for source in node.all_input_nodes)
        if node.target in _BY_SHAPE or (known and _repeats(node)):
            args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda source: _value(source, values))
            values[node] = node.target(*args, **kwargs)
    for number, (node, value) in enumerate(values.items()):
        needed = isinstance(value, Tensor) and any(user not in values for user in node.users)
        if node.op == "call_function" and needed:
            name = f"folded_{number}"
            module.register_buffer(name, value)
            with module.graph.inserting_before(node):
                node.replace_all_uses_with(module.graph.get_attr(name))
    module.graph.eliminate_dead_code()
    module.recompile()


def _drop_idle(module: fx.GraphModule) -> None:
    """Leave out views and permutations that change nothing, and products by 1; ``vmap`` makes many of them."""
    aten = torch.ops.aten
    views = (aten.view.default, aten._unsafe_view.default, aten.expand.default)
    for node in module.graph.nodes:
        idle = node.op == "call_function" and (
            node.target in views
            or (node.target is aten.permute.default and list(node.args[1]) == list(range(len(node.args[1]))))
            or (node.target is aten.mul.Scalar and node.args[1] == 1)
        )
        if idle and "val" in node.args[0].meta:
            before, after = node.args[0].meta["val"], node.meta["val"]
            if before.shape == after.shape and before.dtype == after.dtype:
                node.replace_all_uses_with(node.args[0])
    module.graph.eliminate_dead_code()
    module.recompile()


def _value(node: fx.Node, known: Mapping[fx.Node, Any]) -> Any:
    """What a node has computed, or any tensor of its shape."""
    if node in known:
        return known[node]
    like = node.meta["val"]
    return torch.empty(like.shape, dtype=like.dtype, device=like.device)
