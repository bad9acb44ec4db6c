"""The cost of a DP-SGD step: plain and private local training in the block simulator, and Opacus where it is installed.

All train an MLP 64-64-10 at clients of 100 samples with (expected) batches of 10. A client-step is one step of one
client. Opacus runs one client after the other, as a federated client with it would; so does the plain PyTorch loop.
``ghost`` is an alternative to materialising every sample's gradient: norms from activations and output gradients.

``unequal`` is a round of 20 clients with sizes and batch sizes of their own, beside Opacus in a loop over them: on all
cores, in the time that a person waits, with Opacus on as many threads as it is fastest with; and on one thread, in CPU
time.
"""

from __future__ import annotations

import importlib.util
import json
import math
import time
import warnings
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import grad, vmap

from benchmarks.report import Row
from benchmarks.rounds import alternate, quotients
from unalike import Clients, Model, simulate
from unalike.core.method import next_state
from unalike.core.release import Mean
from unalike.data.population import Population
from unalike.learn.dpsgd import batch_capacity
from unalike.learn.local import LocalSGD
from unalike.methods.fedavg import FedAvg
from unalike.methods.robust_hdp import RobustHDP
from unalike.privacy.dpsgd import PointPrivacy

CLIENTS, SIZE, BATCH, STEPS = 128, 100, 10, 20
CLIP, NOISE, LR = 1.0, 1.0, 0.05


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))


def data() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(CLIENTS * SIZE, 64, generator=generator)
    return x, torch.randint(0, 10, (len(x),), generator=generator)


def simulated(private: PointPrivacy | None) -> float:
    """Client-steps per second of the simulator."""
    x, y = data()
    people = Clients.from_sizes(x, y, torch.full((CLIENTS,), SIZE))
    local = LocalSGD(steps=STEPS, batch=BATCH, lr=LR, private=private)
    method = FedAvg(Model(network()), cohort=1.0, local=local)
    federation = simulate(people, block=32)
    theta = method.model.init(0)
    into = Mean("update", cost=None if private is None else local.cost)

    def once() -> None:
        federation.everyone().ask(method.fit, theta=theta, rate=1.0, into=into)

    return CLIENTS * STEPS / fastest(once)


def torch_loop(clients: int = 8) -> float:
    """Client-steps per second of plain SGD, written as a loop in PyTorch."""
    x, y = data()

    def once() -> None:
        for client in range(clients):
            net = network()
            optimizer = torch.optim.SGD(net.parameters(), lr=LR)
            for _ in range(STEPS):
                rows = client * SIZE + torch.randint(0, SIZE, (BATCH,))
                optimizer.zero_grad()
                F.cross_entropy(net(x[rows]), y[rows]).backward()
                optimizer.step()

    return clients * STEPS / fastest(once)


def opacus(clients: int = 8) -> float | None:
    """Client-steps per second with Opacus; None where it is not installed."""
    if importlib.util.find_spec("opacus") is None:
        return None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from opacus.grad_sample import GradSampleModule
        from opacus.optimizers import DPOptimizer
    x, y = data()

    def once() -> None:
        for client in range(clients):
            net = GradSampleModule(network())
            sgd = torch.optim.SGD(net.parameters(), lr=LR)
            optimizer = DPOptimizer(sgd, noise_multiplier=NOISE, max_grad_norm=CLIP, expected_batch_size=BATCH)
            for _ in range(STEPS):
                rows = client * SIZE + (torch.rand(SIZE) < BATCH / SIZE).nonzero().flatten()
                if len(rows) == 0:
                    continue
                optimizer.zero_grad()
                F.cross_entropy(net(x[rows]), y[rows]).backward()
                optimizer.step()

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return clients * STEPS / fastest(once)


