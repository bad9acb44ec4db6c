"""DP-SGD at the clients: against a plain reference, in blocks, its batches, its noise, and what it is charged with."""

from __future__ import annotations

import math
from dataclasses import replace

import dp_accounting as dp
import pytest
import torch
from scipy.stats import binom
from torch.func import grad

from tests.core.helpers import clients, linear
from unalike import Clients, Model, simulate
from unalike.core.draws import Draws, key
from unalike.core.federation import each
from unalike.core.method import train
from unalike.core.release import Each, Mean
from unalike.core.roster import Declared
from unalike.learn import dpsgd as private_steps
from unalike.learn.ghost import GhostNorms, clip_factors
from unalike.learn.local import LocalSGD
from unalike.learn.objective import loss_of
from unalike.methods.fedavg import FedAvg
from unalike.networks.architectures import build
from unalike.privacy import Gaussian, dpsgd
from unalike.privacy.dpsgd import PointPrivacy, Steps
from unalike.runtime.shard.shard import Refused

TINY = 1e-9  # noise so small that it changes nothing


def method(**local: object) -> FedAvg:
    settings: dict[str, object] = {"epochs": 1, "batch": 8, "lr": 0.5, **local}
    return FedAvg(linear(), cohort=1.0, local=LocalSGD(**settings))  # type: ignore[arg-type]


def test_a_full_batch_step_without_noise_is_the_clipped_mean_gradient() -> None:
    people = clients([12, 7])
    private = method(steps=1, epochs=None, batch=None, private=PointPrivacy(0.3, TINY))
    theta = private.model.init(0)
    replies = simulate(people).everyone().ask(private.fit, theta=theta, rate=1.0, into=Each("update"))
    for i, n in enumerate([12, 7]):
        x, y = people.rows(i)
        assert y is not None
        total = torch.zeros_like(theta)
        for row in range(n):
            g = grad(lambda t, row=row, x=x, y=y: loss_of(private.model(t, x[row : row + 1]), y[row : row + 1]).sum())(
                theta
            )
            total += g * min(1.0, 0.3 / float(g.norm()))
        assert torch.allclose(replies["update"][i], -0.5 * total / n, atol=2e-5)


@pytest.mark.parametrize("hidden", [(), (7,), (7, 5)])
def test_ghost_norms_give_the_sum_of_clipped_gradients(hidden: tuple[int, ...]) -> None:
    model = Model(build("mlp", (6,), 3, hidden=hidden))
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(9, 6, generator=generator), torch.randint(0, 3, (9,), generator=generator)
    taken = torch.tensor([1.0, 0, 1, 1, 1, 0, 1, 1, 1])
    theta = model.init(1)
    ghost = GhostNorms.of(model, x[:2])
    assert ghost is not None
    total, losses = ghost.clipped_sum(theta, x, y, loss_of, taken, 0.4)
    rows = torch.stack(
        [grad(lambda t, i=i: loss_of(model(t, x[i : i + 1]), y[i : i + 1]).sum())(theta) for i in range(9)]
    )
    clipped = torch.stack([row * min(1.0, 0.4 / float(row.norm())) for row in rows])
    assert torch.allclose(total, taken @ clipped, atol=2e-5)
    assert torch.allclose(losses, loss_of(model(theta, x), y))


@pytest.mark.parametrize("bound", [0.3, 1.0, 3.7, 1e3])
def test_what_lies_below_the_bound_is_left_exactly_as_it_is(bound: float) -> None:
    norms = torch.cat([torch.linspace(0, 0.999 * bound, 500), torch.tensor([bound, 2 * bound, torch.nan, torch.inf])])
    factor = clip_factors(norms, bound)
    assert (factor[:500] == 1).all() and (factor[500:502] * norms[500:502] <= bound).all()
    assert (factor[502:] == 0).all()


