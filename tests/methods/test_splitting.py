"""The splitting scheme against closed forms of least squares, which are written out here."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from reproductions.splitting.points_at_server import PointsAtServer
from tests.core.helpers import clients, linear
from tests.runs.helpers import At, Crash, crash, metrics, timeless
from unalike import LocalSGD, Model, resume, run, simulate, train
from unalike.core.client import Client, Clients
from unalike.core.federation import Federation
from unalike.core.method import State
from unalike.core.request import Reply, Request
from unalike.data import load
from unalike.learn.anderson import Anderson, columns_of, weights_of
from unalike.learn.optimum import Optimum
from unalike.learn.schedules import Schedule
from unalike.learn.server import ServerOptimizer
from unalike.methods.fedavg import FedAvg
from unalike.methods.relaxation import Schedules
from unalike.methods.splitting import Splitting
from unalike.networks.architectures import build
from unalike.privacy import Gaussian
from unalike.privacy.dpsgd import PointPrivacy
from unalike.runs.errors import UserError
from unalike.runs.simulate import gather_models
from unalike.runs.watcher import Watcher

M, N, D = 4, 12, 3
SIZES = [3, 10, 1, 6]
FEDPROX, FEDRP, FEDSPLIT, FEDPI = (1.0, 1.0, 1.0), (2.0, 1.0, 1.0), (2.0, 2.0, 1.0), (2.0, 2.0, 0.5)


@dataclass(frozen=True)
class Problem:
    """Sums of squares f_i(θ) = ½‖A_iθ − b_i‖² = ½θᵀQ_iθ − c_iᵀθ + const."""

    a: Tensor  # [M, N, D]
    b: Tensor  # [M, N]

    @property
    def store(self) -> Clients:
        return Clients.from_sizes(self.a.reshape(-1, D), self.b.reshape(-1), torch.full((M,), N))

    @property
    def q(self) -> Tensor:
        return self.a.double().mT @ self.a.double()

    @property
    def c(self) -> Tensor:
        return (self.a.double().mT @ self.b.double()[..., None])[..., 0]

    @property
    def best(self) -> Tensor:
        """θ*, the pooled solution."""
        return torch.linalg.solve(self.q.sum(0), self.c.sum(0))

    def slopes(self, theta: Tensor) -> Tensor:
        """[M, D] ∇f_i(θ)."""
        return self.q @ theta - self.c

    def near(self, eta: float) -> Tensor:
        """Where Σ (I + ηQ_i)⁻¹(Q_iθ − c_i) = 0: FedProx's fixed point."""
        inverses = torch.linalg.inv(torch.eye(D, dtype=torch.float64) + eta * self.q)
        return torch.linalg.solve((inverses @ self.q).sum(0), (inverses @ self.c[..., None]).sum(0)[:, 0])

    def proximal(self, u: Tensor, eta: float) -> Tensor:
        """[M, D] P_i(u_i)."""
        return torch.linalg.solve(torch.eye(D, dtype=torch.float64) + eta * self.q, u + eta * self.c)

    def gap(self, theta: Tensor) -> float:
        e = theta - self.best
        return float(e @ self.q.sum(0) @ e) / 2


def problem(noise: float = 1.0) -> Problem:
    random = torch.Generator().manual_seed(5)
    a = torch.randn(M, N, D, generator=random)
    theta = torch.randn(D, generator=random)
    return Problem(a, a @ theta + noise * torch.randn(M, N, generator=random))


PROBLEM = problem()
ETA = 0.1  # times the eigenvalues of Q_i: about 1
SUMS: dict[str, Any] = {"cohort": 1.0, "losses": "sum", "eta": ETA}


def scheme(triple: tuple[float, float, float], **fields: Any) -> Splitting:
    alpha, beta, gamma = triple
    return Splitting(Model(build("linear", (D,), 1)), alpha, beta, gamma, **{**SUMS, **fields})


def federation(of: Problem = PROBLEM, **fields: Any) -> Federation:
    return simulate(of.store, block=4, **fields)


def kept(federation: Federation, name: str) -> Tensor:
    """[M, D] what clients keep, by id."""
    state = federation.runtime.kept(federation.run)  # type: ignore[attr-defined]
    return torch.as_tensor(state[f"{name}.values"][torch.argsort(state[f"{name}.ids"])])


# Fixed points


