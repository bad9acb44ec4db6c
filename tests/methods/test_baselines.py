"""The baselines of the documents, each against a closed form or a method that it comes down to."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from unalike import simulate
from unalike.core.client import Clients
from unalike.core.method import Method, State, train
from unalike.core.model import Model
from unalike.learn.local import LocalSGD
from unalike.methods.fedavg import FedAvg
from unalike.methods.fedem import FedEM
from unalike.methods.fedma import FedMA, matching
from unalike.methods.fedrep import FedRep
from unalike.methods.knnper import KNNPer
from unalike.methods.local import Local
from unalike.methods.perfedavg import PerFedAvg
from unalike.methods.pfedme import PFedMe
from unalike.methods.problem import Problem
from unalike.networks.architectures import build
from unalike.privacy import Gaussian
from unalike.studio.simulate import opened

CLASSES, FEATURES = 3, 6
MODEL = Model(build("mlp", (FEATURES,), CLASSES, hidden=(8,)))
PROBLEM = Problem(MODEL, (FEATURES,), CLASSES, 4)
LOCAL = LocalSGD(epochs=2, batch=4, lr=0.3)
WHOLE = LocalSGD(steps=1, batch=None, lr=0.1)


def clients_of(sizes: tuple[int, ...] = (8, 8, 8, 8), seed: int = 0) -> Clients:
    random = torch.Generator().manual_seed(seed)
    x = torch.randn(sum(sizes), FEATURES, generator=random)
    return Clients.from_sizes(x, torch.randint(CLASSES, (sum(sizes),), generator=random), torch.tensor(sizes))


def models(method: Method, state: State, clients: Clients) -> Tensor:
    cohort = simulate(clients).everyone()
    return opened(cohort, method.personalize(state, cohort))


class Point(nn.Module):
    """f(θ; x) = θ·x for one number: with the squared loss, a client is a quadratic in θ."""

    def __init__(self) -> None:
        super().__init__()
        self.theta = nn.Parameter(torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.theta


A, C = torch.tensor([0.5, 2.0, 1.0]), torch.tensor([1.0, -2.0, 4.0])  # curvature and minimum of each client's quadratic


def quadratics() -> Clients:
    """a/2·(θ − c)² as the mean of one squared error each: x = √a, y = √a·c."""
    x = A.sqrt()[:, None]
    return Clients.from_sizes(x, (x[:, 0] * C), torch.tensor([1, 1, 1]))


@pytest.mark.parametrize("order, power", [("first", 1), ("exact", 2)])
def test_perfedavg_settles_where_its_gradients_cancel(order: Any, power: int) -> None:
    """∇F_i(w) = (1 − αa)^power · a · (w − c), so the fixed point weighs c by a(1 − αa)^power."""
    method = PerFedAvg(Model(Point()), 3, WHOLE, alpha=0.3, order=order)
    weight = A * (1 - 0.3 * A) ** power
    fixed = ((weight * C).sum() / weight.sum()).reshape(1)
    state = method.start(0).replace(w=fixed)
    torch.testing.assert_close(train(method, simulate(quadratics()), 1, state).w, fixed, atol=1e-6, rtol=0)
    moved = train(method, simulate(quadratics()), 1, state.replace(w=torch.tensor([3.0]))).w
    torch.testing.assert_close(moved, 3 - 0.1 * (weight * (3 - C)).mean().reshape(1), atol=1e-5, rtol=0)
    own = state.w - 0.3 * A * (state.w - C)
    torch.testing.assert_close(models(method, state, quadratics())[:, 0], own, atol=1e-5, rtol=0)


def test_perfedavg_without_a_step_is_fedavg() -> None:
    local = LocalSGD(steps=3, batch=None, lr=0.3)
    method, plain = PerFedAvg(MODEL, 3, local, alpha=0.0), FedAvg(MODEL, 3, local)
    state, wanted = (train(one, simulate(clients_of()), 3) for one in (method, plain))
    torch.testing.assert_close(state.w, wanted.theta, atol=1e-6, rtol=0)


def test_perfedavg_takes_its_two_gradients_on_different_rows() -> None:
    """A step written out with ordinary autograd, on the even and the odd rows of the one batch that there is."""
    clients = clients_of((6,))
    method = PerFedAvg(MODEL, 1, LocalSGD(epochs=1, batch=6, lr=1.0), alpha=0.5, order="exact")
    state = method.start(0)
    after = method.round(state, simulate(clients).begin_round(1))
    x, y = clients.rows(0)
    assert y is not None
    halves = []
    for order in torch.cartesian_prod(*[torch.arange(6)] * 3):  # which three rows came at even places?
        if len(set(order.tolist())) == 3 and order.tolist() == sorted(order.tolist()):
            rest = [i for i in range(6) if i not in order.tolist()]
            w = state.w.clone().requires_grad_()
            (g,) = torch.autograd.grad(F.cross_entropy(MODEL(w, x[order]), y[order]), w, create_graph=True)
            loss = F.cross_entropy(MODEL(w - 0.5 * g, x[rest]), y[rest])
            halves.append(state.w - torch.autograd.grad(loss, w)[0])
    gaps = torch.stack([(after.w - one).abs().max() for one in halves])
    assert gaps.min() < 1e-6 < gaps.median()


def test_pfedme_settles_where_the_envelopes_cancel() -> None:
    """θ̂_i(w) = (a·c + λw)/(a + λ), and the fixed point weighs c by aλ/(a + λ)."""
    lam = 0.7
    method = PFedMe(
        Model(Point()),
        3,
        WHOLE,
        lambda_=lam,
        inner_steps=200,
        inner_lr=0.3,
        personal=LocalSGD(steps=200, batch=None, lr=0.3),
    )
    weight = A * lam / (A + lam)
    fixed = ((weight * C).sum() / weight.sum()).reshape(1)
    state = method.start(0).replace(w=fixed)
    torch.testing.assert_close(train(method, simulate(quadratics()), 1, state).w, fixed, atol=1e-5, rtol=0)
    moved = train(method, simulate(quadratics()), 1, state.replace(w=torch.tensor([3.0]))).w
    torch.testing.assert_close(moved, 3 - 0.1 * (weight * (3 - C)).mean().reshape(1), atol=1e-5, rtol=0)
    own = (A * C + lam * state.w) / (A + lam)
    torch.testing.assert_close(models(method, state, quadratics())[:, 0], own, atol=1e-4, rtol=0)


def test_fedrep_with_an_empty_head_is_fedavg_and_with_an_empty_body_local() -> None:
    clients = clients_of()
    averaging = FedRep(MODEL, 3, LOCAL, head=0, local_head=LocalSGD(steps=0))
    state, wanted = (train(one, simulate(clients), 2) for one in (averaging, FedAvg(MODEL, 3, LOCAL)))
    torch.testing.assert_close(state.body, wanted.theta, atol=1e-6, rtol=0)
    alone, local = FedRep(MODEL, 1.0, LOCAL, head=4, local_head=LOCAL), Local(MODEL, LOCAL)
    found = []
    for method in (alone, local):
        federation = simulate(clients)
        state = train(method, federation, 2)  # type: ignore[arg-type]
        cohort = federation.everyone()
        found.append(opened(cohort, method.personalize(state, cohort)))
    torch.testing.assert_close(found[0], found[1], atol=1e-6, rtol=0)


def test_fedreps_head_is_trained_first_and_stays() -> None:
    clients = clients_of((5,))
    step = LocalSGD(steps=1, batch=None, lr=0.5)
    method = FedRep(MODEL, 1, step, local_head=step)
    federation = simulate(clients)
    state = method.start(1)
    after = method.round(state, federation.begin_round(1))
    x, y = clients.rows(0)
    body, head = state.body.clone().requires_grad_(), method.first_head.clone().requires_grad_()
    (g,) = torch.autograd.grad(F.cross_entropy(MODEL(torch.cat([body, head]), x), y), head)
    new = (head - 0.5 * g).detach()
    (g,) = torch.autograd.grad(F.cross_entropy(MODEL(torch.cat([body, new]), x), y), body)
    torch.testing.assert_close(after.body, state.body - 0.5 * g, atol=1e-6, rtol=0)
    cohort = federation.everyone()
    torch.testing.assert_close(opened(cohort, method.personalize(after, cohort))[0], torch.cat([after.body, new]))
    sent = {entry.array for entry in federation.transcript.entries}
    assert sent == {"update", "loss"}


def test_fedreps_newcomer_trains_a_head_on_the_final_body() -> None:
    clients = clients_of((5,))
    method = FedRep(MODEL, 1, newcomer=LocalSGD(steps=1, batch=None, lr=0.5))
    state = method.start(1)
    x, y = clients.rows(0)
    head = method.first_head.clone().requires_grad_()
    (g,) = torch.autograd.grad(F.cross_entropy(MODEL(torch.cat([state.body, head]), x), y), head)
    torch.testing.assert_close(models(method, state, clients)[0], torch.cat([state.body, (head - 0.5 * g).detach()]))


def test_fedem_with_one_component_is_fedavg() -> None:
    clients = clients_of((8, 5, 9, 7))
    method = FedEM(PROBLEM, 3, LOCAL, components=1)
    state, wanted = (train(one, simulate(clients), 2) for one in (method, FedAvg(MODEL, 3, LOCAL)))
    torch.testing.assert_close(state.theta[0], wanted.theta, atol=1e-6, rtol=0)


def test_fedem_follows_em_written_out() -> None:
    clients = clients_of((7,))
    method = FedEM(PROBLEM, 1, LocalSGD(steps=1, batch=None, lr=0.5), components=2, weight_steps=1)
    state = method.start(0)
    after = method.round(state, simulate(clients).begin_round(1))
    x, y = clients.rows(0)
    theta = state.theta.clone().requires_grad_()
    losses = torch.stack([F.cross_entropy(MODEL(one, x), y, reduction="none") for one in theta])
    q = torch.softmax(-losses, 0).detach()
    (g,) = torch.autograd.grad((q * losses).sum() / 7, theta)
    torch.testing.assert_close(after.theta, state.theta - 0.5 * g, atol=1e-6, rtol=0)
    mixture = models(method, after, clients)[0]  # a newcomer, whose weights start from one half each
    losses = torch.stack([F.cross_entropy(MODEL(one, x), y, reduction="none") for one in after.theta])
    pi = torch.softmax(-losses, 0).mean(1)
    wanted = (pi[:, None, None] * torch.stack([F.softmax(MODEL(one, x), -1) for one in after.theta])).sum(0)
    torch.testing.assert_close(method.model(mixture, x).exp(), wanted, atol=1e-6, rtol=0)
    torch.testing.assert_close(method.model.module(mixture)(x).exp(), wanted, atol=1e-6, rtol=0)


def test_fedem_goes_on_from_the_weights_that_a_client_kept() -> None:
    """Two rounds and the final mixture written out: q weighs the components by π, which is no longer uniform."""
    clients = clients_of((7,))
    method = FedEM(PROBLEM, 1, LocalSGD(steps=1, batch=None, lr=0.5), components=2, weight_steps=2)
    federation = simulate(clients)
    state = train(method, federation, 2)
    x, y = clients.rows(0)
    theta, pi = method.start(0).theta, torch.full((2,), 0.5)

    def shares(losses: Tensor) -> Tensor:
        q = pi[:, None] * torch.exp(-losses)
        return q / q.sum(0)

    for _ in range(2):
        theta.requires_grad_()
        losses = torch.stack([F.cross_entropy(MODEL(one, x), y, reduction="none") for one in theta])
        q = shares(losses).detach()
        pi = q.mean(1)
        theta = (theta - 0.5 * torch.autograd.grad((q * losses).sum() / 7, theta)[0]).detach()
    torch.testing.assert_close(state.theta, theta, atol=1e-6, rtol=0)
    losses = torch.stack([F.cross_entropy(MODEL(one, x), y, reduction="none") for one in theta])
    for _ in range(2):
        pi = shares(losses).mean(1)
    cohort = federation.everyone()
    found = opened(cohort, method.personalize(state, cohort))[0].view(2, -1)[:, -1]
    torch.testing.assert_close(found, pi, atol=1e-6, rtol=0)


def test_identical_components_leave_the_weights_as_they_are() -> None:
    clients = clients_of()
    method = FedEM(PROBLEM, 1.0, WHOLE, components=3)
    state = method.start(0).replace(theta=MODEL.init(5).repeat(3, 1))
    weights = models(method, state, clients).view(4, 3, -1)[:, :, -1]
    torch.testing.assert_close(weights, torch.full((4, 3), 1 / 3))


def test_knnper_without_neighbours_is_fedavg_and_with_one_alone_remembers() -> None:
    clients = clients_of()
    method = KNNPer(PROBLEM, 3, LOCAL, neighbours=(1,), rows=8)
    state, wanted = (train(one, simulate(clients), 2) for one in (method, FedAvg(MODEL, 3, LOCAL)))
    torch.testing.assert_close(state.theta, wanted.theta, atol=1e-6, rtol=0)
    for own, i in zip(models(method, state, clients), range(4), strict=True):
        x, y = clients.rows(i)
        plain = method.model(torch.cat([own[:-2], torch.tensor([0.0, 1.0])]), x)
        torch.testing.assert_close(plain, F.log_softmax(MODEL(state.theta, x), -1), atol=1e-5, rtol=0)
        remembered = method.model(torch.cat([own[:-2], torch.tensor([1.0, 1.0])]), x)
        assert torch.equal(remembered.argmax(-1), y)


def test_knnper_mixes_as_written_out_and_chooses_on_validation_rows() -> None:
    """Labels that the common model cannot know, but the neighbours do: λ is 1. Shuffled labels: λ is 0."""
    train_part = clients_of((20,), seed=1)
    x, _ = train_part.rows(0)
    y = (x[:, 0] * 10).long() % 2  # stripes
    method = KNNPer(PROBLEM, 1, LOCAL, neighbours=(3,), rows=24, scale=2.0)
    state = State(theta=MODEL.init(3))
    memory = replace(train_part, y=y)
    known = F.softmax(MODEL(state.theta, x), -1)
    for labels, expected in ((y, None), (known.argmax(-1), 0.0)):
        parts = {"train": memory, "validation": replace(memory, y=labels)}
        cohort = simulate(parts).everyone()  # type: ignore[arg-type]
        own = opened(cohort, method.personalize(state, cohort))[0]
        phi = torch.relu(F.linear(x, *list(MODEL.tensors(state.theta).values())[:2]))
        squared = torch.cdist(phi, phi).square()
        near, which = squared.topk(3, largest=False)
        weight = torch.exp(-near / (8 * 2.0))
        votes = torch.zeros(20, CLASSES)
        for column in range(3):
            votes[torch.arange(20), y[which[:, column]]] += weight[:, column]
        votes = votes / votes.sum(1, keepdim=True)
        grid = torch.linspace(0, 1, 11)
        right = [int(((g * votes + (1 - g) * known).argmax(-1) == labels).sum()) for g in grid]
        best = right.index(max(right))
        assert float(own[-2]) == pytest.approx(float(grid[best]))
        assert expected is None or best == 0
        mixed = grid[best] * votes + (1 - grid[best]) * known
        torch.testing.assert_close(method.model(own, x).exp(), mixed, atol=1e-4, rtol=0)
        torch.testing.assert_close(method.model.module(own)(x).exp(), mixed, atol=1e-4, rtol=0)


def test_knnper_gives_a_client_without_labels_the_common_model() -> None:
    clients = clients_of()
    method = KNNPer(PROBLEM, 3, LOCAL, neighbours=(2,), rows=8)
    state = method.start(0)
    x, _ = clients.rows(0)
    own = models(method, state, clients.without_labels())[0]
    torch.testing.assert_close(method.model(own, x), F.log_softmax(MODEL(state.theta, x), -1), atol=1e-6, rtol=0)


def permuted(model: Model, theta: Tensor, orders: list[Tensor]) -> Tensor:
    """The same function with hidden neurons in another order; a convolution's channel is a block of a linear layer."""
    tensors = {name: value.clone() for name, value in model.tensors(theta).items()}
    names = list(tensors)
    for layer, order in enumerate(orders):
        weight, bias, after = names[2 * layer], names[2 * layer + 1], names[2 * layer + 2]
        tensors[weight], tensors[bias] = tensors[weight][order], tensors[bias][order]
        value = tensors[after]
        blocks = value.reshape(len(value), len(order), -1)[:, order]
        tensors[after] = blocks.reshape(value.shape)
    return model.flatten(tensors)


