"""DP-SGD at the clients: against a plain reference, in blocks, its batches, its noise, and what it is charged with."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import dp_accounting as dp
import pytest
import torch
import torch.nn.functional as F
from scipy.stats import binom
from torch import Tensor, nn
from torch.func import grad, vmap

from tests.core.helpers import clients, linear
from unalike import Clients, Model, simulate
from unalike.core.client import Client
from unalike.core.draws import Draws, key
from unalike.core.federation import each
from unalike.core.method import train
from unalike.core.release import Each, Mean
from unalike.core.roster import Declarations
from unalike.core.task import Sent, send, task
from unalike.learn import dpsgd as private_steps
from unalike.learn.ghost import GhostNorms, clip_factors
from unalike.learn.local import LocalSGD
from unalike.learn.objective import Batch, Supervised, loss_of
from unalike.methods.fedavg import FedAvg
from unalike.networks.architectures import build
from unalike.privacy import Gaussian, dpsgd
from unalike.privacy.dpsgd import PointPrivacy, Steps
from unalike.privacy.system import SystemDraws
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


class Hidden(nn.Module):
    """Networks of linear layers by all that an outsider sees, which mix samples or use a weight twice."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.first, self.last = kind, nn.Linear(4, 4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x)
        if self.kind == "mean":
            hidden = hidden - hidden.mean(0)
        elif self.kind == "beyond":
            hidden = (hidden.view(1, 1, -1, 4) + hidden.view(-1, 1, 1, 4)).view(len(x), -1)[:, :4].relu()
        elif self.kind == "twice":
            hidden = self.first(hidden.relu())
        elif self.kind == "elsewhere":
            hidden = hidden * self.first.bias
        elif self.kind == "scaled":
            return F.linear(hidden.relu(), self.last.weight * 2.0, self.last.bias)
        elif self.kind == "transposed":
            hidden = hidden.T.contiguous().view(len(x), -1)
        scores: Tensor = self.last(hidden.relu())
        return scores


@pytest.mark.parametrize("kind", ["mean", "beyond", "twice", "elsewhere", "scaled", "transposed"])
def test_a_network_that_is_more_than_its_layers_has_every_gradient_made(kind: str) -> None:
    assert GhostNorms.of(Model(Hidden("")), torch.zeros(2, 4)) is not None
    assert GhostNorms.of(Model(Hidden(kind)), torch.zeros(2, 4)) is None


@pytest.mark.parametrize("kind", ["grouped", "dilated", "mixing", "normed", "dropout"])
def test_other_networks_have_every_gradient_made_and_do_not_depend_on_the_block(kind: str) -> None:
    layer: dict[str, nn.Module] = {
        "grouped": nn.Conv2d(2, 4, 3, groups=2),
        "dilated": nn.Sequential(nn.Conv2d(2, 4, 2, dilation=2)),
        "mixing": nn.Sequential(nn.Unflatten(1, (1, 2)), nn.Flatten(1, 2), nn.Conv2d(2, 4, 3, padding_mode="circular")),
        "normed": nn.Sequential(nn.Conv2d(2, 4, 3), nn.GroupNorm(2, 4)),
        "dropout": nn.Sequential(nn.Conv2d(2, 4, 3), nn.Dropout(0.3)),
    }
    model = Model(nn.Sequential(layer[kind], nn.ReLU(), nn.Flatten(), nn.Linear(16, 3)))
    assert GhostNorms.of(model, torch.zeros(2, 2, 4, 4)) is None
    assert_blocks_agree(model, (2, 4, 4))


