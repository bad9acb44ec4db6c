"""Three hospitals as sites of a network on this machine, and the same runs in one process.

python examples/on_a_network.py     (or `make demo-network`, which also installs gRPC)

A hub and three nodes run as processes of their own, each with its own folder, key, rows and policy. FedAvg and PeFLL
are trained over them; a node is killed on the way and comes back; a recipe is refused by a site's policy; wards that
took no part in training, and a hospital that was never in the network, get models. Only 127.0.0.1 is used.
"""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch

import unalike as ua
from unalike.commands.main import app
from unalike.data.build import set_apart
from unalike.data.population import Population
from unalike.data.source import Names
from unalike.runs import checkpoint
from unalike.runs.watcher import Watcher

SITES, NEWCOMER = ("graz", "lyon", "oslo"), "bern"
WARDS, PATIENTS, UNSEEN = 5, 60, 3  # of a hospital; and wards of the network that take no part in training
POLICY = """\
network = "heart"
methods = [{methods}]  # of Unalike; no other is run
models = ["mlp"]
purposes = ["train", "serve", "measure", "scale"]
individual = "bare"      # this demonstration states no ε; a site that wants one writes "never" or "noise"
sums = "bare"
fewest = 3               # wards in a sum
rounds = 50
hours = 1
asks = 12
megabytes = 100
approve = false          # true: somebody here types `unalike node approve` first
"""


def patients(name: str, wards: int) -> pd.DataFrame:
    """A hospital's table. In which direction a measurement counts depends on the ward: no model fits them all."""
    random = np.random.default_rng(sum(name.encode()))
    x = random.normal(size=(wards, PATIENTS, 4))
    sign = np.where(np.arange(wards) % 2, 1.0, -1.0)[:, None]
    sick = 2 * sign * x[..., 0] + x[..., 1] + 0.3 * random.normal(size=(wards, PATIENTS)) > 0
    table = pd.DataFrame(x.reshape(-1, 4).round(4), columns=["pulse", "pressure", "sugar", "age"])
    ward = np.repeat([f"{name}-{number}" for number in range(wards)], PATIENTS)
    return table.assign(ward=ward, sick=np.where(sick.ravel(), "yes", "no"))


class Network:
    """A hub and nodes as processes, made by the commands that an administrator types."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.hub = folder, folder / "hub"
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            address = f"127.0.0.1:{free.getsockname()[1]}"
        type_in("network", "init", self.hub, "--name", "heart", "--address", address)
        for name in SITES:
            self.add(name)
        self.start("hub", "network", "hub", self.hub)
        for name in SITES:
            self.start(name, "node", "run", folder / name)
        self.wait_for(*SITES)

    def add(self, name: str) -> None:
        """A site makes its key, is admitted, and writes its policy. That of lyon allows two methods."""
        site = self.folder / name
        rows = self.folder / f"{name}.csv"
        patients(name, WARDS).to_csv(rows, index=False)
        type_in("node", "init", site, "--name", name, "--data", rows)
        type_in("network", "admit", self.hub, site / "request.pem")
        type_in("node", "join", site, self.hub / f"{name}.bundle.json")
        methods = '"fedavg", "pefll"' if name == "lyon" else '"fedavg", "pefll", "fedrep"'
        (site / "policy.toml").write_text(POLICY.format(methods=methods))

    def start(self, name: str, *words: object) -> None:
        with (self.folder / f"{name}.log").open("ab") as log:
            self.processes[name] = subprocess.Popen(command(*words), stdout=log, stderr=log)

    def wait_for(self, *names: str) -> None:
        from unalike.runtime.network.reach import ask_hub
        from unalike.runtime.workers import Unreachable

        end = time.monotonic() + 60
        while time.monotonic() < end:
            try:
                if set(names) <= set(ask_hub(self.hub, do="status")["nodes"]):
                    return
            except Unreachable:
                pass
            time.sleep(0.05)
        raise SystemExit("\n".join(f"{one.name}: {one.read_text()}" for one in self.folder.glob("*.log")))

    def kill_and_start(self, name: str) -> None:
        process = self.processes.pop(name)
        process.send_signal(signal.SIGKILL)
        process.wait()
        self.start(name, "node", "run", self.folder / name)

    def close(self) -> None:
        for process in self.processes.values():
            process.terminate()
            process.wait(20)


def command(*words: object) -> list[str]:
    return [sys.executable, "-m", "unalike", *map(str, words)]


def type_in(*words: object) -> None:
    """Show a command as one would type it, and do it, in this process: that saves starting Python each time."""
    here = [str(word).replace(f"{tempfile.gettempdir()}/", "") for word in words]
    print(f"$ unalike {' '.join(here)}", flush=True)
    app([str(word) for word in words], standalone_mode=False)


@contextmanager
def started(folder: Path) -> Iterator[Network]:
    network = Network(folder)
    try:
        yield network
    finally:
        network.close()


class Shows(Watcher):
    """Prints some rounds, and does something in the middle of one."""

    def __init__(self, every: int, after: int = 0, what: Callable[[], None] = lambda: None) -> None:
        self.every, self.after, self.what = every, after, what

    def round(self, record: Mapping[str, Any]) -> None:
        if record["round"] % self.every == 0:
            print(f"  round {record['round']}: loss {record['loss']:.4f}, {record['failures']} failures", flush=True)
        if record["round"] == self.after:
            threading.Timer(0.01, self.what).start()


def in_one_process(folder: Path, seed: int = 0) -> Population:
    """The rows of all sites in one simulation, each site's divided into parts as the site divides them."""
    how: dict[str, Any] = {"client_column": "ward", "label_column": "sick", "unseen": 0}
    found = [ua.data.load(folder / f"{name}.csv", **how) for name in SITES]
    names = [f"{site}/{number}" for site in SITES for number in range(1, WARDS + 1)]
    seen, unseen, _ = set_apart(np.ones(len(names), dtype=bool), UNSEEN, 1.0, seed)
    parts = {}
    for which, first in found[0].parts.items():
        stores = [one.parts[which] for one in found]
        before = np.cumsum([0, *(len(one.x) for one in stores)]).tolist()
        parts[which] = replace(
            first,
            x=torch.cat([one.x for one in stores]),
            y=torch.cat([one.y for one in stores if one.y is not None]),
            start=torch.cat([one.start + at for one, at in zip(stores, before, strict=False)]),
            size=torch.cat([one.size for one in stores]),
            labeled=torch.cat([one.labeled for one in stores]),
            ids=torch.arange(len(names)),
            names=Names(np.array(names)),
        )
    return replace(found[0], **parts, seen=torch.from_numpy(seen), unseen=torch.from_numpy(unseen))