def one_step() -> dict[str, float]:
    """Milliseconds for the clipped sum of a block of 32 clients: every sample's gradient, or ghost norms."""
    model, clients, room = Model(network()), 32, batch_capacity(BATCH)
    theta = model.init(0).expand(clients, -1).contiguous()
    x, y = torch.randn(clients, room, 64), torch.randint(0, 10, (clients, room))
    taken = (torch.arange(room) < BATCH).to(torch.float32).expand(clients, -1)

    def materialised(theta: Tensor, x: Tensor, y: Tensor, taken: Tensor) -> Tensor:
        def loss(theta: Tensor, x: Tensor, y: Tensor) -> Tensor:
            return F.cross_entropy(model(theta, x[None]), y[None])

        rows = vmap(grad(loss), in_dims=(None, 0, 0))(theta, x, y)
        return (taken * (CLIP / rows.norm(dim=1).clamp(min=CLIP))) @ rows

    def ghost(theta: Tensor, x: Tensor, y: Tensor, taken: Tensor) -> Tensor:
        part = model.tensors(theta)

        def loss(first: Tensor, second: Tensor) -> tuple[Tensor, Tensor]:
            hidden = F.relu(x @ part["0.weight"].T + part["0.bias"] + first)
            out = hidden @ part["2.weight"].T + part["2.bias"] + second
            return F.cross_entropy(out, y, reduction="sum"), hidden

        zeros = torch.zeros(room, 64), torch.zeros(room, 10)
        (d1, d2), hidden = grad(loss, argnums=(0, 1), has_aux=True)(*zeros)
        square = d1.square().sum(1) * (x.square().sum(1) + 1) + d2.square().sum(1) * (hidden.square().sum(1) + 1)
        factor = (taken * (CLIP / square.sqrt().clamp(min=CLIP)))[:, None]
        d1, d2 = factor * d1, factor * d2
        return torch.cat([(d1.T @ x).reshape(-1), d1.sum(0), (d2.T @ hidden).reshape(-1), d2.sum(0)])

    a, b = vmap(materialised)(theta, x, y, taken), vmap(ghost)(theta, x, y, taken)
    if not torch.allclose(a, b, atol=1e-4):
        raise AssertionError("ghost norms and per-sample gradients disagree")
    return {
        "materialised_ms": 1000 * fastest(lambda: vmap(materialised)(theta, x, y, taken), 10),
        "ghost_ms": 1000 * fastest(lambda: vmap(ghost)(theta, x, y, taken), 10),
    }


def fastest(work: Callable[[], object], times: int = 4) -> float:
    """Seconds of the fastest of a few runs, after one to warm up."""
    work()
    seconds = []
    for _ in range(times):
        begin = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - begin)
    return min(seconds)


UNEQUAL = (240, 480, 720, 960, 1200)  # samples of a client
BATCHES = (16, 32, 64, 128)


def unequal(repetitions: int, quick: bool) -> tuple[list[Row], dict[str, Any]]:
    """A round of DP-SGD at 20 unequal clients: the simulator, and Opacus client by client, in turns."""
    rows: list[Row] = []
    raw: dict[str, Any] = {}
    if importlib.util.find_spec("opacus") is None:
        return rows, {"left_out": {"Opacus": "it is not installed"}}
    count = 4 if quick else 20
    sizes = torch.tensor([UNEQUAL[i % len(UNEQUAL)] for i in range(count)])
    batch = torch.tensor([BATCHES[i % len(BATCHES)] for i in range(count)])
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(int(sizes.sum()), 1, 28, 28, generator=generator)
    y = torch.randint(0, 10, (len(x),), generator=generator)
    people = Clients.from_sizes(x, y, sizes)
    none, everyone = replace(people, size=torch.zeros_like(sizes)), torch.arange(count)
    said = {"batch": batch}
    whole = Population("unequal", "image", people, none, none, everyone, everyone[:0], 10, declared=said)
    cores = torch.get_num_threads()
    each = list(zip(sizes.tolist(), batch.tolist(), strict=True))
    for name, make in (("MLP 784-32-10", _mlp), ("LeNet-5", _lenet_5)):
        # each client's noise is a number of its own, here of equal size: that costs nothing to find
        local = LocalSGD(batch=None, lr=LR, private=PointPrivacy(CLIP, NOISE, batches=BATCHES))
        method, work = RobustHDP(Model(make()), local=local, weights="size"), f"DP-SGD, 20 unequal clients, {name}"
        theirs, bare = partial(_opacus_round, make, x, y, each), partial(_plain_round, make, x, y, each)

        def on(threads: int, run: Callable[[], None]) -> Callable[[], None]:
            def limited() -> None:
                torch.set_num_threads(threads)
                run()
                torch.set_num_threads(cores)

            return limited

        ours = _Rounds(method, whole)
        one, many, mine = alternate(repetitions, on(1, theirs), on(cores, theirs), on(cores, ours))
        fastest = min(one, many, key=sum)
        rows.append(Row(work, "Opacus in a loop / Unalike, all cores", quotients(fastest, mine), target=("≥", 3)))
        torch.set_num_threads(1)
        taken = alternate(repetitions, theirs, _Rounds(method, whole), bare, clock=time.process_time)
        torch.set_num_threads(cores)
        rows.append(Row(work, "Opacus in a loop / Unalike, one thread, CPU time", quotients(taken[0], taken[1])))
        rows.append(Row(work, "Opacus in a loop / PyTorch without privacy", quotients(taken[0], taken[2])))
        raw[name] = {
            "all cores": {"opacus, one thread": one, "opacus, all": many, "unalike": mine},
            "one thread": {"opacus": taken[0], "unalike": taken[1], "PyTorch without privacy": taken[2]},
        }
    return rows, raw


