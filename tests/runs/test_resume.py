"""Every method goes on from a checkpoint as if it had never stopped: its state, and what its clients keep."""

from __future__ import annotations

import functools
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.runtime import problems
from unalike import Federation, State, simulate, train
from unalike.data.population import Population
from unalike.methods import METHODS
from unalike.runs import checkpoint
from unalike.runtime.simulate import Simulation


@pytest.fixture(scope="module")
def people(tmp_path_factory: pytest.TempPathFactory) -> Population:
    file = tmp_path_factory.mktemp("tiny") / "rows.npz"
    problems.write(file)
    return problems.read(file)


def after(federation: Federation, state: State) -> dict[str, Tensor]:
    """All that there is: the server's tensors and the clients'."""
    assert isinstance(federation.runtime, Simulation)
    kept = federation.runtime.kept(federation.run)
    return {**state, **{f"kept {name}": value for name, value in kept.items()}}


@pytest.mark.parametrize("name", [*METHODS, *(name for name in problems.VARIANTS if "secure" not in name)])
def test_a_method_goes_on_where_it_was(name: str, people: Population, tmp_path: Path) -> None:
    method, rounds = problems.method_of(name), problems.ROUNDS
    begin = functools.partial(simulate, people, 3, block=4)
    whole = begin()
    expected = after(whole, train(method, whole, rounds))
    first = begin()
    checkpoint.save(tmp_path, train(method, first, 1), first)
    saved = checkpoint.load(tmp_path)
    assert saved is not None and saved.round == 1
    second = begin()
    saved.restore(second)
    found = after(second, train(method, second, rounds - 1, saved.state))
    assert found.keys() == expected.keys()
    for tensor, value in expected.items():
        assert torch.equal(found[tensor].nan_to_num(), value.nan_to_num()), tensor
    assert second.ledger.state() == whole.ledger.state()
