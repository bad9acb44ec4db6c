"""All tools on one workload, taking turns: every repetition runs each of them once, and ratios are within it.

Before the first turn all have warmed up, so that block sizes are measured and tasks recorded, or a turn would compare
how soon that happens. Every other repetition goes through the tools backwards, so that none always follows another.
"""

from __future__ import annotations

import contextlib
import math
import statistics
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.peers import UNALIKE, Clock, Running, Tool, Unavailable
from benchmarks.report import Ratio, Row
from benchmarks.workloads import Shared

Say = Callable[[str], None]
WARM_UP = 10.0  # seconds, or
WARM = 80  # rounds: after them tasks are played back (`AFTER` in the simulator's recordings)
TURN = 1.0  # seconds that a turn should take at least, so that a short round is not one tick of noise
MOST = 100  # rounds in a turn


def compare(
    work: Shared,
    tools: Sequence[Tool],
    repetitions: int,
    targets: Mapping[str, tuple[str, float]],
    say: Say,
    clock: Clock = "seconds",
) -> tuple[list[Row], dict[str, Any]]:
    """Rows of ratios (how many times as long as Unalike a tool takes for a round), and the raw seconds."""
    skipped: dict[str, str] = {}
    with contextlib.ExitStack() as stack:
        folder = work.write(Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="bench-data-"))))
        running: dict[str, Running] = {}
        for tool in (UNALIKE, *tools):
            say(f"{work.name}: starting {tool.name}")
            try:
                running[tool.name] = stack.enter_context(Running(tool, folder))
            except Unavailable as reason:
                if tool is UNALIKE:
                    raise
                skipped[tool.name] = str(reason)
                say(f"{work.name}: {tool.name} is left out: {reason}")
        turns = {name: _turn(one, clock) for name, one in running.items()}
        seconds: dict[str, list[float]] = {name: [] for name in running}
        for repetition in range(repetitions):
            say(f"{work.name}: repetition {repetition + 1} of {repetitions}")
            for name in reversed(running) if repetition % 2 else running:
                seconds[name].append(statistics.median(running[name].rounds(turns[name], clock)))
        threads = {name: one.threads for name, one in running.items()}
    rows = [Row(work.name, "Unalike", Ratio.of([work.steps / s for s in seconds[UNALIKE.name]]), "client-steps/s")]
    for name in seconds:
        if name != UNALIKE.name:
            ratios = [peer / own for peer, own in zip(seconds[name], seconds[UNALIKE.name], strict=True)]
            rows.append(Row(work.name, f"{name} / Unalike", Ratio.of(ratios), target=targets.get(name)))
    raw = {"seconds_per_round": seconds, "client_steps": work.steps, "threads": threads, "left_out": skipped}
    return rows, {**raw, "clock": clock}


def _turn(tool: Running, clock: Clock) -> int:
    """How many rounds a turn of the tool has; it is warm then."""
    first = tool.rounds(1, clock)[0]
    later = tool.rounds(max(1, min(WARM, math.ceil(WARM_UP / first))), clock)
    return max(1, min(MOST, round(TURN / statistics.median(later[len(later) // 2 :]))))
