"""Tasks run on the simulator's device: nothing in them may lean on the CPU, and the result is the CPU's.

The device is a pretended one (``pretend.py``), because the machines that run tests have no GPU. PyTorch knows it for
the rest of the process, where other tests fail that fork, so ``test_device.py`` runs this file in a process of its own.
By hand: ``python -m pytest tests/runtime/on_pretended_device.py``.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import grad, vmap

from tests.analytics.test_shards import Found, assert_same_bits
from tests.analytics.test_shards import found as analysed
from tests.runtime.pretend import PRETEND, Pretended, ran
from unalike import Client, Clients, Model, send, simulate, task
from unalike.core.draws import Draws, key
from unalike.core.federation import Federation
from unalike.core.method import Method, train
from unalike.core.release import Each
from unalike.core.task import Sent
from unalike.core.torch_internals import to_device_of
from unalike.learn.evaluation import evaluate
from unalike.learn.local import LocalSGD
from unalike.learn.scaling import scale_inputs
from unalike.methods import METHODS
from unalike.methods.fedavg import FedAvg
from unalike.networks.classifiers import MLP, LeNet
from unalike.networks.embeddings import embedding_network
from unalike.networks.subspace import KINDS, subspace
from unalike.privacy.dpsgd import PointPrivacy
from unalike.privacy.mechanisms import Gaussian
from unalike.runs.prepare import build
from unalike.runs.recipe.recipe import Recipe, to_recipe
from unalike.runtime.shard import call, recording
from unalike.runtime.shard.simulator import Simulator, find_device

SIZES = [7, 4, 9, 4, 6, 7]  # unequal: blocks are padded
SHAPES = {"features": (6,), "image": (1, 16, 16), "tokens": (3,)}


def clients_of(kind: str, classes: int = 4) -> Clients:
    random = torch.Generator().manual_seed(0)
    rows, shape = sum(SIZES), SHAPES[kind]
    x = torch.randn(rows, *shape, generator=random)
    if kind != "features":
        high = classes if kind == "tokens" else 256
        x = torch.randint(high, (rows, *shape), generator=random).to(torch.int64 if kind == "tokens" else torch.uint8)
    y = torch.randint(classes, (rows,), generator=random)
    scaled = {"shift": torch.tensor(127.5), "scale": torch.tensor(0.01)} if kind == "image" else {}
    return Clients.from_sizes(x, y, torch.tensor(SIZES), **scaled)


def federation_of(clients: Clients, device: str, **how: Any) -> Federation:
    return simulate({"train": clients, "test": clients}, block=4, threads=1, device=device, **how)


def outcome(method: Method, clients: Clients, device: str) -> Found:
    """What two rounds, the models of all, their scores and what the clients keep come to."""
    federation = federation_of(clients, device)
    state = train(method, federation, rounds=2)
    scores = evaluate(
        method.model, lambda cohort: method.personalize(state, cohort), federation, federation.roster, labels=True
    )
    assert not federation.failures
    kept = federation.runtime.kept(federation.run)  # type: ignore[attr-defined]
    made = {**state, "score": scores.score, "loss": scores.loss, **{f"kept {name}": v for name, v in kept.items()}}
    assert all(not isinstance(value, Pretended) for value in made.values())
    return made


def assert_same_on_the_device(method: Method, clients: Clients) -> None:
    ran.clear()
    there = outcome(method, clients, PRETEND)
    assert any("mm" in operation for operation in ran), "nothing was computed on the device"
    assert_same_bits(there, outcome(method, clients, "cpu"))


FEW = {"steps": 2}
QUICK: dict[str, dict[str, Any]] = {  # where a client takes many steps by default
    **{name: {"local": FEW} for name in ("pefll", "pefll-unlabeled", "odpfl")},
    **{name: {"local": FEW} for name in ("pfl-sampled", "pfl-nearest", "pfl-ensemble")},
    **{name: {"local": FEW} for name in ("local", "adaped", "adaped-continue", "perfedavg", "quped")},
    "pfedhn": {"local": FEW, "newcomer_rounds": 2},
    "pfedme": {"local": FEW, "personal": {"epochs": 1}},
    "fedavg-finetune": {"finetune": FEW},
}


def recipe(method: str, **hyperparameters: Any) -> Recipe:
    cohort = {} if method == "local" else {"cohort": 4}
    wanted = {**cohort, **QUICK.get(method, {}), **hyperparameters}
    return to_recipe({"method": method, "hyperparameters": wanted}, "the test")


def named(method: str, kind: str, **hyperparameters: Any) -> tuple[Method, Clients]:
    clients = clients_of(kind)
    roster = clients.roster()
    schema = replace(roster.schema, classes=4, kind=kind)  # type: ignore[arg-type]
    return build(recipe(method, **hyperparameters), replace(roster, schema=schema))[1], clients


@pytest.mark.parametrize("name", METHODS)
def test_every_method_finds_the_same_on_another_device(name: str) -> None:
    assert_same_on_the_device(*named(name, "features"))


@pytest.mark.parametrize("name", ["fedavg", "pefll", "odpfl", "flowdup", "fedtta"])
def test_methods_on_images(name: str) -> None:
    assert_same_on_the_device(*named(name, "image"))


def test_text() -> None:
    """By FedAvg, and the network that describes it to PeFLL (whose hypernetwork is large for text)."""
    assert_same_on_the_device(*named("fedavg", "tokens"))
    embedding = embedding_network((3,), "tokens", 4, 2, "linear")
    given = embedding.init(0), torch.tensor([[0, 1, 3]]), torch.tensor([2])
    with torch.device(PRETEND):
        there = embedding(*(one.to(PRETEND) for one in given))
    assert torch.equal(there.cpu(), embedding(*given))


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("fedavg", {"local": {"steps": 3, "momentum": 0.9, "weight_decay": 0.01, "clip": 1.0}}),
        ("fedprox", {"mu_step": 0.1, "local": {"batch": 5}}),
        ("flowdup", {"subspace": "kronecker"}),
        ("flowdup", {"learn_prior": False, "subspace": "identity"}),
        ("pefll", {"mask_labels": True, "describe_rows": 3, "newcomer_rows": 2}),
        ("pefll", {"labels": "alone"}),
        ("odpfl", {"encoder": "dss"}),
        ("odpfl", {"encoder": "set-transformer"}),
        ("odpfl", {"encoder": "sphere", "newcomer_epsilon": 5.0}),
        ("odpfl", {"rows": 3}),
        ("odpfl", {"two_phase": 1}),
    ],
)
def test_settings_that_take_other_paths(name: str, settings: dict[str, Any]) -> None:
    assert_same_on_the_device(*named(name, "features", **settings))


@pytest.mark.parametrize("network", ["mlp", "lenet"])
@pytest.mark.parametrize("privacy", ["client", "point", "secure"])
def test_private_training(network: str, privacy: str) -> None:
    """Point-level with an MLP: by ghost norms; with a LeNet: by the gradient of every sample."""
    model = Model(MLP((6,), 4, (5,)) if network == "mlp" else LeNet((1, 16, 16), 4))
    local, changes = LocalSGD(steps=2, batch=3), dict[str, Any]()
    if privacy == "point":
        local = LocalSGD(steps=2, batch=3, private=PointPrivacy(clip=1.0, noise_multiplier=1.0))
    elif privacy == "client":
        changes = {"clip": 1.0, "noise": Gaussian(1.0)}
    else:
        changes = {"clip": 1.0, "secure": True}
    kind = "features" if network == "mlp" else "image"
    assert_same_on_the_device(FedAvg(model, cohort=4, local=local, **changes), clients_of(kind))


# every task and every kind of message; the others differ in what the server adds
ANALYSES = [
    "kmeans", "k-fed", "mdm", "mdm, random start", "mdm, choice", "means", "means in bits", "means, private", "rates",
    "rates, plug-in", "rates in bits", "rates, private", "linear", "linear, gd", "logistic", "logistic, gd",
    "one for all", "one for all, logistic", "candidates", "candidates, alternating", "mixture, linear",
    "mixture, logistic",
]  # fmt: skip


@pytest.mark.parametrize("name", ANALYSES)
def test_every_analysis_finds_the_same_on_another_device(name: str) -> None:
    ran.clear()
    there = analysed(name, device=PRETEND)
    assert ran
    assert_same_bits(there, analysed(name))


def test_scaling() -> None:
    made = [scale_inputs(federation_of(clients_of("image"), device)) for device in (PRETEND, "cpu")]
    assert made[0] == made[1]


class _WithConstants(nn.Module):
    """A buffer and a parameter that is not trained."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.fixed = nn.Linear(6, 4), nn.Linear(6, 4)
        self.fixed.requires_grad_(False)
        self.register_buffer("scale", torch.linspace(0.5, 2.0, 6))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.linear(x * self.scale) + self.fixed(x)
        return out