@pytest.mark.parametrize(
    "triple", [FEDPROX, FEDRP, FEDSPLIT, FEDPI, (1.5, 1.0, 0.7), (1.0, 2.0, 1.0), (1.5, 1.8, 0.8), (0.6, 1.4, 0.9)]
)
def test_the_fixed_point_is_that_of_fedprox_with_another_step(triple: tuple[float, float, float]) -> None:
    alpha, beta, _ = triple
    method = scheme(triple)
    theta = train(method, federation(), 60).theta
    torch.testing.assert_close(theta, PROBLEM.near(ETA * (1 - alpha * (beta - 1) / beta)), rtol=1e-6, atol=1e-6)
    exact = triple in (FEDSPLIT, FEDPI)
    assert (PROBLEM.gap(theta) < 1e-10) == exact


def test_points_of_fedsplit_and_fedpi_are_the_optimum_plus_their_slope() -> None:
    expected = PROBLEM.best + ETA * PROBLEM.slopes(PROBLEM.best)
    split, pi = federation(), federation()
    theta = train(scheme(FEDSPLIT), split, 60).theta
    torch.testing.assert_close(2 * theta - kept(split, "z"), expected, rtol=1e-9, atol=1e-9)
    train(scheme(FEDPI), pi, 80)
    u = kept(pi, "z") + kept(pi, "u")
    torch.testing.assert_close(u, expected, rtol=1e-9, atol=1e-9)
    # and so every client's proximal point is one and the same model
    torch.testing.assert_close(PROBLEM.proximal(u, ETA), PROBLEM.best.expand(M, D), rtol=1e-9, atol=1e-9)


def test_gaps_of_fedavg_and_fedprox_are_those_of_the_second_order() -> None:
    h = (PROBLEM.q @ PROBLEM.slopes(PROBLEM.best)[..., None]).sum(0)[:, 0]
    unit = float(h @ torch.linalg.solve(PROBLEM.q.sum(0), h)) / 2
    eta, k = 1e-4, 5
    prox = train(scheme(FEDPROX, eta=eta, anderson=Anderson(4)), federation(), 40).theta
    assert PROBLEM.gap(prox) == pytest.approx(eta**2 * unit, rel=0.02)
    steps = LocalSGD(steps=k, batch=None, lr=eta)
    method = Splitting(Model(build("linear", (D,), 1)), cohort=1.0, losses="sum", step="gradient", local=steps)
    for solver in ("exact", "local"):  # on XᵀX and on the rows
        average = train(replace(method, solver=solver, anderson=Anderson(4)), federation(), 40).theta  # type: ignore[arg-type]
        assert PROBLEM.gap(average) == pytest.approx((eta * (k - 1) / 2) ** 2 * unit, rel=0.02)


def test_without_label_noise_fedprox_is_exact() -> None:
    easy = problem(noise=0.0)
    assert easy.gap(train(scheme(FEDPROX, eta=1.0), federation(easy), 40).theta) < 1e-12


@dataclass(frozen=True)
class Shrink:
    """Takes η away."""

    exact = False

    def __call__(self, client: Client, u: Tensor, *others: Any, **more: Any) -> tuple[Tensor, Tensor]:
        return u.sign() * (u.abs() - ETA).clamp(min=0), torch.zeros(())


class Absolute(Splitting):
    """f = |x|, whose proximal map takes η away."""

    @property
    def proximal_map(self) -> Any:
        return Shrink()


@pytest.mark.parametrize(("triple", "expected"), [(FEDSPLIT, [-1, 1, -1, 1]), (FEDPI, [-1, 0, 0, 0])])
def test_of_an_absolute_value_fedsplit_alternates_and_fedpi_is_at_its_minimum(
    triple: tuple[float, float, float], expected: list[int]
) -> None:
    method = Absolute(Model(build("linear", (1,), 1)), *triple, **{**SUMS, "solver": "local"})
    one = simulate(Clients.from_sizes(torch.ones(1, 1), torch.ones(1), torch.ones(1)), block=1)
    state = State(theta=torch.tensor([0.6 * ETA], dtype=torch.float64))
    for sign in expected:
        state = train(method, one, 1, state)
        torch.testing.assert_close(state.theta, torch.tensor([sign * 0.6 * ETA], dtype=torch.float64))


def test_fedpi_is_admm() -> None:
    """Equations 2.9-2.11: z ← P(θ + u), θ ← mean(z − u), u ← u + θ − z."""
    method, here = scheme(FEDPI), federation()
    state = method.start(0)
    theta, dual = state.theta, torch.zeros(M, D, dtype=torch.float64)
    for _ in range(1, 8):
        z = PROBLEM.proximal(theta + dual, ETA)
        before, theta = theta, (z - dual).mean(0)
        dual = dual + theta - z
        state = train(method, here, 1, state)
        # the mean of 2P(v) − v, of which the second part is θ before the step
        torch.testing.assert_close(state.theta, 2 * theta - before)


# Who takes part


