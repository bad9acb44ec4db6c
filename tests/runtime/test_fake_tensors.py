"""Every method's tasks run on PyTorch's fake tensors of another device, which refuse to meet those of the CPU.

Fake tensors have a device, a type and a shape, but no values. On a build without CUDA they cannot be differentiated as
CUDA's, so they are of the device "meta". ``on_pretended_device.py`` compares values.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from tests.runtime import problems
from unalike import Client, Federation, State, send, simulate, task, train
from unalike.core.task import Sent
from unalike.learn.evaluation import evaluate
from unalike.methods import METHODS
from unalike.methods.fedavg import FedAvg
from unalike.runtime.shard import call
from unalike.runtime.shard.simulator import Simulator
from unalike.runtime.shard.work import Work

META = torch.device("meta")
ONE_OF_EACH = {entry.cls: name for name, entry in METHODS.items()}  # of names that share a class, the last


class Faking:
    """Before a task runs for the first time, it runs on fake tensors of another device."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.faked: set[str] = set()
        self._call = Simulator._call
        patch.setattr(Simulator, "_call", lambda *arguments: self(*arguments))

    def __call__(self, here: Simulator, work: Work, rows: Tensor, *more: Any) -> object:
        if work.task.vectorised and work.task.name not in self.faked:
            self.faked.add(work.task.name)
            self._fake(work, rows)
        return self._call(here, work, rows, *more)

    def _fake(self, work: Work, rows: Tensor) -> None:
        mode = FakeTensorMode(allow_non_fake_inputs=True)  # a method's constants, which tasks move themselves

        def moved(arrays: Mapping[str, Tensor], _: object = None) -> dict[str, Tensor]:
            with mode:
                return {
                    name: value if isinstance(value, FakeTensor) else mode.from_tensor(value).to(META)
                    for name, value in arrays.items()
                }

        there = Simulator(block=4)
        there._device = META
        with (
            mock.patch.object(call, "to_device", moved),  # so that outputs stay there, too
            mock.patch.object(torch, "equal", lambda *_: True),  # of the global generator's states, before and after
        ):
            made = self._call(there, replace(work, shared=moved(work.shared)), rows, None)
            with mode:
                sent, kept = made()
        for name, value in (one for arrays in (*sent, kept) for one in arrays.items()):
            assert isinstance(value, FakeTensor) and value.device == META, f"{work.task.name} sends {name} elsewhere"


@pytest.fixture
def data(tmp_path: Path) -> Path:
    problems.write(tmp_path / "rows.npz")
    return tmp_path / "rows.npz"


@pytest.mark.parametrize("name", [*ONE_OF_EACH.values(), "pefll, masked labels"])
def test_every_task_stays_on_its_device(name: str, data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    faking, method = Faking(monkeypatch), problems.method_of(name)
    federation = simulate(problems.read(data), block=4)
    state = train(method, federation, 1)
    roster = problems.served(method, federation.runtime.roster)
    evaluate(method.model, lambda cohort: method.personalize(state, cohort), federation, roster)
    assert not federation.failures
    assert "Scorer.score" in faking.faked and len(faking.faked) > 1


@dataclass(frozen=True)
class Careless(FedAvg):
    """Its task adds a tensor that it makes on the CPU."""

    @task
    def shift(self, client: Client) -> Sent:
        return send(shifted=client.mean(client.x) + torch.zeros(problems.FEATURES, device="cpu"))

    def round(self, state: State, federation: Federation) -> State:
        federation.everyone().ask(self.shift)
        return state


def test_a_task_that_makes_its_tensors_on_the_cpu_is_found_out(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Faking(monkeypatch)
    with pytest.raises(RuntimeError, match=r"meta.*cpu|cpu.*meta"):
        train(Careless(problems.MODEL), simulate(problems.read(data), block=4), 1)
