"""A few rounds of each method, server and clients, written out in NumPy from its pseudocode, found by its name.

No default is left on: rates fall, the server has one of its own, clients have unequal sizes, two of three take part in
a round. Two more join after training, and have no part in it; then once more, without their labels.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import MISSING, fields, replace
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.core.helpers import population
from tests.methods import written
from tests.methods.small import CLASSES, FEATURES, MODEL, PROBLEM, RATES, assert_equal, clients_of, rows_of
from tests.methods.written import Array
from unalike import LocalSGD, simulate, train
from unalike.core.federation import Cohort, Federation
from unalike.core.method import State
from unalike.learn.schedules import Schedule
from unalike.learn.server import ServerOptimizer
from unalike.methods import METHODS
from unalike.runs.recipe.hyperparameters import Hyperparameters
from unalike.runs.simulate import gather_models

STORE = clients_of((5, 9, 7, 4, 6))  # the last two come after training
ROWS = rows_of(STORE)
SEEN, ALL = range(3), range(5)
ROUNDS = 3
ETA, LR, STEPS = 0.4, 0.6, 2
LOCAL = LocalSGD(steps=STEPS, batch=None, lr=ETA, weight_decay=0.05)
FALLING: dict[str, Any] = {"cohort": 2, "local": LOCAL, "schedule": Schedule("1/t")}
SERVER = ServerOptimizer(lr=LR)
SIZES = np.array([len(y) for _, y in ROWS])
WIDTHS = (FEATURES, written.HIDDEN, CLASSES)


def federation(**options: Any) -> Federation:
    return simulate(population(STORE, STORE, seen=3), **options)


COHORTS = [federation(round=t).sample(2, labeled=True).positions.tolist() for t in range(1, ROUNDS + 1)]


def method_of(name: str, **own: Any) -> Any:
    """The method of that name, as a run makes it."""
    cls = METHODS[name].cls
    networks = {"model": MODEL, "problem": replace(PROBLEM, clients=len(SEEN))}
    given = {one.name: networks[one.name] for one in fields(cls) if one.name in networks and one.default is MISSING}
    return cls(**given, **{**Hyperparameters.of(name).read({}), **own})


def ran(method: Any, rounds: int = ROUNDS) -> tuple[State, Tensor, Tensor | None]:
    """The state after so many rounds, and the models of all five clients: with labels, and the newcomers' without."""
    made = federation()
    state = train(method, made, rounds)
    found: list[Tensor | None] = []
    for labels in (True, False):
        if not labels and not method.serves_unlabeled:
            found.append(None)
            continue
        with made.aside(made.runtime.roster, labels=labels) as aside:
            cohort = aside.everyone()
            found.append(gather_models(cohort, method.personalize(state, cohort)))
    assert found[0] is not None
    return state, found[0], found[1]


def descended(theta: Array, i: int, rate: float, steps: int = STEPS, eta: float = ETA, decay: float = 0.05) -> Array:
    """Steps of client i on its loss and on decay/2·‖θ‖²."""
    for _ in range(steps):
        theta = theta - eta * rate * (written.gradient(theta, *ROWS[i]) + decay * theta)
    return theta


def averaged(theta: Array) -> Array:
    """FedAvg."""
    for rate, cohort in zip(RATES, COHORTS, strict=False):
        changes = [descended(theta, i, rate) - theta for i in cohort]
        theta = theta + LR * np.average(changes, axis=0, weights=SIZES[cohort])
    return theta


def first(seed: int = 0) -> Array:
    """The client model before the first round."""
    return MODEL.init(seed).double().numpy()


def of_fedavg() -> None:
    _, models, unlabeled = ran(method_of("fedavg", **FALLING, server=SERVER))
    assert_equal(models, np.tile(averaged(first()), (5, 1)))
    assert unlabeled is not None and torch.equal(unlabeled, models)


def of_fedavg_finetune() -> None:
    further = LocalSGD(steps=3, batch=None, lr=0.2, weight_decay=0.01)
    _, models, unlabeled = ran(method_of("fedavg-finetune", **FALLING, server=SERVER, finetune=further))
    theta = averaged(first())
    assert_equal(models, np.stack([descended(theta, i, 1.0, 3, 0.2, 0.01) for i in ALL]))
    assert unlabeled is None


def of_local() -> None:
    """Nobody samples: all train in every round, and newcomers make up for all rounds."""
    _, models, unlabeled = ran(method_of("local", local=LOCAL, agreed_seed=7))
    expected = [descended(first(7), i, 1.0, ROUNDS * STEPS) for i in ALL]
    assert_equal(models, np.stack(expected))
    assert unlabeled is None