@pytest.mark.parametrize("name, shape", [("mlp", (6,)), ("lenet", (1, 28, 28))])
def test_fedma_finds_a_network_in_permuted_copies_of_it(name: str, shape: tuple[int, ...]) -> None:
    model = Model(build(name, shape, CLASSES))
    method = FedMA(Problem(model, shape, CLASSES, 3))
    random = torch.Generator().manual_seed(0)
    theta = model.init(0)
    widths = [neurons for _, neurons, _ in method.layers[:-1]]
    copies = [permuted(model, theta, [torch.randperm(n, generator=random) for n in widths]) for _ in range(3)]
    x = torch.randn(5, *shape, generator=random)
    torch.testing.assert_close(model(copies[1], x), model(theta, x), atol=1e-4, rtol=1e-4)
    rest, done = torch.stack(copies), []
    for layer in range(len(widths)):
        matched, rest = method._match(layer, rest)
        done.append(matched.mean(0))
    average = torch.cat([*done, rest.mean(0)])
    torch.testing.assert_close(model(average, x), model(theta, x), atol=1e-4, rtol=1e-4)
    plain = torch.stack(copies).mean(0)
    assert not torch.allclose(model(plain, x), model(theta, x), atol=1e-2)


def test_fedma_without_hidden_layers_averages_classes_by_their_counts() -> None:
    model = Model(build("logistic", (FEATURES,), CLASSES))
    clients = clients_of((5, 9))
    local = LocalSGD(steps=1, batch=None, lr=0.5)
    method = FedMA(Problem(model, (FEATURES,), CLASSES, 2), 1.0, local)
    state = method.start(0)
    after = method.round(state, simulate(clients).begin_round(1))
    wanted, counts = torch.zeros(CLASSES, FEATURES + 1), torch.zeros(CLASSES, 1)
    for i in range(2):
        x, y = clients.rows(i)
        assert y is not None
        theta = state.theta.clone().requires_grad_()
        (g,) = torch.autograd.grad(F.cross_entropy(model(theta, x), y), theta)
        own = model.tensors(state.theta - 0.5 * g)
        n = torch.bincount(y, minlength=CLASSES)[:, None].float()
        wanted += n * torch.cat([own["linear.weight"], own["linear.bias"][:, None]], 1)
        counts += n
    found = model.tensors(after.theta)
    together = torch.cat([found["linear.weight"], found["linear.bias"][:, None]], 1)
    torch.testing.assert_close(together, wanted / counts, atol=1e-4, rtol=0)


