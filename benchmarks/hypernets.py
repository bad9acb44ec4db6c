"""How small may what makes models be? ``python -m benchmarks.hypernets PART [--seeds N] [--only WORD] [--out FOLDER]``.

``bytes``: FLowDUP's h with other widths and ranks, and in half precision, on rotated digits. ``heads``: ranks of the
last layer of PeFLL, pFedHN and ODPFL-HN. A line for each setting: the accuracy on seen and unseen clients in percent,
its mean over the seeds first, and what a client sends in a round. Finished runs in FOLDER are not run again.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path
from statistics import mean
from typing import Any

from unalike.runs.finished import FinishedRun
from unalike.runs.folder import RESULT
from unalike.runs.recipe.recipe import to_recipe
from unalike.runs.result import Result
from unalike.runs.run import run_recipe

ROTATED = {"name": "digits", "partition": "rotation", "clients": 60, "unseen": 0.2}
TWO_CLASSES = {"name": "digits", "partition": "pathological:2", "clients": 60, "unseen": 0.2}
TWO_OF_MNIST = {"name": "mnist", "partition": "pathological:2", "clients": 100, "unseen": 0.2, "samples": 200}
TWO_OF_CIFAR = {"name": "cifar-10", "partition": "pathological:2", "clients": 100, "unseen": 0.2}
Setting = tuple[str, dict[str, Any]]  # what it is called, and the recipe

SMALL = {"features": 64, "width": 16}
FLOWDUP: dict[str, Mapping[str, Any]] = {
    "as it is": {},
    "half precision": {"half": True},
    "features 64, width 16": SMALL,
    "features 64, width 8": {"features": 64, "width": 8},
    "features 64, rank 8": {"features": 64, "rank": 8},
    "features 64, width 16, half": {**SMALL, "half": True},
    "features 64, width 8, half": {"features": 64, "width": 8, "half": True},
    "features 64, rank 8, half": {"features": 64, "rank": 8, "half": True},
}
RANKS = (None, 32, 16, 8)


def recipe(method: str, data: dict[str, Any], rounds: int, model: str | None = None, **settings: Any) -> dict[str, Any]:
    named = {} if model is None else {"model": {"name": model}}
    return {"method": method, "data": data, "rounds": rounds, "hyperparameters": settings, **named}


def smaller_flowdups() -> list[Setting]:
    return [(f"flowdup, {title}", recipe("flowdup", ROTATED, 50, **dict(change))) for title, change in FLOWDUP.items()]


def lower_ranks() -> list[Setting]:
    works = [
        ("digits", TWO_CLASSES, 100, ("pefll", "odpfl", "pfedhn")),
        ("mnist", TWO_OF_MNIST, 100, ("pefll",)),
        ("cifar-10", TWO_OF_CIFAR, 100, ("pefll",)),
    ]
    return [
        (f"{method} on {name}, {'full' if rank is None else f'rank {rank}'}", recipe(method, data, rounds, rank=rank))
        for name, data, rounds, methods in works
        for method in methods
        for rank in (RANKS if name == "digits" else (None, 16))
    ]


PARTS = {"bytes": smaller_flowdups, "heads": lower_ranks}


def measure(title: str, settings: Mapping[str, Any], seed: int, out: Path) -> tuple[Result, float]:
    """The result of a run, and the bytes that a client sent up in a round."""
    folder = out / f"{title.replace(', ', '-').replace(' ', '-')}-{seed}"
    if not (folder / RESULT).is_file():
        run_recipe(to_recipe({**settings, "seed": seed}, title), folder)
    result, run = Result.load(folder), FinishedRun.open(folder)
    cohort = run.method.cohort  # type: ignore[attr-defined]
    asked = min(len(run.roster), cohort if isinstance(cohort, int) else max(1, round(cohort * len(run.roster))))
    return result, result.bytes.up / run.round / asked


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=PARTS)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--only", default="")
    parser.add_argument("--out", type=Path, default=Path("runs/hypernets"))
    asked = parser.parse_args()
    print("| setting | kB up, a client and round | seen | unseen |\n| --- | --- | --- | --- |", flush=True)
    for title, settings in PARTS[asked.part]():
        if asked.only not in title:
            continue
        found = [measure(title, settings, seed, asked.out) for seed in range(asked.seeds)]
        scores = [
            " / ".join(f"{100 * value:.1f}" for value in (mean(values), *values))
            for group in ("seen", "unseen")
            if (values := [result.accuracy.of(group).mean for result, _ in found])  # type: ignore[union-attr]
        ]
        print(f"| {title} | {mean(size for _, size in found) / 1000:.0f} | {' | '.join(scores)} |", flush=True)


if __name__ == "__main__":
    main()