def spliced(name: str, triple: tuple[float, float, float], **own: Any) -> None:
    """(2.15)-(2.17), with the server's z of everybody: absentees stand still and count with their latest."""
    (alpha, beta, gamma), eta = triple, 3.0
    method = method_of(name, **FALLING, eta=eta, **own)
    _, models, unlabeled = ran(method)
    center, u, z = first(), dict[int, Array](), dict[int, Array]()
    common = center  # where β = 1
    for rate, cohort in zip(RATES, COHORTS, strict=False):
        down = common if beta == 1 else center
        for i in cohort:
            point = near = down
            if beta != 1 and i in z:
                point = (1 - gamma) * u[i] + gamma * ((1 - beta) * z[i] + beta * down)
            for _ in range(STEPS):
                slope = written.gradient(near, *ROWS[i]) + 0.05 * near + (near - point) / (eta * rate)
                near = near - ETA * rate * slope
            u[i], z[i] = point, (1 - alpha) * point + alpha * near
        known = sorted(z)
        if method.absentees == "left-out":
            theta = center + LR * (np.average([z[i] for i in cohort], axis=0, weights=SIZES[cohort]) - down)
        else:
            theta = np.average([z[i] for i in known], axis=0, weights=SIZES[known])
        common = (1 - gamma) * common + gamma * theta
        center = theta
    assert_equal(models, np.tile(center, (5, 1)))
    assert unlabeled is not None and torch.equal(unlabeled, models)


def of_fedprox() -> None:
    spliced("fedprox", (1.0, 1.0, 1.0), server=SERVER)


def of_fedsplit() -> None:
    spliced("fedsplit", (2.0, 2.0, 1.0))


def of_fedpi() -> None:
    spliced("fedpi", (2.0, 2.0, 0.5))


def of_fedrp() -> None:
    spliced("fedrp", (2.0, 1.0, 1.0))


def of_splitting() -> None:
    """With β = 1 the point that all share moves by γ alone, and a first joiner counts from there."""
    for beta in (1.0, 1.6):
        spliced("splitting", (1.4, beta, 0.7), alpha=1.4, beta=beta, gamma=0.7)


# Hypernetworks. A client is described by L numbers.

L, WIDE = 5, (5, 100, 100, MODEL.size)
GENERATED: dict[str, Any] = {
    "cohort": 2,
    "local": LOCAL,
    "server": ServerOptimizer(lr=0.3),
    "descriptor": L,
    "layers": 2,
    "clip": 0.4,
    "lambda_h": 0.02,
}


def exchanged(eta: Array, v: Array, cohort: list[int], shift: Array | float, scale: float) -> tuple[Array, Array]:
    """The gradients of h's parameters and of v [C, L]: h makes models, clients train them, Δθ goes back through h."""
    models = written.outputs(eta, (v - shift) * scale, WIDE)
    delta = np.stack([descended(theta, i, 1.0) - theta for theta, i in zip(models, cohort, strict=True)])
    of_h, of_v = written.pulled(eta, (v - shift) * scale, WIDE, -delta / len(cohort))
    return of_h, of_v * scale


def descend(parts: dict[str, tuple[Array, Array, float, float]], clip: float, decay: float = 0.0) -> list[Array]:
    """A step of (value, gradient, rate, λ), whose gradients are clipped together: η ← (1 − 2βλ)η − β·(g + decay·η)."""
    norm = np.sqrt(sum((gradient**2).sum() for _, gradient, _, _ in parts.values()))
    assert norm > clip  # else the clip would go unseen
    return [
        (1 - 2 * rate * weight) * value - rate * (gradient * clip / norm + decay * value)
        for value, gradient, rate, weight in parts.values()
    ]


def later_cohorts(rounds: int) -> list[list[int]]:
    """Who takes part where the first round draws three others before."""
    made = federation(round=1)
    made.sample(3, labeled=True)
    return [made.sample(2, labeled=True).positions.tolist(), *COHORTS[1:rounds]]


