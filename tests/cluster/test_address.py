"""A cluster that runs already: workers are started there, and it goes on when they are gone."""

from __future__ import annotations

import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.cluster.test_runs import QUICK, states
from unalike.api import run

COMMAND = "import sys; from ray.scripts.scripts import main; sys.exit(main())"


@pytest.fixture
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The head of a cluster of two processors."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    log = tmp_path_factory.mktemp("head") / "log"
    place = ["--head", f"--port={port}", "--node-ip-address=127.0.0.1", "--num-cpus=2", "--include-dashboard=false"]
    with log.open("w") as out:
        head = subprocess.Popen(
            [sys.executable, "-c", COMMAND, "start", *place, "--disable-usage-stats", "--block"],
            stdout=out,
            stderr=subprocess.STDOUT,
        )
    try:
        until = time.monotonic() + 90
        while "will now block" not in log.read_text():
            assert head.poll() is None and time.monotonic() < until, log.read_text()
            time.sleep(0.2)
        yield f"127.0.0.1:{port}"
        assert head.poll() is None, log.read_text()
    finally:
        head.terminate()
        head.wait(60)


def test_a_run_on_a_cluster_that_runs_already(address: str, tmp_path: Path) -> None:
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in QUICK.items()]
    command = [sys.executable, "-m", "unalike", "run", "fedavg", *flags, "--runtime=ray", f"--address={address}"]
    done = subprocess.run(
        [*command, f"--out={tmp_path / 'there'}", "--json"], capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 0, done.stderr
    run("fedavg", **QUICK, out=tmp_path / "here")
    for ours, theirs in states(tmp_path / "here", tmp_path / "there"):
        torch.testing.assert_close(theirs, ours, rtol=1e-4, atol=1e-6)
