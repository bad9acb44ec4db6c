"""An array that a shard has from an earlier ask is named by its digest and not sent again."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.core.helpers import clients, scaled
from tests.runtime import problems
from tests.runtime.pipe import Pipe, Remote
from tests.runtime.test_journal import request, shard
from tests.runtime.test_journal import total as total_of
from unalike import Federation, Gaussian, State, Sum, send, simulate, task, train
from unalike.core import wire
from unalike.core.client import Client
from unalike.core.request import Program, ReleaseName, Reply, Request
from unalike.core.task import Sent
from unalike.core.wire import ArrayStore, Lacking, digest
from unalike.runs import checkpoint
from unalike.runtime.shard.journal import Journal
from unalike.runtime.shard.shard import Shard


def message(value: torch.Tensor) -> bytes:
    return wire.encode({"": value})


def test_a_digest_is_of_content_type_and_shape() -> None:
    value = torch.arange(6.0)
    assert digest(value) == digest(value.clone()) == digest(torch.arange(12.0).reshape(6, 2)[:, 0] / 2)
    others = [value.double(), value.reshape(2, 3), value.int(), value + 1, value[:5], value.bfloat16()]
    assert len({digest(value), *map(digest, others)}) == 7


def test_a_store_keeps_the_latest_arrays_up_to_its_bound() -> None:
    store, arrays = ArrayStore(most=100), [torch.full((10,), float(i)) for i in range(4)]  # of 40 bytes
    names = [digest(one) for one in arrays]
    for one in arrays[:2]:
        store.take([digest(one)], [message(one)])
    assert torch.equal(store.take([names[0]])[names[0]], arrays[0])  # the latest use counts
    store.take([names[2]], [message(arrays[2])])
    assert store.take([names[0]]) and store.take([names[2]])
    with pytest.raises(Lacking) as lacking:
        store.take([names[1], names[2], names[3]])
    assert lacking.value.digests == [names[1], names[3]]
    with pytest.raises(Lacking) as lacking:  # what was sent stays, although another array is lacking
        store.take([names[3], names[1]], [message(arrays[3])])
    assert lacking.value.digests == [names[1]] and store.take([names[3]])
    whole = store.take(names, [message(one) for one in arrays])  # an ask with more than the bound has them all
    assert list(whole) == names


def test_what_is_sent_under_a_wrong_name_is_not_taken() -> None:
    with pytest.raises(Lacking):
        ArrayStore().take([digest(torch.zeros(3))], [message(torch.ones(3))])


@task
def spoil(client: Client, factor: Tensor) -> Sent:
    """Changes its input in place."""
    return send(value=factor.sub_(5.0))


def test_a_task_that_changes_an_input_does_not_change_the_stored_array(tmp_path: Path) -> None:
    factor, one = torch.ones(3), clients([2])
    here = Journal(Shard({"train": one}, one.roster(), Program([spoil])), tmp_path)

    def ask(serial: int, *sent: bytes) -> list[float]:
        whole = replace(Request.decode(request(serial)), task="spoil", ids=torch.arange(1), shared={"factor": factor})
        whole = replace(whole, wanted=(ReleaseName("sum", ("value",)),), named={"factor": digest(factor)})
        replies = [Reply.decode(data) for data in here.answer(whole.head().encode(), *sent)]
        found: list[float] = replies[-1].partials[0].total.tolist()
        return found

    assert ask(1, message(factor)) == ask(2) == ask(3) == [-4.0] * 3


def test_a_journal_asks_again_before_it_charges(tmp_path: Path) -> None:
    step = torch.tensor(1.0)

    def head(serial: int) -> bytes:
        whole = Request.decode(request(serial))
        return replace(whole, named={"step": digest(step)}).head().encode()

    here = Journal(shard(), tmp_path)
    with pytest.raises(Lacking):
        list(here.answer(head(1)))
    assert not list(tmp_path.glob("*/*.charged"))
    first = list(here.answer(head(1), message(step)))
    assert total_of(first) == 3.0 and list(here.answer(head(1))) == first
    assert total_of(list(here.answer(head(2)))) == 6.0  # named, and not sent
    again = Journal(shard(), tmp_path)  # a shard that starts again has forgotten it, and what it answered it has not
    with pytest.raises(Lacking):
        list(again.answer(head(2)))
    assert total_of(list(again.answer(head(2), message(step)))) == 6.0
    assert total_of(list(again.answer(head(3)))) == 9.0


@pytest.mark.long
def test_an_embedding_travels_once_a_round_to_each_shard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("unalike.core.federation._LARGE", 1)
    problems.write(tmp_path / "rows.npz")
    method = problems.method_of("pefll")
    with contextlib.ExitStack() as stack:
        remotes = [stack.enter_context(contextlib.closing(Remote())) for _ in range(2)]
        runtime = Pipe(remotes, problems.__name__, "pefll", tmp_path / "rows.npz")
        found = train(method, Federation(runtime, seed=3), 2)
        sent = [remote.sent.count("embedding") for remote in remotes]
    assert sent == [2, 2]  # in two rounds of two asks with it
    here = simulate(problems.read(tmp_path / "rows.npz"), shards=2, block=1).runtime
    expected = train(method, Federation(here, seed=3), 2)
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, atol=1e-5, rtol=1e-4)


def test_the_meter_counts_what_travels() -> None:
    federation, factor = simulate(clients([2] * 6, features=300)), torch.ones(300)
    federation.cohort([0, 1]).ask(scaled, factor=factor)
    assert federation.traffic.down["factor"] == 2 * 1200
    federation.cohort([1, 2, 3]).ask(scaled, factor=factor.clone())
    assert federation.traffic.down["factor"] == 4 * 1200 + 32  # client 1 gets the digest
    federation.cohort([1]).ask(scaled, factor=2 * factor)
    assert federation.traffic.down["factor"] == 5 * 1200 + 32
    assert federation.traffic.down["shift"] == 0


def test_the_meter_does_not_tell_who_was_drawn() -> None:
    def bytes_of(seed: int) -> list[int]:
        federation, factor = simulate(clients([2] * 40, features=300), seed=seed), torch.ones(300)
        counted = []
        for number in (1, 2):
            cohort = federation.begin_round(number).sample(0.5, poisson=True)
            for _ in range(2):
                cohort.ask(scaled, into=Sum("value", clip=1.0, noise=Gaussian(1.0)), factor=factor)
                counted.append(federation.traffic.down["factor"])
        return counted

    assert bytes_of(0) == bytes_of(1) == bytes_of(2) == [24000, 24640, 48640, 49280]


def test_the_meter_does_not_tell_that_nobody_was_drawn() -> None:
    counted = []
    for count in (0, 20):
        federation, factor = simulate(clients([2] * 40, features=300), noise="seeded"), torch.ones(300)
        drawn = federation.begin_round(1).sample(0.5, poisson=True)
        cohort = replace(drawn, positions=torch.arange(count))
        for _ in range(2):
            cohort.ask(scaled, into=Sum("value", clip=1.0, noise=Gaussian(1.0)), factor=factor)
        counted.append(dict(federation.traffic.down))
    assert counted[0] == counted[1]


def test_a_client_that_failed_is_not_known_to_have_an_array() -> None:
    federation, factor = simulate(clients([2] * 4, features=300), drop=lambda client, _: client == 2), torch.ones(300)
    for _ in range(2):
        federation.everyone().ask(scaled, factor=factor)
    assert federation.traffic.down["factor"] == 4 * 1200 + 1200 + 3 * 32


def test_a_run_that_goes_on_from_a_checkpoint_counts_the_bytes_of_one_that_never_stopped(tmp_path: Path) -> None:
    factor = torch.ones(300)

    def rounds(federation: Federation, *numbers: int) -> Federation:
        for number in numbers:
            federation.begin_round(number)
            for _ in range(2):
                federation.everyone().ask(scaled, factor=factor)
        return federation

    def begin() -> Federation:
        return simulate(clients([2] * 4, features=300), noise="seeded")

    whole, first, second = rounds(begin(), 1, 2), rounds(begin(), 1), begin()
    checkpoint.save(tmp_path, State(), first)
    saved = checkpoint.load(tmp_path)
    assert saved is not None
    saved.restore(second)
    assert rounds(second, 2).traffic == whole.traffic
    assert whole.traffic.down["factor"] == 2 * 4 * (1200 + 32)