def test_a_round_of_fedma_matches_freezes_and_trains_the_rest() -> None:
    """Two clients and three hidden neurons, with the matching found among all six orders; the step is long enough that
    another order than the first is the best."""
    model = Model(build("mlp", (FEATURES,), CLASSES, hidden=(3,)))
    clients = clients_of((5, 9))
    method = FedMA(Problem(model, (FEATURES,), CLASSES, 2), 1.0, LocalSGD(steps=1, batch=None, lr=9.0))
    state = method.start(0)
    after = method.round(state, simulate(clients).begin_round(1))
    rows = [clients.rows(i) for i in range(2)]
    split = 3 * (FEATURES + 1)

    def trained(theta: Tensor, i: int) -> Tensor:
        theta = theta.clone().requires_grad_()
        return (
            theta - 9.0 * torch.autograd.grad(F.cross_entropy(model(theta, rows[i][0]), rows[i][1]), theta)[0]
        ).detach()

    first, second = (trained(state.theta, i) for i in range(2))
    orders = [torch.tensor(one) for one in itertools.permutations(range(3))]
    same = [permuted(model, second, [order]) for order in orders]
    best = max(range(6), key=lambda one: float(first[:split] @ same[one][:split]))
    assert best != 0
    done = (5 * first[:split] + 9 * same[best][:split]) / 14
    last = [trained(torch.cat([done, rest[split:]]), i)[split:] for i, rest in enumerate((first, same[best]))]
    counts = torch.stack([torch.bincount(y, minlength=CLASSES).float() for _, y in rows if y is not None])
    share = counts / counts.sum(0)
    weights = sum(share[i][:, None] * last[i][: 3 * CLASSES].view(CLASSES, 3) for i in range(2))
    biases = sum(share[i] * last[i][3 * CLASSES :] for i in range(2))
    assert isinstance(weights, Tensor) and isinstance(biases, Tensor)
    torch.testing.assert_close(after.theta, torch.cat([done, weights.flatten(), biases]), atol=1e-4, rtol=1e-4)


