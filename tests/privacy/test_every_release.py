"""Every noisy sum of every private method and analysis, by brute force: what one unit moves, and the noise it gets.

A run is recorded: each sum before its noise, and what was released. Then it runs again on neighbouring data and is
handed what the first run released, so that every ask has the same inputs. A sum may then differ by what one client or
one row contributes, which must be no more than the noise was made for. Rows are as extreme as they can be.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.core.helpers import clients, total
from tests.runtime import problems
from unalike import Clients, Federation, Simulator, Sum, simulate, train
from unalike.analytics.estimation.candidates import DiscreteMixture
from unalike.analytics.estimation.private import Central
from unalike.analytics.kmeans.algorithm import FedDPKMeans
from unalike.analytics.kmeans.budget import KMeansPrivacy
from unalike.analytics.mdm.algorithm import MDM
from unalike.analytics.mdm.counts import histogram_clients
from unalike.core.release import Adder, Unit
from unalike.core.request import Program, Reply
from unalike.core.roster import Roster
from unalike.learn.scaling import PrivateScaling, scale_privately
from unalike.methods.fedavg import FedAvg
from unalike.methods.splitting import Splitting
from unalike.privacy import Exponential, Gaussian, Laplace, SystemDraws
from unalike.privacy.audit import Quieter
from unalike.runtime.shard.shard import Shard
from unalike.runtime.simulate import Simulation

EXTREME = (1e30, -1e5, 50.0, 1e-12)


@dataclass
class Released:
    """One noisy sum."""

    name: str
    unit: Unit
    total: Tensor  # before the noise
    noise: Any
    change: float  # what the noise was made for
    value: Tensor


@dataclass
class Recorder:
    """Records the noisy sums of a run, or plays them back in another."""

    sums: list[Released] = field(default_factory=list)
    replayed: list[Tensor] | None = None  # the totals of a second run

    @contextmanager
    def on(self, patch: pytest.MonkeyPatch) -> Iterator[None]:
        original = Sum.noisy

        def noisy(release: Sum, total: Tensor, sampling: Any, draws: Any) -> Tensor:
            if release.noise is None:
                return original(release, total, sampling, draws)
            if self.replayed is not None:
                self.replayed.append(total.clone())
                return self.sums[len(self.replayed) - 1].value.clone()
            value, change = original(release, total.clone(), sampling, draws), release.change(sampling)
            self.sums.append(Released(release.name, release.unit, total.clone(), release.noise, change, value.clone()))
            return value

        with patch.context() as patched:
            patched.setattr(Sum, "noisy", noisy)
            yield


class Without(Shard):
    """A shard of which one client contributes nothing."""

    victim: int | None = None

    def _add_up(self, request: Any, work: Any, adders: Mapping[int, Adder], reply: Reply) -> Reply:
        if self.victim is not None and reply.arrays:
            stays = request.ids[reply.rows] != self.victim
            arrays = list(reply.arrays)
            for place in adders:
                arrays[place] = {
                    name: torch.where(stays.reshape(-1, *[1] * (value.ndim - 1)), value, 0)
                    for name, value in arrays[place].items()
                }
            reply = replace(reply, arrays=arrays)
        return super()._add_up(request, work, adders, reply)


def federation_of(store: Clients, roster: Roster, victim: int | None = None) -> Federation:
    program = Program(open=True)
    shard = Without({"train": store}, roster, program, Simulator(block=4, threads=1))
    shard.victim = victim
    return Federation(Simulation([shard], program), 3, noise="seeded")


# What is run: a store of clients, and what a server does with them


@dataclass(frozen=True)
class Scenario:
    unit: Unit
    store: Callable[[], Clients]
    run: Callable[[Federation], object]
    arrays: set[str]  # that must have been released


def rows_of(store: Clients, client: int) -> slice:
    return slice(int(store.start[client]), int(store.start[client] + store.size[client]))


def table(features: int = 3, classes: bool = True) -> Clients:
    """Clients of 4 to 9 rows; the last row of client 2 and all rows of client 5 are as extreme as rows can be."""
    random = torch.Generator().manual_seed(0)
    sizes = torch.tensor([5, 4, 9, 6, 7, 8])
    x = torch.randn(int(sizes.sum()), features, generator=random)
    y = torch.randint(3, (len(x),), generator=random) if classes else None
    store = Clients.from_sizes(x, y, sizes)
    x[rows_of(store, 2).stop - 1] = 1e30
    x[rows_of(store, 5)] = torch.tensor(EXTREME)[:, None].repeat(2, features)
    return store


def by_method(name: str) -> Scenario:
    method: Any = problems.method_of(name)
    if getattr(method, "secure", False):  # the same sums, which can then be seen before they are masked
        method = replace(method, secure=False)

    def store() -> Clients:
        random = torch.Generator().manual_seed(1)
        x = torch.randn(60, problems.FEATURES, generator=random)
        x[50:] *= 30.0
        return Clients.from_sizes(x, torch.randint(problems.CLASSES, (60,), generator=random), torch.full((6,), 10))

    return Scenario("client", store, lambda federation: train(method, federation, 2), set())


def histograms() -> Clients:
    counts = torch.randint(0, 9, (8, 4), generator=torch.Generator().manual_seed(0))
    counts[5] = torch.tensor([90, 0, 0, 0])
    return histogram_clients(counts)


def clustering(unit: Unit) -> Callable[[Federation], object]:
    server = torch.randn(30, 3, generator=torch.Generator().manual_seed(2))
    method = FedDPKMeans(k=2, privacy=KMeansPrivacy(2.0, 1e-3, unit), steps=2, client_points=5)
    return lambda federation: method.fit(federation, server)


def scaling(unit: Unit) -> Callable[[Federation], object]:
    def scale(federation: Federation) -> object:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("unalike.learn.scaling.too_noisy", lambda *_: None)  # that the statistics are no use
            return scale_privately(federation, PrivateScaling.of(federation.roster.schema, Gaussian(1.0), unit))

    return scale


def mixture(federation: Federation) -> object:
    return DiscreteMixture(2, 1.0, rounds=2, central=Central(2.0, 1e-3), bound=2.5).estimate(federation)


MDM_SETTINGS = MDM(4, 90, components=2, rounds=2, cohort=1.0, noise=Gaussian(1.0), gain_clip=3.0, clip=5.0)

SCENARIOS: dict[str, Scenario] = {
    "scaling, clients": Scenario("client", table, scaling("client"), {"counts", "mean", "moments"}),
    "scaling, points": Scenario("point", table, scaling("point"), {"counts", "mean", "moments"}),
    "k-means, clients": Scenario(
        "client", lambda: table(classes=False), clustering("client"), {"gram", "weights", "sums", "counts"}
    ),
    "k-means, points": Scenario(
        "point", lambda: table(classes=False), clustering("point"), {"gram", "weights", "sums", "counts"}
    ),
    "mdm": Scenario("client", histograms, lambda federation: MDM_SETTINGS.fit(federation), {"growth", "moments"}),
    "estimation": Scenario("client", lambda: table(classes=False), mixture, {"share"}),
    **{name: by_method(name) for name in problems.PROTECTED},
    **{
        f"{name}, client-level noise": by_method(f"{name}, client-level noise")
        for name in ("fedavg", "adaped", "fedpi")
    },
}


def record(scenario: Scenario, patch: pytest.MonkeyPatch) -> tuple[Recorder, Federation]:
    store, tape = scenario.store(), Recorder()
    federation = federation_of(store, store.roster())
    with tape.on(patch):
        scenario.run(federation)
    return tape, federation


def replay(scenario: Scenario, tape: Recorder, patch: pytest.MonkeyPatch, without: int) -> list[float]:
    """How far each sum is from the recorded one without a client, or without the last row of a client."""
    store = scenario.store()
    roster = store.roster()
    if scenario.unit == "point":
        size = store.size.clone()
        size[without] -= 1
        store = replace(store, size=size)
    tape.replayed = []
    victim = int(roster.ids[without]) if scenario.unit == "client" else None
    with tape.on(patch):
        scenario.run(federation_of(store, roster, victim))
    pairs = zip(tape.sums, tape.replayed, strict=True)
    order = {"l1": 1, "l2": 2}
    moved = [
        float(torch.linalg.vector_norm((one.total - other).flatten(), order[one.noise.norm])) for one, other in pairs
    ]
    tape.replayed = None
    return moved


@pytest.mark.parametrize("name", SCENARIOS)
def test_one_unit_moves_no_sum_by_more_than_its_noise_was_made_for(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    scenario = SCENARIOS[name]
    tape, federation = record(scenario, monkeypatch)
    assert scenario.arrays <= {one.name for one in tape.sums} and tape.sums
    assert {one.unit for one in tape.sums} == {scenario.unit}
    most: dict[str, float] = {}
    for without in (2, 5):
        for one, moved in zip(tape.sums, replay(scenario, tape, monkeypatch, without), strict=True):
            assert moved <= one.change * (1 + 1e-5), (one.name, moved, one.change)
            most[one.name] = max(most.get(one.name, 0.0), moved / one.change)
    assert max(most.values()) > 0.3, most  # else the neighbours were no test
    bare = [row["array"] for row in federation.transcript.rows() if row["noise"] is None]
    assert not bare and math.isfinite(federation.ledger.worst(1e-3))
    for one in tape.sums:
        check_noise(one.noise, one.change)
        assert bool((one.value != one.total).any()), f"{one.name} was released without noise"


def check_noise(noise: Any, change: float) -> None:
    """The noise on 20,000 zeros is as wide as the ledger's event says, and a whole number of grid steps."""
    zeros = torch.zeros(20_000, dtype=torch.float64)
    told = noise.event()
    std = told.noise_multiplier * change * (math.sqrt(2.0) if isinstance(noise, Laplace) else 1.0)
    made = noise.add(zeros, change, SystemDraws(), step=(step := 2.0 ** math.floor(math.log2(change) - 30)))
    assert float(made.std()) == pytest.approx(std, rel=0.05)
    assert torch.equal(made / step, (made / step).round())


