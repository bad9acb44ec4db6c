"""Unalike beside itself: a round beside its kernel, unlike clients, PeFLL, evaluation, MDM and FedDP-KMeans."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.func import grad_and_value, vmap
from torch.nn.utils import vector_to_parameters

from benchmarks.report import Ratio, Row
from benchmarks.rounds import Rounds, Work, alternate, data, quotients
from benchmarks.workloads import LENET, MLP, Shared
from unalike import Clients, Each, Federation, LocalSGD, Mean, Model, each, simulate, train
from unalike.analytics.kmeans.algorithm import FedDPKMeans
from unalike.analytics.mdm.algorithm import MDM
from unalike.analytics.mdm.counts import histogram_clients, known_mixture
from unalike.learn.evaluation import evaluate
from unalike.learn.objective import loss_of
from unalike.methods.pefll import PeFLL
from unalike.methods.problem import Problem
from unalike.networks.architectures import build
from unalike.runs.simulate import simulation
from unalike.runtime.shard.recording import AFTER

Measured = tuple[list[Row], dict[str, Any]]


def kernel(shared: Shared, rounds: Rounds) -> Work:
    """The arithmetic of a round and nothing else: vmapped SGD steps on clients that are already stacked."""
    model = rounds.model
    # a small cohort is one block without a plan
    plan = next(iter(rounds.simulator.plans().values()), {"block": shared.cohort, "threads": None})
    block = int(plan["block"])
    x, y = torch.randn(shared.cohort, shared.samples, *shared.shape), torch.randint(10, (shared.cohort, shared.samples))
    order = torch.stack([torch.randperm(shared.samples) for _ in range(shared.cohort)])
    start = model.init(0)

    def loss(theta: Tensor, x: Tensor, y: Tensor) -> Tensor:
        return loss_of(model(theta, x), y).mean()

    def fit(x: Tensor, y: Tensor, order: Tensor, theta: Tensor) -> Tensor:
        for begin in range(0, shared.samples, shared.batch):
            rows = order[begin : begin + shared.batch]
            gradient, _ = grad_and_value(loss)(theta, x[rows], y[rows])
            theta = torch.add(theta, gradient, alpha=-shared.lr)
        return theta

    def once() -> None:
        before = torch.get_num_threads()
        torch.set_num_threads(plan["threads"] or before)
        with torch.no_grad():
            for begin in range(0, shared.cohort, block):
                part = slice(begin, begin + block)
                vmap(fit, in_dims=(0, 0, 0, None))(x[part], y[part], order[part], start)
        torch.set_num_threads(before)

    return once


def overhead(repetitions: int, quick: bool) -> Measured:
    rows, raw = [], {}
    for full in (MLP, LENET):
        shared = full.quick() if quick else full
        rounds = Rounds(shared, data(shared, torch.full((shared.clients,), shared.samples)), shared.cohort)
        rounds(2 if quick else 100)
        times, alone = (1 if full is LENET else 10), kernel(shared, rounds)
        taken = alternate(repetitions, partial(rounds, times), partial(_repeat, alone, times))
        rows.append(Row(full.name, "round / its vmapped kernel", quotients(*taken), target=("≤", 1.15)))
        raw[full.name] = {"round": taken[0], "kernel": taken[1], "plan": list(rounds.simulator.plans().values())}
    return rows, raw


def _repeat(work: Work, times: int) -> None:
    for _ in range(times):
        work()


def unequal_sizes(clients: int, samples: int) -> Tensor:
    """Sizes that differ a hundredfold and more (log-normal), with the same total as equal ones."""
    sizes = np.random.default_rng(0).lognormal(0.0, 1.2, clients)
    whole = np.maximum(2, np.floor(sizes / sizes.sum() * clients * samples)).astype(np.int64)
    whole[whole.argmax()] += clients * samples - whole.sum()
    return torch.from_numpy(whole)


def unequal(repetitions: int, quick: bool) -> Measured:
    rows, raw = [], {}
    for shared, clients in ((LENET, 100), (LENET, 400), (MLP, 1000)):
        count = clients // 5 if quick else clients
        sizes = unequal_sizes(count, shared.samples)
        alike = Rounds(shared, data(shared, torch.full((count,), shared.samples)))
        unlike = Rounds(shared, data(shared, sizes))
        unlike(2 if quick else AFTER)  # a run of a hundred rounds plays its tasks back for most of them
        taken = alternate(repetitions, unlike, alike)
        # a cohort of 100; among more the largest stand out further, and an MLP's step has more overhead than arithmetic
        target = ("≤", 1.3) if clients == 100 else None
        what = "time per sample, unequal / equal sizes"
        rows.append(Row(f"{shared.name}, {count} clients", what, quotients(*taken), target=target))
        raw[f"{shared.name}, {count} clients"] = {
            "unequal": taken[0],
            "equal": taken[1],
            "smallest": int(sizes.min()),
            "median": float(sizes.median()),
            "largest": int(sizes.max()),
        }
    return rows, raw


def pefll(repetitions: int, quick: bool) -> Measured:
    clients = data(LENET, torch.full((100,), LENET.samples))
    model = Model(build("lenet", LENET.shape, LENET.classes))
    problem = Problem(model, LENET.shape, LENET.classes, len(clients), "image")
    local = LocalSGD(steps=5 if quick else 50, batch=32, lr=2e-3, momentum=0.9)
    method = PeFLL(problem, cohort=5, local=local)
    federation = simulate(clients)
    state = train(method, federation, 1)
    theta = model.init(0).repeat(5, 1)

    def whole() -> None:
        train(method, federation, 1, state)

    def steps() -> None:
        cohort = federation.begin_round(federation.round + 1).sample(5)
        cohort.ask(method.fit, theta=each(theta), into=[Each("update"), Mean("loss")])  # as a round asks it

    taken = alternate(repetitions, whole, steps)
    return [
        Row("PeFLL, LeNet 28x28", "seconds of a round", Ratio.of(taken[0]), "s"),
        Row("PeFLL, LeNet 28x28", "round / the client steps in it", quotients(*taken), target=("≤", 1.25)),
    ], {"round": taken[0], "steps": taken[1], "local_steps": local.steps, "batch": 32, "cohort": 5}


def _evaluate(model: Model, theta: Tensor, clients: Clients) -> Work:
    federation = simulate({"train": clients, "test": clients})
    return lambda: evaluate(model, lambda cohort: theta[cohort.ids], federation, federation.roster)


def _evaluate_in_a_loop(model: Model, theta: Tensor, clients: Clients) -> Work:
    module = model.module(theta[0])

    def loop() -> None:
        with torch.no_grad():
            for client in range(len(clients)):
                vector_to_parameters(theta[client], module.parameters())
                x, y = clients.rows(client)
                assert y is not None
                outputs = module(x)
                float((outputs.argmax(-1) == y).float().mean())
                float(F.cross_entropy(outputs, y))

    return loop


def evaluation(repetitions: int, quick: bool) -> Measured:
    count = 100 if quick else 1000
    rows, raw = [], {}
    for shared in (MLP, LENET):
        clients = data(shared, torch.full((count,), shared.samples))
        model = Model(build(shared.network, shared.shape, shared.classes))
        theta = torch.stack([model.init(seed) for seed in range(20)]).repeat(count // 20, 1)
        taken = alternate(repetitions, _evaluate(model, theta, clients), _evaluate_in_a_loop(model, theta, clients))
        name = f"evaluation of {count} personal models"
        rows.append(Row(shared.name, name, Ratio.of([count / s for s in taken[0]]), "models/s"))
        rows.append(Row(shared.name, "bare PyTorch loop / Unalike, evaluation", quotients(taken[1], taken[0])))
        raw[shared.name] = {"unalike": taken[0], "loop": taken[1], "models": count}
    return rows, raw


def mdm(repetitions: int, quick: bool) -> Measured:
    truth = known_mixture("high-3")
    cohort, one_by_one, rounds = (200, 20, 4) if quick else (1000, 100, 10)
    clients = histogram_clients(truth.sample(10 * cohort, np.random.default_rng(0)))

    def fit(count: int, block: int | None) -> Work:
        runtime = simulation(clients, block=block)
        method = MDM(truth.categories, truth.largest, components=truth.components, rounds=rounds, cohort=count)
        return lambda: method.fit(Federation(runtime))

    taken = alternate(repetitions, fit(cohort, None), fit(one_by_one, 1))
    name = f"MDM, {truth.components} components, cohort {cohort}"
    scale = cohort / one_by_one
    return [
        Row(name, "EM rounds", Ratio.of([rounds / s for s in taken[0]]), "rounds/s"),
        Row(name, "client by client / in blocks", quotients(taken[1], taken[0], scale)),
    ], {"blocks": taken[0], "client_by_client": taken[1], "cohorts": [cohort, one_by_one], "rounds": rounds}


def kmeans(repetitions: int, quick: bool) -> Measured:
    from sklearn.cluster import KMeans  # only here: it is large

    count, points, dimension, k = (50, 100, 20, 5) if quick else (500, 200, 100, 10)
    rng = np.random.default_rng(0)
    means = rng.uniform(size=(k, dimension))
    draw = means[rng.integers(k, size=count * points)] + 0.5**0.5 * rng.standard_normal((count * points, dimension))
    x = torch.from_numpy(draw.astype(np.float32))
    server = torch.from_numpy((means.repeat(20, 0) + 0.5**0.5 * rng.standard_normal((20 * k, dimension))).astype("f4"))
    clients = Clients.from_sizes(x, None, torch.full((count,), points))
    method = FedDPKMeans(k=k, steps=1)
    taken = alternate(
        repetitions,
        lambda: method.fit(simulate(clients), server),
        lambda: method.fit(simulate(clients, block=1), server),
        lambda: KMeans(k, n_init=1, random_state=0).fit(draw.astype(np.float32)),
    )
    name = f"FedDP-KMeans, {count} clients x {points} points"
    return [
        Row(name, "seconds of a clustering", Ratio.of(taken[0]), "s"),
        Row(name, "client by client / in blocks", quotients(taken[1], taken[0])),
        Row(name, "one scikit-learn KMeans of all points / ours", quotients(taken[2], taken[0])),
    ], {"blocks": taken[0], "client_by_client": taken[1], "pooled_sklearn": taken[2]}
