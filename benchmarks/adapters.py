"""``python -m benchmarks.adapters``: what a step of adapters costs, in blocks and in a loop, and what methods ask for.

- One gradient for each of 8 clients with 8 pictures, of a vision transformer's adapter (or of all its parameters): in
  a block by ``vmap``, or client by client. CPU time on one thread, since another program may be busy; peak memory is
  that of a process of its own.
- How often a client's round passes through the network, with every method's defaults: 32 rows for training.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import time
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.func import grad, vmap

import unalike as ua
from examples.adapters import ViT

SIZES = {"small": {"width": 48, "depth": 3}, "large": {"width": 384, "depth": 8}}
CLIENTS, ROWS = 8, 8
WAYS = ("adapter block", "adapter loop", "all block", "all loop")
COUNTED = ("fedavg", "local", "mr-mtl", "fedrep", "adaped", "pefll", "pfedhn", "pfedme")


def step(size: str, way: str, turns: int) -> dict[str, Any]:
    """CPU seconds for a step of all clients, the best of some, and this process's peak memory."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    network = ViT((1, 28, 28), 62, 255.0, **SIZES[size])
    what, how = way.split()
    model = ua.Model(network, trainable="lora:r=4,targets=all" if what == "adapter" else None)
    thetas = torch.stack([model.init(seed) for seed in range(CLIENTS)])
    x, y = 255.0 * torch.rand(CLIENTS, ROWS, 1, 28, 28), torch.randint(62, (CLIENTS, ROWS))

    def gradient(theta: Tensor, x: Tensor, y: Tensor) -> Tensor:
        return grad(lambda own: F.cross_entropy(model(own, x), y))(theta)

    def all_clients() -> Tensor:
        if how == "block":
            return vmap(gradient)(thetas, x, y)
        return torch.stack([gradient(*one) for one in zip(thetas, x, y, strict=True)])

    seconds = []
    with torch.no_grad():
        for _ in range(turns):
            begin = time.process_time()
            all_clients()
            seconds.append(time.process_time() - begin)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    numbers = sum(one.numel() for one in network.parameters())
    return {"parameters": numbers, "theta": model.size, "seconds": min(seconds), "peak_mb": peak}


def calls(method: str) -> tuple[float, float]:
    """Passes through the network in a round of one block, and those of the start and of measuring once."""
    passed = 0
    call = ua.Model.__call__

    def counting(self: ua.Model, *inputs: Tensor) -> Tensor:
        nonlocal passed
        passed += self.kind is torch.nn.Sequential
        return call(self, *inputs)

    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(320, 4, generator=generator), torch.randint(3, (320,), generator=generator)
    network = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 3))
    people = ua.data.from_arrays(x, y, torch.arange(320) // 40, unseen=2, seed=0)
    found = []
    ua.Model.__call__ = counting  # type: ignore[method-assign]
    try:
        for rounds in (1, 3):
            passed = 0
            settings = {"model": network, "adapter": "lora:targets=all+head", "block": 8, "threads": 1}
            ua.run(method, data=people, rounds=rounds, eval_every=rounds, **settings)
            found.append(passed)
    finally:
        ua.Model.__call__ = call  # type: ignore[method-assign]
    each = (found[1] - found[0]) / 2
    return each, found[0] - each


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--step", nargs=2, metavar=("SIZE", "WAY"), help="one measurement, as JSON")
    parser.add_argument("--turns", type=int, default=5)
    given = parser.parse_args()
    if given.step:
        print(json.dumps(step(*given.step, given.turns)))
        return
    for size in SIZES:
        for way in WAYS:
            words = [sys.executable, "-m", "benchmarks.adapters", "--turns", str(given.turns), "--step", size, way]
            one = json.loads(subprocess.run(words, capture_output=True, text=True, check=True).stdout)
            rate = CLIENTS / one["seconds"]
            print(
                f"{one['parameters']:>10,} parameters, {way:13}  θ {one['theta']:>10,}  {rate:8.2f} client-steps per "
                f"CPU second  peak {one['peak_mb']:6.0f} MB",
                flush=True,
            )
    for method in COUNTED:
        each, besides = calls(method)
        print(f"{method:8} {each:5.0f} passes in a round, {besides:5.0f} to start and to measure once", flush=True)


if __name__ == "__main__":
    main()