def of_pefll(name: str = "pefll") -> None:
    """Algorithms 7 and 8: describe, fit, backpropagate. Newcomers are served by running means of both networks."""
    labels, hidden, lambda_v = name == "pefll", 10, 0.03
    method = method_of(
        name, **GENERATED, lambda_v=lambda_v, lambda_theta=0.01, embedding_width=hidden, describe_rows=None, steady=2,
    )  # fmt: skip
    begun = method.start(0)
    eta, phi = begun.hypernet.double().numpy(), begun.embedding.double().numpy()
    into = 16 * CLASSES if labels else 0  # a linear map of the label, beside the features
    widths = (FEATURES + (16 if labels else 0), hidden, L)

    def inputs(phi: Array, i: int) -> Array:
        x, y = ROWS[i]
        return np.hstack([x, np.eye(CLASSES)[y] @ phi[:into].reshape(16, CLASSES).T]) if labels else x

    def described(phi: Array, i: int) -> Array:
        return np.asarray(written.outputs(phi[into:], inputs(phi, i), widths).mean(0))

    def back(phi: Array, i: int, cotangent: Array) -> Array:
        n = SIZES[i]
        of_network, of_x = written.pulled(phi[into:], inputs(phi, i), widths, np.tile(cotangent / n, (n, 1)))
        of_label = of_x[:, FEATURES:].T @ np.eye(CLASSES)[ROWS[i][1]]
        return np.concatenate([of_label.ravel(), of_network]) if labels else of_network

    v = np.stack([described(phi, i) for i in SEEN])
    shift, scale = v.mean(0), 1 / np.sqrt(((v - v.mean(0)) ** 2).mean())
    steady = eta, phi
    for number, cohort in enumerate(later_cohorts(ROUNDS), 1):
        v = np.stack([described(phi, i) for i in cohort])
        models = written.outputs(eta, (v - shift) * scale, WIDE)
        delta = [descended(theta, i, 1.0, decay=0.05 + 0.02) - theta for theta, i in zip(models, cohort, strict=True)]
        g_h, g_v = written.pulled(eta, (v - shift) * scale, WIDE, -np.stack(delta) / len(cohort))
        g_phi = sum(back(phi, i, one * scale) for i, one in zip(cohort, g_v, strict=True))
        eta, phi = descend({"h": (eta, g_h, 0.3, 0.02), "phi": (phi, np.asarray(g_phi), 0.3, lambda_v)}, 0.4)
        share = 1 / min(number, 2)
        steady = (steady[0] + share * (eta - steady[0]), steady[1] + share * (phi - steady[1]))
    _, models, unlabeled = ran(method)
    v = np.stack([described(steady[1], i) for i in ALL])
    assert_equal(models, written.outputs(steady[0], (v - shift) * scale, WIDE))
    assert (unlabeled is None) == labels
    if unlabeled is not None:
        torch.testing.assert_close(unlabeled, models)


def of_pefll_unlabeled() -> None:
    of_pefll("pefll-unlabeled")


def trained_table(table: Array, eta: Array, decay: float) -> tuple[Array, Array]:
    """pFedHN: the cohort's rows of the table move with h."""
    for cohort in COHORTS:
        g_h, g_v = exchanged(eta, table[cohort], cohort, 0.0, 1.0)
        eta, moved = descend({"h": (eta, g_h, 0.3, 0.02), "v": (table[cohort], g_v, 0.2, 0.0)}, 0.4, decay)
        table = table.copy()
        table[cohort] = moved
    return table, eta


def of_pfedhn() -> None:
    """A newcomer's descriptor is moved by Adam, and h is not."""
    steps, rate = 3, 0.07
    method = method_of(
        "pfedhn", **GENERATED, descriptor_lr=0.2, weight_decay=0.03, newcomer_rounds=steps, newcomer_lr=rate
    )
    begun = method.start(0)
    state, models, unlabeled = ran(method)
    table, eta = trained_table(begun.descriptors.double().numpy(), begun.hypernet.double().numpy(), 0.03)
    made = federation()
    with made.aside(made.runtime.roster) as aside:  # what newcomers begin with is drawn at random
        drawn = replace(method, newcomer_rounds=0).descriptors(state, aside.everyone())[3:].double().numpy()
    v, m, square = drawn, np.zeros_like(drawn), np.zeros_like(drawn)
    for t in range(1, steps + 1):
        _, g = exchanged(eta, v, [3, 4], 0.0, 1.0)
        m, square = 0.9 * m + 0.1 * g, 0.999 * square + 0.001 * g**2
        v = v - rate * (m / (1 - 0.9**t)) / (np.sqrt(square / (1 - 0.999**t)) + 1e-8)
    assert_equal(models, written.outputs(eta, np.concatenate([table, v]), WIDE))
    assert unlabeled is None


def borrowed(choice: str) -> tuple[Any, State, Tensor, Array]:
    method = method_of(f"pfl-{choice}", **GENERATED, descriptor_lr=0.2, weight_decay=0.03)
    begun = method.start(0)
    state, models, unlabeled = ran(method)
    assert unlabeled is not None and torch.equal(unlabeled, models)
    table, eta = trained_table(begun.descriptors.double().numpy(), begun.hypernet.double().numpy(), 0.03)
    return method, state, models, written.outputs(eta, table, WIDE)


def of_pfl_sampled() -> None:
    _, _, models, expected = borrowed("sampled")
    assert_equal(models[:3], expected)
    for one in models[3:]:
        assert min(np.abs(expected - one.double().numpy()).max(1)) < 1e-4


