"""Arrays named by digests on Ray's runtime: workers here are hosts in this process, so that no Ray is needed."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import pytest
import torch

from tests.core.helpers import clients, scaled
from unalike import Federation, Sum
from unalike.core.request import Program
from unalike.core.wire import ArrayStore
from unalike.runtime.shard.host import Host
from unalike.runtime.shard.journal import Journal
from unalike.runtime.shard.shard import Shard

if TYPE_CHECKING:
    from unalike.runtime.ray import RayRuntime

PEOPLE = clients([2, 3])


class Dead(Exception):
    """What Ray raises for a call to a worker that has died."""


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """``unalike.runtime.ray`` without a cluster: calls are done when they are waited for."""
    ray, errors = ModuleType("ray"), ModuleType("ray.exceptions")
    errors.RayError = Dead  # type: ignore[attr-defined]
    errors.ActorDiedError = type("ActorDiedError", (Dead,), {})  # type: ignore[attr-defined]
    ray.exceptions = errors  # type: ignore[attr-defined]
    ray.wait = lambda futures, **_: (futures, [])  # type: ignore[attr-defined]
    ray.get = lambda future: future()  # type: ignore[attr-defined]
    name = "unalike.runtime.ray"
    monkeypatch.setitem(sys.modules, "ray", ray)
    monkeypatch.setitem(sys.modules, "ray.exceptions", errors)
    monkeypatch.delitem(sys.modules, name, raising=False)
    yield importlib.import_module(name)
    sys.modules.pop(name, None)


class LocalHosts:
    """Stands in for the actor of one worker."""

    def __init__(self, folder: Path, most: int) -> None:
        self.folder, self.most = folder, most
        self.sent: list[int] = []  # arrays that came with each request
        self.asked: list[str] = []
        self.dead = False
        self.call = self
        self.start()

    def start(self) -> None:
        self.host = Host()
        self.host._journal = Journal(Shard({"train": PEOPLE}, PEOPLE.roster(), Program([scaled])), self.folder)
        self.host._journal._arrays = ArrayStore(self.most)

    def remote(self, what: str, *data: bytes) -> Any:
        def answer() -> bytes:
            self.asked.append(what)
            if what == "answer":
                self.sent.append(len(data) - 1)
            if self.dead:
                self.dead = False
                self.start()
                raise Dead
            return self.host.call(what, *data)

        return answer


def runtime(module: ModuleType, folder: Path, most: int) -> tuple[RayRuntime, LocalHosts]:
    workers = object.__new__(module.Workers)
    actor = LocalHosts(folder, most)
    workers.count, workers._actors, workers._setup = 1, [actor], [{}]
    workers.received = [set()]
    return module.RayRuntime(workers, [PEOPLE.roster()], Program([scaled])), actor


def ask(federation: Federation, factor: torch.Tensor, shift: torch.Tensor) -> torch.Tensor:
    return federation.everyone().ask(scaled, into=Sum("value"), factor=factor, shift=shift)["value"]


@pytest.fixture(autouse=True)
def name_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("unalike.core.federation._LARGE", 1)


def test_a_worker_that_has_forgotten_an_array_gets_all_of_the_ask_again(module: ModuleType, tmp_path: Path) -> None:
    made, actor = runtime(module, tmp_path, most=12)  # one array of three numbers
    federation = Federation(made, 0, noise="seeded")
    a, b, c = (torch.full((3,), float(value)) for value in (1, 2, 3))
    first = ask(federation, a, b)  # after it the worker has b alone
    assert torch.isfinite(first).all()
    ask(federation, c, a)  # c is new, a was evicted
    assert actor.sent == [2, 1, 2] and not federation.failures
    for _ in range(5):
        ask(federation, a, b)
        ask(federation, c, a)
    assert not federation.failures and made.tallies[0].restarts == 0


def test_a_worker_revived_in_another_call_gets_its_arrays_again_at_once(module: ModuleType, tmp_path: Path) -> None:
    made, actor = runtime(module, tmp_path, most=1 << 20)
    federation = Federation(made, 0, noise="seeded")
    a, b = torch.ones(3), 2 * torch.ones(3)
    ask(federation, a, b)
    ask(federation, a, b)
    assert actor.sent == [2, 0]
    actor.dead = True
    made.commit("run", 2)
    ask(federation, a, b)
    assert actor.sent == [2, 0, 2]
