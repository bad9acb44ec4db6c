"""Every algorithm of analytics, and tiny clients in a file: what a server and the process of its clients both know."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tests.runtime.pipe import Pipe, Remote
from unalike.analytics.estimation.candidates import DiscreteMixture
from unalike.analytics.estimation.means import BernoulliRates, GaussianMeans
from unalike.analytics.estimation.mixture import MixturePrior
from unalike.analytics.estimation.private import Central
from unalike.analytics.estimation.regression import GaussianPrior, OneForAll
from unalike.analytics.estimation.shared import Channel
from unalike.analytics.kmeans.algorithm import FedDPKMeans
from unalike.analytics.kmeans.baselines import KFed, run_baseline
from unalike.analytics.kmeans.budget import KMeansPrivacy, StepNoise
from unalike.analytics.kmeans.client import cost, squared_distances
from unalike.analytics.kmeans.diameter import Diameter
from unalike.analytics.mdm.algorithm import MDM
from unalike.analytics.mdm.privacy import NoisyHistograms
from unalike.core.client import Client, Clients
from unalike.core.federation import Federation
from unalike.core.method import tasks_of
from unalike.core.release import Each, Release, Sum
from unalike.core.request import Part, Program
from unalike.core.roster import Roster
from unalike.core.schema import Schema
from unalike.core.secure import EXCHANGES
from unalike.core.task import Sent, send, task
from unalike.data.partition.mixture import Mixture
from unalike.privacy.mechanisms import Gaussian, Laplace

Found = dict[str, Tensor]
MEANS = 4 * np.random.default_rng(1).standard_normal((4, 6))
SERVER = torch.from_numpy((MEANS.repeat(6, 0) + np.random.default_rng(2).standard_normal((24, 6))).astype(np.float32))
HISTOGRAMS, FITTED_ON = 24, 16
DROP = " with drop-outs"
SEED = 4


@dataclass(frozen=True)
class Case:
    """How an algorithm is built, which clients it asks, and what its server has in the end."""

    build: Callable[[], object]
    clients: str
    run: Callable[[Any, Federation], Found]


# The clients' rows, by name


def write(file: Path, stores: Mapping[str, Clients]) -> None:
    columns = {f"{name}.{what}": getattr(one, what) for name, one in stores.items() for what in ("x", "y", "size")}
    np.savez(file, **{name: column.numpy() for name, column in columns.items() if column is not None})


def read(file: Path, name: str) -> Clients:
    with np.load(file) as arrays:
        x, y, size = (
            torch.from_numpy(arrays[one]) if (one := f"{name}.{what}") in arrays else None
            for what in ("x", "y", "size")
        )
    assert x is not None and size is not None
    return Clients.from_sizes(x, y, size)


def stored(file: Path, name: str) -> tuple[Mapping[Part, Clients], Roster]:
    clients = read(file, method_of(name).clients)
    return {"train": clients}, clients.roster()


# What a server does, and what it has in the end


def centers(method: FedDPKMeans, federation: Federation) -> Found:
    found = method.fit(federation, SERVER).centers
    return {"centers": found, "cost": torch.tensor(cost(federation, found))}


def alone(method: FedDPKMeans, federation: Federation) -> Found:
    return {"centers": method.fit(federation, None).centers}


def baseline(name: str) -> Callable[[FedDPKMeans, Federation], Found]:
    return lambda method, federation: {"centers": run_baseline(name, method, federation, SERVER).centers}


def k_fed(method: KFed, federation: Federation) -> Found:
    return {"centers": method.fit(federation)}


def fitted(method: MDM, federation: Federation) -> Found:
    return parameters(method.fit(federation).mixture)


def gathered(method: NoisyHistograms, federation: Federation) -> Found:
    return {"counts": method.gather(federation).x.double()}


def parameters(mixture: Mixture) -> Found:
    return {"tau": mixture.tau, "alpha": mixture.alpha, "pi": mixture.pi}


def chosen(method: MDM, federation: Federation) -> Found:
    roster, quorum = federation.roster, federation.quorum
    some = Federation(federation.runtime, 0, roster.select(range(FITTED_ON)), quorum, run="fitting")
    rest = Federation(federation.runtime, 1, roster.select(range(FITTED_ON, HISTOGRAMS)), quorum, run="others")
    choice = method.choose(some, rest, [1, 2, 3])
    return {**parameters(choice.fitted.mixture), "below": torch.tensor(choice.below_best)}


@task
def totals(client: Client, missing: Tensor) -> Sent:
    """For measuring: estimates cross in sums alone, so that one that crosses otherwise is found."""
    estimate, local = client.kept.get("estimate", missing), client.kept.get("local", missing)
    return send(estimate=estimate, square=estimate.square(), weighted=estimate * client.n, local=local)


def learned(method: Any, federation: Federation) -> Found:
    found = method.fit(federation)
    missing = torch.full(federation.roster.schema.shape, torch.nan, dtype=torch.float64)
    with federation.aside() as own:
        names = ("estimate", "square", "weighted", "local")
        sums = own.everyone().ask(totals, into=[Sum(name) for name in names], missing=missing)
    prior = {name: torch.tensor(value) for name, value in found.prior.items() if value is not None}
    return {**prior, **sums, "with an estimate": torch.tensor(len(sums.answered))}


def one_model(method: OneForAll, federation: Federation) -> Found:
    return {"theta": method.fit(federation)}


def kmeans(**settings: Any) -> Callable[[], FedDPKMeans]:
    return lambda: FedDPKMeans(**{"k": 4, "starts": 5, **settings})


def mdm(**settings: Any) -> Callable[[], MDM]:
    return lambda: MDM(10, 100, **{"rounds": 3, "cohort": 10, "size_bins": 8, **settings})


LDP, BITS = Channel(epsilon=4.0, delta=1e-5), Channel(bits=3)
CENTRAL = Central(50.0, 1e-3)
SPREAD: Any = {"sigma_theta": 0.5, "sigma_x": 1.0}
NOISE = StepNoise(Gaussian(0.05), Laplace(10.0), Gaussian(0.05), Laplace(10.0))  # given, as calibration takes seconds
BY_CLIENT: Any = {"privacy": KMeansPrivacy(50.0, 1e-5, "client"), "client_points": 16, "noise": NOISE}
NOISY = Gaussian(0.1)
CASES = {
    "kmeans": Case(kmeans(steps=2), "points", centers),
    "kmeans, elbow": Case(kmeans(k=None, k_max=5), "points", centers),
    "kmeans by point": Case(kmeans(noise=NOISE, steps=2), "points", centers),
    "kmeans, simplified": Case(kmeans(noise=NOISE, simplify=1, center=False), "points", centers),
    "kmeans by client": Case(kmeans(**BY_CLIENT, steps=2), "points", centers),
    "kmeans, sampled": Case(kmeans(**BY_CLIENT, steps=1, sample=0.9), "points", centers),
    "kmeans, secure": Case(kmeans(noise=NOISE, secure=True), "points", centers),
    "kmeans, smaller diameter": Case(kmeans(noise=NOISE, diameter=Diameter(0.1, 0.2)), "points", centers),
    "kmeans, no server data": Case(kmeans(noise=NOISE, ground="packing", radius=15.0, places=30), "points", alone),
    "server kmeans++": Case(kmeans(noise=NOISE, steps=2), "points", baseline("ServerKMeans++")),
    "server lloyds": Case(kmeans(noise=NOISE, steps=2), "points", baseline("ServerLloyds")),
    "sphere packing": Case(kmeans(steps=1, **BY_CLIENT), "points", baseline("SpherePacking")),
    "k-fed": Case(lambda: KFed(4, rounds=3), "points", k_fed),
    "mdm": Case(mdm(), "histograms", fitted),
    "mdm, random start": Case(mdm(start="random"), "histograms", fitted),
    "mdm, private": Case(mdm(noise=NOISY), "histograms", fitted),
    "mdm, choice": Case(mdm(), "histograms", chosen),
    "mdm, private choice": Case(mdm(noise=NOISY), "histograms", chosen),
    "mdm, secure": Case(mdm(rounds=1, cohort=14, secure=True), "histograms", fitted),
    "mdm, secure and private": Case(mdm(rounds=1, cohort=1.0, secure=True, noise=NOISY), "histograms", fitted),
    "mdm, local": Case(mdm(rounds=2, local=True, noise=NOISY), "histograms", fitted),
    "mdm, noisy histograms": Case(lambda: NoisyHistograms(2.0), "histograms", gathered),
    "means": Case(lambda: GaussianMeans(), "gaussian", learned),
    "means, known": Case(lambda: GaussianMeans(mu=1.0, **SPREAD), "gaussian", learned),
    "means in bits": Case(lambda: GaussianMeans(channel=BITS, radius=1.0, **SPREAD), "gaussian", learned),
    "means, private": Case(lambda: GaussianMeans(channel=LDP, radius=1.0, **SPREAD), "gaussian", learned),
    "rates": Case(lambda: BernoulliRates(), "flips", learned),
    "rates, known": Case(lambda: BernoulliRates(2.0, 3.0), "flips", learned),
    "rates, moments": Case(lambda: BernoulliRates(form="moments"), "flips", learned),
    "rates, plug-in": Case(lambda: BernoulliRates(form="plug-in"), "flips", learned),
    "rates in bits": Case(lambda: BernoulliRates(bits=2), "flips", learned),
    "rates, private": Case(lambda: BernoulliRates(epsilon=3.0), "flips", learned),
    "rates, private plug-in": Case(lambda: BernoulliRates(form="plug-in", epsilon=3.0), "flips", learned),
    "linear": Case(lambda: GaussianPrior(rounds=3), "linear", learned),
    "linear, known": Case(lambda: GaussianPrior(mu=0.5, **SPREAD), "linear", learned),
    "linear, gd": Case(lambda: GaussianPrior(solver="gd", rounds=3), "linear", learned),
    "linear in bits": Case(lambda: GaussianPrior(rounds=3, channel=BITS, bound=2.0, **SPREAD), "linear", learned),
    "linear, private": Case(lambda: GaussianPrior(rounds=3, channel=LDP, bound=2.0, **SPREAD), "linear", learned),
    "logistic": Case(lambda: GaussianPrior("logistic", rounds=3), "logistic", learned),
    "logistic, gd": Case(lambda: GaussianPrior("logistic", solver="gd", rounds=3, lr=0.02), "logistic", learned),
    "one for all": Case(lambda: OneForAll("linear"), "linear", one_model),
    "one for all, logistic": Case(lambda: OneForAll("logistic", rounds=3), "logistic", one_model),
    "candidates": Case(lambda: DiscreteMixture(2, 1.0), "gaussian", learned),
    "candidates, alternating": Case(lambda: DiscreteMixture(2, 1.0, once=False, rounds=3), "gaussian", learned),
    "candidates, linear": Case(lambda: DiscreteMixture(2, 0.3, "linear"), "linear", learned),
    "candidates in bits": Case(lambda: DiscreteMixture(2, 1.0, channel=BITS, radius=2.0), "gaussian", learned),
    "candidates, private": Case(
        lambda: DiscreteMixture(2, 1.0, once=False, rounds=3, channel=LDP, radius=2.0), "gaussian", learned
    ),
    "candidates, central": Case(
        lambda: DiscreteMixture(2, 1.0, rounds=2, central=CENTRAL, bound=4.0), "gaussian", learned
    ),
    "candidates, alternating central": Case(
        lambda: DiscreteMixture(2, 1.0, once=False, rounds=2, central=CENTRAL, bound=4.0), "gaussian", learned
    ),
    "mixture, central": Case(
        lambda: MixturePrior(2, "linear", 0.3, rounds=2, central=CENTRAL, bound=4.0), "linear", learned
    ),
    "mixture, linear": Case(lambda: MixturePrior(2, "linear", 0.3, rounds=3), "linear", learned),
    "mixture, gd": Case(lambda: MixturePrior(2, "linear", 0.3, rounds=3, solver="gd"), "linear", learned),
    "mixture, logistic": Case(lambda: MixturePrior(2, rounds=3), "logistic", learned),
}
# What their clients send, without privacy, as the papers have it: what they found alone, or their estimates. The centre
# of a cluster of one point is that point.
SHOWN = {name: "kept" for name in CASES if name.startswith(("means", "rates", "candidates", "mixture"))}
SHOWN = {name: what for name, what in SHOWN.items() if not {"bits", "private", "central"} & set(name.split())}
SHOWN |= {"k-fed": "a row"}
SHOWN |= {f"{name}{DROP}": what for name, what in SHOWN.items()}


# Algorithms that do what none may


@dataclass(frozen=True)
class Reads(GaussianMeans):
    """Its server looks at rows."""

    def fit(self, federation: Federation) -> Any:
        shard = federation.runtime.shards[0]  # type: ignore[attr-defined]
        assert bool(shard.parts["train"].x.isfinite().all())
        return super().fit(federation)


@dataclass(frozen=True)
class Sends(GaussianMeans):
    """Its clients send rows."""

    @task
    def first(self, client: Client) -> Sent:
        return send(row=client.x[0])

    def fit(self, federation: Federation) -> Any:
        federation.everyone().ask(self.first)
        return super().fit(federation)


@dataclass(frozen=True)
class Bares(GaussianMeans):
    """Its clients send their private statistic a second time, without the noise."""

    @task
    def again(self, client: Client) -> Sent:
        return send(mean=client.mean(client.x.to(torch.float64)) / self.channel.unit(self.bound, 4))

    @again.into
    def _bare(self) -> list[Release]:
        return [Each("mean")]

    def fit(self, federation: Federation) -> Any:
        federation.everyone().ask(self.again)
        return super().fit(federation)


def bad(make: type[GaussianMeans]) -> Case:
    return Case(lambda: make(channel=LDP, bound=1.0, **SPREAD), "gaussian", learned)


BAD = {"reads": bad(Reads), "sends": bad(Sends), "bares": bad(Bares)}


# What the processes of the server and of its clients ask for


def method_of(name: str) -> Case:
    return (CASES | BAD)[name.removesuffix(DROP)]


def program(name: str, _: Schema) -> Program:
    """Its tasks, what a simulation measures by, and the exchanges of a secure sum."""
    return Program([*tasks_of(method_of(name).build()), squared_distances, totals, *EXCHANGES])


def drop_of(name: str) -> float:
    """Each secure sum asks its clients six times, and more than half of their peers must be left at the end."""
    return (0.06 if "secure" in name else 0.2) if name.endswith(DROP) else 0.0


def seed_of(name: str) -> int:
    """With this seed, secure sums lose clients in each of their exchanges and can still be opened."""
    return 43 if "secure" in name else SEED


def federation(remotes: list[Remote], name: str, data: Path) -> Federation:
    return Federation(Pipe(remotes, __name__, name, data, drop_of(name)), seed_of(name))


def outcome(case: Case, federation: Federation) -> Found:
    return case.run(case.build(), federation)