def test_a_models_constants_follow_it() -> None:
    model = Model(_WithConstants())
    assert_same_on_the_device(FedAvg(model, cohort=4, local=LocalSGD(batch=3)), clients_of("features"))
    private = LocalSGD(steps=1, batch=3, private=PointPrivacy(clip=1.0, noise_multiplier=1.0))
    assert_same_on_the_device(FedAvg(model, cohort=4, local=private), clients_of("features"))


@pytest.mark.parametrize("kind", KINDS)
def test_a_subspace_follows_its_vector(kind: Any) -> None:
    p, v = subspace(kind, 30, None, 0), torch.linspace(-1, 1, 15 if kind != "identity" else 30)
    assert torch.equal(p(v.to(PRETEND)).cpu(), p(v))


def test_a_constant_is_moved_once_and_outlives_the_gradient_that_moved_it() -> None:
    constant, x = torch.arange(3.0), torch.ones(2, 3).to(PRETEND)
    gradient = vmap(grad(lambda one: (one * to_device_of(constant, one)).sum()))(x)
    assert torch.equal(gradient.cpu(), constant.expand(2, 3))
    assert type(to_device_of(constant, x)) is Pretended  # no wrapper of vmap or grad
    assert to_device_of(constant, x) is to_device_of(constant, x)
    assert to_device_of(constant, torch.ones(1)) is constant


