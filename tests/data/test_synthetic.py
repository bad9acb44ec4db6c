from __future__ import annotations

import numpy as np
import pytest
import torch

from unalike.data import DataError, load
from unalike.data.sources.synthetic import MDM_SETTINGS


def test_gaussian_mixture() -> None:
    population = load("gaussian-mixture", seed=1)
    assert len(population) == 100 and population.input_shape == (100,) and population.sizes.unique().tolist() == [1000]
    assert len(population.unseen) == 0 and population.train.shift is None
    means, server = population.shared["means"], population.shared["server"]
    assert server.shape == (300, 100) and server[200:].min() >= 0 and server[200:].max() <= 1
    labels = population.train.y
    assert labels is not None
    cost = (population.train.x - means[labels]).square().sum(1).mean()
    assert float(cost) == pytest.approx(50, rel=2e-3), "d · variance"
    assert float((server[:200] - means.repeat_interleave(20, 0)).square().sum(1).mean()) == pytest.approx(50, rel=0.05)


@pytest.mark.parametrize(("noise", "expected"), [(0.25, 1.19e5), (2.0, 7.61e6), (10.0, 1.903e8)])
def test_least_squares_has_the_heterogeneity_of_the_thesis(noise: float, expected: float) -> None:
    population = load(f"least-squares:noise={noise}")
    assert population.train.y is not None and population.classes is None
    A = population.train.x.reshape(25, 5000, 100).double()
    b = population.train.y.reshape(25, 5000, 1).double()
    gram, moment = A.transpose(1, 2) @ A, A.transpose(1, 2) @ b
    optimum = torch.linalg.solve(gram.sum(0), moment.sum(0))
    H = (2 * (gram @ optimum - moment)).square().sum((1, 2)).mean()  # of ‖Aθ − b‖², as in the captions
    assert float(H) == pytest.approx(expected, rel=0.05)


def test_linear_prior() -> None:
    population = load("linear-prior")
    theta, mu = population.per_client["theta"], population.shared["mu"]
    assert len(population) == 10_000 and theta.shape == (10_000, 50)
    assert float((theta - mu).var()) == pytest.approx(0.01, rel=0.02)
    assert float(population.train.x.var()) == pytest.approx(0.05, rel=0.02)
    assert population.train.y is not None
    residual = population.train.y.reshape(10_000, 10) - torch.einsum(
        "cnd,cd->cn", population.train.x.reshape(10_000, 10, 50), theta
    )
    assert float(residual.var()) == pytest.approx(0.05, rel=0.02)


@pytest.mark.parametrize(
    ("prior", "gain", "margin"),
    [("normal", 37.1, 3.9), ("uniform", 12.0, 1.6), ("3-spike", 24.3, 2.8), ("beta", 34.0, 3.7)],
)
def test_bernoulli_priors_give_the_gains_of_the_paper(prior: str, gain: float, margin: float) -> None:
    """P3 §4: shrinking to the population mean with the weight n / (μ(1−μ)/σ² + n) beats the local average."""
    population = load(f"bernoulli:{prior}")
    p = population.per_client["p"].double()
    local = population.train.x.reshape(10_000, 14).double().mean(1)
    mu = local.mean()
    variance = local.var() - mu * (1 - mu) / 14  # the population's part
    variance = variance / (1 - 1 / 14)
    weight = 14 / (mu * (1 - mu) / variance - 1 + 14)
    shrunk = weight * local + (1 - weight) * mu
    measured = 100 * (1 - (shrunk - p).square().mean() / (local - p).square().mean())
    assert float(measured) == pytest.approx(gain, abs=margin)


def test_gaussian_means() -> None:
    population = load("gaussian-means:dim=3")
    theta = population.per_client["theta"]
    assert population.input_shape == (3,) and float(theta.std()) == pytest.approx(0.1, rel=0.02)
    spread = population.train.x.reshape(10_000, 15, 3) - theta[:, None]
    assert float(spread.std()) == pytest.approx(0.5, rel=0.02)


@pytest.mark.parametrize("setting", sorted(MDM_SETTINGS))
def test_mdm_histograms_have_the_right_moments(setting: str) -> None:
    population = load(f"mdm:{setting},clients=6000")
    counts = population.histogram().double()
    assert counts.sum(1).unique().tolist() == [100]
    tau, A = population.shared["tau"].double(), population.shared["A"].double()
    component = population.per_client["component"]
    assert torch.bincount(component, minlength=len(tau)).double().div(6000).numpy() == pytest.approx(
        tau.numpy(), abs=0.02
    )
    for k in range(len(tau)):
        mine = counts[component == k] / 100
        mean = A[k] / A[k].sum()
        factor = (1 + (100 - 1) / (1 + A[k].sum())) / 100  # of a Dirichlet-multinomial with 100 draws
        assert mine.mean(0).numpy() == pytest.approx(mean.numpy(), abs=0.05)
        assert float(mine.var(0).sum()) == pytest.approx(float((mean * (1 - mean) * factor).sum()), rel=0.2)


def test_the_seed_decides() -> None:
    a, b, c = (load("bernoulli:beta", seed=seed) for seed in (4, 4, 5))
    assert torch.equal(a.train.x, b.train.x) and not torch.equal(a.train.x, c.train.x)


def test_unknown_settings() -> None:
    with pytest.raises(DataError, match=r"setting must be one of low-1, .*, got 'low-4'"):
        load("mdm:low-4")
    with pytest.raises(DataError, match=r"prior must be 'normal', 'uniform', '3-spike' or 'beta', got 'cauchy'"):
        load("bernoulli:cauchy")
    assert np.allclose([sum(tau) for tau, _ in MDM_SETTINGS.values()], 1)
