"""FLowDUP: its round is one gradient step on (5.4); what it reduces to; what unlabeled clients add and never read."""

from __future__ import annotations

import functools
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.core.helpers import population
from unalike import simulate
from unalike.core.client import Clients
from unalike.core.method import Method, State, train
from unalike.core.model import Model
from unalike.deploy.program import program_of
from unalike.learn.evaluation import evaluate
from unalike.learn.local import LocalSGD
from unalike.learn.schedules import Schedule
from unalike.learn.server import ServerOptimizer
from unalike.methods.fedavg import FedAvg
from unalike.methods.flowdup import PARTS, FLowDUP, Representation
from unalike.methods.ld_fedavg import LDFedAvg
from unalike.methods.problem import Problem
from unalike.networks.architectures import build
from unalike.networks.heads import with_outputs
from unalike.networks.subspace import Kind
from unalike.runs.simulate import gather_models

SIZES = [8, 12, 5, 9]
FULL_STEP = LocalSGD(steps=1, batch=None, lr=1.0)
PLAIN = ServerOptimizer("sgd", lr=0.5)


def clients_of(sizes: list[int] = SIZES, labeled: list[bool] | None = None, shape: tuple[int, ...] = (6,)) -> Clients:
    random = torch.Generator().manual_seed(0)
    x = torch.randn(sum(sizes), *shape, generator=random)
    y = torch.randint(3, (sum(sizes),), generator=random)
    flags = None if labeled is None else torch.tensor(labeled)
    return Clients.from_sizes(x, y, torch.tensor(sizes), labeled=flags)


def mlp() -> Model:
    return Model(build("mlp", (6,), 3, hidden=(8,)))


def small(**changes: object) -> FLowDUP:
    fields = {"cohort": 4, "local": FULL_STEP, "server": PLAIN, "dimension": 9, "features": 7, "width": 5, "begin": 1.0}
    return FLowDUP(mlp(), **{**fields, "rates": {}, "penalty": 0.03, **changes})  # type: ignore[arg-type]


def begun(method: FLowDUP) -> State:
    return method.start(0).replace(prior=torch.linspace(-0.2, 0.3, method.lift.k))


def models_of(method: FLowDUP, state: State, clients: Clients) -> Tensor:
    cohort = simulate(clients).everyone()
    return gather_models(cohort, method.personalize(state, cohort))


@pytest.mark.parametrize("kind", ["kronecker", "signs"])
@pytest.mark.parametrize("block", [1, 3, 4])
def test_round_is_one_step_on_the_pooled_objective(kind: Kind, block: int) -> None:
    """Clients 0 and 2 are labeled: loss and regulariser; 1 and 3 are not: the regulariser alone (eq. 5.4-5.6)."""
    flags = [True, False, True, False]
    rates = {"h1": 0.3, "hidden": 0.7, "last": 2.0, "bias": 1.5}  # and 1 for the prior
    schedule = Schedule("exponential", 0.5, 1)
    clients = clients_of(labeled=flags)
    method = small(subspace=kind, labeled_share=0.5, rates=rates, schedule=schedule)
    state = begun(method)

    def objective(h1: Tensor, hidden: Tensor, last: Tensor, bias: Tensor, prior: Tensor) -> Tensor:
        total = torch.zeros(())
        for i, labeled in enumerate(flags):
            x, y = clients.rows(i)
            assert y is not None
            v = last @ method.hidden(hidden, method.h1(h1, x[0::2]).mean(0)) + bias
            total = total + 0.03 * (v - prior).square().sum()
            if labeled:
                theta = method.lift.theta0 + method.lift.p(v)
                total = total + F.cross_entropy(method.model(theta, x[1::2]), y[1::2])
        return total / 4

    wanted = torch.func.grad(objective, (0, 1, 2, 3, 4))(*(state[name] for name in PARTS))
    after = train(method, simulate(clients, block=block), 1, state)
    for name, gradient in zip(PARTS, wanted, strict=True):
        rate = 0.5 * rates.get(name, 1.0)
        torch.testing.assert_close(after[name], state[name] - rate * gradient, atol=1e-6, rtol=0)
        assert float(gradient.abs().max()) > 1e-3
    second = torch.func.grad(objective, (0, 1, 2, 3, 4))(*(after[name] for name in PARTS))
    federation = simulate(clients, block=block)
    later = train(method, federation, 2, state)
    for name, gradient in zip(PARTS, second, strict=True):
        rate = 0.25 * rates.get(name, 1.0)  # the schedule's second round
        torch.testing.assert_close(later[name], after[name] - rate * gradient, atol=1e-6, rtol=0)


