"""What a round costs on a cluster, as a formula; its constants are measured (``benchmarks/cluster.py``).

A round of C clients on W workers, with A asks, takes

    A·W·exchange + C·route + most(C, W)·client·slower + W·bytes/bandwidth

- ``client``: seconds of one client in a round on one processor, measured with the recipe itself;
- most(C, W): clients of the worker that has most of a random cohort, C/W + √(2·C/W·(1 − 1/W)·ln W);
- ``exchange``: to send a request to one worker and to hear it, whatever is in it;
- ``slower``: a client on a worker beside one of the few that were measured in a process of their own;
- ``route``: this process's share for each client: who lives where, ids, who has answered;
- ``bandwidth``: of the messages between this process and the workers, each of which has ``bytes`` of them in a round.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np


@dataclass(frozen=True)
class Seconds:
    """A round, taken apart."""

    exchanges: float
    routing: float
    computing: float
    sending: float

    @property
    def total(self) -> float:
        return self.exchanges + self.routing + self.computing + self.sending


@dataclass(frozen=True)
class Costs:
    """The constants, of workers on one machine with two cores; bandwidth is a network's where there is one."""

    exchange: float = 0.0163  # seconds
    route: float = 0.0  # seconds: too little to be told from the rest with 8,000 clients
    slower: float = 0.80  # below 1: the few clients that are measured are not played back yet
    bandwidth: float = 3.0e8  # bytes per second

    def seconds(
        self,
        *,
        clients: float,
        workers: int,
        client: float,
        asks: float,
        bytes_per_worker: float,
        bandwidth: float | None = None,
    ) -> Seconds:
        return Seconds(
            exchanges=asks * workers * self.exchange,
            routing=clients * self.route,
            computing=most(clients, workers) * client * self.slower,
            sending=workers * bytes_per_worker / (bandwidth or self.bandwidth),
        )


def most(clients: float, workers: int) -> float:
    """Clients of a random cohort that the worker with most of them has, about."""
    if workers == 1:
        return clients
    share = clients / workers
    return min(clients, share + math.sqrt(2 * share * (1 - 1 / workers) * math.log(workers)))


def fitted(measured: Sequence[Mapping[str, Any]]) -> Costs:
    """The constants by which these rounds are best told, in relative terms; the bandwidth is not fitted.

    Each has ``cohort``, ``workers``, ``client`` (seconds), ``asks``, and ``median``, the seconds that a round took.
    """
    rows, wanted = [], []
    plain = Costs()
    for one in measured:
        sending = (one["bytes_down"] + one["bytes_up"]) / plain.bandwidth
        rows.append([one["asks"] * one["workers"], one["cohort"], most(one["cohort"], one["workers"]) * one["client"]])
        wanted.append(one["median"] - sending)
    scale = np.array([one["median"] for one in measured])[:, None]
    from scipy.optimize import nnls

    found, _ = nnls(np.array(rows) / scale, np.array(wanted) / scale[:, 0])
    exchange, route, slower = (float(value) for value in found)
    return Costs(exchange, route, slower, plain.bandwidth)
