"""Synthetic federations whose truth is known. True parameters of the clients are in ``per_client``."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.random import Generator, default_rng

from unalike.data.source import Array, DataError, Source

_SEED = 7000  # apart from the generators that divide the data


def gaussian_mixture(
    seed: int,
    clients: int = 100,
    points: int = 1000,
    dim: int = 100,
    components: int = 10,
    variance: float = 0.5,
    missing: int = 0,
) -> Source:
    """Points of a mixture of Gaussians, the same for every client (T1 D.7.1).

    The means μ_j are uniform in [0, 1]^d, the covariances ``variance``·I, the weights equal. The server has 20 points
    of each component and 100 that are uniform in [0, 1]^d. Labels are the components, for scoring only. With
    ``missing`` the server has none of so many components (D.8.2).
    """
    if not 0 <= missing <= components:
        raise DataError(f"gaussian-mixture: missing must be 0 to {components}, the components, got {missing}")
    rng = default_rng([seed, _SEED])
    means = rng.uniform(size=(components, dim)).astype(np.float32)
    y = rng.integers(components, size=clients * points)
    x = rng.standard_normal((clients * points, dim), dtype=np.float32)
    x *= np.float32(np.sqrt(variance))
    x += means[y]
    known = np.repeat(np.arange(components), 20)
    server = means[known] + np.sqrt(variance) * rng.standard_normal((len(known), dim))
    server = server[20 * missing :]  # drawn nevertheless, so that all the rest is as it is without missing ones
    server = np.concatenate([server, rng.uniform(size=(100, dim))]).astype(np.float32)
    return _whole("gaussian-mixture", x, clients, y=y, classes=components, shared={"server": server, "means": means})


def least_squares(
    seed: int, clients: int = 25, points: int = 5000, dim: int = 100, noise: float = 0.25, spread: float = 0.0
) -> Source:
    """Linear regression b = Aθ + v with standard normal A, θ ~ N(0, I) and v ~ N(0, ``noise``²).

    From Malekmohammadi (thesis, ch. 2), where losses are sums, f_i(θ) = ½‖A_iθ − b_i‖². Its small, moderate and large
    heterogeneity (H of 1.19e5, 7.61e6 and 1.903e8, with doubled gradients) are ``noise`` = 0.25, 2 and 10.
    With ``spread`` s client i has a truth of its own, θ_i = θ + s·N(0, I).
    """
    rng = default_rng([seed, _SEED])
    theta = rng.standard_normal(dim) + spread * rng.standard_normal((clients, dim))
    x, exact = _design(rng, theta, points)
    return _regression("least-squares", rng, x, exact, theta, noise, network="linear")


def logistic_regression(
    seed: int, clients: int = 10, points: int = 1000, dim: int = 100, spread: float = 0.0
) -> Source:
    """Two classes with P(y = 1) = 1/(1 + exp(−⟨a, θ⟩)), standard normal a and θ ~ N(0, I).

    From Malekmohammadi (thesis, ch. 2), where losses are sums of log(1 + exp(∓⟨a, θ⟩)), with the ridge ‖θ‖²/2mn at each
    client: ``local.weight_decay`` = 1e-4 at the default size.
    With ``spread`` s client i has a truth of its own, θ_i = θ + s·N(0, I).
    """
    rng = default_rng([seed, _SEED])
    theta = rng.standard_normal(dim) + spread * rng.standard_normal((clients, dim))
    x, exact = _design(rng, theta, points)
    return _regression("logistic-regression", rng, x, exact, theta, None, network="linear")


def _design(rng: Generator, theta: Array, points: int, variance: float = 1.0) -> tuple[Array, Array]:
    """Normal inputs, ``points`` for each client, and what its θ makes of them."""
    clients, dim = theta.shape
    x = rng.standard_normal((clients * points, dim), dtype=np.float32)
    x *= np.float32(np.sqrt(variance))
    return x, np.einsum("cnd,cd->cn", x.reshape(clients, points, dim), theta).reshape(-1)


def _regression(
    name: str, rng: Generator, x: Array, exact: Array, theta: Array, noise: float | None, **more: Any
) -> Source:
    """Targets with normal noise of this deviation, or (None) classes 0 and 1 by the logistic function."""
    own = {"theta": theta.astype(np.float32), **more.pop("per_client", {})}
    if noise is None:
        y, classes = (rng.logistic(size=len(x)) < exact).astype(np.int64), 2
    else:
        y, classes = (exact + noise * rng.standard_normal(len(x))).astype(np.float32), None
    return _whole(name, x, len(theta), y=y, classes=classes, per_client=own, **more)


def linear_prior(
    seed: int,
    clients: int = 10_000,
    points: int = 10,
    dim: int = 50,
    prior: float = 0.01,
    noise: float = 0.05,
    design: float = 0.05,
    center: float = 0.1,
    components: int = 1,
    response: str = "linear",
) -> Source:
    """Linear regression with a Gaussian prior (P3 §4.1): θ_i ~ N(μ, ``prior``·I), μ_k ~ N(0, ``center``²).

    Inputs are N(0, ``design``) and the observation noise N(0, ``noise``); the three are variances. With several
    ``components`` each client takes one of as many μ. ``response`` "logistic" draws classes 0 and 1 in place of y.
    """
    if response not in ("linear", "logistic") or components < 1:
        raise DataError(
            f"linear-prior: expected response 'linear' or 'logistic' and components from 1 on, got {response!r}, "
            f"{components}"
        )
    rng = default_rng([seed, _SEED])
    mu = center * rng.standard_normal((components, dim))
    component = rng.integers(components, size=clients) if components > 1 else np.zeros(clients, dtype=np.int64)
    theta = mu[component] + np.sqrt(prior) * rng.standard_normal((clients, dim))
    x, exact = _design(rng, theta, points, design)
    known = {"per_client": {"component": component}, "shared": {"mu": (mu[0] if components == 1 else mu).astype("f4")}}
    deviation = None if response == "logistic" else float(np.sqrt(noise))
    return _regression("linear-prior", rng, x, exact, theta, deviation, **known)


def gaussian_means(
    seed: int,
    clients: int = 10_000,
    points: int = 15,
    dim: int = 1,
    sigma_theta: float = 0.1,
    sigma_x: float = 0.5,
    candidates: int = 0,
) -> Source:
    """Estimation of personal means (P3 §2.1): θ_i ~ N(0, σ_θ²·I) and samples N(θ_i, σ_x²·I).

    With ``candidates`` (§2.3) so many vectors are drawn from N(0, σ_θ²·I), and each client takes one of them.
    """
    rng = default_rng([seed, _SEED])
    theta = (sigma_theta * rng.standard_normal((candidates or clients, dim))).astype(np.float32)
    if candidates:
        theta = theta[rng.integers(candidates, size=clients)]
    x = np.repeat(theta, points, axis=0)
    x += np.float32(sigma_x) * rng.standard_normal(x.shape, dtype=np.float32)
    return _whole("gaussian-means", x, clients, per_client={"theta": theta})


def bernoulli(
    seed: int,
    prior: str = "normal",
    clients: int = 10_000,
    points: int = 14,
    alpha: float = 2.0,
    beta: float = 5.0,
    deviation: float = 1 / 6,
) -> Source:
    """Coins of different bias (P3 §4): p_i from ``prior`` = normal, uniform, 3-spike or beta, ``points`` throws each.

    ``normal`` is N(1/2, ``deviation``²) drawn again until it lies in [0, 1], ``3-spike`` is 1/4, 1/2 or 3/4, ``beta``
    is Beta(``alpha``, ``beta``). The paper does not state the deviation nor the Beta parameters; the defaults give the
    gains it reports.
    """
    rng = default_rng([seed, _SEED])
    if prior == "uniform":
        p = rng.uniform(size=clients)
    elif prior == "3-spike":
        p = rng.choice([0.25, 0.5, 0.75], size=clients)
    elif prior == "beta":
        p = rng.beta(alpha, beta, size=clients)
    elif prior == "normal":
        p = rng.normal(0.5, deviation, size=clients)
        while (outside := np.flatnonzero((p < 0) | (p > 1))).size:
            p[outside] = rng.normal(0.5, deviation, size=len(outside))
    else:
        raise DataError(f"bernoulli: prior must be 'normal', 'uniform', '3-spike' or 'beta', got {prior!r}")
    x = (rng.uniform(size=(clients, points)) < p[:, None]).astype(np.float32).reshape(-1, 1)
    return _whole("bernoulli", x, clients, per_client={"p": p.astype(np.float32)})


_MEDIUM = [0.1, 0.2, 0.6, 1.0, 2.0, 0.1, 1.0, 2.0, 0.5, 0.5]
_HIGH = [0.1, 0.2, 0.15, 0.18, 0.1, 0.05, 0.08, 0.4, 0.2, 0.12]
_MEDIUM_2 = [2.5, 2.6, 2.7, 2.8, 3.0, 2.5, 2.0, 3.0, 1.0, 0.9]
_HIGH_2 = [2.5, 2.6, 2.0, 3.2, 1.5, 0.9, 0.8, 1.3, 3.1, 2.4]
# T1 Table A.1: τ and A. The table prints only two of the three rows of low-3; the third here is that of low-1.
MDM_SETTINGS: dict[str, tuple[list[float], list[list[float]]]] = {
    "low-1": ([1.0], [[1.0] * 10]),
    "low-2": ([0.5, 0.5], [[0.5] * 10, [2.5] * 10]),
    "low-3": ([0.333, 0.334, 0.333], [[2.5] * 10, [0.5] * 10, [1.0] * 10]),
    "medium-1": ([1.0], [_MEDIUM]),
    "medium-2": ([0.4, 0.6], [_MEDIUM, _MEDIUM_2]),
    "medium-3": ([0.5, 0.2, 0.3], [[5.0, 4.0, 5.0, 1.0, 1.0, 1.0, 5.0, 4.0, 5.0, 1.0], _MEDIUM, _MEDIUM_2]),
    "high-1": ([1.0], [_HIGH]),
    "high-2": ([0.1, 0.9], [_HIGH, _HIGH_2]),
    "high-3": ([0.8, 0.05, 0.15], [[5.0, 5.0, 0.2, 0.2, 3.1, 3.0, 3.2, 0.8, 0.9, 5.0], _HIGH, _HIGH_2]),
    # T1 A.1.2, where the number of components is to be found
    "selection": ([0.2, 0.5, 0.3], [[0.1, 0.2, 0.1, 0.3, 0.1], [1.0, 4.0, 1.0, 2.0, 0.5], [10.0, 5.0, 3.0, 2.0, 30.0]]),
}


def mdm(seed: int, setting: str = "low-1", clients: int = 20_000, points: int = 100) -> Source:
    """Label histograms from a mixture of Dirichlet-multinomials (T1 ch. 3), by a setting of Table A.1.

    A sample is only its label (``x`` repeats it). τ and A are in ``shared``, each client's component in ``per_client``.
    """
    if setting not in MDM_SETTINGS:
        raise DataError(f"mdm: setting must be one of {', '.join(MDM_SETTINGS)}, got {setting!r}")
    rng = default_rng([seed, _SEED])
    tau, A = (np.array(value) for value in MDM_SETTINGS[setting])
    component = rng.choice(len(tau), size=clients, p=tau)
    gamma = rng.standard_gamma(A[component])
    upper = np.cumsum(gamma, axis=1) / gamma.sum(axis=1, keepdims=True)
    drawn = rng.uniform(size=(clients, points))
    labels = np.zeros((clients, points), dtype=np.int64)
    for category in range(A.shape[1] - 1):
        labels += drawn >= upper[:, category, None]
    y, shared = labels.reshape(-1), {"tau": tau.astype(np.float32), "A": A.astype(np.float32)}
    own = {"per_client": {"component": component}, "shared": shared}
    return _whole(f"mdm:{setting}", y.astype(np.uint8)[:, None], clients, y=y, classes=A.shape[1], **own)


def _whole(name: str, x: Array, clients: int, **more: Any) -> Source:
    """A source of equally large clients, unscaled, and by default without test rows and unseen clients."""
    client = np.repeat(np.arange(clients), len(x) // clients)
    return Source(name, "features", x, client=client, normalize="none", whole=True, **more)
