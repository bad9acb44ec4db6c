"""The cost of a DP-SGD step: plain and private local training in the block simulator, and Opacus where it is installed.

All train an MLP 64-64-10 at clients of 100 samples with (expected) batches of 10. A client-step is one step of one
client. Opacus runs one client after the other, as a federated client with it would; so does the plain PyTorch loop.
``ghost`` is an alternative to materialising every sample's gradient: norms from activations and output gradients.
"""

from __future__ import annotations

import importlib.util
import json
import time
import warnings
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import grad, vmap

from unalike import Clients, Model, simulate
from unalike.core.release import Mean
from unalike.learn.dpsgd import batch_capacity
from unalike.learn.local import LocalSGD
from unalike.methods.fedavg import FedAvg
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
    cost = None if private is None else local.cost(torch.full((CLIENTS,), SIZE))
    into = Mean("update", cost=cost)

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
