"""Learned priors against densities of torch.distributions, a step by autograd, and the sums by hand."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributions import Categorical, Independent, Laplace, MixtureSameFamily, Normal

from unalike import simulate, train
from unalike.core.client import Clients
from unalike.core.model import Model
from unalike.learn.local import LocalSGD
from unalike.methods.prior import LearnedPrior
from unalike.networks.architectures import build
from unalike.runs.simulate import gather_models

SIZES = [8, 12, 5, 9]
STEP = LocalSGD(steps=1, batch=None, lr=0.05)


def clients_of(sizes: list[int] = SIZES) -> Clients:
    random = torch.Generator().manual_seed(0)
    x = torch.randn(sum(sizes), 6, generator=random)
    return Clients.from_sizes(x, torch.randint(3, (sum(sizes),), generator=random), torch.tensor(sizes))


def made(prior: str, **more: Any) -> LearnedPrior:
    model = Model(build("mlp", (6,), 3, hidden=(4,)))
    return LearnedPrior(model, cohort=4, local=STEP, prior=prior, scale=0.5, **more)  # type: ignore[arg-type]


def density(prior: str, weights: Tensor, centers: Tensor, scale: Tensor) -> Any:
    if prior == "laplace":
        return Independent(Laplace(centers[0], scale[0]), 1)
    parts = Independent(Normal(centers, scale[:, None].expand_as(centers)), 1)
    return MixtureSameFamily(Categorical(weights), parts)


@pytest.mark.parametrize("prior", ["gaussian", "laplace", "mixture"])
def test_a_step_descends_the_loss_and_the_priors_density(prior: str) -> None:
    method, clients = made(prior, strength=2.0), clients_of()
    state = method.start(0)
    if prior == "mixture":
        state = state.replace(weights=torch.tensor([0.3, 0.7]), scale=torch.tensor([0.4, 0.6]))
        state = state.replace(centers=state.centers + torch.tensor([[0.2], [-0.1]]))
    begin = state.weights @ state.centers
    federation = simulate(clients)
    train(method, federation, 1, state)
    cohort = federation.everyone()
    found = gather_models(cohort, method.personalize(state.replace(ids=cohort.ids), cohort))
    law = density(prior, state.weights, state.centers, state.scale)
    for i, size in enumerate(SIZES):
        x, y = clients.rows(i)
        theta = begin.clone().requires_grad_()
        loss = F.cross_entropy(method.model(theta, x), y) - 2.0 * law.log_prob(theta) / size
        (gradient,) = torch.autograd.grad(loss, theta)
        torch.testing.assert_close(found[i], begin - 0.05 * gradient, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("prior", ["gaussian", "laplace", "mixture"])
def test_the_loss_that_is_shown_is_that_of_the_data_and_of_the_priors_density(prior: str) -> None:
    method, clients = replace(made(prior, strength=2.0), scale=0.3), clients_of()  # ln 2b is not 0
    state, federation = method.start(0), simulate(clients)
    begin = state.weights @ state.centers
    train(method, federation, 1, state)
    law, shown = density(prior, state.weights, state.centers, state.scale), torch.zeros(())
    for i, size in enumerate(SIZES):
        x, y = clients.rows(i)
        shown = shown + (F.cross_entropy(method.model(begin, x), y) - 2.0 * law.log_prob(begin) / size) / len(SIZES)
    assert float(federation.metrics["loss"]) == pytest.approx(float(shown), rel=1e-4)


@pytest.mark.parametrize("prior", ["gaussian", "laplace", "mixture"])
def test_a_narrow_prior_and_few_rows_do_not_throw_models_away(prior: str) -> None:
    """With σ = 0.01, 5 rows and a rate of 0.1 the penalty's gradient step is 200 times too long."""
    local = LocalSGD(steps=20, batch=None, lr=0.1)
    method, clients = replace(made(prior), local=local, scale=0.01), clients_of()
    state, federation = method.start(0), simulate(clients)
    state = train(method, federation, 3, state)
    models = gather_models(federation.everyone(), method.personalize(state, federation.everyone()))
    assert bool(torch.isfinite(models).all())
    assert float((models - state.weights @ state.centers).abs().max()) < 0.2
    assert float((state.centers - method.first).abs().max()) < 0.5


def test_the_next_mixture_is_that_of_em() -> None:
    method = made("mixture")
    random = torch.Generator().manual_seed(1)
    d = method.model.size
    gamma = {
        "weights": torch.tensor([0.5, 0.5]),
        "centers": torch.randn(2, d, generator=random),
        "scale": torch.tensor([1.0, 1.5]),
    }
    models = gamma["centers"][torch.tensor([0, 1, 1, 0, 1])] + 0.8 * torch.randn(5, d, generator=random)
    shares = torch.stack([method.share(theta, **gamma) for theta in models]).mean(0)
    found = method.next_prior(shares, **gamma)
    law = density("mixture", **gamma)
    likely = torch.stack([law.component_distribution.log_prob(theta) + gamma["weights"].log() for theta in models])
    belongs = torch.softmax(likely, 1)
    centers = (belongs.T @ models) / belongs.sum(0)[:, None]
    torch.testing.assert_close(found["weights"], belongs.mean(0))
    torch.testing.assert_close(found["centers"], centers, rtol=1e-4, atol=1e-5)
    squares = (models[:, None] - centers).square().mean(2)
    torch.testing.assert_close(
        found["scale"], ((belongs * squares).sum(0) / belongs.sum(0)).sqrt(), rtol=1e-3, atol=1e-4
    )


def test_a_laplace_prior_comes_to_rest_at_the_median() -> None:
    method = made("laplace", floor=1e-4)
    models = torch.tensor([-3.0, 0.1, 0.2, 0.3, 9.0])[:, None].expand(-1, method.model.size)
    gamma = {"weights": torch.ones(1), "centers": torch.zeros(1, method.model.size), "scale": torch.tensor([0.2])}
    for _ in range(200):
        mean = torch.stack([method.share(theta, **gamma) for theta in models]).mean(0)
        gamma = {**method.next_prior(mean, **gamma), "scale": 0.95 * gamma["scale"]}
    torch.testing.assert_close(gamma["centers"], torch.full_like(gamma["centers"], 0.2), atol=0.05, rtol=0)
    b = method.next_prior(torch.stack([method.share(theta, **gamma) for theta in models]).mean(0), **gamma)["scale"]
    assert float(b) == pytest.approx((3.2 + 0.1 + 0.0 + 0.1 + 8.8) / 5, abs=0.1)


def test_only_sums_leave_the_clients_and_what_makes_no_sense_is_refused() -> None:
    method = made("mixture")
    federation = simulate(clients_of())
    train(method, federation, 1)
    assert {row["seen_as"] for row in federation.transcript.rows()} == {"mean"}
    wrong = {"prior": "cauchy", "components": 0, "scale": 0.0, "floor": -1.0, "strength": 0.0}
    for field, value in wrong.items():
        given: Any = {field: value}
        with pytest.raises(ValueError, match=f"{field}="):
            LearnedPrior(method.model, **given)
