"""Workers of a Ray cluster against one process: rounds per second, the cost of an exchange, memory, the cost model.

make bench-cluster, or: .ci/loopback python -m benchmarks.cluster [speed exchange memory model] [--quick]

Workers have one thread each, and so has the one process that they are compared with. All numbers are from one run; the
constants of ``unalike/studio/cluster/costs.py`` are those of the part "model" on the machine that its file names.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks.report import machine
from unalike.core.method import next_state, started
from unalike.studio.cluster import costs
from unalike.studio.cluster.session import Session
from unalike.studio.recipe.recipe import Data, Network, Recipe, Runtime
from unalike.studio.runs.prepare import load_data, prepare

RESULTS = Path(__file__).resolve().parent / "results" / "cluster.json"
TARGETS = {"mlp": 1.8, "lenet": 1.8, "pefll": None}  # two workers / one process
BEGIN = time.perf_counter()


def say(text: str) -> None:
    print(f"[{time.perf_counter() - BEGIN:5.0f} s] {text}", flush=True)


def recipe(work: str, cohort: int | None = None, runtime: Runtime | None = None) -> Recipe:
    """The work of a round. Blocks are fixed, so that all compute the same."""
    points = "gaussian-mixture:clients=12000,points=20,dim=64,components=10"
    local = {"epochs": 1, "batch": 10, "lr": 0.05}
    kinds: dict[str, tuple[str, Data, str, dict[str, Any], int]] = {
        "mlp": ("fedavg", Data(name=points, unseen=0), "mlp", {"cohort": cohort or 10_000, "local": local}, 64),
        "lenet": (
            "fedavg",
            Data(name="mnist", partition="iid", clients=1000, samples=20, unseen=0, test=0),
            "lenet",
            {"cohort": cohort or 200, "local": local},
            25,
        ),
        "pefll": (
            "pefll",
            Data(name="mnist", partition="iid", clients=1000, samples=20, unseen=0, test=0),
            "lenet",
            {"cohort": cohort or 64, "local": {"epochs": None, "steps": 5, "batch": 10, "lr": 0.05}},
            16,
        ),
    }
    method, data, model, hyperparameters, block = kinds[work]
    how = (runtime or Runtime()).model_copy(update={"block": block, "threads": 1})
    return Recipe(
        method=method, data=data, model=Network(name=model), hyperparameters=hyperparameters, runtime=how, rounds=1000
    )


def rounds(one: Recipe, session: Session | None, repetitions: int, warm: int = 2) -> dict[str, Any]:
    """Seconds of some rounds, after a few that are not counted."""
    population = load_data(one) if session is None else session.load(one, b"")
    prepared = prepare(one, population)
    federation = prepared.federation(session)
    state = started(prepared.method, federation.seed)
    taken, busy = [], []
    for number in range(1, warm + repetitions + 1):
        before = [] if session is None else [tally.seconds for tally in federation.runtime.tallies]  # type: ignore[attr-defined]
        begin = time.perf_counter()
        state = next_state(prepared.method, state, federation.begin_round(number))
        if number > warm:
            taken.append(time.perf_counter() - begin)
            if session is not None:
                now = [tally.seconds for tally in federation.runtime.tallies]  # type: ignore[attr-defined]
                busy.append(max(b - a for a, b in zip(before, now, strict=True)))
    found: dict[str, Any] = {"seconds": taken, "median": statistics.median(taken), "least": min(taken)}
    if session is not None:
        found |= {"at_work": statistics.median(busy), "asks": federation.runtime.tallies[0].asks / (warm + repetitions)}  # type: ignore[attr-defined]
        found["bytes_down"] = sum(t.bytes_down for t in federation.runtime.tallies) / (warm + repetitions)  # type: ignore[attr-defined]
        found["bytes_up"] = sum(t.bytes_up for t in federation.runtime.tallies) / (warm + repetitions)  # type: ignore[attr-defined]
    return found


def on(workers: int) -> Runtime:
    return Runtime(name="ray", workers=workers)


def speed(quick: bool) -> dict[str, Any]:
    """Rounds per second: one process with one thread, one worker, two workers."""
    repetitions, found = 3 if quick else 9, dict[str, Any]()
    works = list(TARGETS) if "UNALIKE_DATA" in os.environ else ["mlp"]
    for work in works:
        found[work] = {"one process": rounds(recipe(work), None, repetitions)}
        say(f"{work}: one process {1 / found[work]['one process']['median']:.3f} rounds/s")
    for count in (1, 2):
        session = Session(on(count))
        try:
            for work in works:
                made = found[work][f"{count} workers"] = rounds(recipe(work, runtime=on(count)), session, repetitions)
                ratio = found[work]["one process"]["median"] / made["median"]
                say(f"{work}: {count} workers {1 / made['median']:.3f} rounds/s, {ratio:.2f}× one process")
        finally:
            session.close()
    for work in works:
        ratio = found[work]["one process"]["median"] / found[work]["2 workers"]["median"]
        found[work] |= {"two workers / one process": ratio, "target": TARGETS[work]}
    return found


def exchange(quick: bool) -> dict[str, Any]:
    """Seconds for a call to two workers that does nothing, with a message of so many bytes to each."""
    import ray

    session, found = Session(on(2)), {}
    try:
        for size in (10_000, 1_000_000, 50_000_000):
            text, taken = b"{" + b" " * size + b"}", []
            session.workers.tell("load", [(b"benchmarks.cluster:Nothing", b"")] * 2)
            for _ in range(3 if quick else 10):
                begin = time.perf_counter()
                stored = ray.put(text)
                futures = [session.workers.begin(number, "view", stored) for number in range(2)]
                for number, future in enumerate(futures):
                    session.workers.wait(number, future)
                taken.append(time.perf_counter() - begin)
            found[str(size)] = statistics.median(taken)
            say(f"an exchange of {size:,} bytes with two workers: {1e3 * found[str(size)]:.1f} ms")
    finally:
        session.close()
    return found


class Nothing:
    """A site for calls that do nothing."""

    def __init__(self, settings: str) -> None: ...

    def about(self) -> bytes:
        return b""

    def shard(self, settings: str, mine: torch.Tensor) -> Any: ...

    def view(self, what: str) -> bytes:
        return b""


def memory(quick: bool) -> list[dict[str, Any]]:
    """Resident memory of a worker, and the most that it ever had, with ever more clients of four rows."""
    found = []
    for clients in (10_000, 100_000) if quick else (10_000, 100_000, 1_000_000):
        name = f"gaussian-mixture:clients={clients},points=4,dim=16,components=10"
        one = recipe("mlp", 1000, on(2)).model_copy(update={"data": Data(name=name, unseen=0)})
        session = Session(on(2))
        try:
            made = rounds(one, session, 1, warm=1)
            status = [Path(f"/proc/{pid}/status").read_text() for pid in session.workers.processes()]
        finally:
            session.close()
        resident, most = (
            max(int(line.split()[1]) / 1e3 for text in status for line in text.splitlines() if line.startswith(what))
            for what in ("VmRSS", "VmHWM")
        )
        found.append({"clients": clients, "resident_mb": resident, "most_mb": most, "round": made["median"]})
        say(f"{clients:,} clients on two workers: {resident:.0f} MB each, at most {most:.0f} MB")
    return found


FITTED = [("mlp", 500, 1), ("mlp", 2000, 1), ("mlp", 8000, 1), ("mlp", 500, 2), ("mlp", 8000, 2), ("lenet", 300, 1)]
CHECKED = [("mlp", 3000, 1), ("mlp", 1500, 2), ("mlp", 6000, 2), ("lenet", 150, 1), ("lenet", 200, 2)]
CHECKED += [("lenet", 400, 2)]


def model(quick: bool) -> dict[str, Any]:
    """Fit the cost model, and check it on settings that it was not fitted on.

    A round's time is the least of some: what else the machine does can only add to it.
    """
    repetitions = 4 if quick else 7
    works = [one for one in (*FITTED, *CHECKED) if one[0] == "mlp" or "UNALIKE_DATA" in os.environ]
    client = {}
    for work, least in (("mlp", 1000), ("lenet", 50)):
        if any(one[0] == work for one in works):  # what `unalike plan` does: a few clients, in one process
            client[work] = rounds(recipe(work, least), None, repetitions)["least"] / least
            say(f"{work}: {1e6 * client[work]:.0f} µs of one client")
    measured = []
    for count in (1, 2):
        session = Session(on(count))
        try:
            for work, cohort, workers in works:
                if workers == count:
                    made = rounds(recipe(work, cohort, on(count)), session, repetitions)
                    made |= {"work": work, "cohort": cohort, "workers": count, "client": client[work]}
                    measured.append({**made, "median": made["least"]})
        finally:
            session.close()
    fitted = [one for one in measured if (one["work"], one["cohort"], one["workers"]) in FITTED]
    found = costs.fitted(fitted)
    rows = []
    for one in measured:
        predicted = found.seconds(
            clients=one["cohort"],
            workers=one["workers"],
            client=one["client"],
            asks=one["asks"],
            bytes_per_worker=(one["bytes_down"] + one["bytes_up"]) / one["workers"],
        ).total
        rows.append({**one, "predicted": predicted, "off": predicted / one["median"] - 1, "fitted": one in fitted})
        kind = "fitted" if one in fitted else "checked"
        say(
            f"{kind}: {one['work']}, {one['cohort']:,} clients, {one['workers']} workers: {one['median']:.3f} s, "
            f"the model says {predicted:.3f} s ({100 * rows[-1]['off']:+.0f} %)"
        )
    return {"constants": vars(found), "rows": rows}


PARTS = {"speed": speed, "exchange": exchange, "memory": memory, "model": model}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", default=list(PARTS), help=", ".join(PARTS))
    parser.add_argument("--quick", action="store_true", help="fewer repetitions")
    parser.add_argument("--out", type=Path, default=RESULTS)
    told = parser.parse_args()
    torch.set_num_threads(1)
    content = json.loads(told.out.read_text()) if told.out.exists() else {}
    content["machine"] = machine()
    for part in told.parts or PARTS:
        content[part] = PARTS[part](told.quick)
        told.out.write_text(json.dumps(content, indent=1) + "\n")
    say(f"written: {told.out}")


if __name__ == "__main__":
    main()
