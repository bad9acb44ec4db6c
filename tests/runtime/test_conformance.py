"""Every method gives the same result wherever its clients live, and nothing else crosses than what it may.

The same: equal bits for equal sharding; up to the order of sums for another sharding or another runtime. All clients'
draws are their own, so cohorts, batches, noise and drop-outs do not change.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.runtime import problems
from tests.runtime.pipe import Opened, Pipe, Remote, crossed, unopened
from unalike import Each, Federation, State, simulate
from unalike.core.federation import QuorumError
from unalike.core.method import tasks_of
from unalike.core.request import Program, ReleaseName, Request
from unalike.core.schema import Schema
from unalike.core.wire import WireError
from unalike.deploy.program import program_of
from unalike.learn.scaling import scale_inputs
from unalike.methods import METHODS
from unalike.methods.fedavg import FedAvg
from unalike.runs.simulate import gather_models

SEED = 3
NAMES = [*METHODS, *problems.VARIANTS]
SECURE = [name for name in [*NAMES, *problems.PROTECTED] if "secure" in name]
PROBLEMS = problems.__name__


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("tiny") / "rows.npz"
    problems.write(file)
    return file


def quorum(name: str) -> float:
    return 0.5 if name in SECURE else 0.2


def drop_of(name: str) -> float:
    """A secure sum asks its four or five clients six times, and two or three of them must be left at the end."""
    return 0.1 if name in SECURE else 0.3


def seed_of(name: str) -> int:
    """With this seed, secure sums lose clients in several of their exchanges and can still be opened."""
    return 21 if name in SECURE else SEED


@functools.cache  # several tests compare with it
def here(name: str, data: Path, shards: int, strict: bool = False, drop: float = 0.0) -> dict[str, Tensor]:
    """What comes of it in this process, personal models included, wherever they lie."""
    population = problems.read(data)
    method = problems.method_of(name)
    federation = simulate(
        population, seed_of(name), shards=shards, block=4, strict=strict, drop=drop, quorum=quorum(name)
    )
    found = problems.outcome(method, federation)
    state = problems.State({k: v for k, v in found.items() if not k.endswith("of each")})
    with federation.aside(problems.served(method, federation.runtime.roster)) as aside:
        cohort = aside.everyone()
        return {**found, "model of each": gather_models(cohort, method.personalize(state, cohort))}


def check_alike(found: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float = 1e-5) -> None:
    for name, value in expected.items():
        assert found[name].shape == value.shape, name
        if not value.is_floating_point():
            assert torch.equal(found[name], value), name
            continue
        assert torch.equal(found[name].isnan(), value.isnan()), name
        gap = (found[name] - value).nan_to_num().norm()
        assert gap <= tolerance * value.nan_to_num().norm() + 1e-9, f"{name} is off by {float(gap):.2g}"


# Shards in this process. Of five, some have one client of a cohort, and that of clients 2 and 7, who has no labels and
# who is a newcomer, has none.


@pytest.mark.parametrize("name", NAMES)
def test_any_number_of_shards_gives_the_same_result(name: str, data: Path) -> None:
    one, two, five = (here(name, data, shards) for shards in (1, 2, 5))
    check_alike(two, one)
    check_alike(five, one)
    assert bool(one["loss of each"].isfinite().any())
    through_codec = here(name, data, 2, strict=True)
    for array, value in two.items():
        assert torch.equal(value.nan_to_num(), through_codec[array].nan_to_num()), array


@pytest.mark.parametrize("name", NAMES)
def test_with_drop_outs_too(name: str, data: Path) -> None:
    one, five = (here(name, data, shards, drop=drop_of(name)) for shards in (1, 5))
    check_alike(five, one)
    whole = here(name, data, 1)
    assert any(  # somebody was missing
        not torch.equal(one[array].nan_to_num(), whole[array].nan_to_num()) for array in whole
    )


# Shards in other processes


@pytest.fixture(scope="module")
def remotes() -> Iterator[list[Remote]]:
    made = [Remote(), Remote()]
    yield made
    for remote in made:
        remote.close()


def elsewhere(name: str, data: Path, remotes: list[Remote], drop: float = 0.0) -> dict[str, Tensor]:
    with unopened(data):
        runtime = Pipe(remotes, PROBLEMS, name, data, drop)
        roster = runtime.roster.select(range(problems.SEEN))
        federation = Federation(runtime, seed_of(name), roster, quorum=quorum(name))
        return problems.outcome(problems.method_of(name), federation)


def check_conforms(name: str, data: Path, remotes: list[Remote], drop: float = 0.0) -> None:
    """The same result as here, nothing that is a client's own among what crossed (``Noted`` lists it), and the data
    were never opened here."""
    found = elsewhere(name, data, remotes, drop)
    expected = here(name, data, 1 if drop else 2, drop=drop)  # whichever another test has made already
    check_alike(found, {array: value for array, value in expected.items() if array != "model of each"})
    assert not crossed(remotes), f"{crossed(remotes)[0]} has crossed"


@pytest.mark.parametrize("name", [*NAMES, *problems.PROTECTED])
def test_another_process_gives_the_same_result_drops_the_same_clients_and_keeps_what_is_its_own(
    name: str, data: Path, remotes: list[Remote]
) -> None:
    check_conforms(name, data, remotes, drop_of(name))


@pytest.mark.parametrize("name", ["local", "fedavg", "fedpi", "pefll", "flowdup", "fedavg, secure and noisy"])
def test_so_it_does_where_everybody_answers(name: str, data: Path, remotes: list[Remote]) -> None:
    """One of each kind: who drops out is decided before a request is sent, and changes nothing at the shards."""
    check_conforms(name, data, remotes)


def test_inputs_are_scaled_alike(data: Path, remotes: list[Remote]) -> None:
    near = simulate(problems.read(data), SEED)
    far = Federation(Pipe(remotes, PROBLEMS, "fedavg", data), SEED, near.roster)
    schemas = [scale_inputs(federation) for federation in (near, far)]
    for name in ("shift", "scale"):
        torch.testing.assert_close(getattr(schemas[0], name), getattr(schemas[1], name))
    method = problems.method_of("fedavg")
    found, expected = (problems.outcome(method, federation) for federation in (far, near))
    check_alike(found, expected)
    assert not torch.allclose(expected["theta"], here("fedavg", data, 1)["theta"])


def test_what_is_looked_for_was_there(data: Path, remotes: list[Remote]) -> None:
    """The arrays that must not cross are noted at all: without this the search would find nothing for no reason."""
    for name, array in {
        "local": "kept theta",
        "fedavg-finetune": "kept held.",
        "flowdup": "kept held.",
        "pefll, masked labels": "kept held.",
        "fedavg, client-level noise": "raw update",
        "fedavg, secure": "kept secure.array",
    }.items():
        elsewhere(name, data, remotes)
        noted = [one for remote in remotes for one in remote.noted()]
        assert any(array in one for one in noted), name


@pytest.mark.parametrize(
    ("name", "error"),
    [
        ("reads", "object has no attribute 'parts'"),
        ("sends", "a row of a client has crossed"),
        ("brings", "theta of a client has crossed"),
    ],
)
def test_a_method_that_reads_rows_or_brings_models_to_the_server_does_not_conform(
    name: str, error: str, data: Path, remotes: list[Remote]
) -> None:
    problems.outcome(problems.method_of(name), simulate(problems.read(data), SEED))  # here, nothing stands against it
    with pytest.raises((AssertionError, AttributeError), match=error):
        check_conforms(name, data, remotes)


def test_a_shard_elsewhere_refuses_what_is_not_in_its_program(data: Path, remotes: list[Remote]) -> None:
    runtime = Pipe(remotes, PROBLEMS, "fedavg", data)
    federation = Federation(runtime, SEED)
    method, other = problems.method_of("fedavg"), problems.method_of("local")
    with pytest.raises(ValueError, match=r"Local\.fit is not in the program that the clients agreed to"):
        federation.everyone().ask(other.fit)  # type: ignore[attr-defined]
    runtime.program = Program(open=True)  # a server that agreed to nothing
    with pytest.raises(QuorumError, match=r"refused: no task 'Local\.fit' is in the program"):
        federation.everyone().ask(other.fit)  # type: ignore[attr-defined]
    theta = method.start(0).theta
    with pytest.raises(QuorumError, match=r"refused: FedAvg\.fit lets out mean\(update, size\)"):
        federation.everyone().ask(method.fit, theta=theta, rate=1.0, into=Each("update"))  # type: ignore[attr-defined]
    Pipe(remotes, PROBLEMS, "fedavg, point-level noise", data)
    with pytest.raises(QuorumError, match=r"refused: FedAvg\.fit derives noise at the client"):
        federation.everyone().ask(method.fit, theta=theta, rate=1.0, noise=0.0, into=[])  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("name", "task"),
    [
        ("fedavg-finetune", "FedAvg.adapt"),
        ("local", "Local.personal_model"),
        ("adaped", "AdaPeD.recall"),
        ("fedtta", "FedTTA.adapt"),
        ("flowdup", "FLowDUP.generate"),
        ("pefll, masked labels", "PeFLL.mask"),
    ],
)
@pytest.mark.parametrize("kind", ["each", "sum", "mean"])
def test_no_server_can_ask_for_a_model_that_stays(name: str, task: str, kind: str) -> None:
    program = program_of(problems.method_of(name), Schema((problems.FEATURES,)))
    ids = torch.tensor([0])
    request = Request("run", 1, task, ids, "train", True, "train", 0, (ReleaseName(kind, ("theta",)),), {}, {})
    with pytest.raises(WireError, match=rf"lets out stays\(theta\), but was asked for {kind}\(theta\)"):
        program.releases(request)


def test_a_server_that_opens_the_data_is_found_out(
    data: Path, remotes: list[Remote], monkeypatch: pytest.MonkeyPatch
) -> None:
    def start(method: FedAvg, seed: int) -> State:
        with contextlib.suppress(Exception):  # and says nothing of it
            problems.read(data)
        return usual(method, seed)

    usual = FedAvg.start
    monkeypatch.setattr(FedAvg, "start", start)
    problems.outcome(problems.method_of("fedavg"), simulate(problems.read(data), SEED))
    with pytest.raises(Opened, match=data.name):
        check_conforms("fedavg", data, remotes)


# The program of a method


def test_a_program_lists_a_methods_tasks_those_it_delegates_to_scoring_and_the_exchanges() -> None:
    assert [task.name for task in tasks_of(problems.method_of("fedavg"))] == ["FedAvg.adapt", "FedAvg.fit"]
    borrowed = program_of(problems.method_of("pfl-nearest"), Schema((problems.FEATURES,)))
    for name in (
        "Borrowed.summarise",
        "PFedHN.fit",
        "Scorer.score",
        "Scaling.totals",
        "advertise",
        "share",
        "mask",
        "unmask",
    ):
        assert borrowed.task(name).name == name
    twice = tasks_of(problems.method_of("fedavg"))
    with pytest.raises(ValueError, match=r"two tasks of a program have one name: FedAvg\.adapt, FedAvg\.fit"):
        Program([*twice, *tasks_of(problems.method_of("fedavg-finetune"))])
