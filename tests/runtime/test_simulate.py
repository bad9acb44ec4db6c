"""The simulator: the same result for every block size and thread count, and as on a wire."""

import math
import os
import resource
import signal
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.core.helpers import clients, kept, linear, scaled, simulation, total
from unalike import (
    Client,
    Clients,
    Each,
    Federation,
    LocalSGD,
    Model,
    Simulator,
    Sum,
    each,
    send,
    simulate,
    task,
    train,
)
from unalike.core.draws import key
from unalike.core.federation import QuorumError
from unalike.core.request import Reply
from unalike.core.task import Sent
from unalike.methods.fedavg import FedAvg
from unalike.privacy import Gaussian
from unalike.runtime.shard import simulator as module
from unalike.runtime.shard.kept import KeptStore
from unalike.runtime.shard.simulator import LoopInstead, Outputs
from unalike.runtime.shard.work import Work

SIZES = [5, 17, 1, 8, 8, 30, 12, 3, 9, 21]
TWICE = 2 * SIZES  # so that a cohort is larger than a block of 7


def trained(
    simulator: Simulator, sizes: list[int] = TWICE, epochs: int = 2, strict: bool = False
) -> tuple[Tensor, Federation]:
    store = clients(sizes)
    federation = Federation(simulation(store, simulator, strict=strict))
    local = LocalSGD(epochs=epochs, batch=4, lr=0.2, momentum=0.5, weight_decay=0.01)
    method = FedAvg(linear(), cohort=16, local=local)
    return train(method, federation, 4).theta, federation


def test_block_sizes_1_7_and_all_agree() -> None:
    one, seven, everybody = (trained(Simulator(block=block))[0] for block in (1, 7, 1000))
    assert torch.allclose(one, seven, atol=1e-5, rtol=0)
    assert torch.allclose(one, everybody, atol=1e-5, rtol=0)


@pytest.mark.parametrize("block", [1, 3])
def test_blocks_side_by_side_give_the_same_bits_as_one_after_another(
    block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("unalike.runtime.shard.tuning.SMALL", 0)
    monkeypatch.setattr("unalike.runtime.shard.recording.AFTER", 2)
    monkeypatch.setattr("unalike.runtime.shard.recording.SPENT", 0.0)
    monkeypatch.setattr("unalike.runtime.shard.recording.LONGEST", math.inf)  # however busy the machine is
    one, several = Simulator(block=block, threads=1), Simulator(block=block, threads=3)
    sizes = [5] * 9 + [9] * 9  # few shapes, because a recording of each takes a second
    assert torch.equal(trained(one, sizes, epochs=1)[0], trained(several, sizes, epochs=1)[0])
    assert one._recordings.count() == several._recordings.count() > 0


def test_how_many_work_side_by_side(monkeypatch: pytest.MonkeyPatch) -> None:
    running, most, patience = set(), 0, 0.01
    met = threading.Event()  # three are at work: until then, each waits for the others
    call = Simulator._call

    def watched(self: Simulator, work: Work, rows: Tensor, *more: Any) -> Callable[[], Outputs]:
        made = call(self, work, rows, *more)

        def run() -> Outputs:
            nonlocal most
            running.add(id(rows))
            most = max(most, len(running))
            if most == 3:
                met.set()
            met.wait(patience)
            outputs = made()
            running.discard(id(rows))
            return outputs

        return run

    monkeypatch.setattr(Simulator, "_call", watched)
    trained(Simulator(block=1, threads=3))
    assert most == 1  # small samples: steps are too short
    monkeypatch.setattr("unalike.runtime.shard.tuning.SMALL", 0)
    patience = 30.0
    trained(Simulator(block=1, threads=3))
    assert most == 3
    most = 0
    simulate(clients(SIZES), block=1, threads=3).everyone().ask(total)
    assert most == 1  # a plain function may lean on anything


@dataclass(frozen=True)
class Counting:
    """Has a model and keeps something, so that threads could get in each other's way."""

    model: Model

    @task
    def count(self, client: Client, theta: Tensor) -> Sent:
        times = client.kept.get("times", torch.zeros(())) + 1
        if client.n == 5:
            raise RuntimeError("five rows are too many")
        return send(scores=self.model(theta * client.n, client.x[:1]), times=times, keep={"times": times})


def test_side_by_side_a_client_keeps_its_own_and_fails_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("unalike.runtime.shard.tuning.SMALL", 0)
    sizes = list(range(1, 25))
    network = Model(nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 2)))
    store = clients(sizes)
    federation = simulate(store, block=1, threads=4)
    method, theta = Counting(network), network.init(0)
    for turn in (1, 2):
        replies = federation.everyone().ask(method.count, theta=theta)
        (failure,) = replies.failures
        assert failure.client == "4" and failure.reason.startswith("RuntimeError: five rows are too many\n")
        assert replies["times"].tolist() == [turn] * 23
        for row, position in zip(replies["scores"], replies.answered, strict=True):
            x, _ = store.rows(int(position))
            assert torch.equal(row, network(theta * len(x), x[:1]))