# Sabotage: each of these passed all tests once


def test_half_of_the_noise_is_found() -> None:
    with pytest.raises(AssertionError):
        check_noise(Quieter(Gaussian(1.0), 0.5), 1.0)
    with pytest.raises(AssertionError):
        check_noise(Quieter(Laplace(1.0), 0.5), 1.0)


@pytest.mark.parametrize(
    ("scenario", "array"),
    [
        ("scaling, points", "moments"), ("scaling, clients", "moments"), ("k-means, points", "counts"),
        ("mdm", "moments"), ("mdm", "growth"), ("estimation", "share"),
    ],
)  # fmt: skip
def test_a_release_that_went_bare_is_found(scenario: str, array: str, monkeypatch: pytest.MonkeyPatch) -> None:
    original = Sum.resolve

    def resolve(release: Sum, *given: Any) -> Sum:
        found = original(release, *given)
        return replace(found, noise=None, sensitivity=None) if release.name == array else found

    monkeypatch.setattr(Sum, "resolve", resolve)
    with pytest.raises(AssertionError):
        test_one_unit_moves_no_sum_by_more_than_its_noise_was_made_for(scenario, monkeypatch)


def test_one_noisy_sum_in_ten_without_noise_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    original, calls = Gaussian.add, iter(range(10**6))

    def add(noise: Gaussian, value: Tensor, *given: Any, **more: Any) -> Tensor:
        return value if next(calls) % 10 == 3 else original(noise, value, *given, **more)

    monkeypatch.setattr(Gaussian, "add", add)
    with pytest.raises(AssertionError):
        test_one_unit_moves_no_sum_by_more_than_its_noise_was_made_for("scaling, points", monkeypatch)