def test_h1_may_be_another_network_than_f() -> None:
    """T1 Table 5.3. h1 is one linear map here, so r(X), v and θ can be written out."""
    clients = clients_of()
    method = small(extractor="logistic", problem=Problem(mlp(), (6,), 3, 4))
    state = begun(method)
    assert state.h1.numel() == 7 * 6 + 7 and method.model.size == 6 * 8 + 8 + 8 * 3 + 3
    weight, bias = state.h1[:42].view(7, 6), state.h1[42:]
    layer, shift = state.hidden[:35].view(5, 7), state.hidden[35:]
    models, r = models_of(method, state, clients), method.descriptors(state, simulate(clients).everyone())
    for i in range(4):
        mean = weight @ clients.rows(i)[0].mean(0) + bias
        torch.testing.assert_close(r[i], mean, atol=1e-6, rtol=0)
        v = state.last @ (layer @ mean + shift).relu() + state.bias
        torch.testing.assert_close(models[i], method.lift.theta0 + method.lift.p(v), atol=1e-6, rtol=0)
    after = train(method, simulate(clients), 1, state)
    assert float((after.h1 - state.h1).abs().max()) > 1e-4, "it learns"


def test_a_residual_network_can_be_generated_and_one_with_batch_norm_cannot() -> None:
    """Every parameter of ResNet18 with group norm comes from v; batch norm has statistics that none of it is."""
    resnet = Model(build("resnet18", (1, 8, 8), 3, width=2, groups=1))
    fields = {"dimension": 30, "features": 6, "width": 4, "local": FULL_STEP, "rates": {}, "extractor": "small-cnn"}
    method = FLowDUP(resnet, 3, problem=Problem(resnet, (1, 8, 8), 3, 3, "image"), **fields)  # type: ignore[arg-type]
    clients = clients_of([4, 4, 4], shape=(1, 8, 8))
    state = method.start(0)
    after = train(method, simulate(clients), 1, state)
    assert float((after.last - state.last).abs().max()) > 0
    assert models_of(method, after, clients).shape == (3, resnet.size)
    with pytest.raises(ValueError, match=r"BatchNorm2d .*use nn.GroupNorm.*`resnet18` architecture is the group-norm"):
        Model(nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2)))


def test_r_is_no_task_that_a_client_elsewhere_would_run() -> None:
    program = program_of(small(), clients_of().roster().schema)
    program.teach(small().generate, [])
    with pytest.raises(ValueError, match=r"Representation\.read is not in the program"):
        program.teach(Representation(mlp()).read, [])


def test_without_unlabeled_clients_and_with_a_constant_v_it_is_ld_fedavg() -> None:
    """All of h but the last bias is silenced: v is that bias, and FLowDUP is LD-FedAvg on the measuring halves."""
    clients = clients_of([8, 8, 8, 8])
    local = LocalSGD(steps=3, batch=None, lr=0.7)
    method = small(labeled_share=1.0, penalty=0.0, local=local)
    state = begun(method)
    v = torch.linspace(-0.5, 0.5, 9)
    state = state.replace(hidden=torch.zeros_like(state.hidden), last=torch.zeros_like(state.last), bias=v)
    assert clients.y is not None
    halves = Clients.from_sizes(clients.x[1::2], clients.y[1::2], torch.tensor([4, 4, 4, 4]))
    in_space = replace(local, lr=0.7 * 9 / method.model.size)  # LD-FedAvg's steps are d/k times as long
    plain = LDFedAvg(method.model, cohort=4, local=in_space, server=PLAIN, dimension=9)
    wanted = plain.start(0).replace(v=v)
    federation, other = simulate(clients), simulate(halves)
    state, wanted = train(method, federation, 2, state), train(plain, other, 2, wanted)
    own = models_of(method, state, clients)
    torch.testing.assert_close(own, plain.personalize(wanted, other.everyone()), atol=1e-6, rtol=0)
    assert float((wanted.v - v).abs().max()) > 1e-2


def test_h_does_not_depend_on_the_order_of_the_rows_nor_on_labels() -> None:
    clients, method = clients_of([10]), small()
    state = begun(method)
    shuffled = replace(clients, x=clients.x[torch.randperm(10, generator=torch.Generator().manual_seed(1))])
    models = [
        models_of(method, state, some)
        for some in (clients, shuffled, clients.without_labels(), replace(clients, y=None).without_labels())
    ]
    for other in models[1:]:
        torch.testing.assert_close(models[0], other, atol=1e-6, rtol=0)
    elsewhere = models_of(method, state, replace(clients, x=clients.x + 1))
    assert float((models[0] - elsewhere).abs().max()) > 1e-3


