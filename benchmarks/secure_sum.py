"""Secure sum of a long vector over many clients, some of which drop out: time, and bytes against the plain sum."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from dataclasses import replace

import torch

from unalike import Clients, Federation, Sum, send, simulate, task
from unalike.core.client import Client
from unalike.core.request import Reply, Request
from unalike.core.task import Sent
from unalike.runs.simulate import simulation
from unalike.runtime.simulate import Simulation

CLIENTS, LENGTH, LOST = 100, 100_000, 10


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
    begin = time.perf_counter()
    plain.everyone().ask(vector, into=Sum("vector", clip=400.0))
    middle = time.perf_counter()
    total = secure.everyone().ask(vector, into=Sum("vector", clip=400.0, secure=True))["vector"]
    end = time.perf_counter()
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
        "plain_megabytes": reference / 1e6,
        "secure_megabytes_up": sent / 1e6,
        "secure_megabytes_up_and_down": both / 1e6,
        "bytes_ratio_up": sent / reference,
        "bytes_ratio_up_and_down": both / reference,
        "largest_error": error,
    }


if __name__ == "__main__":
    print(json.dumps(run(), indent=2))
