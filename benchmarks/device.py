"""Does another device give what the CPU gives, and how fast? A minute for somebody who has a GPU:

    python -m benchmarks.device                # the first of cuda and mps that is here
    python -m benchmarks.device --device cpu   # the CPU against itself

FedAvg (an MLP and a LeNet) and PeFLL train on both from the same seed. Cohorts and batches must be equal to the last
bit, results close: a device adds in another order. Ends with status 1 if they are not.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable

import torch
from torch import Tensor

from unalike import Clients, LocalSGD, Model, simulate
from unalike.core.client import Client
from unalike.core.federation import Federation
from unalike.core.method import Method, State
from unalike.core.task import Sent, send, task
from unalike.methods.fedavg import FedAvg
from unalike.methods.pefll import PeFLL
from unalike.methods.problem import Problem
from unalike.networks.architectures import build
from unalike.runtime.shard.simulator import find_device

CLIENTS, SIZE, CLASSES, BATCH = 200, 50, 10, 10
ROUNDS = 3  # compared; floats drift apart in more
TIMED = 5
CLOSE = 1e-2  # of the change since the start


def people(shape: tuple[int, ...]) -> Clients:
    """Clients with classes that can be learned: a direction for each, and noise."""
    random = torch.Generator().manual_seed(0)
    y = torch.randint(CLASSES, (CLIENTS * SIZE,), generator=random)
    x = torch.randn(CLASSES, *shape, generator=random)[y] + torch.randn(len(y), *shape, generator=random)
    return Clients.from_sizes(x, y, torch.full((CLIENTS,), SIZE))


def fedavg(network: str, shape: tuple[int, ...]) -> Method:
    return FedAvg(Model(build(network, shape, CLASSES)), cohort=100, local=LocalSGD(batch=BATCH, lr=0.05))


def pefll(network: str, shape: tuple[int, ...]) -> Method:
    problem = Problem(Model(build(network, shape, CLASSES)), shape, CLASSES, CLIENTS, "image")
    return PeFLL(problem, cohort=50, local=LocalSGD(steps=10, batch=BATCH, lr=2e-3, momentum=0.9))


WORK: dict[str, tuple[Callable[[str, tuple[int, ...]], Method], str, tuple[int, ...]]] = {
    "FedAvg, MLP": (fedavg, "mlp", (64,)),
    "FedAvg, LeNet": (fedavg, "lenet", (1, 28, 28)),
    "PeFLL, LeNet": (pefll, "lenet", (1, 28, 28)),
}


@task
def drawn(client: Client) -> Sent:
    """The rows of an epoch's batches, as local SGD draws them."""
    return send(rows=client.draws.permutation(client.n, client.capacity))


def trained(method: Method, clients: Clients, device: str) -> tuple[State, list[Tensor], float]:
    """The state after a few rounds, cohorts and batches as they were drawn, and seconds of a round."""
    federation = simulate(clients, device=device)
    state, seen = method.start(0), list[Tensor]()
    for number in range(1, ROUNDS + 1):
        federation.begin_round(number)
        cohort = federation.sample(20)
        seen += [cohort.ids, cohort.ask(drawn)["rows"]]
        state = method.round(state, federation)
    return state, seen, seconds_of_a_round(method, state, federation)


def seconds_of_a_round(method: Method, state: State, federation: Federation) -> float:
    """The fastest of some; replies come back to the CPU, so a round has ended when it returns."""
    taken = []
    for number in range(ROUNDS + 1, ROUNDS + TIMED + 1):
        federation.begin_round(number)
        begin = time.perf_counter()
        method.round(state, federation)
        taken.append(time.perf_counter() - begin)
    return min(taken)


def difference(start: State, one: State, other: State) -> float:
    """How far apart two states are, as a share of how far training has moved: in the part where it is largest."""
    shares = []
    for name, value in one.items():
        if name in start and value.is_floating_point() and not torch.equal(value, start[name]):
            shares.append(float((value - other[name]).norm() / (value - start[name]).norm()))
    return max(shares)


def compare(name: str, device: str) -> bool:
    make, network, shape = WORK[name]
    method, clients = make(network, shape), people(shape)
    here, drawn_here, seconds_here = trained(method, clients, "cpu")
    there, drawn_there, seconds_there = trained(method, clients, device)
    equal = all(torch.equal(one, other) for one, other in zip(drawn_here, drawn_there, strict=True))
    apart = difference(method.start(0), here, there)
    speed = f"a round takes {1000 * seconds_here:.0f} ms on the CPU"
    if device != "cpu":
        speed += f", {1000 * seconds_there:.0f} ms on {device}: {seconds_here / seconds_there:.2f} x as fast"
    print(
        f"{name}: cohorts and batches {'equal' if equal else 'DIFFERENT'}; "
        f"results apart by {apart:.1e} of the change ({'close' if apart <= CLOSE else 'TOO FAR'}); {speed}",
        flush=True,
    )
    return equal and apart <= CLOSE


def main() -> int:
    parser = argparse.ArgumentParser(description="Compare another device with the CPU.")
    parser.add_argument("--device", default="auto", help="auto, cuda, mps, cpu or another device of PyTorch")
    device = str(find_device(parser.parse_args().device))
    if device == "cpu":
        print("No other device than the CPU was found or asked for: the CPU is compared with itself.", flush=True)
    elif device.startswith("cuda"):
        print(f"{torch.cuda.get_device_name()}; convolutions without TF32, so that results can be compared")
        torch.backends.cudnn.allow_tf32 = False
    sound = [compare(name, device) for name in WORK]
    return 0 if all(sound) else 1


if __name__ == "__main__":
    sys.exit(main())