@pytest.mark.parametrize("block", [1, 2, 4])
def test_block_size_does_not_matter(block: int) -> None:
    """Clients of unlike sizes, epochs with partial batches of one row."""
    method = small(local=LocalSGD(epochs=2, batch=4, lr=0.2), labeled_share=0.75)
    clients = clients_of(labeled=[True, True, True, False])
    wanted = train(method, simulate(clients, block=1), 2)
    found = train(method, simulate(clients, block=block), 2)
    for name in PARTS:
        torch.testing.assert_close(found[name], wanted[name], atol=1e-5, rtol=0)


@pytest.mark.parametrize(
    ("flags", "share", "labeled", "unlabeled"),
    [
        ([True] * 40, 0.9, 20, 0),  # nobody is unlabeled: a full cohort of labeled clients
        ([True] * 30 + [False] * 10, 0.9, 18, 2),
        ([True] * 30 + [False] * 10, 0.5, 10, 10),
        ([True] * 4 + [False] * 36, 0.9, 4, 2),  # few labeled ones: all of them
        ([True] * 30 + [False] * 10, 1.0, 20, 0),
    ],
)
def test_cohort_has_the_labeled_share(flags: list[bool], share: float, labeled: int, unlabeled: int) -> None:
    method = small(cohort=20, labeled_share=share)
    federation = simulate(clients_of([4] * 40, flags))
    train(method, federation, 1)
    rows = {row["task"]: row["replies"] for row in federation.transcript.rows() if row["array"] == "update"}
    assert rows == {"FLowDUP.fit": labeled} | ({"FLowDUP.regularize": unlabeled} if unlabeled else {})


def test_server_sees_sums_only_and_p_is_never_sent() -> None:
    method = small(labeled_share=0.5)
    federation = simulate(clients_of(labeled=[True, True, False, False]))
    train(method, federation, 1)
    assert {row["seen_as"] for row in federation.transcript.rows()} <= {"sum", "mean"}
    assert federation.traffic.total_down == 4 * 4 * (method.h1.size + method.hidden.size + 5 * 9 + 9 + 9)


def test_a_fixed_prior_is_zero() -> None:
    """Table C.4's variant: ψ_r is neither used nor learned."""
    method, clients = small(learn_prior=False), clients_of()
    states = [begun(method), method.start(0)]
    first, second = (train(method, simulate(clients), 1, state) for state in states)
    assert torch.equal(first.last, second.last) and torch.equal(first.prior, states[0].prior)


def test_feature_network_is_the_model_with_another_head() -> None:
    model = Model(build("cnn", (1, 16, 16), 10))
    h1 = with_outputs(model, 256)
    assert list(h1.shapes)[:-2] == list(model.shapes)[:-2] and h1.shapes["fc2.weight"][0] == 256
    assert h1(h1.init(0), torch.zeros(2, 1, 16, 16)).shape == (2, 256)
    with pytest.raises(ValueError, match="no linear layer"):
        with_outputs(Model(nn.Sequential(nn.Conv2d(1, 3, 3), nn.Flatten())), 256)


