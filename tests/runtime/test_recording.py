"""A recorded task does what the task does, bit for bit; what cannot be recorded goes on as before."""

from __future__ import annotations

import itertools
import os
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, fx

from tests.core.helpers import simulation
from unalike import Client, Clients, Each, Federation, LocalSGD, Model, Simulator, Sum, send, simulate, task, train
from unalike.api import run
from unalike.core.method import next_state
from unalike.core.release import Release
from unalike.core.task import Sent, Task
from unalike.methods.fedavg import FedAvg
from unalike.networks.architectures import build
from unalike.privacy import Gaussian, discrete, system
from unalike.privacy.system import SystemDraws
from unalike.runtime.shard import recording


def clients(sizes: list[int]) -> Clients:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(sum(sizes), 6, generator=generator)
    return Clients.from_sizes(x, torch.randint(3, (sum(sizes),), generator=generator), torch.tensor(sizes))


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recording, "SPENT", 0.0)


@dataclass(frozen=True)
class Tasks:
    factor: float = 2.0

    @task
    def noisy(self, client: Client, shift: Tensor) -> Sent:
        count = client.kept.get("count", torch.zeros(()))
        drawn = client.draws.normal(4) + self.factor * client.mean(client.x).sum() + shift
        return send(value=drawn, count=count, keep={"count": count + 1})

    @task
    def listing(self, client: Client, shift: Tensor) -> Sent:
        return send(value=client.mean(client.x) * 0 + shift.tolist())

    @task
    def selecting(self, client: Client, shift: Tensor) -> Sent:
        above = torch.arange(8.0)[torch.arange(8.0) < shift]
        return send(value=client.mean(client.x) * 0 + len(above))

    @task
    def branching(self, client: Client, shift: Tensor) -> Sent:
        return send(value=client.mean(client.x) * (1.0 if float(shift) > 2 else -1.0))

    @task
    def mean(self, client: Client) -> Sent:
        return send(value=self.factor * client.mean(client.x))

    @task
    def largest(self, client: Client) -> Sent:
        return send(value=self.factor * client.mean(client.x.square()))

    @task
    def labels(self, client: Client) -> Sent:
        return send(value=client.mean(client.y.to(torch.float32)))


@task
def free(client: Client, shift: Tensor) -> Sent:
    return send(value=client.mean(client.x) + shift)


@pytest.mark.parametrize("sizes", [[9] * 12, [3, 9, 5, 9, 1, 8, 7, 2, 6, 4, 9, 5]])
def test_training_gives_the_same_bits(sizes: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    found = {}
    for after in (2, 1_000):
        monkeypatch.setattr(recording, "AFTER", after)
        simulator = Simulator(block=6)
        local = LocalSGD(epochs=2, batch=4, momentum=0.9, weight_decay=1e-3, clip=1.0)
        method = FedAvg(Model(build("mlp", (6,), 3)), cohort=12, local=local)
        store = clients(sizes)
        found[after] = train(method, Federation(simulation(store, simulator), 3), 8)
        assert (simulator._recordings.count() > 0) == (after == 2)
    for name in found[2]:
        assert torch.equal(found[2][name], found[1_000][name]), name


def test_recordings_are_made_where_the_rounds_that_are_left_repay_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """One takes as long as 35 calls and saves half of each, the first a second more; calls here take a second."""
    monkeypatch.setattr(recording, "AFTER", 2)
    monkeypatch.setattr(recording, "LONGEST", 2.0)
    for left, calls, due in ((71, 1, False), (72, 1, True), (34, 2, False), (35, 2, True)):  # left after round 7
        made, kind = recording.Recordings(), recording.Kind(None, since=5)
        for number in (5, 6, 7):
            made.expect(number, left + 7 - number)
            for _ in range(calls):
                made.called(kind, 1.0, lambda _: None, {})
        assert [one for one, *_ in made._due] == [kind] * due, (left, calls)
        assert kind.tried == due  # a run that goes on for longer may still record it


@pytest.mark.parametrize("left", [0, 100_000])
def test_no_result_depends_on_the_rounds_that_are_left(left: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recording, "AFTER", 2)
    monkeypatch.setattr(recording, "START", 0.0)
    states = []
    for known in (True, False):
        simulator = Simulator(block=6)
        method = FedAvg(Model(build("mlp", (6,), 3)), cohort=12, local=LocalSGD(batch=4))
        federation, state = Federation(simulation(clients([9] * 12), simulator), 3), method.start(3)
        for number in range(1, 7):
            if known:
                simulator.expect(number, left)
            state = next_state(method, state, federation)
        states.append(state)
        assert (simulator._recordings.count() > 0) == (left > 0 or not known)
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])


