"""AdaPeD, QuPeD and FML against steps written out for a linear model, and against each other where they coincide."""

from __future__ import annotations

import functools
import math
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.core.helpers import clients, linear
from unalike import Clients, Federation, LocalSGD, Model, State, simulate, train
from unalike.core.method import Method
from unalike.learn.schedules import Schedule
from unalike.methods.adaped import AdaPeD, theorem_7_epsilon
from unalike.methods.fedavg import FedAvg
from unalike.methods.fml import FML
from unalike.methods.local import Local
from unalike.methods.quped import QuPeD
from unalike.privacy import Budget, Gaussian
from unalike.runs.simulate import gather_models

MODEL = linear()
SIZES = [6, 4, 9]
WHOLE = LocalSGD(steps=3, batch=None, lr=0.5, weight_decay=0.01)
DRAWN = LocalSGD(steps=4, batch=3, lr=0.3)


def models(method: Method, federation: Federation, state: State) -> Tensor:
    """Every client's personal model [C, d]."""
    with federation.aside() as aside:
        cohort = aside.everyone()
        return gather_models(cohort, method.personalize(state, cohort))


def trained(method: Method, sizes: list[int] = SIZES, rounds: int = 3) -> tuple[State, Tensor]:
    federation = simulate(clients(sizes), seed=1)
    state = train(method, federation, rounds)
    return state, models(method, federation, state)


def log_p(flat: Tensor, x: Tensor) -> Tensor:
    """[B, 2] the linear model's log-probabilities."""
    return torch.log_softmax(x @ flat[:6].reshape(2, 3).T + flat[6:], -1)


def from_outputs(g: Tensor, x: Tensor) -> Tensor:
    """The gradient of the flat parameters, from that of the outputs [B, 2], as a mean over the batch."""
    return torch.cat([(g.T @ x).reshape(-1), g.sum(0)]) / len(x)


def taught(theta: Tensor, mu: Tensor, psi: float, x: Tensor, y: Tensor, decay: float) -> Tensor:
    """The gradient of f + KD/2ψ at θ."""
    own, other = log_p(theta, x).exp(), log_p(mu, x).exp()
    g = own - torch.nn.functional.one_hot(y, 2) + (own - other) / (2 * psi)
    return from_outputs(g, x) + decay * theta


def step(
    theta: Tensor, mu: Tensor, psi: float, x: Tensor, y: Tensor, lr: float, psi_lr: float = 2.0
) -> tuple[Tensor, Tensor, float]:
    """Alg. 5, lines 10 to 15, with the floor of ψ and weight decay."""
    theta = theta - lr * taught(theta, mu, psi, x, y, 0.01)
    log_mu, log_theta = log_p(mu, x), log_p(theta, x)
    kl = (log_mu.exp() * (log_mu - log_theta)).sum(-1, keepdim=True)
    h = from_outputs(log_mu.exp() * (log_mu - log_theta - kl), x) / (2 * psi)
    mu = mu - lr * (h + 0.01 * mu)
    log_mu = log_p(mu, x)
    kd = float((log_mu.exp() * (log_mu - log_theta)).sum(-1).mean())
    return theta, mu, max(0.5, psi - psi_lr * (1 / (2 * psi) - kd / (2 * psi**2)))


def test_two_rounds_equal_algorithm_5_written_out() -> None:
    method = AdaPeD(MODEL, 1.0, WHOLE, psi_lr=2.0, psi=1.5)
    state, found = trained(method, rounds=2)
    store = clients(SIZES)
    theta, mu, psi = [method.first] * 3, method.first, 1.5
    seen = []
    for _ in range(2):
        ends = []
        for i in range(3):
            x, y = store.rows(i)
            assert y is not None
            now = theta[i], mu, psi
            for _ in range(3):
                now = step(*now, x, y, 0.5)
                seen.append(now[2])
            theta[i] = now[0]
            ends.append(now[1:])
        mu, psi = torch.stack([end[0] for end in ends]).mean(0), sum(end[1] for end in ends) / 3
    assert min(seen) == 0.5 < max(seen)  # the floor was reached, and not by everybody at once
    torch.testing.assert_close(found, torch.stack(theta))
    torch.testing.assert_close(state.mu, mu)
    assert float(state.psi) == pytest.approx(psi, abs=1e-5)