@pytest.fixture
def workers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small samples are computed side by side too."""
    monkeypatch.setattr("unalike.runtime.shard.tuning.SMALL", 0)


@pytest.mark.usefixtures("workers")
def test_whoever_gives_up_leaves_no_worker_at_work(monkeypatch: pytest.MonkeyPatch) -> None:
    begun, ended = [], []
    call = module._without_gradients

    def slow(job: Callable[[], Outputs]) -> Outputs:
        begun.append(1)
        time.sleep(0.05)
        outputs = call(job)
        ended.append(1)
        return outputs

    monkeypatch.setattr(module, "_without_gradients", slow)
    simulator = Simulator(block=1, threads=3)
    method = FedAvg(linear(), cohort=16, local=LocalSGD(epochs=1, batch=4))
    store = clients(TWICE)
    shared = {"theta": method.model.init(0), "rate": torch.ones(())}
    work = Work(method.fit, store, torch.arange(20), store.size, shared, {}, [Each("update")], key(0), KeptStore())
    batches = simulator.run(work)
    next(batches)
    batches.close()  # type: ignore[attr-defined]
    assert 1 <= len(begun) == len(ended) < 20


@pytest.mark.usefixtures("workers")
def test_a_process_that_forks_can_go_on_asking() -> None:
    expected, _ = trained(Simulator(block=1, threads=2))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # newer Pythons warn of forks with threads
        child = os.fork()
    if child == 0:
        signal.alarm(60)
        os._exit(0 if torch.equal(trained(Simulator(block=1, threads=2))[0], expected) else 1)
    assert os.waitpid(child, 0)[1] == 0


@pytest.mark.usefixtures("workers")
def test_large_blocks_are_not_all_held_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_BYTES_AHEAD", 1)
    simulator = Simulator(block=3, threads=4)
    running, most = [], 0
    prepared = Simulator._call

    def watched(self: Simulator, work: Work, rows: Tensor, *more: Any) -> Callable[[], Outputs]:
        nonlocal most
        running.append(rows)
        most = max(most, len(running))
        return prepared(self, work, rows, *more)

    finished = Simulator._finish

    def done(self: Simulator, *arguments: Any) -> list[Reply]:
        running.pop()
        return finished(self, *arguments)

    monkeypatch.setattr(Simulator, "_call", watched)
    monkeypatch.setattr(Simulator, "_finish", done)
    trained(simulator)
    assert most == 1


@dataclass(frozen=True)
class Particular:
    """Fails at clients whose first number is below -1."""

    @task
    def look(self, client: Client) -> Sent:
        assert client.full, "one by one, nobody is padded"
        if float(client.x[0, 0]) < -1:
            raise ValueError("too cold")
        labels = client.y.sum() if client.labeled else torch.tensor(-1)
        return send(value=client.mean(client.x.sum(-1)), labels=labels)


@pytest.mark.parametrize("threads", [1, 3])
def test_clients_read_together_are_still_computed_one_by_one(threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("unalike.runtime.shard.tuning.SMALL", 0)
    read = []
    prepared = Simulator._call

    def counted(self: Simulator, work: Work, rows: Tensor, *more: Any) -> Callable[[], Outputs]:
        read.append(len(rows))
        return prepared(self, work, rows, *more)

    monkeypatch.setattr(Simulator, "_call", counted)
    some = clients([3] * 200 + [5] * 200)
    some = replace(some, labeled=torch.arange(400) % 40 < 30)

    def asked(together: int) -> tuple[Tensor, Tensor, set[str], int]:
        monkeypatch.setattr("unalike.runtime.shard.work.TOGETHER", together)
        read.clear()
        federation = simulate(some, block=1, threads=threads)
        replies = federation.everyone().ask(Particular().look, into=[Each("value"), Each("labels")])
        order = replies.answered.argsort()
        failed = {failure.client for failure in replies.failures}
        return replies["value"][order], replies["labels"][order], failed, max(read)

    alone, labels, failed, most = asked(1)
    assert most == 1
    assert 0 < len(failed) < 200
    assert bool((labels == -1).any()) and bool((labels != -1).any())
    values, same_labels, same_failed, most = asked(8)
    assert most > 1
    assert torch.equal(values, alone) and torch.equal(same_labels, labels) and same_failed == failed


@dataclass(frozen=True)
class Branching:
    @task
    def look(self, client: Client) -> Sent:
        return send(value=client.x.sum() if client.x.sum() > 0 else -client.x.sum())


@pytest.mark.usefixtures("workers")
@pytest.mark.parametrize("threads", [1, 3])
def test_a_task_that_cannot_be_vectorised_is_tried_on_few_blocks(threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    blocks = []
    prepared = Simulator._call

    def counted(self: Simulator, work: Work, rows: Tensor, *more: Any) -> Callable[[], Outputs]:
        blocks.append(len(rows))
        return prepared(self, work, rows, *more)

    monkeypatch.setattr(Simulator, "_call", counted)
    federation = simulate(clients([3] * 40), block=4, threads=threads)
    with pytest.warns(LoopInstead):
        values = federation.everyone().ask(Branching().look)["value"]
    assert bool((values > 0).all())
    assert sum(size > 1 for size in blocks) <= threads + 2


def test_what_is_pure() -> None:
    @dataclass(frozen=True)
    class Own:
        network: nn.Module

        @task
        def look(self, client: Client) -> Sent:
            return send(value=client.x.sum())

    assert Branching().look.pure
    assert not Own(nn.Linear(2, 1)).look.pure  # its parameters could be exchanged by another thread
    assert not total.pure


@task
def drawn(client: Client) -> Sent:
    """Draws that show which random numbers a client gets."""
    return send(noise=client.draws.normal(3), batch=client.draws.integers(client.n, 5), order=client.draws.uniform(2))


def test_cohorts_batches_and_noise_do_not_depend_on_the_block() -> None:
    def everything(block: int) -> list[Tensor]:
        federation = simulate(clients(TWICE), block=block, seed=5).begin_round(3)
        cohort = federation.sample(16)
        replies = cohort.ask(drawn)
        local = cohort.ask(drawn, into=Each("noise", clip=1.0, noise=Gaussian(1.0)))
        central = cohort.ask(drawn, into=Sum("noise", clip=1.0, noise=Gaussian(1.0)))
        return [
            cohort.positions,
            replies["noise"],
            replies["batch"],
            replies["order"],
            local["noise"],
            central["noise"],
        ]

    for block in (7, 1000):
        for mine, theirs in zip(everything(1), everything(block), strict=True):
            assert torch.allclose(mine.double(), theirs.double(), atol=1e-6)


def test_two_equal_runs_are_bit_identical() -> None:
    assert torch.equal(trained(Simulator())[0], trained(Simulator())[0])
    assert torch.equal(trained(Simulator(block=7))[0], trained(Simulator(block=7))[0])


def test_strict_mode_sends_everything_through_the_codec_and_changes_nothing() -> None:
    plain, strict = (trained(Simulator(block=4), strict=strict)[0] for strict in (False, True))
    assert torch.equal(plain, strict)
    federation = simulate(clients([2, 3]), strict=True)
    assert federation.everyone().ask(scaled, factor=each(torch.ones(2)))["value"].shape == (2, 3)


@task
def unsendable(client: Client) -> Sent:
    return send(value=client.x.sum().to(torch.complex64), keep={"times": client.kept.get("times", torch.zeros(())) + 1})


@pytest.mark.parametrize("strict", [False, True])
def test_what_no_wire_carries_is_the_clients_failure_and_it_keeps_nothing(strict: bool) -> None:
    federation = simulate(clients([2, 3, 4]), block=3, strict=strict)
    with pytest.raises(QuorumError, match=r"WireError: 'value' is a torch\.complex64 tensor"):
        federation.everyone().ask(unsendable)
    assert kept(federation).state() == {}


def test_padding_never_counts() -> None:
    together = simulate(clients(SIZES), block=10).everyone().ask(total)["total"]
    store = clients(SIZES)
    assert torch.allclose(together, torch.stack([store.rows(i)[0].sum(0) for i in range(10)]), atol=1e-5)
    poisoned = clients(SIZES)
    poisoned.x[int(poisoned.start[2])] = torch.nan  # client 2 has this one row; its neighbours must not see it
    replies = simulate(poisoned, block=10).everyone().ask(total)
    assert [failure.client for failure in replies.failures] == ["2"]


@task
def branches(client: Client) -> Sent:
    return send(value=client.x.sum() if client.x.sum() > 0 else -client.x.sum())


def test_a_task_that_cannot_be_vectorised_runs_one_by_one_and_says_so_once() -> None:
    federation = simulate(clients([3] * 4), block=4)
    with pytest.warns(
        LoopInstead, match="task branches cannot be vectorised .* The operation that prevents it: "
    ) as said:
        first = federation.everyone().ask(branches)["value"]
        second = federation.everyone().ask(branches)["value"]
    assert len(said) == 1
    assert torch.equal(first, second) and bool((first > 0).all())


def test_a_cohort_larger_than_a_block_of_memory_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("unalike.runtime.shard.work.MAX_BLOCK_BYTES", 100)
    store = clients(SIZES)
    summed = simulate(store, block=1000).everyone().ask(total, into=Sum("total"))["total"]
    assert torch.allclose(summed, store.x.sum(0), atol=1e-4)


def test_memory_does_not_grow_with_rounds() -> None:
    federation = simulate(clients([20] * 50), block=50)
    method = FedAvg(linear(), cohort=50, local=LocalSGD(epochs=1, batch=10))
    state = train(method, federation, 20)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    train(method, federation, 200, state)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 20_000  # kB
    assert len(federation.transcript.entries) == 2 and federation.ledger.state()["cohorts"] == []


@pytest.mark.usefixtures("measured_blocks")
def test_the_measured_block_is_remembered(tmp_path: object, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UNALIKE_CACHE", str(tmp_path))
    store, first = clients([4] * 40), Simulator()
    Federation(simulation(store, first)).everyone().ask(total)
    second = Simulator()
    Federation(simulation(store, second)).everyone().ask(total)
    assert first._tuner.plans == second._tuner.plans
    assert os.listdir(str(tmp_path)) == ["tuning.json"]


def test_nonsense_settings_are_refused() -> None:
    with pytest.raises(ValueError, match="block=0"):
        Simulator(block=0)
    with pytest.raises(ValueError, match="drop=2"):
        simulate(clients([2]), drop=2.0)
    with pytest.raises(ValueError, match=r"shards=3; expected 1 to 2, the number of clients"):
        simulate(clients([2, 2]), shards=3)


def test_images_reach_tasks_as_normalised_floats() -> None:
    x = torch.tensor([[0], [255], [51]], dtype=torch.uint8)
    store = Clients.from_sizes(
        x, None, torch.tensor([2, 1]), shift=torch.tensor([51.0]), scale=torch.tensor([1 / 51.0])
    )
    sums = simulate(store).everyone().ask(total)["total"]
    assert torch.allclose(sums, torch.tensor([[3.0], [0.0]]))
    assert store.x.dtype == torch.uint8


def test_threads_that_watch_the_global_generator_do_not_wait_for_each_other_for_ever() -> None:
    program = """
import gc, threading, torch
from unalike.runtime.shard.call import _global_draws

def work():
    for _ in range(3000):
        cycle = torch.zeros(1)
        cycle.itself = cycle  # garbage whose collection gives up the interpreter
        _global_draws()

gc.set_threshold(5, 1, 1)
threads = [threading.Thread(target=work, daemon=True) for _ in range(3)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
print("all came through")
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert done.stdout == "all came through\n", done.stderr
