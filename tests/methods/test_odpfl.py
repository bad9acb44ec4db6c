"""ODPFL-HN: set encoders know no order, three exchanges are one gradient step, and a newcomer's ε is what it paid."""

from __future__ import annotations

from dataclasses import replace
from typing import get_args

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.methods.test_pefll import FULL_STEP, SIZES, clients_of, problem_of
from unalike import Federation, simulate
from unalike.core.method import train
from unalike.core.request import Program
from unalike.learn.local import LocalSGD
from unalike.learn.server import ServerOptimizer
from unalike.methods.odpfl import ODPFL
from unalike.networks.sets import Encoder, set_encoder
from unalike.runtime.shard.shard import Shard
from unalike.runtime.simulate import Simulation

ENCODERS = [encoder for encoder in get_args(Encoder) if encoder != "deepset-every"]  # which reads images alone
BOTH = [(encoder, shape) for encoder in ENCODERS for shape in [(6,), (1, 16, 16)]]


@pytest.mark.parametrize(("encoder", "shape"), [*BOTH, ("deepset-every", (1, 16, 16))])
def test_an_encoder_ignores_order_and_padding_but_not_content(encoder: Encoder, shape: tuple[int, ...]) -> None:
    g = set_encoder(encoder, shape, 5)
    gamma = g.init(0)
    x = torch.randn(9, *shape, generator=torch.Generator().manual_seed(0))
    own = torch.ones(9, dtype=torch.bool)
    expected = g(gamma, x, own)
    torch.testing.assert_close(g(gamma, x[torch.randperm(9)], own), expected, atol=1e-5, rtol=1e-4)
    padded = torch.cat([x, 100 * torch.randn(4, *shape)])
    torch.testing.assert_close(g(gamma, padded, torch.arange(13) < 9), expected, atol=1e-5, rtol=1e-4)
    changed = x.clone()
    changed[0] += 3
    assert float((g(gamma, changed, own) - expected).abs().max()) > 1e-5


@pytest.mark.parametrize("encoder", ["dss", "set-transformer"])
def test_these_encoders_let_samples_look_at_each_other(encoder: Encoder) -> None:
    """A mean of independent points would be additive; these must not be."""
    g = set_encoder(encoder, (6,), 5)
    gamma = g.init(0)
    a, b = torch.randn(4, 6), torch.randn(4, 6)
    both = g(gamma, torch.cat([a, b]), torch.ones(8, dtype=torch.bool))
    own = torch.ones(4, dtype=torch.bool)
    assert float((both - (g(gamma, a, own) + g(gamma, b, own)) / 2).abs().max()) > 1e-4


def test_replacing_one_sample_moves_a_sphere_descriptor_by_at_most_two_over_n() -> None:
    g = set_encoder("sphere", (6,), 5)
    own = torch.ones(10, dtype=torch.bool)
    largest = 0.0
    for seed in range(50):
        gamma = g.init(seed)
        x = torch.randn(10, 6, generator=torch.Generator().manual_seed(seed))
        other = x.clone()
        other[3] = -50 * x[3] + 100
        largest = max(largest, float((g(gamma, x, own) - g(gamma, other, own)).norm()))
    assert 0.01 < largest <= 2 / 10 + 1e-6


@pytest.mark.parametrize("encoder", ENCODERS)
def test_three_exchanges_are_one_joint_gradient_step(encoder: Encoder) -> None:
    clients, problem = clients_of((6,)), problem_of((6,))
    method = ODPFL(
        problem, cohort=4, local=FULL_STEP, server=ServerOptimizer("sgd", lr=0.3), encoder=encoder, descriptor=5,
        clip=1e9, lambda_h=0.02, lambda_g=0.03,
    )  # fmt: skip
    state = method.start(0).replace(shift=torch.full((5,), 0.1), scale=torch.tensor(1.7))

    def objective(eta: Tensor, gamma: Tensor) -> Tensor:
        total = 0.02 * eta.square().sum() + 0.03 * gamma.square().sum()
        for i in range(4):
            x, y = clients.rows(i)
            assert y is not None
            v = method.network(gamma, x, torch.ones(len(x), dtype=torch.bool))
            theta = method.hypernet(eta, (v[None] - 0.1) * 1.7)[0]
            total = total + F.cross_entropy(problem.model(theta, x), y) / 4
        return total

    g_h, g_g = torch.func.grad(objective, (0, 1))(state.hypernet, state.encoder)
    after = train(method, simulate(clients, block=3), 1, state)
    torch.testing.assert_close(after.hypernet, state.hypernet - 0.3 * g_h, atol=1e-6, rtol=0)
    torch.testing.assert_close(after.encoder, state.encoder - 0.3 * g_g, atol=1e-6, rtol=0)
    assert float(g_g.abs().max()) > 1e-5