def assert_blocks_agree(model: Model, shape: tuple[int, ...]) -> None:
    """Clients of unequal sizes, batches and noise; singly, in blocks, and in a block that is filled up."""
    sizes, generator = torch.tensor([12, 8, 10, 3, 9]), torch.Generator().manual_seed(3)
    x, y = torch.randn(42, *shape, generator=generator), torch.randint(0, 3, (42,), generator=generator)
    people = Clients.from_sizes(x, y, sizes)
    local = LocalSGD(epochs=1, batch=None, lr=0.1, private=PointPrivacy(0.5, 0.3, batches=(2, 5)))
    one = FedAvg(model, cohort=1.0, local=local)
    theta, own = model.init(0), {"batch": each(torch.tensor([5, 2, 5, 2, 2])), "noise": each(torch.rand(5))}
    updates = []
    for block in (1, 2, 5):
        asked = simulate(people, block=block).everyone()
        updates.append(asked.ask(Told(one).fit, theta=theta, **own, into=Each("update"))["update"])
    assert updates[0].abs().max() > 1e-3
    for update in updates[1:]:
        assert torch.allclose(update, updates[0], atol=2e-5)


@dataclass(frozen=True)
class Told:
    """Clients that are told their noise and batch size."""

    method: FedAvg

    @task
    def fit(self, client: Client, theta: Tensor, noise: Tensor, batch: Tensor) -> Sent:
        return send(update=self.method.local(self.method.model, theta, client, noise=noise, batch=batch) - theta)


