"""What goes wrong in a network, with real processes: killed and stopped nodes, a hub and a run that are killed."""

from __future__ import annotations

import json
import os
import resource
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.network.sites import Network, rows
from tests.network.test_runs import NAMES, states
from unalike.api import UserError, resume, run
from unalike.core.request import Request
from unalike.core.secure import MASK
from unalike.deploy import keys, open_session
from unalike.deploy.node.ledger import SiteLedger
from unalike.runs import folder
from unalike.runs.folder import read_metrics
from unalike.runs.recipe.settings import plan_for
from unalike.runs.run import run_plan
from unalike.runs.watcher import Watcher
from unalike.runtime.network.reach import Nodes

Patch = pytest.MonkeyPatch

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


def equal(one: Path, other: Path) -> bool:
    """The server's state has the same bits, and so have the scores of the models that clients keep."""
    same = all(torch.equal(*pair) for pair in states(one, other))
    return same and (one / folder.SCORES).read_bytes() == (other / folder.SCORES).read_bytes()


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
    assert equal(whole, tmp_path / "run")
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
    one = network.status()["nodes"].get(name)
    return one is not None and time.time() - one["heard"] < 2 and not one["busy"]


def test_a_hub_that_is_killed_and_started_again(network: Network, whole: Path, tmp_path: Path) -> None:
    def again() -> None:
        network.kill("hub")
        network.start("hub", "network", "hub", str(network.hub))

    done = run("local", **QUICK, **where(network), out=tmp_path / "run", watcher=At(round3=later(again)))
    assert done.failures == 0
    assert equal(whole, tmp_path / "run")


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
    assert equal(whole, out)


def test_a_disk_that_is_full_at_a_site(network: Network, whole: Path, tmp_path: Path) -> None:
    """Nothing leaves without its line in the ledger; with room again the run goes on as if nothing had been."""
    process, before = network.processes["b"].pid, charges(network, {})
    unlimited = resource.prlimit(process, resource.RLIMIT_FSIZE)
    full = At(round3=lambda: resource.prlimit(process, resource.RLIMIT_FSIZE, (0, unlimited[1])))
    try:
        with pytest.raises(UserError, match="the disk is full: the folder of node b could not be written"):
            run("local", **QUICK, **where(network), out=tmp_path / "run", watcher=full)
    finally:
        resource.prlimit(process, resource.RLIMIT_FSIZE, unlimited)
    resume(tmp_path / "run")
    assert equal(whole, tmp_path / "run")
    new = charges(network, before)
    assert new["b"] <= new["a"] == new["c"] and list(SiteLedger(network.folder / "b").lines(signed=True))


def test_a_network_that_is_cut(tmp_path: Path) -> None:
    """Nothing comes through for longer than either side waits; the site is passed over, and then is back."""
    made = Network(tmp_path / "network", beat=1.0)
    try:
        with Wire(made.port) as wire:
            for number, name in enumerate("ac"):
                made.add_site(name, rows(number))
            bundle = made.folder / "c" / keys.BUNDLE
            bundle.write_text(json.dumps({**json.loads(bundle.read_text()), "address": f"127.0.0.1:{wire.port}"}))
            made.start_all("a", "c")

            def cut() -> None:
                wire.cut = True
                made.until(lambda: "c" not in made.status()["nodes"])

            def mend() -> None:
                made.until(lambda: "nothing was heard from the hub for 4 s" in (made.folder / "c.log").read_text())
                wire.cut = False
                made.until(lambda: heard(made, "c"))

            watcher, settings = At(round2=cut, round4=mend), {**QUICK, "rounds": 6, "deadline": 3}
            run("fedavg", **settings, **where(made), out=tmp_path / "run", watcher=watcher)
    finally:
        made.close()
    assert watcher.failures[2:4] == [3, 3] and watcher.failures[-1] == 0


class Wire(threading.Thread):
    """What lies between a node and the hub. While it is cut, bytes are held back, and both sides stay connected."""

    def __init__(self, port: int) -> None:
        super().__init__(daemon=True)
        self.cut, self.over, self._to = False, False, port
        self._door = socket.create_server(("127.0.0.1", 0))
        self.port = self._door.getsockname()[1]

    def __enter__(self) -> Wire:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.over = True
        self.join()

    def run(self) -> None:
        peers: dict[socket.socket, socket.socket] = {}
        while not self.over:
            if self.cut:
                time.sleep(0.02)
                continue
            for ready in select.select([self._door, *peers], [], [], 0.02)[0]:
                if ready is self._door:
                    near, far = self._door.accept()[0], socket.create_connection(("127.0.0.1", self._to))
                    peers |= {near: far, far: near}
                elif ready in peers:
                    try:
                        data = ready.recv(1 << 16)
                        peers[ready].sendall(data)
                    except OSError:
                        data = b""
                    if not data:
                        for one in (ready, peers[ready]):
                            del peers[one]
                            one.close()
        for one in (self._door, *peers):
            one.close()


def test_messages_twice_and_cut_short(network: Network, whole: Path, tmp_path: Path, monkeypatch: Patch) -> None:
    """A replay of everything, and halves of messages in between: nothing runs, counts or is charged twice."""
    begin, before, odd = Nodes.begin, charges(network, {}), list[Any]()

    def noisily(self: Nodes, number: int, what: str, *data: bytes) -> Any:
        if what == "answer":
            odd.append(begin(self, number, what, data[0][: len(data[0]) // 2], *data[1:]))
            odd.append(begin(self, number, what, *data))
        return begin(self, number, what, *data)

    monkeypatch.setattr(Nodes, "begin", noisily)
    run("local", **QUICK, **where(network), out=tmp_path / "run")
    monkeypatch.undo()
    assert equal(whole, tmp_path / "run")
    answers = [one.result(60)[:1] for one in odd if not one.cancelled()]
    assert set(answers[::2]) == {b"-"} and set(answers[1::2]) == {b"+"}
    run("local", **QUICK, **where(network), out=tmp_path / "other")
    middle = charges(network, before)
    assert len(set(middle.values())) == 1 and middle["a"] % 2 == 0  # as much as the same run without replays


def test_a_site_that_leaves_within_a_secure_sum(network: Network, tmp_path: Path, monkeypatch: Patch) -> None:
    """Between masking and opening: its masks are removed, and the sum is over the others, who are counted once."""
    begin, gone = Nodes.begin, list[str]()

    def leaving(self: Nodes, number: int, what: str, *data: bytes) -> Any:
        if what == "answer" and number == 1 and not gone and Request.decode(data[0]).task == MASK.name:
            network.kill("b")
            gone.append("b")
        return begin(self, number, what, *data)

    monkeypatch.setattr(Nodes, "begin", leaving)
    watcher = At(round1=lambda: network.start_site("b"))
    settings = {**QUICK, **where(network), "rounds": 3, "cohort": 1.0, "hyperparameters": {"secure": True, "clip": 1.0}}
    plan = plan_for(["fedavg"], settings, ["runtime.lost=failed"])
    (done,) = run_plan(plan, tmp_path / "run", watcher=watcher, start_workers=open_session).results
    assert gone and watcher.failures == [3, 0, 0] and done.workers[1].restarts == 1
    assert done.accuracy.seen is not None and done.accuracy.seen.mean > 0.5


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