def of_pfl_nearest() -> None:
    """Newcomers have the model of least Mahalanobis distance, by covariances that are shrunk (Chen et al., 2010)."""
    _, state, models, expected = borrowed("nearest")

    def summary(i: int) -> tuple[Array, Array]:
        z = ROWS[i][0] @ state.projection.double().numpy()
        n, r = z.shape
        s = (z - z.mean(0)).T @ (z - z.mean(0)) / n
        power, trace = (s**2).sum(), np.trace(s)
        share = min(1.0, (power + trace**2) / ((n + 1) * (power - trace**2 / r)))
        return z.mean(0), (1 - share) * s + share * trace / r * np.eye(r)

    def apart(i: int, j: int) -> float:
        (a, s), (b, t) = summary(i), summary(j)
        return float((a - b) @ np.linalg.solve((s + t) / 2, a - b) - len(a) * (1 / SIZES[i] + 1 / SIZES[j]))

    lenders = [min(SEEN, key=lambda j: apart(i, j)) for i in (3, 4)]
    assert lenders[0] != lenders[1]
    assert_equal(models, expected[[0, 1, 2, *lenders]])


def of_pfl_ensemble() -> None:
    method, _, models, expected = borrowed("ensemble")
    x = ROWS[3][0]
    mean = np.mean([written.outputs(theta, x, WIDTHS) for theta in expected], axis=0)
    for one in models:
        assert_equal(method.model(one, torch.from_numpy(x).float()), mean)


def of_odpfl() -> None:
    """Algorithm 1 with the deep set of App. C: 200 units, half of which are pooled by their mean, half by their max."""
    rates, decay = {"h": 0.3, "g": 0.15}, 0.03
    method = method_of("odpfl", **GENERATED, lambda_g=0.04, encoder_lr=rates["g"], weight_decay=decay)
    begun = method.start(0)
    eta, gamma = begun.hypernet.double().numpy(), begun.encoder.double().numpy()
    phi, psi = (FEATURES, 250, 200), (200, 250, L)
    cut = sum(a * b + b for a, b in ((FEATURES, 250), (250, 200)))

    def pooled(gamma: Array, i: int) -> tuple[Array, Array]:
        points = written.relu(written.outputs(gamma[:cut], ROWS[i][0], phi))
        return points, np.concatenate([points[:, :100].mean(0), points[:, 100:].max(0)])[None]

    def described(gamma: Array, i: int) -> Array:
        return np.asarray(written.outputs(gamma[cut:], pooled(gamma, i)[1], psi)[0])

    def back(gamma: Array, i: int, cotangent: Array) -> Array:
        points, pool = pooled(gamma, i)
        of_psi, of_pool = written.pulled(gamma[cut:], pool, psi, cotangent[None])
        of_points = np.zeros_like(points)
        of_points[:, :100] = of_pool[0, :100] / len(points)
        of_points[points[:, 100:].argmax(0), np.arange(100, 200)] = of_pool[0, 100:]
        of_phi, _ = written.pulled(gamma[:cut], ROWS[i][0], phi, of_points * (points > 0))
        return np.concatenate([of_phi, of_psi])

    v = np.stack([described(gamma, i) for i in SEEN])
    shift, scale = v.mean(0), 1 / np.sqrt(((v - v.mean(0)) ** 2).mean())
    for cohort in later_cohorts(ROUNDS):
        v = np.stack([described(gamma, i) for i in cohort])
        g_h, g_v = exchanged(eta, v, cohort, shift, scale)
        g_gamma = np.sum([back(gamma, i, one) for i, one in zip(cohort, g_v, strict=True)], axis=0)
        parts = {"h": (eta, g_h, rates["h"], 0.02), "g": (gamma, g_gamma, rates["g"], 0.04)}
        eta, gamma = descend(parts, 0.4, decay)
    _, models, unlabeled = ran(method)
    v = np.stack([described(gamma, i) for i in ALL])
    assert_equal(models, written.outputs(eta, (v - shift) * scale, WIDE))
    assert unlabeled is not None
    torch.testing.assert_close(unlabeled, models)


# Subspaces: θ = θ0 + P·v, with P and θ0 as both sides have agreed on them

K = 9


def agreed(method: Any) -> tuple[Array, Array]:
    """θ0 and P [d, K]."""
    return method.lift.theta0.double().numpy(), torch.func.vmap(method.lift.p)(torch.eye(K)).T.double().numpy()


def of_ld_fedavg() -> None:
    """Steps on v are d/k times as long as those on θ would be."""
    method = method_of("ld-fedavg", **{**FALLING, "local": replace(LOCAL, lr=0.02)}, server=SERVER, dimension=K)
    (theta0, p), v = agreed(method), np.zeros(K)
    for rate, cohort in zip(RATES, COHORTS, strict=False):
        changes = []
        for i in cohort:
            own = v
            for _ in range(STEPS):
                slope = p.T @ written.gradient(theta0 + p @ own, *ROWS[i]) + 0.05 * own
                own = own - 0.02 * rate * MODEL.size / K * slope
            changes.append(own - v)
        v = v + LR * np.average(changes, axis=0, weights=SIZES[cohort])
    _, models, unlabeled = ran(method)
    assert_equal(models, np.tile(theta0 + p @ v, (5, 1)))
    assert unlabeled is not None and torch.equal(unlabeled, models)