def test_other_networks_have_every_gradient_made_and_do_not_depend_on_the_block() -> None:
    model = Model(build("small-cnn", (1, 8, 8), 3))
    x, y = torch.randn(30, 1, 8, 8), torch.randint(0, 3, (30,))
    assert GhostNorms.of(model, x[:2]) is None
    people = Clients.from_sizes(x, y, torch.tensor([12, 8, 10]))
    local = LocalSGD(steps=2, epochs=None, batch=4, lr=0.1, private=PointPrivacy(1.0, 0.5))
    states = [train(FedAvg(model, cohort=1.0, local=local), simulate(people, block=b), 1).theta for b in (1, 3)]
    assert torch.allclose(*states, atol=1e-5)


def test_it_does_not_depend_on_the_block() -> None:
    states = [
        train(method(private=PointPrivacy(1.0, 0.8)), simulate(clients([20, 9, 33, 4]), block=b), 2) for b in (1, 3, 4)
    ]
    for state in states[1:]:
        assert torch.allclose(state.theta, states[0].theta, atol=1e-6)


def test_without_a_bound_that_bites_and_without_noise_it_is_sgd_on_poisson_batches() -> None:
    # rate 1 makes the Poisson batch the whole client: then DP-SGD and plain SGD must agree
    plain = method(steps=5, epochs=None, batch=None)
    private = replace(plain, local=replace(plain.local, private=PointPrivacy(1e6, 1e-12)))
    people = clients([10, 6])
    a = train(plain, simulate(people, quorum=0), 1).theta
    updates = simulate(people).everyone().ask(private.fit, theta=plain.model.init(0), rate=1.0, into=Each("update"))
    weighted = (updates["update"] * torch.tensor([[10.0], [6.0]])).sum(0) / 16
    assert torch.allclose(plain.model.init(0) + weighted, a, atol=1e-5)


def test_poisson_batches_have_the_right_rate_and_never_take_padding() -> None:
    n, capacity, batch = 40, 60, 6
    counts = torch.zeros(capacity)
    sizes = []
    for i in range(1500):
        rows, taken = private_steps.poisson_batch(n, capacity, batch / n, Draws(key(5, i)), batch)
        assert len(set(rows.tolist())) == len(rows)
        counts[rows[taken]] += 1
        sizes.append(int(taken.sum()))
    assert counts[n:].sum() == 0
    rate = counts[:n] / 1500
    spread = math.sqrt(0.15 * 0.85 / 1500)
    assert (rate - 0.15).abs().max() < 5 * spread
    variance = torch.tensor(sizes, dtype=torch.float64).var()
    assert float(variance) == pytest.approx(n * 0.15 * 0.85, rel=0.15)  # binomial, not fixed-size


@pytest.mark.parametrize("batch", [1, 8, 32, 256])
def test_the_room_of_a_batch_overflows_with_probability_below_1e_12(batch: int) -> None:
    room = private_steps.batch_capacity(batch)
    for n in (batch, 2 * batch, 10 * batch, 1000 * batch):
        assert binom.sf(room, n, batch / n) < 1e-12
    assert room < 4 * batch + 20  # and the work does not grow with the client


def test_noise_has_the_deviation_that_the_ledger_is_told() -> None:
    z, clip = 2.0, 0.5
    gradients = torch.zeros(4, 4000)
    made = private_steps.private_gradient(gradients, torch.ones(4), clip, z, 8.0, Draws(key(3)))
    assert float(made.std()) == pytest.approx(z * clip / 8.0, rel=0.05)


def test_every_client_is_charged_with_its_own_steps_and_noise() -> None:
    federation = simulate(clients([20, 16]))
    private = method(private=PointPrivacy(1.0, 1.5))
    train(private, federation, 2)
    for client, (rate, count) in enumerate([(8 / 20, 3 * 2), (8 / 16, 2 * 2)]):
        accountant = dp.pld.PLDAccountant()
        step = dp.PoissonSampledDpEvent(rate, dp.GaussianDpEvent(1.5))
        accountant.compose(dp.SelfComposedDpEvent(step, count))
        assert federation.ledger.epsilon(1e-4, client=client) == pytest.approx(accountant.get_epsilon(1e-4), abs=1e-6)
    assert federation.ledger.unit == "point"
    row = federation.transcript.rows()[0]
    assert (row["unit"], row["clip"], row["noise"]) == ("point", 1.0, "DP-SGD(noise_multiplier=1.5)")
    assert "loss" not in federation.metrics  # it is not protected, so it is not released


