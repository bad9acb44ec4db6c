"""Secure sum of a long vector over many clients, some of which drop out: time, and bytes against the plain sum.

``python -m benchmarks.secure_sum`` measures two sizes, and Flower's SecAgg+ beside them in an environment of its own.
"""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections.abc import Iterator
from dataclasses import replace

import torch

from benchmarks.peers import PROGRAMS, Tool, isolation
from unalike import Clients, Federation, Sum, send, simulate, task
from unalike.core.client import Client
from unalike.core.request import Reply, Request
from unalike.core.task import Sent
from unalike.runs.simulate import simulation
from unalike.runtime.simulate import Simulation

SIZES = ((100, 100_000, 10), (1_000, 10_000, 100))
CLIENTS, LENGTH, LOST = SIZES[0]
FLOWER_SUMS = Tool("Flower SecAgg+", "secagg_flower.py", ("flwr==1.41.0",), loopback_only=True)
QUIET = {"FLWR_TELEMETRY_ENABLED": "0", "FLWR_DISABLE_UPDATE_CHECK": "1"}


class Losing(Simulation):
    """Some clients are gone when the masked vectors are due: the costliest moment, their masks must be taken off."""

    def deliver(self, request: Request) -> Iterator[Reply]:
        for reply in super().deliver(request):
            if request.task == "mask":
                stay = request.ids[reply.rows] >= LOST
                arrays = [{name: value[stay] for name, value in one.items()} for one in reply.arrays]
                failed = {int(row): "dropped out" for row in reply.rows[~stay]}
                reply = replace(reply, rows=reply.rows[stay], arrays=arrays, failed={**reply.failed, **failed})
            yield reply


@task
def vector(client: Client) -> Sent:
    return send(vector=client.x[0])


def run() -> dict[str, float]:
    """Seconds and megabytes for one sum."""
    x = torch.randn(CLIENTS, LENGTH, generator=torch.Generator().manual_seed(0))
    people = Clients.from_sizes(x, None, torch.ones(CLIENTS))
    usual = simulation(people)
    plain, secure = simulate(people), Federation(Losing(usual.shards, usual.program))
    begin, cpu = time.perf_counter(), time.process_time()
    plain.everyone().ask(vector, into=Sum("vector", clip=400.0))
    middle = time.perf_counter()
    total = secure.everyone().ask(vector, into=Sum("vector", clip=400.0, secure=True))["vector"]
    end, cpu = time.perf_counter(), time.process_time() - cpu
    error = float((total - x[LOST:].sum(0)).abs().max())
    if error > 0.1:
        raise AssertionError(f"the secure sum is off by {error}")
    sent, both = secure.traffic.total_up, secure.traffic.total_up + secure.traffic.total_down
    reference = plain.traffic.total_up
    return {
        "clients": CLIENTS,
        "length": LENGTH,
        "drop_outs": LOST,
        "plain_seconds": middle - begin,
        "secure_seconds": end - middle,
        "both_cpu": cpu,
        "plain_megabytes": reference / 1e6,
        "secure_megabytes_up": sent / 1e6,
        "secure_megabytes_up_and_down": both / 1e6,
        "bytes_ratio_up": sent / reference,
        "bytes_ratio_up_and_down": both / reference,
        "largest_error": error,
    }


def by_flower() -> dict[str, float]:
    """The same by Flower's SecAgg+, all in one process, as here; 129 shares where there are more clients."""
    told = [str(one) for one in (CLIENTS, LENGTH, LOST)]
    command = [*isolation(), FLOWER_SUMS.python(), str(PROGRAMS / FLOWER_SUMS.program), *told]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env={**os.environ, **QUIET})
    return dict(json.loads(done.stdout.splitlines()[-1]))


if __name__ == "__main__":
    for size in SIZES:
        CLIENTS, LENGTH, LOST = size
        print(json.dumps({"ours": run(), "flower": by_flower()}, indent=2), flush=True)