CONVOLUTIONS = {
    "small-cnn": lambda: build("small-cnn", (2, 8, 8), 3),
    "lenet-5": lambda: build("lenet-5", (1, 16, 16), 3),
    "strided": lambda: nn.Sequential(
        *(nn.Conv2d(2, 3, (2, 3), stride=(2, 1), padding=(1, 2), bias=False), nn.ReLU(inplace=True), nn.AvgPool2d(2)),
        *(nn.Conv2d(3, 4, 2), nn.Tanh(), nn.Flatten(), nn.Linear(4 * 4, 3)),
    ),
    "pooled": lambda: nn.Sequential(
        *(nn.Conv2d(2, 3, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(3, 4, 2), nn.MaxPool2d(2), nn.Flatten()),
        nn.Linear(4, 3),
    ),
    "written over": lambda: nn.Sequential(  # what came before is lost, so this is no chain
        *(nn.Conv2d(2, 3, 3), nn.LeakyReLU(inplace=True), nn.MaxPool2d(3), nn.Flatten(), nn.Linear(12, 3)),
    ),
    "places": lambda: nn.Sequential(nn.Linear(8, 5), nn.ReLU(), nn.Flatten(), nn.Linear(2 * 8 * 5, 3, bias=False)),
}


@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_convolutions_give_the_sum_of_clipped_gradients(name: str) -> None:
    model, shape = Model(CONVOLUTIONS[name]()), (1, 16, 16) if name == "lenet-5" else (2, 8, 8)
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(7, *shape, generator=generator), torch.randint(0, 3, (7,), generator=generator)
    taken, theta = torch.tensor([1.0, 0, 1, 1, 1, 0, 1]), model.init(1)
    ghost = GhostNorms.of(model, x[:2])
    assert ghost is not None
    rows = torch.stack(
        [grad(lambda t, i=i: loss_of(model(t, x[i : i + 1]), y[i : i + 1]).sum())(theta) for i in range(7)]
    )
    bound = float(rows.norm(dim=1).median())  # some are longer and some are not
    expected = taken @ torch.stack([row * min(1.0, bound / float(row.norm())) for row in rows])
    singly, losses = ghost.clipped_sum(theta, x, y, loss_of, taken, bound)
    both = vmap(lambda t: ghost.clipped_sum(t, x, y, loss_of, taken, bound)[0])(theta.expand(2, -1))
    for made in (singly, *both):
        assert torch.allclose(made, expected, atol=2e-5 * bound + 1e-5)
    assert torch.allclose(losses, loss_of(model(theta, x), y), atol=1e-6)
    bad = x.clone()
    bad[2] = torch.inf  # its gradient is not finite: it counts nothing, and nobody else is lost with it
    without = ghost.clipped_sum(theta, x, y, loss_of, taken * (torch.arange(7) != 2), bound)[0]
    assert torch.allclose(ghost.clipped_sum(theta, bad, y, loss_of, taken, bound)[0], without, atol=1e-5)
    assert_blocks_agree(model, shape)


def test_rows_that_do_not_fit_at_once_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    updates = []
    for at_once in (1, 1 << 22):
        monkeypatch.setattr(private_steps, "AT_ONCE", at_once)
        private = method(steps=2, epochs=None, batch=None, private=PointPrivacy(0.3, TINY))
        asked = simulate(clients([40, 33]), block=1).everyone()
        theta = private.model.init(0)
        updates.append(asked.ask(private.fit, theta=theta, rate=1.0, into=Each("update"))["update"])
    assert torch.allclose(*updates, atol=1e-6)


def test_an_empty_batch_has_its_noise() -> None:
    private = method(steps=3, epochs=None, batch=1, private=PointPrivacy(1.0, 2.0))
    people = clients([50] * 12)
    updates = []
    for block in (1, 12):
        asked = simulate(people, block=block).everyone()
        updates.append(asked.ask(private.fit, theta=private.model.init(0), rate=1.0, into=Each("update"))["update"])
    drawn = [private_steps.poisson_rows(50, 50, 1 / 50, Draws(key(7, i))) for i in range(200)]
    assert min(len(rows) for rows in drawn) == 0 < max(len(rows) for rows in drawn)
    assert torch.allclose(*updates, atol=1e-5)
    assert (updates[0].std(1) > 0.5).all()  # three steps of noise 0.5 · 2, whether or not a row was drawn


def test_single_clients_draw_the_rows_that_a_block_draws() -> None:
    for i in range(50):
        rows, taken = private_steps.poisson_batch(40, 60, 0.2, Draws(key(5, i)), 12)
        assert torch.equal(rows[taken], private_steps.poisson_rows(40, 60, 0.2, Draws(key(5, i))))


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
    total = private_steps.clipped_sum(torch.zeros(4, 4000), torch.ones(4), clip)
    made = private_steps.noisy(total, clip, z, Draws(key(3)), rows=4) / 8.0
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
    assert (row["unit"], row["clip"], row["noise"]) == ("point", 1.0, {"kind": "DP-SGD", "noise_multiplier": 1.5})
    assert "loss" not in federation.metrics  # it is not protected, so it is not released


def test_a_target_gives_every_client_the_noise_for_its_size() -> None:
    private = PointPrivacy(1.0, epsilon=1.0, delta=1e-3, rounds=1)
    local = LocalSGD(epochs=1, batch=8, private=private)
    sizes = torch.tensor([24, 16])
    large, small = local.noise_multipliers(Declarations(sizes)).tolist()
    assert large < small  # a rarer point hides better
    federation = simulate(clients([24, 16]))
    train(FedAvg(linear(), cohort=1.0, local=local), federation, 1)
    assert all(0.99 < one <= 1.0 for one in federation.ledger.epsilons(1e-3).values())


def test_rounded_steps_cost_at_least_as_much() -> None:
    for steps in (Steps(0.013, 77), Steps(1.0, 1), Steps(0.5, 33)):
        rounded = steps.round_up()
        assert steps.rate <= rounded.rate <= min(1.0, 1.045 * steps.rate)
        assert steps.count <= rounded.count <= 1.045 * steps.count + 1


def test_every_client_finds_its_own_noise_from_its_declared_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LocalSGD, "noise_multipliers", lambda _, declared: torch.where(declared.bound > 16, 50.0, 1e-6))
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
    cost = private.local.cost(federation.everyone().declarations)
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
        Mean("update", weight="n", cost=dpsgd.LocalCost((), 1.0))
    with pytest.raises(ValueError, match="a ledger speaks about one of them"):
        FedAvg(linear(), noise=Gaussian(1.0), clip=1.0, local=LocalSGD(private=PointPrivacy(1.0, 1.0)))