@pytest.mark.parametrize("most", [None, 2, 0])
def test_clients_that_are_not_sampled_go_on_with_what_they_received(most: int | None) -> None:
    """Alg. 6 written out, at rates that fall in every round; a client that was never sampled has the first μ and ψ.

    With a limit they stop after so many rounds in succession, until they are sampled again (§6.2.2).
    """
    sizes, rounds = [6, 4, 9, 5, 7], 7
    method = AdaPeD(
        MODEL, 1, WHOLE, psi=1.5, psi_lr=2.0, train_unsampled=True, most_rounds_alone=most,
        schedule=Schedule("exponential", 0.8, 1),
    )  # fmt: skip
    federation = simulate(clients(sizes), seed=1)
    state = train(method, federation, rounds)
    mu, psi = method.first, 1.5
    theta, received, alone = [mu] * 5, [(mu, psi)] * 5, [0] * 5
    drawn = [
        int(simulate(clients(sizes), seed=1, round=number).sample(1, labeled=True).ids)
        for number in range(1, rounds + 1)
    ]
    assert len(set(drawn)) < len(drawn), "somebody is sampled again"
    for number, sampled in enumerate(drawn):
        common, rate = (mu, psi), 0.8**number
        for i in range(5):
            x, y = clients(sizes).rows(i)
            assert y is not None
            if i == sampled:
                received[i], alone[i] = common, 0
                now = theta[i], *common
                for _ in range(3):
                    now = step(*now, x, y, 0.5 * rate, 2.0 * rate)
                theta[i], mu, psi = now
            elif most is None or alone[i] < most:
                alone[i] += 1
                for _ in range(3):
                    theta[i] = theta[i] - 0.5 * rate * taught(theta[i], *received[i], x, y, 0.01)
    torch.testing.assert_close(state.mu, mu)
    torch.testing.assert_close(models(method, federation, state), torch.stack(theta))


def test_from_equal_models_the_first_step_is_plain_sgd() -> None:
    method = AdaPeD(MODEL, 1.0, replace(WHOLE, steps=1), psi=0.5)
    _, found = trained(method, rounds=1)
    _, alone = trained(Local(MODEL, replace(WHOLE, steps=1)), rounds=1)
    torch.testing.assert_close(found, alone, rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    "method",
    [
        AdaPeD(MODEL, 1.0, WHOLE, psi=1e12, psi_lr=0.0),
        QuPeD(MODEL, 1.0, WHOLE, weight=0.0),
        FML(MODEL, 1.0, WHOLE, 1.0),
    ],
    ids=["AdaPeD, ψ = ∞", "QuPeD, λp = 0", "FML, α = 1"],
)
def test_without_distillation_clients_are_alone(method: Method) -> None:
    _, found = trained(method)
    _, alone = trained(Local(MODEL, WHOLE))
    torch.testing.assert_close(found, alone)


def test_without_distance_psi_falls_to_its_floor_in_527_steps() -> None:
    """KD stays 0 where nothing moves but ψ."""
    method = AdaPeD(MODEL, 1.0, LocalSGD(steps=526, batch=1, lr=0.0))
    federation = simulate(clients([2]))
    state = train(method, federation, 1)
    assert float(state.psi) > 0.5005
    assert float(train(replace(method, local=LocalSGD(steps=1, batch=1, lr=0.0)), federation, 1, state).psi) == 0.5


def test_quped_is_adaped_with_a_frozen_psi() -> None:
    share = 0.25
    frozen = AdaPeD(
        MODEL, 2, replace(DRAWN, lr=0.3 * (1 - share)), psi=(1 - share) / (2 * share), psi_lr=0.0, newcomer_rounds=2
    )
    state, found = trained(frozen)
    other, same = trained(QuPeD(MODEL, 2, DRAWN, weight=share, newcomer_rounds=2))
    torch.testing.assert_close(other.w, state.mu)
    torch.testing.assert_close(same, found)
    assert not torch.equal(state.mu, frozen.first)


def test_fml_at_one_is_local_and_fedavg() -> None:
    state, found = trained(FML(MODEL, 1.0, WHOLE, alpha=1.0, beta=1.0))
    shared, _ = trained(FedAvg(MODEL, 1.0, WHOLE))
    first, other = FML(MODEL).first, FedAvg(MODEL).start(1).theta
    assert not torch.equal(first, other)  # FedAvg starts from the run's seed, so the rounds are repeated from there
    federation = simulate(clients(SIZES), seed=1)
    theta = train(FedAvg(MODEL, 1.0, WHOLE), federation, 3, state=FedAvg(MODEL).start(1).replace(theta=first)).theta
    torch.testing.assert_close(state.meme, theta)
    assert not torch.allclose(shared.theta, theta)
    torch.testing.assert_close(found, trained(Local(MODEL, WHOLE))[1])


def test_a_mutual_step_equals_its_formula() -> None:
    method = FML(MODEL, 1.0, LocalSGD(steps=1, batch=None, lr=0.5), alpha=0.25, beta=0.4)
    private, meme = method.first, MODEL.init(6)
    federation = simulate(clients([6]))
    replies = federation.everyone().ask(method.fit, meme=meme, rate=1.0)
    x, y = clients([6]).rows(0)
    assert y is not None
    target = torch.nn.functional.one_hot(y, 2)
    p, m = log_p(private, x).exp(), log_p(meme, x).exp()
    torch.testing.assert_close(replies["update"], -0.5 * from_outputs(0.4 * (m - target) + 0.6 * (m - p), x))
    after = private - 0.5 * from_outputs(0.25 * (p - target) + 0.75 * (p - m), x)
    torch.testing.assert_close(models(method, federation, method.start(0))[0], after)