@pytest.mark.parametrize("block", [1, 4])
def test_a_mean_over_parts_of_a_mean_pooled_encoder_is_the_whole(block: int) -> None:
    """The parts count by their rows, so for an encoder that is a mean nothing changes, padding or not."""
    clients, problem = clients_of((6,)), problem_of((6,))
    whole = ODPFL(problem, encoder="sphere", descriptor=5)
    parts = ODPFL(problem, encoder="sphere", descriptor=5, rows=4)
    state = whole.start(0)
    federation = simulate(clients, block=block)
    expected = whole.descriptors(state, federation.everyone())
    torch.testing.assert_close(parts.descriptors(state, federation.everyone()), expected, atol=1e-6, rtol=1e-5)


def test_two_phases_train_table_and_encoder_then_the_hypernetwork_alone() -> None:
    clients = clients_of((6,))
    method = ODPFL(problem_of((6,)), cohort=4, local=FULL_STEP, descriptor=3, two_phase=2)
    start = method.start(0)
    federation = simulate(clients)
    first = train(method, federation, 2, start)
    assert not torch.equal(first.encoder, start.encoder) and not torch.equal(first.descriptors, start.descriptors)
    assert "encoder_gap" in federation.metrics
    second = train(method, federation, 1, first)
    assert torch.equal(second.encoder, first.encoder) and torch.equal(second.descriptors, first.descriptors)
    assert not torch.equal(second.hypernet, first.hypernet)


def test_the_first_phase_is_one_gradient_step_of_the_loss_and_of_the_encoders_gap() -> None:
    """App. B.2: h and the v_i descend the mean loss, the encoder descends the mean of ‖g(x_i) − v_i‖²."""
    clients, problem = clients_of((6,)), problem_of((6,))
    method = ODPFL(
        problem, cohort=4, local=FULL_STEP, server=ServerOptimizer("sgd", lr=0.3), descriptor=5, two_phase=1,
        descriptor_lr=0.7, clip=1e9, lambda_h=0.02, lambda_g=0.03,
    )  # fmt: skip
    state = method.start(0)

    def loss(eta: Tensor, v: Tensor) -> Tensor:
        total = 0.02 * eta.square().sum()
        for i in range(4):
            x, y = clients.rows(i)
            assert y is not None
            total = total + F.cross_entropy(problem.model(method.hypernet(eta, v[i : i + 1])[0], x), y) / 4
        return total

    def gap(gamma: Tensor) -> Tensor:
        total = 0.03 * gamma.square().sum()
        for i in range(4):
            x = clients.rows(i)[0]
            came = method.network(gamma, x, torch.ones(len(x), dtype=torch.bool))
            total = total + (came - state.descriptors[i]).square().sum() / 4
        return total

    g_h, g_v = torch.func.grad(loss, (0, 1))(state.hypernet, state.descriptors)
    after = train(method, simulate(clients, block=3), 1, state)
    torch.testing.assert_close(after.hypernet, state.hypernet - 0.3 * g_h, atol=1e-6, rtol=0)
    torch.testing.assert_close(after.descriptors, state.descriptors - 0.7 * g_v, atol=1e-6, rtol=0)
    g_g = torch.func.grad(gap)(state.encoder)
    torch.testing.assert_close(after.encoder, state.encoder - 0.3 * g_g, atol=1e-5, rtol=1e-5)