def _mlp() -> nn.Sequential:
    return nn.Sequential(nn.Flatten(), nn.Linear(784, 32), nn.ReLU(), nn.Linear(32, 10))


def _lenet_5() -> nn.Sequential:
    features = [nn.Conv2d(1, 6, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(6, 16, 5), nn.ReLU(), nn.MaxPool2d(2)]
    dense = [nn.Linear(256, 120), nn.ReLU(), nn.Linear(120, 84), nn.ReLU(), nn.Linear(84, 10)]
    return nn.Sequential(*features, nn.Flatten(), *dense)


class _Rounds:
    """Rounds that go on where they were, of clients that declare their batch sizes."""

    def __init__(self, method: RobustHDP, people: Population) -> None:
        self.method, self.federation = method, simulate(people)
        self.state = method.start(0)
        self()  # blocks are measured

    def __call__(self) -> None:
        self.state = next_state(self.method, self.state, self.federation)


def _opacus_round(make: Callable[[], nn.Module], x: Tensor, y: Tensor, clients: list[tuple[int, int]]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from opacus.grad_sample import GradSampleModule
        from opacus.optimizers import DPOptimizer

        begin = 0
        for size, batch in clients:
            net = GradSampleModule(make())
            sgd = torch.optim.SGD(net.parameters(), lr=LR)
            optimizer = DPOptimizer(sgd, noise_multiplier=NOISE, max_grad_norm=CLIP, expected_batch_size=batch)
            for _ in range(math.ceil(size / batch)):
                rows = begin + (torch.rand(size) < batch / size).nonzero().flatten()
                optimizer.zero_grad()
                F.cross_entropy(net(x[rows]), y[rows]).backward()
                optimizer.step()
            begin += size


def _plain_round(make: Callable[[], nn.Module], x: Tensor, y: Tensor, clients: list[tuple[int, int]]) -> None:
    """The same batches without privacy, in a loop: what no private step of these networks is expected to beat."""
    begin = 0
    for size, batch in clients:
        net = make()
        sgd = torch.optim.SGD(net.parameters(), lr=LR)
        for _ in range(math.ceil(size / batch)):
            rows = begin + (torch.rand(size) < batch / size).nonzero().flatten()
            sgd.zero_grad()
            F.cross_entropy(net(x[rows]), y[rows]).backward()
            sgd.step()
        begin += size


def run() -> dict[str, float | None]:
    """Client-steps per second, and the costs of privacy."""
    plain, private, loop = simulated(None), simulated(PointPrivacy(CLIP, NOISE)), torch_loop()
    other = opacus()
    return {
        "plain_steps_per_second": plain,
        "private_steps_per_second": private,
        "private_step_over_plain_step": plain / private,
        "torch_loop_steps_per_second": loop,
        "opacus_steps_per_second": other,
        "opacus_step_over_torch_loop_step": None if other is None else loop / other,
        "private_over_opacus": None if other is None else private / other,
        **one_step(),
    }


if __name__ == "__main__":
    print(json.dumps(run(), indent=2))