def test_draws_are_the_same_bits() -> None:
    numbers = torch.arange(3)
    here, there = key(5, numbers, 7), key(5, numbers.to(PRETEND), 7)
    assert torch.equal(here, there.cpu())
    for draw in ("bits", "uniform", "normal"):
        one, other = getattr(Draws(here[1], 1), draw)(9), getattr(Draws(there[1], 1), draw)(9)
        assert isinstance(other, Pretended) and torch.equal(one, other.cpu())
    one, other = Draws(here[2]).permutation(5, 8), Draws(there[2]).permutation(5, 8)
    assert torch.equal(one, other.cpu())


def test_a_task_with_a_tensor_of_the_cpu_is_an_error_that_names_it() -> None:
    """What the other tests rely on: the pretended device notices."""
    constant = torch.ones(6)

    @task
    def careless(client: Client) -> Sent:
        return send(value=client.mean(client.x * constant))

    replies = federation_of(clients_of("features"), PRETEND, quorum=0.0).everyone()
    with pytest.raises(RuntimeError, match=r"tensors of the device and of the CPU"):
        replies.ask(careless, into=Each("value"))


def test_without_a_block_as_many_as_fit_are_computed_at_once() -> None:
    @task
    def together(client: Client, theta: Tensor) -> Sent:
        return send(value=theta.sum() + client.n)

    federation = simulate(clients_of("features"), device=PRETEND)
    theta = torch.zeros(10)
    assert torch.equal(federation.everyone().ask(together, theta=theta)["value"], torch.tensor(SIZES).float())
    assert federation.runtime.plans() == {}  # type: ignore[attr-defined]  # nothing is measured


def test_on_the_cpu_nothing_is_moved() -> None:
    x = torch.ones(3)
    assert call.to_device({"x": x}, torch.device("cpu"))["x"] is x
    modes = []

    @task
    def watching(client: Client) -> Sent:
        modes.append(torch._C._len_torch_function_stack())
        return send(value=client.sum(client.x))

    federation_of(clients_of("features"), "cpu").everyone().ask(watching)
    assert modes and not any(modes)


def test_a_recording_stays_on_its_device() -> None:
    """On the device "meta": recordings are made with PyTorch's fake tensors, which know of no pretended device."""
    constant = torch.arange(4.0)

    def function(inputs: recording.Inputs) -> Tensor:
        def loss(one: Tensor) -> Tensor:
            return (one * torch.arange(4) + to_device_of(constant, one) * torch.ones_like(one)).relu().sum()

        with torch.device("meta"):
            gradients: Tensor = vmap(grad(loss))(inputs["columns"]["x"])
        return gradients

    inputs = {"columns": {"x": torch.empty(3, 4, device="meta")}}
    function(inputs)  # as always before a recording; constants are moved now
    recorded, _ = recording._record(function, inputs)
    assert isinstance(recorded, nn.Module)
    assert {one.device.type for one in recorded.buffers()} == {"meta"}
    assert recorded(inputs).device.type == "meta"


def test_auto_takes_what_is_here_and_a_device_that_is_not_here_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    assert find_device("auto") == torch.device("cpu")
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    assert find_device("auto") == torch.device("mps")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert find_device("auto") == torch.device("cuda")
    with pytest.raises(ValueError, match=r"device='nowhere' is not here .*; use auto or one of"):
        Simulator(device="nowhere")