def test_a_sensitivity_of_the_root_of_f_where_squares_go_along_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    original = PrivateScaling._sum
    monkeypatch.setattr(PrivateScaling, "_sum", lambda self, name, _: original(self, name, self.features))
    with pytest.raises(AssertionError, match="moments"):
        test_one_unit_moves_no_sum_by_more_than_its_noise_was_made_for("scaling, points", monkeypatch)


def test_gains_of_mdm_that_are_longer_than_their_clip_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    original = Sum.change
    monkeypatch.setattr(Sum, "change", lambda self, *given: original(self, *given) / math.sqrt(2.0))
    with pytest.raises(AssertionError):
        test_one_unit_moves_no_sum_by_more_than_its_noise_was_made_for("mdm", monkeypatch)


def test_a_selection_at_half_its_temperature_or_by_argmax_is_found() -> None:
    """ε-DP of a choice: no candidate is more than e^ε as likely after one unit changed each score by its most."""
    epsilon, change, tries = 1.2, 0.7, 60_000
    score = torch.tensor([0.0, change, 0.0])
    other = torch.tensor([change, 0.0, change])

    def largest_ratio(select: Callable[[Tensor], Tensor]) -> float:
        one, two = (torch.bincount(select(s.expand(tries, 3)), minlength=3) / tries for s in (score, other))
        return float(torch.maximum(one / two.clamp(min=1 / tries), two / one.clamp(min=1 / tries)).log().max())

    mechanism = Exponential(epsilon)
    assert largest_ratio(lambda s: mechanism.select(s, change, SystemDraws())) < epsilon * 1.05
    assert largest_ratio(lambda s: Exponential(2 * epsilon).select(s, change, SystemDraws())) > epsilon * 1.05
    assert largest_ratio(lambda s: s.argmax(-1)) > epsilon * 1.05


def test_all_methods_that_can_be_private_are_here() -> None:
    known = {
        type(problems.method_of(name.removesuffix(", client-level noise")))
        for name in SCENARIOS
        if name in [*problems.PROTECTED, *problems.VARIANTS]
    }
    assert {FedAvg, Splitting} <= known


def ask_privately(federation: Federation) -> None:
    federation.everyone().ask(total, into=Sum("total", clip=1.0, noise=Gaussian(1.0)))


def test_a_private_run_tries_the_noise_of_each_release_before_it_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = []
    original = Gaussian.add

    def add(noise: Gaussian, value: Tensor, change: float, *given: Any, **more: Any) -> Tensor:
        drawn.append(value.numel())
        return original(noise, value, change / 2.0, *given, **more)

    federation = simulate(clients([3] * 6), noise="system")
    ask_privately(federation)
    monkeypatch.setattr(Gaussian, "add", add)
    with pytest.raises(RuntimeError, match="noise of 'total' is to have a deviation of 1, but 4000 draws have"):
        ask_privately(simulate(clients([3] * 6), noise="system"))
    assert drawn == [4000]  # nothing was sent
    monkeypatch.setattr(Sum, "noisy", lambda self, total, *_: total)
    with pytest.raises(RuntimeError, match="have 0:"):
        ask_privately(simulate(clients([3] * 6), noise="system"))
    ask_privately(federation)  # tried once in a run
    ask_privately(simulate(clients([3] * 6), noise="seeded"))  # which protects nobody
