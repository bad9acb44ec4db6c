"""What privacy costs in time: exact draws in a second on one core, and a private round beside a plain one."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from benchmarks.report import Ratio, Row
from benchmarks.rounds import Rounds, alternate, data, quotients
from benchmarks.workloads import MLP
from unalike.privacy import Gaussian
from unalike.privacy.discrete import discrete_gaussian, discrete_laplace

Measured = tuple[list[Row], dict[str, Any]]
DRAWS = 300_000
WARM = 200  # rounds, after which cohorts of all usual sizes are played back from recordings
SMALL = replace(MLP, name="MLP 64-64-10, 20 clients", cohort=20, clients=200)


def measure(repetitions: int, quick: bool) -> Measured:
    rows, raw = _draws(repetitions)
    more, raw["rounds"] = _rounds(repetitions, 5 if quick else 30)
    return rows + more, raw


def _draws(repetitions: int) -> Measured:
    rows, raw = [], {}
    for name, sample in (("Gaussian", discrete_gaussian), ("Laplace", discrete_laplace)):
        for scale in (4, 1 << 22):
            speeds = []
            for _ in range(repetitions):
                begin = time.thread_time()  # stands still while another program is at work
                sample(scale, DRAWS)
                speeds.append(DRAWS / (time.thread_time() - begin))
            what = f"exact draws a second, scale {scale}"
            rows.append(Row(f"discrete {name}", what, Ratio.of(speeds), unit="", target=("≥", 300_000)))
            raw[f"{name} {scale}"] = speeds
    return rows, raw


def _rounds(repetitions: int, times: int) -> Measured:
    clients = data(SMALL, torch.full((SMALL.clients,), SMALL.samples))
    plain, seeded, system = (Rounds(SMALL, clients, SMALL.cohort) for _ in range(3))
    for private in (seeded, system):  # a Poisson cohort of the same expected size
        private.method = replace(private.method, cohort=SMALL.cohort / SMALL.clients, clip=1.0, noise=Gaussian(1.0))
    system.federation.noise = "system"  # where the others are as a run with --simulate-noise makes them
    works = {"plain": plain, "simulated": seeded, "system": system}
    for rounds in works.values():
        rounds(WARM)
    turns = [partial(rounds, times) for rounds in works.values()]
    # samples are so small that one thread works, so this is all the time that they take
    taken = dict(zip(works, alternate(repetitions, *turns, clock=time.process_time), strict=True))
    rows = []
    for noise, target in (("simulated", ("≤", 1.3)), ("system", None)):
        what = f"private round, {noise} noise / plain round"
        rows.append(Row(SMALL.name, what, quotients(taken[noise], taken["plain"]), target=target))
    return rows, {**taken, "rounds": times}


if __name__ == "__main__":
    found, _ = measure(5, False)
    print(json.dumps([row.as_json() for row in found], indent=2, ensure_ascii=False))