def test_a_run_says_how_many_rounds_are_left(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[int, int]] = []
    monkeypatch.setattr(Simulator, "expect", lambda _, number, left: seen.append((number, left)))
    run("fedavg", data="digits", clients=6, rounds=3, model="logistic")
    assert seen == [(1, 2), (2, 1), (3, 0)]


@pytest.mark.parametrize("into", [None, [Each("value", clip=0.5)], [Sum("value"), Sum("count")]])
def test_draws_inputs_kept_state_and_releases_are_those_of_the_round(
    into: list[Release] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = {}
    for after in (2, 1_000):
        monkeypatch.setattr(recording, "AFTER", after)
        simulator = Simulator(block=5)
        store = clients([4] * 5)
        federation = Federation(simulation(store, simulator), 1)
        values = []
        for number in range(1, 7):
            replies = federation.begin_round(number).everyone().ask(Tasks().noisy, shift=float(number), into=into)
            values.append({name: replies[name] for name in replies})
        found[after] = values
        assert not torch.equal(values[-1]["value"], values[-2]["value"])
        if into is None:
            assert values[-1]["count"].tolist() == [5.0] * 5
    for early, late in zip(found[2], found[1_000], strict=True):
        assert all(torch.equal(early[name], late[name]) for name in late)


def test_private_cohorts_of_many_sizes_are_played_back_from_few_recordings(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their blocks are filled up; what fills them counts for nothing, and a recording changes no bit."""
    store, tasks = clients([4] * 40), Tasks()
    into = [Sum("value", clip=1.0, noise=Gaussian(0.5))]
    sizes = [18, 21, 17, 30, 20, 25, 23, 31, 19, 26]
    found = {}
    for after, block in ((2, 32), (1_000, 32), (1_000, 1)):
        monkeypatch.setattr(recording, "AFTER", after)
        simulator = Simulator(block=block)
        federation = Federation(simulation(store, simulator), 1)
        found[after, block] = [
            federation.begin_round(number).cohort(range(size)).ask(tasks.noisy, into=into, shift=1.0)["value"]
            for number, size in enumerate(sizes, 1)
        ]
        assert block == 1 or len(simulator._recordings._kinds) == 3  # 24 and 32; 24 also before anything was kept
        assert simulator._recordings.count() == (2 if after == 2 else 0)
    for recorded, called, single in zip(*found.values(), strict=True):
        assert torch.equal(recorded, called)
        torch.testing.assert_close(called, single)


def test_another_methods_task_is_another_recording(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recording, "AFTER", 2)
    simulator = Simulator(block=5)
    store = clients([4] * 5)
    federation = Federation(simulation(store, simulator))
    first, second = Tasks(2.0), Tasks(-2.0)
    for number in range(1, 6):
        cohort = federation.begin_round(number).everyone()
        one, other = (cohort.ask(method.noisy, shift=0.0)["value"].mean(1) for method in (first, second))
        expected = 2 * torch.stack([store.rows(i)[0].mean(0).sum() for i in range(5)])
        assert not torch.allclose(one, other)
        torch.testing.assert_close(one - other, 2 * expected, atol=5.0, rtol=0)  # up to the draws
    assert simulator._recordings.count() == 2


FULL, PADDED, UNLABELED = [0, 1, 2], [0, 1, 3], [0, 1, 4]  # of five clients the fourth has fewer rows
DOUBLE, HALF = Tasks(2.0), Tasks(0.5)


@pytest.mark.parametrize(
    ("often", "then"),
    [
        ((FULL, DOUBLE.mean, None), (PADDED, DOUBLE.mean, None)),
        ((PADDED, DOUBLE.mean, None), (FULL, DOUBLE.mean, None)),
        ((FULL, DOUBLE.labels, None), (UNLABELED, DOUBLE.labels, None)),
        ((FULL, DOUBLE.mean, None), (FULL, DOUBLE.largest, None)),
        ((FULL, DOUBLE.mean, None), (FULL, HALF.mean, None)),
        ((FULL, DOUBLE.mean, None), (FULL, DOUBLE.mean, [Each("value", clip=0.02)])),
        ((FULL, DOUBLE.mean, [Each("value", clip=0.05)]), (FULL, DOUBLE.mean, [Each("value", clip=0.02)])),
    ],
    ids=["padded", "full", "unlabeled", "another task", "another method", "a clip", "another clip"],
)
def test_calls_that_differ_in_one_thing_share_no_recording(
    often: tuple[list[int], Task, Any], then: tuple[list[int], Task, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Shapes are the same; all else that a call depends on varies one at a time."""
    store = clients([4, 4, 4, 3, 4])
    store.labeled[4] = False
    found = {}
    for after in (2, 1_000):
        monkeypatch.setattr(recording, "AFTER", after)
        simulator = Simulator(block=3)
        federation = Federation(simulation(store, simulator))
        for number, (who, asked, into) in enumerate([often] * 4 + [then], 1):
            if number == 5:
                assert simulator._recordings.count() == (after == 2)
            found[after] = federation.begin_round(number).cohort(who).ask(asked, into=into)
    assert torch.equal(found[2].answered, found[1_000].answered)
    assert torch.equal(found[2]["value"], found[1_000]["value"])


def test_seeded_noise_is_not_played_for_that_of_the_operating_system(monkeypatch: pytest.MonkeyPatch) -> None:
    store, into = clients([4, 4, 4]), [Each("value", clip=1.0, noise=Gaussian(0.5))]
    taken: dict[int, list[int]] = {2: [], 1_000: []}
    for after, counts in taken.items():
        monkeypatch.setattr(recording, "AFTER", after)
        simulator = Simulator(block=3)
        home = simulation(store, simulator)
        for number in range(1, 5):
            Federation(home, 1, round=number).everyone().ask(DOUBLE.mean, into=into)
        assert simulator._recordings.count() == (after == 2)
        monkeypatch.setattr(system.os, "urandom", lambda n, of=counts: of.append(n) or random.Random(n).randbytes(n))
        monkeypatch.setattr(discrete.os, "urandom", lambda n, of=counts: of.append(n) or random.Random(n).randbytes(n))
        Federation(home, 1, round=5, noise="system").everyone().ask(DOUBLE.mean, into=into)
    assert taken[2] == taken[1_000] and sum(taken[2]) > 18


def test_a_task_that_looks_at_a_value_is_not_recorded_and_stays_right(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recording, "AFTER", 2)
    simulator = Simulator(block=5)
    store = clients([4] * 5)
    federation = Federation(simulation(store, simulator))
    means = [
        federation.begin_round(number).everyone().ask(Tasks().branching, shift=float(number))["value"]
        for number in range(1, 6)
    ]
    torch.testing.assert_close(means[0], means[1])
    torch.testing.assert_close(means[4], -means[1])
    assert simulator._recordings.count() == 0


@pytest.mark.parametrize("name", ["listing", "selecting"])
def test_values_that_become_python_numbers_are_not_frozen(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recording, "AFTER", 2)
    federation = simulate(clients([4] * 5), block=5)
    for number in range(1, 6):
        replies = federation.begin_round(number).everyone().ask(getattr(Tasks(), name), shift=float(number))
        assert replies["value"][0, 0] == number


def _secret(self: object, client: Client) -> Sent:
    return send(value=torch.tensor(float(int.from_bytes(os.urandom(3), "little"))))


@dataclass(frozen=True)
class Secretive:
    secret = Task(_secret, vectorised=False)


def test_a_task_of_python_values_is_never_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recording, "AFTER", 2)
    federation = simulate(clients([4] * 5))
    drawn = [federation.begin_round(turn).everyone().ask(Secretive().secret)["value"] for turn in range(1, 6)]
    assert len(torch.cat(drawn).unique()) > 20


def test_plain_functions_are_not_recorded_and_the_memory_of_calls_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recording, "AFTER", 2)
    monkeypatch.setattr(recording, "MOST", 3)
    simulator = Simulator(block=5)
    store = clients([4] * 5)
    federation = Federation(simulation(store, simulator))
    for number in range(1, 6):
        federation.begin_round(number).everyone().ask(free, shift=1.0)
    assert simulator._recordings.count() == 0
    for number in range(6, 14):
        federation.begin_round(number).everyone().ask(Tasks(float(number)).noisy, shift=0.0)
    assert len(simulator._recordings._kinds) == 3
    for number in range(14, 24):  # twice each, so that all are recorded; the first ones are forgotten again
        method = Tasks(float(number))
        for turn in range(2):
            federation.begin_round(2 * number + turn).everyone().ask(method.noisy, shift=0.0)
    kinds = simulator._recordings._kinds.values()
    assert simulator._recordings.count() == 3
    assert simulator._recordings._nodes == sum(kind.nodes for kind in kinds) > 0


