"""``python -m benchmarks``: measure, print a table, keep a JSON."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from benchmarks import adaped, dpsgd, noise, own, plans, scale, secure_sum, start, tables
from benchmarks.compare import compare
from benchmarks.peers import BARE, FLOWER, PFL, Tool
from benchmarks.plans import nothing_remembered
from benchmarks.report import Ratio, Row, machine, table
from benchmarks.workloads import LENET, LENET_CIFAR, MLP, PEFLL, Shared

Measured = tuple[list[Row], dict[str, Any]]
Part = Callable[[int, bool], Measured]  # repetitions, quick
RESULTS = Path(__file__).resolve().parent / "results"
BEGIN = time.perf_counter()
TOOLS = {"loop": BARE, "pfl": PFL, "flower": FLOWER}  # beside Unalike


def say(text: str) -> None:
    print(f"[{time.perf_counter() - BEGIN:5.0f} s] {text}", flush=True)


def beside_others(work: Shared, targets: dict[str, tuple[str, float]]) -> Part:
    def part(repetitions: int, quick: bool) -> Measured:
        return compare(work.quick() if quick else work, list(TOOLS.values()), repetitions, targets, say)

    return part


def versions(checkout: Path, only: list[str] | None = None) -> Part:
    """Unalike beside another version of itself: this one may take 3 % longer, in CPU time.

    Both have the same blocks, those that are found on idle cores. How well a version finds them is another question:
    the part ``plans`` asks it. only: some of the works. Every repetition starts both anew and lets them take five
    turns: two processes of one version differ by more than two versions should, for as long as they live.
    """
    works = {"mlp": (MLP, 100), "lenet": (LENET, 25), "pefll": (PEFLL, 1)}
    before = Tool("before", "run_unalike.py", root=checkout.resolve())

    def part(repetitions: int, quick: bool) -> Measured:
        rows: list[Row] = []
        raw: dict[str, Any] = {}
        for full, block in (works[name] for name in works if only is None or name in only):
            work, ratios, raw[full.name] = replace(full.quick() if quick else full, block=block), [], []
            for _ in range(repetitions):
                found, seconds = compare(work, [before], 5, {}, say, "cpu")
                ratios += [row.value.median for row in found if row.what == "before / Unalike"]
                if seconds["left_out"]:
                    raise SystemExit(f"the other version did not start: {seconds['left_out']}")
                raw[full.name].append(seconds)
            rows.append(Row(full.name, "before / Unalike", Ratio.of(ratios), target=("≥", 0.97)))
        return rows, raw

    return part


def privacy(repetitions: int, quick: bool) -> Measured:
    return [], {"secure_sum": secure_sum.run(), "dpsgd": dpsgd.run()}


def large_tables(repetitions: int, quick: bool) -> Measured:
    return tables.measure([100_000] if quick else [1_000_000, 10_000_000])


def population(repetitions: int, quick: bool) -> Measured:
    return scale.measure(20_000 if quick else 1_000_000, 2_000 if quick else 10_000, 3 if quick else 10)


PARTS: dict[str, Part] = {
    "start": start.start,
    "mlp": beside_others(MLP, {BARE.name: ("≥", 12), PFL.name: ("≥", 20), FLOWER.name: ("≥", 20)}),
    "lenet": beside_others(LENET, {PFL.name: ("≥", 1.9)}),
    "lenet-cifar": beside_others(LENET_CIFAR, {}),
    "plans": plans.measure,
    "overhead": own.overhead,
    "unequal": own.unequal,
    "pefll": own.pefll,
    "adaped": adaped.measure,
    "unequal-dpsgd": dpsgd.unequal,
    "evaluation": own.evaluation,
    "mdm": own.mdm,
    "kmeans": own.kmeans,
    "scale": population,
    "tables": large_tables,
    "noise": noise.measure,
    "privacy": privacy,
}


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks",
        description="Times Unalike and other tools on the same work, in turns: PyTorch alone, pfl-research, Flower.",
    )
    parser.add_argument("--quick", action="store_true", help="small cohorts and few repetitions: a look, no verdict")
    parser.add_argument("--only", nargs="+", choices=list(PARTS), metavar="PART", help=f"of: {', '.join(PARTS)}")
    parser.add_argument("--repetitions", type=int, help="turns of every tool (default: 7; quick: 2)")
    parser.add_argument("--save", type=Path, help="where the JSON goes (default: a file in benchmarks/results)")
    parser.add_argument(
        "--threads", type=int, help="for every tool (default: each takes the number it is fastest with)"
    )
    parser.add_argument("--without", nargs="+", choices=list(TOOLS), default=[], help="tools to leave out")
    parser.add_argument(
        "--against",
        type=Path,
        metavar="CHECKOUT",
        help="time this version beside that of another checkout, nothing else; --only: of mlp, lenet, pefll",
    )
    chosen = parser.parse_args(arguments)
    for name in chosen.without:
        del TOOLS[name]
    if chosen.threads is not None:
        os.environ["OMP_NUM_THREADS"] = str(chosen.threads)
        torch.set_num_threads(chosen.threads)
    if chosen.against is not None:
        if not (chosen.against / "unalike" / "__init__.py").is_file():
            parser.error(f"--against: {chosen.against} is no checkout of Unalike; make one with git worktree add")
        PARTS["versions"] = versions(chosen.against, chosen.only)
    parts = ["versions"] if chosen.against is not None else chosen.only or list(PARTS)
    repetitions = chosen.repetitions or (2 if chosen.quick else 7)
    about = "about 5 minutes" if chosen.quick else "about 20 minutes on two idle cores"
    print(f"Measuring {', '.join(parts)}: {about}. The first run also installs the other tools into .bench.\n")
    before = machine()
    rows: list[Row] = []
    raw: dict[str, Any] = {}
    file = chosen.save or RESULTS / ("quick.json" if chosen.quick else "latest.json")
    file.parent.mkdir(parents=True, exist_ok=True)
    result = {"machine": before, "quick": chosen.quick, "threads": chosen.threads, "repetitions": repetitions}
    for name in parts:
        say(f"{name} ...")
        with nothing_remembered():
            found, raw[name] = PARTS[name](repetitions, chosen.quick)
        rows.extend(found)
        seconds = round(time.perf_counter() - BEGIN)
        kept = {**result, "seconds": seconds, "rows": [row.as_json() for row in rows], "raw": raw}
        # after every part, so that a run which is broken off leaves those that it has
        file.write_text(json.dumps(kept, indent=1) + "\n")
    print(f"\n{table(rows)}\n\nA ratio of two times is taken within one turn; median (lowest to highest) of the turns.")
    for name, values in raw.items():
        for tool, reason in values.get("left_out", {}).items():
            print(f"{name}: {tool} was left out: {reason}")
    if "privacy" in raw:
        print(json.dumps(raw["privacy"], indent=2))
    shown = file
    with contextlib.suppress(ValueError):
        shown = file.resolve().relative_to(Path.cwd())
    print(f"\nTook {seconds} s. Kept in {shown}.")
    missed = [row for row in rows if row.met is False]
    if missed:
        print(f"{len(missed)} of {sum(row.met is not None for row in rows)} targets missed.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