def test_it_learns_what_one_model_cannot() -> None:
    """Half the clients see their inputs negated: unlabeled newcomers get the model that fits them."""
    random = torch.Generator().manual_seed(0)
    mean, count, rows = torch.tensor([2.0, 0.0]), 40, 20
    x = torch.randn(count * rows, 2, generator=random) + mean
    y = (x[:, 1] > 0).to(torch.int64)
    x[rows * count // 2 :] *= -1
    clients = Clients.from_sizes(x, y, torch.full((count,), rows))
    clients = clients.select(sorted(range(count), key=lambda i: i % 5 == 0))  # newcomers, every fifth, come last
    model = Model(build("mlp", (2,), 2, hidden=()))  # linear: it cannot serve both halves
    local = LocalSGD(epochs=1, batch=20, lr=0.3)
    server = ServerOptimizer("adam", 0.02)
    own = FLowDUP(model, 10, local=local, server=server, rates={}, dimension=6, features=8, width=8)
    one = FedAvg(model, cohort=10, local=local)
    scores = []
    methods: tuple[Method, Method] = (own, one)
    for method in methods:
        federation = simulate(population(clients, clients, seen=32))
        newcomers = federation.runtime.roster.select(range(32, count))
        state = train(method, federation, 60)
        personalize = functools.partial(method.personalize, state)
        scores.append(evaluate(model, personalize, federation, newcomers, labels=False).mean)
    assert scores[0] > 0.9 and scores[1] < 0.75


def test_bad_settings_say_what_was_expected() -> None:
    with pytest.raises(ValueError, match=r"labeled_share=0\.0; expected a share above 0"):
        small(labeled_share=0.0)
    with pytest.raises(ValueError, match="width=0"):
        small(width=0)
    with pytest.raises(ValueError, match="rates: h2=1"):
        small(rates={"h2": 1.0})
    with pytest.raises(ValueError, match=r"extractor='mlp' reads inputs of a shape that problem"):
        small(extractor="mlp")
    with pytest.raises(ValueError, match="cannot be halved"):
        small(local=LocalSGD(batch=1))
    with pytest.raises(ValueError, match="no client has labels"):
        method = small()
        train(method, simulate(clients_of(labeled=[False] * 4)), 1)


def test_secure_sums_give_the_same_round_and_long_changes_are_clipped() -> None:
    clients = clients_of(labeled=[True, True, True, False, False, False], sizes=[8, 12, 5, 9, 4, 6])
    plain = small(cohort=6, labeled_share=0.5)
    far, near = (replace(plain, secure=True, clip=clip) for clip in (100.0, 1e-2))
    federation = simulate(clients)
    expected = train(plain, simulate(clients), 1, begun(plain))
    after = train(far, federation, 1, begun(far))
    for name in PARTS:
        torch.testing.assert_close(after[name], expected[name], rtol=1e-3, atol=1e-5)
    assert {(row["array"], row["seen_as"]) for row in federation.transcript.rows()} == {("update", "secure sum")}
    short = train(near, simulate(clients), 1, begun(near))
    moved = torch.cat([(short[name] - begun(near)[name]).flatten() for name in PARTS])
    assert 1e-4 < float(moved.norm()) <= PLAIN.lr * 1e-2 * (1 + 1e-4)
    with pytest.raises(ValueError, match="secure sums need a bound"):
        small(secure=True)


@pytest.mark.parametrize("labeled", [None, [True, False, True, False]])
def test_half_precision_halves_the_bytes_and_hardly_moves_a_round(labeled: list[bool] | None) -> None:
    clients, whole = clients_of(labeled=labeled), small(labeled_share=0.5)
    half, state = replace(whole, half=True), begun(whole)
    federations = simulate(clients), simulate(clients)
    wanted, found = (train(method, federations[i], 1, state) for i, method in enumerate((whole, half)))
    full, less = (federation.traffic for federation in federations)
    assert less.up["update"] * 2 == full.up["update"] == 4 * 4 * sum(state[name].numel() for name in PARTS)
    assert all(less.down[name] * 2 == full.down[name] for name in ("h1", "last", "prior"))
    for name in PARTS:
        assert found[name].dtype == torch.float32  # also of what it begins the next round with
        move = float((wanted[name] - state[name]).norm())
        assert 0 < float((found[name] - wanted[name]).norm()) < 0.05 * move
    with pytest.raises(ValueError, match="half=true does not go with noise or secure sums"):
        small(half=True, secure=True, clip=1.0)


def test_a_round_with_a_last_layer_of_low_rank_is_one_gradient_step() -> None:
    clients = clients_of()
    method = small(rank=2)
    state = begun(method)

    def objective(hidden: Tensor, last: Tensor) -> Tensor:
        first, shift, narrow = hidden[:35].view(5, 7), hidden[35:40], hidden[40:].view(2, 5)
        total = torch.zeros(())
        for i in range(4):
            x, y = clients.rows(i)
            assert y is not None
            v = last @ narrow @ (first @ method.h1(state.h1, x[0::2]).mean(0) + shift).relu() + state.bias
            total = total + 0.03 * (v - state.prior).square().sum()
            total = total + F.cross_entropy(method.model(method.lift(v), x[1::2]), y[1::2])
        return total / 4

    gradients = torch.func.grad(objective, (0, 1))(state.hidden, state["last"])
    after = train(method, simulate(clients), 1, state)
    for name, gradient in zip(("hidden", "last"), gradients, strict=True):
        torch.testing.assert_close(after[name], state[name] - 0.5 * gradient, atol=1e-6, rtol=0)
        assert float(gradient.abs().max()) > 1e-3