def of_flowdup() -> None:
    """Algorithms 9 and 10; the second client has no labels, so the regulariser alone moves it."""
    features, width, penalty, lr = 7, 5, 0.03, 0.5
    rates = {"h1": 0.3, "hidden": 0.7, "last": 2.0, "bias": 1.5, "prior": 0.8}
    method = method_of(
        "flowdup", cohort=3, labeled_share=0.6, local=LOCAL, server=ServerOptimizer(lr=lr), schedule=Schedule("1/t"),
        rates=rates, dimension=K, features=features, width=width, penalty=penalty, begin=1.0,
    )  # fmt: skip
    (theta0, p), widths = agreed(method), (FEATURES, written.HIDDEN, features)
    begun = method.start(0)
    psi = {name: begun[name].double().numpy() for name in rates}

    def made(psi: dict[str, Array], x: Array) -> tuple[Array, Array, Array]:
        """r, the hidden units and v."""
        w, b = psi["hidden"][: width * features].reshape(width, features), psi["hidden"][width * features :]
        r = written.outputs(psi["h1"], x, widths).mean(0)
        units = np.maximum(w @ r + b, 0)
        return r, units, psi["last"] @ units + psi["bias"]

    def slope(psi: dict[str, Array], i: int) -> dict[str, Array]:
        x, y = ROWS[i]
        (r, units, v), half = made(psi, x[0::2]), x[0::2]
        g = 2 * penalty * (v - psi["prior"])
        of_prior = -g
        if i != 1:
            g = g + p.T @ written.gradient(theta0 + p @ v, x[1::2], y[1::2])
        of_units = psi["last"].T @ g * (units > 0)
        of_r = psi["hidden"][: width * features].reshape(width, features).T @ of_units
        of_h1, _ = written.pulled(psi["h1"], half, widths, np.tile(of_r / len(half), (len(half), 1)))
        of_hidden = np.concatenate([np.outer(of_units, r).ravel(), of_units])
        return {"h1": of_h1, "hidden": of_hidden, "last": np.outer(g, units), "bias": g, "prior": of_prior}

    for rate in RATES[:ROUNDS]:
        changes = []
        for i in SEEN:
            own = psi
            for _ in range(STEPS):
                slopes = slope(own, i)
                own = {name: value - ETA * (slopes[name] + 0.05 * value) for name, value in own.items()}
            changes.append({name: own[name] - psi[name] for name in psi})
        psi = {
            name: value + lr * rate * rates[name] * np.mean([one[name] for one in changes], axis=0)
            for name, value in psi.items()
        }
    store = replace(STORE, labeled=torch.tensor([True, False, True, True, True]))
    for labels in (True, False):  # which nobody is asked for
        federated = simulate(population(store, store, seen=3))
        state = train(method, federated, ROUNDS)
        with federated.aside(federated.runtime.roster, labels=labels) as aside:
            models = gather_models(aside.everyone(), method.personalize(state, aside.everyone()))
        assert_equal(models, np.stack([theta0 + p @ made(psi, x)[2] for x, _ in ROWS]))


def of_fedtta() -> None:
    """T1 C.1.2, the outer gradient by differentiating its loss as a whole. φ is 32-32-32 with ReLU."""
    inner, rounds, widths = 0.3, 2, (CLASSES, 32, 32, 32, 1)
    one = {**FALLING, "cohort": 1, "local": replace(LOCAL, steps=1)}
    method = method_of("fedtta", **one, adapt_lr=inner, server=SERVER)
    begun, d = method.start(0), MODEL.size
    both = np.concatenate([begun.theta.double().numpy(), begun.phi.double().numpy()])

    def adapted(both: Array, x: Array) -> Array:
        scores = written.outputs(both[:d], x, WIDTHS)
        values = written.outputs(both[d:], scores, widths)
        norm = np.sqrt((values**2).sum())
        _, of_scores = written.pulled(both[d:], scores, widths, values / norm)
        return np.asarray(both[:d] - inner * written.pulled(both[:d], x, WIDTHS, of_scores)[0])

    def loss(both: Array, x: Array, y: Array) -> Any:
        chances = written.softmax(written.outputs(adapted(both, x), x, WIDTHS))
        return -np.log(chances[np.arange(len(y)), y]).mean()

    for t in range(1, rounds + 1):
        (i,) = federation(round=t).sample(1, labeled=True).positions.tolist()
        slopes = written.slopes(lambda at, i=i: loss(at, *ROWS[i]), both)
        both = both - LR * ETA / t * (slopes + 0.05 * both)
    _, models, unlabeled = ran(method, rounds)
    assert_equal(models, np.stack([adapted(both, x) for x, _ in ROWS]))
    assert unlabeled is not None
    torch.testing.assert_close(unlabeled, models)


# Distillation. KL(p ‖ q) has the gradient q − p in q's scores, and p·(ln p − ln q − KL) in p's.