def test_matching_undoes_a_permutation_in_spite_of_noise() -> None:
    random = torch.Generator().manual_seed(0)
    neurons = torch.randn(6, 9, generator=random)
    order = torch.randperm(6, generator=random)
    found = matching(torch.stack([neurons, neurons[order] + 0.05 * torch.randn(6, 9, generator=random)]), 2)
    assert torch.equal(order[found[1]], torch.arange(6))


@pytest.mark.parametrize("method", [PerFedAvg, FedRep, PFedMe, FedEM, KNNPer])
def test_client_level_noise_releases_one_clipped_mean(method: Any) -> None:
    problem = PROBLEM if "problem" in method.__dataclass_fields__ else MODEL
    private = method(problem, 0.5, LOCAL, clip=0.1, noise=Gaussian(1.0))
    federation = simulate(clients_of())
    train(private, federation, 2)
    assert {entry.array for entry in federation.transcript.entries} <= {"update"}
    assert 0 < federation.ledger.epsilon(1e-3) < 100
    with pytest.raises(ValueError, match="set clip"):
        method(problem, secure=True)


@pytest.mark.parametrize(
    "method, changes, text",
    [
        (PerFedAvg, {"alpha": -1}, "alpha=-1"),
        (PerFedAvg, {"order": "second"}, "expected one of first, exact"),
        (FedRep, {"head": 5}, "expected 0 to 4"),
        (PFedMe, {"inner_lr": 0.2}, "diverge from 2 on"),
        (FedEM, {"components": 0}, "components=0"),
        (KNNPer, {"neighbours": (600,)}, "from 1 to rows"),
        (FedMA, {"passes": 0}, "passes=0"),
    ],
)
def test_wrong_settings_are_refused(method: Any, changes: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        method(PROBLEM if "problem" in method.__dataclass_fields__ else MODEL, **changes)


def test_fedma_refuses_networks_that_are_no_chains() -> None:
    with pytest.raises(ValueError, match="use mlp, lenet or cnn"):
        FedMA(Problem(Model(build("resnet20", (3, 32, 32), 10)), (3, 32, 32), 10, 3))