@pytest.mark.parametrize("way", ["ghost norms", "one by one"])
def test_whatever_the_other_rows_one_row_moves_the_sum_by_no_more_than_was_counted(
    way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One row takes a sum to the next power of two, where many small rows round to more than they are.

    In single precision it moved the sum by half of a clip more than its own.
    """
    seen: list[tuple[Tensor, float]] = []

    def without_noise(value: Tensor, most: float, *_: object) -> Tensor:
        seen.append((value, most))
        return value

    monkeypatch.setattr(private_steps, "add_gaussian", without_noise)
    whole = Supervised(Model(nn.Linear(1, 1, bias=False)))
    objective = whole if way == "ghost norms" else lambda params, batch: whole(params, batch)
    rows = 2048 + 4000
    client: Any = SimpleNamespace(x=torch.ones(rows, 1), noise=SystemDraws(), bound=torch.tensor(rows), capacity=rows)
    gradient = private_steps.PrivateGradient(objective, PointPrivacy(1.0, 1.0), None, None, client)
    for small in (0.6, 0.75):  # of the distance of two numbers beyond 2048, in single precision
        y = torch.cat([torch.full((2048,), 1e3), torch.full((4000,), small * 2.0**-12)])
        for some in (y, y[1:]):
            made, _ = gradient(torch.zeros(1), Batch(torch.ones(len(some), 1), some, torch.ones(len(some))))
            assert isinstance(made, Tensor) and made.dtype == torch.float32
        (larger, most), (smaller, _) = seen[-2:]
        assert float((larger.double() - smaller.double()).norm()) <= most < 1.0 + 1e-6


def test_an_empty_batch_has_the_type_of_any_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """Noise on numbers of another type has other numbers to choose from, which would tell that nobody was drawn."""
    types: list[torch.dtype] = []
    monkeypatch.setattr(private_steps, "add_gaussian", lambda value, *_: types.append(value.dtype) or value)
    client: Any = SimpleNamespace(x=torch.ones(4, 1), noise=SystemDraws(), bound=torch.tensor(4), capacity=4)
    objective = Supervised(Model(nn.Linear(1, 1)))
    gradient = private_steps.PrivateGradient(objective, PointPrivacy(1.0, 1.0), None, None, client)
    for rows in (0, 1):
        gradient(torch.zeros(2), Batch(torch.ones(rows, 1), torch.ones(rows), torch.ones(rows)))
    assert types == [torch.float64, torch.float64]


class Cast(nn.Module):
    """Takes rows of any type."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 5), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        scores: Tensor = self.last(self.first(x.float()).tanh())
        return scores


def test_a_network_that_changes_the_type_of_its_rows_gets_rows_of_any_type() -> None:
    model, y, taken = Model(Cast()), torch.tensor([0, 2]), torch.ones(2)
    x = torch.linspace(-1, 1, 8, dtype=torch.float64).view(2, 4)
    ghost = GhostNorms.of(model, x)
    assert ghost is not None
    found = ghost.clipped_sum(model.init(0), x, y, loss_of, taken, 10.0)[0]
    assert not found.requires_grad
    expected = grad(lambda theta: loss_of(model(theta, x), y).sum())(model.init(0))
    assert torch.allclose(found, expected, atol=1e-6)


class BesideLeNet5(nn.Module):
    """LeNet-5 and a linear map beside it: more than one function after the other."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.skip = build("lenet-5", (1, 16, 16), 3), nn.Linear(256, 3)

    def forward(self, x: Tensor) -> Tensor:
        scores: Tensor = self.net(x) + self.skip(x.flatten(1))
        return scores


def test_a_network_around_lenet_5_is_clipped_in_blocks_as_client_by_client() -> None:
    model = Model(BesideLeNet5())
    theta, x = torch.stack([model.init(0), model.init(1)]), torch.randn(2, 5, 1, 16, 16)
    y = torch.tensor([[0, 1, 2, 0, 1], [2, 1, 0, 0, 1]])
    norms = GhostNorms.of(model, x[0, :2])
    assert norms is not None

    def clipped(theta: Tensor, x: Tensor, y: Tensor) -> Tensor:
        return norms.clipped_sum(theta, x, y, loss_of, None, 0.3)[0]

    alone = torch.stack([clipped(theta[i], x[i], y[i]) for i in range(2)])
    torch.testing.assert_close(torch.vmap(clipped)(theta, x, y), alone, atol=1e-6, rtol=1e-4)