# Newcomers


@pytest.mark.parametrize("make", [AdaPeD, QuPeD, FML])
def test_newcomers_start_from_the_common_model_and_get_it_without_labels(make: type) -> None:
    method = make(MODEL, 2, DRAWN, newcomer_rounds=2)
    store = clients([6, 4, 9, 5, 5])
    federation = simulate(store, seed=1, roster=store.roster().select(torch.arange(3)))
    state = train(method, federation, 2)
    common = next(iter(state.values()))
    with federation.aside(store.roster().select(torch.tensor([3, 4]))) as aside:
        cohort = aside.everyone()
        served = gather_models(cohort, method.personalize(state, cohort))
    assert not torch.allclose(served, common.expand(2, -1), atol=1e-3)
    still = make(MODEL, 2, replace(DRAWN, lr=0.0), newcomer_rounds=2)
    with federation.aside(store.roster().select(torch.tensor([3, 4]))) as aside:
        cohort = aside.everyone()
        torch.testing.assert_close(gather_models(cohort, still.personalize(state, cohort)), common.expand(2, -1))
    with federation.aside(store.roster().select(torch.tensor([3, 4])), labels=False) as aside:
        cohort = aside.everyone()
        assert torch.equal(gather_models(cohort, method.personalize(state, cohort)), common.expand(2, -1))


# Privacy

WIDE = Model(torch.nn.Linear(3, 800))


def wide(sizes: list[int]) -> Clients:
    return clients(sizes, classes=800)


@pytest.mark.parametrize("noisy_steps", [None, "apart", "together"])
def test_with_hardly_any_noise_and_room_a_private_round_is_an_open_one(noisy_steps: str | None) -> None:
    plain = replace(WHOLE, weight_decay=0.0, steps=1 if noisy_steps == "together" else 3)
    open_ = AdaPeD(MODEL, 1.0, plain, psi=1.5, psi_lr=0.0 if noisy_steps == "together" else 0.2)
    hidden = replace(open_, clip=50.0, psi_clip=50.0, noise=Gaussian(1e-7), noisy_steps=noisy_steps)
    federations = [simulate(clients(SIZES), seed=1, shards=shards) for shards in (1, 1, 3)]
    states = [train(m, f, 2) for m, f in zip((open_, hidden, hidden), federations, strict=True)]
    for state in states[1:]:
        torch.testing.assert_close(state.mu, states[0].mu, atol=2e-4, rtol=0)
        torch.testing.assert_close(state.psi, states[0].psi, atol=2e-3, rtol=0)


@pytest.mark.parametrize(("noisy_steps", "parts"), [("apart", 2), ("together", 1)])
def test_noisy_steps_release_a_fixed_total_of_noise_and_a_bounded_sum(noisy_steps: str, parts: int) -> None:
    z, tau, clip, rate = 0.8, 4, 0.01, 0.3
    local = LocalSGD(steps=tau, batch=None, lr=rate)
    method = AdaPeD(WIDE, 0.5, local, clip=clip, noise=Gaussian(z), noisy_steps=noisy_steps)  # type: ignore[arg-type]
    sizes = [2] * 12  # six clients a round are expected, more or fewer come
    state = train(method, simulate(wide(sizes), seed=2, budget=Budget(1e6, 1e-3)), 1)
    change = (state.mu - method.first) / (rate * clip)
    assert float(change.std()) == pytest.approx(z * tau * math.sqrt(parts) / 6, rel=0.05)
    noiseless = replace(method, noise=Gaussian(1e-9))
    federation = simulate(wide(sizes), seed=2)
    mean = federation.everyone().ask(noiseless.fit, mu=method.first, psi=torch.tensor(4.0), rate=1.0, jitter=1.0)
    assert 0 < float(mean["update"].norm()) <= tau * math.sqrt(parts)


def test_a_client_trains_with_its_share_of_the_noise_and_sends_the_rest() -> None:
    """σ = 0.5·C on ∇μ = (3, 4) with C = 2, with ones in the place of normal draws; the sum is in units of C."""
    method = AdaPeD(MODEL, clip=2.0, noise=Gaussian(1.0), noisy_steps="apart", psi_clip=4.0)
    ones = SimpleNamespace(noise=SimpleNamespace(normal=torch.ones))
    protect = functools.partial(method._protect, ones, torch.tensor(0.5))
    moved = {**protect(mu=torch.tensor([3.0, 4.0])), **protect(psi=torch.tensor(-2.0))}
    wanted = {"mu": [1.2 + 1, 1.6 + 1], "mu_sum": [0.6, 0.8], "psi": -2.0 + 2, "psi_sum": -0.5}
    for name, value in wanted.items():
        torch.testing.assert_close(moved[name], torch.tensor(value))


