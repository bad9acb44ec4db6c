"""Workers behind an engine that needs no other process: hosts in this one, which answer when they are asked."""

from __future__ import annotations

from concurrent.futures import Future
from pathlib import Path

import pytest
import torch

from tests.core.helpers import clients, scaled
from unalike import Federation, Sum
from unalike.core.request import Program
from unalike.core.wire import ArrayStore
from unalike.runtime.shard.host import Host
from unalike.runtime.shard.journal import Journal
from unalike.runtime.shard.shard import Shard
from unalike.runtime.workers import Unreachable, WorkerRuntime, Workers

PEOPLE = clients([2, 3])


class LocalHosts:
    """An engine with one worker."""

    count = 1

    def __init__(self, folder: Path, most: int) -> None:
        self.folder, self.most = folder, most
        self.sent: list[int] = []  # arrays that came with each request
        self.dead = False
        self.start()

    def start(self) -> None:
        self.host = Host()
        self.host._journal = Journal(Shard({"train": PEOPLE}, PEOPLE.roster(), Program([scaled])), self.folder)
        self.host._journal._arrays = ArrayStore(self.most)

    def name(self, number: int) -> str:
        return f"worker {number}"

    def begin(self, number: int, what: str, *data: bytes) -> Future[bytes]:
        answer: Future[bytes] = Future()
        if what == "answer":
            self.sent.append(len(data) - 1)
        if self.dead:
            self.dead = False
            self.start()
            answer.set_exception(Unreachable("it has died"))
        else:
            answer.set_result(self.host.call(what, *data))
        return answer

    def share(self, data: bytes) -> bytes:
        return data

    def end(self, number: int) -> None: ...

    def close(self) -> None: ...


def runtime(folder: Path, most: int) -> tuple[WorkerRuntime, LocalHosts]:
    engine = LocalHosts(folder, most)
    return WorkerRuntime(Workers(engine), [PEOPLE.roster()], Program([scaled])), engine


def ask(federation: Federation, factor: torch.Tensor, shift: torch.Tensor) -> torch.Tensor:
    return federation.everyone().ask(scaled, into=Sum("value"), factor=factor, shift=shift)["value"]


@pytest.fixture(autouse=True)
def name_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("unalike.core.federation._LARGE", 1)


def test_a_worker_that_has_forgotten_an_array_gets_all_of_the_ask_again(tmp_path: Path) -> None:
    made, engine = runtime(tmp_path, most=12)  # one array of three numbers
    federation = Federation(made, 0, noise="seeded")
    a, b, c = (torch.full((3,), float(value)) for value in (1, 2, 3))
    first = ask(federation, a, b)  # after it the worker has b alone
    assert torch.isfinite(first).all()
    ask(federation, c, a)  # c is new, a was evicted
    assert engine.sent == [2, 1, 2] and not federation.failures
    for _ in range(5):
        ask(federation, a, b)
        ask(federation, c, a)
    assert not federation.failures and made.tallies[0].restarts == 0


def test_a_worker_revived_in_another_call_gets_its_arrays_again_at_once(tmp_path: Path) -> None:
    made, engine = runtime(tmp_path, most=1 << 20)
    federation = Federation(made, 0, noise="seeded")
    a, b = torch.ones(3), 2 * torch.ones(3)
    ask(federation, a, b)
    ask(federation, a, b)
    assert engine.sent == [2, 0]
    engine.dead = True
    made.commit("run", 2)
    ask(federation, a, b)
    assert engine.sent == [2, 0, 2]
