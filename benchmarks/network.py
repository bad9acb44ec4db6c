"""A network on the loopback: what an exchange takes with 3, 10 and 30 nodes, and what is left after random faults.

python -m benchmarks.network times           what the transport alone takes; nodes answer what they are sent
python -m benchmarks.network rounds          rounds of FedAvg at three sites, beside the same in one process
python -m benchmarks.network soak 1200       seconds of runs with random faults, each compared with an undisturbed one
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import resource
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from tests.network.sites import Network, rows, together
from unalike.api import resume, run
from unalike.deploy import keys
from unalike.deploy.node.ledger import SiteLedger
from unalike.runs import checkpoint, folder
from unalike.runs.errors import UserError
from unalike.runs.folder import read_metrics
from unalike.runs.watcher import Watcher
from unalike.runtime.network.reach import Nodes

RESULT = Path(__file__).parent / "results" / "network.json"
SIZES = {"10 kB": 10_000, "1 MB": 1_000_000, "50 MB": 50_000_000}
NAMES = ("a", "b", "c")


def echo(site: Path) -> None:
    """A node whose host gives back what it is sent."""
    from unalike.runtime.network.dial import Dial

    facts, pair = keys.bundle_of(site)
    dial = Dial(lambda: lambda what, *data: b"+" + b"".join(data), "echo", 1 << 30, lambda text: None)
    asyncio.run(dial.keep(facts["address"], pair.key, pair.certificate, facts["authority"].encode()))


def times(counts: tuple[int, ...] = (3, 10, 30)) -> list[dict[str, Any]]:
    """Seconds until all nodes have been sent so many bytes, and have sent them back; medians."""
    found = []
    for count in counts:
        with tempfile.TemporaryDirectory() as made:
            network, names = Network(Path(made)), [f"n{number}" for number in range(count)]
            try:
                network.start("hub", "network", "hub", str(network.hub))
                for name in names:
                    network.add_site(name, rows(0, 1, 2))
                    command = [sys.executable, "-m", "benchmarks.network", "echo", str(network.folder / name)]
                    network.processes[name] = subprocess.Popen(command)
                nodes = Nodes(network.hub, names)
                while len(network.until(network.status)["nodes"]) < count:
                    time.sleep(0.1)
                for label, size in SIZES.items():
                    if size * count > 6e8:  # more than this machine should hold twice
                        continue
                    data = os.urandom(size)
                    taken = [exchange(nodes, data) for _ in range(3 if size > 1e7 else 20)][1:]
                    found.append({"nodes": count, "message": label, "seconds": statistics.median(taken)})
                    print(f"{count:3} nodes, {label:>5}: {1000 * found[-1]['seconds']:8.1f} ms", flush=True)
                nodes.close()
            finally:
                network.close()
    return found


def exchange(nodes: Nodes, data: bytes) -> float:
    begin = time.perf_counter()
    answers = [nodes.begin(number, "echo", data) for number in range(nodes.count)]
    assert all(len(one.result(300)) == len(data) + 1 for one in answers)
    return time.perf_counter() - begin


@contextmanager
def three_sites() -> Iterator[Network]:
    with tempfile.TemporaryDirectory() as made:
        network = Network(Path(made))
        try:
            for number, name in enumerate(NAMES):
                network.add_site(name, rows(number), rounds=50, hours=24)
            network.start_all(*NAMES)
            yield network
        finally:
            network.close()


class Clock(Watcher):
    """When each round ended; and a fault after one of them."""

    def __init__(self, after: int = 0, fault: Callable[[], object] = lambda: None) -> None:
        self.ends, self.after, self.fault = list[float](), after, fault

    def round(self, record: Any) -> None:
        self.ends.append(time.perf_counter())
        if record["round"] == self.after:
            threading.Timer(random.uniform(0, 0.05), self.fault).start()

    @property
    def seconds(self) -> float:
        return statistics.median(after - before for before, after in zip(self.ends, self.ends[1:], strict=False))


SETTINGS: dict[str, Any] = {
    "data": "rows.csv", "local_epochs": 1, "block": 4, "model": "mlp", "unseen": 0, "rounds": 6, "checkpoint_every": 2,
    "eval_every": 6,
}  # fmt: skip


def rounds() -> dict[str, float]:
    """Seconds of a round of FedAvg with nine small clients."""
    with three_sites() as network:
        there, here = Clock(), Clock()
        how = {**SETTINGS, "rounds": 40, "eval_every": 40, "checkpoint_every": 40}
        run("fedavg", **how, runtime="network", network=str(network.hub), watcher=there)
        population = together([network.folder / name for name in NAMES])
        del how["unseen"]
        run("fedavg", **{**how, "data": population}, watcher=here)
        print(f"a round of FedAvg: {1000 * there.seconds:.1f} ms at three sites, {1000 * here.seconds:.1f} ms here")
        return {"at three sites": there.seconds, "one process": here.seconds}


class Soak:
    """Runs in which something goes wrong, one after the other; each has to end as the undisturbed one did."""

    def __init__(self, network: Network, out: Path, seed: int) -> None:
        self.network, self.out, self.random = network, out, random.Random(seed)
        self.done: Counter[str] = Counter()
        self.where = {"runtime": "network", "network": str(network.hub)}
        run("local", **SETTINGS, **self.where, out=out / "whole")
        before = self.lines()
        run("local", **SETTINGS, **self.where, out=out / "same")
        self.usual = {name: count - before[name] for name, count in self.lines().items()}
        self.faults: dict[str, Callable[[], object]] = {
            "a node killed": self.kill_node,
            "a node stopped for a while": self.stop_node,
            "the hub killed": self.kill_hub,
            "the hub stopped for a while": self.stop_hub,
            "a full disk": self.fill_disk,
        }

    def lines(self) -> dict[str, int]:
        return {name: len(list(SiteLedger(self.network.folder / name).lines())) for name in NAMES}

    def kill_node(self) -> None:
        name = self.random.choice(NAMES)
        self.network.kill(name)
        self.network.start(name, "node", "run", str(self.network.folder / name))

    def kill_hub(self) -> None:
        self.network.kill("hub")
        self.network.start("hub", "network", "hub", str(self.network.hub))

    def stop_node(self) -> None:
        self.stop(self.random.choice(NAMES), self.random.uniform(0.1, 5))

    def stop_hub(self) -> None:
        self.stop("hub", self.random.choice((1, 3, 25)))  # the last is longer than anybody waits for a ping

    def stop(self, name: str, seconds: float) -> None:
        process = self.network.processes[name]
        process.send_signal(signal.SIGSTOP)
        threading.Timer(seconds, process.send_signal, (signal.SIGCONT,)).start()

    def fill_disk(self) -> None:
        process = self.network.processes[self.random.choice(NAMES)].pid
        before = resource.prlimit(process, resource.RLIMIT_FSIZE, (0, resource.RLIM_INFINITY))
        threading.Timer(2.0, resource.prlimit, (process, resource.RLIMIT_FSIZE, before)).start()

    def one(self, number: int) -> None:
        """A run with one or two faults, or one whose own process is killed; then what has come of it."""
        out, before = self.out / str(number), self.lines()
        if self.random.random() < 0.2:
            names = ["the run killed"]
            self.killed(out)
        else:
            names = self.random.sample(list(self.faults), self.random.choice((1, 1, 2)))
            watcher = Clock(self.random.randint(1, 5), lambda: [self.faults[name]() for name in names])
            try:
                run("local", **SETTINGS, **self.where, out=out, watcher=watcher)
            except (UserError, OSError):
                self.go_on(out)
        self.network.until(lambda: set(NAMES) <= set(self.network.status()["nodes"]), 120)
        states = [checkpoint.load(path) for path in (self.out / "whole", out)]
        assert states[0] is not None and states[1] is not None
        same = all(torch.equal(states[0].state[name], states[1].state[name]) for name in states[0].state)
        kept = [(path / folder.SCORES).read_bytes() for path in (self.out / "whole", out)]  # by clients: their models'
        same = same and kept[0] == kept[1]
        charged = {name: count - before[name] for name, count in self.lines().items()}
        more = {name: count for name, count in charged.items() if count > self.usual[name]}
        whole = json.loads((out / folder.RESULT).read_text())
        bits = "equal bits" if same else "OTHER BITS"
        told = f"{bits}, {whole['failures']} failures, charged {sorted(charged.values())}"
        print(f"{number:4} {', '.join(names)}: {told}", flush=True)
        self.done.update([*names, "runs", *([] if same and not whole["failures"] else ["OTHER RESULT"])])
        self.done.update(["charged again" for _ in more])

    def killed(self, out: Path) -> None:
        flags = [f"--{name.replace('_', '-')}={value}" for name, value in {**SETTINGS, **self.where}.items()]
        command = [sys.executable, "-m", "unalike", "run", "local", *flags, f"--out={out}", "--quiet"]
        driver, most = subprocess.Popen(command), self.random.randint(1, 5)
        while driver.poll() is None and len(read_metrics(out / folder.METRICS)) < most:
            time.sleep(0.01)
        driver.kill()
        driver.wait()
        (out / folder.LOCK).unlink(missing_ok=True)
        self.go_on(out)

    def go_on(self, out: Path) -> None:
        for _ in range(5):
            time.sleep(2.0)
            try:
                resume(out)
                return
            except (UserError, OSError) as error:
                print(f"     again: {error}")
        raise SystemExit("the run could not go on")


def soak(seconds: float, seed: int = 0) -> dict[str, Any]:
    begin, number = time.monotonic(), 0
    with three_sites() as network, tempfile.TemporaryDirectory() as out:
        found = Soak(network, Path(out), seed)
        while time.monotonic() - begin < seconds:
            number += 1
            found.one(number)
        for name in NAMES:
            assert list(SiteLedger(network.folder / name).lines(signed=True))
    print(", ".join(f"{name}: {count}" for name, count in sorted(found.done.items())))
    return {"seconds": round(time.monotonic() - begin), **found.done}


def main(what: str, *more: str) -> None:
    if what == "echo":
        echo(Path(more[0]))
        return
    done: Any = {"times": times, "rounds": rounds, "soak": lambda: soak(float(more[0]) if more else 1200.0)}[what]()
    known = json.loads(RESULT.read_text()) if RESULT.exists() else {}
    RESULT.write_text(json.dumps({**known, what: done}, indent=1) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