def test_noise_that_was_trained_with_can_be_undone_so_it_is_drawn_afresh() -> None:
    """Quadratic losses with ηλ = 1, K = 100 clients, τ = 10, σ = C/5: every step forgets the noise before it.

    Sent as it was trained with, the noise hides one client that pulls by C in every step with z = .2, not with the 2
    of Theorem 7. Drawn afresh, the same amount hides it with .63, which is what the ledger is told.
    """
    random = np.random.default_rng(0)
    tau, count, sigma, trials = 10, 100, 0.2, 4000
    place = np.zeros((trials, count - 1))
    for _ in range(tau):
        place -= np.clip(place, -1, 1) + sigma * random.standard_normal(place.shape)
    assert place.sum(1).std() / tau == pytest.approx(0.199, rel=0.04)
    method = AdaPeD(
        MODEL, count, LocalSGD(steps=tau), clip=1.0, noise=Gaussian(0.2 * 10 / math.sqrt(10)), noisy_steps="together"
    )
    federation = simulate(clients([1] * count), budget=Budget(1e6, 1e-3), round=1)
    assert method._shares(federation.sample(1.0, poisson=True))["jitter"] == pytest.approx(sigma)
    assert federation.metrics["theorem_7_epsilon"] == pytest.approx(theorem_7_epsilon(2.0, 1.0, 1, 1e-3), rel=1e-6)


def test_theorem_7_is_a_line_in_the_order() -> None:
    """ε(α) = ρα gives ρ + 2·√(ρ·ln 1/δ) by the classical conversion; Lemma 2's is a little below."""
    rho = 6 * 0.1**2 * 50 / 4.0**2
    classical = rho + 2 * math.sqrt(rho * math.log(1e5))
    assert 0.8 * classical < theorem_7_epsilon(4.0, 0.1, 50, 1e-5) < classical


@pytest.mark.parametrize("make", [AdaPeD, QuPeD, FML])
def test_a_private_run_costs_what_fedavg_costs_and_hides_its_cohorts(make: type) -> None:
    federations = [simulate(clients([3] * 20), seed=1) for _ in range(2)]
    state = train(make(MODEL, 0.25, DRAWN, clip=0.1, noise=Gaussian(1.1)), federations[0], 3)
    train(FedAvg(MODEL, 0.25, DRAWN, clip=0.1, noise=Gaussian(1.1)), federations[1], 3)
    assert federations[0].ledger.epsilon(1e-3) == federations[1].ledger.epsilon(1e-3) < math.inf
    assert len(state.ids) == 0


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"psi": 0.1}, "expected 0 < least_psi <= psi"),
        ({"noisy_steps": "apart"}, "set clip and Gaussian noise"),
        ({"noisy_steps": "apart", "clip": 1.0, "noise": Gaussian(1.0), "local": LocalSGD(epochs=1)}, "set local.steps"),
        ({"secure": True}, "set clip"),
        ({"noise": Gaussian(1.0)}, "set clip"),
        ({"mu_lr": -1.0}, "mu_lr=-1.0; expected 0 or more"),
    ],
)
def test_nonsense_is_refused(settings: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        AdaPeD(MODEL, **settings)  # type: ignore[arg-type]


def test_a_newcomer_trains_from_the_common_model_and_one_without_labels_has_it() -> None:
    """A training client keeps its model; a client with other ids starts from μ, though it has the same rows."""
    method = AdaPeD(MODEL, 1.0, replace(WHOLE, steps=2), newcomer_rounds=2)
    home = simulate(clients(SIZES))
    federation = type(home)(home.runtime, 0, home.roster.select([0, 1]))
    state = train(method, federation, 3)
    everyone = home.roster
    with federation.aside(everyone) as aside:
        found = gather_models(aside.everyone(), method.personalize(state, aside.everyone()))
    theta = state.mu
    x, y = clients(SIZES).rows(2)
    assert y is not None
    for _ in range(4):
        theta = theta - 0.5 * taught(theta, state.mu, float(state.psi), x, y, 0.01)
    torch.testing.assert_close(found[2], theta)
    assert float((found[0] - state.mu).norm()) > 1e-2, "a training client has its own"
    torch.testing.assert_close(
        found[:2], gather_models(federation.everyone(), method.personalize(state, federation.everyone()))
    )
    with federation.aside(everyone, labels=False) as hidden:
        unlabeled = gather_models(hidden.everyone(), method.personalize(state, hidden.everyone()))
    assert torch.equal(unlabeled[2], state.mu), "its labels are there, but it may not use them"
