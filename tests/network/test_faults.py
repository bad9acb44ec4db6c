"""What goes wrong in a network, with real processes: killed and stopped nodes, a hub and a run that are killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.network.sites import Network, rows
from tests.network.test_runs import NAMES, states
from unalike.api import UserError, resume, run
from unalike.deploy.node.ledger import SiteLedger
from unalike.runs import folder
from unalike.runs.folder import read_metrics
from unalike.runs.watcher import Watcher

QUICK = {
    "data": "rows.csv", "rounds": 6, "local_epochs": 1, "block": 4, "model": "mlp", "unseen": 0,
    "checkpoint_every": 2, "eval_every": 6,
}  # fmt: skip


@pytest.fixture(scope="module")
def network(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Network]:
    made = Network(tmp_path_factory.mktemp("faults"))
    for number, name in enumerate(NAMES):
        made.add_site(name, rows(number))
    made.start_all(*NAMES)
    yield made
    made.close()


@pytest.fixture(scope="module")
def whole(network: Network, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run that nothing happens to; every client trains a model of its own, which it keeps."""
    out = tmp_path_factory.mktemp("whole") / "run"
    run("local", **QUICK, **where(network), out=out)
    return out


def where(network: Network) -> dict[str, Any]:
    return {"runtime": "network", "network": str(network.hub)}


class At(Watcher):
    """Does something after a round."""

    def __init__(self, **what: Callable[[], object]) -> None:
        self.what = {int(name.removeprefix("round")): one for name, one in what.items()}
        self.failures: list[int] = []

    def round(self, record: Mapping[str, Any]) -> None:
        self.failures.append(int(record["failures"]))
        if record["round"] in self.what:
            self.what[record["round"]]()


def later(what: Callable[[], object], seconds: float = 0.01) -> Callable[[], None]:
    """So soon that the next round has begun."""
    return lambda: threading.Timer(seconds, what).start()


def charges(network: Network, since: Mapping[str, int]) -> dict[str, int]:
    found = {name: len(list(SiteLedger(network.folder / name).lines())) for name in NAMES}
    return {name: count - since.get(name, 0) for name, count in found.items()}


def test_a_node_that_is_killed_and_started_again(network: Network, whole: Path, tmp_path: Path) -> None:
    def again() -> None:
        network.kill("b")
        network.start("b", "node", "run", str(network.folder / "b"))

    before = charges(network, {})
    watcher = At(round2=later(again), round4=again)
    done = run("local", **QUICK, **where(network), out=tmp_path / "run", watcher=watcher)
    assert done.failures == 0 and [one.restarts for one in done.workers] == [0, 2, 0]
    assert all(torch.equal(*pair) for pair in states(whole, tmp_path / "run"))
    new = charges(network, before)
    assert len(set(new.values())) == 1, new  # the site that was asked again charged nothing twice


def test_a_node_that_hangs_is_passed_over_until_it_goes_on(network: Network, tmp_path: Path) -> None:
    watcher = At(
        round1=lambda: network.signal("c", signal.SIGSTOP),
        round4=lambda: (network.signal("c", signal.SIGCONT), network.until(lambda: heard(network, "c"))),
    )
    try:
        done = run(
            "fedavg", **{**QUICK, "rounds": 8}, **where(network), deadline=3, out=tmp_path / "run", watcher=watcher
        )
    finally:
        network.signal("c", signal.SIGCONT)
    assert watcher.failures[0] == 0 and watcher.failures[1:4] == [3, 3, 3] and watcher.failures[-1] == 0
    assert done.workers[2].missed >= 1 and done.workers[0].failed == done.workers[1].failed == 0


def heard(network: Network, name: str) -> bool:
    import time

    one = network.status()["nodes"].get(name)
    return one is not None and time.time() - one["heard"] < 2 and not one["busy"]


def test_a_hub_that_is_killed_and_started_again(network: Network, whole: Path, tmp_path: Path) -> None:
    def again() -> None:
        network.kill("hub")
        network.start("hub", "network", "hub", str(network.hub))

    done = run("local", **QUICK, **where(network), out=tmp_path / "run", watcher=At(round3=later(again)))
    assert done.failures == 0
    assert all(torch.equal(*pair) for pair in states(whole, tmp_path / "run"))


def test_a_run_that_is_killed_goes_on_with_the_nodes_it_had(network: Network, whole: Path, tmp_path: Path) -> None:
    out, settings = tmp_path / "run", {**QUICK, **where(network)}
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in settings.items()]
    path = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    command = [sys.executable, "-m", "unalike", "run", "local", *flags, f"--out={out}", "--quiet"]
    driver = subprocess.Popen(command, env=path)
    network.until(lambda: len(read_metrics(out / folder.METRICS)) >= 3 or driver.poll() is not None, 100)
    driver.kill()
    driver.wait()
    (out / folder.LOCK).unlink(missing_ok=True)
    network.add_site("d", rows(3))  # a site that comes late is not part of this run
    network.start_site("d")
    try:
        resume(out)
    finally:
        network.kill("d")
    assert all(torch.equal(*pair) for pair in states(whole, out))


def test_another_version_is_refused(network: Network, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("unalike.runtime.workers.version", lambda: "0.0.1 (code 00000000)")
    with pytest.raises(UserError, match=r"node a has Unalike .* but this process has 0\.0\.1"):
        run("fedavg", **{**QUICK, "rounds": 1}, **where(network))


def test_nodes_that_are_not_there_are_told(network: Network, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("unalike.deploy.sites.START", 0.5)
    with pytest.raises(UserError, match=r"3 nodes are connected; 4 were wanted within 0\.5 s"):
        run("fedavg", **{**QUICK, "rounds": 1}, **where(network), workers=4)
    with pytest.raises(UserError, match="no hub answers in"):
        run("fedavg", **{**QUICK, "rounds": 1}, runtime="network", network=str(tmp_path))
    with pytest.raises(UserError, match="a network is named by its hub's folder"):
        run("fedavg", **{**QUICK, "rounds": 1}, runtime="network")