def test_the_first_phase_sums_clipped_gradients_of_the_encoder_under_masks() -> None:
    settings = {"cohort": 4, "local": FULL_STEP, "descriptor": 3, "two_phase": 2, "lambda_g": 0.0, "clip": 1e9}
    sgd = ServerOptimizer("sgd", lr=1.0)
    plain = ODPFL(problem_of((6,)), server=sgd, **settings)  # type: ignore[arg-type]
    start = plain.start(0)

    def step(method: ODPFL) -> tuple[Tensor, dict[str, str], bool]:
        federation = simulate(clients_of((6,)))
        after = train(method, federation, 1, start)
        seen = {row["array"]: row["seen_as"] for row in federation.transcript.rows()}
        return after.encoder - start.encoder, seen, "encoder_gap" in federation.metrics

    wanted, seen, reported = step(plain)
    assert seen["gradient"] == seen["gap"] == "mean" and reported
    masked, seen, reported = step(replace(plain, secure=True, gradient_clip=1000.0))
    torch.testing.assert_close(masked, wanted, atol=1e-4, rtol=1e-3)
    assert seen == {"update": "individual", "loss": "mean", "gradient": "secure mean"} and not reported
    for secure in (False, True):
        clipped = step(replace(plain, secure=secure, gradient_clip=1e-3))[0]
        assert 1e-5 < float(clipped.norm()) <= 1.001e-3 < 0.1 * float(wanted.norm())


def test_absent_clients_descriptors_rest_in_the_first_phase() -> None:
    method = ODPFL(problem_of((6,)), cohort=1, local=FULL_STEP, descriptor=3, two_phase=9)
    federation = simulate(clients_of((6,)))
    state = train(method, federation, 1, method.start(0))
    for _ in range(4):
        after = train(method, federation, 1, state)
        moved = (after.descriptors != state.descriptors).any(1)
        assert int(moved.sum()) == 1  # one client a round, whatever Adam remembers of the others
        state = after


def test_the_encoder_learns_the_table_in_the_first_phase() -> None:
    method = ODPFL(
        problem_of((6,)), cohort=4, local=LocalSGD(steps=0), server=ServerOptimizer("adam", lr=3e-3), descriptor=3,
        descriptor_lr=1e-9, two_phase=60,
    )  # fmt: skip
    federation = simulate(clients_of((6,)))
    gaps = []
    train(method, federation, 60, after_round=lambda n, s: gaps.append(federation.metrics["encoder_gap"]))
    assert gaps[-1] < 0.05 * gaps[0]


def test_a_private_newcomer_pays_what_it_declared_and_the_noise_has_that_size() -> None:
    sizes = [40] * 200 + [80] * 200
    clients = clients_of((6,), sizes=sizes)
    problem = problem_of((6,))
    private = ODPFL(problem, encoder="sphere", descriptor=4, newcomer_epsilon=1.0, newcomer_delta=1e-3)
    open_ = ODPFL(problem, encoder="sphere", descriptor=4)
    state = private.start(0)
    federation = simulate(clients)
    noisy = private.descriptors(state, federation.everyone())
    exact = open_.descriptors(state, simulate(clients).everyone())
    assert federation.ledger.epsilon(1e-3, client=0) == pytest.approx(1.0, rel=1e-3)
    assert federation.ledger.unit == "point"
    assert private.protection is not None
    for rows, n in ((slice(0, 200), 40), (slice(200, 400), 80)):
        assert float((noisy - exact)[rows].std()) == pytest.approx(private.protection.std(2 / n), rel=0.1)


def test_the_noise_is_made_for_the_rows_that_a_newcomer_has_not_for_those_that_it_declares() -> None:
    clients = clients_of((6,), sizes=[5] * 300)
    roster, program = replace(clients.roster(), bound=torch.full((300,), 40)), Program(open=True)
    elsewhere = Federation(Simulation([Shard({"train": clients}, roster, program)], program))
    private = ODPFL(problem_of((6,)), encoder="sphere", descriptor=4, newcomer_epsilon=1.0, newcomer_delta=1e-3)
    state = private.start(0)
    exact = replace(private, newcomer_epsilon=None).descriptors(state, simulate(clients).everyone())
    noise = private.descriptors(state, elsewhere.everyone()) - exact
    assert private.protection is not None
    assert float(noise.std()) == pytest.approx(private.protection.std(2 / 5), rel=0.1)


def test_the_sensitivity_that_is_told_is_that_of_so_many_rows() -> None:
    method = ODPFL(problem_of((6,)), encoder="sphere", descriptor=4)
    assert [method.sensitivity(n) for n in (1, 7, 40)] == pytest.approx([2, 2 / 7, 2 / 40])
    assert replace(method, newcomer_noise="laplace").sensitivity(7) == pytest.approx(2 * 2 / 7)  # √4 times as long
    assert replace(method, encoder="deepset").sensitivity(7) is None
    assert replace(method, rows=3).sensitivity(7) is None