def test_what_is_computed_again_from_the_same_inputs_is_computed_once() -> None:
    def twice(inputs: recording.Inputs) -> Tensor:
        x = inputs["given"]["x"]
        return (x.T.clone() @ x) + 2 * (x.T.clone() @ x)

    x = {"given": {"x": torch.randn(5, 4)}}
    played, nodes = recording._record(twice, x)
    assert played is not None and torch.equal(played(x), twice(x))
    assert sum("mm" in str(node.target) for node in played.graph.nodes) == 1  # type: ignore[attr-defined]
    assert nodes == 1 + len(["transpose", "clone", "mm", "mul", "add"]) + 1


def test_equal_numbers_of_different_types_are_different_inputs() -> None:
    def typed(inputs: recording.Inputs) -> tuple[Tensor, ...]:
        x = inputs["given"]["x"]
        return x * 2, x * 2.0, x + True, x + 1, x + 1.0, torch.rand_like(x, dtype=torch.float32), torch.rand(3)

    x = {"given": {"x": torch.arange(3)}}
    played, _ = recording._record(typed, x)
    assert played is not None
    assert [one.dtype for one in played(x)] == [one.dtype for one in typed(x)]
    drawn = played(x)[5:]
    assert not torch.equal(*drawn)


@pytest.mark.parametrize(
    "draw",
    [
        lambda like: SystemDraws(like).bits(8),
        lambda like: SystemDraws().bits(8),
        lambda like: discrete.gaussian_noise(like, [8], like),
        lambda like: discrete.laplace_noise(like, [8], like),
        lambda like: torch.stack(
            [discrete.exponential_choice(torch.zeros(1000, dtype=torch.int64), like, like) for _ in range(4)]
        ),
    ],
    ids=["bits", "bits without a client", "gaussian", "laplace", "choice"],
)
def test_draws_of_the_operating_system_are_neither_shared_nor_kept(draw: Callable[[Tensor], Tensor]) -> None:
    def twice(inputs: recording.Inputs) -> tuple[Tensor, Tensor]:
        like = inputs["client"]["key"]
        return draw(like), draw(like)

    inputs = {"client": {"key": torch.tensor(1 << 20)}}
    played, _ = recording._record(twice, inputs)
    assert played is not None
    seen = [*played(inputs), *played(inputs)]
    assert all(not torch.equal(one, other) for one, other in itertools.combinations(seen, 2))


def test_a_graph_with_a_function_that_says_nothing_of_itself_stays_as_it_is() -> None:
    module = fx.symbolic_trace(lambda x: torch.relu(x) + torch.relu(x))  # no operation with a schema
    before = str(module.graph)
    recording._merge(module)
    recording._fold(module)
    assert str(module.graph) == before


def test_permutations_are_left_out_only_where_they_change_nothing() -> None:
    def permuted(inputs: recording.Inputs) -> tuple[Tensor, ...]:
        x = inputs["given"]["x"]
        return x.permute(0, 1) + 1, x.permute(1, 0) + 1, x.permute(-1, 0) + 1

    x = {"given": {"x": torch.arange(9).view(3, 3)}}
    played, _ = recording._record(permuted, x)
    assert played is not None and all(torch.equal(*pair) for pair in zip(played(x), permuted(x), strict=True))
    assert sum("permute" in str(node.target) for node in played.graph.nodes) < 3  # type: ignore[attr-defined]