def scores_of(theta: Array, i: int) -> Array:
    return written.softmax(written.outputs(theta, ROWS[i][0], WIDTHS))


def in_theta(theta: Array, i: int, of_scores: Array) -> Array:
    """The gradient of a mean over rows, from those of each row's scores; with the decay."""
    return written.pulled(theta, ROWS[i][0], WIDTHS, of_scores / SIZES[i])[0] + 0.05 * theta


def of_teacher(p: Array, q: Array) -> Array:
    away = np.log(p) - np.log(q)
    return np.asarray(p * (away - (p * away).sum(1, keepdims=True)))


def taught(theta: Array, teacher: Array, i: int, data: float, pull: float) -> Array:
    """The gradient in θ of data·f(θ) + pull·KL(p_teacher ‖ p_θ)."""
    q, p = scores_of(theta, i), scores_of(teacher, i)
    return in_theta(theta, i, data * (q - np.eye(CLASSES)[ROWS[i][1]]) + pull * (q - p))


def served(own: dict[int, Array], common: Array, join: Callable[[int], Array], method: Any) -> None:
    """Who was never sampled joins as a newcomer does; without labels a newcomer has the common model."""
    _, models, unlabeled = ran(method)
    assert_equal(models, np.stack([own[i] if i in own else join(i) for i in ALL]))
    assert unlabeled is not None
    assert_equal(unlabeled, np.stack([own.get(i, common) for i in ALL]))


def of_quped() -> None:
    """Algorithm 2: x moves, then w at the new x by the distillation alone."""
    weight, w_lr = 0.3, 0.7
    method = method_of("quped", **FALLING, server=SERVER, weight=weight, w_lr=w_lr, newcomer_rounds=2, agreed_seed=3)
    w, own = first(3), dict[int, Array]()
    for rate, cohort in zip(RATES, COHORTS, strict=False):
        changes = []
        for i in cohort:
            x, mine = own.get(i, first(3)), w
            for _ in range(STEPS):
                x = x - ETA * rate * taught(x, mine, i, 1 - weight, weight)
                p, q = scores_of(mine, i), scores_of(x, i)
                mine = mine - w_lr * rate * in_theta(mine, i, weight * of_teacher(p, q))
            own[i] = x
            changes.append(mine - w)
        w = w + LR * np.mean(changes, axis=0)

    def join(i: int) -> Array:
        x = w
        for _ in range(2 * STEPS):
            x = x - ETA * taught(x, w, i, 1 - weight, weight)
        return x

    served(own, w, join, method)


def of_fml() -> None:
    """Both models move at once, each towards the labels and towards the other."""
    alpha, beta = 0.3, 0.6
    method = method_of("fml", **FALLING, server=SERVER, alpha=alpha, beta=beta, newcomer_rounds=2, agreed_seed=3)

    def mutual(private: Array, meme: Array, i: int, rate: float, steps: int) -> tuple[Array, Array]:
        for _ in range(steps):
            private, meme = (
                private - ETA * rate * taught(private, meme, i, alpha, 1 - alpha),
                meme - ETA * rate * taught(meme, private, i, beta, 1 - beta),
            )
        return private, meme

    meme, own = first(3), dict[int, Array]()
    for rate, cohort in zip(RATES, COHORTS, strict=False):
        changes = []
        for i in cohort:
            own[i], changed = mutual(own.get(i, first(3)), meme, i, rate, STEPS)
            changes.append(changed - meme)
        meme = meme + LR * np.average(changes, axis=0, weights=SIZES[cohort])
    served(own, meme, lambda i: mutual(meme, meme, i, 1.0, 2 * STEPS)[0], method)


def of_adaped(name: str = "adaped") -> None:
    """Algorithms 5 and 6: θ, then μ at the new θ, then ψ at both; who is absent goes on with what it received last."""
    mu_lr, psi_lr, begun, least, going_on = 0.3, 0.25, 1.2, 0.7, name == "adaped-continue"
    method = method_of(
        name, **FALLING, mu_lr=mu_lr, psi_lr=psi_lr, psi=begun, least_psi=least, newcomer_rounds=2, agreed_seed=3
    )
    mu, psi, own, received = first(3), begun, dict[int, Array](), dict[int, tuple[Array, float]]()
    for rate, cohort in zip(RATES, COHORTS, strict=False):
        changes = []
        for i in cohort:
            theta, m, s = own.get(i, first(3)), mu, psi
            for _ in range(STEPS):
                theta = theta - ETA * rate * taught(theta, m, i, 1.0, 1 / (2 * s))
                p, q = scores_of(m, i), scores_of(theta, i)
                m = m - mu_lr * rate * in_theta(m, i, of_teacher(p, q) / (2 * s))
                p = scores_of(m, i)
                apart = (p * (np.log(p) - np.log(q))).sum(1).mean()
                s = max(least, s - psi_lr * rate * (1 - apart / s) / (2 * s))
            own[i], received[i] = theta, (mu, psi)
            changes.append(np.append(m - mu, s - psi))
        for i in set(SEEN) - set(cohort) if going_on else ():
            theta, (m, s) = own.get(i, first(3)), received.get(i, (first(3), begun))
            for _ in range(STEPS):
                theta = theta - ETA * rate * taught(theta, m, i, 1.0, 1 / (2 * s))
            own[i] = theta
        mean = np.mean(changes, axis=0)
        mu, psi = mu + mean[:-1], max(least, psi + mean[-1])
    sampled = {i for cohort in COHORTS for i in cohort}
    assert sampled == set(SEEN) and least < psi < begun

    def join(i: int) -> Array:
        theta = mu
        for _ in range(2 * STEPS):
            theta = theta - ETA * taught(theta, mu, i, 1.0, 1 / (2 * psi))
        return theta

    served(own, mu, join, method)


