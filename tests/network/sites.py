"""Networks for tests: a hub and sites as processes of their own, on the loopback, with keys, data and policies."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import tomli_w

from unalike.data.population import Population
from unalike.deploy import keys
from unalike.runtime.network import frames
from unalike.runtime.network.reach import ask_hub
from unalike.runtime.workers import Unreachable

OPEN: dict[str, Any] = {  # a policy for runs without an ε
    "network": "tests",
    "methods": [
        "fedavg",
        "pefll",
        "local",
        "fedrep",
        "flowdup",
        "adaped",
        "rdpcfl",
        "fedpi",
        "kmeans",
        "mdm",
        "estimate",
    ],
    "models": ["mlp", "logistic", "linear", "linear-head"],
    "purposes": ["train", "measure", "scale"],
    "individual": "bare",
    "sums": "bare",
    "fewest": 1,
    "rounds": 20,
    "hours": 1,
    "asks": 20,
    "megabytes": 100,
    "round_sizes": 1,
    "approve": False,
}


def rows(site: int, clients: int = 3, per_client: int = 24) -> pd.DataFrame:
    """A site's table: its clients lean to different classes."""
    random = np.random.default_rng(site)
    y = random.integers(0, 3, clients * per_client)
    x = random.normal(size=(len(y), 5)) + np.eye(3, 5)[y] * 2 + site * 0.2
    table = pd.DataFrame(x.astype(np.float32), columns=list("abcde"))
    return table.assign(client=np.repeat([f"s{site}c{i}" for i in range(clients)], per_client), y=y)


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


class Network:
    """A hub and its sites. Processes are ended by their ids when the test is over."""

    def __init__(self, folder: Path, beat: float = frames.BEAT) -> None:
        self.folder, self.hub = folder, folder / "hub"
        self.port = free_port()
        keys.init_network(self.hub, "tests", f"127.0.0.1:{self.port}")
        # as the command, with other seconds between two pings
        self._command = f"""\
from unalike.runtime.network import frames
frames.BEAT, frames.SILENCE = {beat}, {4 * beat}
from unalike.commands.main import main
main()"""
        self.processes: dict[str, subprocess.Popen[bytes]] = {}

    def start_all(self, *names: str) -> None:
        """The hub and these sites, all at once."""
        self.start("hub", "network", "hub", str(self.hub))
        for name in names:
            self.start(name, "node", "run", str(self.folder / name))
        self.until(lambda: set(names) <= set(self.status()["nodes"]))

    def status(self) -> dict[str, Any]:
        return ask_hub(self.hub, do="status")

    def add_site(self, name: str, table: pd.DataFrame, **policy: Any) -> Path:
        site = self.folder / name
        keys.init_node(site, name)
        table.to_csv(site / "rows.csv", index=False)
        (site / "node.toml").write_text('data = "rows.csv"\n')
        (site / "policy.toml").write_text(tomli_w.dumps({**OPEN, **policy}))
        _, _, bundle = keys.admit(self.hub, site / keys.REQUEST)
        keys.join(site, bundle)
        return site

    def start_site(self, name: str) -> None:
        self.start(name, "node", "run", str(self.folder / name))
        self.until(lambda: self.status()["nodes"][name])

    def start(self, name: str, *words: str) -> None:
        path = {"PYTHONPATH": str(Path(__file__).parents[2]), "COLUMNS": "400"}
        with (self.folder / f"{name}.log").open("ab") as log:
            self.processes[name] = subprocess.Popen(
                [sys.executable, "-c", self._command, *words], stdout=log, stderr=log, env={**os.environ, **path}
            )

    def until(self, done: Any, seconds: float = 60) -> Any:
        """Wait until ``done`` gives something."""
        end = time.monotonic() + seconds
        while True:
            try:
                if found := done():
                    return found
            except (Unreachable, KeyError, OSError, EOFError):
                pass
            assert time.monotonic() < end, self.logs()
            time.sleep(0.05)

    def signal(self, name: str, number: signal.Signals) -> None:
        os.kill(self.processes[name].pid, number)

    def kill(self, name: str) -> None:
        self.signal(name, signal.SIGKILL)
        self.processes.pop(name).wait()

    def logs(self) -> str:
        return "\n".join(f"--- {file.name}\n{file.read_text()[-3000:]}" for file in self.folder.glob("*.log"))

    def close(self) -> None:
        for process in self.processes.values():
            process.kill()
            process.wait()


def together(sites: list[Path], **how: Any) -> Population:
    """The sites' clients in one population, each with the division into parts that its site makes."""
    from dataclasses import replace

    import torch

    from unalike.data.entry import load

    found = [load(site / "rows.csv", unseen=0, **how) for site in sites]
    first, parts = found[0], {}
    for which in first.parts:
        stores = [one.parts[which] for one in found]
        before = np.cumsum([0, *(len(one.x) for one in stores)])
        sizes = torch.cat([one.size for one in stores])
        parts[which] = replace(
            stores[0],
            x=torch.cat([one.x for one in stores]),
            y=torch.cat([one.y for one in stores]),  # type: ignore[arg-type]
            start=torch.cat([one.start + int(at) for one, at in zip(stores, before, strict=False)]),
            size=sizes,
            labeled=torch.cat([one.labeled for one in stores]),
            ids=torch.arange(len(sizes)),
            names=[one.name(i) for one in stores for i in range(len(one))],
        )
    return replace(first, **parts, seen=torch.arange(len(sizes)))