@pytest.mark.parametrize("triple", [FEDSPLIT, FEDPI, FEDRP])
def test_with_half_of_the_clients_the_fixed_point_stays_and_by_the_authors_rule_it_moves(
    triple: tuple[float, float, float],
) -> None:
    expected = PROBLEM.near(ETA) if triple == FEDRP else PROBLEM.best
    theta = train(scheme(triple, cohort=2), federation(), 100).theta
    torch.testing.assert_close(theta, expected, rtol=1e-5, atol=1e-5)
    moved = train(scheme(triple, cohort=2, absentees="left-out"), federation(), 30).theta
    assert (moved - expected).norm() > 1e-3


@pytest.mark.parametrize("triple", [FEDSPLIT, FEDPI])
def test_who_is_back_takes_one_step_with_the_newest_mean_and_what_went_astray_is_sent_again(
    triple: tuple[float, float, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Client 0 misses rounds 2 and 3. Client 1 answers in rounds 1, 3 and 4, but nobody hears of it."""
    away, astray = {(0, 2), (0, 3)}, {(1, 1), (1, 3), (1, 4)}
    here = simulate(PROBLEM.store, shards=M, block=1)
    deliver = here.runtime.deliver

    def unreliable(request: Request) -> Iterator[Reply]:
        for client in request.ids.tolist():  # one shard for each
            row = (request.ids == client).nonzero().flatten()
            now = (client, here.round) if request.task == "Splitting.fit" else ()
            replies = [] if now in away else [reply.at(row) for reply in deliver(request.only(row))]
            yield from [Reply(row[:0], (), {int(row): "away"})] if now in away | astray else replies

    monkeypatch.setattr(here.runtime, "deliver", unreliable)
    method = scheme(triple)
    state, gamma = method.start(0), triple[2]
    u = z = at_server = state.theta.expand(M, D)
    joined = torch.tensor([False] * M)
    for number in range(1, 7):
        mean = state.theta
        runs = torch.tensor([(client, number) not in away for client in range(M)])[:, None]
        heard = runs & torch.tensor([(client, number) not in astray for client in range(M)])[:, None]
        u = torch.where(runs, (1 - gamma) * u + gamma * (2 * mean - z), u)
        z = torch.where(runs, 2 * PROBLEM.proximal(u, ETA) - u, z)
        at_server, joined = torch.where(heard, z, at_server), joined | heard[:, 0]
        state = train(method, here, 1, state)
        torch.testing.assert_close(state.theta, at_server[joined].mean(0))
    assert joined.all()


@pytest.mark.parametrize("triple", [(1.5, 1.0, 0.7), FEDRP, (2.0, 1.6, 0.6)])
def test_who_joins_is_counted_from_the_point_that_it_got(triple: tuple[float, float, float]) -> None:
    """One or two of four clients a round: z̄ is the mean of the latest z of all that have joined, from round 1 on."""
    alpha, beta, gamma = triple
    method, here = scheme(triple, cohort=2), federation()
    cohorts = [federation(round=number).sample(2, labeled=True).positions for number in range(1, 7)]
    assert any(set(later.tolist()) - set(cohorts[0].tolist()) for later in cohorts[1:])
    found: list[Tensor] = []
    train(method, here, 6, after_round=lambda _, state: found.append(state.theta))
    z, u = torch.zeros(M, D, dtype=torch.float64), torch.zeros(M, D, dtype=torch.float64)
    joined, mean, common = torch.tensor([False] * M), torch.zeros(D, dtype=torch.float64), u[0]
    for cohort, theta in zip(cohorts, found, strict=True):
        for i in cohort.tolist():
            if beta == 1:
                u[i] = common
            elif joined[i]:
                u[i] = (1 - gamma) * u[i] + gamma * ((1 - beta) * z[i] + beta * mean)
            else:
                u[i] = mean  # a client joins at z̄
        image = PROBLEM.proximal(u, ETA)
        z[cohort] = ((1 - alpha) * u + alpha * image)[cohort]
        joined[cohort] = True
        mean = z[joined].mean(0)
        common = (1 - gamma) * common + gamma * mean
        torch.testing.assert_close(theta, mean)


def test_secure_and_shared_runs_reach_the_same_point() -> None:
    whole = train(scheme(FEDSPLIT), federation(), 20).theta
    secure = train(scheme(FEDSPLIT, secure=True, clip=20.0), federation(), 20).theta
    sharded = train(scheme(FEDSPLIT), simulate(PROBLEM.store, shards=3, block=2), 20).theta
    torch.testing.assert_close(whole, PROBLEM.best, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(secure, whole, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(sharded, whole)


def test_with_noise_clients_keep_what_was_clipped_and_the_noise_of_all_rounds_stays_in_the_mean() -> None:
    d, rounds, z, clip = 400, 16, 0.5, 0.1
    random = torch.Generator().manual_seed(0)
    x, y = torch.randn(8, d, generator=random), torch.randn(8, generator=random)
    here = simulate(Clients.from_sizes(x, y, torch.full((4,), 2)), block=4)
    method = Splitting(Model(build("linear", (d,), 1)), *FEDSPLIT, **SUMS, clip=clip, noise=Gaussian(z))
    theta = train(method, here, rounds).theta
    moved = kept(here, "z")
    assert float(moved.norm(dim=1).max()) > 1.5 * clip  # several clipped steps
    assert float(moved.norm(dim=1).max()) < rounds * clip
    noise = theta - moved.mean(0)  # everybody began at 0
    assert float(noise.std()) == pytest.approx(math.sqrt(rounds) * z * clip / 4, rel=0.15)
    assert "counted" not in train(method, here, 1) and "loss" not in here.metrics


def test_with_noise_who_joins_late_counts_from_the_very_first_point() -> None:
    """The server's z̄ is the mean of all clients' z, with the first θ for those that were never asked."""
    method = scheme(FEDSPLIT, cohort=2, clip=1e6, noise=Gaussian(1e-12))
    state, here = method.start(0), federation()
    joined, first = [], method.model.init(0)
    for number in range(1, 9):
        state = train(method, here, 1, state)
        store = here.runtime.kept(here.run)  # type: ignore[attr-defined]
        z = {int(i): value for i, value in zip(store["z.ids"], store["z.values"], strict=True)}
        joined.append(len(z))
        mean = torch.stack([z.get(i, first) for i in range(M)]).mean(0)
        torch.testing.assert_close(state.theta, mean, atol=1e-4, rtol=1e-4, msg=f"round {number}")
    assert joined[0] < joined[-1]  # somebody joined after z̄ had moved


# Proximal maps


def test_two_steps_from_the_mean_reach_the_optimum_as_the_exact_map_does() -> None:
    steps = LocalSGD(steps=2, batch=None, lr=0.02)
    for warm in ("center", "last"):
        method = scheme(FEDSPLIT, solver="local", warm=warm, local=steps)
        assert PROBLEM.gap(train(method, federation(), 60).theta) < 1e-10


def test_sums_are_means_with_other_steps_in_batches_too() -> None:
    for batch in (None, 5):
        local = LocalSGD(epochs=2, batch=batch, lr=0.01)
        sums = scheme(FEDSPLIT, solver="local", local=local)
        means = replace(sums, losses="mean", eta=N * ETA, local=replace(local, lr=N * 0.01))
        found, expected = (train(method, federation(), 3).theta for method in (sums, means))
        torch.testing.assert_close(found, expected)
    exact = replace(sums, solver="exact", losses="mean", eta=N * ETA)
    torch.testing.assert_close(train(exact, federation(), 3).theta, train(scheme(FEDSPLIT), federation(), 3).theta)


def test_the_ridge_is_part_of_every_map() -> None:
    ridge = LocalSGD(steps=1, batch=None, weight_decay=3.0)
    theta = train(scheme(FEDSPLIT, local=ridge), federation(), 50).theta
    eye = torch.eye(D, dtype=torch.float64)
    torch.testing.assert_close(theta, torch.linalg.solve(PROBLEM.q.sum(0) + M * 3.0 * eye, PROBLEM.c.sum(0)))


def test_personal_models_are_proximal_points_of_the_mean_and_stay() -> None:
    method, here = scheme(FEDPROX, personal=True), federation()
    state = train(method, here, 5)
    with here.aside() as aside:
        cohort = aside.everyone()
        models = gather_models(cohort, method.personalize(state, cohort))
    torch.testing.assert_close(models, PROBLEM.proximal(state.theta.expand(M, D), ETA))
    assert not method.serves_unlabeled and scheme(FEDPROX).serves_unlabeled


def test_step_sizes_follow_the_schedule_and_the_average_weighs_by_them() -> None:
    method, points = scheme(FEDPROX, schedule=Schedule("1/t"), ergodic=True), []
    state = train(method, federation(), 6, after_round=lambda _, state: points.append(state.theta))
    u = torch.zeros(D, dtype=torch.float64)
    for t, point in enumerate(points, 1):
        u = PROBLEM.proximal(u.expand(M, D), ETA / t).mean(0)
        torch.testing.assert_close(point, u)
    weights = 1 / torch.arange(1.0, 7.0, dtype=torch.float64)
    average = (weights[:, None] * torch.stack(points)).sum(0) / weights.sum()
    torch.testing.assert_close(method.personalize(state, federation().everyone())[0], average)  # type: ignore[index]


FALLING = Schedules(Schedule("1/sqrt(t)"), Schedule("exponential", 0.8), Schedule("1/log(t)"))


@pytest.mark.parametrize("triple", [FEDSPLIT, FEDPI, (1.7, 1.0, 0.9)])
@pytest.mark.parametrize("over", [None, "mean", "gram"])
def test_alpha_beta_and_gamma_follow_their_schedules(triple: tuple[float, float, float], over: Any) -> None:
    """(2.15)-(2.17) with α_t, β_t and γ_t of each round; acceleration with a memory of 1 solves for one weight."""
    common = triple[1] == 1.0
    schedules = replace(FALLING, beta=Schedule()) if common else FALLING
    method = scheme(triple, schedules=schedules, anderson=Anderson(1, over, guard=False) if over else Anderson())
    found: list[Tensor] = []
    train(method, federation(), 6, after_round=lambda _, state: found.append(state.theta))
    u = torch.zeros(M, D, dtype=torch.float64)
    images: list[Tensor] = []
    residuals: list[Tensor] = []
    for t, theta in enumerate(found, 1):
        alpha, gamma = triple[0] / math.sqrt(t), triple[2] / math.log(t + math.e - 1)
        beta = 1.0 if common else triple[1] * 0.8 ** (t - 1)
        z = (1 - alpha) * u + alpha * PROBLEM.proximal(u, ETA)
        torch.testing.assert_close(theta, z.mean(0))
        image = (1 - gamma) * u + gamma * ((1 - beta) * z + beta * z.mean(0))
        images, residuals = [*images[-1:], image], [*residuals[-1:], u - image]
        u = image
        if over and t > 1:
            one, two = (r.mean(0) if over == "mean" or common else r for r in residuals)
            weight = float((two * (two - one)).sum() / (two - one).square().sum())
            u = weight * images[0] + (1 - weight) * images[1]


def test_the_local_rate_has_a_schedule_of_its_own() -> None:
    """Two steps x ← x − lr_t·(∇f_i(x) + (x − u)/η_t) from z̄, with η_t = η/t and lr_t = lr·0.7^(t−1), written out."""
    lr = 0.02
    method = scheme(
        FEDPROX,
        solver="local",
        local=LocalSGD(steps=2, batch=None, lr=lr),
        schedule=Schedule("1/t"),
        schedules=Schedules(local=Schedule("exponential", 0.7)),
    )
    theta = train(method, federation(), 4).theta
    u = torch.zeros(D, dtype=torch.float64)
    for t in range(1, 5):
        x = u.expand(M, D)
        for _ in range(2):
            slope = (PROBLEM.q @ x[..., None])[..., 0] - PROBLEM.c
            x = x - lr * 0.7 ** (t - 1) * (slope + (x - u) * t / ETA)
        u = x.mean(0)
    torch.testing.assert_close(theta.double(), u, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("network", "triple"),
    [
        ("linear", FEDPROX),
        ("mlp", FEDRP),
        pytest.param("linear", FEDRP, marks=pytest.mark.long),
        pytest.param("mlp", FEDPROX, marks=pytest.mark.long),
    ],
)
@pytest.mark.long
def test_only_diminishing_steps_end_at_the_pooled_solution(triple: tuple[float, float, float], network: str) -> None:
    """T2 Theorem 3, by local steps: the pooled gradient falls with η_t = η/t, and stops at a floor with constant η.

    Logistic regression, and a network, whose end is a stationary point of the mean loss of all clients.
    """
    random = torch.Generator().manual_seed(2)
    x = torch.randn(3, 20, 4, generator=random)
    y = ((x @ torch.randn(3, 4, 1, generator=random))[..., 0] > 0).long()  # a concept of its own for each client
    store = Clients.from_sizes(x.reshape(-1, 4), y.reshape(-1), torch.full((3,), 20))
    options = {"hidden": (5,)} if network == "mlp" else {}
    model = Model(build(network, (4,), 2, **options))
    eta, ridge = 16.0, 0.1
    local = LocalSGD(steps=8, batch=None, lr=1.0, weight_decay=ridge)
    norms = {}
    for kind in ("constant", "1/t"):
        method = Splitting(model, *triple, cohort=1.0, eta=eta, local=local, schedule=Schedule(kind))  # type: ignore[arg-type]
        theta = train(method, simulate(store, block=3), 100).theta.clone().requires_grad_()
        loss = F.cross_entropy(model(theta, x.reshape(-1, 4)), y.reshape(-1)) + ridge / 2 * theta.square().sum()
        norms[kind] = float(torch.autograd.grad(loss, theta)[0].norm())
    assert norms["1/t"] < 0.1 * norms["constant"]


def test_acceleration_within_the_local_steps_solves_for_a_proximal_point_in_d_steps() -> None:
    """Gradient steps on a quadratic of D dimensions, accelerated with a memory of D, are exact after D + 1 (§2.5)."""
    local = LocalSGD(steps=D + 2, batch=None, lr=0.02)
    gaps = {}
    for memory in (0, D):
        method = scheme(FEDSPLIT, solver="local", local=local, inner_memory=memory)
        theta = train(method, federation(), 1).theta
        gaps[memory] = float((theta - (2 * PROBLEM.proximal(torch.zeros(M, D).double(), ETA)).mean(0)).norm())
    assert gaps[D] < 1e-3 * gaps[0] and gaps[D] < 1e-5
    with pytest.raises(ValueError, match="inner_memory accelerates full-batch steps"):
        scheme(FEDSPLIT, inner_memory=2)


# Acceleration


def test_weights_of_dependent_residuals_leave_nothing() -> None:
    """G†1 / 1ᵀG†1 would give (1/3, 2/3) here, and a residual of 5/3."""
    torch.testing.assert_close(weights_of(torch.tensor([[1.0, 2.0]])), torch.tensor([2.0, -1.0]).double())
    r = torch.tensor([[1.0, 2.0, 4.0], [1.0, 0.0, 1.0]], dtype=torch.float64)  # two rows: three columns are dependent
    found = weights_of(r)
    assert float(found.sum()) == pytest.approx(1) and float((r @ found).norm()) < 1e-12
    torch.testing.assert_close(weights_of(r[:, :2]), torch.tensor([0.0, 1.0]).double() + torch.tensor([1, -1]) * 1.0)
    torch.testing.assert_close(columns_of(r.T @ r).T @ columns_of(r.T @ r), r.T @ r)
    assert weights_of(r[:, :1]).tolist() == [1.0]


@pytest.mark.parametrize("triple", [FEDPROX, FEDRP])
def test_a_linear_map_of_d_dimensions_is_solved_in_d_steps(triple: tuple[float, float, float]) -> None:
    method = scheme(triple, anderson=Anderson(D))
    points: list[Tensor] = []
    train(method, federation(), D + 3, after_round=lambda _, state: points.append(state.theta))
    gaps = [float((point - PROBLEM.near(ETA)).norm()) for point in points]
    assert gaps[D] > 1e-6 > 1e-10 > gaps[D + 1]


def test_histories_at_the_clients_give_what_all_points_at_the_server_give() -> None:
    for triple in (FEDSPLIT, FEDPI):
        gram, mean = scheme(triple, anderson=Anderson(2, "gram")), scheme(triple, anderson=Anderson(2, "mean"))
        each = PointsAtServer.of(mean)
        first, second = (train(method, federation(), 9).theta for method in (each, gram))
        torch.testing.assert_close(first, second, rtol=1e-6, atol=1e-6)
        assert (first - train(scheme(triple), federation(), 9).theta).norm() > 1e-6
        for method in (each, gram, mean):
            assert PROBLEM.gap(train(method, federation(), 25).theta) < 1e-10


def test_a_step_that_does_not_shrink_the_residual_is_taken_back() -> None:
    for guard in (True, False):
        anderson = Anderson(2, guard=guard)
        state = anderson.start()
        for length in (4.0, 3.0, 2.0):
            weights, state, told = anderson.weigh(torch.diag(torch.tensor([6.0, 5.0, length])), state)
        assert told["accelerated"] == 1 and float(weights.sum()) == pytest.approx(1) and float(weights[0]) > 0
        weights, state, told = anderson.weigh(torch.diag(torch.tensor([5.0, 2.0, 2.5])), state)
        assert told["rejected"] == guard and (weights.tolist() == [0, 1, 0]) == guard
        assert float(state["residual"]) == (2.0 if guard else 2.5)


# FedProx, as it was before the others came


def test_fedprox_without_its_term_is_fedavg_and_with_it_stays_nearer() -> None:
    local = LocalSGD(epochs=5, batch=4, lr=0.3)

    def after(mu: float) -> State:
        method = Splitting(linear(), cohort=4, local=local, mu=mu, absentees="left-out")
        return train(method, simulate(clients(SIZES)), 1)

    plain, start = train(FedAvg(linear(), cohort=4, local=local), simulate(clients(SIZES)), 1).theta, linear().init(0)
    assert torch.equal(after(0.0).theta, plain)
    assert torch.allclose(after(1e-9).theta, plain, atol=1e-6)  # goes through the term, whose weight is nothing
    assert float((after(1.0).theta - start).norm()) < 0.8 * float((plain - start).norm())


def test_fedprox_descends_the_proximal_objective() -> None:
    method = Splitting(linear(), cohort=1, local=LocalSGD(epochs=400, batch=None, lr=0.2), mu=2.0)
    store = clients([8])
    start = method.start(0)
    theta = train(method, simulate(store), 1, start).theta
    leaf = theta.clone().requires_grad_(True)
    x, y = store.rows(0)
    assert y is not None
    value = F.cross_entropy(linear()(leaf, x), y) + 1.0 * (leaf - start.theta).square().sum()
    (gradient,) = torch.autograd.grad(value, leaf)
    assert float(gradient.abs().max()) < 1e-5


def test_fedprox_follows_the_loss_with_its_mu() -> None:
    local = LocalSGD(epochs=5, batch=None, lr=0.1)
    adaptive = Splitting(linear(), cohort=4, local=local, mu=1.0, mu_step=0.1, absentees="left-out")
    fixed = replace(adaptive, mu_step=0.0)
    first, same = (train(method, simulate(clients(SIZES)), 1) for method in (adaptive, fixed))
    torch.testing.assert_close(first.theta, same.theta)
    state, mus = adaptive.start(0).part("prox"), []
    for loss in (9, 8, 7, 6, 5, 4, 4.5, 4.5, 4, 3, 2, 1, 0.5):
        state = adaptive._next_mu(state, torch.tensor(float(loss)))
        mus.append(round(float(state["mu"]), 3))
    assert mus == [1, 1, 1, 1, 1, 0.9, 1, 1, 1, 1, 1, 1, 0.9]  # up after a rise; down after the fifth fall in a row
    heavy = first.with_part("prox", {"mu": torch.tensor(8.0)})
    far, near = (train(adaptive, simulate(clients(SIZES), round=1), 1, state).theta for state in (first, heavy))
    assert (near - first.theta).norm() < (far - first.theta).norm() / 2
    with pytest.raises(ValueError, match=r"mu_step=0\.1 follows the clients' loss"):
        Splitting(linear(), mu_step=0.1, clip=1.0, noise=Gaussian(1.0))


# The convex problems of the system


def test_the_minimum_of_a_least_squares_its_gap_and_heterogeneity() -> None:
    here = federation()
    found = Optimum.find(here, D)
    torch.testing.assert_close(found.theta, PROBLEM.best)
    assert found.heterogeneity == pytest.approx(4 * float(PROBLEM.slopes(PROBLEM.best).square().sum(1).mean()))
    assert found.curvature == pytest.approx(float(torch.linalg.eigvalsh(PROBLEM.q).max()))
    theta = PROBLEM.best + 1e-9 * torch.tensor([1.0, -2.0, 0.5])
    assert PROBLEM.gap(theta) < 1e-15  # so approx must not allow its usual 1e-12
    assert found.gap(theta, here) == pytest.approx(PROBLEM.gap(theta), rel=1e-5, abs=0)
    assert here.ledger.epsilon(1e-6) == 0 and not here.transcript.entries


def test_the_minimum_of_a_logistic_regression() -> None:
    population = load("logistic-regression:clients=3,points=50,dim=4", seed=1)
    x, y = population.train.x.double(), population.train.y
    assert y is not None and population.classes == 2 and population.network == "linear"
    here, ridge = simulate(population, block=3), 0.3

    def total(theta: Tensor) -> Tensor:
        signs = 2.0 * y - 1
        return torch.log1p(torch.exp(-signs * (x @ theta))).sum() + ridge / 2 * theta.square().sum()

    found = Optimum.find(here, 4, ridge)
    gradient = torch.func.grad(total)(found.theta)
    assert float(gradient.norm()) < 1e-9
    theta = found.theta + 0.1
    assert found.gap(theta, here) == pytest.approx(float(total(theta) - total(found.theta)) / 3, rel=1e-9)
    # by local steps, FedSplit ends there
    local = LocalSGD(steps=8, batch=None, lr=0.05, weight_decay=0.1)
    method = Splitting(Model(build("linear", (4,), 2)), *FEDSPLIT, cohort=1.0, losses="sum", eta=0.1, local=local)
    assert found.gap(train(method, here, 40).theta, here) < 1e-6


SMALL: dict[str, Any] = {"data": "least-squares:clients=4,points=30,dim=3", "unseen": 0, "seed": 1, "block": 4}


def test_a_run_tells_its_gap_and_goes_on_after_a_crash(tmp_path: Path) -> None:
    wanted = {"eta": 1.0, "anderson": {"memory": 2, "over": "gram"}, "warm": "last", "solver": "local"}
    settings = {**SMALL, "cohort": 3, "eval_every": 5, "checkpoint_every": 4, "rounds": 10, "hyperparameters": wanted}
    run("fedpi", **settings, out=tmp_path / "whole")
    with pytest.raises(Crash):
        run("fedpi", **settings, out=tmp_path / "broken", watcher=At(6, crash))
    resume(tmp_path / "broken")
    assert timeless(tmp_path / "broken") == timeless(tmp_path / "whole")
    lines = metrics(tmp_path / "whole")
    first, last = (line for line in lines if "gap" in line)
    assert first["gap"] > last["gap"] > 0 and last["heterogeneity"] > 0
    assert any(line.get("accelerated") for line in lines)


def test_a_diverging_run_ends_with_the_reason() -> None:
    wanted = {"losses": "sum", "step": "gradient", "local": {"batch": "none", "lr": 1.0}}
    with pytest.raises(UserError, match=r"training diverged in round \d+.*η·λ_max = 1 · .* a rate below 0\.0"):
        run("splitting", **SMALL, rounds=300, hyperparameters=wanted)
    wanted = {"local": {"batch": "none", "lr": 10.0}}
    with pytest.raises(UserError, match="η·λ_max = 10 · "):
        run("fedavg", **SMALL, rounds=600, hyperparameters=wanted)


class Notes(Watcher):
    """What a run says beside its rounds, and its losses."""

    def __init__(self) -> None:
        self.said: list[str] = []
        self.losses: list[float] = []

    def round(self, record: Mapping[str, Any]) -> None:
        self.losses.append(record["loss"])

    def note(self, text: str) -> None:
        self.said.append(text)


def test_a_sum_of_losses_may_be_large_and_only_one_that_rises_runs_away() -> None:
    large: dict[str, Any] = {**SMALL, "data": "least-squares:clients=2,points=4000,dim=3,noise=4"}
    for lr, away in ((1e-5, False), (1e-3, True)):
        notes, wanted = Notes(), {"losses": "sum", "step": "gradient", "local": {"batch": "none", "lr": lr}}
        run("splitting", **large, rounds=3, hyperparameters=wanted, watcher=notes)
        assert min(notes.losses) > 1e4 and any("runs away" in one for one in notes.said) == away


# Nonsense


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"eta": 0.0}, "eta=0.0; expected a step size above 0"),
        ({"eta": math.nan}, "eta=nan; expected a step size above 0"),
        ({"eta": 1.0, "mu": 1.0}, "two names for one number"),
        ({"mu": -1.0}, "mu=-1.0; expected 0 or more"),
        ({"alpha": 0.0}, "alpha=0.0; expected above 0 and at most 2"),
        ({"beta": 2.1}, "beta=2.1; expected above 0 and at most 2"),
        ({"gamma": 1.1}, "gamma=1.1; expected above 0 and at most 1"),
        ({"solver": "exact"}, "use the model `linear` on numeric targets, or solver='local'"),
        ({"step": "gradient", "eta": 1.0}, "its step size is local.lr"),
        ({"server": ServerOptimizer("adam")}, "goes with absentees='left-out'"),
        ({"secure": True}, "set clip="),
        ({"beta": 2.0, "anderson": Anderson(2, "gram"), "clip": 1.0, "secure": True}, "use 'mean'"),
        ({"local": LocalSGD(private=PointPrivacy(1.0, 1.0)), "losses": "sum"}, "set both"),
    ],
)
def test_nonsense_is_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Splitting(linear(), **fields)


def test_a_memory_longer_than_the_run_is_refused() -> None:
    with pytest.raises(UserError, match=r"rounds = 3, .*accelerated before round 7; use more rounds or less memory"):
        run("fedsplit", **SMALL, rounds=3, hyperparameters={"anderson": {"memory": 5}})
    with pytest.raises(ValueError, match="memory=-1"):
        Anderson(-1)


def test_an_empty_private_cohort_is_not_told_by_a_model_that_stands_still() -> None:
    random = torch.Generator().manual_seed(0)
    x = torch.randn(60, 4, generator=random)
    clients = Clients.from_sizes(x, x.sum(1), torch.tensor([10] * 6))
    method = Splitting(Model(build("linear", (4,), 1)), 2, 2, 1, cohort=0.02, clip=0.1, noise=Gaussian(1.0))
    federation = simulate(clients)
    state = method.start(0)
    for _ in range(4):  # nobody is drawn in most of them
        after = train(method, federation, 1, state)
        assert not torch.equal(after.theta, state.theta)
        state = after