def test_a_target_gives_every_client_the_noise_for_its_size() -> None:
    private = PointPrivacy(1.0, epsilon=1.0, delta=1e-3, rounds=1)
    local = LocalSGD(epochs=1, batch=8, private=private)
    sizes = torch.tensor([24, 16])
    large, small = local.multipliers(Declared(sizes)).tolist()
    assert large < small  # a rarer point hides better
    federation = simulate(clients([24, 16]))
    train(FedAvg(linear(), cohort=1.0, local=local), federation, 1)
    assert all(0.99 < one <= 1.0 for one in federation.ledger.epsilons(1e-3).values())


def test_rounded_steps_cost_at_least_as_much() -> None:
    for steps in (Steps(0.013, 77), Steps(1.0, 1), Steps(0.5, 33)):
        rounded = steps.rounded()
        assert steps.rate <= rounded.rate <= min(1.0, 1.045 * steps.rate)
        assert steps.count <= rounded.count <= 1.045 * steps.count + 1


def test_every_client_finds_its_own_noise_from_its_declared_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LocalSGD, "multipliers", lambda _, declared: torch.where(declared.bound > 16, 50.0, 1e-6))
    local = LocalSGD(
        steps=1, epochs=None, batch=None, lr=1.0, private=PointPrivacy(1.0, epsilon=1, delta=1e-3, rounds=1)
    )
    private = FedAvg(linear(40, 10), cohort=1.0, local=local)
    everyone = simulate(clients([16, 17], features=40, classes=10)).everyone()
    theta = private.model.init(0)
    update = everyone.ask(private.fit, theta=theta, rate=1.0, into=Each("update"))["update"]
    assert float(update[1].std()) > 20 * float(update[0].std())
    with pytest.raises(Refused, match=r"FedAvg\.fit derives noise at the client; a request cannot set it"):
        everyone.ask(private.fit, theta=theta, rate=1.0, noise=each(torch.zeros(2)), into=Each("update"))


def test_what_private_training_made_is_charged_once_and_other_arrays_are_bare() -> None:
    federation = simulate(clients([10, 10, 10]))
    private = method(private=PointPrivacy(1.0, 2.0))
    cost = private.local.cost(federation.everyone().declared)
    ask = federation.everyone().ask
    ask(private.fit, theta=private.model.init(0), rate=1.0, into=[Mean("update", cost=cost), Each("update", cost=cost)])
    once = federation.ledger.epsilon(1e-4)
    assert once == pytest.approx(dpsgd.epsilon(2.0, private.local.steps_of(10), delta=1e-4))
    ask(private.fit, theta=private.model.init(0), rate=1.0, into=[Mean("update", cost=cost), Mean("loss")])
    assert federation.ledger.epsilon(1e-4) == math.inf


def test_what_makes_no_sense_is_refused() -> None:
    with pytest.raises(ValueError, match="DP-SGD needs noise: give noise_multiplier, or rounds and either"):
        PointPrivacy(1.0)
    with pytest.raises(ValueError, match="clip bound must be a finite number above 0, got 0"):
        PointPrivacy(0, 1.0)
    with pytest.raises(ValueError, match="a weight would leave the client unprotected"):
        Mean("update", weight="n", cost=dpsgd.LocalCost((), 1.0, "DP-SGD"))
    with pytest.raises(ValueError, match="a ledger speaks about one of them"):
        FedAvg(linear(), noise=Gaussian(1.0), clip=1.0, local=LocalSGD(private=PointPrivacy(1.0, 1.0)))
