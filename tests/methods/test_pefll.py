"""PeFLL: its three exchanges are one gradient step on objective (4.1); what its descriptors may depend on."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.core.helpers import kept, population
from unalike import Each, Federation, simulate
from unalike.core.client import Clients
from unalike.core.draws import Draws
from unalike.core.federation import each
from unalike.core.method import State, train
from unalike.core.model import Model
from unalike.learn.evaluation import evaluate
from unalike.learn.local import LocalSGD
from unalike.learn.server import ServerOptimizer
from unalike.methods.fedavg import FedAvg
from unalike.methods.pefll import PeFLL
from unalike.methods.problem import Problem
from unalike.networks.architectures import build
from unalike.runs.simulate import gather_models

SIZES = [7, 12, 5, 9]


def clients_of(shape: tuple[int, ...], classes: int = 3, sizes: list[int] = SIZES, seed: int = 0) -> Clients:
    random = torch.Generator().manual_seed(seed)
    rows = sum(sizes)
    x = torch.randn(rows, *shape, generator=random)
    y = torch.randint(classes, (rows,), generator=random)
    return Clients.from_sizes(x, y, torch.tensor(sizes))


def problem_of(shape: tuple[int, ...], classes: int = 3, clients: int = 4) -> Problem:
    kind = "image" if len(shape) == 3 else "features"
    model = Model(build("lenet" if kind == "image" else "mlp", shape, classes))
    return Problem(model, shape, classes, clients, kind)


FULL_STEP = LocalSGD(steps=1, batch=None, lr=1.0)


@pytest.mark.parametrize("labels", ["linear", "alone", "ignored"])
@pytest.mark.parametrize("block", [1, 3, 4])
def test_three_exchanges_are_one_joint_gradient_step(labels: str, block: int) -> None:
    clients, problem = clients_of((6,)), problem_of((6,))
    method = PeFLL(
        problem, cohort=4, local=FULL_STEP, server=ServerOptimizer("sgd", lr=0.3), labels=labels, descriptor=5,  # type: ignore[arg-type]
        describe_rows=None, clip=1e9, lambda_h=0.02, lambda_v=0.03, lambda_theta=0.01,
    )  # fmt: skip
    state = method.start(0).replace(shift=torch.full((5,), 0.1), scale=torch.tensor(1.7))

    def objective(eta_h: Tensor, eta_v: Tensor) -> Tensor:
        """(4.1), with the mean over the clients of Algorithm 8, lines 17-18."""
        total = 0.02 * eta_h.square().sum() + 0.03 * eta_v.square().sum()
        for i in range(4):
            x, y = clients.rows(i)
            assert y is not None
            points = method.embedding(eta_v, x) if labels == "ignored" else method.embedding(eta_v, x, y)
            theta = method.hypernet(eta_h, (points.mean(0)[None] - 0.1) * 1.7)[0]
            total = total + (F.cross_entropy(problem.model(theta, x), y) + 0.01 * theta.square().sum()) / 4
        return total

    g_h, g_v = torch.func.grad(objective, (0, 1))(state.hypernet, state.embedding)
    after = train(method, simulate(clients, block=block), 1, state)
    torch.testing.assert_close(after.hypernet, state.hypernet - 0.3 * g_h, atol=1e-6, rtol=0)
    torch.testing.assert_close(after.embedding, state.embedding - 0.3 * g_v, atol=1e-6, rtol=0)
    assert float(g_h.abs().max()) > 1e-3 and float(g_v.abs().max()) > 1e-3


def test_labels_alone_make_a_descriptor_that_is_linear_in_the_label_shares() -> None:
    clients, problem = clients_of((6,)), problem_of((6,))
    method = PeFLL(problem, labels="alone", descriptor=5, newcomer_rows=None)
    state = method.start(0)
    cohort = simulate(clients).everyone()
    v = cohort.ask(method.introduce, embedding=state.embedding)["descriptor"]
    shares = torch.stack([F.one_hot(clients.rows(i)[1], 3).float().mean(0) for i in range(len(clients))])  # type: ignore[arg-type]
    layer = method.embedding.tensors(state.embedding)
    torch.testing.assert_close(v, shares @ layer["label.weight"].T + layer["label.bias"])


def test_planes_are_the_image_with_one_hot_channels() -> None:
    """The embedding of an image and its label is LeNet on the image with C more channels (T1 Table B.2)."""
    method = PeFLL(problem_of((1, 16, 16)), descriptor=4)
    eta = method.embedding.init(0)
    x, y = torch.randn(5, 1, 16, 16), torch.tensor([0, 2, 1, 1, 0])
    planes = F.one_hot(y, 3)[:, :, None, None].expand(-1, -1, 16, 16).to(torch.float32)
    lenet = Model(build("lenet", (4, 16, 16), 4))
    torch.testing.assert_close(method.embedding(eta, x, y), lenet(eta, torch.cat([x, planes], 1)), atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("shape", [(6,), (1, 16, 16)])
def test_descriptor_does_not_depend_on_order_or_block(shape: tuple[int, ...]) -> None:
    clients = clients_of(shape)
    method = PeFLL(problem_of(shape), descriptor=4, newcomer_rows=None)
    state = method.start(3).replace(scale=torch.ones(()))
    order = torch.cat([torch.randperm(n) + start for n, start in zip(SIZES, clients.start.tolist(), strict=True)])
    assert clients.y is not None
    shuffled = replace(clients, x=clients.x[order], y=clients.y[order])
    first = method.personalize(state, simulate(clients, block=4).everyone())
    second = method.personalize(state, simulate(shuffled, block=1).everyone())
    torch.testing.assert_close(first, second, atol=1e-6, rtol=1e-5)
    assert float((first[0] - first[1]).abs().max()) > 1e-6  # different clients differ


def test_backpropagation_uses_the_batch_that_was_described() -> None:
    """With a batch of 3 rows, describing and backpropagating differentiate the same descriptor, client by client."""
    clients = clients_of((6,))
    method = PeFLL(problem_of((6,)), descriptor=4, describe_rows=3)
    eta = method.embedding.init(0)
    federation = simulate(clients, block=4, round=1)
    cohort = federation.everyone()
    sent = cohort.ask(method.describe, embedding=eta)["descriptor"]
    cotangent = torch.randn_like(sent)
    sent_back = cohort.ask(method.backpropagate, embedding=eta, cotangent=each(cotangent), into=Each("gradient"))
    gradient = sent_back["gradient"]
    batches = kept(federation).read(clients.ids).values["batch"]
    for i, n in enumerate(SIZES):
        x, y = clients.rows(i)
        assert y is not None
        rows = Draws(batches[i]).permutation(n, n)[:3]
        v, back = torch.func.vjp(lambda e, x=x[rows], y=y[rows]: method.embedding(e, x, y).mean(0), eta)[:2]
        torch.testing.assert_close(sent[i], v)
        torch.testing.assert_close(gradient[i], back(cotangent[i])[0])


def test_normaliser_is_computed_once_and_stays() -> None:
    method = PeFLL(problem_of((6,)), cohort=2, local=FULL_STEP, descriptor=3)
    federation = simulate(clients_of((6,)))
    first = train(method, federation, 1)
    later = train(method, federation, 2, first)
    assert float(first.scale) > 0 and torch.equal(first.scale, later.scale) and torch.equal(first.shift, later.shift)
    described = simulate(clients_of((6,))).everyone().ask(method.describe, embedding=method.start(0).embedding)
    normal = (described["descriptor"] - first.shift) * first.scale
    assert 0.2 < float(normal.std()) < 5


def test_masked_classes_are_never_predicted_and_get_no_gradient() -> None:
    sizes = [8, 8]
    clients = clients_of((6,), classes=4, sizes=sizes)
    y = torch.tensor([0, 1] * 4 + [2, 3] * 4)
    clients = replace(clients, y=y)
    method = PeFLL(
        problem_of((6,), classes=4), cohort=2, local=LocalSGD(steps=5, lr=0.5), mask_labels=True, descriptor=3
    )
    state = train(method, simulate(clients), 1)
    cohort = simulate(clients).everyone()
    theta = gather_models(cohort, method.personalize(state, cohort))
    for client, own in enumerate(([0, 1], [2, 3])):
        scores = method.model(theta[client], torch.randn(200, 6))
        assert set(scores.argmax(1).tolist()) <= set(own)
    # the bias of an absent class gets no gradient from its client, so Δθ is 0 there (weight decay is off)
    replies = simulate(clients).everyone().ask(method.fit, theta=torch.randn(method.model.size))
    bias = replies["update"][:, method.model.span("layers.1.bias")]
    assert bool((bias[0, 2:] == 0).all()) and bool((bias[1, :2] == 0).all()) and bool((bias[0, :2] != 0).all())


def test_unlabeled_clients_are_served_only_without_labels_in_the_embedding() -> None:
    clients, problem = clients_of((6,)), problem_of((6,))
    free = PeFLL(problem, labels="ignored", descriptor=3)
    assert free.serves_unlabeled and not PeFLL(problem, descriptor=3).serves_unlabeled
    theta = free.personalize(free.start(0), simulate(clients.without_labels()).everyone())
    assert theta.shape == (4, problem.model.size)


@pytest.mark.parametrize("ask", ["describe", "fit"])
def test_a_client_that_drops_out_between_the_exchanges_is_left_out(ask: str) -> None:
    """Who does not describe itself, or does so but does not fit, changes nothing: the round equals one without it."""
    clients, problem = clients_of((6,)), problem_of((6,))
    method = PeFLL(
        problem, cohort=4, local=FULL_STEP, server=ServerOptimizer("sgd", lr=0.3), descriptor=3, describe_rows=None
    )
    state = method.start(0).replace(scale=torch.ones(()))
    asks = iter(["describe", "fit", "backpropagate"])  # of client 2, one after the other
    bad = simulate(clients, block=4, drop=lambda client, _: client == 2 and next(asks) == ask)
    good = simulate(clients.select([0, 1, 3]), block=3)
    expected = train(replace(method, cohort=3), good, 1, state)
    came = train(method, bad, 1, state)
    assert [failure.task for failure in bad.failures] == [f"PeFLL.{ask}"]
    torch.testing.assert_close(came.hypernet, expected.hypernet, atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(came.embedding, expected.embedding, atol=1e-6, rtol=1e-5)


def test_clip_bounds_the_whole_gradient() -> None:
    clients, problem = clients_of((6,)), problem_of((6,))
    method = PeFLL(
        problem, cohort=4, local=FULL_STEP, server=ServerOptimizer("sgd", lr=1.0), descriptor=3, clip=1e-3,
        lambda_h=0, lambda_v=0,
    )  # fmt: skip
    state = method.start(0).replace(scale=torch.ones(()))
    after = train(method, simulate(clients), 1, state)
    moved = sum(float((after[name] - state[name]).square().sum()) for name in ("hypernet", "embedding"))
    assert moved**0.5 == pytest.approx(1e-3, rel=0.05)  # float32 rounding of η limits how exactly


def test_traffic_is_what_the_thesis_counts() -> None:
    """2c(|θ| + |η_v| + |v|) numbers a round (T1 B.1.3), and a digest of η_v for the clients that have had it."""
    problem = problem_of((6,))
    method = PeFLL(problem, cohort=3, local=FULL_STEP, descriptor=5)
    federation = simulate(clients_of((6,)))
    train(method, federation, 1, method.start(0).replace(scale=torch.ones(())))
    theta, eta, v = problem.model.size, method.embedding.size, 5
    up, down = federation.traffic.up, federation.traffic.down
    assert (up["update"], up["gradient"], up["descriptor"]) == (3 * 4 * theta, 3 * 4 * eta, 3 * 4 * v)
    assert (down["theta"], down["embedding"], down["cotangent"]) == (3 * 4 * theta, 3 * 4 * eta + 3 * 32, 3 * 4 * v)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lambda_h": -1.0}, "lambda_h"),
        ({"clip": 0.0}, "clip"),
        ({"describe_rows": 0}, "describe_rows"),
        ({"size": "XL"}, "S, M or L"),
        ({"labels": "planes"}, "labels='linear'"),
    ],
)
def test_nonsense_is_refused_with_advice(options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        method = PeFLL(problem_of((6,)), **options)
        method.start(0)


def test_state_survives_a_checkpoint_and_goes_on_the_same() -> None:
    method = PeFLL(problem_of((6,)), cohort=2, local=FULL_STEP, descriptor=3)
    whole = train(method, simulate(clients_of((6,)), seed=5), 4)
    federation = simulate(clients_of((6,)), seed=5)
    half = train(method, federation, 2)
    restored = State({name: value.clone() for name, value in half.items()})
    resumed = train(method, Federation(federation.runtime, 5, round=2), 2, restored)
    assert all(torch.equal(whole[name], resumed[name]) for name in whole)


def test_personal_models_beat_one_model_where_clients_contradict_each_other() -> None:
    """Half of the clients swap the two classes: no single model can be right for all, a descriptor tells them apart."""
    random = torch.Generator().manual_seed(1)
    count, rows = 40, 20
    x = torch.randn(count * rows, 4, generator=random)
    flip = torch.arange(count) % 2 == 1
    y = ((x[:, 0] > 0) ^ flip.repeat_interleave(rows)).to(torch.int64)
    everyone = Clients.from_sizes(x, y, torch.full((count,), rows))
    problem = problem_of((4,), classes=2, clients=30)
    local = LocalSGD(steps=10, batch=10, lr=0.1, momentum=0.9)
    personal = PeFLL(problem, cohort=10, local=local, server=ServerOptimizer("adam", lr=2e-3), descriptor=8)
    one = FedAvg(problem.model, cohort=10, local=local)
    scores = {}
    for method in (personal, one):
        federation = simulate(population(everyone, everyone, seen=30))
        state = train(method, federation, 30)
        unseen = federation.runtime.roster.select(range(30, 40))
        scores[type(method)] = evaluate(
            method.model, lambda cohort, m=method, s=state: m.personalize(s, cohort), federation, unseen
        ).mean
    assert scores[PeFLL] > 0.9 and scores[FedAvg] < 0.65


def test_models_start_near_one_usual_initial_model_and_apart_from_each_other() -> None:
    clients = clients_of((6,))
    method = PeFLL(problem_of((6,)), cohort=4, local=LocalSGD(steps=0), descriptor=8)
    state = train(method, simulate(clients, seed=3), 1)  # calibrates; no step at the clients, so no gradient
    theta = method.personalize(state, simulate(clients).everyone())
    usual = method.model.init(3)
    assert float((theta - usual).std()) < 0.5 * float(usual.std())
    assert float(torch.pdist(theta).min()) > 1e-3 * float(usual.norm())


def test_newcomers_are_served_by_the_mean_of_the_last_rounds() -> None:
    clients, problem = clients_of((6,)), problem_of((6,))
    method = PeFLL(problem, cohort=2, local=LocalSGD(steps=2, batch=4, lr=0.1), descriptor=3, steady=4)
    seen: list[Tensor] = []
    federation = simulate(clients, seed=1)
    state = train(method, federation, 3, after_round=lambda _, state: seen.append(state.hypernet))
    torch.testing.assert_close(state["steady.hypernet"], torch.stack(seen).mean(0))  # so far there are fewer than four
    before = state["steady.hypernet"]
    state = train(method, federation, 2, state, after_round=lambda _, state: seen.append(state.hypernet))
    expected = 0.75 * (0.75 * before + 0.25 * seen[3]) + 0.25 * seen[4]
    torch.testing.assert_close(state["steady.hypernet"], expected)
    last = replace(method, steady=1)
    alone = train(last, simulate(clients, seed=1), 5)
    assert torch.equal(alone["steady.embedding"], alone.embedding) and torch.equal(alone.embedding, state.embedding)


def test_a_training_descriptor_takes_at_most_half_of_a_client() -> None:
    clients, problem = clients_of((6,), sizes=[9, 9]), problem_of((6,), clients=2)
    method = PeFLL(problem, cohort=2, descriptor=3, describe_rows=32)
    state, federation = method.start(0), simulate(clients)
    asked = federation.everyone().ask(method.describe, embedding=state.embedding)["descriptor"]
    x, y = clients.rows(0)
    points = method.embedding(state.embedding, x, y)
    fives = torch.combinations(torch.arange(9), 5)
    assert float((points[fives].mean(1) - asked[0]).norm(dim=1).min()) < 1e-5
    whole = method.descriptors(state, federation.everyone())
    torch.testing.assert_close(whole[0], points.mean(0))


@pytest.mark.parametrize("rows", [None, 5])
def test_on_the_sphere_one_row_moves_a_descriptor_by_its_sensitivity_at_most(rows: int | None) -> None:
    """L2: 2/n for n rows that are described. L1, which Laplace noise is made for: up to 2√l/n, and more than 2/n."""
    n, length = 10, 6
    problem = problem_of((6,))
    gaussian = PeFLL(problem, sphere=True, descriptor=length, newcomer_rows=rows, newcomer_epsilon=1.0)
    laplace = replace(gaussian, newcomer_noise="laplace")
    described = rows or n
    assert gaussian.sensitivity(n) == pytest.approx(2 / described)
    assert laplace.sensitivity(n) == pytest.approx(2 * length**0.5 / described)
    plain = gaussian.with_protection(None, 0.01)
    far = {1: 0.0, 2: 0.0}
    for seed in range(40):
        x = torch.randn(n, 6, generator=torch.Generator().manual_seed(seed))
        other = x.clone()
        other[3] = -50 * x[3] + 100
        y = torch.arange(n) % 3
        changed = y.clone()
        changed[3] = (y[3] + 1) % 3
        state = plain.start(seed)
        pair = [Clients.from_sizes(a, b, torch.tensor([n])) for a, b in ((x, y), (other, changed))]
        first, second = (plain.descriptors(state, simulate(one).everyone())[0] for one in pair)
        far = {p: max(most, float((first - second).norm(p=p))) for p, most in far.items()}
    assert 0.3 * 2 / described < far[2] <= 2 / described * (1 + 1e-5)
    assert 2 / described < far[1] <= 2 * length**0.5 / described, "noise for the L2 distance would be too little here"


@pytest.mark.parametrize("noise", ["gaussian", "laplace"])
def test_a_private_newcomers_noise_is_that_of_its_mechanism(noise: str) -> None:
    n, copies, length = 8, 400, 6
    x = torch.randn(n, 6, generator=torch.Generator().manual_seed(0)).repeat(copies, 1)
    y = (torch.arange(n) % 3).repeat(copies)
    method = PeFLL(problem_of((6,)), sphere=True, descriptor=length, newcomer_epsilon=0.7, newcomer_noise=noise)  # type: ignore[arg-type]
    state = method.start(0)
    home = simulate(Clients.from_sizes(x, y, torch.full((copies,), n)))
    noisy = method.descriptors(state, home.everyone())
    exact = method.embedding(state.embedding, x[:n], y[:n])
    exact = (exact / exact.norm(dim=1, keepdim=True)).mean(0)
    sigma = {"gaussian": 2 / n * 5.0, "laplace": 2**0.5 * 2 * length**0.5 / n / 0.7}[noise]
    if noise == "gaussian":  # the analytic calibration, from its own condition: δ(ε) of noise σ·Δ is 0.01
        z = (noisy - exact).std() / (2 / n)
        normal = torch.distributions.Normal(0.0, 1.0)
        a, b = 1 / (2 * z) - 0.7 * z, -1 / (2 * z) - 0.7 * z
        spent = float(normal.cdf(a) - torch.exp(torch.tensor(0.7)) * normal.cdf(b))
        assert spent == pytest.approx(0.01, rel=0.35)
    else:
        assert float((noisy - exact).std()) == pytest.approx(sigma, rel=0.1)
    assert (
        home.ledger.worst(0.01) == pytest.approx(0.7, rel=1e-2)
        if noise == "gaussian"
        else 0 < home.ledger.worst(0.01) <= 0.7
    )


def test_a_private_descriptor_needs_the_sphere() -> None:
    with pytest.raises(ValueError, match="needs sphere=true"):
        PeFLL(problem_of((6,)), newcomer_epsilon=1.0)
    assert PeFLL(problem_of((6,))).sensitivity(5) is None


def test_an_embedding_of_chosen_width_is_one_hidden_layer() -> None:
    """The MLP of T1 Table B.7, on an image whose label enters by a linear map of length 16."""
    method = PeFLL(problem_of((1, 16, 16)), descriptor=4, embedding_width=7)
    eta = method.embedding.init(0)
    t = method.embedding.tensors(eta)
    x, y = torch.randn(5, 1, 16, 16), torch.tensor([0, 2, 1, 1, 0])
    first, second = (name.removesuffix(".weight") for name in t if name.startswith("network") and "weight" in name)
    inputs = torch.cat([x.flatten(1), F.one_hot(y, 3).float() @ t["label.weight"].T], 1)
    hidden = (inputs @ t[f"{first}.weight"].T + t[f"{first}.bias"]).relu()
    assert hidden.shape == (5, 7)
    wanted = hidden @ t[f"{second}.weight"].T + t[f"{second}.bias"]
    torch.testing.assert_close(method.embedding(eta, x, y), wanted, atol=1e-6, rtol=1e-5)
    with pytest.raises(ValueError, match=r"embedding_width=7 .*labels='planes'"):
        PeFLL(problem_of((1, 16, 16)), embedding_width=7, labels="planes")


def test_the_gradients_of_the_embedding_can_be_summed_under_masks() -> None:
    clients = clients_of((6,))
    plain = PeFLL(problem_of((6,)), cohort=4, local=FULL_STEP, descriptor=4, describe_rows=None, lambda_v=0.0)
    masked = replace(plain, secure=True, gradient_clip=50.0)
    federation = simulate(clients)
    after, wanted = train(masked, federation, 1), train(plain, simulate(clients), 1)
    torch.testing.assert_close(after.hypernet, wanted.hypernet)
    for name, moment in wanted.part("server").items():
        torch.testing.assert_close(after.part("server")[name], moment, atol=1e-5, rtol=1e-3)
    seen = {row["array"]: row["seen_as"] for row in federation.transcript.rows()}
    assert seen == {"descriptor": "individual", "update": "individual", "loss": "mean", "gradient": "secure mean"}
    with pytest.raises(ValueError, match="secure sums need a bound; set gradient_clip"):
        PeFLL(problem_of((6,)), secure=True)


def test_a_gradient_of_the_embedding_is_clipped() -> None:
    """Plain steps at a rate of 1 without decay: the embedding moves by the mean of four vectors of length 1e-3."""
    clients, server = clients_of((6,)), ServerOptimizer("sgd", lr=1.0)
    method = PeFLL(
        problem_of((6,)), cohort=4, local=FULL_STEP, server=server, descriptor=4, lambda_v=0.0, gradient_clip=1e-3
    )
    start = method.start(0).replace(scale=torch.ones(()))
    moved = float((train(method, simulate(clients), 1, start).embedding - start.embedding).norm())
    free = train(replace(method, gradient_clip=None), simulate(clients), 1, start)
    assert 1e-5 < moved <= 1e-3 * (1 + 1e-4) < float((free.embedding - start.embedding).norm())


def test_the_server_remembers_descriptors_as_long_as_it_may_and_says_so() -> None:
    clients = clients_of((6,))
    method = PeFLL(problem_of((6,)), cohort=4, local=FULL_STEP, descriptor=4, sphere=True, describe_rows=None)
    for changes, remembered in (({}, 4), ({"remember": False}, 0), ({"newcomer_epsilon": 1.0}, 0)):
        one, federation = replace(method, **changes), simulate(clients)  # type: ignore[arg-type]
        state = train(one, federation, 1)
        assert state["remembered.v"].shape == (remembered, 4)
        assert sorted(state["remembered.ids"].tolist()) == list(range(remembered))
        notes = [row["note"] for row in federation.transcript.rows() if row["array"] == "descriptor"]
        assert notes == ["kept by the server with the client's id, to tell how far newcomers are from those who trained"
                         if remembered else None]  # fmt: skip
        distance = one.nearest(state, {"descriptor": torch.zeros(1, 4)})
        assert (distance is not None) == bool(remembered)


def test_a_newcomer_is_described_and_served_by_the_same_averaged_networks() -> None:
    """The latest networks, the averaged ones and their mixtures give four models; only one is right."""
    clients = clients_of((6,), sizes=[6])
    method = PeFLL(problem_of((6,)), descriptor=4, newcomer_rows=None)
    state = method.start(0).replace(shift=torch.full((4,), 0.2), scale=torch.tensor(1.3))
    state = state.replace(**{"steady.embedding": method.embedding.init(7), "steady.hypernet": method.hypernet.init(8)})
    x, y = clients.rows(0)
    given = method.personalize(state, simulate(clients).everyone())
    for embedding in (state.embedding, state["steady.embedding"]):
        for hypernet in (state.hypernet, state["steady.hypernet"]):
            v = (method.embedding(embedding, x, y).mean(0) - 0.2) * 1.3
            same = torch.allclose(given[0], method.hypernet(hypernet, v[None])[0], atol=1e-5)
            assert same == (embedding is state["steady.embedding"] and hypernet is state["steady.hypernet"])


def test_the_embedding_is_sent_once_a_round() -> None:
    """The second ask names it, in fewer bytes than a tenth of the array; every round sends it anew, as it has moved."""
    clients = clients_of((6,))
    method = PeFLL(problem_of((6,)), cohort=4, local=FULL_STEP, descriptor=4, calibration=1)
    federation = simulate(clients)
    state, before, once = train(method, federation, 1), 0, 4 * 4 * method.embedding.size
    for _ in range(2):
        before = federation.traffic.down["embedding"]
        state = train(method, federation, 1, state)
        assert once <= federation.traffic.down["embedding"] - before < 1.1 * once