def of_adaped_continue() -> None:
    of_adaped("adaped-continue")


def of_learned_prior() -> None:
    """(12) and a step of EM for a mixture of two; a step is no longer than the prior's curvature allows."""
    strength, sigma, floor = 0.7, 0.6, 0.05
    method = method_of(
        "learned-prior", **FALLING, prior="mixture", components=2, strength=strength, scale=sigma, floor=floor,
        newcomer_rounds=2, agreed_seed=3,
    )  # fmt: skip
    begun, d = method.start(0), MODEL.size
    weights, centers, scale = (begun[name].double().numpy() for name in ("weights", "centers", "scale"))
    own: dict[int, Array] = {}

    def belongs(theta: Array) -> Array:
        log = np.log(weights) - d / 2 * np.log(2 * np.pi * scale**2)
        log = log - ((theta - centers) ** 2).sum(1) / (2 * scale**2)
        return np.asarray(np.exp(log - log.max()) / np.exp(log - log.max()).sum())

    def trained(theta: Array, i: int, rate: float, steps: int) -> Array:
        for _ in range(steps):
            precise = strength / SIZES[i] * belongs(theta) / scale**2
            slope = written.gradient(theta, *ROWS[i]) + precise @ (theta - centers)
            theta = theta - ETA * rate * (slope / max(1.0, ETA * rate * precise.sum()) + 0.05 * theta)
        return theta

    for rate, cohort in zip(RATES, COHORTS, strict=False):
        steps, spreads, counts = np.zeros((2, d)), np.zeros(2), np.zeros(2)
        for i in cohort:
            own[i] = trained(own.get(i, weights @ centers), i, rate, STEPS)
            share, away = belongs(own[i]) / len(cohort), own[i] - centers
            steps += share[:, None] * away
            spreads += share * (away**2).mean(1)
            counts += share
        shift = steps / counts[:, None]
        variance = np.maximum(spreads / counts - (shift**2).mean(1), floor**2)
        assert counts.min() > 1e-3
        weights, centers, scale = counts / counts.sum(), centers + shift, np.sqrt(variance)
    served(own, weights @ centers, lambda i: trained(weights @ centers, i, 1.0, 2 * STEPS), method)


# Updates that are weighed at the server, and clusters


EPSILON = np.array([0.5, 4.0, 6.0])


def weighed(name: str, weights: Callable[[Array], Array], project: bool = False, within: float = 2e-5) -> None:
    method = method_of(name, **{**FALLING, "cohort": 3}, server=SERVER)
    made = federation()
    declared = {"epsilon": torch.from_numpy(EPSILON), "delta": torch.full((3,), 1e-3, dtype=torch.float64)}
    made.roster = replace(made.roster, **declared)
    with patch.object(Cohort, "_budgets", return_value={}):  # there is no noise, which no budget would allow
        theta, state = first(), train(method, made, ROUNDS)
    for rate in RATES[:ROUNDS]:
        updates = np.stack([descended(theta, i, rate) - theta for i in SEEN])
        w = weights(updates)
        if project:  # the first client, whose ε is small, on the first direction of the others
            direction = np.linalg.svd(updates[1:])[2][0]
            updates[0] = updates[0] @ direction * direction
        theta = theta + LR * w / w.sum() @ updates
    torch.testing.assert_close(state.theta.double(), torch.from_numpy(theta), atol=within, rtol=1e-4)
    cohort = federation().everyone()
    assert torch.equal(gather_models(cohort, method.personalize(state, cohort)), state.theta.expand(3, -1))


def sparse_parts(updates: Array) -> Array:
    """‖S_i‖² of M = L + S with the least ‖L‖_* + ‖S‖₁/√p, by alternating directions with one penalty throughout."""
    m = updates.T
    mu, weight = m.size / (4 * np.abs(m).sum()), max(m.shape) ** -0.5
    s, y = np.zeros_like(m), np.zeros_like(m)
    for _ in range(4000):
        u, values, v = np.linalg.svd(m - s + y / mu, full_matrices=False)
        low = u * np.maximum(values - 1 / mu, 0) @ v
        rest = m - low + y / mu
        s = np.sign(rest) * np.maximum(np.abs(rest) - weight / mu, 0)
        y = y + mu * (m - low - s)
        if np.linalg.norm(m - low - s) < 1e-9 * np.linalg.norm(m):
            break
    return np.asarray((s**2).sum(0))


