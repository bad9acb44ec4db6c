"""A shard: who may live there, what its clients keep and for whom, and what it refuses."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from tests.core.helpers import clients, kept, population
from unalike import Client, Each, Sum, each, send, simulate, task
from unalike.core.federation import Federation
from unalike.core.release import Stays
from unalike.core.request import Program, ReleaseName, Request
from unalike.core.roster import Declarations
from unalike.core.task import Sent
from unalike.core.wire import WireError
from unalike.runs.simulate import gather_models
from unalike.runtime.shard.kept import KeptStore
from unalike.runtime.shard.shard import ASIDES, Refused, Shard
from unalike.runtime.simulate import Simulation


@task
def counts_up(client: Client) -> Sent:
    times = client.kept.get("times", torch.zeros(())) + 1
    return send(times=times, keep={"times": times})


@task
def means(client: Client) -> Sent:
    return send(mean=client.mean(client.x))


@task
def doubled(client: Client, mean: Tensor) -> Sent:
    return send(value=2 * mean, difference=(mean - client.mean(client.x)).abs().max())


def shard_of(federation: Federation) -> Shard:
    assert isinstance(federation.runtime, Simulation)
    return federation.runtime.shards[0]


def test_a_client_with_more_rows_than_it_declared_is_refused() -> None:
    store = replace(clients([3, 5]), names=["here", "there"])
    roster = store.roster()
    with pytest.raises(ValueError, match="client there has 5 rows, but declared at most 4; raise its declared size"):
        Shard({"train": store}, replace(roster, bound=torch.tensor([3, 4])), Program())
    Shard({"train": store}, replace(roster, bound=torch.tensor([30, 5])), Program())  # fewer are allowed
    with pytest.raises(ValueError, match="lists the clients of its data, in their order"):
        Shard({"train": store}, roster.select([1, 0]), Program())


def test_tasks_and_weights_go_by_the_declared_size() -> None:
    store = clients([3, 5])
    roster = replace(store.roster(), bound=torch.tensor([10, 20]))
    program = Program(open=True)
    federation = Federation(Simulation([Shard({"train": store}, roster, program)], program))

    @task
    def sizes(client: Client) -> Sent:
        return send(bound=client.bound, n=client.n)

    replies = federation.everyone().ask(sizes)
    assert replies["bound"].tolist() == [10, 20] and replies["n"].tolist() == [3, 5]
    assert federation.everyone().sizes.tolist() == [10, 20]


# What is kept


def test_asides_read_through_and_never_write() -> None:
    federation = simulate(clients([1] * 3))
    federation.cohort([1]).ask(counts_up)
    with federation.aside() as first, federation.aside() as second:
        assert first.everyone().ask(counts_up)["times"].tolist() == [1, 2, 1]
        assert second.everyone().ask(counts_up)["times"].tolist() == [1, 2, 1]  # not what the other one kept
        federation.cohort([1]).ask(counts_up)
        assert first.everyone().ask(counts_up)["times"].tolist() == [2, 3, 2]  # its own goes before
    assert kept(federation).state()["times.ids"].tolist() == [1]
    assert kept(federation).state()["times.values"].tolist() == [2]


def test_what_an_aside_kept_is_forgotten_with_it() -> None:
    federation = simulate(clients([1] * 3))
    with federation.aside() as aside:
        aside.everyone().ask(counts_up)
        aside.everyone().ask(means, into=Stays("mean"))
        assert aside.run in shard_of(federation)._kept
    assert aside.run not in shard_of(federation)._kept
    for _ in range(3 * ASIDES):  # and of asides that nobody closes, the last ones are remembered
        federation.aside().everyone().ask(counts_up)
    assert len(shard_of(federation)._kept) <= ASIDES + 1
    assert not kept(federation).state()


@pytest.mark.parametrize("shards", [1, 2])
def test_what_stays_is_an_input_of_a_later_ask_at_the_same_client(shards: int) -> None:
    store = clients([2, 5, 3, 4])
    federation = simulate(store, shards=shards)
    cohort = federation.cohort([3, 0, 2])
    held = cohort.ask(means, into=Stays("mean")).held("mean")
    own = torch.stack([store.rows(i)[0].mean(0) for i in (3, 0, 2)])
    replies = cohort.ask(doubled, mean=held)
    assert torch.allclose(replies["value"], 2 * own, atol=1e-6) and float(replies["difference"].max()) < 1e-6
    assert torch.allclose(federation.cohort([2, 3]).ask(doubled, mean=held)["value"], 2 * own[[2, 0]], atol=1e-6)
    assert torch.allclose(gather_models(cohort, held), own, atol=1e-6)
    assert federation.traffic.up.keys() == {"value", "difference"}
    with pytest.raises(KeyError, match="no array 'total' stayed at its client in this ask; there are: mean"):
        cohort.ask(means, into=Stays("mean")).held("total")


def test_a_handle_is_known_where_it_was_made_and_nowhere_else() -> None:
    federation = simulate(clients([2, 5, 3]))
    held = federation.cohort([0, 1]).ask(means, into=Stays("mean")).held("mean")
    with pytest.raises(Refused, match=r"some of the clients hold nothing under '1\.mean'"):
        federation.everyone().ask(doubled, mean=held)
    with federation.aside() as aside, pytest.raises(Refused, match="hold nothing under"):
        aside.cohort([0]).ask(doubled, mean=held)
    shard_of(federation).forget(federation.run)
    with pytest.raises(Refused, match="hold nothing under"):
        federation.cohort([0]).ask(doubled, mean=held)


def test_what_stays_is_never_saved_and_no_task_reads_it() -> None:
    @task
    def reads(client: Client) -> Sent:
        return send(names=torch.tensor(len(client.kept.values)))

    federation = simulate(clients([2, 5]))
    federation.everyone().ask(means, into=Stays("mean"))
    assert kept(federation).state() == {}
    assert federation.everyone().ask(reads)["names"].tolist() == [0, 0]


def test_secrets_of_a_secure_sum_are_never_saved(monkeypatch: pytest.MonkeyPatch) -> None:
    states: list[dict[str, Tensor]] = []
    names: set[str] = set()
    write = KeptStore.write

    def watched(self: KeptStore, ids: Tensor, values: dict[str, Tensor]) -> None:
        write(self, ids, values)
        names.update(self._columns)
        states.append(self.state())

    monkeypatch.setattr(KeptStore, "write", watched)
    federation = simulate(clients([1] * 4))
    federation.everyone().ask(counts_up)
    federation.everyone().ask(means, into=Sum("mean", clip=9.0, secure=True))
    assert {"secure.array", "secure.state"} <= names  # they were there
    assert all(name.startswith("times.") for state in states for name in state)
    assert set(kept(federation)._columns) == {"times"}  # and are gone


def test_kept_state_comes_back_from_what_was_saved_and_goes_on_growing() -> None:
    store = KeptStore()
    ids = torch.tensor([9, 2, 5, 7, 1, 3])
    store.write(ids[:2], {"a": torch.ones(2, 3), "b.c": torch.tensor([1, 2])})
    store.write(ids, {"a": torch.arange(18.0).reshape(6, 3)})
    back = KeptStore.from_state(store.state())
    read, before = back.read(ids), store.read(ids)
    for name in ("a", "b.c"):
        assert torch.equal(read.values[name][read.present[name]], before.values[name][before.present[name]])
        assert torch.equal(read.present[name], before.present[name])
    assert read.present["b.c"].tolist() == [True, True, False, False, False, False]
    with pytest.raises(ValueError, match=r"kept 'a' has shape \(3,\), but a task now keeps it with shape \(2,\)"):
        back.write(ids, {"a": torch.zeros(6, 2)})


def test_runs_do_not_know_of_each_other() -> None:
    store = clients([1] * 3)
    first = simulate(store, run="first")
    second = Federation(first.runtime, run="second")
    first.everyone().ask(counts_up)
    assert second.everyone().ask(counts_up)["times"].tolist() == [1, 1, 1]
    first.runtime.forget("second")
    assert first.everyone().ask(counts_up)["times"].tolist() == [2, 2, 2]
    assert second.everyone().ask(counts_up)["times"].tolist() == [1, 1, 1]


# What is refused


@dataclass(frozen=True)
class Careful:
    @task
    def fit(self, client: Client, theta: Tensor, noise: Tensor) -> Sent:
        return send(value=theta * noise)

    @fit.derive
    def own(self, declared: Declarations) -> dict[str, Tensor]:
        return {"noise": 1.0 / declared.bound}


def asked(**changes: object) -> Request:
    usual = Request(
        "run", 1, "Careful.fit", torch.tensor([0, 1]), "train", True, "train", 7, (ReleaseName("each", ("value",)),),
        {"theta": torch.ones(())}, {},
    )  # fmt: skip
    return replace(usual, **changes)  # type: ignore[arg-type]


def closed() -> Shard:
    store = clients([2, 4])
    return Shard({"train": store}, store.roster(), Program([Careful().fit]))


def test_a_client_derives_its_own_inputs() -> None:
    (reply,) = closed().answer(asked())
    assert reply.arrays[0]["value"][torch.argsort(reply.rows)].tolist() == [0.5, 0.25]


@pytest.mark.parametrize("where", ["shared", "each", "held"])
def test_what_a_client_derives_cannot_be_set_from_outside(where: str) -> None:
    value: object = {"shared": torch.ones(()), "each": torch.ones(2), "held": "1.value"}[where]
    inputs = {"shared": {"theta": torch.ones(())}, "each": {}, "held": {}}
    inputs[where] = {**inputs[where], "noise": value}  # type: ignore[dict-item]
    with pytest.raises(Refused, match=r"Careful\.fit derives noise at the client; a request cannot set it"):
        next(closed().answer(asked(**inputs)))


@pytest.mark.parametrize(
    ("changes", "error", "expected"),
    [
        ({"ids": torch.tensor([0, 5])}, Refused, "client 5 does not live here"),
        ({"ids": torch.tensor([1, 1])}, Refused, "names a client twice"),
        ({"part": "test"}, Refused, "the clients here have no test rows"),
        ({"task": "steal"}, WireError, "no task 'steal'"),
        ({"shared": {}}, TypeError, "needs the input theta"),
        ({"shared": {"theta": torch.ones(()), "x": torch.ones(())}}, TypeError, "has no input 'x'"),
        ({"held": {"theta": "3.theta"}, "shared": {}}, Refused, "hold nothing under '3.theta'"),
    ],
)
def test_a_request_that_does_not_fit_is_refused_before_anything_runs(
    changes: dict[str, object], error: type[Exception], expected: str
) -> None:
    with pytest.raises(error, match=expected):
        next(closed().answer(asked(**changes)))


@pytest.mark.parametrize("shards", [1, 2])
def test_a_roster_with_a_client_that_no_shard_has_is_told(shards: int) -> None:
    runtime = simulate(clients([2, 3, 4]), shards=shards).runtime
    more = replace(runtime.roster, ids=torch.tensor([0, 1, 9]))
    with pytest.raises(ValueError, match=r"client 9 (does not live here|lives in no shard)"):
        Federation(runtime, roster=more).everyone().ask(means)


def test_labels_are_out_of_reach_where_they_are_hidden_and_other_parts_have_their_own_rows() -> None:
    @task
    def looks(client: Client) -> Sent:
        return send(labeled=client.labeled, first=client.x[0, 0], rows=client.n)

    train, test = clients([3, 4]), clients([2, 2], seed=9)
    federation = simulate(population(train, test))
    with federation.aside(labels=False) as aside:
        hidden = aside.everyone().ask(looks)
        assert not hidden["labeled"].any() and hidden["first"].tolist() == train.x[[0, 3], 0].tolist()
        tested = aside.everyone().on("test").ask(looks)  # a score needs them
        assert tested["labeled"].all() and tested["first"].tolist() == test.x[[0, 2], 0].tolist()
        assert tested["rows"].tolist() == [2, 2]
    assert federation.everyone().ask(looks, into=Each("labeled"))["labeled"].all()


def test_inputs_for_each_client_reach_it_in_whatever_shard_it_lives() -> None:
    store = clients([2, 5, 3, 4, 1])
    cohort = simulate(store, shards=3).cohort([4, 0, 3, 2])
    values = torch.tensor([[4.0], [0.0], [3.0], [2.0]])
    assert torch.equal(cohort.ask(doubled, mean=each(values.expand(4, 3)))["value"][:, 0], 2 * values[:, 0])
