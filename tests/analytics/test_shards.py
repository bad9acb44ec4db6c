"""All of analytics by the contract: any number of shards, everything through the codec, no row of data at the server,
and clients who have built the algorithm from its settings themselves."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, is_dataclass

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.analytics.test_estimation import uneven
from tests.analytics.test_estimation_models import regressions
from tests.analytics.test_kmeans import mixture
from tests.analytics.test_mdm import population
from unalike import simulate
from unalike.analytics.estimation.means import BernoulliRates, GaussianMeans
from unalike.analytics.estimation.mixture import DiscreteMixture, MixturePrior
from unalike.analytics.estimation.problem import counts_clients
from unalike.analytics.estimation.regression import GaussianPrior, OneForAll, read_risk
from unalike.analytics.estimation.shared import Channel, read_estimate
from unalike.analytics.kmeans.algorithm import FedDPKMeans, cost, squared_distances
from unalike.analytics.kmeans.baselines import KFed, run_baseline
from unalike.analytics.kmeans.budget import Privacy
from unalike.analytics.mdm.algorithm import MDM
from unalike.analytics.mdm.counts import histogram_clients
from unalike.core.client import Clients
from unalike.core.federation import Federation
from unalike.core.request import Program, Reply, Request
from unalike.core.roster import Roster
from unalike.core.task import Task
from unalike.data.partition.mixture import Mixture
from unalike.privacy.mechanisms import Gaussian
from unalike.runtime.shard.kept import KeptStore
from unalike.runtime.shard.shard import Shard
from unalike.runtime.shard.simulator import Simulator
from unalike.runtime.simulate import Simulation
from unalike.studio.simulate import simulation

Found = dict[str, Tensor]
BLOCK = 8


@dataclass(frozen=True)
class Case:
    """How an algorithm is built, whom it asks, and what it finds."""

    build: Callable[[], object]
    clients: Callable[[], Clients]
    run: Callable[[object, Federation], Found]


def points() -> Clients:
    return mixture()[0]


def many_points() -> Clients:
    return mixture(sizes=(10,) * 40)[0]


def centers(method: object, federation: Federation) -> Found:
    assert isinstance(method, FedDPKMeans)
    found = method.fit(federation, mixture()[1]).centers
    return {"centers": found, "cost": torch.tensor(cost(federation, found))}


def lloyds(method: object, federation: Federation) -> Found:
    assert isinstance(method, FedDPKMeans)
    return {"centers": run_baseline("ServerLloyds", method, federation, mixture()[1]).centers}


def k_fed(method: object, federation: Federation) -> Found:
    assert isinstance(method, KFed)
    return {"centers": method.fit(federation)}


def histograms() -> Clients:
    return histogram_clients(population("medium-2", 60)[0], largest=100)


def parameters(mixture: Mixture) -> Found:
    return {"tau": mixture.tau, "alpha": mixture.alpha, "pi": mixture.pi}


def fitted(method: object, federation: Federation) -> Found:
    assert isinstance(method, MDM)
    return parameters(method.fit(federation).mixture)


def chosen(method: object, federation: Federation) -> Found:
    assert isinstance(method, MDM)
    rest = Federation(federation.runtime, 1, federation.roster.select(range(40, 60)), run="others")
    some = Federation(federation.runtime, 0, federation.roster.select(range(40)), run="fitting")
    choice = method.choose(some, rest, [1, 2, 3])
    return {**parameters(choice.fitted.mixture), "below": torch.tensor(choice.below_best)}


def flips() -> Clients:
    random = np.random.default_rng(3)
    trials = random.integers(2, 9, 30)
    return counts_clients(random.binomial(trials, random.beta(2, 3, 30)), trials)


def linear() -> Clients:
    return regressions([3, 8, 5, 4, 9, 6, 7, 5, 6, 4], dim=3)


def logistic() -> Clients:
    return regressions([3, 8, 5, 4, 9, 6, 7, 5, 6, 4], dim=3, classes=True)


def estimated(method: object, federation: Federation) -> Found:
    assert isinstance(method, GaussianMeans | BernoulliRates | GaussianPrior | DiscreteMixture | MixturePrior)
    found = method.estimate(federation)
    numbers = {name: torch.tensor(value) for name, value in found.prior.items() if value is not None}
    return {"estimate": found.estimate, "local": found.local, **numbers}


def one_model(method: object, federation: Federation) -> Found:
    assert isinstance(method, OneForAll)
    return {"theta": method.fit(federation)}


LDP, BITS = Channel(epsilon=4.0, delta=1e-5), Channel(bits=3)
SPREAD = {"sigma_theta": 0.5, "sigma_x": 1.0}
PRIVATE = Privacy(20.0, 1e-5)
BY_CLIENT = Privacy(50.0, 1e-5, "client")
CASES = {
    "kmeans": Case(lambda: FedDPKMeans(k=4, steps=2), points, centers),
    "kmeans by point": Case(lambda: FedDPKMeans(k=4, privacy=PRIVATE, steps=2), points, centers),
    "kmeans, simplified": Case(lambda: FedDPKMeans(k=4, privacy=PRIVATE, simplify=1), points, centers),
    "kmeans by client": Case(
        lambda: FedDPKMeans(k=4, privacy=BY_CLIENT, steps=2, client_points=10), many_points, centers
    ),
    "server lloyds": Case(lambda: FedDPKMeans(k=4, privacy=PRIVATE, steps=3, initialize=False), points, lloyds),
    "k-fed": Case(lambda: KFed(4, rounds=3), points, k_fed),
    "mdm": Case(lambda: MDM(10, 100, rounds=3, cohort=30), histograms, fitted),
    "mdm, random start": Case(lambda: MDM(10, 100, rounds=3, cohort=30, start="random"), histograms, fitted),
    "mdm, private": Case(lambda: MDM(10, 100, rounds=3, cohort=30, noise=Gaussian(0.1)), histograms, fitted),
    "mdm, choice": Case(lambda: MDM(10, 100, rounds=3, cohort=20), histograms, chosen),
    "mdm, private choice": Case(lambda: MDM(10, 100, rounds=3, cohort=20, noise=Gaussian(0.1)), histograms, chosen),
    "means": Case(lambda: GaussianMeans(), uneven, estimated),
    "means, known": Case(lambda: GaussianMeans(mu=1.0, **SPREAD), uneven, estimated),
    "means in bits": Case(lambda: GaussianMeans(channel=BITS, radius=1.0, **SPREAD), uneven, estimated),
    "means, private": Case(lambda: GaussianMeans(channel=LDP, radius=1.0, **SPREAD), uneven, estimated),
    "rates": Case(lambda: BernoulliRates(), flips, estimated),
    "rates, plug-in": Case(lambda: BernoulliRates(form="plug-in"), flips, estimated),
    "rates in bits": Case(lambda: BernoulliRates(bits=2), flips, estimated),
    "rates, private": Case(lambda: BernoulliRates(epsilon=3.0), flips, estimated),
    "linear": Case(lambda: GaussianPrior(rounds=3), linear, estimated),
    "linear, gd": Case(lambda: GaussianPrior(solver="gd", rounds=3), linear, estimated),
    "linear in bits": Case(lambda: GaussianPrior(rounds=3, channel=BITS, bound=2.0, **SPREAD), linear, estimated),
    "linear, private": Case(lambda: GaussianPrior(rounds=3, channel=LDP, bound=2.0, **SPREAD), linear, estimated),
    "logistic": Case(lambda: GaussianPrior("logistic", rounds=3), logistic, estimated),
    "logistic, gd": Case(lambda: GaussianPrior("logistic", solver="gd", rounds=3, lr=0.02), logistic, estimated),
    "one for all": Case(lambda: OneForAll("linear"), linear, one_model),
    "one for all, logistic": Case(lambda: OneForAll("logistic", rounds=3), logistic, one_model),
    "candidates": Case(lambda: DiscreteMixture(2, 1.0), uneven, estimated),
    "candidates, alternating": Case(lambda: DiscreteMixture(2, 1.0, once=False, rounds=3), uneven, estimated),
    "candidates in bits": Case(lambda: DiscreteMixture(2, 1.0, channel=BITS, radius=2.0), uneven, estimated),
    "candidates, private": Case(
        lambda: DiscreteMixture(2, 1.0, once=False, rounds=3, channel=LDP, radius=2.0), uneven, estimated
    ),
    "mixture, linear": Case(lambda: MixturePrior(2, "linear", 0.3, rounds=3), linear, estimated),
    "mixture, logistic": Case(lambda: MixturePrior(2, rounds=3), logistic, estimated),
}
EVERY = pytest.mark.parametrize("name", list(CASES))


def found(name: str, **how: object) -> Found:
    case = CASES[name]
    return case.run(case.build(), simulate(case.clients(), block=BLOCK, threads=1, **how))  # type: ignore[arg-type]


def assert_same_bits(one: Found, other: Found) -> None:
    assert one.keys() == other.keys()
    for name, value in one.items():
        assert torch.equal(value, other[name]), name


@EVERY
def test_any_number_of_shards_finds_the_same(name: str) -> None:
    one, two, five = (found(name, shards=count) for count in (1, 2, 5))
    assert_same_bits(two, found(name, shards=2, strict=True))
    for other in (two, five):
        assert one.keys() == other.keys()
        for array, value in one.items():
            torch.testing.assert_close(other[array], value, rtol=1e-4, atol=1e-5)


class Distant:
    """Clients elsewhere: a roster that came as bytes, and nothing but encoded requests and replies."""

    def __init__(self, elsewhere: Simulation) -> None:
        self.roster = Roster.decode(elsewhere.roster.encode())
        self.program = elsewhere.program
        self._answer = lambda data: [reply.encode() for reply in elsewhere.deliver(Request.decode(data))]
        self.forget = elsewhere.forget

    def deliver(self, request: Request) -> Iterator[Reply]:
        yield from map(Reply.decode, self._answer(request.encode()))


def tasks_of(method: object) -> list[Task]:
    return [getattr(method, name) for name, value in vars(type(method)).items() if isinstance(value, Task)]


@EVERY
def test_clients_who_built_it_themselves_answer_alike_and_the_server_sees_no_row(name: str) -> None:
    """Their program is closed: what they let out, clip and account follows from their own settings."""
    case, clients = CASES[name], CASES[name].clients()
    program = Program([*tasks_of(case.build()), squared_distances, read_estimate, read_risk])
    shard = Shard({"train": clients}, clients.roster(), program, Simulator(BLOCK, 1))
    federation = Federation(Distant(Simulation([shard], program)))
    assert_same_bits(case.run(case.build(), federation), found(name))
    rows = {column.untyped_storage().data_ptr() for column in (clients.x, clients.y) if column is not None}
    for thing in reachable(federation):
        assert not isinstance(thing, Clients | Shard | KeptStore)
        assert not isinstance(thing, Tensor) or thing.untyped_storage().data_ptr() not in rows


def reachable(federation: Federation) -> Iterator[object]:
    """All that a federation holds, its runtime left out."""
    seen: set[int] = {id(federation.runtime)}
    todo: list[object] = [federation]
    while todo:
        thing = todo.pop()
        if id(thing) in seen:
            continue
        seen.add(id(thing))
        yield thing
        if isinstance(thing, dict):
            todo += [*thing.keys(), *thing.values()]
        elif isinstance(thing, list | tuple | set | frozenset):
            todo += thing
        elif not isinstance(thing, Tensor | type):
            todo += list(getattr(thing, "__dict__", {}).values())
            todo += [getattr(thing, one.name) for one in fields(thing)] if is_dataclass(thing) else []


def test_the_walk_finds_rows_where_there_are_some() -> None:
    federation = simulate(points())
    assert not any(isinstance(thing, Clients) for thing in reachable(federation))
    federation.metrics["hidden"] = [points()]  # type: ignore[assignment]
    assert any(isinstance(thing, Clients) for thing in reachable(federation))


def test_the_noise_is_a_function_of_the_settings_alone() -> None:
    """Two that were built apart declare equal releases, and a shard that has only the roster could have built both."""
    for case in CASES.values():
        one, other = case.build(), case.build()
        for mine, theirs in zip(tasks_of(one), tasks_of(other), strict=True):
            declared = [(type(release), vars(release)) for release in mine.releases()]
            assert declared == [(type(release), vars(release)) for release in theirs.releases()], mine.name


def test_simulation_deals_clients_out() -> None:
    made = simulation(points(), shards=5)
    assert [len(shard.roster) for shard in made.shards] == [1] * 5