def of_robust_hdp() -> None:
    weighed("robust-hdp", lambda updates: 1 / sparse_parts(updates), within=2e-4)  # where both stop


def of_weiavg() -> None:
    weighed("weiavg", lambda _: EPSILON)


def of_pfa() -> None:
    weighed("pfa", lambda _: EPSILON, project=True)


def of_dpfedavg() -> None:
    weighed("dpfedavg", lambda _: SIZES[:3])


def of_minimum_epsilon() -> None:
    """What is special to it is the noise; ``test_own_budgets`` looks at that."""
    weighed("minimum-epsilon", lambda _: SIZES[:3])


def of_rdpcfl() -> None:
    """No model moves by first updates; then clusters are drawn, selected and kept, and a model takes its members' mean.

    That first updates find the clusters, ``test_planted_clusters_are_found_and_counted`` looks at.
    """
    sizes, side, rounds = (22, 17, 20, 15, 8, 6), (0, 1, 1, 0, 0, 1), 5
    clients = clients_of(sizes, seed=5)
    odd = torch.tensor(side).repeat_interleave(torch.tensor(sizes))
    clients = replace(clients, y=((clients.x[:, 0] > 0).long() + odd) % 2)
    rows = rows_of(clients)
    method = method_of("rdpcfl", local=LOCAL, schedule=Schedule("1/t"), clusters=2, rounds=rounds)
    made, clusters = simulate(population(clients, clients, seen=4)), list[list[int]]()
    state = train(method, made, rounds, after_round=lambda _, now: clusters.append(now.cluster.tolist()))
    last_drawn = max(1, int((1 - float(state.mpo)) * rounds / 2))
    assert clusters[0] == [-1] * 4 and last_drawn < rounds - 1
    assert method.distinctions(state)["place"].isfinite().all()
    models = [first(), first()]

    def losses(i: int) -> list[float]:
        return [float(written.losses(theta, *rows[i]).mean()) for theta in models]

    for t in range(2, rounds + 1):
        now = clusters[t - 1]
        if t == last_drawn + 1:  # the one round in which clients select
            assert now == [int(np.argmin(losses(i))) for i in range(4)]
        elif t > last_drawn:
            assert now == clusters[t - 2]
        changes: list[list[Array]] = [[], []]
        for i, m in enumerate(now):
            theta = models[m]
            for _ in range(STEPS):
                theta = theta - ETA / t * (written.gradient(theta, *rows[i]) + 0.05 * theta)
            changes[m].append(theta - models[m])
        models = [theta + np.mean(some, axis=0) if some else theta for theta, some in zip(models, changes, strict=True)]
    with made.aside(made.runtime.roster) as aside:
        cohort = aside.everyone()
        found = gather_models(cohort, method.personalize(state, cohort))
    best = [int(np.argmin(losses(i))) for i in (4, 5)]
    assert sorted(best) == [0, 1]
    assert_equal(found, np.stack([models[m] for m in (*clusters[-1], *best)]))


ORACLES: dict[str, Callable[[], None]] = {
    name.removeprefix("of_").replace("_", "-"): value
    for name, value in list(globals().items())
    if name.removeprefix("of_").replace("_", "-") in METHODS and name.startswith("of_")
}
ELSEWHERE = {
    "perfedavg": "test_perfedavg.test_rounds_are_those_written_out_in_numpy",
    "fedrep": "test_fedrep.test_rounds_are_those_written_out_in_numpy",
    "pfedme": "test_pfedme.test_rounds_are_those_written_out_in_numpy",
    "knnper": "test_knnper.test_knnper_mixes_as_written_out_and_chooses_on_validation_rows",
    "fedem": "test_fedem.test_rounds_are_those_written_out_in_numpy",
    "fedma": "test_fedma.test_a_round_of_fedma_matches_freezes_and_trains_the_rest",
    "ifca": "test_rdpcfl.test_ifca_without_epsilon_selects_the_least_loss_in_every_round",
    "mr-mtl": "test_mr_mtl.test_mr_mtl_is_its_update_written_out",
}


@pytest.mark.parametrize("name", ORACLES)
def test_rounds_are_those_written_out_in_numpy(name: str) -> None:
    ORACLES[name]()


def test_every_method_has_rounds_that_are_written_out() -> None:
    assert {*ORACLES, *ELSEWHERE} == set(METHODS)
    for where in ELSEWHERE.values():
        module, test = where.split(".")
        assert callable(getattr(importlib.import_module(f"tests.methods.{module}"), test))
