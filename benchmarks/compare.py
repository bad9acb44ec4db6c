"""All tools on one workload, taking turns: every repetition runs each of them once, and ratios are within it."""

from __future__ import annotations

import contextlib
import statistics
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.peers import UNALIKE, Running, Tool, Unavailable
from benchmarks.report import Ratio, Row
from benchmarks.workloads import Shared

Say = Callable[[str], None]
TURN = 0.5  # seconds that a turn should take at least, so that a short round is not one tick of noise
MOST = 50  # rounds in a turn


def compare(
    work: Shared, tools: Sequence[Tool], repetitions: int, targets: Mapping[str, tuple[str, float]], say: Say
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
        turns = {name: max(1, min(MOST, round(TURN / one.rounds(1)[0]))) for name, one in running.items()}
        seconds: dict[str, list[float]] = {name: [] for name in running}
        for repetition in range(repetitions):
            say(f"{work.name}: repetition {repetition + 1} of {repetitions}")
            for name, one in running.items():
                seconds[name].append(statistics.median(one.rounds(turns[name])))
        threads = {name: one.threads for name, one in running.items()}
    rows = [Row(work.name, "Unalike", Ratio.of([work.steps / s for s in seconds[UNALIKE.name]]), "client-steps/s")]
    for name in seconds:
        if name != UNALIKE.name:
            ratios = [peer / own for peer, own in zip(seconds[name], seconds[UNALIKE.name], strict=True)]
            rows.append(Row(work.name, f"{name} / Unalike", Ratio.of(ratios), target=targets.get(name)))
    raw = {"seconds_per_round": seconds, "client_steps": work.steps, "threads": threads, "left_out": skipped}
    return rows, raw
