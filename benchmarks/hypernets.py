"""How few bytes may methods send? ``python -m benchmarks.hypernets PART [--seeds N] [--only WORD] [--out FOLDER]``.

``bytes``: FLowDUP's h with other widths and ranks, in half precision, and with changes in few bits, on rotated digits;
the best on rotated MNIST and Fashion-MNIST, too. ``heads``: ranks of the last layer of PeFLL, pFedHN and ODPFL-HN.
``bits``: messages of 16, 8 and 4 bits; ``--figure FILE`` draws them. A line for each setting: the accuracy on seen and
unseen clients in percent, its mean over the seeds first, and what travels for a client in a round, up and down.
Finished runs in FOLDER are not run again.
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
ROTATED_MNIST, ROTATED_FASHION = (
    {"name": name, "partition": "rotation", "clients": 100, "unseen": 0.2, "samples": 60}
    for name in ("mnist", "fashion-mnist")
)
TWO_CLASSES = {"name": "digits", "partition": "pathological:2", "clients": 60, "unseen": 0.2}
TWO_OF_MNIST = {"name": "mnist", "partition": "pathological:2", "clients": 100, "unseen": 0.2, "samples": 200}
TWO_OF_CIFAR = {"name": "cifar-10", "partition": "pathological:2", "clients": 100, "unseen": 0.2}
Setting = tuple[str, dict[str, Any]]  # what it is called, and the recipe

SMALL = {"features": 64, "width": 16}
FLOWDUP: dict[str, Mapping[str, Any]] = {
    "as it is": {},
    "half precision": {"half": True},
    "features 64, width 16": SMALL,
    "features 64, rank 8": {"features": 64, "rank": 8},
    "features 64, width 16, half": {**SMALL, "half": True},
    "features 64, width 8, half": {"features": 64, "width": 8, "half": True},
    "features 64, rank 8, half": {"features": 64, "rank": 8, "half": True},
    "features 64, width 16, half, 4 bits": {**SMALL, "half": True, "bits": 4},
    "rank 8, half, 4 bits": {"rank": 8, "half": True, "bits": 4},
    "features 64, rank 16, half, 4 bits": {"features": 64, "rank": 16, "half": True, "bits": 4},
    "features 64, rank 32, half, 4 bits": {"features": 64, "rank": 32, "half": True, "bits": 4},
}
KEPT = ("as it is", *(title for title in FLOWDUP if "rank" in title and title.endswith(("8, half", "4 bits"))))
RANKS = (None, 32, 16, 8)


def recipe(method: str, data: dict[str, Any], rounds: int, model: str | None = None, **settings: Any) -> dict[str, Any]:
    named = {} if model is None else {"model": {"name": model}}
    return {"method": method, "data": data, "rounds": rounds, "hyperparameters": settings, **named}


def smaller_flowdups() -> list[Setting]:
    on = [("", ROTATED, tuple(FLOWDUP)), ("MNIST, ", ROTATED_MNIST, KEPT), ("Fashion-MNIST, ", ROTATED_FASHION, KEPT)]
    return [
        (f"flowdup, {name}{title}", recipe("flowdup", data, 50, **dict(FLOWDUP[title])))
        for name, data, titles in on
        for title in titles
    ]


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


def fewer_bits() -> list[Setting]:
    """An MLP on digits. AdaPeD's clients keep a model anyway, so they keep what rounding takes off, too."""
    works: list[tuple[str, dict[str, Any], int, dict[str, Any]]] = [
        ("fedavg", ROTATED, 60, {"cohort": 10}),
        ("pefll", TWO_CLASSES, 60, {}),
        ("flowdup", ROTATED, 30, {}),
        ("adaped", TWO_CLASSES, 60, {"cohort": 10}),
    ]
    return [
        (
            f"{method}, {bits or 32} bits",
            recipe(method, data, rounds, "mlp", **more, bits=bits, feedback=method == "adaped" and bits is not None),
        )
        for method, data, rounds, more in works
        for bits in (None, 16, 8, 4)
    ]


PARTS = {"bytes": smaller_flowdups, "heads": lower_ranks, "bits": fewer_bits}


def measure(title: str, settings: Mapping[str, Any], seed: int, out: Path) -> tuple[Result, float, float]:
    """The result of a run, and the bytes that travel for a client in a round, up and down."""
    folder = out / f"{title.replace(', ', '-').replace(' ', '-')}-{seed}"
    if not (folder / RESULT).is_file():
        run_recipe(to_recipe({**settings, "seed": seed}, title), folder)
    result, run = Result.load(folder), FinishedRun.open(folder)
    cohort = run.method.cohort  # type: ignore[attr-defined]
    asked = min(len(run.roster), cohort if isinstance(cohort, int) else max(1, round(cohort * len(run.roster))))
    return result, result.bytes.up / run.round / asked, result.bytes.down / run.round / asked


def draw(rows: list[dict[str, Any]], file: Path) -> None:
    """Accuracy by the bytes of updates, a line for each method."""
    import altair as alt

    from unalike.report.figures.file import save

    x = alt.X("bytes:Q", title="kB that a client sends in a round", scale=alt.Scale(type="log"))
    base = alt.Chart(alt.InlineData(values=rows)).encode(
        x=x,
        y=alt.Y("accuracy:Q", title="accuracy of training clients (%)", scale=alt.Scale(zero=False)),
        color=alt.Color("method:N", title=None),
    )
    text = base.mark_text(dy=-10, fontSize=10).encode(text="bits:N")
    save(alt.layer(base.mark_line(point=True), text).properties(width=420, height=280), file)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=PARTS)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--only", default="")
    parser.add_argument("--out", type=Path, default=Path("runs/hypernets"))
    parser.add_argument("--figure", type=Path)
    asked = parser.parse_args()
    rows = []
    print("| setting | kB up | kB down | seen | unseen |\n| --- | --- | --- | --- | --- |", flush=True)
    for title, settings in PARTS[asked.part]():
        if asked.only not in title:
            continue
        found = [measure(title, settings, seed, asked.out) for seed in range(asked.seeds)]
        values = {
            group: [100 * result.accuracy.of(group).mean for result, *_ in found]  # type: ignore[union-attr]
            for group in ("seen", "unseen")
        }
        shown = [" / ".join(f"{value:.1f}" for value in (mean(one), *one)) for one in values.values()]
        up, down = (mean(one[i] for one in found) / 1000 for i in (1, 2))
        print(f"| {title} | {up:.1f} | {down:.1f} | {' | '.join(shown)} |", flush=True)
        method, _, bits = title.partition(", ")
        rows.append({"method": method, "bits": bits, "bytes": up, "accuracy": mean(values["seen"])})
    if asked.figure is not None:
        draw(rows, asked.figure)


if __name__ == "__main__":
    main()