def main() -> None:
    begin = time.monotonic()
    settings: dict[str, Any] = {"model": "mlp", "local_epochs": 2, "block": 5}
    columns = {"client_column": "ward", "label_column": "sick", "data": "patients", "unseen": UNSEEN}
    with tempfile.TemporaryDirectory(prefix="heart-") as made, started(Path(made)) as network:
        folder = Path(made)
        at_sites = {**columns, "runtime": "network", "network": str(network.hub)}
        apart, gaps, scores = folder / "apart", {}, {}
        for method, what, more in (
            ("fedavg", Shows(2, 3, lambda: network.kill_and_start("oslo")), {"rounds": 6}),
            ("pefll", Shows(10), {"rounds": 40, "cohort": 1.0}),
        ):
            killed = "; after round 3 the node of oslo is killed and started again" if method == "fedavg" else ""
            print(f"\n{method} at three sites{killed}:", flush=True)
            there = ua.run(method, **settings, **more, **at_sites, watcher=what, out=apart / method)
            here = ua.run(method, **settings, **more, data=in_one_process(folder), out=folder / "here" / method)
            scores[method] = [one.accuracy for one in (here, there)]
            for site, line in zip(SITES, there.workers, strict=True):
                print(
                    f"  {site}: {line.clients} wards, {line.answered} answers, {line.failed} failed, started again "
                    f"{line.restarts}×, {(line.bytes_down + line.bytes_up) / 1e6:.2f} MB"
                )
            states = [checkpoint.load(out / method) for out in (folder / "here", apart)]
            assert states[0] is not None and states[1] is not None
            gaps[method] = max(
                float((states[0].state[name] - states[1].state[name]).abs().max()) for name in states[0].state
            )
            if method == "fedavg" and there.workers[2].restarts == 0:
                raise SystemExit("oslo was not started again")

        print("\na recipe that lyon's policy does not allow:", flush=True)
        try:
            ua.run("fedrep", rounds=2, **settings, **at_sites)
            raise SystemExit("fedrep was not refused")
        except ua.UserError as refusal:
            print(f"  {refusal}")
        type_in("network", "status", network.hub)

        print(f"\n{NEWCOMER} was never in the network. With a copy of the run, nothing leaves its machine:")
        patients(NEWCOMER, 1).drop(columns="ward").to_csv(folder / f"{NEWCOMER}.csv", index=False)
        type_in("personalize", apart / "pefll", "--data", folder / f"{NEWCOMER}.csv")

    for method, (here, there) in scores.items():
        for group in ("seen", "unseen"):
            one, two = getattr(here, group), getattr(there, group)
            told = "wards that trained" if group == "seen" else "wards that came later"
            print(f"{method:7} {told}: accuracy {100 * two.mean:.1f} % at sites, {100 * one.mean:.1f} % in one process")
            if abs(one.mean - two.mean) > 0.02:
                raise SystemExit("NOT the same")
    if gaps["fedavg"] > 1e-5 or gaps["pefll"] > 1e-3:  # the order of sums, which PeFLL's networks amplify
        raise SystemExit(f"NOT the same: states differ by {gaps}")
    print(
        f"The result at three sites, one of them killed and back, equals the simulation's: states apart by at most "
        f"{gaps['fedavg']:.1g} (FedAvg) and {gaps['pefll']:.1g} (PeFLL). {time.monotonic() - begin:.0f} s."
    )


if __name__ == "__main__":
    main()