def test_without_noise_a_newcomers_epsilon_is_infinite() -> None:
    method = ODPFL(problem_of((6,)), encoder="sphere", descriptor=4)
    federation = simulate(clients_of((6,)))
    method.personalize(method.start(0).replace(scale=torch.ones(())), federation.everyone())
    assert federation.ledger.epsilon(1e-3) == float("inf")


def test_unlabeled_newcomers_are_served() -> None:
    method = ODPFL(problem_of((6,)), descriptor=3)
    theta = method.personalize(method.start(0), simulate(clients_of((6,)).without_labels()).everyone())
    assert theta.shape == (4, method.model.size) and method.serves_unlabeled


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"newcomer_epsilon": 1.0}, "encoder='sphere'"),
        ({"newcomer_epsilon": 1.0, "encoder": "sphere", "rows": 8}, "all rows at once"),
        ({"newcomer_epsilon": -1.0, "encoder": "sphere"}, "epsilon"),
        ({"encoder": "rnn"}, "expected one of deepset"),
        ({"rows": 0}, "rows=0"),
    ],
)
def test_nonsense_is_refused_with_advice(options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ODPFL(problem_of((6,)), **options)


def test_rows_of_a_client_may_repeat_its_parts_in_any_block() -> None:
    """Encoding in parts draws the same parts in every block."""
    clients, problem = clients_of((6,), sizes=[*SIZES, 30]), problem_of((6,))
    method = ODPFL(problem, encoder="dss", descriptor=5, rows=4)
    state = method.start(0)
    results = [method.descriptors(state, simulate(clients, block=block).everyone()) for block in (1, 5)]
    torch.testing.assert_close(results[0], results[1], atol=1e-6, rtol=1e-5)


def test_the_federation_keeps_the_hypernetwork_of_the_first_phase() -> None:
    """App. B.2: those who trained get h₁(e_i) of the first phase's end; newcomers get h₂(g(x)), fine-tuned for them."""
    clients = clients_of((6,), sizes=[8] * 5)
    method = ODPFL(problem_of((6,)), cohort=4, local=FULL_STEP, descriptor=3, two_phase=3)
    everybody = simulate(clients, block=5)
    training = type(everybody)(everybody.runtime, 0, everybody.roster.select(range(4)))
    first = train(method, training, 3)
    last = train(method, training, 6, first)
    assert float((last.hypernet - first.hypernet).abs().max()) > 1e-4, "the second phase moves h"
    with training.aside(everybody.roster) as own:
        theta = method.personalize(last, own.everyone())
    old = method.hypernet(first.hypernet, first.descriptors)
    torch.testing.assert_close(theta[:4], old)
    x = clients.rows(4)[0]
    v = method.network(last.encoder, x, torch.ones(len(x), dtype=torch.bool))
    torch.testing.assert_close(theta[4], method.hypernet(last.hypernet, v[None])[0], atol=1e-6, rtol=1e-5)


def test_the_distance_to_the_nearest_training_client() -> None:
    clients = clients_of((6,), sizes=[8] * 4)
    method = ODPFL(problem_of((6,)), cohort=4, local=FULL_STEP, descriptor=3)
    state = train(method, simulate(clients), 1)
    described = method.descriptors(method.start(0), simulate(clients).everyone())  # those of the only round
    new = described[1] + torch.tensor([0.0, 0.0, 0.25]) / state.scale
    far, among = method.nearest(state, {"descriptor": new[None]}) or (torch.zeros(0), torch.zeros(0))
    pairs = [[float((a - b).norm() * state.scale) for b in described] for a in described]
    wanted = [min(far for j, far in enumerate(row) if j != i) for i, row in enumerate(pairs)]
    torch.testing.assert_close(among.sort().values, torch.tensor(wanted).sort().values, atol=1e-4, rtol=1e-3)
    nearest = min(float((new - one).norm()) for one in described) * float(state.scale)
    assert float(far) == pytest.approx(nearest, rel=1e-3, abs=1e-4)
    assert method.nearest(method.start(0), {"descriptor": new[None]}) is None
