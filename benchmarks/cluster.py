"""Workers of a Ray cluster against one process: rounds per second, the cost of an exchange, memory, the cost model.

make bench-cluster, or: .ci/loopback python -m benchmarks.cluster [speed flower exchange memory model] [--quick]

Workers have one thread each, and so has the one process that they are compared with; both take turns, round by round.
Beside the time there is that of processors, which says what idle ones would need: one process / (driver + the worker
that needs most). All numbers are from one run; the constants of ``benchmarks/plan.py`` are those of the
part "model" on the machine that its file names. The first time, Flower is installed into .bench, which needs a network:
``python -m benchmarks.cluster install``, outside of the namespace.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from benchmarks.cost_model import fit
from benchmarks.peers import FLOWER, Running
from benchmarks.report import machine
from benchmarks.workloads import MLP
from unalike.core.method import first_state, next_state
from unalike.deploy.session import Session
from unalike.runs.load import load_data
from unalike.runs.prepare import prepare
from unalike.runs.recipe.recipe import Data, Network, Recipe, Runtime

if TYPE_CHECKING:
    from unalike.runtime.workers import Tally

RESULTS = Path(__file__).resolve().parent / "results" / "cluster.json"
TARGETS = {"mlp": 1.8, "lenet": 1.8, "lenet-all": 1.8, "pefll": None}  # two workers / one process
BEGIN = time.perf_counter()


def say(text: str) -> None:
    print(f"[{time.perf_counter() - BEGIN:5.0f} s] {text}", flush=True)


def recipe(work: str, cohort: int | None = None, runtime: Runtime | None = None) -> Recipe:
    """The work of a round. Blocks are fixed, so that all compute the same."""
    points = "gaussian-mixture:clients=12000,points=20,dim=64,components=10"
    images = Data(name="mnist", partition="iid", clients=1000, samples=20, unseen=0, test=0)
    local = {"epochs": 1, "batch": 10, "lr": 0.05}
    kinds: dict[str, tuple[str, Data, str, dict[str, Any], int]] = {
        "mlp": ("fedavg", Data(name=points, unseen=0), "mlp", {"cohort": cohort or 10_000, "local": local}, 64),
        "lenet": (
            "fedavg",
            images,
            "lenet",
            {"cohort": cohort or 200, "local": local},
            25,
        ),
        # of 200 clients, chance gives one worker 5 % more than half; of all of them, nothing
        "lenet-all": ("fedavg", images, "lenet", {"cohort": cohort or 1000, "local": local}, 25),
        "pefll": (
            "pefll",
            images,
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


class Turns:
    """Rounds of a recipe in this process or on workers, one at a time."""

    def __init__(self, one: Recipe, session: Session | None) -> None:
        population = load_data(one) if session is None else session.load(one, b"")
        prepared = prepare(one, population)
        self.method, self.federation = prepared.method, prepared.federation(session)
        self.state, self.number = first_state(self.method, self.federation.seed), 0
        self.tallies: list[Tally] = [] if session is None else self.federation.runtime.tallies  # type: ignore[attr-defined]
        self.seconds, self.cpu, self.own_cpu = list[float](), list[float](), list[float]()

    def round(self) -> None:
        self.number += 1
        before = [tally.cpu for tally in self.tallies]
        begin, own = time.perf_counter(), time.process_time()
        self.state = next_state(self.method, self.state, self.federation, self.number)
        self.seconds.append(time.perf_counter() - begin)
        self.own_cpu.append(time.process_time() - own)
        workers = [tally.cpu - used for tally, used in zip(self.tallies, before, strict=True)]
        self.cpu.append(self.own_cpu[-1] + max(workers, default=0.0))

    def found(self, warm: int) -> dict[str, Any]:
        seconds, cpu, own = self.seconds[warm:], self.cpu[warm:], self.own_cpu[warm:]
        made: dict[str, Any] = {"seconds": seconds, "median": statistics.median(seconds), "least": min(seconds)}
        made |= {"cpu": statistics.median(cpu), "least_cpu": min(cpu), "driver_cpu": statistics.median(own)}
        if self.tallies:
            made["asks"] = self.tallies[0].asks / self.number
            made["bytes_down"] = sum(tally.bytes_down for tally in self.tallies) / self.number
            made["bytes_up"] = sum(tally.bytes_up for tally in self.tallies) / self.number
        return made


def rounds(one: Recipe, session: Session | None, repetitions: int, warm: int = 2) -> dict[str, Any]:
    """Some rounds, after a few that are not counted."""
    turns = Turns(one, session)
    for _ in range(warm + repetitions):
        turns.round()
    return turns.found(warm)


def on(workers: int) -> Runtime:
    return Runtime(name="ray", workers=workers)


WARM = {
    "mlp": 2,
    "lenet": 12,
    "lenet-all": 3,
    "pefll": 16,
}  # rounds that are not counted: until a worker's blocks are played back
STARTS = {"mlp": 5, "lenet": 1, "lenet-all": 3, "pefll": 1}  # of two workers


class Copy:
    """Another process that does the same rounds for itself: two of them at once are what the machine allows."""

    def __init__(self, work: str) -> None:
        command = [sys.executable, "-m", "benchmarks.cluster", "copy", work]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.seconds: list[float] = []

    def begin(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()

    def end(self) -> None:
        assert self._process.stdout is not None
        self.seconds.append(float(self._process.stdout.readline()))

    def close(self) -> None:
        self._process.communicate("")


def copy(work: str) -> None:
    """The other side of a ``Copy``: a round for each line."""
    turns = Turns(recipe(work), None)
    for _ in sys.stdin:
        turns.round()
        print(turns.seconds[-1], flush=True)


def allowed(work: str, warm: int, repetitions: int) -> dict[str, Any]:
    """Rounds per second of two processes that know nothing of each other, against one alone, in turns."""
    copies, alone, both = [Copy(work), Copy(work)], list[float](), list[float]()
    try:
        for _ in range(warm + repetitions):
            copies[0].begin()
            copies[0].end()
            alone.append(copies[0].seconds[-1])
            for one in copies:
                one.begin()
            for one in copies:
                one.end()
            both.append(statistics.mean(one.seconds[-1] for one in copies))
    finally:
        for one in copies:
            one.close()
    pairs = zip(alone[warm:], both[warm:], strict=True)
    return {"alone": alone[warm:], "both": both[warm:], "ratio": statistics.median(2 * a / b for a, b in pairs)}


def pair(work: str, workers: int, repetitions: int) -> None:
    """Rounds of one process and of workers, in turns, from where all of them play their blocks back; as JSON."""
    session = Session(on(workers))
    try:
        here, there = Turns(recipe(work), None), Turns(recipe(work, runtime=on(workers)), session)
        for _ in range(WARM[work] + repetitions):
            here.round()
            there.round()
    finally:
        session.close()
    print(json.dumps([here.found(WARM[work]), there.found(WARM[work])]))


def speed(quick: bool, works: Sequence[str] = tuple(TARGETS), counts: Sequence[int] = (1, 2)) -> dict[str, Any]:
    """Rounds per second: one process with one thread beside one worker, then beside two, taking turns.

    All processes are started anew a few times: two of the same code differ by a tenth for as long as they live.
    """
    repetitions, found = 3 if quick else 9, dict[str, Any]()
    works = [work for work in works if work == "mlp" or "UNALIKE_DATA" in os.environ]
    for work in works:
        found[work] = {"target": TARGETS[work]}
        for count in counts:
            starts = []
            for _ in range(1 if quick or count == 1 else STARTS[work]):
                command = [sys.executable, "-m", "benchmarks.cluster", "pair", work, str(count), str(repetitions)]
                said = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout
                one, made = json.loads(said.splitlines()[-1])
                pairs = zip(one["seconds"], made["seconds"], strict=True)
                made["ratio"] = statistics.median(ours / theirs for ours, theirs in pairs)
                made["cpu_ratio"] = one["cpu"] / made["cpu"]
                starts.append({**made, "beside": one})
                say(
                    f"{work}: one process {1 / one['median']:.3f} rounds/s, {count} workers {1 / made['median']:.3f}: "
                    f"{made['ratio']:.2f}×; of processors' time {made['cpu_ratio']:.2f}× (driver "
                    f"{1e3 * made['driver_cpu']:.0f} ms of {1e3 * made['cpu']:.0f} ms)"
                )
            ratio = statistics.median(start["ratio"] for start in starts)
            found[work][f"{count} workers"] = {"ratio": ratio, "starts": starts}
            say(f"{work}: {count} workers {ratio:.2f}×, the median of {len(starts)} starts")
        found[work]["two alone"] = bound = allowed(work, WARM[work], repetitions)
        found[work]["of what is allowed"] = found[work]["2 workers"]["ratio"] / bound["ratio"] if 2 in counts else None
        say(f"{work}: two processes that know nothing of each other do {bound['ratio']:.2f}× as much as one")
    return found


def flower(quick: bool) -> dict[str, Any]:
    """FedAvg with the MLP of benchmarks/workloads.py: two workers beside Flower's simulation, which is Ray's, too.

    There are fewer clients than in the other comparisons: Flower takes some hundredths of a second for each.
    """
    work, found = replace(MLP, clients=200, cohort=20 if quick else 50), dict[str, Any]()
    with tempfile.TemporaryDirectory() as folder:
        place = work.write(Path(folder))
        arrays = {name: np.load(place / f"{name}.npy") for name in ("x", "y", "sizes")}
        client = np.repeat(np.arange(len(arrays["sizes"])), arrays["sizes"])
        np.savez(place / "own.npz", x=arrays["x"], y=arrays["y"], client=client)
        one = Recipe(
            method="fedavg",
            data=Data(name=str(place / "own.npz"), unseen=0, test=0, normalize=False),
            model=Network(name="mlp"),
            hyperparameters={"cohort": work.cohort, "local": {"epochs": 1, "batch": work.batch, "lr": work.lr}},
            runtime=on(2).model_copy(update={"block": 25, "threads": 1}),
            rounds=1000,
        )
        session = Session(on(2))
        try:
            ours, warm = Turns(one, session), 2
            begin, taken = time.perf_counter(), list[float]()
            with Running(FLOWER, place) as theirs:
                started_after = time.perf_counter() - begin
                say(f"Flower's simulation has started, and run its first rounds, in {started_after:.0f} s")
                for _ in range(warm + (2 if quick else 5)):
                    ours.round()
                    taken += theirs.rounds(1)
        finally:
            session.close()
        found = {
            "clients": work.cohort,
            "unalike": ours.found(warm),
            "flower": taken[warm:],
            "flower_start": started_after,
        }
        found["ratio"] = statistics.median(found["flower"]) / found["unalike"]["median"]
        say(
            f"{work.cohort} clients a round: two workers {found['unalike']['median']:.3f} s, Flower's simulation "
            f"{statistics.median(found['flower']):.3f} s ({found['ratio']:.0f}×)"
        )
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
    """Resident memory of a worker, and the most that it ever had, with ever more clients of four rows.

    They are in an NPZ file, of which a worker reads its rows, or made by every worker as a whole, to be thrown away.
    """
    found = []
    for clients in (10_000, 100_000) if quick else (10_000, 100_000, 1_000_000):
        with tempfile.TemporaryDirectory() as folder:
            random, file = np.random.default_rng(0), Path(folder) / "own.npz"
            x = random.standard_normal((4 * clients, 16), dtype=np.float32)
            np.savez(file, x=x, y=random.integers(10, size=len(x)), client=np.repeat(np.arange(clients), 4))
            del x
            made = f"gaussian-mixture:clients={clients},points=4,dim=16,components=10"
            for kind, name in (("file", str(file)), ("made", made)):
                data = Data(name=name, unseen=0, test=0, normalize=False)
                one = recipe("mlp", 1000, on(2)).model_copy(update={"data": data})
                session = Session(on(2))
                try:
                    took = rounds(one, session, 1, warm=1)
                    status = [Path(f"/proc/{pid}/status").read_text() for pid in session.workers.processes()]
                finally:
                    session.close()
                resident, most = (
                    max(int(line.split()[1]) / 1e3 for text in status for line in text.splitlines() if what in line)
                    for what in ("VmRSS", "VmHWM")
                )
                row = {"clients": clients, "data": kind, "resident_mb": resident, "most_mb": most}
                found.append({**row, "round": took["median"]})
                say(f"{clients:,} clients ({kind}) on two workers: {resident:.0f} MB each, at most {most:.0f} MB")
    return found


FITTED = [("mlp", 500, 1), ("mlp", 2000, 1), ("mlp", 8000, 1), ("mlp", 500, 2), ("mlp", 8000, 2), ("lenet", 300, 1)]
CHECKED = [("mlp", 3000, 1), ("mlp", 1500, 2), ("mlp", 6000, 2), ("lenet", 150, 1), ("lenet", 200, 2)]
CHECKED += [("lenet", 400, 2)]


def sample(workers: int, repetitions: int) -> None:
    """The least seconds of a round in each setting of the model with so many workers, or of a client with none."""
    found: list[dict[str, Any]] = []
    works = [one for one in (*FITTED, *CHECKED) if one[0] == "mlp" or "UNALIKE_DATA" in os.environ]
    if workers == 0:  # what `benchmarks.plan` does: a few clients, in one process
        for work, least in (("mlp", 1000), ("lenet", 50)):
            if any(one[0] == work for one in works):
                seconds = rounds(recipe(work, least), None, repetitions)["least"] / least
                found.append({"work": work, "cohort": 1, "workers": 0, "least": seconds})
    else:
        session = Session(on(workers))
        try:
            for work, cohort, count in works:
                if count == workers:
                    made = rounds(recipe(work, cohort, on(count)), session, repetitions)
                    found.append({**made, "work": work, "cohort": cohort, "workers": count})
        finally:
            session.close()
    print(json.dumps(found))


def model(quick: bool) -> dict[str, Any]:
    """Fit the cost model, and check it on settings that it was not fitted on.

    A round's time is the least of some, as what else the machine does can only add to it, and the median of three
    starts, as two processes of the same code differ by a tenth for as long as they live.
    """
    starts = dict[tuple[str, int, int], list[dict[str, Any]]]()
    for _ in range(1 if quick else 3):
        for count in (0, 1, 2):
            command = [sys.executable, "-m", "benchmarks.cluster", "sample", str(count), str(4 if quick else 7)]
            said = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout
            for one in json.loads(said.splitlines()[-1]):
                starts.setdefault((one["work"], one["cohort"], one["workers"]), []).append(one)
    typical = {name: statistics.median(one["least"] for one in made) for name, made in starts.items()}
    client = {work: seconds for (work, _, workers), seconds in typical.items() if workers == 0}
    measured = [
        {**made[0], "median": typical[name], "client": client[name[0]], "starts": [one["least"] for one in made]}
        for name, made in starts.items()
        if name[2]
    ]
    fitted = [one for one in measured if (one["work"], one["cohort"], one["workers"]) in FITTED]
    found = fit(fitted)
    rows = []
    for one in measured:
        predicted = found.seconds(
            clients=one["cohort"],
            workers=one["workers"],
            client=one["client"],
            asks=one["asks"],
            bytes_per_worker=(one["bytes_down"] + one["bytes_up"]) / one["workers"],
        )["total"]
        rows.append({**one, "predicted": predicted, "off": predicted / one["median"] - 1, "fitted": one in fitted})
        kind = "fitted" if one in fitted else "checked"
        say(
            f"{kind}: {one['work']}, {one['cohort']:,} clients, {one['workers']} workers: {one['median']:.3f} s, "
            f"the model says {predicted:.3f} s ({100 * rows[-1]['off']:+.0f} %)"
        )
    return {"constants": vars(found), "rows": rows}


PARTS = {"speed": speed, "flower": flower, "exchange": exchange, "memory": memory, "model": model}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", default=list(PARTS), help=f"{', '.join(PARTS)}; or install: Flower alone")
    parser.add_argument("--quick", action="store_true", help="fewer repetitions")
    parser.add_argument("--works", nargs="*", default=list(TARGETS), help=f"of speed: {', '.join(TARGETS)}")
    parser.add_argument("--out", type=Path, default=RESULTS)
    told = parser.parse_args()
    torch.set_num_threads(1)
    if told.parts[:1] == ["copy"]:
        copy(told.parts[1])
        return
    if told.parts[:1] == ["pair"]:
        pair(told.parts[1], int(told.parts[2]), int(told.parts[3]))
        return
    if told.parts[:1] == ["sample"]:
        sample(int(told.parts[1]), int(told.parts[2]))
        return
    if told.parts == ["install"]:
        say(f"Flower is in {FLOWER.python()}")
        return
    content = json.loads(told.out.read_text()) if told.out.exists() else {}
    content["machine"] = machine()
    for part in told.parts or PARTS:
        if part == "speed":
            content.setdefault(part, {}).update(speed(told.quick, told.works))
        else:
            content[part] = PARTS[part](told.quick)
        told.out.write_text(json.dumps(content, indent=1) + "\n")
    say(f"written: {told.out}")


if __name__ == "__main__":
    main()
